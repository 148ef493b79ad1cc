"""FlexAttention as one kernel of the loop IR: scores, their maximum, weights, and sums over keys.

The kernel's parallel axes are batch, head, query row and column of the values. It reduces products over the width of a
head, and the rest over keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import Axis, Buffer, Index, IndexLike, Kernel, Scalar, as_index, canonicalize_axes, rename_axes
from fxwrap.lowering.attention_scores import AttentionCall, Positions, ScoreBuilder, Split, store_element
from fxwrap.lowering.builder import Builder, LoweringRequest
from fxwrap.lowering.launches import emit_whole_kernel
from fxwrap.lowering.scalar_graphs import ScalarKernelBuilder
from fxwrap.lowering.symbols.table import SizeHints
from fxwrap.symbolic import Size, product
from fxwrap.wrapper_ir import TensorType, Value


def emit_attention(builder: Builder, request: LoweringRequest, node: Node) -> None:
    """Emits the kernels of a call of `flex_attention`, and records its operand.

    Few rows of many keys are split: one kernel reduces parts of the keys, another one combines their results. Raises
    Declined if an operator of the call's functions cannot be computed element by element, and FxwrapError for kernels
    that their language cannot express.
    """
    call, fakes = AttentionCall.of(builder, node, (*node.args, (), ())[:9]), builder.fakes[node]
    used = {user.args[1] for user in node.users}
    outputs = [
        builder.add_root(f"{node.name}_{position}", fake) if position in used else None
        for position, fake in enumerate(fakes)
    ]
    hint, written = SizeHints(builder.state.symbols), [value for value in outputs if value is not None]
    spec = request.options.device_specs()[call.query.tensor_type.device.type]
    splits = _split_count(call, spec, hint)
    elements = ScalarKernelBuilder(builder, request.options)
    attention = _AttentionBuilder(elements, call, splits, spec.massively_parallel)
    if splits == 1:
        kernel, inputs = attention.build(outputs, hint)
        emit_whole_kernel(builder, request, node, "flex_attention", kernel, inputs, written)
    else:
        sizes = (*call.query.tensor_type.sizes[:3], splits)
        shapes = ((*sizes, call.value.tensor_type.sizes[3]), sizes, sizes)
        types = [TensorType.contiguous(attention.dtype, item, call.query.tensor_type.device) for item in shapes]
        parts = [builder.add_buffer(f"{node.name}_parts", type_) for type_ in types]
        kernel, inputs = attention.build(parts, hint)
        emit_whole_kernel(builder, request, node, "flex_attention", kernel, inputs, parts)
        for group in (outputs[:1], outputs[1:]):  # of each column, and of each row
            if any(group):
                elements = ScalarKernelBuilder(builder, request.options)
                used_outputs = [item if item in group else None for item in outputs]
                inputs, kernel = _combination(elements, call, parts, used_outputs)
                written = [value for value in group if value is not None]
                name = "flex_attention_parts"
                emit_whole_kernel(builder, request, node, name, canonicalize_axes(kernel, hint), inputs, written)
    builder.env[node] = tuple(outputs)


def _split_count(call: AttentionCall, spec: DeviceSpec, hint: Callable[[Size], int]) -> int:
    """Returns the number of parts of the keys, so that all processors have work; 1 where rows suffice."""
    batch, _, rows, _ = map(hint, call.query.tensor_type.sizes)
    _, key_heads, keys, _ = map(hint, call.key.tensor_type.sizes)
    if rows > _ROW_TILE:
        return 1
    programs = max(1, batch * key_heads)
    if not spec.massively_parallel:
        return max(1, min(-(-_CPU_TILES // programs), keys // _CPU_PART))
    least = _GPU_PART if call.key_blocks.is_trivial else _GPU_MASKED_PART
    count = max(1, min(2 * spec.multiprocessors // programs, keys // least))
    return 1 << (count.bit_length() - 1)  # so that parts have whole blocks of keys


_ROW_TILE = 64
"""More query rows than this are never split."""

_GPU_PART, _GPU_MASKED_PART = 64, 256
"""The least keys of a part on a GPU: without a block mask, and with one."""

_CPU_TILES, _CPU_PART = 16, 1024
"""Tiles that occupy the threads of most processors, and the least keys of a part."""


def _combination(
    elements: ScalarKernelBuilder, call: AttentionCall, parts: Sequence[Value], outputs: Sequence[Value | None]
) -> tuple[tuple[Value, ...], Kernel]:
    """Returns the kernel that combines the results of parts, and what it reads.

    `parts` are weighted sums, sums of weights, and maxima. `outputs` are the output alone, or others.
    """
    body, sizes = elements.body, parts[0].tensor_type.sizes
    *point, split, column = [Axis(f"axis{number}", size) for number, size in enumerate(sizes)]
    row = tuple(map(as_index, point))
    by_column = outputs[0] is not None
    products = elements.load(parts[0], (*row, as_index(split), as_index(column))) if by_column else None
    sums, maximum = [elements.load(item, (*row, as_index(split))) for item in parts[1:]]
    (largest,) = body.reduce("max", maximum)
    shift = largest.equals(-math.inf).where(0.0, largest)
    weight = (maximum - shift).exp()
    (total,) = body.reduce("sum", sums * weight)
    weighted = total  # of results that nothing uses
    if products is not None:
        (weighted,) = body.reduce("sum", products * weight)
    results = _results(elements, call, row, (weighted, total, largest, shift))
    written: list[Buffer] = []
    for result, output in zip(results, outputs, strict=True):
        if output is not None:
            indices = (*point, column)[: len(output.tensor_type.sizes)]
            written.append(store_element(body, f"out{len(written)}", output, indices, result))
    axes = [*point, *([column] if by_column else [])]
    kernel = body.finish(axes, [split], [buffer for buffer, _ in elements.inputs], written)
    return tuple([value for _, value in elements.inputs]), kernel


def _results(
    elements: ScalarKernelBuilder, call: AttentionCall, row: Sequence[Index], reductions: tuple[Scalar, ...]
) -> tuple[Scalar, Scalar, Scalar]:
    """Returns output, log-sum-exp and maximum of a row (batch, head, query) from its reductions.

    These are the sums of weighted values and of weights, the maximum of scores, and what they are shifted by.
    """
    weighted, total, largest, shift = reductions
    if call.sink_mod is not None:
        indices = [elements.body.index(item).to(torch.int32) for item in (*row, as_index(0))]
        sink = elements.call(call.sink_mod, [*indices, *call.score_buffers]).to(total.dtype)
        shift = largest.apply("maximum", sink)
        factor = (largest - shift).exp()
        weighted, total, largest = weighted * factor, total * factor + (sink - shift).exp(), shift
    divisor = total.equals(0.0).where(1.0, total) if call.zeroes_fully_masked_rows else total
    return (
        weighted / divisor,
        (total.log() if call.has_relative_logsumexp else total.log() + shift) / call.stats_unit,
        largest / call.stats_unit,
    )


class _AttentionBuilder(ScoreBuilder):
    def __init__(self, elements: ScalarKernelBuilder, call: AttentionCall, splits: int, interleaved: bool) -> None:
        super().__init__(elements, call)
        self.split = None if splits == 1 else Split(Axis("split", splits), interleaved)
        self.columns = Axis("column", call.value.tensor_type.sizes[3])

    def _merges_group(self, group: Axis, hint: Callable[[Size], int]) -> bool:
        """Whether the rows of all query heads of a group are rows of one tile, which loads keys once."""
        blocks = self.call.key_blocks
        visits_alike = blocks.is_trivial or blocks.counts.tensor_type.sizes[1:] == (1, 1)
        return self.query_count == 1 or (visits_alike and hint(product((group.size, self.query_count))) <= _ROW_TILE)

    def _rows_of_group(self, group: Axis) -> tuple[list[Axis], Positions]:
        """Returns the axis of rows of a group's query heads, instead of that of the group, and their queries."""
        if self.query_count == 1:
            return [], Positions(as_index(0), None)
        row, self.group = Axis("row", product((group.size, self.query_count))), None
        self.head_index = self.key_head_index * group.size + as_index(row) // self.query_count
        return [row], Positions(as_index(row) % self.query_count, None)

    def build(self, outputs: Sequence[Value | None], hint: Callable[[Size], int]) -> tuple[Kernel, tuple[Value, ...]]:
        call, body, blocks = self.call, self.body, self.call.key_blocks
        rows, query = self.rows(blocks, self.query_count)
        if self.group is not None and self._merges_group(self.group, hint):
            rows, query = self._rows_of_group(self.group)
        split = () if self.split is None else (self.split.axis,)
        parts = [item for item in (self.batch, self.key_head, *split, self.group) if item is not None]
        keys, key, is_full = self.streamed(blocks, self.key_count, self.split)
        factors = self.load_query(call.query, query, self.width), self.load_key(call.key, key, self.width)
        score = self.score(query, key, key, is_full, factors)
        scores = score.masked(score.modified, -math.inf)
        (largest,) = body.reduce("max", scores, keys)
        shift = largest.equals(-math.inf).where(0.0, largest)
        weights = (scores - shift).exp()
        (total,) = body.reduce("sum", weights, keys)
        factor = self.weight_factor(query, key)
        scaled = weights if factor is None else weights * factor
        (weighted,) = body.reduce("sum", scaled * self.load_key(call.value, key, self.columns), keys)
        results = (weighted, total, largest)
        if self.split is None:
            row = (self.batch_index, self.head_index, query.index)
            with self.unmasked(query):
                results = _results(self.elements, call, row, (weighted, total, largest, shift))
        indices: tuple[IndexLike, ...] = (self.batch_index, self.head_index, query.index, *split, self.columns)
        buffers: list[Buffer] = []
        for result, output in zip(results, outputs, strict=True):
            if output is not None:
                used = indices[: len(output.tensor_type.sizes)]
                buffers.append(store_element(body, f"out{len(buffers)}", output, used, result, query.inside))
        inputs = [buffer for buffer, _ in self.elements.inputs]
        axes = [*parts, *rows, self.columns]
        kernel = rename_axes(body.finish(axes, [self.width, *keys], inputs, buffers))
        return kernel, tuple([value for _, value in self.elements.inputs])
