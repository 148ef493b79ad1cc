"""AOTAutograd learns the same of a Dynamo graph, and traces the same graphs, if calls with known results do not run."""

from __future__ import annotations

import logging
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._guards import TracingContext, detect_fake_mode
from torch._logging._internal import trace_log
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.testing._internal.two_tensor import TwoTensor

from fxwrap import Options
from fxwrap.fx_passes import decomposition_table, find_known_results, partitioner
from fxwrap.torch_compat import aot_autograd, fake_like, storage_identity
from fxwrap.torch_compat.fake_tensors import is_written
from fxwrap.torch_compat.repeated_gradients import Occurrence
from tests.compile.traced_functions import (
    FUNCTIONS,
    Function,
    layers,
    modules_in_layers,
    namespaces,
    pure,
    views,
    write_by_operand,
    write_input,
    write_result,
)
from tests.support.long_form import LONG
from tests.support.models import MODELS, SHALLOW


class Normalised(nn.Module):
    """Layers whose functions write buffers that their schemas do not name."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)])
        self.frozen = nn.BatchNorm2d(4).eval()
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Images to features."""
        x = self.activation(self.convolution(x))
        for norm in self.norms:
            x = self.activation(norm(x)) + self.frozen(x)
        return x.mean((2, 3))


@dataclass(frozen=True)
class Trace:
    """What compilers receive of a compile: the metadata of AOTAutograd and the graphs, as texts."""

    metadata: list[Any]
    graphs: list[str]


@pytest.fixture(autouse=True)
def _fresh_compiles() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch.compiler.reset()


def _trace(function: Function, inputs: Sequence[Tensor], dynamic: bool, known_results: Callable[..., Any]) -> Trace:
    trace = Trace([], [])

    def record(graph_module: GraphModule, _inputs: Any) -> Any:
        trace.metadata.append(TracingContext.get().fw_metadata)
        trace.graphs.append(graph_text(graph_module))
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, inference_compiler=record, partition_fn=partitioner(Options()),
        decompositions=decomposition_table(Options()), keep_inference_input_mutations=True, known_results=known_results,
    )  # fmt: skip
    grad = torch.is_grad_enabled()
    try:
        result = torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    except Exception as error:  # noqa: BLE001 - a program that AOTAutograd refuses
        trace.graphs.append(str(error))
        return trace
    finally:
        torch.set_grad_enabled(grad)
    tensors = [item for item in torch.utils._pytree.tree_leaves(result) if isinstance(item, Tensor)]
    losses = [item.abs().float().sum() for item in tensors if item.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    return trace


def graph_text(graph_module: GraphModule) -> str:
    """The calls of a graph with targets, arguments, layouts and groups of results that share a storage.

    A node is named by a hash of its text, as its name counts dead nodes too. Symbolic numbers are expressions: whether
    one is computed once or twice does not matter.
    """
    groups: dict[int, str] = {}
    names: dict[Node, str] = {}

    def describe(value: object) -> str:
        if not isinstance(value, Tensor):
            items = value if isinstance(value, tuple | list) else ()
            return str(value) if not items else f"({', '.join(describe(item) for item in items)})"
        if value.layout is not torch.strided:
            return f"{value.layout} {tuple(value.shape)}"
        group = groups.get(storage_identity(value), "new")
        layout = f"{tuple(value.shape)} {value.stride()} {value.storage_offset()}"
        return f"{layout} {value.dtype} {value.device} {value.requires_grad} {value.is_conj()} in {group}"

    lines = []
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        is_symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        is_input = node.op == "placeholder"
        if is_symbolic and not is_input:
            names[node] = str(value)
            continue
        origin = [node.meta.get(name) for name in ("original_aten", "nn_module_stack", "stack_trace", "torch_fn")]
        arguments = map_arg((node.args, node.kwargs), lambda item: names[item])
        target = f"{len(lines)} {re.sub('[0-9]+$', '', str(node.target))}" if is_input else node.target
        text = f"{node.op} {target} {arguments} : {describe(value)} {origin} {node.meta.get('tensor_meta')}"
        text = re.sub("0x[0-9a-f]+|Gradient addition node due to multiple use of tensor around:", "", text)
        names[node] = str(value) if is_symbolic else f"%{zlib.crc32(text.encode()):x}"
        for leaf in torch.utils._pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                groups.setdefault(storage_identity(leaf), names[node])
        lines.append(f"{names[node]} = {text}")
    return "\n".join(lines)


def assert_same_traces(function: Function, inputs: Callable[[], list[Tensor]], dynamic: bool) -> None:
    """Fails unless AOTAutograd's metadata and graphs are those of a run of all calls.

    A backward may add gradients at other positions: the gradients of a repeated call leave it together.
    """
    trace = _trace(function, inputs(), dynamic, find_known_results)
    torch.compiler.reset()
    expected = _trace(function, inputs(), dynamic, lambda _graph, _mode: None)
    assert trace.graphs[:1] == expected.graphs[:1]
    assert [sorted(text.splitlines()) for text in trace.graphs] == [
        sorted(text.splitlines()) for text in expected.graphs
    ]
    assert trace.metadata == expected.metadata


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__.strip("_"))
def test_graphs_and_metadata_are_those_of_all_calls(function: Function, training: bool, dynamic: bool) -> None:
    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        return [x, w.requires_grad_(training)]

    assert_same_traces(function, inputs, dynamic)


