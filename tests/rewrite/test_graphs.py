"""Patterns over emitted FX graphs: launches as data flow, in both languages of kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options, Pass
from fxwrap import rewrite as rw
from fxwrap.errors import RewriteError
from fxwrap.torch_compat import FakeTensor

aten = torch.ops.aten


def layers(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.nn.functional.gelu(x @ w + b)
    return torch.nn.functional.gelu(hidden @ w.t() @ w + b) @ w.t(), hidden


def inputs() -> list[Tensor]:
    return [torch.randn(4, 8), torch.randn(8, 16), torch.randn(16)]


def emitted(function: Callable[..., Any], arguments: list[Tensor], **options: Any) -> GraphModule:
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    return fxwrap.compile_graph(graph, arguments, options=Options(emitter="fx", **options)).graph_module


def pattern(x: Any, w: Any, b: Any) -> Any:
    return rw.kernel_node("aten.add.Tensor", "aten.gelu.default")(aten.mm.default(x, w), b)


def replacement(x: Any, w: Any, b: Any) -> Any:
    return aten.gelu.default(aten.addmm.default(b, x, w))


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_launches_are_matched_by_kernel_semantics(language: str) -> None:
    graph_module = emitted(layers, inputs(), cpu_kernels=language)
    first, second = rw.kernel_nodes(graph_module, "aten.add.Tensor", "aten.gelu.default")
    assert first.kernel == second.kernel and first.kernel.language == language
    assert [len(first.ins), [node.name for node in first.outs]] == [1, ["mm"]]
    assert list(rw.kernel_nodes(graph_module, "aten.gelu", exactly=False)) == [first, second]
    assert not list(rw.kernel_nodes(graph_module, "aten.gelu"))
    assert rw.kernel_of(first.outs[0]) is None and rw.kernel_of(first.node) == first


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_launches_of_loaded_programs_are_matched(language: str, tmp_path: Path) -> None:
    """Those of cached compiles, too: the calls of their kernels are texts until they are read."""
    graph = make_fx(layers, tracing_mode="fake")(*inputs())
    compiled = fxwrap.compile_graph(graph, inputs(), options=Options(cpu_kernels=language))  # type: ignore[arg-type]
    compiled.save(tmp_path / "saved.fxw")
    for form in ("in_place", "functional"):
        graph_module = fxwrap.to_fx(fxwrap.load(tmp_path / "saved.fxw").program, form=form).graph_module
        first, second = rw.kernel_nodes(graph_module, "aten.add.Tensor", "aten.gelu.default")
        assert first.operators == second.operators == ("aten.add.Tensor", "aten.gelu")
        assert len(rw.replace_in_graph(graph_module, pattern, replacement)) == 2


def test_graph_observers_see_rewrites() -> None:
    graph_module = emitted(layers, inputs())
    created: list[torch.fx.Node] = []
    erased: list[torch.fx.Node] = []
    graph_module._register_create_node_hook(created.append)
    graph_module._register_erase_node_hook(erased.append)
    rw.replace_in_graph(graph_module, pattern, replacement)
    assert [node.target for node in created].count(aten.gelu.default) == 2
    assert [node.target for node in erased].count(torch.ops.fxwrap.cpp_kernel.default) == 2


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_a_launch_with_in_place_updates_is_replaced(language: str) -> None:
    arguments = inputs()
    graph_module = emitted(layers, arguments, cpu_kernels=language)
    matches = rw.replace_in_graph(graph_module, pattern, replacement)
    assert [item.failure_reason for item in matches] == ["", ""] and len(matches[0].nodes) == 2
    graph_module.graph.lint()
    assert not list(rw.kernel_nodes(graph_module))
    assert not graph_module.graph.find_nodes(op="call_function", target=aten.empty_strided.default)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.gelu.default):
        assert isinstance(node.meta["val"], FakeTensor) and node.meta["fxwrap_origin"].operators[-1] == "aten.gelu"
        assert node.meta["original_aten"] is aten.gelu.default and node.meta["device"] == torch.device("cpu")
        assert [source.name for source in node.meta["from_node"]] == list(node.meta["fxwrap_origin"].nodes)
        assert node.meta.keys() >= {"stack_trace", "nn_module_stack", "source_fn_stack", "partitioner_tag", "stream"}
    torch.testing.assert_close(graph_module(*arguments), layers(*arguments))
    torch.testing.assert_close(fxwrap.run(fxwrap.from_fx(graph_module), list(arguments)), layers(*arguments))


def test_a_condition_filters_matches() -> None:
    arguments = inputs()
    graph_module = emitted(layers, arguments)
    matches = rw.replace_in_graph(
        graph_module, pattern, replacement, where=lambda nodes: nodes["x"].op == "placeholder"
    )
    assert [bool(item.failure_reason) for item in matches] == [False, True]
    torch.testing.assert_close(graph_module(*arguments), layers(*arguments))


def test_kernel_writes_to_inputs_are_copied_back() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(torch.tanh(y) * 2)
        return x @ y

    arguments = [torch.randn(4, 4), torch.randn(4, 4)]
    graph_module = emitted(function, arguments)
    (launch,) = rw.kernel_nodes(graph_module)

    def launched(y: Any) -> Any:
        return rw.kernel_node(*launch.operators)(y, 2)

    matches = rw.replace_in_graph(graph_module, launched, lambda y: aten.mul.Tensor(aten.tanh.default(y), 2))
    assert [item.failure_reason for item in matches] == [""]
    ours, theirs = [item.clone() for item in arguments], [item.clone() for item in arguments]
    torch.testing.assert_close(graph_module(*ours)[0], function(*theirs))
    torch.testing.assert_close(ours, theirs)
    assert graph_module.graph.find_nodes(op="call_function", target=aten.copy_.default)


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_memory_with_views_is_an_operand(language: str) -> None:
    """A kernel writes it, so a matmul reads the memory, not the result of the launch, which has none."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(x) * 2
        return hidden.t(), hidden @ w, hidden[1:]

    arguments = inputs()[:2]
    graph_module = emitted(function, arguments, cpu_kernels=language)
    (launch,) = rw.kernel_nodes(graph_module)
    matches = rw.replace_in_graph(
        graph_module,
        lambda x, w: aten.mm.default(x, w),
        lambda x, w: aten.squeeze.dim(aten.bmm.default(aten.unsqueeze.default(x, 0), aten.unsqueeze.default(w, 0)), 0),
        where=lambda nodes: nodes["x"] is launch.outs[0],
    )
    assert [item.failure_reason for item in matches] == [""]
    torch.testing.assert_close(tuple(graph_module(*arguments)), function(*arguments))
    torch.testing.assert_close(fxwrap.run(fxwrap.from_fx(graph_module), list(arguments)), function(*arguments))


