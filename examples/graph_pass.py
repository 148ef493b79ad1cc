"""fxwrap as one pass among others: a function `(graph module, inputs) -> graph module`.

Other FX passes and dead-code elimination run on the emitted graph, which keeps every kernel and every call, also those
without users that write memory.

    python examples/graph_pass.py
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import ShapeProp

import fxwrap

GraphPass = Callable[[GraphModule, Sequence[Any]], GraphModule]


def compile_pass(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Lowers the graph to a program, and emits that as a graph."""
    return fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(emitter="fx")).graph_module


def shapes_pass(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Torch's own shape propagation."""
    with torch.no_grad():
        ShapeProp(graph).propagate(*inputs)
    return graph


def dead_code_pass(graph: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    """Torch's own dead-code elimination."""
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def calls(graph: GraphModule) -> Counter[str]:
    """Counts the operators a graph calls."""
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def run_passes(graph: GraphModule, inputs: Sequence[Any], passes: Sequence[GraphPass]) -> GraphModule:
    """Runs passes in order and prints the number of calls after each."""
    for step in passes:
        graph = step(graph, inputs)
        print(f"  after {step.__name__}: {sum(calls(graph).values())} calls")
    return graph


def model(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A model that also keeps a running mean of its inputs in another input."""
    state.mul_(0.9).add_(x.mean(0), alpha=0.1)
    hidden = (x - state) @ weight
    return torch.softmax(torch.nn.functional.gelu(hidden) / 2, -1)


def main() -> None:
    inputs = [torch.randn(4, 8), torch.randn(8, 16), torch.zeros(8)]
    graph = make_fx(model, tracing_mode="fake")(*inputs)
    print(f"a model of {sum(calls(graph).values())} calls")
    compiled = run_passes(graph, inputs, [compile_pass])
    before = calls(compiled)
    print(f"  of which {before['fxwrap.cpp_kernel.default']} launch kernels: {dict(before)}")
    result = run_passes(compiled, inputs, [shapes_pass, dead_code_pass])
    assert calls(result) == before

    ours, theirs = [item.clone() for item in inputs], [item.clone() for item in inputs]
    torch.testing.assert_close(result(*ours)[0], model(*theirs))
    torch.testing.assert_close(ours[2], theirs[2])
    print("all kernels and calls are left, and the results are equal")


if __name__ == "__main__":
    main()
