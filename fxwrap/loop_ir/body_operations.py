"""The operations of a kernel's body: typed scalar operations, by position, and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import sympy
import torch
from typing_extensions import assert_never

from fxwrap.loop_ir.atoms import Axis, IndirectIndex
from fxwrap.loop_ir.index import Atom, Index, IndexLike, as_index
from fxwrap.loop_ir.index_text import print_index
from fxwrap.loop_ir.operations import REDUCTIONS, SCANS, CombineSpec
from fxwrap.symbolic import print_expr
from fxwrap.torch_compat import DTYPE_NAMES


@dataclass(frozen=True, slots=True)
class Load:
    """The element of a buffer at offset `index`; `other` where the bool operation `mask` is false."""

    buffer: str
    index: Index
    dtype: torch.dtype
    mask: int | None = None
    other: float | int | bool = 0
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Constant:
    """A number in a compute dtype. Constants compare by text: 0.0 differs from -0.0, and NaN equals NaN."""

    value: float | int | bool = field(compare=False)
    dtype: torch.dtype
    origin: str = field(default="", compare=False)
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", repr(self.value))


@dataclass(frozen=True, slots=True)
class SymbolicScalar:
    """A scalar argument of the launch: int64, float64 or bool by its expression's kind."""

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
    """An operation of `OPERATIONS`, applied to operations by position."""

    name: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduction over reduced axes. `ReductionResult` selects one of several results.

    `axes` are the axes that it reduces, in the kernel's order; () means all. Its result varies over the other axes of
    its operand. A sum of products is a matmul of half precision if it has an `operand_precision`: the dtype to which
    printers may round the factors, which eager mode has in this dtype. Without one, factors are not rounded.
    """

    kind: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    origin: str = field(default="", compare=False)
    axes: tuple[Axis, ...] = ()
    operand_precision: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan along the only reduced axis. `ReductionResult` selects one of several results."""

    kind: str
    operands: tuple[int, ...]
    dtype: torch.dtype
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ReductionResult:
    """One of several results of a reduction or scan."""

    operation: int
    position: int
    dtype: torch.dtype
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Store:
    """Writes a value of the buffer's dtype where `mask` is true. `mode` is one of `STORE_MODES`.

    It runs once for each element of the parallel axes and of the reduced axes that its index or value depends on.
    """

    buffer: str
    index: Index
    value: int
    mask: int | None = None
    mode: str = "set"
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class DeviceAssert:
    """Fails the launch with a message where a bool operation is false and `mask`, if any, is true.

    The kernel runs to its end. On a CPU the launch raises the class of `error` in ASSERT_ERRORS (Triton's interpreter
    always raises IndexError); on a GPU it is a device-side assertion, like those of eager's kernels.
    """

    condition: int
    message: str
    mask: int | None = None
    origin: str = field(default="", compare=False)
    error: str = "index"

    @property
    def printed_message(self) -> str:
        """The message with the operator that the assertion belongs to, if it is known."""
        return f"{self.message}, in {self.origin}" if self.origin else self.message


ASSERT_ERRORS: Mapping[str, type[Exception]] = {"index": IndexError, "runtime": RuntimeError}
"""The exceptions that failed device assertions raise, as eager does for the same operators."""

ValueOperation: TypeAlias = Load | Constant | SymbolicScalar | IndexValue | Compute | Reduce | Scan | ReductionResult
Operation: TypeAlias = ValueOperation | Store | DeviceAssert


def operands(operation: Operation) -> tuple[int, ...]:
    """Returns the positions of the operations that one uses: operands, masks and indirect indices."""
    used: tuple[int, ...]
    match operation:
        case Compute() | Reduce() | Scan():
            return operation.operands
        case Load():
            used = () if operation.mask is None else (operation.mask,)
        case Constant() | SymbolicScalar():
            return ()
        case IndexValue():
            used = ()
        case ReductionResult():
            return (operation.operation,)
        case Store():
            used = (operation.value,) if operation.mask is None else (operation.value, operation.mask)
        case DeviceAssert():
            return (operation.condition,) if operation.mask is None else (operation.condition, operation.mask)
        case _:
            assert_never(operation)
    indirect = indirect_operands(operation)
    return (*used, *sorted(indirect)) if indirect else used


def indirect_operands(operation: Operation) -> list[int]:
    """Returns the positions of the operations that compute the indirect indices of one."""
    if not isinstance(operation, Load | Store | IndexValue):
        return []
    return [atom.operation for atom in operation.index.atoms() if isinstance(atom, IndirectIndex)]


