"""Kernels of the loop IR: an index space, and a body of typed scalar operations that ends in stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import sympy
import torch
from typing_extensions import assert_never

from fxwrap.errors import FxwrapError
from fxwrap.loop_ir.index import Axis, Gathered, Index, SizeAtom, as_index
from fxwrap.loop_ir.operations import (
    KERNEL_DTYPES,
    OPERATIONS,
    POSITION_RESULTS,
    REDUCTIONS,
    SCANS,
    STORE_MODES,
    CombineSpec,
)
from fxwrap.symbolic import Size, product


@dataclass(frozen=True, slots=True)
class Load:
    """An element of a buffer, `index` elements from its start; `other` where the bool operation `mask` is false."""

    buffer: str
    index: Index
    dtype: torch.dtype
    mask: int | None = None
    other: float | int | bool = 0
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Constant:
    """A number. Its dtype is one that arithmetic happens in. Compared by its text: 0.0 is not -0.0, and NaN is NaN."""

    value: float | int | bool = field(compare=False)
    dtype: torch.dtype
    origin: str = field(default="", compare=False)
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", repr(self.value))


@dataclass(frozen=True, slots=True)
class SizeValue:
    """A number of the program, a scalar argument of the launch: int64, float64 or bool by its expression's kind."""

    expression: sympy.Basic
    dtype: torch.dtype
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class IndexValue:
    """The value of an index expression, int64."""

    index: Index
    dtype: torch.dtype = torch.int64
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Compute:
    """A row of `OPERATIONS` applied to operations, named by position."""

    name: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduction over all reduced axes; where it has several results, `Part` takes them."""

    kind: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan along the one reduced axis; where it has several results, `Part` takes them."""

    kind: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Part:
    """One result of a reduction or scan that has several."""

    operation: int
    position: int
    dtype: torch.dtype
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Store:
    """Writes a value, which has the buffer's dtype, where `mask` is true; `mode` is one of `STORE_MODES`.

    It happens once for each element of the axes that its index and value depend on, parallel axes always included.
    """

    buffer: str
    index: Index
    value: int
    mask: int | None = None
    mode: str = "set"
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Require:
    """Makes the launch fail with a message where a bool operation is false, and `mask`, if there is one, is true.

    The kernel runs on to its end. On a CPU the launch raises the class that REQUIREMENT_ERRORS has for `error`
    (Triton's interpreter always IndexError); on a GPU it is a device-side assertion, as it is for eager's kernels.
    """

    condition: int
    message: str
    mask: int | None = None
    origin: str = field(default="", compare=False)
    error: str = "index"


REQUIREMENT_ERRORS: Mapping[str, type[Exception]] = {"index": IndexError, "runtime": RuntimeError}
"""What is raised where a requirement does not hold: eager raises the one or the other, by operator."""

Operation: TypeAlias = Load | Constant | SizeValue | IndexValue | Compute | Reduce | Scan | Part | Store | Require


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor a kernel is given: its first element's address. `extent` is how many elements it reaches over."""

    name: str
    dtype: torch.dtype
    extent: Size


class KernelError(FxwrapError):
    """A kernel of the loop IR breaks a rule; the message names the operation."""


