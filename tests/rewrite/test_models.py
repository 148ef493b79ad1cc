"""A simple pattern on the six models: each matmul with a bias is decomposed, and the results stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Compiled, Options, Pass
from fxwrap import rewrite as rw
from fxwrap.lines import ExternCall, Launch
from fxwrap.wrapper_ir import Program, canonicalize_program, type_symbols
from tests.rewrite.test_identity import rebuild_line
from tests.support.long_form import long_only
from tests.support.models import MODELS, REPRESENTATIVE, ModelCase

aten = torch.ops.aten
A, B = rw.tensors("a b")


def use_out_variant(match: rw.Match, builder: rw.LineBuilder) -> Any:
    """Makes a matrix product by its out= form, into memory of its own."""
    (old,) = match.outputs
    (line,) = match.lines
    out = builder.empty(old.type, "product")
    target = line.target.removesuffix("default") + "out"
    builder.call_out_variant(target, *line.arguments, outs=[out], **dict(line.keywords))
    return out


MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution.default")


def is_matmul(line: Any) -> bool:
    """Whether a call is a product that torch traces in out= form, as it does no convolution of unknown sizes."""
    symbolic = line.target == "aten.convolution.default" and any(type_symbols(value.type) for value in line.results)
    return line.target in MATMULS and not symbolic


IN_PROGRAM = rw.rewrite_pass(rw.call(is_matmul, ...), use_out_variant, key="1")


def in_graph(graph_module: GraphModule) -> list[rw.GraphMatch]:
    """Takes each addmm apart, and makes each product of two matrices one of batches, by torch.fx's matcher."""

    def addmm(bias: Any, x: Any, w: Any) -> Any:
        return aten.addmm.default(bias, x, w)

    def apart(bias: Any, x: Any, w: Any) -> Any:
        return aten.add.Tensor(aten.mm.default(x, w), bias)

    def mm(x: Any, w: Any) -> Any:
        return aten.mm.default(x, w)

    def batch_of_one(x: Any, w: Any) -> Any:
        return aten.squeeze.dim(aten.bmm.default(aten.unsqueeze.default(x, 0), aten.unsqueeze.default(w, 0)), 0)

    return [*rw.replace_in_graph(graph_module, addmm, apart), *rw.replace_in_graph(graph_module, mm, batch_of_one)]


def traced(case: ModelCase, kind: str, device: str = "cpu") -> tuple[GraphModule, list[torch.Tensor]]:
    """A model as a graph of its parameters, buffers and inputs: its outputs, or its loss and its gradients."""
    model = case.build(seed=0, layers=1).to(device)
    keywords = {name: item.to(device) for name, item in case.inputs(seed=1, training=kind == "training").items()}
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names = [*parameters, *buffers]

    def run(*flat: torch.Tensor) -> list[torch.Tensor]:
        state, inputs = dict(zip(names, flat)), dict(zip(keywords, flat[len(names) :]))
        outputs = torch.func.functional_call(model, state, (), inputs)
        if kind != "training":
            return [item for item in outputs.values() if isinstance(item, torch.Tensor)]
        loss = outputs["loss"]
        trained = [state[name] for name in parameters]
        return [loss, *[item for item in torch.autograd.grad(loss, trained, allow_unused=True) if item is not None]]

    flat = [*[item.detach().requires_grad_() for item in parameters.values()], *buffers.values(), *keywords.values()]
    graph = make_fx(run, tracing_mode="symbolic" if kind == "dynamic" else "fake")(*flat)
    return graph, [item.detach() for item in flat]


SIX = [name for name in MODELS if name != "gpt2_eager_attention"]
CASES = [
    *[(name, "inference") if name in REPRESENTATIVE else long_only(name, "inference") for name in SIX],
    ("resnet", "training"),
    ("bert", "dynamic"),
]


def rebuild(match: rw.Match, builder: rw.LineBuilder) -> Any:
    """Makes a call again, or a launch into the memory that it has filled."""
    (line,) = match.lines
    if not isinstance(line, Launch):
        return rebuild_line(line, builder)
    builder.launch(line.kernel, line.arguments, line.outs, line.grid)
    return line.outs


def assert_program_is_rebuilt(program: Program) -> None:
    """All calls, then all launches, rebuilt, are the same program."""
    for pattern in (rw.call(lambda line: True, ...), rw.launch(lambda kernel, line: True, ...)):
        done = rw.rewrite(program, pattern, rebuild)
        assert (
            canonicalize_program(done.program) == canonicalize_program(program)
            and done.matches
            and not done.match_failures
        ), done.report()


def compile_with_out_variants(graph: GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """A graph compiled with its products in out= form, by a pass over lines."""
    compiled = fxwrap.compile_graph(graph, inputs, options=options.replace(passes=[IN_PROGRAM]))
    (rewritten,) = [stage.program for stage in compiled.stages if stage.pass_name == IN_PROGRAM.name]
    lines = [line for line in rewritten.lines() if isinstance(line, ExternCall)]
    assert any(line.outs for line in lines) and not any(is_matmul(line) for line in lines)
    return compiled


def compile_with_rewritten_matmuls(graph: GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """A graph compiled with its products of matrices as others, by a pass over the emitted graph."""
    matches: list[rw.GraphMatch] = []
    change = Pass(lambda module: matches.extend(in_graph(module)), key="1", at="fx_emitted", name="in_graph")
    compiled = fxwrap.compile_graph(graph, inputs, options=options.replace(passes=[change], emitter="fx"))
    assert matches and not any(match.failure_reason for match in matches)
    targets = {node.target for node in compiled.graph_module.graph.nodes}
    assert aten.bmm.default in targets and not targets & {aten.mm.default, aten.addmm.default}
    return compiled


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_matmuls_of_a_model_are_rewritten(name: str, kind: str) -> None:
    graph, inputs = traced(MODELS[name], kind)
    options = Options(fuse=False, check_inputs=False)
    with torch.no_grad():
        assert_program_is_rebuilt(fxwrap.lower(graph, inputs))
        expected_outputs = graph(*inputs)
        for rewritten in (compile_with_out_variants, compile_with_rewritten_matmuls):
            for result, expected in zip(rewritten(graph, inputs, options)(*inputs), expected_outputs, strict=True):
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
