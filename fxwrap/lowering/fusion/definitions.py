"""Definitions: how each element of a tensor is computed, before fusion decides which tensors are materialised.

A rule of `fxwrap.lowering.rules` returns one definition for each result of an operator. A definition's body is a
function that adds scalar operations to a kernel, so that its elements can be computed in any kernel: inlined into a
consumer, at any index, or once into memory. Definitions are immutable and compare by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

import sympy
import torch

from fxwrap.loop_ir import HALF_PRECISION, Index, IndexLike, KernelBuilder, Scalar, compute_dtype
from fxwrap.symbolic import Number, Size

Indices: TypeAlias = Sequence[IndexLike]
"""One index expression per dimension."""


class ElementReader(Protocol):
    """The argument of a definition's body: the kernel under construction, and the elements of other definitions."""

    @property
    def body(self) -> KernelBuilder:
        """The kernel under construction."""

    def load(self, definition: Definition, indices: Indices, other: Number = 0) -> Scalar:
        """Returns an element in its compute dtype (float32 for half precision).

        Where the body has a mask, elements outside it are `other`.
        """

    def number(self, number: Number | sympy.Basic, dtype: torch.dtype) -> Scalar:
        """Returns a number of the graph, symbolic or not, in the compute dtype of `dtype`."""


@dataclass(frozen=True)
class DefinitionLabel:
    """The name of a definition's buffer, and the overload name of its operator ("" for stored tensors)."""

    name: str
    operator: str = ""


@dataclass(frozen=True, eq=False)
class Definition:
    """A tensor of a graph: sizes, dtype and device."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of arithmetic on its elements."""
        return compute_dtype(self.dtype)


@dataclass(frozen=True, eq=False)
class Stored(Definition):
    """Always in memory: an input, a constant, or a result of an extern call."""


@dataclass(frozen=True, eq=False)
class Pointwise(Definition):
    """`body(reader, indices)` computes each element from elements of other tensors, in the compute dtype."""

    body: Callable[[ElementReader, Indices], Scalar]


@dataclass(frozen=True, eq=False)
class EvenConcatenation(Pointwise):
    """A concatenation of parts that provably have one length; `parts` are these by themselves."""

    parts: tuple[Pointwise, ...]


@dataclass(frozen=True, eq=False)
class CpuScalar(Pointwise):
    """A zero-dimensional CPU tensor as an operand on `device`, computed from scalar arguments of the launch."""


@dataclass(frozen=True, eq=False)
class InPlaceStore(Pointwise):
    """A pointwise definition that overwrites the existing tensor `target`.

    `symbols` are the symbols in the sizes and the offset of the target.
    """

    target: Stored
    symbols: frozenset[sympy.Symbol] = frozenset()


@dataclass(frozen=True, eq=False)
class Viewed(Definition):
    """Element `indices` is element `index_map(indices)` of `base`: a permutation, slice, broadcast, reshape, flip..."""

    base: Definition
    index_map: Callable[[Indices], Indices]


@dataclass(frozen=True, eq=False)
class ReductionSource:
    """The operand of a reduction, shared by its results: `body(reader, parallel indices, reduced indices)`.

    `dtype` is the dtype of the operand's elements and of the combination, `operand_precision` that of the operands of
    a matmul (`loop_ir.Reduce`).
    """

    kind: str
    parallel: tuple[Size, ...]
    reduced: tuple[Size, ...]
    dtype: torch.dtype
    body: Callable[[ElementReader, Indices, Indices], Scalar]
    operand_precision: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class Reduced(Definition):
    """Result number `part` of a reduction. Its sizes are the source's parallel sizes.

    `is_ascending` states that no element is less than the one before it.
    """

    source: ReductionSource
    part: int = 0
    is_ascending: bool = False


@dataclass(frozen=True, eq=False)
class ScanSource:
    """The operand of a scan along dimension `dim`, shared by its results: `body(reader, indices)`."""

    kind: str
    sizes: tuple[Size, ...]
    dim: int
    dtype: torch.dtype
    body: Callable[[ElementReader, Indices], Scalar]


@dataclass(frozen=True, eq=False)
class Scanned(Definition):
    """Result number `part` of a scan. Its sizes are the source's."""

    source: ScanSource
    part: int = 0


ScatterBody: TypeAlias = Callable[[ElementReader, Indices], tuple[Sequence[Index], Scalar]]
"""Returns the indices of the element that an iteration writes, and the value, in the compute dtype."""


@dataclass(frozen=True, eq=False)
class Scattered(Definition):
    """A copy of `initial`, with a value of each body combined into one element for each point of an index space.

    `mode` is the mode of a store: "set" where no two iterations write one element or the order does not matter; "add"
    and others for atomic updates.
    """

    initial: Definition
    space: tuple[Size, ...]
    mode: str
    bodies: tuple[ScatterBody, ...]


@dataclass(frozen=True, eq=False)
class RoundedScatter(Pointwise):
    """The elements of a scatter, combined in a wider dtype than their own."""

    scatter: Scattered


@dataclass(frozen=True, eq=False)
class InPlaceScatter(Scattered):
    """A scatter into the existing tensor `target`, which is its initial tensor, and not into a copy.

    `symbols` are the symbols in the sizes and the offset of the target.
    """

    target: Stored
    symbols: frozenset[sympy.Symbol] = frozenset()