@dataclass(frozen=True)
class Kernel:
    """A kernel: for every element of the parallel `axes`, outermost first, run the operations in order.

    Operations name each other by position. What depends on `reduced` axes happens for each of their elements too;
    reductions run over all of them, row-major. `inputs` are only read; `outputs` are written and may be read, each
    element only by the iteration that writes it, before it does.
    """

    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    operations: tuple[Operation, ...]

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """The stores, in order."""
        return tuple([operation for operation in self.operations if isinstance(operation, Store)])

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """The positions of the reductions."""
        return tuple([position for position, item in enumerate(self.operations) if isinstance(item, Reduce)])

    @cached_property
    def scans(self) -> tuple[int, ...]:
        """The positions of the scans."""
        return tuple([position for position, item in enumerate(self.operations) if isinstance(item, Scan)])

    @cached_property
    def varying(self) -> tuple[bool, ...]:
        """For each operation, whether it depends on reduced axes."""
        found: list[bool] = []
        reduced = set(self.reduced)
        for operation in self.operations:
            if isinstance(operation, Reduce):
                found.append(False)
                continue
            own = any(not reduced.isdisjoint(index.axes()) for index in indices(operation))
            found.append(own or any(found[operand] for operand in operands(operation)))
        return tuple(found)

    @cached_property
    def addressed(self) -> tuple[frozenset[Axis], ...]:
        """For each operation, the axes that the place it reads or writes depends on, through positions it reads too."""
        depends: list[frozenset[Axis]] = []
        found: list[frozenset[Axis]] = []
        reduced = frozenset(self.reduced)
        for operation in self.operations:
            own = frozenset(axis for index in indices(operation) for axis in index.axes())
            gathered = [atom.operation for index in indices(operation) for atom in index.atoms()
                        if isinstance(atom, Gathered)]  # fmt: skip
            found.append(own.union(*[depends[position] for position in gathered]))
            all_of_it = own.union(*[depends[operand] for operand in operands(operation)])
            depends.append(all_of_it - reduced if isinstance(operation, Reduce) else all_of_it)
        return tuple(found)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """For each operation, how many reductions in a row must be complete before it can run."""
        found: list[int] = []
        for operation in self.operations:
            stage = 0
            for operand in operands(operation):
                after = isinstance(self.operations[operand], Reduce)
                stage = max(stage, found[operand] + after)
            found.append(stage)
        return tuple(found)

    @cached_property
    def numbers(self) -> tuple[sympy.Symbol, ...]:
        """The symbols that a launch passes, sorted by name: sizes in indices and axes, and numbers of the program."""
        found: set[sympy.Symbol] = set()
        for axis in (*self.axes, *self.reduced):
            found |= _symbols(as_index(axis.size))
        for operation in self.operations:
            for index in indices(operation):
                found |= _symbols(index)
            if isinstance(operation, SizeValue):
                found |= set(operation.expression.free_symbols)
        return tuple(sorted(found, key=lambda symbol: str(symbol.name)))

    @cached_property
    def details(self) -> tuple[str, ...]:
        """What kernels that compare equal may differ in: origins, and how numbers outside of masks are written."""
        others = [repr(operation.other) for operation in self.operations if isinstance(operation, Load)]
        return (*[operation.origin for operation in self.operations], *others)

    @property
    def count(self) -> Size:
        """How many elements the parallel axes have."""
        return product(axis.size for axis in self.axes)

    @property
    def reduced_count(self) -> Size:
        """How many elements the reduced axes have."""
        return product(axis.size for axis in self.reduced)

    def __str__(self) -> str:
        return print_kernel(self)


def _symbols(index: Index) -> set[sympy.Symbol]:
    found: set[sympy.Symbol] = set()
    for atom in index.atoms():
        if isinstance(atom, SizeAtom):
            found |= atom.expression.free_symbols
    return found


def operands(operation: Operation) -> tuple[int, ...]:
    """Returns the positions of the operations that one uses: operands, masks, and gathered parts of its index."""
    used: tuple[int, ...]
    match operation:
        case Load():
            used = () if operation.mask is None else (operation.mask,)
        case Constant() | SizeValue() | IndexValue():
            used = ()
        case Compute() | Reduce() | Scan():
            used = operation.operands
        case Part():
            used = (operation.operation,)
        case Store():
            used = (operation.value,) if operation.mask is None else (operation.value, operation.mask)
        case Require():
            used = (operation.condition,) if operation.mask is None else (operation.condition, operation.mask)
        case _:
            assert_never(operation)
    gathered = [atom.operation for index in indices(operation) for atom in index.atoms() if isinstance(atom, Gathered)]
    return (*used, *sorted(gathered)) if gathered else used


def indices(operation: Operation) -> Iterator[Index]:
    """Yields the index expressions of an operation."""
    if isinstance(operation, Load | Store | IndexValue):
        yield operation.index


