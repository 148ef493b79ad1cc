"""Composite operators of plain graphs fuse as those of graphs traced after dispatch, in each emitter, beside eager."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.compile import Compiled
from fxwrap.lines import ExternCall, Launch
from fxwrap.lowering import RULES
from fxwrap.torch_compat import FakeTensorMode, has_device_kernel, is_composite, operator_overload

aten = torch.ops.aten

UNCACHED = Options(compile_cache=False, fallback="error")

Function = Callable[..., Any]
rand = torch.randn


def heads() -> tuple[Tensor, ...]:
    return rand(2, 2, 8, 16), rand(2, 2, 8, 16), rand(2, 2, 8, 16)


def norm_operands() -> tuple[Tensor, ...]:
    return rand(2, 4, 5, 5), rand(4), rand(4).abs() + 0.1, rand(4), rand(4)


CASES: dict[str, tuple[Function, Callable[[], tuple[Tensor, ...]]]] = {
    "linear": (lambda x, w, b: functional.linear(x, w, b).relu(), lambda: (rand(2, 4, 8), rand(6, 8), rand(6))),
    "to": (lambda x: x.to(torch.float64).sin(), lambda: (rand(3, 4),)),
    "to of the same dtype": (lambda x: x.to(torch.float32), lambda: (rand(3, 4),)),
    "write through to": (lambda x: (x.to(torch.float32).add_(1), x * 2), lambda: (rand(3, 4),)),
    "write through contiguous": (lambda x: (x.contiguous().mul_(2), x + 1), lambda: (rand(3, 4),)),
    "write beside contiguous": (lambda x: (x.t().contiguous().mul_(2), x + 1), lambda: (rand(3, 4),)),
    "rms_norm": (lambda x, w: functional.rms_norm(x, [8], w), lambda: (rand(4, 8), rand(8))),
    "layer_norm": (lambda x, w: functional.layer_norm(x, [8], w).tanh(), lambda: (rand(4, 8), rand(8))),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), lambda: (rand(2, 4, 5, 5), rand(4), rand(4))),
    "batch_norm": (lambda x, *p: functional.batch_norm(x, *p), norm_operands),
    "batch_norm, statistics": (lambda x, *p: functional.batch_norm(x, *p, training=True), norm_operands),
    "instance_norm": (
        lambda x, m, v: functional.instance_norm(x, m, v, use_input_stats=True, momentum=0.3),
        lambda: (rand(3, 4, 5), rand(4), rand(4).abs()),
    ),
    "flatten": (lambda x: x.flatten(1).cos(), lambda: (rand(2, 3, 4),)),
    "matmul": (lambda x, y: (x @ y).exp(), lambda: (rand(2, 3, 4), rand(4, 5))),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y).relu(), lambda: (rand(2, 3, 4), rand(2, 4, 5))),
    "attention": (lambda *qkv: functional.scaled_dot_product_attention(*qkv, is_causal=True), heads),
    "masked attention": (functional.scaled_dot_product_attention, lambda: (*heads(), rand(8, 8) > 0)),
    "softmax": (lambda x: x.softmax(-1).log_softmax(0), lambda: (rand(3, 8),)),
    "cross_entropy": (lambda x, t: functional.cross_entropy(x, t), lambda: (rand(4, 8), torch.randint(8, (4,)))),
    "conv2d": (lambda x, w: functional.conv2d(x, w, padding=1).relu(), lambda: (rand(2, 3, 8, 8), rand(4, 3, 3, 3))),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 2), lambda: (rand(2, 3, 8, 8),)),
    "dropout": (lambda x: functional.dropout(x, 0.5) * 2, lambda: (rand(64, 64),)),
    "dropout_": (lambda x: functional.dropout(x * 2, 0.5, inplace=True), lambda: (rand(64, 64),)),
    "feature_dropout": (lambda x: functional.dropout2d(x, 0.5), lambda: (rand(4, 4, 4, 4),)),
    "multiply_": (lambda x: x.multiply_(2) + 1, lambda: (rand(3, 4),)),
    "std_mean": (lambda x: torch.std_mean(x, 1), lambda: (rand(3, 8),)),
    "tensor_split": (lambda x: [part * 2 for part in torch.tensor_split(x, 3, 1)], lambda: (rand(3, 8),)),
    "broadcast_tensors": (lambda x, y: torch.broadcast_tensors(x, y), lambda: (rand(3, 1), rand(1, 4))),
    "vstack": (lambda x, y: torch.vstack([x, y]) * 2, lambda: (rand(3, 4), rand(1, 4))),
    "cosine_similarity": (lambda x, y: functional.cosine_similarity(x, y), lambda: (rand(3, 4), rand(3, 4))),
    "kron": (torch.kron, lambda: (rand(2, 2), rand(3, 3))),
    "one operand twice": (lambda x, y: functional.linear(x, x) + functional.linear(x, y), lambda: (rand(4, 4),) * 2),
    "quantile": (lambda x: torch.quantile(x, 0.3, dim=1), lambda: (rand(3, 8),)),
    "nanquantile": (lambda x, q: torch.nanquantile(x, q, dim=1), lambda: (rand(3, 8), torch.tensor([0.2, 0.7]))),
    "gru": (
        lambda x, h, *weights: torch.gru(x, h, list(weights), True, 1, 0.0, False, False, True),
        lambda: (rand(2, 5, 4), rand(1, 2, 3), rand(9, 4), rand(9, 3), rand(9), rand(9)),
    ),
    "lstm": (
        lambda x, h, c, *weights: torch.lstm(x, [h, c], list(weights), True, 1, 0.0, False, False, True),
        lambda: (rand(2, 5, 4), rand(1, 2, 3), rand(1, 2, 3), rand(12, 4), rand(12, 3), rand(12), rand(12)),
    ),
    "rnn_tanh": (
        lambda x, h, *weights: torch.rnn_tanh(x, h, list(weights), True, 1, 0.0, False, False, True),
        lambda: (rand(2, 5, 4), rand(1, 2, 3), rand(3, 4), rand(3, 3), rand(3), rand(3)),
    ),
    "stft": (lambda x: torch.stft(x, 8, window=torch.ones(8), return_complex=True).abs(), lambda: (rand(2, 32),)),
    "reflect padding": (lambda x: functional.pad(x, (1, 2), "reflect") * 2, lambda: (rand(2, 3, 8),)),
    "replicate padding": (lambda x: functional.pad(x, (1, 2), "replicate") * 2, lambda: (rand(2, 3, 8),)),
    "circular padding": (lambda x: functional.pad(x, (1, 2), "circular") * 2, lambda: (rand(2, 3, 8),)),
    "linear of a vector": (lambda x, w: functional.linear(x, w).relu(), lambda: (rand(8), rand(6, 8))),
    "imag": (lambda x: x.imag * 2, lambda: (torch.randn(3, 4, dtype=torch.complex64),)),
}  # fmt: skip
"""Functions of composite operators, and their inputs."""

STAYS = {
    "gru of many steps": (
        lambda x, h, *weights: torch.gru(x, h, list(weights), True, 1, 0.0, False, False, True),
        lambda: (rand(1, 99, 1), rand(1, 1, 1), rand(3, 1), rand(3, 1), rand(3), rand(3)),
        "aten.gru.input",
    ),
    "nonzero_numpy": (lambda x: aten.nonzero_numpy(x), lambda: (rand(3, 4) > 0,), "aten.nonzero_numpy.default"),
}
"""Functions whose operator stays a call: its decomposition is long, or reads elements."""


class Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def before_dispatch(function: Function, inputs: Sequence[Tensor]) -> GraphModule:
    return make_fx(function, pre_dispatch=True)(*clones(inputs))


def by_hand(function: Function, inputs: Sequence[Tensor]) -> GraphModule:
    """A graph without metadata."""
    traced = before_dispatch(function, inputs)
    for node in traced.graph.nodes:
        node.meta = {}
    return traced


def exported_module(function: Function, inputs: Sequence[Tensor]) -> GraphModule:
    return torch.export.export(Module(function), tuple(clones(inputs))).module()


SOURCES = (before_dispatch, by_hand, exported_module)


def _case_id(item: object) -> str:
    return item if isinstance(item, str) else getattr(item, "__name__", "")


def clones(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [item.clone() for item in inputs]


def calls_of(compiled: Compiled) -> list[str]:
    return sorted([line.target for line in compiled.program.lines() if isinstance(line, ExternCall)])


def check(compiled: Compiled, function: Function, inputs: Sequence[Tensor]) -> None:
    """Compares results, their strides, and the inputs after the call with eager's, with the same random numbers."""
    own, eagers = clones(inputs), clones(inputs)
    torch.manual_seed(1)
    wanted = function(*eagers)
    torch.manual_seed(1)
    results = compiled(*own)
    for actual, expected in zip([*tree_leaves(results), *own], [*tree_leaves(wanted), *eagers], strict=True):
        tolerance = 1e-5 if expected.is_floating_point() or expected.is_complex() else 0
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        assert actual.stride() == expected.stride()


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("name", "source"), [*product(CASES, SOURCES)], ids=_case_id)
def test_composites_fuse_as_after_dispatch(name: str, source: Callable[..., GraphModule]) -> None:
    function, draw = CASES[name]
    torch.manual_seed(0)
    inputs = draw()
    dispatched = fxwrap.compile_graph(make_fx(function)(*clones(inputs)), clones(inputs), options=UNCACHED)
    graph = source(function, inputs)
    text = str(graph.graph)
    for emitter in COMPARED_EMITTERS:
        if emitter == "cpp":
            continue
        compiled = fxwrap.compile_graph(graph, clones(inputs), options=UNCACHED.replace(emitter=emitter))
        assert calls_of(compiled) == calls_of(dispatched)
        check(compiled, function, inputs)
    assert str(graph.graph) == text