InPlaceWrite: TypeAlias = InPlaceStore | InPlaceScatter
"""A definition that overwrites its `target`. Only the memory has the new content: readers read the target."""


def fills_a_copy(definition: object) -> TypeGuard[Scattered]:
    """Whether a definition is a scatter into a copy of its initial tensor, which another kernel makes before."""
    return isinstance(definition, Scattered) and not isinstance(definition, InPlaceScatter)


def pointwise(
    sizes: Sequence[Size], dtype: torch.dtype, device: torch.device, body: Callable[[ElementReader, Indices], Scalar]
) -> Pointwise:
    """Returns a pointwise definition; the result of `body` is cast to the compute dtype of `dtype`."""
    computes = compute_dtype(dtype)
    return Pointwise(tuple(sizes), dtype, device, lambda reader, indices: body(reader, indices).to(computes))


def view(base: Definition, sizes: Sequence[Size], index_map: Callable[[Indices], Indices]) -> Viewed:
    """Returns a view of another tensor."""
    return Viewed(tuple(sizes), base.dtype, base.device, base, index_map)


def rounded_scatter(scatter: Scattered, dtype: torch.dtype) -> Scattered | RoundedScatter:
    """Returns a scatter in a dtype, which may be narrower than that in which it is combined."""
    if scatter.dtype is dtype:
        return scatter
    copy = copy_definition(scatter, dtype)
    return RoundedScatter(copy.sizes, copy.dtype, copy.device, copy.body, scatter)


def copy_definition(source: Definition, dtype: torch.dtype | None = None) -> Pointwise:
    """Returns a new tensor with another's elements, cast to a dtype, by default their own."""
    return pointwise(
        source.sizes, dtype or source.dtype, source.device, lambda reader, indices: reader.load(source, indices)
    )


def reduction(
    kind: str,
    parallel: Sequence[Size],
    reduced: Sequence[Size],
    device: torch.device,
    dtype: torch.dtype,
    body: Callable[[ElementReader, Indices, Indices], Scalar],
    result_dtypes: Sequence[torch.dtype],
    multiplied_dtype: torch.dtype | None = None,
) -> tuple[Reduced, ...]:
    """Returns a reduction's results. The combination is in `dtype`, the results are in `result_dtypes`.

    `multiplied_dtype` is the dtype of the operands of a matmul, whose sums of products have it as operand precision if
    that is half precision.
    """
    computes = compute_dtype(dtype)
    source = ReductionSource(
        kind, tuple(parallel), tuple(reduced), computes,
        lambda reader, parallel, reduced: body(reader, parallel, reduced).to(computes),
        multiplied_dtype if multiplied_dtype in HALF_PRECISION else None,
    )  # fmt: skip
    return tuple([Reduced(tuple(parallel), item, device, source, part) for part, item in enumerate(result_dtypes)])


def broadcast_indices(sizes: Sequence[Size], indices: Indices) -> Indices:
    """Returns the indices into a tensor of these sizes that is broadcast to the tensor at `indices`."""
    aligned = indices[len(indices) - len(sizes) :] if sizes else ()
    return tuple([0 if size == 1 else index for size, index in zip(sizes, aligned, strict=True)])


def reduction_dims(rank: int, dims: Sequence[int] | int | None) -> tuple[int, ...]:
    """Returns the reduced dimensions, sorted; None and () mean all."""
    if isinstance(dims, int):
        dims = (dims,)
    if not rank:
        return ()
    return tuple(sorted({dim % rank for dim in dims})) if dims else tuple(range(rank))


def merge_indices(rank: int, dims: Sequence[int], parallel: Indices, reduced: Indices) -> list[IndexLike]:
    """Returns the indices into a reduction's operand from those of its parallel and of its reduced dimensions."""
    others, over = iter(parallel), iter(reduced)
    return [next(over) if dim in dims else next(others) for dim in range(rank)]


def unwrap_views(definition: Definition) -> Definition:
    """Returns the base of a chain of views, or the definition itself."""
    while isinstance(definition, Viewed):
        definition = definition.base
    return definition


def definitions_in(tree: object) -> Iterator[Definition]:
    """Yields the definitions among the leaves of nested sequences and mappings."""
    if isinstance(tree, Definition):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from definitions_in(item)


def replace_definitions(tree: Any, replacements: Mapping[Definition, Definition]) -> Any:
    """Returns nested tuples with some definitions replaced."""
    if isinstance(tree, tuple):
        return tuple([replace_definitions(item, replacements) for item in tree])
    return replacements.get(tree, tree) if isinstance(tree, Definition) else tree


def symbols_in(tree: object) -> set[sympy.Symbol]:
    """Returns the symbols in numbers and in sizes of definitions, of nested sequences."""
    if isinstance(tree, Definition):
        return symbols_in(tree.sizes)
    if isinstance(tree, tuple | list | dict):
        items = tree.values() if isinstance(tree, dict) else tree
        return {symbol for item in items for symbol in symbols_in(item)}
    return set(tree.free_symbols) if isinstance(tree, sympy.Basic) else set()
