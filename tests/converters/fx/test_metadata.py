"""Metadata of emitted nodes as torch's tools read it: provenance in the model, devices, streams and docstrings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.graph_drawer import FxGraphDrawer
from torch.fx.traceback import NodeSource

import fxwrap
from fxwrap.rewrite import replace_in_graph
from tests.conftest import NO_PYDOT
from tests.support.capture import capture_graphs
from tests.support.models import MODELS

KEYS = (
    "val", "stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "original_aten", "partitioner_tag",
    "device", "stream",
)  # fmt: skip
INTERPRETER = fxwrap.Options(emitter="interpreter")


@cache
def compiled_gpt2(kernels: Literal["text", "subgraph"] = "text") -> fxwrap.Compiled:
    """A GPT-2 of two layers."""
    (captured,) = capture_graphs(MODELS["gpt2"], training=False)
    return fxwrap.compile_graph(captured.graph_module, options=INTERPRETER.replace(kernels=kernels))


@cache
def gpt2() -> GraphModule:
    """The emitted graph of a GPT-2 of two layers."""
    return fxwrap.to_fx(compiled_gpt2().program).graph_module


def _regions() -> GraphModule:
    return fxwrap.to_fx(compiled_gpt2("subgraph").program).graph_module


def _cleaned() -> GraphModule:
    module = copy.deepcopy(gpt2())
    module.graph.eliminate_dead_code()
    return module


def _rewritten() -> GraphModule:
    """A graph whose call of a library is replaced."""
    module, aten = copy.deepcopy(fxwrap.fx.functional(gpt2())), torch.ops.aten
    matches = replace_in_graph(module, lambda x, w: aten.mm.default(x, w), lambda x, w: aten.mm.default(x * 1, w))
    assert any(not match.failure_reason for match in matches), matches
    return module


TRANSFORMS: dict[str, Callable[[], GraphModule]] = {
    "none": gpt2,
    "a copy and dead code elimination": _cleaned,
    "an import and a second emission": lambda: fxwrap.to_fx(fxwrap.from_fx(gpt2())).graph_module,
    "functional": lambda: fxwrap.fx.functional(gpt2()),
    "functional and back": lambda: fxwrap.fx.in_place(fxwrap.fx.functional(gpt2())),
    "regions": _regions,
    "functional regions": lambda: fxwrap.fx.functional(_regions()),
    "inlined regions": lambda: fxwrap.fx.inline_regions(_regions()),
    "a replacement": _rewritten,
    "export": lambda: fxwrap.fx.export(compiled_gpt2()).graph_module,
}
"""The transforms of fxwrap, and torch's that keep nodes."""


def launches(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel.default))


def assert_has_all_keys(module: GraphModule) -> None:
    for node in module.graph.nodes:
        assert [key for key in KEYS if key not in node.meta] == [], node.name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_node_has_every_key_after_each_transform(name: str) -> None:
    """The printers of torch show the model, too."""
    module = TRANSFORMS[name]()
    for part in module.modules():
        if isinstance(part, GraphModule):
            assert_has_all_keys(part)
    text = module.print_readable(print_output=False, additional_meta=["nn_module_stack"])
    for shown in ("File: ", "modeling_gpt2.py", "Computes aten.", "transformer.h.1.mlp"):
        assert shown in text, shown


def test_a_second_emission_has_equal_metadata() -> None:
    module, again = gpt2(), fxwrap.to_fx(fxwrap.from_fx(_cleaned())).graph_module
    for one, other in zip(launches(module), launches(again), strict=True):
        assert all(one.meta[key] == other.meta[key] for key in KEYS if key != "val")
        assert one.meta["docstring"] == other.meta["docstring"]