def map_operation(
    operation: Operation, position: Callable[[int], int], index: Callable[[Index], Index]
) -> Operation:
    """Returns an operation with its operands renumbered and its index expressions replaced."""
    kept = operation.origin
    match operation:
        case Load():
            mask = None if operation.mask is None else position(operation.mask)
            return Load(operation.buffer, index(operation.index), operation.dtype, mask, operation.other, kept)
        case IndexValue():
            return IndexValue(index(operation.index), operation.dtype, kept)
        case Constant() | SizeValue():
            return operation
        case Compute():
            return Compute(operation.name, tuple(map(position, operation.operands)), operation.dtype, kept)
        case Reduce():
            return Reduce(operation.kind, tuple(map(position, operation.operands)), operation.dtype, kept)
        case Scan():
            return Scan(operation.kind, tuple(map(position, operation.operands)), operation.dtype, kept)
        case Part():
            return Part(position(operation.operation), operation.position, operation.dtype, kept)
        case Store():
            mask = None if operation.mask is None else position(operation.mask)
            value = position(operation.value)
            return Store(operation.buffer, index(operation.index), value, mask, operation.mode, kept)
        case Require():
            mask = None if operation.mask is None else position(operation.mask)
            return Require(position(operation.condition), operation.message, mask, kept, operation.error)
        case _:
            assert_never(operation)


def combine_spec(operation: Reduce | Scan) -> CombineSpec:
    """Returns the row of the table that a reduction or scan names."""
    return (REDUCTIONS if isinstance(operation, Reduce) else SCANS)[operation.kind]


def check_kernel(kernel: Kernel) -> Kernel:
    """Returns the kernel when it keeps the rules of the loop IR; else raises KernelError naming the operation."""
    buffers = {buffer.name: buffer for buffer in (*kernel.inputs, *kernel.outputs)}
    if len(buffers) != len(kernel.inputs) + len(kernel.outputs):
        raise KernelError("two buffers of a kernel have the same name")
    written = {buffer.name for buffer in kernel.outputs}
    allowed = {*kernel.axes, *kernel.reduced}
    for position, operation in enumerate(kernel.operations):
        reason = _misuse(kernel, position, operation, buffers, written)
        if reason is None and any(not index.axes() <= allowed for index in indices(operation)):
            reason = "its index has an axis that the kernel does not have"
        if reason is not None:
            raise KernelError(f"operation %{position} = {print_operation(operation)}: {reason}")
    return kernel


def _misuse(
    kernel: Kernel, position: int, operation: Operation, buffers: dict[str, Buffer], written: set[str]
) -> str | None:
    used = operands(operation)
    if any(not 0 <= operand < position for operand in used):
        return "it uses an operation that does not come before it"
    if any(isinstance(kernel.operations[operand], Store | Require) for operand in used):
        return "a store has no value"
    types = [_dtype(kernel.operations[operand]) for operand in used]
    match operation:
        case Load():
            buffer = buffers.get(operation.buffer)
            return None if buffer is not None and buffer.dtype is operation.dtype else "there is no such buffer"
        case Constant() | SizeValue() | IndexValue():
            return None if operation.dtype in KERNEL_DTYPES else f"kernels have no {operation.dtype}"
        case Compute():
            return _compute_misuse(operation, types)
        case Reduce() | Scan():
            return _combine_misuse(kernel, operation, types)
        case Part():
            source = kernel.operations[operation.operation]
            if not isinstance(source, Reduce | Scan) or not 0 <= operation.position < combine_spec(source).results:
                return "there is no such result"
            return None
        case Store():
            if operation.buffer not in written or buffers[operation.buffer].dtype is not types[0]:
                return "there is no output of this name and dtype"
            return None if operation.mode in STORE_MODES else f"there is no mode {operation.mode}"
        case Require():
            if operation.error not in REQUIREMENT_ERRORS:
                return f"there is no error {operation.error}"
            return None if types[0] is torch.bool else f"its condition is {types[0]}"
        case _:
            assert_never(operation)


