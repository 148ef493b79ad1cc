"""The scores of attention in a kernel of the loop IR: its operands, the positions of rows and keys, and their masks.

A kernel has rows, which are parallel axes, and positions that it streams, which are reduced axes: queries and keys in
the forward, and keys and queries in the gradient of keys and values. A block mask makes rows pairs (block, row of the
block) and streamed positions pairs (position in the list of visited blocks, element of the block): elements beyond
the count of the list do not count, so that a schedule need not visit them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.attention.flex_formulas import RELATIVE_LOGSUMEXP, SINK_MOD, WEIGHT_MOD
from fxwrap.fx_passes.effects import attribute_of
from fxwrap.loop_ir import Axis, Buffer, Index, IndexLike, KernelBuilder, Scalar, as_index, strided_index
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.calls.nodes import literal, literals
from fxwrap.lowering.fusion.kernels import extent_of
from fxwrap.lowering.rules import Declined
from fxwrap.lowering.rules.indexing_common import all_of, index_less
from fxwrap.lowering.scalar_graphs import ScalarKernelBuilder
from fxwrap.symbolic import Number, Size, ceiling_divide, floor_divide, minimum, product
from fxwrap.symbolic import total as total_size
from fxwrap.torch_compat import FLEX_DEFAULT_BLOCK, is_flex_default_block
from fxwrap.wrapper_ir import Operand, Value


@dataclass(frozen=True)
class BlockLists:
    """The blocks that each block of rows visits, as values of a program: lists of partial blocks, and of full ones.

    `rows` and `streamed` are the elements of a block.
    """

    counts: Value
    indices: Value
    full_counts: Value | None
    full_indices: Value | None
    rows: Size
    streamed: Size

    @property
    def is_trivial(self) -> bool:
        """Whether one block has all elements."""
        return is_flex_default_block(self.rows) and is_flex_default_block(self.streamed)


@dataclass(frozen=True)
class AttentionCall:
    """The operands of a call of `flex_attention`, as values of a program.

    Fields are those of `flex_formulas.FlexAttention`; the functions are graphs of ATen operators on scalars.
    `key_blocks` are the blocks of keys that blocks of queries visit, and `query_blocks` those of queries that blocks of
    keys visit, or None where the block mask has no such lists.
    `zeroes_fully_masked_rows` is whether the output is 0, not NaN, where all scores of a row are minus infinity, and
    `has_relative_logsumexp` whether maxima are subtracted from the log-sum-exp. `weight_mod` returns the factor of a
    weight from its indices and `score_buffers`, and `sink_mod` the logit of a row's sink.
    """

    query: Value
    key: Value
    value: Value
    score_mod: GraphModule
    mask_mod: GraphModule
    key_blocks: BlockLists
    query_blocks: BlockLists | None
    scale: Number | sympy.Basic
    stats_unit: float
    score_buffers: tuple[Operand, ...]
    mask_buffers: tuple[Operand, ...]
    zeroes_fully_masked_rows: bool = True
    has_relative_logsumexp: bool = False
    weight_mod: GraphModule | None = None
    sink_mod: GraphModule | None = None

    @classmethod
    def of(cls, builder: Builder, node: Node, arguments: Sequence[Any]) -> AttentionCall:
        """Returns the operands of a node; `arguments` are those of `flex_attention`."""
        query, key, value, score_mod, block_mask, scale, options, score_buffers, mask_buffers = arguments
        *_, mask_mod = block_mask
        lists: tuple[Any, ...] = literals(builder, block_mask[:-1], node)
        _, _, counts, indices, full_counts, full_indices, query_counts, query_indices, *others = lists
        full_query_counts, full_query_indices, *_, rows, keys = others
        if counts is None:  # without lists, all blocks are visited
            rows = keys = FLEX_DEFAULT_BLOCK
        key_blocks = BlockLists(counts, indices, full_counts, full_indices, rows, keys)
        query_blocks = None
        if key_blocks.is_trivial or query_counts is not None:
            query_blocks = BlockLists(query_counts, query_indices, full_query_counts, full_query_indices, keys, rows)
        unit = 1.0 if options.get("BACKEND") == "FLASH" else math.log(2)
        factor: Any = literal(builder, scale, node)
        return cls(
            builder.value(query), builder.value(key), builder.value(value), attribute_of(score_mod),
            attribute_of(mask_mod), key_blocks, query_blocks, factor, unit, literals(builder, score_buffers, node),
            literals(builder, mask_buffers, node), not options.get("ROWS_GUARANTEED_SAFE", False),
            options.get(RELATIVE_LOGSUMEXP, False),
            *[attribute_of(options[name]) if name in options else None for name in (WEIGHT_MOD, SINK_MOD)],
        )  # fmt: skip


@dataclass(frozen=True)
class Positions:
    """Positions of queries or keys in a kernel: an index, and whether it counts; None where it always does."""

    index: Index
    inside: Scalar | None


@dataclass(frozen=True)
class Score:
    """The score of a query and a key: before and after `score_mod`, and whether it is unmasked, perhaps a constant."""

    scaled: Scalar
    modified: Scalar
    mask: Scalar

    def masked(self, value: Scalar, other: float) -> Scalar:
        """Returns a value where the score is unmasked, else `other`."""
        return value if self.mask.constant is True else self.mask.where(value, other)


class ScoreBuilder:
    """Builds the scores of a kernel, whose axes of batches and heads it defines.

    `group` is the axis of the query heads that share a key head, or None where each key head has one.
    """

    def __init__(self, elements: ScalarKernelBuilder, call: AttentionCall) -> None:
        self.elements = elements
        self.body = elements.body
        self.call = call
        query = call.query.tensor_type
        self.dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
        self.query_count, self.key_count = query.sizes[2], call.key.tensor_type.sizes[2]
        key_heads = call.key.tensor_type.sizes[1]
        groups = floor_divide(query.sizes[1], key_heads)
        self.batch, self.key_head = Axis("batch", query.sizes[0]), Axis("key_head", key_heads)
        self.group = Axis("group", groups) if groups != 1 else None
        self.batch_index, self.key_head_index = as_index(self.batch), as_index(self.key_head)
        self.head_index = self.key_head_index
        if self.group is not None:
            self.head_index = self.key_head_index * groups + self.group
        self.width = Axis("width", query.sizes[3])
        self.row_block = as_index(0)

    # --- rows and streamed positions --------------------------------------------------------------------------------

    def rows(self, blocks: BlockLists, count: Size) -> tuple[list[Axis], Positions]:
        """Returns the axes of rows, and their positions in a sequence of `count` elements."""
        lists = 1 if blocks.is_trivial else blocks.counts.tensor_type.sizes[2]
        if lists == 1:
            axis = Axis("row", count)
            return [axis], Positions(as_index(axis), None)
        block, row = Axis("row_block", lists), Axis("row", blocks.rows)
        self.row_block = as_index(block)
        index = self.row_block * blocks.rows + row
        if product((lists, blocks.rows)) == count:
            return [block, row], Positions(index, None)
        return [block, row], Positions(index, self.body.index(index) < self.body.index(as_index(count)))

    def streamed(
        self, blocks: BlockLists, count: Size, split: Split | None = None
    ) -> tuple[list[Axis], Positions, Scalar | None]:
        """Returns the streamed axes of a sequence, the positions, and whether the block is full; None if none is.

        `split` is that of the streamed positions into parts.
        """
        if blocks.is_trivial:
            part = _Part.of("key", count, split)
            is_whole = product((part.axis.size, 1 if split is None else split.axis.size)) == count
            inside = None if is_whole else self._less(part, self.body.index(as_index(count)))
            return [part.axis], Positions(part.index, inside), None
        size = minimum(blocks.streamed, count)
        all_blocks = ceiling_divide(count, size)
        width = blocks.indices.tensor_type.sizes[-1]
        full_width = 0 if blocks.full_indices is None else blocks.full_indices.tensor_type.sizes[-1]
        visit, element = _Part.of("visit", total_size((width, full_width)), split), Axis("key", size)
        position = self.body.index(visit.index)
        partial = self._list_element(blocks.counts, None)
        total, is_full = partial, None
        with self.body.masked(self._less(visit, partial)):
            block = self._list_element(blocks.indices, visit.index)
        if blocks.full_indices is not None and blocks.full_counts is not None:
            total = partial + self._list_element(blocks.full_counts, None)
            is_full = self.body.index(as_index(visit.axis)) >= self._relative(visit, partial)
            with self.body.masked(is_full & self._less(visit, total)):
                at = self.body.indirect_index((position - partial).apply("maximum", 0), full_width)
                block = is_full.where(self._list_element(blocks.full_indices, at), block)
        visited = self._less(visit, total)
        last = self.body.index(as_index(all_blocks) - 1)  # lists of wrong blocks read no other memory
        block = block.apply("maximum", 0).apply("minimum", last)
        index = self.body.indirect_index(block, all_blocks) * size + element
        is_whole = product((all_blocks, size)) == count
        visible = all_of(visited, True if is_whole else index_less(self.elements.reader, index, count))
        assert isinstance(visible, Scalar)
        return [visit.axis, element], Positions(index, visible), is_full

    def _less(self, part: _Part, limit: Scalar) -> Scalar:
        """Returns whether a position of a part is less than a limit, as a bound of its axis."""
        return self.body.index(as_index(part.axis)) < self._relative(part, limit)

    def _relative(self, part: _Part, limit: Scalar) -> Scalar:
        """Returns the number of positions of a part that are less than a limit, if not negative."""
        first = limit if part.start.constant == 0 else limit - self.body.index(part.start)
        return first if part.step == 1 else (first + (part.step - 1)).apply("floor_divide", part.step)

    def _list_element(self, value: Value, at: Index | None) -> Scalar:
        """Returns an element of the lists of blocks, int64."""
        sizes = value.tensor_type.sizes
        head = self.head_index if sizes[1] != 1 else as_index(0)
        batch = self.batch_index if sizes[0] != 1 else as_index(0)
        indices = (batch, head, self.row_block, *(() if at is None else (at,)))
        return self.elements.load(value, indices).to(torch.int64)

    # --- scores -----------------------------------------------------------------------------------------------------

    def score(
        self, query: Positions, key: Positions, streamed: Positions, is_full: Scalar | None, factors: Sequence[Scalar]
    ) -> Score:
        """Returns the score of a query and a key, whose products over the width are those of two factors.

        `streamed` are the positions that the kernel streams, `query` or `key`.
        """
        call, body = self.call, self.body
        left, right = factors
        (product_,) = body.reduce("sum", left * right, [self.width])
        indices = self.indices(query, key)
        scaled = product_ * self.elements.reader.number(call.scale, self.dtype)
        with self.unmasked(query, key):
            modified = self.elements.call(call.score_mod, [scaled, *indices, *call.score_buffers]).to(self.dtype)
            mask = self.elements.call(call.mask_mod, [*indices, *call.mask_buffers])
        if mask.dtype is not torch.bool:
            raise Declined(f"its mask_mod returns {mask.dtype}")
        if is_full is not None:
            mask = is_full | mask
        if streamed.inside is not None:
            mask = streamed.inside & mask
        return Score(scaled, modified, mask)

    def weight_factor(self, query: Positions, key: Positions) -> Scalar | None:
        """Returns the factor of the weight of a query and a key; None for no factor."""
        if self.call.weight_mod is None:
            return None
        with self.unmasked(query, key):
            operands = [*self.indices(query, key), *self.call.score_buffers]
            return self.elements.call(self.call.weight_mod, operands).to(self.dtype)

    def indices(self, query: Positions, key: Positions) -> list[Scalar]:
        """Returns the indices that the functions of scores take: batch, head, query and key, int32."""
        used = (self.batch_index, self.head_index, query.index, key.index)
        return [self.body.index(item).to(torch.int32) for item in used]

    @contextmanager
    def unmasked(self, *positions: Positions) -> Iterator[None]:
        """Masks the loads inside with the conditions of positions."""
        conditions = [item.inside for item in positions if item.inside is not None]
        if not conditions:
            yield
            return
        condition = conditions[0]
        for other in conditions[1:]:
            condition = condition & other
        with self.body.masked(condition):
            yield

    # --- memory -----------------------------------------------------------------------------------------------------

    def load_query(self, tensor: Value, position: Positions, *column: IndexLike) -> Scalar:
        """Loads an element of a tensor of query rows, in the computation's type; 0 where the position is outside."""
        return self._load(tensor, self.head_index, position, column)

    def load_key(self, tensor: Value, position: Positions, *column: IndexLike) -> Scalar:
        """Loads an element of keys or values, in the computation's type; 0 where the position is outside."""
        return self._load(tensor, self.key_head_index, position, column)

    def _load(self, tensor: Value, head: Index, position: Positions, column: Sequence[IndexLike]) -> Scalar:
        batch = self.batch_index if tensor.tensor_type.sizes[0] != 1 else as_index(0)
        with self.unmasked(position):
            return self.elements.load(tensor, (batch, head, position.index, *map(as_index, column))).to(self.dtype)


