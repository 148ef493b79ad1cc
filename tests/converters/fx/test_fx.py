"""The FX converter: what nodes say and do, their metadata, what they keep alive, and how they fail."""

from __future__ import annotations

import copy
import operator
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, settings
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.fx.nodes import GraphWriter
from fxwrap.errors import UnsupportedError
from fxwrap.inference import CallInference, FakeValues, InferredResult
from fxwrap.lines import CORE_LINES
from fxwrap.symbolic import SymbolInfo, evaluate, make_symbol, parse_expr
from fxwrap.torch_compat import FakeTensor, storage_identity, triton_kernel_at
from fxwrap.wrapper_ir import TensorType, Value
from tests.devices.copy_engine import AbacusCopy
from tests.support.capture import capture_graphs
from tests.support.long_form import long_only, sample_size
from tests.support.models import SHALLOW
from tests.support.sample import Sample, contents
from tests.support.samples import SAMPLES
from tests.support.strategies.expressions import any_expressions, environments

RUNNABLE = [sample for sample in SAMPLES.values() if sample.cpu_runnable]
named = pytest.mark.parametrize("sample", RUNNABLE, ids=lambda sample: sample.name)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)


@named
def test_samples_match_the_interpreter(sample: Sample) -> None:
    program = sample.program()
    ours, theirs = sample.inputs(3), sample.inputs(3)
    torch.manual_seed(1)
    wanted = fxwrap.run(program, theirs)
    torch.manual_seed(1)
    emitted = fxwrap.to_fx(program)
    emitted.graph_module.graph.lint()
    result = emitted(*ours)
    assert_same(contents(result), contents(wanted))
    assert [type(item) for item in result] == [type(item) for item in wanted]
    assert_same(contents(ours), contents(theirs))


# --- metadata -------------------------------------------------------------------------------------------------------


class _Watch(Interpreter):
    """Records the result of every node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.results[n] = super().run_node(n)
        return self.results[n]


def _plain(number: Any, values: dict[Any, Any]) -> Any:
    """The value of a symbolic number for these values of its ShapeEnv's symbols."""
    node = getattr(number, "node", None)
    if node is None:
        return number
    expression = node.expr.xreplace(values)
    return bool(expression) if isinstance(number, torch.SymBool) else node.pytype(expression)


def _check_metadata(module: GraphModule, inputs: list[Any]) -> int:
    watch = _Watch(module)
    with torch.no_grad():
        watch.run(*inputs)
    modes, storages, real_storages, checked = set(), {}, {}, 0
    values: dict[Any, Any] = {}
    of_inputs: list[int] = []
    for node, real in watch.results.items():
        assert "val" in node.meta, node
        val = node.meta["val"]
        if isinstance(val, torch.SymInt | torch.SymFloat) and val.node.expr.is_Symbol:
            values[val.node.expr] = real
        elif isinstance(val, torch.SymBool) and getattr(val.node.expr, "lhs", val.node.expr).is_Symbol:
            # An unbacked bool is Eq(u0, 1).
            values.setdefault(val.node.expr.lhs, int(real))
    for node, real in watch.results.items():
        val = node.meta["val"]
        if isinstance(real, tuple | list | GraphModule) or not isinstance(real, torch.Tensor):
            if isinstance(real, int | float):
                assert _plain(val, values) == pytest.approx(real), node
            continue
        assert isinstance(val, FakeTensor), node
        modes.add(val.fake_mode)
        assert val.dtype == real.dtype and val.device == real.device, node
        assert [_plain(size, values) for size in val.shape] == list(real.shape), node
        if real.numel():  # the stride of a dimension of one element is arbitrary
            strides = [_plain(stride, values) for stride in val.stride()]
            dims = [dim for dim, size in enumerate(real.shape) if size != 1]
            assert [strides[dim] for dim in dims] == [real.stride(dim) for dim in dims], node
        assert _plain(val.storage_offset(), values) == real.storage_offset(), node
        real_storages[node], storages[node] = storage_identity(real), storage_identity(val)
        of_inputs.extend([storages[node]] if node.op == "placeholder" else [])
        checked += 1
    assert len(modes) <= 1
    for node, storage in storages.items():
        if of_inputs.count(storage) > 1:
            continue  # a model's saved tensors may share memory, which random inputs do not
        sharing = {other for other in storages if storages[other] == storage}
        assert sharing == {other for other in storages if real_storages[other] == real_storages[node]}, node
    return checked