def indices(operation: Operation) -> Iterator[Index]:
    """Yields the index expressions of an operation."""
    if isinstance(operation, Load | Store | IndexValue):
        yield operation.index


def map_operation(
    operation: Operation, position: Callable[[int], int], index: Callable[[Index], Index] | None = None
) -> Operation:
    """Returns an operation with `position` applied to its operands and `index` to its index expressions.

    By default, `position` is applied to the indirect indices in them.
    """
    index = partial(renumber_index, position, {}) if index is None else index
    origin = operation.origin
    match operation:
        case Load():
            mask = None if operation.mask is None else position(operation.mask)
            return Load(operation.buffer, index(operation.index), operation.dtype, mask, operation.other, origin)
        case IndexValue():
            return IndexValue(index(operation.index), operation.dtype, origin)
        case Constant() | SymbolicScalar():
            return operation
        case Compute():
            return Compute(operation.name, tuple(map(position, operation.operands)), operation.dtype, origin)
        case Reduce():
            used = tuple(map(position, operation.operands))
            axes = tuple(dict.fromkeys([axis for old in operation.axes for axis in index(as_index(old)).axes()]))
            return Reduce(operation.kind, used, operation.dtype, origin, axes, operation.operand_precision)
        case Scan():
            return Scan(operation.kind, tuple(map(position, operation.operands)), operation.dtype, origin)
        case ReductionResult():
            return ReductionResult(position(operation.operation), operation.position, operation.dtype, origin)
        case Store():
            mask = None if operation.mask is None else position(operation.mask)
            value = position(operation.value)
            return Store(operation.buffer, index(operation.index), value, mask, operation.mode, origin)
        case DeviceAssert():
            mask = None if operation.mask is None else position(operation.mask)
            return DeviceAssert(position(operation.condition), operation.message, mask, origin, operation.error)
        case _:
            assert_never(operation)


def renumber_index(position: Callable[[int], int], mapping: Mapping[Atom, IndexLike], index: Index) -> Index:
    """Returns an index with atoms replaced, and `position` applied to its indirect indices."""
    indirect = [atom for atom in index.atoms() if isinstance(atom, IndirectIndex)]
    return index.substitute(
        {**mapping, **{atom: IndirectIndex(position(atom.operation), atom.size) for atom in indirect}}
    )


def combine_spec(operation: Reduce | Scan) -> CombineSpec:
    """Returns the specification of a reduction or scan."""
    return (REDUCTIONS if isinstance(operation, Reduce) else SCANS)[operation.kind]


def operation_dtype(operation: Operation) -> torch.dtype:
    """Returns the dtype of an operation's value."""
    assert not isinstance(operation, Store | DeviceAssert), "stores and assertions have no value"
    return operation.dtype


def print_operation(operation: Operation) -> str:
    """Returns the text of an operation without its position."""
    masked = "" if getattr(operation, "mask", None) is None else f" if %{operation.mask}"  # type: ignore[union-attr]
    if isinstance(operation, Store):
        mode = "" if operation.mode == "set" else f" {operation.mode}"
        return f"store{mode} {operation.buffer}[{print_index(operation.index)}] %{operation.value}{masked}"
    if isinstance(operation, DeviceAssert):
        error = "" if operation.error == "index" else f" {operation.error}"
        return f"require{error} %{operation.condition} {operation.message!r}{masked}"
    return f"{DTYPE_NAMES[operation.dtype]} {_value_text(operation, masked)}"


def _value_text(operation: ValueOperation, masked: str) -> str:
    match operation:
        case Load():
            other = f" else {operation.other}" if masked else ""
            return f"load {operation.buffer}[{print_index(operation.index)}]{masked}{other}"
        case Constant():
            return f"{operation.value}"
        case SymbolicScalar():
            return f"number {print_expr(operation.expression)}"
        case IndexValue():
            return f"index {print_index(operation.index)}"
        case Compute():
            return f"{operation.name} {_operand_list(operation.operands)}"
        case Reduce():
            over = "".join([f" {axis.name}" for axis in operation.axes])
            precision = operation.operand_precision
            factors = "" if precision is None else f" of {DTYPE_NAMES[precision]}"
            suffix = f" over{over}" if over else ""
            return f"reduce {operation.kind} {_operand_list(operation.operands)}{factors}{suffix}"
        case Scan():
            return f"scan {operation.kind} {_operand_list(operation.operands)}"
        case ReductionResult():
            return f"part {operation.position} %{operation.operation}"
        case _:
            assert_never(operation)


def _operand_list(used: tuple[int, ...]) -> str:
    return " ".join([f"%{position}" for position in used])
