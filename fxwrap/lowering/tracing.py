"""What a definition reads and costs, found by running its body once over axes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

from fxwrap.loop_ir import (
    OPERATIONS,
    Axis,
    Body,
    Compute,
    Index,
    IndexLike,
    Number,
    Scalar,
    SizeValue,
    as_index,
    compute_dtype,
)
from fxwrap.lowering.definitions import (
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
)
from fxwrap.symbolic import Size

Multi: TypeAlias = tuple[Index, ...]
"""One index a dimension."""


@dataclass(frozen=True)
class Trace:
    """What computing every element of a definition takes.

    `axes` are those of its space: its own dimensions, or a reduction's kept and then its reduced ones (`kept` says how
    many come first). `reads` are the elements of other definitions that one iteration reads, views looked through;
    `cost` about how many instructions an element takes, `symbols` the symbols of its sizes and numbers.
    """

    axes: tuple[Axis, ...]
    kept: int
    reads: tuple[tuple[Definition, Multi], ...]
    cost: int
    symbols: frozenset[sympy.Symbol] = frozenset()


def space_of(definition: Definition) -> tuple[tuple[Size, ...], int]:
    """Returns the sizes of the space that a definition is computed over, and how many of them are kept."""
    match definition:
        case Reduced():
            source = definition.source
            return (*source.kept, *source.reduced), len(source.kept)
        case Scanned():
            sizes, dim = definition.sizes, definition.source.dim
            return (*sizes[:dim], *sizes[dim + 1 :], sizes[dim]), len(sizes) - 1
        case Scattered():
            return definition.space, len(definition.space)
        case _:
            return definition.sizes, len(definition.sizes)


def element_of(definition: Definition, at: Multi) -> Multi:
    """Returns the indices of the element that is computed at a point of a definition's space (not for `Scattered`)."""
    if isinstance(definition, Scanned):
        dim = definition.source.dim
        return (*at[:dim], at[-1], *at[dim:-1])
    return at[: len(definition.sizes)] if isinstance(definition, Reduced) else at


def resolved(definition: Definition, indices: Indices) -> tuple[Definition, Multi]:
    """Returns the definition that views lead to, and where in it the element is."""
    while isinstance(definition, Viewed):
        indices = definition.index_map(indices)
        definition = definition.base
    return definition, tuple([as_index(index) for index in indices])


class BodyReader:
    """Runs bodies: computes what is inlined, once an element, and leaves the rest to `fetch`.

    `ran` collects the definitions whose bodies ran, each after those it inlines.
    """

    def __init__(
        self, inlined: Callable[[Definition], bool], fetch: Callable[[Definition, Multi, Number], Scalar]
    ) -> None:
        self.body = Body()
        self._inlined = inlined
        self._fetch = fetch
        self._known: dict[tuple[Any, ...], Scalar] = {}
        self.ran: dict[Definition, None] = {}

    def load(self, definition: Definition, indices: Indices, other: Number = 0) -> Scalar:
        """Returns an element in its compute dtype."""
        definition, at = resolved(definition, indices)
        mask = self.body.mask.position if self.body.mask is not None else None
        key = (id(definition), at, mask, other if mask is not None else 0)
        known = self._known.get(key)
        if known is None:
            if isinstance(definition, Pointwise) and self._inlined(definition):
                with self.body.origins(definition.origin):
                    known = definition.body(self, at)
                self.ran[definition] = None
            else:
                known = self._fetch(definition, at, other)
            self._known[key] = known
        return known

    def number(self, number: Number | sympy.Basic, dtype: torch.dtype) -> Scalar:
        """Returns a number in the dtype that arithmetic on `dtype` happens in."""
        computes = compute_dtype(dtype)
        if not isinstance(number, sympy.Basic):
            return self.body.constant(number, computes)
        if number.is_number:
            return self.body.constant(int(number) if number.is_Integer else float(number), computes)
        kind = torch.bool if number.is_Boolean else torch.int64 if number.is_integer else torch.float64
        return self.body.number(number, kind).to(computes)

    def require(self, condition: Scalar, message: str, error: str = "index") -> None:
        """Makes the launch fail with a message where the condition is false and the body's mask is true."""
        self.body.require(condition, message, error)

    def run(self, definition: Definition, at: Sequence[IndexLike], kept: int) -> Scalar:
        """Runs a definition's body at an element of its space; for a reduction or scan, up to what it combines."""
        with self.body.origins(definition.origin):
            value = self._body_value(definition, at, kept)
        self.ran[definition] = None
        return value

    def _body_value(self, definition: Definition, at: Sequence[IndexLike], kept: int) -> Scalar:
        match definition:
            case Pointwise():
                return definition.body(self, at)
            case Reduced():
                return definition.source.body(self, at[:kept], at[kept:])
            case Scanned():
                dim = definition.source.dim
                return definition.source.body(self, (*at[:dim], at[-1], *at[dim:-1]))
            case Scattered():
                return definition.body(self, at)[1]
            case _:
                raise AssertionError(f"{definition} has no body")

    def scattered(self, definition: Scattered, at: Indices) -> tuple[Sequence[Index], Scalar]:
        """Returns where a scatter writes at an element of its space, and what."""
        with self.body.origins(definition.origin):
            found = definition.body(self, at)
        self.ran[definition] = None
        return found


