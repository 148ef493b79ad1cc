"""AOTAutograd learns the same of a Dynamo graph, and traces the same graphs, if calls with known results do not run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._guards import TracingContext, detect_fake_mode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from fxwrap import Options
from fxwrap.fx_passes import decomposition_table, find_known_results, partitioner
from fxwrap.torch_compat import aot_autograd, storage_identity
from tests.support.long_form import LONG
from tests.support.models import MODELS, SHALLOW

Function = Callable[..., object]


@torch.library.custom_op("known_results::scale", mutates_args=())
def _scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


@_scale.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("known_results::double_", mutates_args=("x",))
def _double_(x: Tensor) -> None:
    x.mul_(2)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone() ** 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class _SameMemory(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def _pure(x: Tensor, w: Tensor) -> Tensor:
    return functional.layer_norm(functional.gelu(x @ w).softmax(-1) + x, (x.shape[-1],))


def _views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = (x @ w).relu()
    return y, y.t(), y[1:], y.reshape(-1), x.t(), w[0], y.t().contiguous()


def _view_without_base(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).t()[1]


def _several_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x @ w).split(2), (x * 2).unbind(0)  # type: ignore[return-value]


def _duplicates(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return y, y, x, y.detach(), w, x.view_as(x)


def _write_input(x: Tensor, w: Tensor) -> Tensor:
    y = x.sin()
    x.mul_(2)
    x[1] = 3
    return y @ w + x


def _write_input_by_result(x: Tensor, w: Tensor) -> Tensor:
    x.copy_(w @ w)
    return x.exp()


def _write_view_of_input(x: Tensor, w: Tensor) -> Tensor:
    x.t()[0].add_(w[0].detach())
    return x @ w


def _write_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        x.add_(1)
    x.detach().mul_(2)
    return x @ w


def _write_result(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    z = y[0]
    y.add_(1)
    functional.relu(y, inplace=True)
    z.mul_(3)
    return y.exp(), z


def _write_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    torch.mul(x, 3, out=y)
    z = torch.zeros(3)
    z += x.detach().sum()
    return y, z


def _write_by_operand(x: Tensor, w: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z.copy_(x @ w)
    return z


def _transposed_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.t_()
    y.unsqueeze_(0)
    return y * 2


def _metadata_of_input(x: Tensor, w: Tensor) -> Tensor:
    x.transpose_(0, 1)
    return x @ w


def _modes(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = x @ w
    with torch.no_grad():
        u = x @ w
    return y, z + y, u


def _ends_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    torch.set_grad_enabled(False)
    return y * 2


def _needs_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.ones(3, requires_grad=False)
    return y + 1, (x @ w).detach() * 2


def _random(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return functional.dropout(x @ w, 0.5), torch.rand_like(x) * torch.randn(3)


def _sizes(x: Tensor, w: Tensor) -> tuple[Tensor, int]:
    rows = x.shape[0]
    y = x.new_zeros(rows * 2, rows + 1)
    return y.view(rows, -1).sum() + (x @ w), rows * 3


def _data(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    positive = x[x > 0]
    return positive * 2, (x @ w).nonzero()


def _item(x: Tensor, w: Tensor) -> Tensor:
    return x @ w * w.abs().sum().long().item()


def _constants(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.tensor([2.0, 3.0]).sum()
    return x @ w * scale + torch.arange(x.shape[-1])


def _without_inputs(_x: Tensor, _w: Tensor) -> tuple[Tensor, ...]:
    return torch.ones(3) * 2, torch.arange(4).float().sin(), torch.ones(3) * 2


def _complex(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    z = torch.complex(x, w)
    return z.conj(), z.real, z.abs(), torch.view_as_real(z), z.conj().imag


def _sparse(x: Tensor, w: Tensor) -> Tensor:
    return torch.sparse.mm(x.detach().to_sparse(), w)


def _tuples(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    values, indices = (x @ w).topk(2)
    return values, indices, *torch.max(x, 0), x.sort().values.t()


def _custom(x: Tensor, w: Tensor) -> Tensor:
    y = torch.ops.known_results.scale(x @ w, 2.0)
    torch.ops.known_results.double_(y)
    return y.sin()


def _autograd_function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return _Cube.apply(x @ w), _SameMemory.apply(x)  # type: ignore[no-untyped-call]


def _checkpointed(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(_pure, x, w, use_reentrant=False)  # type: ignore[return-value]


def _conditional(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a, b: a @ b, lambda a, b: a + b, (x * 2, w))


def _attention(x: Tensor, w: Tensor) -> Tensor:
    query = (x @ w).expand(1, 1, -1, -1)
    y = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    return y + flex_attention(query, query, query)  # type: ignore[operator]


def _transforms(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    gradient = torch.func.grad(lambda a: (a @ w).sin().sum())(x)
    return torch.vmap(lambda a: a @ w + a.exp())(x), gradient.t()


def _checked(x: Tensor, w: Tensor) -> Tensor:
    torch._check(x.shape[0] > 1)
    torch._assert_async((x.exp() > 0).all())
    return x @ w


def _embedding(x: Tensor, w: Tensor) -> Tensor:
    return functional.embedding(torch.tensor([0, 1]), w.detach(), max_norm=0.5) + x[:2]


def _foreach(x: Tensor, w: Tensor) -> Tensor:
    parts = [x.detach(), (x @ w).detach()]
    torch._foreach_add_(parts, 1)
    torch._foreach_mul_(parts, [w.detach(), w.detach()])
    return parts[1].exp()


def _data_attribute(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.data.add_(1)
    return y * 2


def _layers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    results = []
    for _ in range(3):
        query, key = (x @ w).unflatten(-1, (2, -1)).transpose(0, 1).chunk(2, -1)
        scores = torch.softmax(torch.einsum("hnk,hmk->hnm", query, key), -1)
        rotated = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
        x = functional.layer_norm(x + rotated * scores.mean((0, -1), keepdim=True)[0], (x.shape[-1],))
        results += [x.view(-1)[: x.shape[0]], functional.dropout(scores, 0.0)]
    return *results, x


def _layers_in_autocast(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.linear(x, w) + y
    with torch.autocast("cpu", torch.float16):
        y = functional.linear(x, w) + y
    return functional.linear(x, w) + y


def _operands_of_one_storage(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y, z = x @ w, x @ w
    pairs = [(y, z), (y, y.view_as(y)), (y.view_as(y), y), (z, z), (y[:2], y[2:]), (y[:2], z[2:])]
    return (
        *[torch.add(*pair) for pair in pairs],
        *torch.broadcast_tensors(y, y.view_as(y)),
        *torch.broadcast_tensors(y, z),
    )


def _numbers(x: Tensor, w: Tensor) -> Tensor:
    for factor in (1, True, 1.0, -0.0, 0.0, 1, 1.0):
        x = torch.add(x, w, alpha=factor) * factor
    return x.sum(0, False) + x.sum(0, 1)


def _repeated_writes(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(2):
        y = x @ w
        z = functional.relu(y.t(), inplace=True)
        x.add_(1)
        x = x + functional.embedding(torch.tensor([0, 1, 2, 3]), y)
    return x, z


def _repeated_tuples(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        values, indices = (x @ w).topk(2)
        deviation, mean = torch.std_mean(x, -1, keepdim=True)
        x = x * values.sum() + indices.sum() + deviation - mean + torch.var(x) + x.max(0).values
    return x


FUNCTIONS: tuple[Function, ...] = (
    _pure, _views, _view_without_base, _several_views, _duplicates, _write_input, _write_input_by_result,
    _write_view_of_input, _write_without_gradients, _write_result, _write_returned, _write_by_operand,
    _transposed_in_place, _metadata_of_input, _modes, _ends_without_gradients, _needs_gradients, _random, _sizes, _data,
    _item, _constants, _complex, _sparse, _tuples, _custom, _autograd_function, _checkpointed, _conditional, _attention,
    _transforms, _checked, _embedding, _foreach, _data_attribute, _layers, _layers_in_autocast,
    _operands_of_one_storage, _without_inputs, _numbers, _repeated_writes, _repeated_tuples,
)  # fmt: skip


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

    Nodes are numbered, as their names count dead ones too. Symbolic numbers are expressions: whether one is computed
    once or twice does not matter.
    """
    groups: dict[int, int] = {}
    numbers: dict[Node, str] = {}

    def describe(value: object) -> str:
        if not isinstance(value, Tensor):
            items = value if isinstance(value, tuple | list) else ()
            return str(value) if not items else f"({', '.join(map(describe, items))})"
        if value.layout is not torch.strided:
            return f"{value.layout} {tuple(value.shape)}"
        group = groups.setdefault(storage_identity(value), len(groups))
        layout = f"{tuple(value.shape)} {value.stride()} {value.storage_offset()}"
        return f"{layout} {value.dtype} {value.device} {value.requires_grad} {value.is_conj()} in {group}"

    lines = []
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        is_symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        numbers[node] = str(value) if is_symbolic else f"%{len(lines)}"
        if is_symbolic and node.op != "placeholder":
            continue
        origin = [node.meta.get(name) for name in ("original_aten", "nn_module_stack", "stack_trace", "torch_fn")]
        arguments = map_arg((node.args, node.kwargs), lambda item: numbers[item])
        text = f"{node.op} {node.target} {arguments} : {describe(value)} {origin} {node.meta.get('tensor_meta')}"
        lines.append(re.sub("0x[0-9a-f]+", "", text))
    return "\n".join(lines)


