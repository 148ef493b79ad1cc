"""Attention written as its formula becomes one kernel: a call of FlexAttention, whose scores lowering streams.

The score matrix is never in memory then. What the formula returns for rows without keys stays: NaN where all scores are
minus infinity, a mean where they are equal.
"""

from __future__ import annotations

import logging

import torch
from torch.fx import GraphModule

from fxwrap.fx_passes.attention.biased import replace_biased_attention
from fxwrap.fx_passes.attention.calls import AttentionRewriter
from fxwrap.fx_passes.attention.elements import UnsupportedScoresError
from fxwrap.fx_passes.attention.flex import has_attention_kernel
from fxwrap.fx_passes.attention.formulas import find_attention
from fxwrap.fx_passes.attention.operands import AttentionOperands, attention_operands
from fxwrap.fx_passes.attention.softmax_shifts import remove_softmax_shifts
from fxwrap.fx_passes.composed_permutations import compose_permutations
from fxwrap.fx_passes.graph_copy import GraphCopy, storages_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import written_storages
from fxwrap.options import Options

log = logging.getLogger("fxwrap.compile")

_aten = torch.ops.aten

RECOGNISED = "attention recognised"
"""The coverage reason of nodes that one attention kernel replaces."""

_DECLINED = "fxwrap_declined_attention"
"""The metadata key of a softmax in a joint graph: why neither it nor its backward is replaced."""


def recognize_attention(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which attention formulas are calls of FlexAttention, where a kernel is faster.

    A formula whose backward is in the graph is replaced with it.
    """
    return _recognize(graph, context, only_with_backward=False)


def recognize_attention_in_joint_graph(joint: GraphModule, options: Options) -> GraphModule:
    """Returns a joint graph of training in which attention formulas and their backward are calls of FlexAttention.

    Others, and the reasons why they stay, are for `recognize_attention`.
    """
    fakes = {node: node.meta["val"] for node in joint.graph.nodes if "val" in node.meta}
    graph = PreparedGraph(joint, "joint", fakes=fakes)
    result = _recognize(graph, FxPassContext(options), only_with_backward=True)
    if result is graph:
        return joint
    for node in result.nodes:
        reason = result.coverage_reasons.get(node.name)
        if node.op == "get_attr" and isinstance(node.meta.get("val"), GraphModule):
            del node.meta["val"]  # torch's partitioner expects values that can be saved
        elif reason is not None:
            node.meta[_DECLINED] = reason
    return result.graph_module


def _recognize(graph: PreparedGraph, context: FxPassContext, only_with_backward: bool) -> PreparedGraph:
    graph = remove_softmax_shifts(compose_permutations(replace_biased_attention(graph, context)))
    formulas, missed = find_attention(graph.nodes, graph.fakes)
    if only_with_backward:
        formulas = [item for item in formulas if item.backward is not None]
    if not formulas and not missed:
        return graph
    reasons = {
        item.softmax.name: item.softmax.meta.get(_DECLINED, f"no attention kernel: {item.reason}") for item in missed
    }
    written = written_storages(graph.nodes, graph.fakes)
    rewriter = AttentionRewriter(GraphCopy(graph), graph.fakes, written, context.options.device_specs())
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
            replaced = {formula.query_key, *formula.inner, formula.output}
            if formula.backward is not None:
                replaced |= {*formula.backward.inner, *formula.backward.results}
            reasons |= {node.name: RECOGNISED for node in replaced}
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