def test_an_intervening_write_prevents_a_match() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        product = x @ y
        x.add_(1)
        return product @ (z * x)

    def two_products(x: Any, y: Any, z: Any) -> Any:
        return aten.mm.default(aten.mm.default(x, y), z)

    arguments = [torch.randn(4, 4) for _ in range(3)]
    graph_module = emitted(function, arguments, fuse=False)
    matches = rw.replace_in_graph(graph_module, two_products, lambda x, y, z: aten.mm.default(x, aten.mm.default(y, z)))
    assert [item.failure_reason for item in matches] == ["memory that it reads is written between its nodes"]


def test_a_replacement_of_another_dtype_is_an_error() -> None:
    def half(x: Any, w: Any, b: Any) -> Any:
        return aten._to_copy.default(replacement(x, w, b), dtype=torch.float16)

    with pytest.raises(RewriteError, match=r"'mm' is torch\.float32 \(4, 16\) on cpu, but the replacement is torch"):
        rw.replace_in_graph(emitted(layers, inputs()), pattern, half)
    with pytest.raises(RewriteError, match=r"kernel_node\(\.\.\.\) is for functions that are patterns"):
        rw.kernel_node("aten.add.Tensor")(torch.ones(2))


def test_as_a_pass_of_a_compile() -> None:
    def fused(graph_module: GraphModule) -> None:
        matches.extend(rw.replace_in_graph(graph_module, pattern, replacement))

    matches: list[rw.GraphMatch] = []
    passes = [Pass(fused, key="1", at="fx_emitted")]
    arguments = inputs()
    with torch.no_grad():
        result = torch.compile(layers, backend="fxwrap", options={"passes": passes, "emitter": "fx"})(*arguments)
    assert len(matches) == 2
    torch.testing.assert_close(result, layers(*arguments))
