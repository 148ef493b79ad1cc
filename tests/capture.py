"""The ATen graphs that AOTAutograd hands to a backend, captured from the models of the suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from tests.models import ModelCase

Kind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True)
class CapturedGraph:
    """One graph as a backend gets it; `example_inputs` are its placeholders' fake tensors or sizes."""

    kind: Kind
    graph_module: GraphModule
    example_inputs: tuple[Any, ...]


def capture_graphs(
    case: ModelCase,
    training: bool,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    dropout: bool = False,
) -> list[CapturedGraph]:
    """The inference graph of a model, or its forward and backward graphs in train mode, in that order.

    The graphs run once, eagerly, as captured. A graph break is an error.
    """
    graphs: list[CapturedGraph] = []
    backend = aot_autograd(
        fw_compiler=_recorder(graphs, "forward"),
        bw_compiler=_recorder(graphs, "backward"),
        inference_compiler=_recorder(graphs, "inference"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=dict(decompositions or {}),
        keep_inference_input_mutations=True,
    )
    torch.compiler.reset()
    model = case.build(seed=0, dropout=dropout).train(training)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    with torch.set_grad_enabled(training):
        output = compiled(**case.inputs(seed=1, training=training))
    if training:
        case.loss(output).backward()
    torch.compiler.reset()
    return graphs


def _recorder(graphs: list[CapturedGraph], kind: Kind) -> Callable[..., Any]:
    def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        fakes = tuple(node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder"))
        graphs.append(CapturedGraph(kind, graph_module, fakes))
        return make_boxed_func(graph_module.forward)

    return compile_graph
