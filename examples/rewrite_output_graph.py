"""Rewrite an emitted graph with ordinary torch.fx tools, and run the result.

The exact GELU in an emitted graph is replaced by an approximation in two ways: by changing nodes, and by a pattern. The
option `preserve_ops` keeps GELU a separate call; else it would be part of a kernel.

    python examples/rewrite_output_graph.py
"""

import copy

import torch
from torch.fx import GraphModule, replace_pattern
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap

GELU = torch.ops.aten.gelu.default


def rewrite_nodes(graph_module: GraphModule) -> int:
    """Replaces each GELU by its tanh approximation; returns their number."""
    nodes = graph_module.graph.find_nodes(op="call_function", target=GELU)
    for node in nodes:
        node.update_kwarg("approximate", "tanh")
    graph_module.recompile()
    return len(nodes)


def rewrite_by_pattern(graph_module: GraphModule) -> int:
    """Replaces each GELU by x * sigmoid(1.702 x); returns their number."""

    def pattern(x):
        return torch.ops.aten.gelu.default(x)

    def replacement(x):
        scaled = torch.ops.aten.mul.Scalar(x, 1.702)
        return torch.ops.aten.mul.Tensor(x, torch.ops.aten.sigmoid.default(scaled))

    return len(replace_pattern(graph_module, pattern, replacement))


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.GELU())
    x = torch.randn(4, 8)
    with torch.no_grad():
        graph = make_fx(model)(x)
        options = fxwrap.Options(emitter="fx", preserve_ops=frozenset({"aten.gelu.default"}))
        compiled = fxwrap.compile_graph(graph, [x], options=options)
        exact = compiled.graph_module
        print(exact.code)

        for rewrite in (rewrite_nodes, rewrite_by_pattern):
            rewritten = copy.deepcopy(exact)
            count = rewrite(rewritten)
            rewritten.graph.lint()
            difference = (rewritten(x)[0] - exact(x)[0]).abs().max().item()
            print(f"{rewrite.__name__}: {count} replaced, the output changed by {difference:.1e}")


if __name__ == "__main__":
    main()
