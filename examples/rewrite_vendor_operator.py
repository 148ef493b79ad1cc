"""Replace calls of an operator by a vendor's operator: in the model's graph, its program, or the emitted graph.

These are three of the four points where passes run.

    python examples/rewrite_vendor_operator.py
"""

import torch
from torch.fx import GraphModule

import fxwrap
from fxwrap import rewrite as rw


@torch.library.custom_op("example_vendor::linear", mutates_args=())
def vendor_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The vendor's operator."""
    return torch.nn.functional.linear(x, weight, bias)


@vendor_linear.register_fake
def _(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


def rewrite_graph(graph_module: GraphModule) -> None:
    """Before lowering: ATen nodes, changed with torch.fx."""

    def pattern(bias, x, weight):
        return torch.ops.aten.addmm.default(bias, x, torch.ops.aten.t.default(weight))

    def replacement(bias, x, weight):
        return torch.ops.example_vendor.linear.default(x, weight, bias)

    torch.fx.replace_pattern(graph_module, pattern, replacement)


def rewrite_emitted_graph(graph_module: GraphModule) -> None:
    """After emission: a function that also matches kernel launches. A transpose is a `permute` here."""

    def pattern(bias, x, weight):
        return torch.ops.aten.addmm.default(bias, x, torch.ops.aten.permute.default(weight, [1, 0]))

    def replacement(bias, x, weight):
        return torch.ops.example_vendor.linear.default(x, weight, bias)

    rw.replace_in_graph(graph_module, pattern, replacement)


BIAS, X, WEIGHT = rw.tensors("bias x weight")
rewrite_program = rw.rewrite_pass(
    rw.call("aten.addmm.default", BIAS, X, rw.view(WEIGHT)),
    rw.call("example_vendor.linear.default", X, WEIGHT, BIAS),
    key="1",
    name="rewrite_program",
)

PASSES = [
    fxwrap.Pass(rewrite_graph, key="1", at="fx_before_lowering"),
    rewrite_program,
    fxwrap.Pass(rewrite_emitted_graph, key="1", at="fx_emitted"),
]


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    x = torch.randn(5, 8)
    exported = torch.export.export(model, (x,))
    for item in PASSES:
        compiled = fxwrap.compile_graph(exported, options=fxwrap.Options(emitter="fx", passes=[item]))
        targets = [str(node.target) for node in compiled.graph_module.graph.nodes]
        ours, theirs = targets.count("aten.addmm.default"), targets.count("example_vendor.linear.default")
        print(f"{item.name}: {theirs} calls of the vendor's operator, {ours} of ATen's")
        torch.testing.assert_close(compiled(x), model(x))


if __name__ == "__main__":
    main()
