"""torch's tools on graphs in functional form: passes, partitioners, tracers and pattern matchers."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node, replace_pattern, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

import fxwrap
from fxwrap.compile.steps import plan_program
from fxwrap.wrapper_ir import Program, canonicalize_program
from tests.converters.fx.fused_graphs import LAUNCHES, count_launches, split_in_order
from tests.support.capture import CapturedGraph, capture_graphs
from tests.support.long_form import long_only
from tests.support.models import SHALLOW
from tests.support.program_equality import assert_equal

_ATEN = torch.ops.aten
OPTIONS = {
    language: fxwrap.Options(
        emitter="fx", fx_form="functional", memory_planning="none", compile_cache=False, cpu_kernels=language
    )
    for language in ("cpp", "triton")
}  # type: ignore[arg-type]


@cache
def _compiled(language: str) -> tuple[fxwrap.Compiled, CapturedGraph]:
    (captured,) = capture_graphs(SHALLOW["gpt2"], training=False)
    return fxwrap.compile_graph(captured.graph_module, captured.example_inputs, options=OPTIONS[language]), captured


def _graph(language: str) -> GraphModule:
    """Emits the program again: resets between tests empty torch's table of Triton kernels."""
    return fxwrap.to_fx(_compiled(language)[0].program, form="functional").graph_module


