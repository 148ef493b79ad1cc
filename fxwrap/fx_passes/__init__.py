"""Passes over FX graphs: all rewrites before lowering."""

from fxwrap.fx_passes.attention_masks import simplify_attention_masks
from fxwrap.fx_passes.decompositions import decomposition_table, default_decompositions
from fxwrap.fx_passes.fake_propagation import fake_values
from fxwrap.fx_passes.joint_graph import JOINT_GRAPH_PASSES, partitioner
from fxwrap.fx_passes.prepare import FX_PASSES, prepare_graph, prepare_subgraph
from fxwrap.fx_passes.prepared_graph import FxPassContext, GraphSource, PreparedGraph
from fxwrap.fx_passes.source import SOURCE_PASSES, check_graph, graph_source
from fxwrap.fx_passes.stream_calls import replace_stream_methods

__all__ = [
    "FX_PASSES",
    "JOINT_GRAPH_PASSES",
    "SOURCE_PASSES",
    "FxPassContext",
    "GraphSource",
    "PreparedGraph",
    "check_graph",
    "decomposition_table",
    "default_decompositions",
    "fake_values",
    "graph_source",
    "partitioner",
    "prepare_graph",
    "prepare_subgraph",
    "replace_stream_methods",
    "simplify_attention_masks",
]