class Constants(nn.Module):
    """Returns views of tensors that are neither parameters nor buffers, and of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = [torch.arange(6.0).view(2, 3)]
        self.register_buffer("table", torch.arange(4.0).view(2, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Adds constants."""
        constant = torch.tensor([[1.0, 2.0]])
        return self.table.t(), self.tensors[0][0], constant.t(), constant + x, constant.expand(2, 2).t()


def test_views_of_attributes_and_constants_are_traced_as_before() -> None:
    assert_same_traces(Constants(), lambda: [torch.randn(2, 2)], dynamic=False)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_statistics_that_schemas_do_not_name_are_written(training: bool) -> None:
    torch.manual_seed(0)
    model = Normalised().train(training)
    model.frozen.eval()

    def inputs() -> list[Tensor]:
        return [torch.randn(2, 3, 8, 8)]

    assert_same_traces(model, inputs, dynamic=False)


@pytest.mark.parametrize(
    "function", [pure, views, write_result, write_input], ids=lambda item: item.__name__.strip("_")
)
def test_subclasses_are_traced_as_before(function: Function) -> None:
    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        return [TwoTensor(torch.randn(4, 4), torch.randn(4, 4)), torch.randn(4, 4)]  # type: ignore[no-untyped-call]

    assert_same_traces(function, inputs, dynamic=False)


@pytest.mark.parametrize(("name", "dynamic", "training"), [
    ("gpt2", True, False), ("gpt2", False, True), ("resnet", False, True),
])  # fmt: skip
def test_models_are_traced_as_before(name: str, dynamic: bool, training: bool) -> None:
    case = (MODELS if LONG else SHALLOW)[name]
    model = case.build(seed=0, dropout=training).train(training)
    names = list(case.inputs(seed=1, training=training))

    def function(*items: Tensor) -> object:
        return model(**dict(zip(names, items, strict=True)))

    with torch.set_grad_enabled(training):
        assert_same_traces(function, lambda: list(case.inputs(seed=1, training=training).values()), dynamic)


