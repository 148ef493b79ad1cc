"""Attention written as its formula becomes one kernel: a call of FlexAttention, whose scores lowering streams.

The score matrix is never in memory then. What the formula returns for rows without keys stays: NaN where all scores are
minus infinity, a mean where they are equal.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.attention_formulas import AttentionFormula, find_attention, permutation, sizes_of
from fxwrap.fx_passes.attention_masks import name_of
from fxwrap.fx_passes.attention_operands import AttentionOperands, attention_operands, kernel_operand
from fxwrap.fx_passes.attention_scores import (
    ReadTensor,
    ScoreFunctions,
    UnsupportedScoresError,
    product_split,
    score_functions,
)
from fxwrap.fx_passes.flex_attention import has_attention_kernel
from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous, size_hint, storages_of, written_storages
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.torch_compat import FakeTensor, flex_attention_operator, in_fake_mode, in_tracing_fake_mode

log = logging.getLogger("fxwrap.compile")

_aten = torch.ops.aten

RECOGNISED = "attention recognised"
"""The coverage reason of nodes that one attention kernel replaces."""

_SMALL = "two matmuls and a kernel between them are faster for these sizes"

_WHOLE = 1 << 30
"""The block size of FlexAttention without a block mask."""


def recognize_attention(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which attention formulas are calls of FlexAttention, where a kernel is faster."""
    formulas, missed = find_attention(graph.nodes, graph.fakes)
    if not formulas and not missed:
        return graph
    reasons = {item.softmax.name: f"no attention kernel: {item.reason}" for item in missed}
    written = written_storages(graph.nodes, graph.fakes)
    rewriter = _Rewriter(GraphCopy(graph), graph.fakes, written, context.options.device_specs())
    for formula in formulas:
        operands = attention_operands(formula, graph.fakes)
        reason = _decline_reason(operands, graph.fakes, context, written)
        if reason is None:
            try:
                rewriter.replace(formula, operands)
            except UnsupportedScoresError as error:
                reason = str(error)
        if reason is not None:
            reasons[formula.softmax.name] = f"no attention kernel: {reason}"
        else:
            reasons |= {node.name: RECOGNISED for node in (formula.query_key, *formula.inner, formula.output)}
    for name, reason in reasons.items():
        log.debug("%s: %s", name, reason)
    return rewriter.finish(reasons)


def _decline_reason(
    operands: AttentionOperands, fakes: NodeValues, context: FxPassContext, written: set[int]
) -> str | None:
    """Returns why attention with these operands stays as it is written; None if it is replaced."""
    if not {*map(str, (_aten.bmm.default, _aten.mm.default, _aten._softmax.default))}.isdisjoint(
        context.extern_operators
    ):
        return "an option preserves its operators"
    if any(storages_of(fakes[node]) & written for node in operands.nodes):
        return "the graph overwrites one of its operands"
    stages = (operands.query, operands.key, operands.value)
    tensors = [fakes[stage.node] for stage in stages]
    widths = [fake.shape[stage.width_dim] for fake, stage in zip(tensors, stages, strict=True)]
    is_known = type(operands.heads) is int
    if not is_known or not has_attention_kernel(tensors, [widths[0], widths[2]], context.options):
        return "no kernel takes its operands"
    return None


def _result_fakes(query: FakeTensor, value: FakeTensor, is_transposed: bool) -> tuple[torch.Tensor, ...]:
    """Returns output, log-sum-exp and maxima; rows of the output are outside of heads if `is_transposed`."""
    batch, heads, rows, width = *query.shape[:3], value.shape[3]
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    with in_fake_mode(query.fake_mode):
        if is_transposed:
            output = query.new_empty((batch, rows, heads, width)).transpose(1, 2)
        else:
            output = query.new_empty((batch, heads, rows, width))
        statistics = [query.new_empty((batch, heads, rows), dtype=dtype) for _ in range(2)]
    return (output, *statistics)


def _is_contiguous_copy(node: Node) -> bool:
    return node.target is _aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format