@pytest.mark.parametrize("name", STAYS)
def test_a_composite_stays_a_call_where_its_decomposition_needs_more_than_fake_operands(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    function, draw, operator = STAYS[name]
    inputs = draw()
    with caplog.at_level(logging.DEBUG, "fxwrap.compile"):
        compiled = fxwrap.compile_graph(before_dispatch(function, inputs), inputs, options=UNCACHED)
    assert calls_of(compiled) == [operator]
    assert [item for item in caplog.messages if "stays a call, since its decomposition" in item]
    check(compiled, function, inputs)


def test_nodes_keep_their_names_and_places() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, w).sin()

    inputs = rand(2, 3, 4), rand(5, 4)
    graph = before_dispatch(function, inputs)
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = f'  File "model.py", line 7, in forward\n    return self.{node.name}(x)'
    compiled = fxwrap.compile_graph(graph, inputs, options=UNCACHED.replace(fuse=False))
    mm, sin = [line for line in compiled.program.lines() if isinstance(line, ExternCall)]
    assert sin.results[0].name == "sin"
    (source,) = mm.origin.sources
    assert (source.operator, source.original_operator) == ("aten.mm", "aten.linear")
    assert (source.file, source.line) == ("model.py", 7) and "self.linear(x)" in source.stack_trace


