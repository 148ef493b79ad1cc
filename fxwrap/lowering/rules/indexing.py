"""Reads at indices from tensors: gather, index, embedding and similar operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import IndexLike, Scalar
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Pointwise, broadcast_indices
from fxwrap.lowering.rules.indexing_common import (
    broadcast_sizes,
    canonicalize_dim,
    checked_indirect_index,
    replace_index,
)
from fxwrap.lowering.rules.registry import Declined, LoweringResult, OperatorCall, check_index_dtype, lowering_rule
from fxwrap.lowering.rules.views import reshape_index_map
from fxwrap.symbolic import Size, product

# --- along one dimension ---------------------------------------------------------------------------------------------


def load_indirect_index(
    reader: ElementReader,
    index: Definition,
    indices: Indices,
    size: Size,
    *,
    wrap_negative: bool = False,
    error: str = "index",
) -> IndexLike:
    """Returns an element of an index tensor as an index into a dimension of this size."""
    return checked_indirect_index(reader, reader.load(index, indices), size, wrap_negative=wrap_negative, error=error)


def load_list_index(reader: ElementReader, x: Definition, dim: int, index: Definition, indices: Indices) -> Indices:
    """Returns indices with the one at `dim` replaced by the element of an index tensor of rank 0 or 1."""
    position = [indices[dim] if indices else 0] if index.sizes else []
    row = load_indirect_index(reader, index, position, x.sizes[dim] if x.sizes else 1)
    return replace_index(indices, dim, row) if x.sizes else ()


@lowering_rule("aten.gather.default", index_argument=2)
def _gather(call: OperatorCall, x: Definition, dim: int, index: Definition) -> LoweringResult:
    return _gather_elements(call, x, canonicalize_dim(dim, len(x.sizes)), index)


def _gather_elements(call: OperatorCall, x: Definition, dim: int, index: Definition) -> Pointwise:
    """Returns `x` read at an index tensor of the result's rank, whose sizes of 1 are broadcast."""

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        position = broadcast_indices(index.sizes, indices)
        row = load_indirect_index(reader, index, position, x.sizes[dim] if x.sizes else 1, error="runtime")
        others = [0 if size == 1 else item for size, item in zip(x.sizes, indices, strict=False)]
        return reader.load(x, replace_index(others, dim, row) if x.sizes else ())

    return call.define(body)


@lowering_rule("aten.take_along_dim.default", index_argument=1)
def _take_along_dim(call: OperatorCall, x: Definition, index: Definition, dim: int | None) -> LoweringResult:
    if dim is None:
        return _take(call, x, index)
    return _gather_elements(call, x, canonicalize_dim(dim, len(x.sizes)), index)


@lowering_rule("aten.index_select.default", index_argument=2)
def _index_select(call: OperatorCall, x: Definition, dim: int, index: Definition) -> LoweringResult:
    dim = canonicalize_dim(dim, len(x.sizes))
    return call.define(lambda reader, indices: reader.load(x, load_list_index(reader, x, dim, index, indices)))


@lowering_rule("aten.embedding.default", index_argument=1)
def _embedding(call: OperatorCall, weight: Definition, index: Definition) -> LoweringResult:
    def body(reader: ElementReader, indices: Indices) -> Scalar:
        row = load_indirect_index(reader, index, indices[:-1], weight.sizes[0])
        return reader.load(weight, [row, indices[-1]])

    return call.define(body)


@lowering_rule("aten.take.default", index_argument=1)
def _take(call: OperatorCall, x: Definition, index: Definition) -> Pointwise:
    """Reads `x`, flattened, at the elements of an index tensor."""
    count = product(x.sizes)
    from_flat, to_index = reshape_index_map(x.sizes, (count,)), reshape_index_map(index.sizes, call.sizes)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        flat = load_indirect_index(reader, index, to_index(indices), count, wrap_negative=True)
        return reader.load(x, from_flat([flat]))

    return call.define(body)


@lowering_rule("aten.one_hot.default", index_argument=0)
def _one_hot(call: OperatorCall, x: Definition, classes: int) -> LoweringResult:
    if classes < 1:
        raise Declined("the number of classes is read from the tensor")

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        index = load_indirect_index(reader, x, indices[:-1], classes, error="runtime")
        return reader.body.index(index).equals(reader.body.index(indices[-1]))

    return call.define(body)


# --- advanced indexing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdvancedIndexing:
    """`x[indices]`: the index tensors by dimension of `x`.

    Their broadcast sizes `index_shape` are dimensions of the result, from `index_dim_start` on.
    """

    sizes: tuple[Size, ...]
    tensors: dict[int, Definition]
    index_shape: tuple[Size, ...]
    index_dim_start: int

    @property
    def result_sizes(self) -> tuple[Size, ...]:
        """The sizes of `x[indices]`."""
        others = [size for dim, size in enumerate(self.sizes) if dim not in self.tensors]
        return (*others[: self.index_dim_start], *self.index_shape, *others[self.index_dim_start :])

    def operand_indices(self, reader: ElementReader, indices: Indices) -> list[IndexLike]:
        """Returns the indices in `x` of an element of `x[indices]`."""
        start, end = self.index_dim_start, self.index_dim_start + len(self.index_shape)
        others = iter([*indices[:start], *indices[end:]])
        result: list[IndexLike] = []
        for dim, size in enumerate(self.sizes):
            tensor = self.tensors.get(dim)
            if tensor is None:
                result.append(next(others))
            else:
                position = broadcast_indices(tensor.sizes, indices[start:end])
                result.append(load_indirect_index(reader, tensor, position, size, wrap_negative=True))
        return result


def analyze_indexing(sizes: Sequence[Size], indices: Sequence[Definition | None]) -> AdvancedIndexing:
    """Returns how index tensors index a tensor of these sizes, by torch's rules.

    The broadcast sizes of adjacent index tensors replace the dimensions that they index; otherwise they come first.
    """
    tensors = {dim: item for dim, item in enumerate(indices) if item is not None}
    if any(item.dtype in (torch.bool, torch.uint8) for item in tensors.values()):
        raise Declined("the number of elements that a mask selects is unbacked")
    check_index_dtype(*tensors.values())
    dims = list(tensors)
    adjacent = bool(dims) and dims == list(range(dims[0], dims[-1] + 1))
    index_shape = broadcast_sizes([item.sizes for item in tensors.values()])
    return AdvancedIndexing(tuple(sizes), tensors, index_shape, dims[0] if adjacent else 0)


@lowering_rule(
    "aten.index.Tensor", "aten.index.Tensor_hacked_twin", "aten._unsafe_index.Tensor",
    "aten._unsafe_index.Tensor_hacked_twin",
)  # fmt: skip
def _index(call: OperatorCall, x: Definition, indices: Sequence[Definition | None]) -> LoweringResult:
    indexing = analyze_indexing(x.sizes, indices)
    return call.define(lambda reader, at: reader.load(x, indexing.operand_indices(reader, at)))
