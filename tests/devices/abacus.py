"""The printer of an imaginary device, the Abacus: its kernels are Python over arrays of a whole index space.

`docs/devices.md` shows this file. The text of a kernel is a function `kernel` over a *unit*, the device's library.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fxwrap.devices import DeviceSpec, KernelLanguage
from fxwrap.loop_ir import (
    OPERATIONS,
    Atom,
    Axis,
    Compute,
    Constant,
    DeviceAssert,
    FloorDivide,
    Index,
    IndexValue,
    IndirectIndex,
    Kernel,
    Load,
    Modulo,
    Operation,
    Reduce,
    ReductionResult,
    Scan,
    SizeAtom,
    Store,
    SymbolicScalar,
)
from fxwrap.printers import KernelRequest, PrintedKernel
from fxwrap.symbolic import PythonPrinter, Size, symbol_kind
from fxwrap.wrapper_ir import DTYPES

LANGUAGE = KernelLanguage("abacus", file_extension="py")

SPEC = DeviceSpec(
    "cpu", kernel_language="abacus", alignment=32, memory_spaces=("", "beads"), supports_multiple_devices=False,
    asserts_raise=True, cpu_rounding=True, supports_all_atomics=True, random_state_bytes=5056,
)  # fmt: skip
"""It stands in for the CPU: torch has its memory and operators, and eager's results are those to compare with."""

_ENTRIES = {dtype: name for name, dtype in DTYPES.items()}
_NUMBERS = {"int": "i64", "float": "f64", "bool": "i1"}


def print_abacus(request: KernelRequest) -> Sequence[partial[PrintedKernel]]:
    """Returns the one way to print a kernel."""
    return (partial(_printed, request.kernel),)


def _printed(kernel: Kernel) -> PrintedKernel:
    buffers = (*kernel.inputs, *kernel.outputs)
    names = {buffer.name: f"b{number}" for number, buffer in enumerate(buffers)}
    symbols = [symbol.name for symbol in kernel.symbols]
    writer = _Writer(kernel, names)
    axes = (*kernel.axes, *kernel.reduced)
    sizes = "".join([f"{_size(axis.size)}, " for axis in axes])
    lines = [f"def kernel(unit, {', '.join([*names.values(), *symbols])}):"]
    lines += [f"    {name} = unit.flat({name})" for name in names.values()]
    lines += [f"    space = unit.space(({sizes}), {len(kernel.axes)})", "    if space.is_empty:", "        return"]
    lines += [f"    {axis.name} = space.axis({number})" for number, axis in enumerate(axes)]
    lines += [f"    {writer.line(number, item)}" for number, item in enumerate(kernel.operations)]
    entries = ["*" + ("i1" if _ENTRIES[buffer.dtype] == "bool" else _ENTRIES[buffer.dtype]) for buffer in buffers]
    entries += [_NUMBERS[symbol_kind(name)] for name in symbols]
    return PrintedKernel(LANGUAGE.name, "\n".join(lines) + "\n", tuple(entries))


def _size(size: Size) -> str:
    return str(size) if isinstance(size, int) else PythonPrinter().print(size)


class _Writer:
    """Writes the statement of each operation; `v3` is the result of operation 3."""

    def __init__(self, kernel: Kernel, names: dict[str, str]) -> None:
        self.kernel = kernel
        self.names = names

    def line(self, number: int, operation: Operation) -> str:
        """Returns one statement."""
        match operation:
            case Store():
                varies = self.kernel.varying[number]
                mask = "None" if operation.mask is None else f"v{operation.mask}"
                operands = f"{self.names[operation.buffer]}, {self.index(operation.index)}, v{operation.value}"
                return f"space.store({operands}, {mask}, {operation.mode!r}, {varies})"
            case DeviceAssert():
                mask = "None" if operation.mask is None else f"v{operation.mask}"
                return f"space.require(v{operation.condition}, {mask}, {operation.error!r}, {operation.message!r})"
            case _:
                return f"v{number} = {self.value(operation)}"

    def value(self, operation: Operation) -> str:
        """Returns the expression of an operation."""
        match operation:
            case Load():
                place = f"{self.names[operation.buffer]}, {self.index(operation.index)}"
                hidden = "" if operation.mask is None else f", v{operation.mask}, {operation.other!r}"
                return f"space.load({place}{hidden})"
            case Constant():
                return f"unit.number({operation.text}, {operation.dtype})"
            case SymbolicScalar():
                return f"unit.number({PythonPrinter().print(operation.expression)}, {operation.dtype})"
            case IndexValue():
                return f"unit.number({self.index(operation.index)}, {operation.dtype})"
            case Compute():
                operands = [f"v{operand}" for operand in operation.operands]
                dtypes = [str(operation.dtype)] if OPERATIONS[operation.name].result == "declared" else []
                return f"unit.{operation.name}({', '.join([*operands, *dtypes])})"
            case Reduce():
                axes = [*self.kernel.axes, *self.kernel.reduced]
                places = [axes.index(axis) for axis in self.kernel.reduced_by(operation)]
                return f"space.reduce({operation.kind!r}, v{operation.operands[0]}, {places})"
            case Scan():
                return f"space.scan({operation.kind!r}, v{operation.operands[0]})"
            case ReductionResult():
                return f"v{operation.operation}[{operation.position}]"
            case Store() | DeviceAssert():
                raise AssertionError("it has no value")

    def index(self, index: Index) -> str:
        """Returns an index expression."""
        terms = []
        for monomial, coefficient in index.terms:
            factors = [] if coefficient == 1 and monomial else [str(coefficient)]
            terms.append("*".join([*factors, *map(self.atom, monomial)]))
        return " + ".join(terms) or "0"

    def atom(self, atom: Atom) -> str:
        """Returns a factor of an index expression."""
        match atom:
            case Axis():
                return atom.name
            case SizeAtom():
                return f"({PythonPrinter().print(atom.expression)})"
            case IndirectIndex():
                return f"unit.position(v{atom.operation})"
            case FloorDivide():
                return f"(({self.index(atom.base)}) // ({self.index(atom.divisor)}))"
            case Modulo():
                return f"(({self.index(atom.base)}) % ({self.index(atom.divisor)}))"