def test_the_call_whose_first_result_is_that_of_a_node_has_its_name() -> None:
    def function(x: Tensor, *qkv: Tensor) -> tuple[Tensor, Tensor]:
        return functional.layer_norm(x, [8]), functional.scaled_dot_product_attention(*qkv)

    inputs = rand(4, 8), *heads()
    options = UNCACHED.replace(fuse=False)
    program = fxwrap.compile_graph(before_dispatch(function, inputs), inputs, options=options).program
    norm, attention = [line for line in program.lines() if isinstance(line, ExternCall)]
    assert (norm.target, norm.results[0].name) == ("aten.native_layer_norm.default", "layer_norm_0")
    assert attention.target == "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert attention.results[0].name == "scaled_dot_product_attention_0"


def test_preserved_operators_and_those_with_a_users_lowering_stay() -> None:
    inputs = rand(3, 4), rand(5, 4)
    graph = before_dispatch(lambda x, w: functional.linear(x, w).to(torch.float64), inputs)
    preserved = UNCACHED.replace(preserve_ops=frozenset({"aten.linear.default"}))
    assert calls_of(fxwrap.compile_graph(graph, inputs, options=preserved)) == ["aten.linear.default"]

    def lower_cast(builder: Any, node: Any) -> None:
        builder.env[node] = builder.env[node.args[0]]

    own = UNCACHED.replace(lowerings={"aten.to.dtype": lower_cast})
    (result,) = tree_leaves(fxwrap.run(fxwrap.lower(graph, inputs, options=own), inputs))
    assert result.dtype is torch.float32