def test_a_kernel_comes_from_all_its_nodes() -> None:
    """The module, function and operator are those of its last node; every node that it computes is in `from_node`."""
    node = next(node for node in launches(gpt2()) if "aten.tanh" in node.meta["fxwrap_origin"].operators)
    names = [source.name for source in node.meta["from_node"]]
    assert all(isinstance(source, NodeSource) for source in node.meta["from_node"])
    assert names == list(node.meta["fxwrap_origin"].nodes) and len(names) > 3
    assert isinstance(node.meta["original_aten"], torch._ops.OpOverload)
    assert list(node.meta["nn_module_stack"])[-1] == "transformer.h.0.mlp.act"
    path, class_ = node.meta["nn_module_stack"]["transformer.h.0"]
    assert path == "transformer.h.0" and class_.endswith("GPT2Block")
    assert node.meta["device"] is None or node.meta["device"] == torch.device("cpu")
    assert node.meta["stream"] == 0 and node.meta["partitioner_tag"] == "is_forward"


def test_stack_traces_have_all_frames_of_the_model() -> None:
    (captured,) = capture_graphs(MODELS["gpt2"], training=False)
    traces = {node.name: node.meta.get("stack_trace") for node in captured.graph_module.graph.nodes}
    once = gpt2()
    for module in (once, fxwrap.to_fx(fxwrap.from_fx(once)).graph_module):
        for node in launches(module):
            sources = node.meta["fxwrap_origin"].sources
            trace = next(traces[source.node] for source in reversed(sources) if traces.get(source.node))
            text = node.meta["stack_trace"]
            assert trace.count('  File "') > 2 and text.startswith(trace.rstrip() + "\n")
            assert text.count('  File "') == trace.count('  File "') + 1
            assert text.endswith(node.meta["docstring"])


def test_a_graph_that_is_compiled_again_has_the_traces_of_its_first_compile() -> None:
    graph = make_fx(lambda x: (x.sin() + 1,), tracing_mode="fake")(torch.randn(3))
    trace = '  File "/models/mine.py", line 2, in outer\n    y\n  File "/models/mine.py", line 3, in forward\n    x\n'
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = trace
    options = fxwrap.Options(emitter="fx", fx_form="functional", fuse=False)
    for _ in range(2):
        graph = fxwrap.compile_graph(graph, [torch.randn(3)], options=options).graph_module
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert node.meta["stack_trace"].startswith(trace) and node.meta["stack_trace"].count("File") == 3


def test_from_node_has_the_id_of_the_compiled_graph(tmp_path: Path) -> None:
    graph = make_fx(lambda x: (x.sin() + 1,), tracing_mode="fake")(torch.randn(3))
    exported = torch.export.export(torch.nn.Sequential(torch.nn.Softmax(-1), torch.nn.GELU()), (torch.randn(3, 4),))
    for source, wanted in ((graph, id(graph.graph)), (exported, id(exported.graph))):
        program = fxwrap.compile_graph(source, options=INTERPRETER.replace(compile_cache=False)).program
        module = fxwrap.to_fx(program).graph_module
        for emitted in (module, fxwrap.to_fx(fxwrap.from_fx(module)).graph_module):
            (launch,) = launches(emitted)
            assert {item.graph_id for item in launch.meta["from_node"]} == {wanted}
    compiled = fxwrap.compile_graph(graph, [torch.randn(3)])
    fxwrap.save(compiled, tmp_path / "program.fxw")
    loaded = fxwrap.load(tmp_path / "program.fxw").program
    (launch,) = launches(fxwrap.to_fx(loaded).graph_module)
    assert {item.graph_id for item in launch.meta["from_node"]} == {-1}


def test_kernels_have_docstrings() -> None:
    graph = make_fx(lambda x: (x.sin() + 1).sum(1), tracing_mode="fake")(torch.randn(3, 5))
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = '  File "/models/mine.py", line 3, in forward\n    x'
    module = fxwrap.to_fx(fxwrap.lower(graph)).graph_module
    (launch,) = launches(module)
    expected = "Computes aten.sin, aten.add.Tensor, aten.sum.dim_IntList over [3, 5]: f32[3] from f32[3, 5]."
    assert launch.meta["docstring"] == expected
    assert expected in module.print_readable(print_output=False)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_drawer_shows_the_nodes(name: str) -> None:
    pytest.importorskip("pydot", reason=NO_PYDOT)
    module = TRANSFORMS[name]()
    assert len(FxGraphDrawer(module, "gpt2").get_dot_graph().get_nodes()) >= len(module.graph.nodes)
