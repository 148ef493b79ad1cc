"""Metadata of emitted nodes as torch's tools read it: provenance in the model, devices, streams and docstrings."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.graph_drawer import FxGraphDrawer
from torch.fx.traceback import NodeSource

import fxwrap
from tests.conftest import NO_PYDOT
from tests.support.capture import capture_graphs
from tests.support.models import MODELS

KEYS = (
    "val", "stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "original_aten", "partitioner_tag",
    "device", "stream",
)  # fmt: skip
INTERPRETER = fxwrap.Options(emitter="interpreter")


@cache
def gpt2() -> GraphModule:
    """The emitted graph of a GPT-2 of two layers."""
    (captured,) = capture_graphs(MODELS["gpt2"], training=False)
    return fxwrap.to_fx(fxwrap.compile_graph(captured.graph_module, options=INTERPRETER).program).graph_module


def launches(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel.default))


def assert_has_all_keys(module: GraphModule) -> None:
    for node in module.graph.nodes:
        assert [key for key in KEYS if key not in node.meta] == [], node.name


def test_every_node_has_every_key() -> None:
    """Also after a copy, dead code elimination, an import, and a second emission."""
    module = gpt2()
    assert_has_all_keys(module)
    cleaned = copy.deepcopy(module)
    cleaned.graph.eliminate_dead_code()
    assert_has_all_keys(cleaned)
    again = fxwrap.to_fx(fxwrap.from_fx(cleaned)).graph_module
    assert_has_all_keys(again)
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
    compiled = fxwrap.compile_graph(captured.graph_module, options=INTERPRETER)
    once = fxwrap.to_fx(compiled.program).graph_module
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


def test_torchs_printers_show_the_model() -> None:
    module = gpt2()
    text = module.print_readable(print_output=False)
    assert "File: " in text and "modeling_gpt2.py" in text and "Computes aten.embedding" in text
    labels = module.print_readable(print_output=False, additional_meta=["nn_module_stack"])
    assert "transformer.h.1.mlp" in labels


def test_the_drawer_shows_the_nodes() -> None:
    pytest.importorskip("pydot", reason=NO_PYDOT)
    dot = FxGraphDrawer(gpt2(), "gpt2").get_dot_graph()
    assert len(dot.get_nodes()) >= len(gpt2().graph.nodes)