def test_a_table_of_the_user_applies_inside_composites() -> None:
    table = {aten.addmm.default: lambda bias, x, w: torch.mm(x, w) + bias + 1}
    inputs = rand(3, 4), rand(5, 4), rand(5)
    graph = before_dispatch(functional.linear, inputs)
    compiled = fxwrap.compile_graph(graph, inputs, options=UNCACHED.replace(decompositions=table))
    torch.testing.assert_close(tree_leaves(compiled(*inputs))[0], functional.linear(*inputs) + 1)


def test_composite_operators_of_libraries_are_decomposed() -> None:
    library = torch.library.Library("composites_test", "DEF")
    library.define("gate(Tensor x, Tensor y) -> Tensor")
    library.impl("gate", lambda x, y: functional.silu(x) * y, "CompositeImplicitAutograd")
    inputs = rand(3, 4), rand(3, 4)
    graph = Graph()
    operands = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.ops.composites_test.gate.default, operands),))
    compiled = fxwrap.compile_graph(GraphModule({}, graph), inputs, options=UNCACHED)
    assert calls_of(compiled) == []
    check(compiled, lambda x, y: functional.silu(x) * y, inputs)
    library._destroy()


def test_composites_of_nested_graphs_are_decomposed() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        branches = (
            lambda x, w: functional.rms_norm(functional.linear(x, w), [4]),
            lambda x, w: x.to(torch.float64).float(),
        )
        return torch.cond(x.sum() > 0, *branches, (x, w))

    for sign in (1, -1):
        inputs = rand(3, 4).abs() * sign, rand(4, 4)
        compiled = fxwrap.compile_graph(exported_module(function, inputs), inputs, options=UNCACHED)
        assert set(calls_of(compiled)) <= {"aten.mm.default"}
        check(compiled, function, inputs)


def test_composites_of_symbolic_sizes_are_decomposed() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            rows = functional.layer_norm(functional.linear(x, w), [6]).flatten(0, 1)
            return rows.to(torch.float64) * x.shape[0]

    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(Layer(), (rand(3, 4, 5), rand(6, 5)), dynamic_shapes=({0: batch}, None))
    compiled = fxwrap.compile_graph(exported.module(), options=UNCACHED)
    assert calls_of(compiled) == ["aten.mm.default"]
    for rows in (2, 7, 64):
        check(compiled, Layer(), (rand(rows, 4, 5), rand(6, 5)))


def test_decomposed_indices_of_symbolic_sizes_are_broadcast() -> None:
    """The size of a dimension that is not scaled is the input's in the graph, and trunc(1.0 * size) in the trace."""

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.interpolate(x, scale_factor=(1.0, 2.0), mode="bilinear")

    rows = ({2: torch.export.Dim("rows", min=2)},)
    exported = torch.export.export(Doubled(), (rand(1, 2, 6, 6),), dynamic_shapes=rows)
    compiled = fxwrap.compile_graph(exported, options=UNCACHED)
    for size in (2, 6, 13):
        check(compiled, Doubled(), (rand(1, 2, size, 6),))