def store_element(
    body: KernelBuilder, name: str, output: Value, indices: Sequence[IndexLike], result: Scalar,
    inside: Scalar | None = None,
) -> Buffer:  # fmt: skip
    """Stores an element of an output, in its dtype, where a condition holds; returns the kernel's buffer."""
    type_ = output.tensor_type
    body.store(name, strided_index(tuple(map(as_index, indices)), type_.strides), result.to(type_.dtype), inside)
    return Buffer(name, type_.dtype, extent_of(type_))


@dataclass(frozen=True)
class Split:
    """The split of streamed positions into parts, of which `axis` is the parallel axis.

    Parts are ranges, or with `interleaved`, every position of a part is that many after the one before: so all have as
    many positions below a limit.
    """

    axis: Axis
    interleaved: bool


@dataclass(frozen=True)
class _Part:
    """The positions of a part of a streamed axis: `start` plus multiples of `step`."""

    axis: Axis
    start: Index
    step: int

    @classmethod
    def of(cls, name: str, size: Size, split: Split | None) -> _Part:
        if split is None:
            return cls(Axis(name, size), as_index(0), 1)
        count = split.axis.size
        axis, start = Axis(name, ceiling_divide(size, count)), as_index(split.axis)
        if split.interleaved and isinstance(count, int):
            return cls(axis, start, count)
        return cls(axis, start * axis.size, 1)

    @property
    def index(self) -> Index:
        """The position of an element of the axis."""
        return self.start + as_index(self.axis) * self.step