@pytest.mark.parametrize(
    "sample", [sample for sample in RUNNABLE if sample.name != "objects_of_blocks"], ids=lambda sample: sample.name
)  # torch's `cond` itself, which node by node runs, takes no objects
def test_metadata_matches_node_results(sample: Sample) -> None:
    module = fxwrap.to_fx(sample.program()).graph_module
    checked = _check_metadata(module, sample.inputs(2))
    assert checked or sample.name == "empty"


@pytest.mark.parametrize("name", ["bert", long_only("resnet")])
def test_metadata_uses_the_models_fake_mode(name: str) -> None:
    for captured in capture_graphs(SHALLOW[name], training=True):
        compiled = fxwrap.compile_graph(captured.graph_module, captured.example_inputs)
        module = compiled.graph_module
        generator = torch.Generator().manual_seed(0)
        inputs = [_random(fake, generator) for fake in captured.example_inputs]
        assert _check_metadata(module, inputs) > 50
        for node in module.graph.find_nodes(op="placeholder"):
            assert node.meta["val"].fake_mode is captured.example_inputs[0].fake_mode


def _random(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    content = torch.rand(fake.shape, generator=generator) + 0.1
    return tensor.copy_(content if fake.dtype.is_floating_point else (content > 0.6))


def test_symbols_are_those_of_the_input_graph() -> None:
    graph = make_fx(lambda x: x.reshape(-1) * 2, tracing_mode="symbolic")(torch.randn(5, 7))
    size = graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    module = fxwrap.compile_graph(graph).graph_module
    assert module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0].node.expr == size.node.expr
    product = module.graph.output_node().meta["val"][0].shape[0]
    assert product.node.shape_env is size.node.shape_env and not isinstance(product, int)


def test_nodes_carry_origins() -> None:
    graph = make_fx(lambda x: x.mm(x).sin() + 1, tracing_mode="fake")(torch.randn(3, 3))
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = f'  File "/models/mine.py", line {len(node.name)}, in forward\n    x'
    calls = fxwrap.to_fx(fxwrap.lower(graph, options=fxwrap.Options(fuse=False))).graph_module
    (called,) = calls.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert called.meta["fxwrap_origin"].operators == ("aten.sin",) and called.meta["fxwrap_origin"].nodes == ("sin",)
    fused = fxwrap.to_fx(fxwrap.lower(graph)).graph_module
    (launched,) = fused.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.cpp_kernel.default)
    assert launched.meta["fxwrap_origin"].nodes == ("sin", "add")
    assert launched.meta["fxwrap_origin"].operators == ("aten.sin", "aten.add.Tensor")
    assert launched.meta["stack_trace"].startswith('  File "/models/mine.py", line 3, in')


def test_comments_are_on_the_next_node() -> None:
    module = fxwrap.to_fx(SAMPLES["notes"].program()).graph_module
    comments = [comment for node in module.graph.nodes for comment in node.meta.get("fxwrap_comments", ())]
    assert comments == ['zero-size "tensors",\nand two lines of text', ""]


# --- kernels --------------------------------------------------------------------------------------------------------


def test_a_triton_kernel_carries_its_hash_through_a_retrace() -> None:
    sample = SAMPLES["triton_kernel"]
    program = sample.program()
    emitted = fxwrap.to_fx(program)
    retraced = make_fx(emitted.graph_module, tracing_mode="fake")(*sample.inputs(1))
    (launch,) = [node for node in retraced.graph.nodes if "kernel_idx" in node.kwargs]
    assert triton_kernel_at(launch.kwargs["kernel_idx"]).fxwrap_hash == program.kernels[0].hash
    assert emitted.graph_module.meta["fxwrap"]["kernels"] == {program.kernels[0].hash: program.kernels[0]}


def test_a_program_for_a_gpu_is_emitted_without_one() -> None:
    sample = SAMPLES["triton_kernel"]
    text = sample.full_text().replace("@cpu", "@cuda:0")
    module = fxwrap.to_fx(fxwrap.verify(fxwrap.parse(text))).graph_module
    module.graph.lint()
    (launch,) = [node for node in module.graph.nodes if "kernel_idx" in node.kwargs]
    kernel = triton_kernel_at(launch.kwargs["kernel_idx"])
    assert isinstance(kernel, triton.JITFunction)
    assert kernel.fxwrap_hash == sample.program().kernels[0].hash
    out = launch.kwargs["kwargs"]["out0"].meta["val"]
    assert out.device == torch.device("cuda:0") and out.fake_mode is not None


def test_equal_kernels_share_a_table_entry() -> None:
    first, second = (fxwrap.to_fx(SAMPLES["triton_kernel"].program()).graph_module for _ in range(2))
    launches = [[node for node in module.graph.nodes if "grid" in node.kwargs] for module in (first, second)]
    for ours, theirs in zip(*launches, strict=True):
        for key in ("kernel_idx", "constant_args_idx"):
            assert ours.kwargs[key] == theirs.kwargs[key]
    assert len(launches[0]) == 1


