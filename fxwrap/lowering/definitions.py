"""Definitions: how each element of a tensor is computed, before it is decided which tensors get memory.

A rule of `fxwrap.lowering.rules` gives one definition for each tensor of an operator. Bodies are functions that add
scalar operations to a kernel, so that a definition can be computed anywhere: inlined into its consumers, at whatever
index they read, or once into memory. Definitions compare by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import sympy
import torch

from fxwrap.loop_ir import Body, Index, IndexLike, Number, Scalar, compute_dtype
from fxwrap.symbolic import Size

Indices: TypeAlias = Sequence[IndexLike]
"""One index expression a dimension."""


class Reader(Protocol):
    """What a definition's body is given: the kernel being built, and the elements of other definitions."""

    @property
    def body(self) -> Body:
        """The kernel being built."""

    def load(self, definition: Definition, indices: Indices, other: Number = 0) -> Scalar:
        """Returns an element in the dtype that arithmetic on it happens in (float32 for half precision).

        Under a mask of the body, elements outside it are `other`.
        """

    def number(self, number: Number | sympy.Basic, dtype: torch.dtype) -> Scalar:
        """Returns a number of the graph, symbolic or not, in the dtype that arithmetic on `dtype` happens in."""


@dataclass(eq=False)
class Definition:
    """A tensor of a graph: sizes, dtype and device. `name` and `origin` (the operator) are given by who made it."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    name: str = field(default="", init=False)
    origin: str = field(default="", init=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that arithmetic on its elements happens in."""
        return compute_dtype(self.dtype)


@dataclass(eq=False)
class Stored(Definition):
    """In memory whatever happens: an input, a constant, a result of an operator call."""


@dataclass(eq=False)
class Pointwise(Definition):
    """Each element is computed by `body(reader, indices)`, in the compute dtype, from elements of other tensors."""

    body: Callable[[Reader, Indices], Scalar]


@dataclass(eq=False)
class HostNumber(Pointwise):
    """A tensor of rank 0 on the CPU, as an operator on the device `device` takes it: from numbers of the launch."""


@dataclass(eq=False)
class Written(Pointwise):
    """A pointwise definition whose memory is that of a tensor which is there before, and is overwritten.

    `symbols` are those that say where it is.
    """

    target: Stored
    symbols: frozenset[sympy.Symbol] = frozenset()


@dataclass(eq=False)
class Viewed(Definition):
    """Element `indices` is element `index_map(indices)` of `base`: a permutation, slice, broadcast, reshape, flip..."""

    base: Definition
    index_map: Callable[[Indices], Indices]


@dataclass(eq=False)
class ReductionSource:
    """What a reduction combines, shared by its parts: `body(reader, kept indices, reduced indices)`.

    `dtype` is the dtype that `body` gives and the combination happens in.
    """

    kind: str
    kept: tuple[Size, ...]
    reduced: tuple[Size, ...]
    dtype: torch.dtype
    body: Callable[[Reader, Indices, Indices], Scalar]


@dataclass(eq=False)
class Reduced(Definition):
    """Part number `part` of a reduction. Its sizes are the source's kept sizes."""

    source: ReductionSource
    part: int = 0


@dataclass(eq=False)
class ScanSource:
    """What a scan along dimension `dim` combines, shared by its parts: `body(reader, indices)`."""

    kind: str
    sizes: tuple[Size, ...]
    dim: int
    dtype: torch.dtype
    body: Callable[[Reader, Indices], Scalar]


@dataclass(eq=False)
class Scanned(Definition):
    """Part number `part` of a scan. Its sizes are the source's."""

    source: ScanSource
    part: int = 0


@dataclass(eq=False)
class Scattered(Definition):
    """`initial`, with a value combined into an element for each element of an index space.

    `body(reader, indices)` gives the element's indices in this tensor and the value, in the compute dtype. `mode` is a
    store's: "set" where no two iterations hit one element or any of them may win, "add" and others for atomic ones.
    """

    initial: Definition
    space: tuple[Size, ...]
    mode: str
    body: Callable[[Reader, Indices], tuple[Sequence[Index], Scalar]]


def pointwise(
    sizes: Sequence[Size], dtype: torch.dtype, device: torch.device, body: Callable[[Reader, Indices], Scalar]
) -> Pointwise:
    """Returns a pointwise definition; `body` may give any dtype, which is cast to the compute dtype of `dtype`."""
    computes = compute_dtype(dtype)
    return Pointwise(tuple(sizes), dtype, device, lambda reader, indices: body(reader, indices).to(computes))


def view(base: Definition, sizes: Sequence[Size], index_map: Callable[[Indices], Indices]) -> Viewed:
    """Returns a view of another tensor."""
    return Viewed(tuple(sizes), base.dtype, base.device, base, index_map)


def reduction(
    kind: str,
    kept: Sequence[Size],
    reduced: Sequence[Size],
    device: torch.device,
    dtype: torch.dtype,
    body: Callable[[Reader, Indices, Indices], Scalar],
    result_dtypes: Sequence[torch.dtype],
) -> tuple[Reduced, ...]:
    """Returns a reduction's parts. `dtype` is what the combination happens in, `result_dtypes` what the parts are."""
    computes = compute_dtype(dtype)
    source = ReductionSource(
        kind, tuple(kept), tuple(reduced), computes,
        lambda reader, kept, reduced: body(reader, kept, reduced).to(computes),
    )  # fmt: skip
    return tuple([Reduced(tuple(kept), item, device, source, part) for part, item in enumerate(result_dtypes)])


def broadcast_indices(sizes: Sequence[Size], indices: Indices) -> Indices:
    """Returns the indices at which a tensor of these sizes is read by one that it is broadcast to."""
    aligned = indices[len(indices) - len(sizes) :] if sizes else ()
    return tuple([0 if size == 1 else index for size, index in zip(sizes, aligned, strict=True)])


def reduction_dims(rank: int, dims: Sequence[int] | int | None) -> tuple[int, ...]:
    """Returns the dimensions a reduction runs over, sorted; none given means all."""
    if isinstance(dims, int):
        dims = (dims,)
    if not rank:
        return ()
    return tuple(sorted({dim % rank for dim in dims})) if dims else tuple(range(rank))


def joined_indices(rank: int, dims: Sequence[int], kept: Indices, reduced: Indices) -> list[IndexLike]:
    """Returns the indices of an operand, given those of its kept and of its reduced dimensions."""
    others, over = iter(kept), iter(reduced)
    return [next(over) if dim in dims else next(others) for dim in range(rank)]


def viewed_base(definition: Definition) -> Definition:
    """Returns the tensor whose memory a view shows, at the end of a chain of views; else the definition itself."""
    while isinstance(definition, Viewed):
        definition = definition.base
    return definition
