"""The ATen graphs that AOTAutograd passes to a backend, captured from the models of the suite, and their programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from fxwrap.compile import Compiled, compile_graph, make_backend
from fxwrap.debugging import copy_inputs
from fxwrap.options import Options
from fxwrap.torch_compat import tree_map
from tests.support.models import ModelCase

Kind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True)
class CapturedGraph:
    """One graph as a backend gets it; `example_inputs` are its placeholders' fake tensors or sizes.

    `inputs` are copies of what the graph was called with.
    """

    kind: Kind
    graph_module: GraphModule
    example_inputs: tuple[Any, ...]
    inputs: list[Any] = field(default_factory=list)


def random_like(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers that any operator of the models takes, in the layout of a fake tensor: indices are 0 or 1."""
    tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    if fake.dtype.is_floating_point:
        return tensor.copy_(torch.rand(fake.shape, generator=generator) + 0.5)
    return tensor.copy_(torch.randint(0, 2, fake.shape, generator=generator))


def capture_graphs(
    case: ModelCase, training: bool, dropout: bool = False, device: str = "cpu", dynamic: bool = False
) -> tuple[CapturedGraph, ...]:
    """The inference graph of a model, or its forward and backward graphs in train mode, in that order.

    The graphs run once, eagerly, as captured; all tests of a process share them, as nothing may change a graph that it
    is given. A graph break is an error. With `dynamic` the size of the batch is a symbol.
    """
    return _captured(case, training, dropout, device, dynamic)


@cache
def _captured(case: ModelCase, training: bool, dropout: bool, device: str, dynamic: bool) -> tuple[CapturedGraph, ...]:
    graphs: list[CapturedGraph] = []
    backend = aot_autograd(
        fw_compiler=_recorder(graphs, "forward"),
        bw_compiler=_recorder(graphs, "backward"),
        inference_compiler=_recorder(graphs, "inference"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions={},
        keep_inference_input_mutations=True,
    )
    torch.compiler.reset()
    model = case.build(seed=0, dropout=dropout).to(device).train(training)
    inputs = {name: item.to(device) for name, item in case.inputs(seed=1, training=training).items()}
    if dynamic:
        for item in inputs.values():
            torch._dynamo.mark_dynamic(item, 0)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=None if dynamic else False)
    with torch.set_grad_enabled(training):
        output = compiled(**inputs)
        if training:
            case.loss(output).backward()
    torch.compiler.reset()
    return tuple(graphs)


def recording_backend(compiled: list[Compiled], options: Options = Options()) -> Any:  # noqa: B008 - it is immutable
    """Returns fxwrap's backend, which also adds compiled programs to a list."""

    def watched(*args: Any, **kwargs: Any) -> Compiled:
        compiled.append(compile_graph(*args, **kwargs))
        return compiled[-1]

    return make_backend(options, watched)


def _recorder(graphs: list[CapturedGraph], kind: Kind) -> Callable[..., Any]:
    def record(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        fakes = tuple(node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder"))
        captured = CapturedGraph(kind, graph_module, fakes)
        graphs.append(captured)

        def run(*inputs: Any) -> Any:
            captured.inputs[:] = copy_inputs(tree_map(_detached, inputs))
            return graph_module.forward(*inputs)

        return make_boxed_func(run)

    return record


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, torch.Tensor) else item