# --- expressions ----------------------------------------------------------------------------------------------------


@settings(max_examples=sample_size(80))
@given(any_expressions(), environments())
def test_expressions_become_nodes_that_compute_them(expression: Any, environment: dict[str, Any]) -> None:
    try:
        wanted = evaluate(expression, environment)
    except (ArithmeticError, ValueError, TypeError):
        return
    writer = GraphWriter(FakeValues())
    for name in environment:
        info = SymbolInfo(name)
        writer.placeholder(info, writer.fakes.symbol(info))
    try:
        writer.graph.output(writer.number(expression))
    except (ArithmeticError, ValueError):
        return
    module = GraphModule({}, writer.graph)
    try:
        result = module(*environment.values())
    except ArithmeticError:
        return  # both branches of a condition are computed, also the unused one
    assert result == pytest.approx(wanted, rel=1e-15, nan_ok=True)
    assert isinstance(result, float) == isinstance(wanted, float) or result == wanted


def test_an_expression_is_computed_once_per_graph() -> None:
    text = """
program @twice(%x: borrowed f32[s0, 4]@cpu) {
  s0 = symbol.size(%x) dim=0
  %a = memory.alloc() : f32[4*s0]@cpu
  %b = memory.alloc() : f32[4*s0]@cpu
  extern.mutate @aten.fill_.Scalar(%a, 1.0) writes=(%a)
  extern.mutate @aten.fill_.Scalar(%b, 2.0) writes=(%b)
  control.return(%a, %b)
}
"""
    module = fxwrap.to_fx(fxwrap.verify(fxwrap.parse(text))).graph_module
    assert len(module.graph.find_nodes(op="call_function", target=operator.mul)) == 1


# --- memory ---------------------------------------------------------------------------------------------------------


NESTED_EXTREMA = {"n0": "64*ceildiv(s0, 64)"} | {
    f"n{number}": f"max(n{number - 1} + 64*ceildiv({number}*s0, 64), 2*n{number - 1} - 256)" for number in range(1, 12)
}
"""Definitions of symbols by the one before, of which expansions double."""


def test_offsets_of_nested_extrema_stay_short() -> None:
    """Each offset is the end of one of two buffers before it: expanded, the last one has thousands of terms."""
    lets = [f"  {name} = symbol.let expr={expression}" for name, expression in NESTED_EXTREMA.items()]
    text = f"""
program @offsets(%x: borrowed f32[s0]@cpu) {{
  s0 = symbol.size(%x) dim=0
{chr(10).join(lets)}
  %pool = memory.pool() : u8[n11 + 4*s0]@cpu
  %a = memory.pool_slice(%pool) offset=n11 : f32[s0]@cpu
  extern.call @aten.sin.out(%x) outs=(%a)
  %b = extern.call @aten.cos.default(%a) : f32[s0]@cpu
  memory.free(%pool)
  control.return(%b)
}}
"""
    program = fxwrap.verify(fxwrap.parse(text))
    module = fxwrap.to_fx(program).graph_module
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.fxwrap.pool_slice.default)
    assert len(str(node.args[1].meta["val"])) < 1000
    x = torch.randn(5)
    torch.testing.assert_close(module(x), (x.sin().cos(),), rtol=0, atol=0)


def test_results_have_sizes_that_are_nested_extrema() -> None:
    inference = CallInference(SymbolInfo)
    inference.definitions = {name: parse_expr(text) for name, text in NESTED_EXTREMA.items()}
    size = make_symbol("n11")
    operand = Value("x", TensorType(torch.float32, (size,), (1,), torch.device("cpu")))
    (result,) = inference.results(torch.ops.aten.cos.default, (operand,), ())
    assert isinstance(result, InferredResult)
    assert isinstance(result.type, TensorType)
    numbers: dict[str, Any] = {"s0": 5}
    for name, expression in inference.definitions.items():
        numbers[name] = evaluate(expression, numbers)
    assert evaluate(result.type.sizes[0], numbers) == numbers["n11"]