def assert_same_traces(function: Function, inputs: Callable[[], list[Tensor]], dynamic: bool) -> None:
    """Fails unless AOTAutograd's metadata and graphs are those of a run of all calls."""
    trace = _trace(function, inputs(), dynamic, find_known_results)
    torch.compiler.reset()
    expected = _trace(function, inputs(), dynamic, lambda _graph, _mode: None)
    assert trace.graphs == expected.graphs
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
    "function", [_pure, _views, _write_result, _write_input], ids=lambda item: item.__name__.strip("_")
)
def test_subclasses_are_traced_as_before(function: Function) -> None:
    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        return [TwoTensor(torch.randn(4, 4), torch.randn(4, 4)), torch.randn(4, 4)]  # type: ignore[no-untyped-call]

    assert_same_traces(function, inputs, dynamic=False)


@pytest.mark.parametrize(("name", "dynamic", "training"), [("gpt2", True, False), ("resnet", False, True)])
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
    (_pure, []), (_views, ["t", "getitem", "reshape", "t_1", "getitem_1"]),
    (_write_by_operand, ["z", "copy_"]),
])  # fmt: skip
def test_only_views_and_writes_of_inputs_and_results_run(function: Function, calls: list[str]) -> None:
    assert _executed_calls(function, torch.randn(4, 4), torch.randn(4, 4)) == calls


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_repeated_calls_run_once(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    call_function = Interpreter.call_function

    def counted(self: Interpreter, target: Any, arguments: Any, keywords: Any) -> Any:
        counts[target.__name__] += 1
        return call_function(self, target, arguments, keywords)

    monkeypatch.setattr(Interpreter, "call_function", counted)
    trace = _trace(_layers, [torch.randn(4, 4), torch.randn(4, 4)], dynamic, find_known_results)
    assert trace.graphs[0].count("aten.native_layer_norm.default") >= 3
    assert counts["layer_norm"] == counts["einsum"] == counts["softmax"] == 1
