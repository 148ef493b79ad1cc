"""Layout optimisation: channels-last tensors around convolutions, where that saves time.

Libraries convolve channels-last tensors without reordering them first. The pass copies the graph with channels-last
operands of convolutions, and propagates fake tensors again, so that torch's own rules compute the strides of all other
tensors. Outputs of the graph keep their strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.fx_passes.convolutions.layout_costs import LayoutCost
from fxwrap.fx_passes.convolutions.layout_rewriter import LayoutNotRestorable, LayoutRewriter
from fxwrap.fx_passes.convolutions.operands import is_channels_last_convolution
from fxwrap.fx_passes.convolutions.patches import PatchConvolution, patch_convolutions
from fxwrap.fx_passes.effects import mutated_operands
from fxwrap.fx_passes.graph_copy import CallResults, same_strides, storages_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, PreparedGraph
from fxwrap.torch_compat import FakeTensor


def optimize_layouts(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph whose convolutions read channels-last tensors, where the option `layout` allows and it pays.

    Convolutions of patches become matmuls, whose results are channels-last. Also adapts the graph to example inputs
    whose strides differ from the traced ones.
    """
    restrided = _restrided_inputs(graph, context.example_inputs)
    convolutions: frozenset[Node] = frozenset()
    patches: Mapping[Node, PatchConvolution] = {}
    if context.options.layout == "auto" and context.options.fuse:
        specs = context.options.device_specs()
        patches = patch_convolutions(graph.nodes, graph.fakes, specs, context.extern_operators)
        convolutions = frozenset(
            [node for node in graph.nodes if is_channels_last_convolution(node, graph.fakes, specs)]
        )
    if not (restrided or convolutions or patches) or _mutates_intermediates(graph):
        return graph
    attempts = [(convolutions, patches)] if convolutions.difference(patches) else []
    attempts += [(frozenset(), patches)] if patches else []
    attempts += [(frozenset(), {})] if restrided else []
    results = CallResults()
    failure: LayoutNotRestorable | None = None
    for chosen, matmuls in attempts:
        try:
            rewritten, cost = _rewrite(graph, context, restrided, chosen, matmuls, results)
        except LayoutNotRestorable as error:
            failure = error
        else:
            if restrided or not chosen or cost.gain > 0:
                return rewritten
    if not restrided:
        return graph
    reason = f"it reads {failure}, whose strides are not those that the graph was traced with"
    remedy = "Trace the graph with inputs of these strides, or pass contiguous inputs"
    raise GraphError("", reason, remedy)


def _rewrite(
    graph: PreparedGraph,
    context: FxPassContext,
    restrided: Mapping[Node, FakeTensor],
    convolutions: frozenset[Node],
    patches: Mapping[Node, PatchConvolution],
    results: CallResults,
) -> tuple[PreparedGraph, LayoutCost]:
    """Returns a graph with channels-last convolutions, less those that are better left as they are, and its cost.

    Raises LayoutNotRestorable.
    """
    rewriter = LayoutRewriter(graph, context, restrided, convolutions, patches, results)
    rewritten = rewriter.run()
    unprofitable = frozenset() if restrided else rewriter.unprofitable_convolutions()
    if unprofitable:
        chosen = convolutions - unprofitable
        rewriter = LayoutRewriter(graph, context, restrided, chosen, patches, results, unprofitable)
        rewritten = rewriter.run()
    return rewritten, rewriter.cost


def _restrided_inputs(graph: PreparedGraph, example_inputs: Sequence[object] | None) -> dict[Node, FakeTensor]:
    """Returns the example inputs whose strides differ from the traced ones, by placeholder."""
    restrided: dict[Node, FakeTensor] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs or (), strict=False):
        traced = graph.fakes[node]
        if isinstance(example, FakeTensor) and isinstance(traced, FakeTensor) and example is not traced:
            if example.ndim == traced.ndim and not same_strides(example, traced):
                restrided[node] = example
    return restrided


def _mutates_intermediates(graph: PreparedGraph) -> bool:
    """Whether a call writes a computed tensor; a channels-last copy made before would miss the write."""
    inputs = _storages_of_inputs(graph)
    return any(
        not storages_of(graph.fakes.get(operand)) <= inputs
        for node in graph.nodes if node.op == "call_function" for operand in mutated_operands(node, graph.fakes)
    )  # fmt: skip


def _storages_of_inputs(graph: PreparedGraph) -> set[object]:
    roots = [graph.fakes.get(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    return {storage for fake in roots for storage in storages_of(fake)}
