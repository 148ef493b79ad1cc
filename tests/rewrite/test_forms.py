"""One rewrite on each form of a program: the graph of ATen operators, the functional and the in-place graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap import rewrite as rw
from fxwrap.errors import FxImportError
from tests.support.documents import run_snippets

aten = torch.ops.aten
FORMS = ("aten", "functional", "in_place")

BIAS, ROWS, WEIGHT = rw.tensors("bias rows weight")
LINEAR = rw.call("aten.addmm.default", BIAS, ROWS, rw.view(WEIGHT))


def layers(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.nn.functional.gelu(torch.addmm(b, x, w.t()))
    return torch.softmax(torch.addmm(b, hidden @ w, w.t()), -1), hidden


def inputs() -> list[Tensor]:
    return [torch.randn(4, 8), torch.randn(16, 8), torch.randn(16)]


def in_form(form: str, arguments: list[Tensor], **options: Any) -> GraphModule:
    graph = make_fx(layers, tracing_mode=options.pop("tracing_mode", "fake"))(*arguments)
    if form == "aten":
        return graph
    options = Options(emitter="fx", fx_form=form, **options)  # type: ignore[assignment]
    return fxwrap.compile_graph(graph, arguments, options=options).graph_module  # type: ignore[arg-type]


def calls(graph_module: GraphModule, target: object) -> int:
    return sum(node.target is target for node in graph_module.graph.nodes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_a_pattern_matches_in_every_form(form: str, tracing_mode: str) -> None:
    arguments = inputs()
    graph_module = in_form(form, arguments, tracing_mode=tracing_mode)
    assert len(rw.find(graph_module, LINEAR).matches) == 2
    before = str(graph_module.graph)
    result = rw.rewrite(graph_module, LINEAR, rw.call("aten.linear.default", ROWS, WEIGHT, BIAS))
    assert len(result.matches) == 2 and result.graph_module is not None
    assert (calls(result.graph_module, aten.linear.default), calls(result.graph_module, aten.addmm.default)) == (2, 0)
    assert str(graph_module.graph) == before
    torch.testing.assert_close(tuple(result.graph_module(*arguments)), layers(*arguments))
    launches = {"aten": (0, 0), "functional": (0, 2), "in_place": (2, 0)}[form]
    ops = torch.ops.fxwrap
    assert (
        calls(result.graph_module, ops.cpp_kernel.default),
        calls(result.graph_module, ops.cpp_kernel_functional.default),
    ) == launches


@pytest.mark.parametrize("form", FORMS)
def test_an_operator_is_matched_as_a_call_and_as_a_kernel(form: str) -> None:
    arguments = inputs()
    graph_module = in_form(form, arguments)
    pattern = rw.computed("aten.gelu.default", LINEAR)
    linear = rw.call("aten.linear.default", ROWS, WEIGHT, BIAS)
    result = rw.rewrite(graph_module, pattern, rw.call("aten.relu.default", linear))
    assert len(result.matches) == 1 and result.graph_module is not None
    wanted = torch.relu(torch.nn.functional.linear(arguments[0], arguments[1], arguments[2]))
    torch.testing.assert_close(result.graph_module(*arguments)[1], wanted)


@pytest.mark.parametrize("form", FORMS)
def test_metadata_of_other_tools_stays_and_is_merged(form: str) -> None:
    arguments = inputs()
    graph_module = in_form(form, arguments)
    for number, node in enumerate(graph_module.graph.nodes):
        node.meta |= {"vendor": node.name, "number": number, f"of_{node.name}": True}
    graph_module.meta["vendor"] = "module"
    before = {node.name: node for node in graph_module.graph.nodes}
    result = rw.rewrite(graph_module, LINEAR, rw.call("aten.linear.default", ROWS, WEIGHT, BIAS))
    module = result.graph_module
    assert module is not None and module.meta["vendor"] == "module"
    linears = module.graph.find_nodes(op="call_function", target=aten.linear.default)
    matmuls = [node for node in before.values() if node.target is aten.addmm.default]
    for linear, addmm in zip(linears, matmuls, strict=True):
        assert linear.meta["vendor"] == addmm.name and linear.meta[f"of_{addmm.name}"]
    survivors = [node for node in module.graph.nodes if node not in linears and "vendor" in node.meta]
    assert {node.meta["vendor"] for node in survivors} >= {"x_1", "w_1", "output"} | {
        node.name for node in before.values() if str(node.target).rpartition(".")[0] in ("aten.gelu", "aten.mm")
    }
    for node in survivors:
        assert node.meta["number"] == before[node.meta["vendor"]].meta["number"]
        assert node.op == before[node.meta["vendor"]].op


def test_results_of_one_call_have_metadata_of_their_own() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        largest, position = torch.relu(x).max(1)
        return torch.sort(largest).values, position

    graph_module = make_fx(function, tracing_mode="fake")(torch.randn(3, 4))
    for node in graph_module.graph.nodes:
        node.meta["vendor"] = node.name
    result = rw.rewrite(graph_module, rw.call("aten.relu.default", ROWS), rw.call("aten.neg.default", ROWS))
    assert result.graph_module is not None
    targets = {node.meta.get("vendor"): node.target for node in result.graph_module.graph.nodes}
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.users:
            assert targets[node.name] is (aten.neg.default if node.target is aten.relu.default else node.target)


@pytest.mark.parametrize("form", FORMS)
def test_replacements_in_graphs_have_the_metadata_of_their_match(form: str) -> None:
    graph_module = in_form(form, inputs(), preserve_ops=frozenset({"aten.gelu.default"}))
    (gelu,) = graph_module.graph.find_nodes(op="call_function", target=aten.gelu.default)
    gelu.meta |= {"vendor": "gelu", "tensor_meta": "of gelu"}
    rw.replace_in_graph(graph_module, lambda x: aten.gelu.default(x), lambda x: aten.relu.default(x))
    (relu,) = graph_module.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert relu.meta["vendor"] == "gelu" and "tensor_meta" not in relu.meta


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_without_matches_is_returned(form: str) -> None:
    graph_module = in_form(form, inputs())
    result = rw.rewrite(graph_module, rw.call("aten.cos.default", ROWS), rw.call("aten.sin.default", ROWS))
    assert result.graph_module is graph_module and not result.matches


@pytest.mark.parametrize("at", ["fx_before_lowering", "ir_before_planning", "fx_emitted"])
@pytest.mark.parametrize("form", ["functional", "in_place"])
def test_a_rewrite_pass_runs_at_every_point(at: str, form: str) -> None:
    arguments = inputs()
    relu = rw.rewrite_pass(rw.computed("aten.gelu.default", ROWS), rw.call("aten.relu.default", ROWS), key="1", at=at)
    compiled_pass: Any = relu
    graph = make_fx(layers, tracing_mode="fake")(*arguments)
    options = Options(emitter="fx", fx_form=form, passes=[compiled_pass])  # type: ignore[arg-type]
    compiled = fxwrap.compile_graph(graph, arguments, options=options)
    wanted = torch.relu(torch.addmm(arguments[2], arguments[0], arguments[1].t()))
    torch.testing.assert_close(compiled(*arguments)[1], wanted)


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("form", ["functional", "in_place"])
def test_replace_in_graph_matches_launches_of_both_forms(form: str, language: str) -> None:
    arguments = inputs()
    graph_module = in_form(form, arguments, cpu_kernels=language)

    def pattern(bias: Any, rows: Any, weight: Any) -> Any:
        return rw.kernel_node("aten.gelu.default")(aten.addmm.default(bias, rows, weight))

    def replacement(bias: Any, rows: Any, weight: Any) -> Any:
        return aten.relu.default(aten.addmm.default(bias, rows, weight))

    (kernel,) = rw.kernel_nodes(graph_module, "aten.gelu.default")
    assert kernel.is_functional == (form == "functional")
    assert [match.failure_reason for match in rw.replace_in_graph(graph_module, pattern, replacement)] == [""]
    graph_module.graph.lint()
    assert not list(rw.kernel_nodes(graph_module, "aten.gelu.default"))
    wanted = torch.relu(torch.addmm(arguments[2], arguments[0], arguments[1].t()))
    torch.testing.assert_close(graph_module(*arguments)[1], wanted)
    torch.testing.assert_close(fxwrap.run(fxwrap.from_fx(graph_module), list(arguments))[1], wanted)


def test_a_launch_with_several_results_is_replaced_in_a_functional_graph() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x), torch.cos(x)

    x = torch.randn(8)
    graph = make_fx(both, tracing_mode="fake")(x)
    options = Options(emitter="fx", fx_form="functional")
    graph_module = fxwrap.compile_graph(graph, [x], options=options).graph_module
    (kernel,) = rw.kernel_nodes(graph_module)
    assert len(kernel.outs) == 2 and kernel.copied == ()

    def pattern(x: Any) -> Any:
        launch = rw.kernel_node(*kernel.operators)(x, x)
        return launch[0], launch[1]

    def replacement(x: Any) -> Any:
        return aten.exp.default(x), aten.neg.default(x)

    assert [match.failure_reason for match in rw.replace_in_graph(graph_module, pattern, replacement)] == [""]
    assert not list(rw.kernel_nodes(graph_module))
    torch.testing.assert_close(tuple(graph_module(x)), (x.exp(), -x))


def test_a_graph_that_no_program_represents_is_refused() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.sin(x))
    with pytest.raises(FxImportError):
        rw.find(graph, LINEAR)


def test_the_snippets_run() -> None:
    names = run_snippets("docs/rewriting_forms.md")
    assert {"LINEAR", "pattern", "inductor_pass"} <= set(names)
