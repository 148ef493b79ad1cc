"""FlexAttention as one kernel of the loop IR: scores, their maximum, weights, and sums over keys.

The kernel's parallel axes are batch, head, query row and column of the values. It reduces products over the width of a
head, and the rest over keys. A block mask makes rows pairs (block, row of the block) and keys pairs (position in the
list of visited blocks, key of the block): scores beyond the count of the list are minus infinity, so that a schedule
need not visit them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import attribute_of
from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Index,
    IndexLike,
    Kernel,
    KernelBuilder,
    Scalar,
    as_index,
    canonicalize_axes,
    rename_axes,
    strided_index,
)
from fxwrap.lowering.builder import Builder, LoweringRequest
from fxwrap.lowering.calls.nodes import literal, literals
from fxwrap.lowering.fusion.kernels import extent_of
from fxwrap.lowering.launches import emit_whole_kernel
from fxwrap.lowering.rules import Declined
from fxwrap.lowering.rules.indexing_common import all_of, index_less
from fxwrap.lowering.scalar_graphs import ScalarKernelBuilder
from fxwrap.lowering.symbols.table import size_hints
from fxwrap.symbolic import Number, Size, ceiling_divide, floor_divide, minimum, product
from fxwrap.symbolic import total as total_size
from fxwrap.torch_compat import is_flex_default_block
from fxwrap.wrapper_ir import Operand, TensorType, Value


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
    `zeroes_fully_masked_rows` is whether the output is 0, not NaN, where all scores of a row are minus infinity.
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
    zeroes_fully_masked_rows: bool = True

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
            literals(builder, mask_buffers, node), not options.get("ROWS_GUARANTEED_SAFE", False),
        )  # fmt: skip


def emit_attention(builder: Builder, request: LoweringRequest, node: Node) -> None:
    """Emits the kernels of a call of `flex_attention`, and records its operand.

    Few rows of many keys are split: one kernel reduces parts of the keys, another one combines their results. Raises
    Declined if an operator of the call's functions cannot be computed element by element, and FxwrapError for kernels
    that their language cannot express.
    """
    call, fakes = AttentionCall.of(builder, node), builder.fakes[node]
    used = {user.args[1] for user in node.users}
    outputs = [
        builder.add_root(f"{node.name}_{position}", fake) if position in used else None
        for position, fake in enumerate(fakes)
    ]
    hint, written = size_hints(builder.state.symbols), [value for value in outputs if value is not None]
    spec = request.options.device_specs()[call.query.tensor_type.device.type]
    splits = _split_count(call, spec.massively_parallel, hint)
    elements = ScalarKernelBuilder(builder, request.options)
    attention = _AttentionBuilder(elements, call, splits)
    if splits == 1:
        kernel, inputs = attention.build(outputs)
        emit_whole_kernel(builder, request, node, "flex_attention", kernel, inputs, written)
    else:
        sizes = (*call.query.tensor_type.sizes[:3], splits)
        shapes = ((*sizes, call.value.tensor_type.sizes[3]), sizes, sizes)
        types = [TensorType.contiguous(attention.dtype, item, call.query.tensor_type.device) for item in shapes]
        parts = [builder.add_buffer(f"{node.name}_parts", type_) for type_ in types]
        kernel, inputs = attention.build(parts)
        emit_whole_kernel(builder, request, node, "flex_attention", kernel, inputs, parts)
        for group in (outputs[:1], outputs[1:]):  # of each column, and of each row
            if any(group):
                inputs, kernel = _combination(call, parts, [item if item in group else None for item in outputs])
                written = [value for value in group if value is not None]
                name = "flex_attention_parts"
                emit_whole_kernel(builder, request, node, name, canonicalize_axes(kernel, hint), inputs, written)
    builder.env[node] = tuple(outputs)


def _split_count(call: AttentionCall, massively_parallel: bool, hint: Callable[[Size], int]) -> int:
    """Returns the number of parts of the keys, so that all processors have work; 1 where rows suffice."""
    batch, _, rows, _ = map(hint, call.query.tensor_type.sizes)
    _, key_heads, keys, _ = map(hint, call.key.tensor_type.sizes)
    tiles, least = (_GPU_PROGRAMS, _GPU_PART) if massively_parallel else (_CPU_TILES, _CPU_PART)
    programs = max(1, batch * key_heads * -(-rows // _ROW_TILE))
    return max(1, min(-(-tiles // programs), keys // least)) if rows <= _ROW_TILE else 1


_ROW_TILE = 64
"""More query rows than this are never split."""

_GPU_PROGRAMS, _GPU_PART = 264, 256
"""Programs that occupy a large GPU, and the least keys of a part."""

_CPU_TILES, _CPU_PART = 16, 1024
"""Tiles that occupy the threads of most processors, and the least keys of a part."""


def _combination(
    call: AttentionCall, parts: Sequence[Value], outputs: Sequence[Value | None]
) -> tuple[tuple[Value, ...], Kernel]:
    """Returns the kernel that combines the results of parts, and those that it reads.

    `parts` are weighted sums, sums of weights, and maxima. `outputs` are the output alone, or others.
    """
    body, sizes = KernelBuilder(), parts[0].tensor_type.sizes
    *point, split, column = [Axis(f"axis{number}", size) for number, size in enumerate(sizes)]
    buffers = [Buffer(f"in{number}", item.tensor_type.dtype, extent_of(item.tensor_type))
               for number, item in enumerate(parts)]  # fmt: skip

    def load(number: int, indices: Sequence[Axis]) -> Scalar:
        index = strided_index(tuple(map(as_index, indices)), parts[number].tensor_type.strides)
        return body.load(buffers[number].name, index, buffers[number].dtype)

    maximum = load(2, (*point, split))
    (largest,) = body.reduce("max", maximum)
    shift = largest.equals(-math.inf).where(0.0, largest)
    weight = (maximum - shift).exp()
    (total,) = body.reduce("sum", load(1, (*point, split)) * weight)
    weighted = total  # of results that nothing uses
    if outputs[0] is not None:
        (weighted,) = body.reduce("sum", load(0, (*point, split, column)) * weight)
    written: list[Buffer] = []
    for result, output in zip(_results(call, weighted, total, largest, shift), outputs, strict=True):
        if output is not None:
            type_ = output.tensor_type
            written.append(Buffer(f"out{len(written)}", type_.dtype, extent_of(type_)))
            indices = tuple(map(as_index, (*point, column)[: len(type_.sizes)]))
            body.store(written[-1].name, strided_index(indices, type_.strides), result.to(type_.dtype))
    by_column = outputs[0] is not None
    axes = [*point, *([column] if by_column else [])]
    first = 0 if by_column else 1
    return tuple(parts[first:]), body.finish(axes, [split], buffers[first:], written)


def _results(
    call: AttentionCall, weighted: Scalar, total: Scalar, largest: Scalar, shift: Scalar
) -> tuple[Scalar, Scalar, Scalar]:
    """Returns output, log-sum-exp and maximum of a row from its reductions."""
    divisor = total.equals(0.0).where(1.0, total) if call.zeroes_fully_masked_rows else total
    return (
        weighted / divisor,
        (total.log() + shift) / call.stats_unit,
        largest / call.stats_unit,
    )


class _AttentionBuilder:
    def __init__(self, elements: ScalarKernelBuilder, call: AttentionCall, splits: int) -> None:
        self.elements = elements
        self.split = None if splits == 1 else Axis("split", splits)
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
        if groups != 1 and self.row_count == 1:  # the heads of a group are the rows of a tile
            rows, self.row = [], as_index(0)
        parts = [] if self.split is None else [self.split]
        self.axes = [batch, key_head, *parts, *([group] if groups != 1 else []), *rows, self.columns]
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
            axis, start = self._part("key", self.key_count)
            is_whole = product((axis.size, 1 if self.split is None else self.split.size)) == self.key_count
            inside = None if is_whole else self._less(axis, start, self.body.index(as_index(self.key_count)))
            return [axis], start + axis, inside, None
        size = minimum(blocks.keys, self.key_count)
        count = ceiling_divide(self.key_count, size)
        width = blocks.indices.tensor_type.sizes[-1]
        full_width = 0 if blocks.full_indices is None else blocks.full_indices.tensor_type.sizes[-1]
        (visit, start), key = self._part("visit", total_size((width, full_width))), Axis("key", size)
        position = self.body.index(start + visit)
        partial = self._list_element(blocks.counts, None)
        total, is_full = partial, None
        with self.body.masked(self._less(visit, start, partial)):
            block = self._list_element(blocks.indices, start + visit)
        if blocks.full_indices is not None and blocks.full_counts is not None:
            total = partial + self._list_element(blocks.full_counts, None)
            is_full = self.body.index(as_index(visit)) >= self._relative(partial, start)
            with self.body.masked(is_full & self._less(visit, start, total)):
                at = self.body.indirect_index((position - partial).apply("maximum", 0), full_width)
                block = is_full.where(self._list_element(blocks.full_indices, at), block)
        visited = self._less(visit, start, total)
        last = self.body.index(as_index(count) - 1)  # lists of wrong blocks read no other memory
        block = block.apply("maximum", 0).apply("minimum", last)
        index = self.body.indirect_index(block, count) * size + key
        is_whole = product((count, size)) == self.key_count
        visible = all_of(visited, True if is_whole else index_less(self.elements.reader, index, self.key_count))
        assert isinstance(visible, Scalar)
        return [visit, key], index, visible, is_full

    def _part(self, name: str, size: Size) -> tuple[Axis, Index]:
        """Returns the axis of a part of a streamed axis, and the index at which the part starts."""
        if self.split is None:
            return Axis(name, size), as_index(0)
        length = ceiling_divide(size, self.split.size)
        return Axis(name, length), as_index(self.split) * length

    def _less(self, axis: Axis, start: Index, limit: Scalar) -> Scalar:
        """Returns whether a position of a part is less than a limit, as a bound of the axis."""
        return self.body.index(as_index(axis)) < self._relative(limit, start)

    def _relative(self, limit: Scalar, start: Index) -> Scalar:
        return limit if start.constant == 0 else limit - self.body.index(start)

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
        results = (weighted, total, largest)
        if self.split is None:
            results = _results(call, weighted, total, largest, shift)
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
        split = () if self.split is None else (as_index(self.split),)
        indices = (self.batch_index, self.head_index, self.row, *split, as_index(self.columns))
        index = strided_index(indices[: len(type_.sizes)], type_.strides)
        self.body.store(name, index, result.to(type_.dtype), inside)
        return Buffer(name, type_.dtype, extent_of(type_))
