"""The reads and the cost of a definition, from one run of its body over symbolic axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import sympy
import torch

from fxwrap.caching import bounded_cache
from fxwrap.loop_ir import (
    OPERATIONS,
    Axis,
    Compute,
    Index,
    IndexLike,
    KernelBuilder,
    Scalar,
    SymbolicScalar,
    as_index,
    compute_dtype,
)
from fxwrap.lowering.fusion.definitions import (
    Definition,
    Indices,
    Pointwise,
    Reduced,
    ReductionSource,
    Scanned,
    ScanSource,
    Scattered,
    Stored,
    Viewed,
    fills_a_copy,
    unwrap_views,
)
from fxwrap.symbolic import Number, Size, product

IndexTuple: TypeAlias = tuple[Index, ...]
"""One index per dimension."""

Access: TypeAlias = Literal["inlined", "fetched", "unused"]
"""How a body gets an element of another definition: it is computed in place, read from memory, or never used.

An element is never used where only indices out of range lead to it: the background of a slice that covers a whole
tensor, read at an index of which the body cannot tell the range.
"""


@dataclass(frozen=True)
class Trace:
    """The iteration space of a definition, and the reads of one iteration.

    `axes` are the parallel axes, `parallel_rank` of them, then the reduced ones. `reads` are elements of other
    definitions, with views resolved; `cost` is the approximate number of instructions per element; `symbols` are those
    of its sizes and numbers.
    """

    axes: tuple[Axis, ...]
    parallel_rank: int
    reads: tuple[tuple[Definition, IndexTuple], ...]
    cost: int
    symbols: frozenset[sympy.Symbol] = frozenset()


def iteration_space(definition: Definition) -> tuple[tuple[Size, ...], int]:
    """Returns the sizes of a definition's iteration space, and how many of its axes are parallel."""
    match definition:
        case Reduced():
            source = definition.source
            return (*source.parallel, *source.reduced), len(source.parallel)
        case Scanned():
            sizes, dim = definition.sizes, definition.source.dim
            return (*sizes[:dim], *sizes[dim + 1 :], sizes[dim]), len(sizes) - 1
        case Scattered():
            return definition.space, len(definition.space)
        case _:
            return definition.sizes, len(definition.sizes)


def element_indices(definition: Definition, at: IndexTuple) -> IndexTuple:
    """Returns the indices of the element computed at a point of the iteration space (not for `Scattered`)."""
    if isinstance(definition, Scanned):
        dim = definition.source.dim
        return (*at[:dim], at[-1], *at[dim:-1])
    return at[: len(definition.sizes)] if isinstance(definition, Reduced) else at


def resolve_views(definition: Definition, indices: Indices) -> tuple[Definition, IndexTuple]:
    """Returns the base of a chain of views, and the indices of the element in it."""
    while isinstance(definition, Viewed):
        indices = definition.index_map(indices)
        definition = definition.base
    return definition, tuple([index if type(index) is Index else as_index(index) for index in indices])


class BodyBuilder:
    """Runs the bodies of definitions: inlines some, each once per element, and reads others with `fetch`.

    `access_of` returns how a body gets elements of a definition, `operator_of` the operator of a definition, which is
    recorded with its operations. `evaluated_definitions` are the definitions whose bodies ran, each after those inlined
    into it.
    """

    def __init__(
        self,
        access_of: Callable[[Definition], Access],
        fetch: Callable[[Definition, IndexTuple, Number], Scalar],
        operator_of: Callable[[Definition], str] = lambda _: "",
    ) -> None:
        self.body = KernelBuilder()
        self.operator_of = operator_of
        self._access_of = access_of
        self._fetch = fetch
        self._elements: dict[tuple[object, ...], Scalar] = {}
        self.evaluated_definitions: dict[Definition, None] = {}

    def load(self, definition: Definition, indices: Indices, other: Number = 0) -> Scalar:
        """Returns an element in its compute dtype; 0 for one that is never used."""
        if 0 in definition.sizes:
            return self.number(0, definition.dtype)
        definition, at = resolve_views(definition, indices)
        access = self._access_of(definition)
        if access == "unused":
            return self.number(0, definition.dtype)
        mask = self.body.mask.position if self.body.mask is not None else None
        key = (id(definition), at, mask, other if mask is not None else 0)
        element = self._elements.get(key)
        if element is None:
            if isinstance(definition, Pointwise) and access == "inlined":
                with self.body.origin_scope(self.operator_of(definition)):
                    element = definition.body(self, at)
                self.evaluated_definitions[definition] = None
            else:
                element = self._fetch(definition, at, other)
            self._elements[key] = element
        return element

    def number(self, number: Number | sympy.Basic, dtype: torch.dtype) -> Scalar:
        """Returns a number in the compute dtype of `dtype`."""
        computes = compute_dtype(dtype)
        if not isinstance(number, sympy.Basic):
            return self.body.constant(number, computes)
        if number.is_number:
            return self.body.constant(int(number) if number.is_Integer else float(number), computes)
        kind = torch.bool if number.is_Boolean else torch.int64 if number.is_integer else torch.float64
        return self.body.number(number, kind).to(computes)

    def run(self, definition: Definition, at: Sequence[IndexLike], parallel_rank: int) -> Scalar:
        """Runs a body at a point of its iteration space; for a reduction or scan, returns the operand's element."""
        with self.body.origin_scope(self.operator_of(definition)):
            value = self._run_body(definition, at, parallel_rank)
        self.evaluated_definitions[definition] = None
        return value

    def _run_body(self, definition: Definition, at: Sequence[IndexLike], parallel_rank: int) -> Scalar:
        sizes, _ = iteration_space(definition)
        if 0 in sizes:  # no element is computed; printers may move loads and assertions out of loops that never run
            combined = definition.source.dtype if isinstance(definition, Reduced | Scanned) else definition.dtype
            return self.number(0, combined)
        match definition:
            case Pointwise():
                return definition.body(self, at)
            case Reduced():
                return definition.source.body(self, at[:parallel_rank], at[parallel_rank:])
            case Scanned():
                dim = definition.source.dim
                return definition.source.body(self, (*at[:dim], at[-1], *at[dim:-1]))
            case Scattered():
                return [body(self, at)[1] for body in definition.bodies][-1]
            case _:
                raise AssertionError(f"{definition} has no body")

    def run_scatter(self, definition: Scattered, at: Indices) -> list[tuple[Sequence[Index], Scalar]]:
        """Returns the indices that a scatter writes at a point of its iteration space, each with its value."""
        with self.body.origin_scope(self.operator_of(definition)):
            writes = [body(self, at) for body in definition.bodies]
        self.evaluated_definitions[definition] = None
        return writes