def _executed_calls(function: Function, *inputs: Tensor) -> list[str]:
    """Names of the calls of a function's Dynamo graph that run for its metadata."""
    executed: list[str] = []

    def backend(graph_module: GraphModule, examples: Sequence[Any]) -> Any:
        mode = detect_fake_mode(
            [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        )
        results = find_known_results(graph_module.graph, mode)
        assert results is not None
        executed.extend(node.name for node in graph_module.graph.nodes if node in results.executed)
        return graph_module.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return [name for name in executed if not re.match("l_|output", name)]


@pytest.mark.parametrize(("function", "calls"), [
    (pure, []), (views, ["t", "getitem", "reshape", "t_1", "getitem_1"]),
    (write_by_operand, ["z", "copy_"]), (namespaces, []),
])  # fmt: skip
def test_only_views_and_writes_of_inputs_and_results_run(function: Function, calls: list[str]) -> None:
    assert _executed_calls(function, torch.randn(4, 4), torch.randn(4, 4)) == calls


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", [layers, modules_in_layers], ids=lambda item: item.__name__)
def test_repeated_calls_run_once(
    function: Function, training: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    call_function = Interpreter.call_function

    def counted(self: Interpreter, target: Any, arguments: Any, keywords: Any) -> Any:
        counts[target.__name__] += 1
        return call_function(self, target, arguments, keywords)

    monkeypatch.setattr(Interpreter, "call_function", counted)
    x, w = torch.randn(4, 4).requires_grad_(training), torch.randn(4, 4).requires_grad_(training)
    trace = _trace(function, [x, w], dynamic, find_known_results)
    assert trace.graphs[0].count("aten.native_layer_norm.default") >= 3
    assert counts["layer_norm"] == 1
    assert counts["einsum"] == counts["softmax"] == (function is layers)


def test_repeated_backwards_are_traced_once_for_each_layout_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("gradients", "_record_gradients"):
        method = getattr(Occurrence, name)

        def counted(self: Occurrence, *arguments: Any, name: str = name, method: Any = method) -> Any:
            calls.append(name)
            return method(self, *arguments)

        monkeypatch.setattr(Occurrence, name, counted)

    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.tanh(torch.nn.functional.linear(x, w))
        return x.sum()

    trace = _trace(function, [torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)], False, find_known_results)
    assert trace.graphs[1].count("aten.mm.default") == 15
    # Of eight pairs of calls: the first linear has an input without a gradient, the sum's gradient is expanded.
    assert Counter(calls) == {"gradients": 17, "_record_gradients": 5}


def test_fake_tensors_are_copied_without_arithmetic_on_their_sizes() -> None:
    graph = make_fx(lambda x: torch.relu(x).t(), tracing_mode="symbolic")(torch.randn(5, 7))
    source, view = [node.meta["val"] for node in graph.graph.nodes if node.op == "call_function"]
    expected = [(item.shape, item.stride(), item.dtype, item.device) for item in (source, view)]
    calls: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(("sym_node.py", "symbolic_shapes.py")):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        copy = fake_like(source)
        copied_view = fake_like(view, copy.untyped_storage())
    finally:
        sys.setprofile(None)
    assert not {"binary_magic_impl", "guard_bool", "evaluate_expr"} & {*calls}
    assert [(item.shape, item.stride(), item.dtype, item.device) for item in (copy, copied_view)] == expected
    assert storage_identity(copied_view) == storage_identity(copy) != storage_identity(source)
    assert copy.untyped_storage().nbytes() == source.untyped_storage().nbytes()
    assert not is_written(copy)


def test_known_results_are_looked_for_once() -> None:
    graphs: list[object] = []

    def observed(graph: Any, mode: Any) -> Any:
        graphs.append(graph)
        return find_known_results(graph, mode)

    _trace(pure, [torch.randn(4, 4), torch.randn(4, 4)], False, observed)
    assert len(graphs) == 1


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_graphs_are_printed_for_a_structured_trace_alone(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[int] = []
    print_readable = GraphModule.print_readable

    def counted(self: GraphModule, *arguments: Any, **keywords: Any) -> str:
        printed.append(1)
        return print_readable(self, *arguments, **keywords)

    monkeypatch.setattr(GraphModule, "print_readable", counted)
    inputs = [torch.randn(4, 4), torch.randn(4, 4, requires_grad=training)]
    _trace(pure, inputs, False, find_known_results)
    assert not printed
    torch.compiler.reset()
    names: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: names.extend(record.metadata)  # type: ignore[method-assign, attr-defined]
    trace_log.addHandler(handler)
    try:
        _trace(pure, inputs, False, find_known_results)
    finally:
        trace_log.removeHandler(handler)
    graphs = {"aot_joint_graph", "aot_forward_graph", "aot_backward_graph"} if training else {"aot_inference_graph"}
    assert graphs <= {*names}
    assert printed
