"""Reading at computed positions: gather, index, embedding and their like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxwrap.loop_ir import IndexLike, Scalar
from fxwrap.lowering.definitions import Definition, Indices, Pointwise, Reader, broadcast_indices, pointwise
from fxwrap.lowering.rules.positions import dimension, gathered_index, refused_positions, replaced
from fxwrap.lowering.rules.registry import Call
from fxwrap.lowering.rules.rows import kernel_rule
from fxwrap.lowering.rules.views import reshaped
from fxwrap.symbolic import Size, product

# --- along one dimension ---------------------------------------------------------------------------------------------


def position_along(
    reader: Reader, index: Definition, indices: Indices, size: Size, *, wraps: bool = False, error: str = "index"
) -> IndexLike:
    """Returns the position that an element of an index tensor is, for a dimension of this size."""
    return gathered_index(reader, reader.load(index, indices), size, wraps=wraps, error=error)


@kernel_rule("aten.gather.default")
def _gather(call: Call, x: Definition, dim: int, index: Definition, **_: Any) -> Any:
    return refused_positions(index) or _gathered(call, x, dimension(dim, len(x.sizes)), index)


def _gathered(call: Call, x: Definition, dim: int, index: Definition) -> Pointwise:
    """Returns `x` read at an index tensor of the result's rank, whose sizes of 1 are broadcast."""

    def body(reader: Reader, indices: Indices) -> Scalar:
        where = broadcast_indices(index.sizes, indices)
        place = position_along(reader, index, where, x.sizes[dim] if x.sizes else 1, error="runtime")
        others = [0 if size == 1 else item for size, item in zip(x.sizes, indices, strict=False)]
        return reader.load(x, replaced(others, dim, place) if x.sizes else ())

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten.take_along_dim.default")
def _take_along_dim(call: Call, x: Definition, index: Definition, dim: int | None = None) -> Any:
    return refused_positions(index) or (
        _take(call, x, index) if dim is None else _gathered(call, x, dimension(dim, len(x.sizes)), index)
    )


@kernel_rule("aten.index_select.default")
def _index_select(call: Call, x: Definition, dim: int, index: Definition) -> Any:
    dim = dimension(dim, len(x.sizes))

    def body(reader: Reader, indices: Indices) -> Scalar:
        where = [indices[dim] if indices else 0] if index.sizes else []
        place = position_along(reader, index, where, x.sizes[dim] if x.sizes else 1)
        return reader.load(x, replaced(indices, dim, place) if x.sizes else ())

    return refused_positions(index) or pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten.embedding.default")
def _embedding(call: Call, weight: Definition, index: Definition, *_: Any, **__: Any) -> Any:
    def body(reader: Reader, indices: Indices) -> Scalar:
        row = position_along(reader, index, indices[:-1], weight.sizes[0])
        return reader.load(weight, [row, indices[-1]])

    return refused_positions(index) or pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten.take.default")
def _take_rule(call: Call, x: Definition, index: Definition) -> Any:
    return refused_positions(index) or _take(call, x, index)


def _take(call: Call, x: Definition, index: Definition) -> Pointwise:
    """Returns `x`, as a row of all its elements, read at the elements of an index tensor."""
    count = product(x.sizes)
    from_flat, to_index = reshaped(x.sizes, (count,)), reshaped(index.sizes, call.sizes)

    def body(reader: Reader, indices: Indices) -> Scalar:
        return reader.load(x, from_flat([position_along(reader, index, to_index(indices), count, wraps=True)]))

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten.one_hot.default")
def _one_hot(call: Call, x: Definition, classes: int = -1) -> Any:
    if classes < 1:
        return "the number of classes is read from the tensor"

    def body(reader: Reader, indices: Indices) -> Scalar:
        place = position_along(reader, x, indices[:-1], classes, error="runtime")
        return reader.body.index(place).equals(reader.body.index(indices[-1]))

    return refused_positions(x) or pointwise(call.sizes, call.dtype, call.device, body)


# --- at tensors of positions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Indexing:
    """`x[indices]`: index tensors by dimension, and where their broadcast sizes stand in the result."""

    sizes: tuple[Size, ...]
    tensors: dict[int, Definition]
    block: tuple[Size, ...]
    first: int

    @property
    def result_sizes(self) -> tuple[Size, ...]:
        """The sizes of `x[indices]`."""
        others = [size for dim, size in enumerate(self.sizes) if dim not in self.tensors]
        return (*others[: self.first], *self.block, *others[self.first :])

    def places(self, reader: Reader, indices: Indices) -> list[IndexLike]:
        """Returns the indices in `x` of an element of `x[indices]`."""
        end = self.first + len(self.block)
        block, others = indices[self.first : end], iter([*indices[: self.first], *indices[end:]])
        found: list[IndexLike] = []
        for dim, size in enumerate(self.sizes):
            tensor = self.tensors.get(dim)
            if tensor is None:
                found.append(next(others))
            else:
                where = broadcast_indices(tensor.sizes, block)
                found.append(position_along(reader, tensor, where, size, wraps=True))
        return found


def indexing(sizes: Sequence[Size], indices: Sequence[Definition | None]) -> Indexing | str:
    """Returns how a tensor of these sizes is indexed, by torch's rules, or why a kernel cannot.

    The broadcast sizes of the index tensors stand where the first of them does if they are next to one another, and
    first otherwise.
    """
    tensors = {dim: item for dim, item in enumerate(indices) if item is not None}
    if any(item.dtype in (torch.bool, torch.uint8) for item in tensors.values()):
        return "how many elements a mask selects is only known when it runs"
    reason = refused_positions(*tensors.values())
    if reason is not None:
        return reason
    dims = list(tensors)
    adjacent = bool(dims) and dims == list(range(dims[0], dims[-1] + 1))
    block = broadcast_sizes([item.sizes for item in tensors.values()])
    return Indexing(tuple(sizes), tensors, block, dims[0] if adjacent else 0)


def broadcast_sizes(shapes: Sequence[Sequence[Size]]) -> tuple[Size, ...]:
    """Returns the sizes that shapes are broadcast to together."""
    rank = max((len(shape) for shape in shapes), default=0)
    found: list[Size] = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                found[dim] = size
    return tuple(found)


@kernel_rule(
    "aten.index.Tensor", "aten.index.Tensor_hacked_twin", "aten._unsafe_index.Tensor",
    "aten._unsafe_index.Tensor_hacked_twin",
)  # fmt: skip
def _index(call: Call, x: Definition, indices: Sequence[Definition | None]) -> Any:
    how = indexing(x.sizes, indices)
    if isinstance(how, str):
        return how

    def body(reader: Reader, where: Indices) -> Scalar:
        return reader.load(x, how.places(reader, where))

    return pointwise(call.sizes, call.dtype, call.device, body)