def _compute_misuse(operation: Compute, types: list[torch.dtype]) -> str | None:
    spec = OPERATIONS.get(operation.name)
    if spec is None:
        return f"there is no operation {operation.name}"
    if len(types) != spec.operands:
        return f"it takes {spec.operands} operands, not {len(types)}"
    if operation.name == "where":
        if types[0] is not torch.bool:
            return f"its condition is {types[0]}"
        types = types[1:]
    if any(dtype is not types[0] for dtype in types):
        return f"its operands have different dtypes: {', '.join(map(str, types))}"
    if not spec.domain.accepts(types[0]):
        return f"it does not take {types[0]}"
    wanted = {"same": types[0], "bool": torch.bool, "given": operation.dtype}[spec.result]
    return None if operation.dtype is wanted else f"its result is {wanted}"


def _combine_misuse(kernel: Kernel, operation: Reduce | Scan, types: list[torch.dtype]) -> str | None:
    if operation.kind not in (REDUCTIONS if isinstance(operation, Reduce) else SCANS):
        return f"there is no such combination as {operation.kind}"
    spec = combine_spec(operation)
    if not kernel.reduced or (isinstance(operation, Scan) and len(kernel.reduced) != 1):
        return f"the kernel has {len(kernel.reduced)} reduced axes"
    if len(types) != spec.operands or not spec.domain.accepts(types[0]):
        return f"it does not take {', '.join(map(str, types))}"
    wanted = torch.int64 if (operation.kind, 0) in POSITION_RESULTS else types[0]
    return None if operation.dtype is wanted else f"its result is {wanted}"


def _dtype(operation: Operation) -> torch.dtype:
    assert not isinstance(operation, Store | Require), "a store has no value"
    return operation.dtype


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "bool",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip


def print_operation(operation: Operation) -> str:
    """Returns the text of one operation, without its position."""
    masked = "" if getattr(operation, "mask", None) is None else f" if %{operation.mask}"  # type: ignore[union-attr]
    match operation:
        case Load():
            other = f" else {operation.other}" if masked else ""
            return f"{_SHORT[operation.dtype]} load {operation.buffer}[{operation.index}]{masked}{other}"
        case Constant():
            return f"{_SHORT[operation.dtype]} {operation.value}"
        case SizeValue():
            return f"{_SHORT[operation.dtype]} number {operation.expression}"
        case IndexValue():
            return f"{_SHORT[operation.dtype]} index {operation.index}"
        case Compute():
            return f"{_SHORT[operation.dtype]} {operation.name} {_positions(operation.operands)}"
        case Reduce():
            return f"{_SHORT[operation.dtype]} reduce {operation.kind} {_positions(operation.operands)}"
        case Scan():
            return f"{_SHORT[operation.dtype]} scan {operation.kind} {_positions(operation.operands)}"
        case Part():
            return f"{_SHORT[operation.dtype]} part {operation.position} %{operation.operation}"
        case Store():
            mode = "" if operation.mode == "set" else f" {operation.mode}"
            return f"store{mode} {operation.buffer}[{operation.index}] %{operation.value}{masked}"
        case Require():
            error = "" if operation.error == "index" else f" {operation.error}"
            return f"require{error} %{operation.condition} {operation.message!r}{masked}"
        case _:
            assert_never(operation)


def _positions(used: tuple[int, ...]) -> str:
    return " ".join([f"%{position}" for position in used])


def print_kernel(kernel: Kernel) -> str:
    """Returns a kernel's text, one operation a line, each with the origin it has."""
    space = ", ".join([f"{axis.name}: {axis.size}" for axis in kernel.axes])
    reduced = ", ".join([f"{axis.name}: {axis.size}" for axis in kernel.reduced])
    buffers = ", ".join([f"{item.name}: {_SHORT[item.dtype]}[{item.extent}]" for item in kernel.inputs])
    outs = ", ".join([f"{item.name}: {_SHORT[item.dtype]}[{item.extent}]" for item in kernel.outputs])
    head = f"kernel({buffers}) -> ({outs}) for [{space}]" + (f" reduce [{reduced}]" if kernel.reduced else "")
    lines = []
    for position, operation in enumerate(kernel.operations):
        name = "" if isinstance(operation, Store | Require) else f"%{position} = "
        comment = f"  # {operation.origin}" if operation.origin else ""
        lines.append(f"  {name}{print_operation(operation)}{comment}\n")
    return head + " {\n" + "".join(lines) + "}\n"
