"""Kernels of the loop IR: an index space, and a body of typed scalar operations that ends in stores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias

import sympy
import torch
from typing_extensions import assert_never

from fxwrap.errors import FxwrapError
from fxwrap.loop_ir.atoms import Axis, IndirectIndex, SizeAtom
from fxwrap.loop_ir.index import Atom, Index, IndexLike, as_index
from fxwrap.loop_ir.index_text import print_index
from fxwrap.loop_ir.operations import REDUCTIONS, SCANS, CombineSpec
from fxwrap.symbolic import Size, print_expr, product
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


ASSERT_ERRORS: Mapping[str, type[Exception]] = {"index": IndexError, "runtime": RuntimeError}
"""The exceptions that failed device assertions raise, as eager does for the same operators."""

ValueOperation: TypeAlias = Load | Constant | SymbolicScalar | IndexValue | Compute | Reduce | Scan | ReductionResult
Operation: TypeAlias = ValueOperation | Store | DeviceAssert


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor argument of a kernel. `extent` is the distance from its first to its last element, plus one.

    `is_ascending` states that no element is less than the one before it, as the groups of sorted rows.
    """

    name: str
    dtype: torch.dtype
    extent: Size
    is_ascending: bool = False


class KernelError(FxwrapError):
    """An invalid kernel of the loop IR; the message names the operation."""


class ScheduleError(KernelError):
    """A contraction that a printer has no schedule for; the message says which it has."""


@dataclass(frozen=True)
class Kernel:
    """A kernel: runs the operations in order for every element of the parallel `axes`, outermost first.

    Operations refer to each other by position. Those that depend on `reduced` axes run for each of their elements too;
    reductions run over all of them, or over those that they name, in row-major order. `inputs` are only read.
    `outputs` are written and may be read: each element only by the iteration that writes it, before the write.
    """

    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    operations: tuple[Operation, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.reduced, self.inputs, self.outputs, self.operations))

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """The stores, in order."""
        return tuple([operation for operation in self.operations if isinstance(operation, Store)])

    @cached_property
    def combines_values(self) -> bool:
        """Whether a store combines its values with those in memory, where several iterations may reach an element."""
        return any(store.mode != "set" for store in self.stores)

    @cached_property
    def accesses(self) -> tuple[Load | Store, ...]:
        """The loads and stores, in order."""
        return tuple([operation for operation in self.operations if isinstance(operation, Load | Store)])

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """The positions of the reductions."""
        return tuple([position for position, item in enumerate(self.operations) if isinstance(item, Reduce)])

    @cached_property
    def scans(self) -> tuple[int, ...]:
        """The positions of the scans."""
        return tuple([position for position, item in enumerate(self.operations) if isinstance(item, Scan)])

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the positions of those that use its value, in order, one for each use."""
        users: list[list[int]] = [[] for _ in self.operations]
        for position, operation in enumerate(self.operations):
            for used in operands(operation):
                users[used].append(position)
        return tuple(map(tuple, users))

    @cached_property
    def value_axes(self) -> tuple[frozenset[Axis], ...]:
        """For each operation, the axes that its value, or the element that it stores, depends on."""
        result: list[frozenset[Axis]] = []
        for operation in self.operations:
            axes = frozenset(axis for index in indices(operation) for axis in index.axes())
            axes = axes.union(*[result[operand] for operand in operands(operation)])
            if isinstance(operation, Reduce):
                axes = axes.difference(self.reduced_by(operation))
            elif isinstance(operation, Scan):
                axes = axes.union(self.reduced)  # also of equal elements
            result.append(axes)
        return tuple(result)

    @cached_property
    def varying(self) -> tuple[bool, ...]:
        """For each operation, whether it depends on reduced axes."""
        return self.varying_along(self.reduced)

    def varying_along(self, axes: Collection[Axis]) -> tuple[bool, ...]:
        """Returns for each operation whether it depends on some of the axes."""
        if not axes:
            return (False,) * len(self.operations)
        return tuple([not own.isdisjoint(axes) for own in self.value_axes])

    def backward_slice(
        self, targets: Iterable[int], known: Container[int] = (), within: Sequence[bool] | None = None
    ) -> set[int]:
        """Returns the operations that targets are computed from, with the targets, without known ones.

        Of their transitive operands, only those that `within` selects are followed.
        """
        needed, pending = set[int](), list(targets)
        while pending:
            position = pending.pop()
            if position in needed or position in known:
                continue
            needed.add(position)
            used = operands(self.operations[position])
            pending += used if within is None else [item for item in used if within[item]]
        return needed

    def forward_slice(self, sources: Iterable[int], known: Container[int] = ()) -> set[int]:
        """Returns the operations that are computed from sources, with the sources, other than through known ones."""
        dependents = set(sources)
        for position, operation in enumerate(self.operations):
            if position not in known and not dependents.isdisjoint(operands(operation)):
                dependents.add(position)
        return dependents

    @property
    def reduces_in_steps(self) -> bool:
        """Whether a reduction reduces some of the reduced axes only."""
        return any(isinstance(item, Reduce) and item.axes not in ((), self.reduced) for item in self.operations)

    def reduced_by(self, operation: Reduce) -> tuple[Axis, ...]:
        """Returns the axes that a reduction of this kernel reduces."""
        return operation.axes or self.reduced

    @cached_property
    def address_axes(self) -> tuple[frozenset[Axis], ...]:
        """For each operation, the axes that its address depends on, indirect indices included."""
        result: list[frozenset[Axis]] = []
        for operation in self.operations:
            own = frozenset(axis for index in indices(operation) for axis in index.axes())
            result.append(own.union(*[self.value_axes[position] for position in _indirect_operands(operation)]))
        return tuple(result)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """For each operation, the number of successive reductions that must complete before it can run."""
        stages: list[int] = []
        for operation in self.operations:
            stage = 0
            for operand in operands(operation):
                after = isinstance(self.operations[operand], Reduce)
                stage = max(stage, stages[operand] + after)
            stages.append(stage)
        return tuple(stages)

    @property
    def is_multi_pass(self) -> bool:
        """Whether an operation that varies along the row depends on a reduction of it, which needs a second pass."""
        return any(stage > 0 and varies for stage, varies in zip(self.stages, self.varying, strict=True))

    @cached_property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The symbols of indices, axes and symbolic scalars, sorted by name."""
        symbols: set[sympy.Symbol] = set()
        for axis in (*self.axes, *self.reduced):
            symbols |= _symbols(as_index(axis.size))
        for operation in self.operations:
            for index in indices(operation):
                symbols |= _symbols(index)
            if isinstance(operation, SymbolicScalar):
                symbols |= set(operation.expression.free_symbols)
        return tuple(sorted(symbols, key=lambda symbol: str(symbol.name)))

    @cached_property
    def uncompared_fields(self) -> tuple[str, ...]:
        """The fields that equality ignores: origins, and the text of `other` of masked loads."""
        others = [repr(operation.other) for operation in self.operations if isinstance(operation, Load)]
        return (*[operation.origin for operation in self.operations], *others)

    @property
    def count(self) -> Size:
        """The number of elements of the parallel axes."""
        return product(axis.size for axis in self.axes)

    @property
    def reduced_count(self) -> Size:
        """The number of elements of the reduced axes."""
        return product(axis.size for axis in self.reduced)

    def __str__(self) -> str:
        return print_kernel(self)


