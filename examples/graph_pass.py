"""fxwrap as one pass among others: a function `(graph module, inputs) -> graph module`.

The emitted graph goes on through ordinary FX passes and dead-code elimination, and keeps every kernel and every call:
also those that only write memory, which nothing in the graph seems to use.

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
from fxwrap.wrapper_ir import KernelDefinition

GraphPass = Callable[[GraphModule, Sequence[Any]], GraphModule]

KERNEL_PROGRAM = '''
program @scaled(%x: borrowed f32[64, 32]@cpu, %w: borrowed f32[32, 16]@cpu) {
  %product = memory.alloc() : f32[64, 16]@cpu
  extern.call @aten.mm.out(%x, %w) outs=(%product)
  %result = memory.alloc() : f32[64, 16]@cpu
  kernel.launch @relu(%product, 1024) outs=(%result)
  memory.free(%product)
  control.return(%result)
}
'''
RELU = """#include <cstdint>
extern "C" void kernel(const float* in0, float* out0, int64_t n0) {
  for (int64_t i = 0; i < n0; ++i) out0[i] = in0[i] > 0 ? in0[i] : 0;
}
"""


def compile_pass(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Lowers the graph to a program of fxwrap's and gives it back as a graph."""
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
    """Runs passes in order and prints what each leaves."""
    for step in passes:
        graph = step(graph, inputs)
        print(f"  after {step.__name__}: {sum(calls(graph).values())} calls")
    return graph


def model_example() -> None:
    """A model's graph, which writes into its input, through the whole pipeline."""

    def model(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.softmax(x - state, -1)

    inputs = [torch.randn(4, 8), torch.zeros(8)]
    graph = make_fx(model, tracing_mode="fake")(*inputs)
    print(f"a model of {sum(calls(graph).values())} calls")
    done = run_passes(graph, inputs, [compile_pass, shapes_pass, dead_code_pass])
    ours, theirs = [item.clone() for item in inputs], [item.clone() for item in inputs]
    torch.testing.assert_close(done(*ours)[0], model(*theirs))
    torch.testing.assert_close(ours[1], theirs[1])


def kernel_example() -> None:
    """A program with a C++ kernel: its launch writes memory and has no result, and yet it stays."""
    program = fxwrap.parse(KERNEL_PROGRAM)
    program = program.replace(kernels=(KernelDefinition("relu", "cpp", RELU, ("*f32", "*f32", "i64")),))
    inputs = [torch.randn(64, 32), torch.randn(32, 16)]
    graph = fxwrap.to_fx(fxwrap.verify(program)).graph_module
    before = calls(graph)
    print(f"a program with a kernel: {dict(before)}")
    graph = run_passes(graph, inputs, [shapes_pass, dead_code_pass])
    assert calls(graph) == before
    torch.testing.assert_close(graph(*inputs)[0], torch.relu(inputs[0] @ inputs[1]))
    print("every kernel and call is still there, and the numbers are right")


if __name__ == "__main__":
    model_example()
    kernel_example()