class Tracer:
    """Traces definitions, each once; parts of one reduction or scan share a trace."""

    def __init__(self) -> None:
        self._traces: dict[Definition | ReductionSource | ScanSource, Trace] = {}

    def trace(self, definition: Definition) -> Trace:
        """Returns a definition's trace, with nothing inlined."""
        key = shared_source(definition)
        known = self._traces.get(key)
        if known is None:
            known = self._traces[key] = trace_with(definition, lambda _: False)
        return known

    def trace_inlining(self, definition: Definition, inlined: Callable[[Definition], bool]) -> Trace:
        """Returns a definition's trace with some of what it reads inlined; the known one where it reads none such."""
        known = self.trace(definition)
        return trace_with(definition, inlined) if any(inlined(other) for other, _ in known.reads) else known


def shared_source(definition: Definition) -> Definition | ReductionSource | ScanSource:
    """Returns what the parts of one reduction or scan have in common; else the definition itself."""
    return definition.source if isinstance(definition, Reduced | Scanned) else definition


@lru_cache(maxsize=4096)
def _axes(sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
    return tuple([Axis(f"u{number}", size) for number, size in enumerate(sizes)])


def trace_with(definition: Definition, inlined: Callable[[Definition], bool]) -> Trace:
    """Returns a definition's trace with some of what it reads inlined."""
    sizes, kept = space_of(definition)
    axes = _axes(sizes)
    reads: dict[tuple[Definition, Multi], None] = {}
    if isinstance(definition, Stored):
        return Trace(axes, kept, (), 0)
    if isinstance(definition, Viewed):
        base, at = resolved(definition, axes)
        return Trace(axes, kept, ((base, at),), 0)

    def fetch(other: Definition, at: Multi, default: Number) -> Scalar:
        reads[other, at] = None
        number = as_index(len(reads))
        return reader.body.load(f"{id(other)}", number, other.dtype, default).to(other.compute_dtype)

    reader = BodyReader(inlined, fetch)
    reader.run(definition, axes, kept)
    if isinstance(definition, Scattered):  # its memory is filled first, from whatever its initial elements are
        reader.load(definition.initial, [Axis(f"i{number}", size) for number, size in enumerate(definition.sizes)])
    operations = reader.body.operations
    cost = sum(OPERATIONS[item.name].cost for item in operations if isinstance(item, Compute))
    numbers = [item.expression for item in operations if isinstance(item, SizeValue)]
    symbolic = [size for size in sizes if isinstance(size, sympy.Basic)]
    symbols = frozenset(symbol for item in (*numbers, *symbolic) for symbol in item.free_symbols)
    return Trace(axes, kept, tuple(reads), cost, symbols)
