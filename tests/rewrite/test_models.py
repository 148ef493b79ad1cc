"""A simple pattern on the six models: each product with a bias is taken apart, and the program means the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options, Pass
from fxwrap import rewrite as rw
from fxwrap.lines import Call, Launch
from fxwrap.wrapper_ir import canonical
from tests.models import MODELS, ModelCase
from tests.rewrite.test_identity import made_again

aten = torch.ops.aten
A, B = rw.tensors("a b")


def through_out(match: rw.Match, builder: rw.LineBuilder) -> Any:
    """Makes a matrix product by its out= form, into memory of its own."""
    (old,) = match.outputs
    (line,) = match.lines
    out = builder.empty(old.type, "product")
    target = line.target.removesuffix("default") + "out"
    builder.call_into(target, *line.arguments, outs=[out], **dict(line.keywords))
    return out


PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution.default")
IN_PROGRAM = rw.rewriting(rw.call(PRODUCTS, ...), through_out, key="1")


def in_graph(graph_module: GraphModule) -> None:
    """Takes each addmm apart, by torch.fx's matcher."""

    def pattern(bias: Any, x: Any, w: Any) -> Any:
        return aten.addmm.default(bias, x, w)

    def apart(bias: Any, x: Any, w: Any) -> Any:
        return aten.add.Tensor(aten.mm.default(x, w), bias)

    rw.replace_in_graph(graph_module, pattern, apart)


def traced(case: ModelCase, kind: str) -> tuple[GraphModule, list[torch.Tensor]]:
    """A model as a graph of its parameters, buffers and inputs: its outputs, or its loss and its gradients."""
    model, given = case.build(seed=0, layers=1), case.inputs(seed=1, training=kind == "training")
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names = [*parameters, *buffers]

    def run(*flat: torch.Tensor) -> list[torch.Tensor]:
        state, inputs = dict(zip(names, flat)), dict(zip(given, flat[len(names) :]))
        outputs = torch.func.functional_call(model, state, (), inputs)
        if kind != "training":
            return [item for item in outputs.values() if isinstance(item, torch.Tensor)]
        loss = outputs["loss"]
        trained = [state[name] for name in parameters]
        return [loss, *[item for item in torch.autograd.grad(loss, trained, allow_unused=True) if item is not None]]

    flat = [*[item.detach().requires_grad_() for item in parameters.values()], *buffers.values(), *given.values()]
    graph = make_fx(run, tracing_mode="symbolic" if kind == "dynamic" else "fake")(*flat)
    return graph, [item.detach() for item in flat]


SIX = [name for name in MODELS if name != "gpt2_eager_attention"]
CASES = [*[(name, "inference") for name in SIX], ("resnet", "training"), ("bert", "dynamic")]


def again(match: rw.Match, builder: rw.LineBuilder) -> Any:
    """Makes a call again, or a launch into the memory that it has filled."""
    (line,) = match.lines
    if not isinstance(line, Launch):
        return made_again(line, builder)
    builder.launch(line.kernel, line.arguments, line.outs, line.grid)
    return line.outs


def assert_fused_program_is_rebuilt(graph: GraphModule, given: list[torch.Tensor]) -> None:
    program = fxwrap.lower(graph, given)
    for pattern in (rw.call(lambda line: True, ...), rw.launch(lambda kernel, line: True, ...)):
        done = rw.rewrite(program, pattern, again)
        assert canonical(done.program) == canonical(program) and done.matches and not done.refusals, done.report()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_products_of_a_model_are_rewritten(name: str, kind: str) -> None:
    graph, given = traced(MODELS[name], kind)
    with torch.no_grad():
        assert_fused_program_is_rebuilt(graph, given)
        wanted = graph(*given)
        options = Options(fuse=False, check_inputs=False, passes=[IN_PROGRAM, Pass(in_graph, key="1", at="fx_emitted")])
        compiled = fxwrap.compile_graph(graph, given, options=options)
        lines = [line for line in compiled.stages[2].program.lines() if isinstance(line, Call)]
        assert any(line.outs for line in lines) and not any(line.target in PRODUCTS for line in lines)
        for result, expected in zip(compiled(*given), wanted, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