def test_masks_of_plain_graphs_become_causal() -> None:
    def function(w: Tensor, *heads: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(*heads, mask).transpose(1, 2).reshape(2, 8, 32) @ w

    inputs = (rand(32, 32), *heads())
    compiled = fxwrap.compile_graph(before_dispatch(function, inputs), inputs, options=UNCACHED)
    call, _ = [line for line in compiled.program.lines() if isinstance(line, ExternCall)]
    assert call.target == "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert "attn_mask" not in dict(call.keywords) and call.arguments[3:] == (0.0, True)
    check(compiled, function, inputs)


def test_a_mask_that_is_written_stays() -> None:
    def function(w: Tensor, *heads: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool)
        mask.view(64)[1:3].fill_(False)
        return functional.scaled_dot_product_attention(*heads, mask).transpose(1, 2).reshape(2, 8, 32) @ w

    inputs = (rand(32, 32), *heads())
    check(fxwrap.compile_graph(before_dispatch(function, inputs), inputs, options=UNCACHED), function, inputs)


def test_attention_on_a_device_that_is_not_here_stays_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with FakeTensorMode():
        inputs = [torch.empty(2, 2, 64, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
    graph = Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    graph.output((graph.call_function(aten.scaled_dot_product_attention.default, tuple(operands)),))
    program = fxwrap.lower(GraphModule({}, graph), inputs, options=UNCACHED)
    calls = [line.target for line in program.lines() if isinstance(line, ExternCall)]
    assert calls == ["aten.scaled_dot_product_attention.default"]


def test_nothing_is_traced_without_composites_and_equal_calls_once() -> None:
    inputs = rand(3, 4), rand(4, 4)

    def layers(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(5):
            x = functional.linear(x, w).sin()
        return x

    with mock.patch("fxwrap.fx_passes.decompose.make_fx", wraps=make_fx) as trace:
        fxwrap.compile_graph(make_fx(layers)(*inputs), inputs, options=UNCACHED)
        assert trace.call_count == 0
        graph = before_dispatch(layers, inputs)
        compiled = fxwrap.compile_graph(copy.deepcopy(graph), inputs, options=UNCACHED)
    assert trace.call_count == 1
    assert len([line for line in compiled.program.lines() if isinstance(line, Launch)]) == 5
    check(compiled, layers, inputs)


@pytest.mark.parametrize("operator", [aten.silu_backward.default, aten.mish_backward.default], ids=str)
def test_composites_with_kernels_on_a_device_that_this_torch_lacks_stay_calls(operator: Any) -> None:
    """A program for another machine has the same kernels as one that is compiled there."""
    with FakeTensorMode():
        inputs = [torch.empty(8, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    graph = Graph()
    operands = [graph.placeholder(name) for name in ("gradient", "x")]
    graph.output((graph.call_function(operator, tuple(operands)),))
    (kernel,) = fxwrap.lower(GraphModule({}, graph), inputs, options=UNCACHED).kernels
    assert kernel.name.startswith(operator.name().split("::")[1])


ON_CUDA_ONLY = {"aten._fused_rms_norm.default"}
"""Composite operators with a kernel in builds of torch for CUDA only."""


def test_no_rule_is_of_an_operator_that_is_always_decomposed() -> None:
    """Such a rule is never called: each call becomes calls of other operators before lowering."""
    operators = {name: operator_overload(name) for name in RULES if name.startswith("aten.")}
    decomposed = {
        name for name, operator in operators.items()
        if is_composite(operator) and not has_device_kernel(operator, torch.device("cpu"))
    }  # fmt: skip
    assert decomposed <= ON_CUDA_ONLY, decomposed


BY_DATA: dict[str, Function] = {
    "argwhere": lambda x, i: aten.argwhere(x > 0) * 2 + 1,
    "where": lambda x, i: [item * 2 for item in torch.where(x > 0)],
    "masked rows": lambda x, i: x[torch.where(x > 0)].relu(),
    "narrow": lambda x, i: torch.narrow(x, 0, i, 2) * 2,
}
"""Functions whose composite operators have sizes or offsets that depend on elements of operands."""


def traced_symbolically(function: Function, inputs: Sequence[Tensor]) -> GraphModule:
    return make_fx(function, pre_dispatch=True, tracing_mode="symbolic")(*clones(inputs))


def exported_program(function: Function, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    return torch.export.export(Module(function), inputs)


@pytest.mark.parametrize(
    ("name", "source"),
    [*product(BY_DATA, (by_hand, traced_symbolically)), ("where", exported_program), ("argwhere", exported_program)],
    ids=_case_id,
)
def test_symbols_of_a_decomposed_call_have_the_names_that_later_nodes_read(name: str, source: Function) -> None:
    function = BY_DATA[name]
    inputs = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]]), torch.tensor(1)
    examples = None if source is exported_program else inputs
    program = fxwrap.lower(source(function, inputs), examples, options=UNCACHED)
    calls = {line.target for line in program.lines() if isinstance(line, ExternCall)}
    assert calls <= {"aten.nonzero.default", "aten.index.Tensor"}
    for x, start in (inputs, (-inputs[0], torch.tensor(0))):
        for actual, expected in zip(tree_leaves(fxwrap.run(program, (x, start))), tree_leaves(function(x, start))):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.reshape.default", lambda x: x.reshape(3, 4) * 2),
        ("aten.flatten.using_ints", lambda x: x.flatten() * 2),
        ("aten.to.dtype", lambda x: x.to(torch.float32) * 2),
    ],
)
def test_a_preserved_composite_that_returns_a_view_leaves_its_operand_alone(name: str, function: Function) -> None:
    """The result's readers run after it: they may not be computed in its memory."""
    inputs = (rand(4, 3),)
    options = UNCACHED.replace(preserve_ops=frozenset({name}))
    check(fxwrap.compile_graph(before_dispatch(function, inputs), inputs, options=options), function, inputs)