class Tracer:
    """Traces definitions, each once; the results of one reduction or scan share a trace."""

    def __init__(self) -> None:
        self._traces: dict[Definition | ReductionSource | ScanSource, Trace] = {}

    def trace(self, definition: Definition) -> Trace:
        """Returns a definition's trace, with nothing inlined."""
        key = shared_source(definition)
        if key not in self._traces:
            self._traces[key] = trace_with(definition, lambda _: "fetched")
        return self._traces[key]

    def trace_inlining(self, definition: Definition, access_of: Callable[[Definition], Access]) -> Trace:
        """Returns a definition's trace with some of its reads inlined."""
        trace = self.trace(definition)
        inlines = any(access_of(other) == "inlined" for other, _ in trace.reads)
        return trace_with(definition, access_of) if inlines else trace


def read_bytes(definition: Definition) -> int | None:
    """Returns the bytes in memory from which the elements of a definition are computed; None for symbolic sizes.

    Results of pointwise operators count as computed from their operands, all others as in memory.
    """
    total = 0
    for other in _sources([definition]):
        count = product(other.sizes)
        if not isinstance(count, int):
            return None
        total += count * other.dtype.itemsize
    return total


def has_byte_weights(definition: Definition) -> bool:
    """Whether a sum is of products of int8 or uint8 elements, as quantised weights are, after pointwise operators."""
    if not isinstance(definition, Reduced) or not definition.source.dtype.is_floating_point:
        return False
    operands = [base for base, _ in Tracer().trace(definition).reads]
    return any(other.dtype in (torch.int8, torch.uint8) for other in _sources(operands))


def _sources(definitions: Iterable[Definition]) -> set[Definition]:
    """Returns the tensors from which pointwise operators compute definitions, or these themselves."""
    tracer, pending, seen, sources = Tracer(), [*definitions], set[Definition](), set[Definition]()
    while pending:
        other = unwrap_views(pending.pop())
        if other in seen:
            continue
        seen.add(other)
        if isinstance(other, Pointwise):
            pending += [base for base, _ in tracer.trace(other).reads]
        else:
            sources.add(other)
    return sources


def shared_source(definition: Definition) -> Definition | ReductionSource | ScanSource:
    """Returns the source of a result of a reduction or scan, or the definition itself."""
    return definition.source if isinstance(definition, Reduced | Scanned) else definition


@bounded_cache(4096)
def _axes(sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
    return tuple([Axis(f"u{number}", size) for number, size in enumerate(sizes)])


def trace_with(definition: Definition, access_of: Callable[[Definition], Access]) -> Trace:
    """Returns a definition's trace with some of its reads inlined."""
    sizes, parallel_rank = iteration_space(definition)
    axes = _axes(sizes)
    reads: dict[tuple[Definition, IndexTuple], None] = {}
    if isinstance(definition, Stored):
        return Trace(axes, parallel_rank, (), 0)
    if isinstance(definition, Viewed):
        base, at = resolve_views(definition, axes)
        return Trace(axes, parallel_rank, ((base, at),), 0)

    def fetch(other: Definition, at: IndexTuple, default: Number) -> Scalar:
        reads[other, at] = None
        number = as_index(len(reads))
        return reader.body.load(f"{id(other)}", number, other.dtype, default).to(other.compute_dtype)

    reader = BodyBuilder(access_of, fetch)
    reader.run(definition, axes, parallel_rank)
    if fills_a_copy(definition):
        # a separate kernel fills its memory from the initial elements
        reader.load(definition.initial, [Axis(f"i{number}", size) for number, size in enumerate(definition.sizes)])
    operations = reader.body.operations
    cost = sum(OPERATIONS[item.name].cost for item in operations if isinstance(item, Compute))
    numbers = [item.expression for item in operations if isinstance(item, SymbolicScalar)]
    symbolic = [size for size in sizes if isinstance(size, sympy.Basic)]
    symbols = frozenset(symbol for item in (*numbers, *symbolic) for symbol in item.free_symbols)
    return Trace(axes, parallel_rank, tuple(reads), cost, symbols)