def _eliminated(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    """Without a launch that was added and is unused."""
    launch = next(node for node in module.graph.nodes if node.target in LAUNCHES)
    with module.graph.inserting_after(launch):
        unused = module.graph.node_copy(launch)
    module.graph.eliminate_dead_code()
    module.recompile()
    assert unused not in module.graph.nodes
    return module


def _without_equal_nodes(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    """Without a launch that equals another one, whose result is used."""
    item = next(
        node for node in module.graph.nodes if node.target is operator.getitem and node.args[0].target in LAUNCHES
    )
    launch = item.args[0]
    with module.graph.inserting_after(item):
        again = module.graph.node_copy(launch)
    with module.graph.inserting_after(again):
        result = module.graph.node_copy(item, lambda node: again if node is launch else node)
    next(iter(item.users)).replace_input_with(item, result)
    return GraphModule(module, fx_graph_cse(module.graph))


class _Launches(OperatorSupportBase):
    def is_node_supported(self, _submodules: Any, node: Node) -> bool:
        return node.target in LAUNCHES or node.target is operator.getitem


def _partitioned(module: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
    partitioner = CapabilityBasedPartitioner(module, _Launches(), allows_single_node_partition=True)
    partitions = partitioner.propose_partitions()
    assert len(partitions) > 1
    return partitioner.fuse_partitions(partitions)


TOOLS: dict[str, Callable[[GraphModule, Sequence[Any]], GraphModule]] = {
    "deepcopy": lambda module, _inputs: copy.deepcopy(module),
    "eliminate_dead_code": _eliminated,
    "fx_graph_cse": _without_equal_nodes,
    "split_module": lambda module, _inputs: split_in_order(module, 3),
    "capability_partitioner": _partitioned,
    "make_fx": lambda module, inputs: make_fx(module, tracing_mode="fake")(*inputs),
    "functionalize": lambda module, inputs: make_fx(torch.func.functionalize(module), tracing_mode="fake")(*inputs),
}
SAME_ORDER = ("deepcopy", "eliminate_dead_code", "fx_graph_cse", "make_fx", "functionalize")


# Triton's interpreter is slow.
ON_TRITON = [
    long_only("triton", "eliminate_dead_code"),
    ("triton", "fx_graph_cse"),
    long_only("triton", "functionalize"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("language", "tool"), [*[("cpp", tool) for tool in TOOLS], *ON_TRITON])
@torch.no_grad()
def test_tools_preserve_results_and_the_way_back(language: str, tool: str) -> None:
    compiled, captured = _compiled(language)
    module = TOOLS[tool](_graph(language), captured.inputs)
    assert count_launches(module) == count_launches(compiled.graph_module)
    wanted = compiled.graph_module(*captured.inputs)
    for function in (module, fxwrap.fx.in_place(module)):
        torch.testing.assert_close(tuple(function(*captured.inputs)), tuple(wanted), rtol=0, atol=0)
    program = plan_program(fxwrap.from_fx(module), OPTIONS[language].resolve_devices())
    if tool in SAME_ORDER and (tool, language) != ("fx_graph_cse", "triton"):  # equal templates of results are merged
        assert _without_header(program) == _without_header(compiled.program)


def _without_header(program: Program) -> str:
    return str(canonicalize_program(program.replace(header=())))


@pytest.mark.parametrize("language", OPTIONS)
def test_the_graph_runs_under_fake_mode(language: str) -> None:
    compiled, captured = _compiled(language)
    with FakeTensorMode() as mode:
        outputs = compiled.graph_module(*[mode.from_tensor(item) for item in captured.inputs])
    wanted = captured.graph_module(*captured.inputs)
    for fake, one in zip(outputs, wanted, strict=True):
        assert isinstance(fake, FakeTensor) and (fake.shape, fake.stride()) == (one.shape, one.stride())


@torch.no_grad()
def test_the_graph_compiles_again_and_is_exported() -> None:
    compiled, captured = _compiled("cpp")
    module, inputs = compiled.graph_module, captured.inputs
    wanted = tuple(module(*inputs))
    for backend in ("aot_eager", "fxwrap"):
        torch.compiler.reset()
        results = torch.compile(module, backend=backend, fullgraph=True)(*inputs)
        torch.testing.assert_close(tuple(results), wanted, rtol=1e-5, atol=1e-6)

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *items: torch.Tensor) -> Any:
            return self.inner(*items)

    exported = torch.export.export(Around(), tuple(inputs))
    torch.testing.assert_close(tuple(exported.module()(*inputs)), wanted, rtol=0, atol=0)


# --- patterns ---------------------------------------------------------------------------------------------------------


def _pattern(bias: Any, x: Any, w: Any) -> Any:
    return _ATEN.addmm.default(bias, x, w)


def _replacement(bias: Any, x: Any, w: Any) -> Any:
    return _ATEN.add.Tensor(_ATEN.mm.default(x, w), bias)


@torch.no_grad()
def test_pattern_matchers_rewrite_the_graph() -> None:
    compiled, captured = _compiled("cpp")
    module = _graph("cpp")
    calls = module.graph.find_nodes(op="call_function", target=_ATEN.addmm.default)
    matches = SubgraphMatcher(symbolic_trace(_pattern).graph, match_output=False).match(module.graph)
    assert len(matches) == len(calls) > 0
    replace_pattern(module, _pattern, _replacement)
    assert not module.graph.find_nodes(op="call_function", target=_ATEN.addmm.default)
    wanted = compiled.graph_module(*captured.inputs)
    for function in (module, fxwrap.fx.in_place(module), fxwrap.to_cpp(fxwrap.from_fx(module))):
        torch.testing.assert_close(tuple(function(*captured.inputs)), tuple(wanted), rtol=1e-5, atol=1e-6)


# --- partition functions of autograd ----------------------------------------------------------------------------------


def _model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.nn.functional.gelu(x @ w) @ v, -1)


def _joint_of_functional_graphs(joint: GraphModule, inputs: Sequence[Any], outputs: int) -> GraphModule:
    """Compiles the forward and the backward, and puts both functional graphs into one."""
    options = OPTIONS["cpp"].replace(check_inputs=False)
    graphs = default_partition(joint, inputs, num_fwd_outputs=outputs)
    forward, backward = [fxwrap.compile_graph(item, options=options).graph_module.graph for item in graphs]
    graph = Graph()
    env = {node.name: graph.node_copy(node) for node in joint.graph.find_nodes(op="placeholder")}
    results = graph.graph_copy(forward, {node: env[node.name] for node in forward.find_nodes(op="placeholder")})
    saved = dict(zip([node.name for node in graphs[0].graph.output_node().args[0]], results, strict=True))
    operands = {node: env.get(node.name) or saved[node.name] for node in backward.find_nodes(op="placeholder")}
    gradients = graph.graph_copy(backward, operands)
    output = graph.output((*results[:outputs], *gradients))
    output.meta = dict(joint.graph.output_node().meta)
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_partition_functions_divide_launches(partition: Callable[..., tuple[GraphModule, GraphModule]]) -> None:
    parts: list[GraphModule] = []

    def divide(joint: GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_options: Any) -> Any:
        both = _joint_of_functional_graphs(joint, inputs, num_fwd_outputs)
        parts.extend(partition(both, inputs, num_fwd_outputs=num_fwd_outputs))
        return tuple(parts)

    def compiler(graph: GraphModule, _inputs: Sequence[Any]) -> Any:
        return make_boxed_func(graph)

    inputs = [torch.randn(size, requires_grad=True) for size in ((5, 6), (6, 8), (8, 4))]
    function = aot_function(_model, fw_compiler=compiler, bw_compiler=compiler, partition_fn=divide)
    gradients = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    wanted = torch.autograd.grad(_model(*inputs).square().sum(), inputs)
    torch.testing.assert_close(gradients, wanted)
    assert all(count_launches(part) for part in parts)


# --- the option, and the public functions -----------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("planning", ["none", "reuse", "auto"])
def test_functional_and_in_place_are_inverse(planning: Any) -> None:
    _, captured = _compiled("cpp")
    options = fxwrap.Options(emitter="fx", memory_planning=planning, compile_cache=False)
    direct = fxwrap.compile_graph(captured.graph_module, captured.example_inputs, options=options)
    there = fxwrap.fx.functional(direct.graph_module)
    assert not there.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel.default)
    back = fxwrap.fx.in_place(there, options=options)
    assert_equal(direct.program, fxwrap.from_fx(back))
    functional = options.replace(fx_form="functional")
    compiled = fxwrap.compile_graph(captured.graph_module, captured.example_inputs, options=functional)
    program = fxwrap.from_fx(fxwrap.fx.in_place(compiled.graph_module, options=options))
    assert _without_header(program) == _without_header(direct.program)  # the header has the options


def test_the_option_selects_the_form_of_every_graph() -> None:
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, _info: Any) -> GraphModule:
        graphs.append(module)
        return module

    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()), torch.randn(3, 4)
    compiled = torch.compile(model, backend="fxwrap", options={"fx_form": "functional", "on_graph": keep})
    result = compiled(x)
    torch.testing.assert_close(result, model(x))
    result.sum().backward()
    assert len(graphs) == 2 and sum(map(count_launches, graphs)) > 0
    assert all(graph.meta["fxwrap"]["form"] == "functional" for graph in graphs)


def test_the_form_is_part_of_the_cache_identity() -> None:
    compiled, captured = _compiled("cpp")
    other = fxwrap.compile_graph(
        captured.graph_module, captured.example_inputs, options=OPTIONS["cpp"].replace(fx_form="in_place")
    )
    assert other.key != compiled.key and "fx_form=functional" in OPTIONS["cpp"].text()


def test_every_node_has_a_value_and_launches_an_origin() -> None:
    for node in _compiled("cpp")[0].graph_module.graph.nodes:
        assert "val" in node.meta
        if node.target in LAUNCHES:
            assert "fxwrap_origin" in node.meta and all(isinstance(val, FakeTensor) for val in node.meta["val"])