def test_the_boxed_entry_drops_owned_inputs_at_their_last_use() -> None:
    text = """
program @frees(%a: owned f32[8]@cpu, %b: shared f32[8]@cpu, %unused: owned f32[8]@cpu) {
  memory.free(%unused)
  %x = extern.call @aten.sin.default(%a) : f32[8]@cpu
  memory.free(%a)
  %y = extern.call @aten.add.Tensor(%x, %b) : f32[8]@cpu
  memory.free(%x)
  memory.free(%b)
  %z = extern.call @aten.cos.default(%y) : f32[8]@cpu
  memory.free(%y)
  control.return(%z)
}
"""
    emitted = fxwrap.to_fx(fxwrap.verify(fxwrap.parse(text)))
    inputs = [torch.randn(8) for _ in range(3)]
    alive = {name: weakref.ref(tensor) for name, tensor in zip("abu", inputs)}
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("".join(name for name, tensor in alive.items() if tensor() is not None))
            return func(*args, **(kwargs or {}))

    emitted.boxed  # noqa: B018  built before it is watched
    with Watch(), torch.no_grad():
        emitted.boxed(inputs)
    assert seen == ["ab", "b", ""]


# --- plain graphs, vendors' lines, what has no form ----------------------------------------------------------------


PLAIN = ("operator_arguments", "many_results", "scatter_and_index_put", "cond_nested", "triton_kernel")
NOT_PLAIN = ("mlp", "cpp_kernel_with_two_outputs", "pool_and_workspace", "owned_inputs", "random_state")


@pytest.mark.parametrize("name", PLAIN)
def test_plain_graphs_contain_no_fxwrap_operators(name: str) -> None:
    sample = SAMPLES[name]
    emitted = fxwrap.to_fx(sample.program(), aten_only=True)
    modules = [module for module in emitted.graph_module.modules() if isinstance(module, GraphModule)]
    assert not any("fxwrap." in str(node.target) for module in modules for node in module.graph.nodes)
    assert_same(emitted(*sample.inputs(1)), fxwrap.run(sample.program(), sample.inputs(1)))


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_plain_graphs_reject_lines_without_an_aten_form(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"a plain graph has only ATen's"):
        fxwrap.to_fx(SAMPLES[name].program(), aten_only=True)


def test_a_registered_handler_emits_an_extension_line() -> None:
    sample = SAMPLES["extension"]

    def clone(converter: Any, line: AbacusCopy) -> None:
        converter.results(_AsCall(line), torch.ops.aten.clone.default, [converter.writer.argument(line.source)])

    emitted = fxwrap.to_fx(sample.program(), handlers={AbacusCopy: clone})
    assert "clone" in emitted.source and "copy_" not in emitted.source
    assert_same(emitted(*sample.inputs(1)), fxwrap.run(sample.program(), sample.inputs(1)))


class _AsCall:
    """A line of one result, for a handler."""

    def __init__(self, line: AbacusCopy) -> None:
        self.results = (line.result,)

    def alias_of(self, _result: Any) -> None:
        return None


# --- on_graph -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "fx"])
def test_on_graph_receives_every_graph_and_its_result_is_run(emitter: str) -> None:
    got: list[tuple[GraphModule, Any]] = []
    calls: list[str] = []

    def on_graph(module: GraphModule, info: Any) -> Any:
        got.append((module, info))

        def run(*inputs: Any) -> Any:
            calls.append(info.kind)
            return module(*inputs)

        return run

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    eager = copy.deepcopy(model)
    x = torch.randn(6, 4)
    compiled = torch.compile(model, backend="fxwrap", options={"emitter": emitter, "on_graph": on_graph})
    compiled(x).square().sum().backward()
    eager(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), eager.buffers()):
        torch.testing.assert_close(ours, theirs)
    assert calls == ["forward", "backward"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))
    assert calls == ["forward", "backward", "inference"]
    _check_infos({info.kind: (module, info) for module, info in got})


def _check_infos(got: dict[str, tuple[GraphModule, Any]]) -> None:
    for kind, (module, info) in got.items():
        assert isinstance(module, GraphModule) and info.device == torch.device("cpu") and info.name == kind
        shapes = [tuple(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")]
        # Only the batch is new in each call: everything else of forward and inference is a parameter or a buffer.
        if kind != "backward":
            assert {shape for position, shape in enumerate(shapes) if position not in info.static_inputs} == {(6, 4)}
            assert len(info.mutated_inputs) == 3  # the mean, the variance and the number of batches
            assert info.mutated_inputs <= info.static_inputs
            assert not info.donated_inputs
        else:
            assert info.donated_inputs and not info.mutated_inputs
            assert {shapes[position] for position in info.static_inputs} <= {(8,), (8, 4), (2, 8)}
            assert not info.static_inputs & info.donated_inputs


# --- the document ---------------------------------------------------------------------------------------------------


def test_the_document_names_every_line() -> None:
    text = (Path(__file__).parents[3] / "docs" / "fx_form.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+\.[a-z_]+)`", text, re.MULTILINE)
    assert sorted(rows) == sorted(line.opcode for line in CORE_LINES)