class _Rewriter:
    """Writes calls of FlexAttention into a copy of the graph."""

    def __init__(self, copy: GraphCopy, fakes: NodeValues, written: set[int], specs: Mapping[str, DeviceSpec]) -> None:
        self.specs = specs
        self.copy = copy
        self.fakes = fakes
        self.written = written

    def replace(self, formula: AttentionFormula, operands: AttentionOperands) -> None:
        """Replaces a formula. Raises UnsupportedScoresError."""
        functions = score_functions(formula, operands, self.fakes, self.written)
        spec = self.specs.get(self.fakes[formula.output].device.type)
        in_library = functions.only_scale and spec is not None and self._reaches(formula, spec.library_attention_sizes)
        in_kernel = spec is not None and self._reaches(formula, spec.streaming_attention_sizes)
        if not in_library and not in_kernel:
            raise UnsupportedScoresError(_SMALL)
        before, name = self.copy.node_map[formula.output], f"{formula.softmax.name}_attention"
        stages = (operands.query, operands.key, operands.value)
        tensors = [kernel_operand(self.copy, before, stage, operands, name) for stage in stages]
        chain = self._split_and_copies(formula, operands)
        result = None
        if in_library:
            result = self._library_call(before, tensors, functions.scale, is_transposed=len(chain) > 1, name=name)
        if result is None and not in_kernel:
            raise UnsupportedScoresError(_SMALL)
        if result is None:
            result = self._kernel_call(before, formula, operands, functions, tensors, len(chain) > 1, name)
        erased = (formula.query_key, *formula.inner, formula.output)
        if not chain:
            sizes = list(self.fakes[formula.output].shape)
            result = self.copy.call(before, _aten.view.default, (result, sizes), name)
            self.copy.substitute(formula.output, result, "fused", erased[:-1])
            return
        split, *contiguous = chain
        self.copy.substitute(split, result, "fused", erased)
        for clone in contiguous:
            self.copy.substitute(clone, self.copy.node_map[clone.all_input_nodes[0]], "view")

    def _reaches(self, formula: AttentionFormula, least_sizes: Sequence[tuple[torch.dtype, int]]) -> bool:
        """Whether the scores have as many rows and keys as a dtype needs; symbolic ones count as their hints."""
        fake = self.fakes[formula.query_key]
        least = dict(least_sizes).get(fake.dtype)
        return least is not None and min(map(size_hint, fake.shape[-2:])) >= least

    def _library_call(
        self, before: Node, tensors: Sequence[Node], scale: float, is_transposed: bool, name: str
    ) -> Node | None:
        """Returns the output of the kernel that torch selects; None if it selects none, or the operands are unusual.

        The output is contiguous, or its transposition to (batch, rows, heads, width) is.
        """
        fakes = [self.copy.fakes[item] for item in tensors]
        is_static = all(type(size) is int for fake in fakes for size in fake.shape)
        if not is_static or len({fake.shape[1] for fake in fakes}) > 1:
            return None
        with in_tracing_fake_mode(fakes[0].fake_mode), torch.no_grad():
            module = make_fx(lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=scale))(*fakes)
        if any(node.target in (_aten.bmm.default, _aten.matmul.default) for node in module.graph.nodes):
            return None
        result: Node = self.copy.inline(before, module, tensors, name, name)
        fake = self.copy.fakes[result]
        if is_contiguous(fake.transpose(1, 2) if is_transposed else fake):
            return result
        keywords = {"memory_format": torch.contiguous_format}
        if not is_transposed:
            return self.copy.call(before, _aten.clone.default, (result,), name, keywords)
        inward = self.copy.call(before, _aten.transpose.int, (result, 1, 2), name)
        dense = self.copy.call(before, _aten.clone.default, (inward,), name, keywords)
        return self.copy.call(before, _aten.transpose.int, (dense, 1, 2), name)

    def _kernel_call(
        self, before: Node, formula: AttentionFormula, operands: AttentionOperands, functions: ScoreFunctions,
        tensors: Sequence[Node], is_transposed: bool, name: str,
    ) -> Node:  # fmt: skip
        """Returns the output of FlexAttention, stored like that of `_library_call`."""
        copy = self.copy
        buffers = tuple([self._buffer(before, item, operands, name) for item in functions.reads])
        score_mod = copy.attribute(before, f"{name}_scores", functions.score_mod)
        mask_mod = copy.attribute(before, f"{name}_mask", functions.mask_mod)
        block_mask = (*[None] * 10, _WHOLE, _WHOLE, mask_mod)
        kernel_options = {"ROWS_GUARANTEED_SAFE": not formula.zeroes_fully_masked_rows}
        arguments = (*tensors, score_mod, block_mask, functions.scale, kernel_options, buffers, ())
        results = _result_fakes(copy.fakes[tensors[0]], copy.fakes[tensors[2]], is_transposed)
        call = copy.call(before, flex_attention_operator(), arguments, name, fake=results)
        return copy.call(before, operator.getitem, (call, 0), name, fake=results[0])

    def _buffer(self, before: Node, read: ReadTensor, operands: AttentionOperands, name: str) -> Node:
        """Returns a tensor that the scores read, with a dimension for each index that it is read at."""
        copy, node = self.copy, self.copy.node_map[read.node]
        for dim in reversed(range(len(read.coordinates))):
            coordinate = read.coordinates[dim]
            if coordinate is None:
                node = copy.call(before, _aten.select.int, (node, dim, 0), name)
            elif coordinate.part == "product" and operands.heads != 1:
                sizes = copy.fakes[node].shape
                split = [*sizes[:dim], *product_split(sizes[dim], operands.heads), *sizes[dim + 1 :]]
                node = copy.call(before, _aten.view.default, (node, split), name)
        return node

    def _split_and_copies(self, formula: AttentionFormula, operands: AttentionOperands) -> list[Node]:
        """Returns the nodes that read the output as (batch, heads, rows, width); none if it is not split like this.

        These are the view that splits batch and heads, and copies after its transposition to (batch, rows, heads,
        width), which are views of an output that is stored like this.
        """
        split = next(iter(formula.output.users))
        sizes = sizes_of(split, self.fakes) if isinstance(self.fakes.get(split), FakeTensor) else []
        is_split = len(formula.output.users) == 1 and name_of(split) in ("view", "_unsafe_view", "unsafe_view")
        if not is_split or len(sizes) != 4 or tuple(sizes[:2]) != (operands.batch, operands.heads):
            return []
        if storages_of(self.fakes[split]) & self.written:
            return []
        transposed = next(iter(split.users), None)
        if transposed is None or len(split.users) > 1 or permutation(transposed, self.fakes) != [0, 2, 1, 3]:
            return [split]
        copies = [user for user in transposed.users if _is_contiguous_copy(user)]
        is_returned = any(user.op == "output" for user in transposed.users)
        return [split, *copies] if copies and not is_returned else [split]

    def finish(self, reasons: Mapping[str, str]) -> PreparedGraph:
        """Returns the edited graph, with the reasons why other softmaxes stay as they are."""
        result = self.copy.finish()
        return replace(result, coverage_reasons={**result.coverage_reasons, **reasons})