def _symbols(index: Index) -> set[sympy.Symbol]:
    symbols: set[sympy.Symbol] = set()
    for atom in index.atoms():
        if isinstance(atom, SizeAtom):
            symbols |= atom.expression.free_symbols
    return symbols


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
    indirect = _indirect_operands(operation)
    return (*used, *sorted(indirect)) if indirect else used


def _indirect_operands(operation: Operation) -> list[int]:
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


def _buffer_text(buffer: Buffer) -> str:
    text = f"{buffer.name}: {DTYPE_NAMES[buffer.dtype]}[{print_expr(buffer.extent)}]"
    return f"{text} ascending" if buffer.is_ascending else text


def print_kernel(kernel: Kernel) -> str:
    """Returns a kernel's text, one operation per line, with its origin as a comment."""
    space, reduced = [
        ", ".join([f"{axis.name}: {print_expr(axis.size)}" for axis in axes]) for axes in (kernel.axes, kernel.reduced)
    ]
    buffers, outs = [", ".join(map(_buffer_text, items)) for items in (kernel.inputs, kernel.outputs)]
    head = f"kernel({buffers}) -> ({outs}) for [{space}]" + (f" reduce [{reduced}]" if kernel.reduced else "")
    lines = []
    for position, operation in enumerate(kernel.operations):
        name = "" if isinstance(operation, Store | DeviceAssert) else f"%{position} = "
        comment = f"  # {operation.origin}" if operation.origin else ""
        lines.append(f"  {name}{print_operation(operation)}{comment}\n")
    return head + " {\n" + "".join(lines) + "}\n"
