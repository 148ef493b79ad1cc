"""The graphs that FX passes read and return."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.decompositions import Decomposition, decomposition_table
from fxwrap.options import Options
from fxwrap.torch_compat import OpOverload

NodeValues: TypeAlias = Mapping[Node, Any]
"""The fake value of each node: a fake tensor, a symbolic number, a generator, None, or a tuple or list of these."""

Target: TypeAlias = Any
"""The callable of a `call_function` node: an operator overload, a higher-order operator or a Python function."""

RECOMPUTED = "fxwrap_recomputed"
"""The metadata key of calls that repeat an earlier one on purpose, to save the memory of its result.

Its value is the number of the backward that recomputes, from 1."""


@dataclass(frozen=True)
class GraphSource:
    """An imported graph: a function of its placeholders, without tokens and with mutations as calls.

    Fields:
        graph_module: the graph and its attributes.
        name: the program's name.
        constants: parameters and buffers, by the name of their placeholder. Other placeholders are inputs, in order.
        returns_mutated_inputs: whether an output that was copied into an input or constant may be returned as that
            input or constant.
        graph_id: the `id` of the graph that was imported.
        least_sizes: least values of symbols by name, where these are smaller than those of the ShapeEnv.
    """

    graph_module: GraphModule
    name: str
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    returns_mutated_inputs: bool = False
    graph_id: int = -1
    least_sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Node]:
        """The graph's nodes, in order."""
        return list(self.graph_module.graph.nodes)

    @property
    def output(self) -> Node:
        """The graph's output node."""
        return self.graph_module.graph.output_node()


@dataclass(frozen=True)
class PreparedGraph(GraphSource):
    """A graph with the fake values of its nodes: the state of the FX passes, and the input of lowering.

    Fields:
        fakes: the fake value of each node.
        replaced: nodes that passes removed, with their coverage: "view" of another node's result, or "fused" with it.
        flexible_stride_outputs: positions of outputs whose strides may differ from those of the original graph.
        coverage_reasons: reasons for the coverage of nodes by name, where lowering has none.
        unpadded: the graph before matmuls were padded; None if none was.
    """

    fakes: NodeValues = field(default_factory=dict)
    replaced: Mapping[Node, str] = field(default_factory=dict)
    flexible_stride_outputs: Collection[int] = ()
    coverage_reasons: Mapping[str, str] = field(default_factory=dict)
    unpadded: PreparedGraph | None = None


@dataclass(frozen=True)
class FxPassContext:
    """What FX passes read besides the graph.

    Fields:
        options: the options of the compile.
        fused_operators: names of the overloads with a lowering rule ("aten.add.Tensor").
        example_inputs: one value for each placeholder, or None.
        static_inputs: positions of inputs whose address never changes (parameters and buffers).
    """

    options: Options
    fused_operators: Collection[str] = frozenset()
    example_inputs: Sequence[object] | None = None
    static_inputs: Collection[int] = ()

    @cached_property
    def decompositions(self) -> Mapping[OpOverload, Decomposition]:
        """The table of the options, without the operators to preserve."""
        return decomposition_table(self.options)

    @cached_property
    def extern_operators(self) -> frozenset[str]:
        """Names of overloads that the user excludes from rewrites: preserved, or with a lowering of the user's."""
        return frozenset({*self.options.preserve_ops, *self.options.lowerings})
