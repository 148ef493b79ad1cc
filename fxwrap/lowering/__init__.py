"""From FX graphs to programs."""

from fxwrap.lowering.attention import with_plain_attention
from fxwrap.lowering.decompositions import decomposition_table, default_decompositions
from fxwrap.lowering.define import Outcome
from fxwrap.lowering.fake import fake_values
from fxwrap.lowering.graph import Lowered, lower, lower_with_coverage
from fxwrap.lowering.joint import partitioner
from fxwrap.lowering.source import GraphSource, check_graph, graph_source
from fxwrap.lowering.stream_calls import with_stream_calls

__all__ = [
    "GraphSource",
    "Lowered",
    "Outcome",
    "check_graph",
    "decomposition_table",
    "default_decompositions",
    "fake_values",
    "graph_source",
    "lower",
    "lower_with_coverage",
    "partitioner",
    "with_plain_attention",
    "with_stream_calls",
]
