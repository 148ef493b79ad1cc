"""Copies of a graph after each FX pass that changed it."""

from __future__ import annotations

import copy

from torch.fx import GraphModule

from fxwrap.fx_passes import GraphSource


class GraphHistory:
    """The imported graph, and the graph after each FX pass that changed it, by the pass's name."""

    def __init__(self) -> None:
        self.graphs: list[tuple[str, GraphSource]] = []
        self._text = ""

    def add(self, name: str, graph: GraphSource) -> None:
        """Adds a copy of a graph unless it equals the one before it."""
        text = str(graph.graph_module.graph)
        if text != self._text:
            self._text = text
            module = graph.graph_module
            copied = GraphModule(module, copy.deepcopy(module.graph))
            self.graphs.append((name, GraphSource(
                copied, graph.name, graph.constants, graph.returns_mutated_inputs, graph.graph_id, graph.least_sizes,
            )))  # fmt: skip
