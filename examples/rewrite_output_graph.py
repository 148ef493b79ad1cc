"""Rewrite an emitted graph with ordinary torch.fx tools, and run the result.

A model is compiled to an FX graph in which the exact GELU is then replaced by its faster tanh form, in two ways: by
changing nodes, and by a pattern. The option `keep` makes GELU stay a call of its own; else it would be inside a kernel.

    python examples/rewrite_output_graph.py
"""

import copy

import torch
from torch.fx import GraphModule, replace_pattern
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap

GELU = torch.ops.aten.gelu.default


def by_nodes(graph_module: GraphModule) -> int:
    """Asks each GELU for its tanh form; returns how many there were."""
    nodes = graph_module.graph.find_nodes(op="call_function", target=GELU)
    for node in nodes:
        node.update_kwarg("approximate", "tanh")
    graph_module.recompile()
    return len(nodes)


def by_pattern(graph_module: GraphModule) -> int:
    """Replaces each GELU by what it approximately is: x * sigmoid(1.702 x); returns how many there were."""

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
        options = fxwrap.Options(emitter="fx", keep=frozenset({"aten.gelu.default"}))
        compiled = fxwrap.compile_graph(graph, [x], options=options)
        exact = compiled.graph_module
        print(exact.code)

        for rewrite in (by_nodes, by_pattern):
            rewritten = copy.deepcopy(exact)
            count = rewrite(rewritten)
            rewritten.graph.lint()
            difference = (rewritten(x)[0] - exact(x)[0]).abs().max().item()
            print(f"{rewrite.__name__}: {count} replaced, the output moved by {difference:.1e}")


if __name__ == "__main__":
    main()
