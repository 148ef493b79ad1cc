"""What people do to a GraphModule with torch's own tools: emitted graphs, kernels included, give the same outputs."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.graph_drawer import FxGraphDrawer
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.split_module import split_module

import fxwrap
from fxwrap.errors import GraphModuleError, JitTraceError
from fxwrap.wrapper_ir import Ownership, Program
from tests.conftest import NO_PYDOT
from tests.converters.fx.fused_graphs import LANGUAGES, count_launches, fused, split_in_order
from tests.support.capture import CapturedGraph, capture_graphs, random_like
from tests.support.long_form import long_only
from tests.support.models import SHALLOW
from tests.support.samples import SAMPLES

Tool = Callable[[GraphModule, Sequence[Any]], Sequence[Any]]
"""Runs a graph on inputs after, or through, one of torch's tools."""


def _flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _eliminated(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    before = [node.target for node in module.graph.nodes if node.op == "call_function" and node.is_impure()]
    module.graph.eliminate_dead_code()
    assert [node.target for node in module.graph.nodes if node.op == "call_function" and node.is_impure()] == before
    module.recompile()
    return module(*inputs)


def _copied(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    copied = copy.deepcopy(module)
    for node, twin in zip(module.graph.nodes, copied.graph.nodes, strict=True):
        assert node.meta.keys() == twin.meta.keys()
    copied.recompile()
    return copied(*inputs)


def _retraced(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    return make_fx(module, tracing_mode="fake")(*inputs)(*inputs)


def _retraced_with_symbols(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    return make_fx(module, tracing_mode="symbolic")(*inputs)(*inputs)


def _functionalised(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    return torch.func.functionalize(module)(*inputs)


def _retraced_functionalised(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    functional = make_fx(torch.func.functionalize(module), tracing_mode="fake")(*inputs)
    schemas = [(node, getattr(node.target, "_schema", None)) for node in functional.graph.nodes]
    mutations = [node for node, schema in schemas if schema is not None and schema.is_mutable]
    # The remaining mutations write inputs only.
    assert all(node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder" for node in mutations)
    return functional(*inputs)


def _interpreted(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    return Interpreter(module).run(*inputs)


def _split(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    part = {node: 3 * index // max(len(nodes), 1) for index, node in enumerate(nodes)}
    parts = split_module(module, module, lambda node: part[node])  # type: ignore[arg-type]
    assert len(list(parts.children())) == min(3, len(nodes))
    return parts(*inputs)


def _shape_propagated(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    outputs = ShapeProp(module).propagate(*inputs)
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.Tensor):
            assert node.meta["tensor_meta"].dtype == node.meta["val"].dtype
    return outputs


def _drawn(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    pytest.importorskip("pydot", reason=NO_PYDOT)
    drawing = FxGraphDrawer(module, "program").get_dot_graph().to_string()
    for node in module.graph.nodes:
        assert node.name in drawing
    return module(*inputs)


TOOLS: dict[str, Tool] = {
    tool.__name__.lstrip("_"): tool
    for tool in (
        _eliminated, _copied, _retraced, _retraced_with_symbols, _functionalised, _retraced_functionalised,
        _interpreted, _split, _shape_propagated, _drawn,
    )
}  # fmt: skip

WITH_KERNELS = ("mlp", "cpp_kernel_with_two_outputs", "triton_kernel")
OTHERS = (
    "input_as_output", "views_share_one_root", "pool_and_workspace", "operator_arguments", "exact_scalars",
    "scatter_and_index_put", "owned_inputs",
)  # fmt: skip


# Retracing and functionalisation take a module's buffers as constants, which torch does not let them write.
WRITES_CONSTANTS = "mutated_inputs_and_constants"
CASES = [
    (name, tool) for name in (*WITH_KERNELS, *OTHERS, WRITES_CONSTANTS) for tool in TOOLS
    if name != WRITES_CONSTANTS or not tool.startswith(("retraced", "functionalised"))
]  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "tool"), CASES)
@torch.no_grad()
def test_fx_tools_preserve_outputs(name: str, tool: str) -> None:
    sample = SAMPLES[name]
    ours, theirs = sample.inputs(5), sample.inputs(5)
    module = fxwrap.to_fx(sample.program()).graph_module
    wanted = fxwrap.run(sample.program(), theirs)
    outputs = _flat(TOOLS[tool](module, ours))
    torch.testing.assert_close(outputs, list(wanted), rtol=0, atol=0, equal_nan=True)
    for item, one, other in zip(sample.program().inputs, ours, theirs, strict=True):
        if item.ownership is not Ownership.OWNED:  # an owned input may hold anything afterwards
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class Prepared:
    """A program with inputs, and what the interpreter gives for them and leaves in them."""

    program: Program
    inputs: list[torch.Tensor]
    outputs: list[Any]
    inputs_after: list[torch.Tensor]


@cache
def _prepared(name: str) -> list[Prepared]:
    """A model's forward and backward program, prepared once for all tools."""
    with torch.enable_grad():
        graphs = capture_graphs(SHALLOW[name], training=True)
    return [_prepare(graph) for graph in graphs]


def _prepare(captured: CapturedGraph) -> Prepared:
    program = fxwrap.lower(captured.graph_module, captured.example_inputs)
    generator = torch.Generator().manual_seed(3)
    inputs = [random_like(fake, generator) for fake in captured.example_inputs]
    inputs_after = copy.deepcopy(inputs)
    return Prepared(program, inputs, list(fxwrap.run(program, inputs_after)), inputs_after)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "tool"),
    [*[("gpt2", tool) for tool in TOOLS], long_only("resnet", "copied"), long_only("resnet", "retraced")],
)
@torch.no_grad()
def test_fx_tools_preserve_outputs_of_models(name: str, tool: str) -> None:
    for prepared in _prepared(name):
        assert prepared.program.kernels
        inputs = copy.deepcopy(prepared.inputs)
        outputs = _flat(TOOLS[tool](fxwrap.to_fx(prepared.program).graph_module, inputs))
        torch.testing.assert_close(outputs, prepared.outputs, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(inputs, prepared.inputs_after, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("write", [pickle.dumps, lambda module: torch.save(module, io.BytesIO())])
def test_pickling_error_names_the_alternative(write: Callable[[Any], Any]) -> None:
    module = fxwrap.to_fx(SAMPLES["mlp"].program()).graph_module
    with pytest.raises(GraphModuleError, match=r"cannot be pickled.*fxwrap\.save"):
        write(module)
    with pytest.raises(GraphModuleError, match="cannot be pickled"):
        write(copy.deepcopy(module))


def test_symbolic_tracing_is_rejected() -> None:
    module = fxwrap.to_fx(SAMPLES["mlp"].program()).graph_module

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            return self.inner(x, w)

    for traced in (module, copy.deepcopy(module), Around()):
        with pytest.raises(GraphModuleError, match="cannot be traced symbolically"):
            symbolic_trace(traced)


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_jit_trace_of_compiled_programs_raises(emitter: str) -> None:
    """It drops launches of kernels: traces returned uninitialised memory."""
    inputs = [torch.randn(4, 6), torch.randn(6, 5)]
    graph = make_fx(lambda x, w: (x @ w, torch.relu(x @ w) + 1))(*inputs)
    compiled = fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(emitter=emitter, check_inputs=False))
    forms = [
        compiled,
        compiled.graph_module,
        fxwrap.fx.functional(compiled.graph_module),
        fxwrap.to_fx(compiled.program),
    ]
    for form in forms:
        with pytest.raises(JitTraceError, match=r"fxwrap\.save"):
            torch.jit.trace(lambda x, w, form=form: form(x, w), tuple(inputs), check_trace=False)


@torch.no_grad()
def test_an_emitted_graph_compiles_again() -> None:
    sample = SAMPLES["cpp_kernel_with_two_outputs"]
    module = fxwrap.to_fx(sample.program()).graph_module
    wanted = module(*sample.inputs(2))
    for backend in ("aot_eager", "fxwrap"):
        torch.compiler.reset()
        outputs = torch.compile(module, backend=backend, fullgraph=True)(*sample.inputs(2))
        torch.testing.assert_close(outputs, wanted, rtol=0, atol=0)


# --- fused graphs ---------------------------------------------------------------------------------------------------


def _fused_graph(language: str) -> tuple[GraphModule, list[torch.Tensor]]:
    inputs = [torch.randn(5, 6), torch.randn(6, 7)]
    graph = make_fx(fused, tracing_mode="fake")(*inputs)
    return fxwrap.compile_graph(graph, inputs, options=LANGUAGES[language]).graph_module, inputs


def _compiled_by_elimination(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


MAKERS: dict[str, Callable[[GraphModule, Sequence[Any]], GraphModule]] = {
    "eliminate_dead_code": _compiled_by_elimination,
    "deepcopy": lambda module, _inputs: copy.deepcopy(module),
    "make_fx": lambda module, inputs: make_fx(module, tracing_mode="fake")(*inputs),
    "make_fx_symbolic": lambda module, inputs: make_fx(module, tracing_mode="symbolic")(*inputs),
    "functionalize": lambda module, inputs: make_fx(torch.func.functionalize(module), tracing_mode="fake")(*inputs),
    "split_module": lambda module, _inputs: split_in_order(module),
    "twice": lambda module, inputs: _compiled_by_elimination(MAKERS["make_fx"](copy.deepcopy(module), inputs), inputs),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("language", LANGUAGES)
@torch.no_grad()
def test_fx_tools_preserve_launches_of_a_fused_graph(language: str, maker: str) -> None:
    module, inputs = _fused_graph(language)
    before = count_launches(module)
    assert before >= 2
    derived = MAKERS[maker](module, inputs)
    assert count_launches(derived) == before
    torch.testing.assert_close(tuple(derived(*inputs)), fused(*inputs))


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_fused_graph_runs_under_fake_mode(language: str) -> None:
    module, inputs = _fused_graph(language)
    with FakeTensorMode() as mode:
        outputs = module(*[mode.from_tensor(item) for item in inputs])
    for fake, wanted in zip(outputs, fused(*inputs), strict=True):
        assert isinstance(fake, FakeTensor) and (fake.shape, fake.stride()) == (wanted.shape, wanted.stride())


@pytest.mark.parametrize("language", LANGUAGES)
@torch.no_grad()
def test_aot_autograd_preserves_launches_of_a_fused_graph(language: str) -> None:
    """It makes them functional on the way."""
    module, inputs = _fused_graph(language)
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    outputs = aot_function(module, fw_compiler=keep)(*inputs)
    torch.testing.assert_close(tuple(outputs), fused(*inputs))
    assert [count_launches(graph) for graph in graphs] == [count_launches(module)]
