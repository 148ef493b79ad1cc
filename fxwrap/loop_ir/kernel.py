"""Kernels of the loop IR: an index space, and a body of typed scalar operations that ends in stores."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy
import torch

from fxwrap.errors import FxwrapError
from fxwrap.loop_ir.atoms import Axis, SizeAtom, count_points
from fxwrap.loop_ir.body_operations import (
    DeviceAssert,
    Load,
    Operation,
    Reduce,
    Scan,
    Store,
    SymbolicScalar,
    indices,
    indirect_operands,
    operands,
    print_operation,
)
from fxwrap.loop_ir.index import Index, as_index
from fxwrap.symbolic import Size, print_expr
from fxwrap.torch_compat import DTYPE_NAMES


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
            result.append(own.union(*[self.value_axes[position] for position in indirect_operands(operation)]))
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
        return count_points(self.axes)

    @property
    def reduced_count(self) -> Size:
        """The number of elements of the reduced axes."""
        return count_points(self.reduced)

    def __str__(self) -> str:
        return print_kernel(self)


def _symbols(index: Index) -> set[sympy.Symbol]:
    symbols: set[sympy.Symbol] = set()
    for atom in index.atoms():
        if isinstance(atom, SizeAtom):
            symbols |= atom.expression.free_symbols
    return symbols


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
