"""FlexAttention as one kernel of the loop IR: scores, their maximum, weights, and sums over keys.

The kernel's parallel axes are batch, head, query row and column of the values. It reduces products over the width of a
head, and the rest over keys. A block mask makes rows pairs (block, row of the block) and keys pairs (position in the
list of visited blocks, key of the block): scores beyond the count of the list are minus infinity, so that a schedule
need not visit them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import attribute_of
from fxwrap.loop_ir import Axis, Buffer, Index, IndexLike, Kernel, Scalar, as_index, rename_axes, strided_index
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.calls.nodes import literal, literals
from fxwrap.lowering.fusion.kernels import extent_of
from fxwrap.lowering.rules import Declined
from fxwrap.lowering.rules.indexing_common import all_of, index_less
from fxwrap.lowering.scalar_graphs import ScalarKernelBuilder
from fxwrap.options import Options
from fxwrap.symbolic import Number, Size, ceiling_divide, floor_divide, minimum, product
from fxwrap.torch_compat import is_flex_default_block
from fxwrap.wrapper_ir import Operand, Value


@dataclass(frozen=True)
class BlockLists:
    """The key blocks that each block of query rows visits: `flex_formulas.BlockStructure` as values of a program."""

    counts: Value
    indices: Value
    full_counts: Value | None
    full_indices: Value | None
    rows: Size
    keys: Size

    @property
    def is_trivial(self) -> bool:
        """Whether one block has all elements."""
        return is_flex_default_block(self.rows) and is_flex_default_block(self.keys)


@dataclass(frozen=True)
class AttentionCall:
    """The operands of a call of `flex_attention`, as values of a program.

    Fields are those of `flex_formulas.FlexAttention`; the functions are graphs of ATen operators on scalars.
    """

    query: Value
    key: Value
    value: Value
    score_mod: GraphModule
    mask_mod: GraphModule
    blocks: BlockLists
    scale: Number | sympy.Basic
    stats_unit: float
    score_buffers: tuple[Operand, ...]
    mask_buffers: tuple[Operand, ...]

    @classmethod
    def of(cls, builder: Builder, node: Node) -> AttentionCall:
        """Returns the operands of a node."""
        arguments: Any = (*node.args, (), ())[:9]
        query, key, value, score_mod, block_mask, scale, options, score_buffers, mask_buffers = arguments
        *_, mask_mod = block_mask
        _, _, counts, indices, full_counts, full_indices, *_, rows, keys = literals(builder, block_mask[:-1], node)
        blocks = BlockLists(counts, indices, full_counts, full_indices, rows, keys)  # type: ignore[arg-type]
        unit = 1.0 if options.get("BACKEND") == "FLASH" else math.log(2)
        factor: Any = literal(builder, scale, node)
        return cls(
            builder.value(query), builder.value(key), builder.value(value), attribute_of(score_mod),
            attribute_of(mask_mod), blocks, factor, unit, literals(builder, score_buffers, node),
            literals(builder, mask_buffers, node),
        )  # fmt: skip


def build_attention_kernel(
    builder: Builder, options: Options, call: AttentionCall, outputs: Sequence[Value | None]
) -> tuple[Kernel, tuple[Value, ...]]:
    """Returns the kernel of a call and the values that it reads.

    `outputs` are the output, log-sum-exp and maxima that it writes; None for results that nothing uses. Raises Declined
    if an operator of the call's functions cannot be computed element by element.
    """
    return _AttentionBuilder(ScalarKernelBuilder(builder, options), call).build(outputs)


class _AttentionBuilder:
    def __init__(self, elements: ScalarKernelBuilder, call: AttentionCall) -> None:
        self.elements = elements
        self.body = elements.body
        self.call = call
        query, value = call.query.tensor_type, call.value.tensor_type
        self.dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
        self.batch, self.heads, self.row_count, width = query.sizes
        self.key_count = call.key.tensor_type.sizes[2]
        self.columns, self.width = Axis("column", value.sizes[3]), Axis("width", width)
        key_heads = call.key.tensor_type.sizes[1]
        groups = floor_divide(self.heads, key_heads)
        batch, key_head, group = Axis("batch", self.batch), Axis("key_head", key_heads), Axis("group", groups)
        self.batch_index = as_index(batch)
        self.key_head_index = as_index(key_head)
        self.head_index = as_index(key_head) * groups + group
        rows, self.row, in_rows = self._row_axes()
        self.axes = [batch, key_head, *([group] if groups != 1 else []), *rows, self.columns]
        if groups == 1:
            self.head_index = self.key_head_index
        self.in_rows = in_rows

    def _row_axes(self) -> tuple[list[Axis], Index, bool]:
        """Returns the axes of query rows, the index of a row, and whether it is always less than their number."""
        blocks = self.call.blocks
        if blocks.is_trivial:
            axis = Axis("row", self.row_count)
            return [axis], as_index(axis), True
        count = blocks.counts.tensor_type.sizes[2]
        if count == 1:
            axis = Axis("row", self.row_count)
            self.row_block = as_index(0)
            return [axis], as_index(axis), True
        block, row = Axis("row_block", count), Axis("row", blocks.rows)
        self.row_block = as_index(block)
        return [block, row], as_index(block) * blocks.rows + row, product((count, blocks.rows)) == self.row_count

    # --- keys -------------------------------------------------------------------------------------------------------

    def _keys(self) -> tuple[list[Axis], Index, Scalar | None, Scalar | None]:
        """Returns the axes of keys, the index of a key, whether it counts, and whether its block is full."""
        blocks = self.call.blocks
        if blocks.is_trivial:
            axis = Axis("key", self.key_count)
            return [axis], as_index(axis), None, None
        size = minimum(blocks.keys, self.key_count)
        count = ceiling_divide(self.key_count, size)
        width = blocks.indices.tensor_type.sizes[-1]
        full_width = 0 if blocks.full_indices is None else blocks.full_indices.tensor_type.sizes[-1]
        visit, key = Axis("visit", width + full_width), Axis("key", size)
        position = self.body.index(as_index(visit))
        partial = self._list_element(blocks.counts, None)
        total, is_full = partial, None
        with self.body.masked(position < partial):
            block = self._list_element(blocks.indices, as_index(visit))
        if blocks.full_indices is not None and blocks.full_counts is not None:
            total = partial + self._list_element(blocks.full_counts, None)
            is_full = position >= partial
            with self.body.masked(is_full & (position < total)):
                at = self.body.indirect_index((position - partial).apply("maximum", 0), full_width)
                block = is_full.where(self._list_element(blocks.full_indices, at), block)
        visited = position < total
        last = self.body.index(as_index(count) - 1)  # lists of wrong blocks read no other memory
        block = block.apply("maximum", 0).apply("minimum", last)
        index = self.body.indirect_index(block, count) * size + key
        inside = index_less(self.elements.reader, index, self.key_count)
        if product((count, size)) == self.key_count:
            inside = True
        visible = all_of(visited, inside)
        assert isinstance(visible, Scalar)
        return [visit, key], index, visible, is_full

    def _list_element(self, value: Value, at: Index | None) -> Scalar:
        """Returns an element of the lists of blocks, int64."""
        sizes = value.tensor_type.sizes
        head = self.head_index if sizes[1] != 1 else as_index(0)
        batch = self.batch_index if sizes[0] != 1 else as_index(0)
        indices = (batch, head, self.row_block, *(() if at is None else (at,)))
        return self.elements.load(value, indices).to(torch.int64)

    # --- the kernel -------------------------------------------------------------------------------------------------

    def build(self, outputs: Sequence[Value | None]) -> tuple[Kernel, tuple[Value, ...]]:
        call, body = self.call, self.body
        keys, key, visible, is_full = self._keys()
        inside = None if self.in_rows else body.index(self.row) < body.index(as_index(self.row_count))
        scores = self._scores(key, visible, is_full, inside)
        (largest,) = body.reduce("max", scores, keys)
        shift = largest.equals(-math.inf).where(0.0, largest)
        weights = (scores - shift).exp()
        (total,) = body.reduce("sum", weights, keys)
        value = self._load(call.value, (key, as_index(self.columns)), visible)
        (weighted,) = body.reduce("sum", weights * value, keys)
        results = (
            weighted / total.equals(0.0).where(1.0, total),
            (total.log() + shift) / call.stats_unit,
            largest / call.stats_unit,
        )
        buffers: list[Buffer] = []
        for result, output in zip(results, outputs, strict=True):
            if output is not None:
                buffers.append(self._store(f"out{len(buffers)}", result, output, inside))
        inputs = [buffer for buffer, _ in self.elements.inputs]
        kernel = rename_axes(body.finish(self.axes, [self.width, *keys], inputs, buffers))
        return kernel, tuple([value for _, value in self.elements.inputs])

    def _scores(self, key: Index, visible: Scalar | None, is_full: Scalar | None, inside: Scalar | None) -> Scalar:
        """Returns the score of a row and a key: minus infinity where it is masked."""
        call, body = self.call, self.body
        query = self._load(call.query, (self.row, as_index(self.width)), inside)
        (score,) = body.reduce("sum", query * self._load(call.key, (key, as_index(self.width)), visible), [self.width])
        indices = [body.index(item).to(torch.int32) for item in (self.batch_index, self.head_index, self.row, key)]
        condition = visible if inside is None else inside if visible is None else visible & inside
        masks = [item for item in (condition,) if item is not None]
        score = score * self.elements.reader.number(call.scale, self.dtype)
        if masks:
            with body.masked(masks[0]):
                score = self.elements.call(call.score_mod, [score, *indices, *call.score_buffers]).to(self.dtype)
                mask = self.elements.call(call.mask_mod, [*indices, *call.mask_buffers])
        else:
            score = self.elements.call(call.score_mod, [score, *indices, *call.score_buffers]).to(self.dtype)
            mask = self.elements.call(call.mask_mod, [*indices, *call.mask_buffers])
        if mask.dtype is not torch.bool:
            raise Declined(f"its mask_mod returns {mask.dtype}")
        if is_full is not None:
            mask = is_full | mask
        if visible is not None:
            mask = visible & mask
        return score if mask.constant is True else mask.where(score, -math.inf)

    def _load(self, tensor: Value, position: tuple[IndexLike, IndexLike], condition: Scalar | None) -> Scalar:
        """Loads an element of queries, keys or values, 0 where a condition is false, in the type of the computation."""
        sizes = tensor.tensor_type.sizes
        head = self.head_index if tensor == self.call.query else self.key_head_index
        batch = self.batch_index if sizes[0] != 1 else as_index(0)
        indices = (batch, head, *map(as_index, position))
        if condition is None:
            return self.elements.load(tensor, indices).to(self.dtype)
        with self.body.masked(condition):
            return self.elements.load(tensor, indices).to(self.dtype)

    def _store(self, name: str, result: Scalar, output: Value, inside: Scalar | None) -> Buffer:
        type_ = output.tensor_type
        indices = (self.batch_index, self.head_index, self.row, as_index(self.columns))[: len(type_.sizes)]
        index = strided_index(indices, type_.strides)
        self.body.store(name, index, result.to(type_.dtype), inside)
        return Buffer(name, type_.dtype, extent_of(type_))
