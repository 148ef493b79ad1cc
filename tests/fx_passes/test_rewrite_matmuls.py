"""Products of matrices: outer ones fuse, activations go into the call, biases out of it, several become one.

A CPU with a GPU's capabilities shows the programs for a GPU; tests on a GPU show the results of its library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fxwrap
from fxwrap import Options
from fxwrap.devices import CPU
from fxwrap.fx_passes import graph_copy, prepare_graph
from fxwrap.fx_passes.graph_copy import run_on_fakes
from fxwrap.fx_passes.matmuls import rewrites
from fxwrap.fx_passes.prepared_graph import FxPassContext
from fxwrap.fx_passes.storage_aliases import StorageAliases
from fxwrap.lines import ExternCall, Launch
from tests.support.agreement import assert_as_exact

aten = torch.ops.aten
ALIKE = dataclasses.replace(
    CPU, matmuls=dataclasses.replace(CPU.matmuls, epilogue_dtypes=frozenset({torch.float32}), packed_bytes=1 << 10)
)
ADDMM_ACTIVATION = "aten._addmm_activation.default"


def lowered(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> fxwrap.Program:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return fxwrap.lower(graph, options=Options(devices=(ALIKE,), **options))


def extern_targets(program: fxwrap.Program) -> list[str]:
    return [line.target for line in program.body.lines if isinstance(line, ExternCall)]


def run(function: Callable[..., Any], *inputs: Tensor) -> None:
    """Compares a program with the function, to float32's rounding."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    results = fxwrap.compile_graph(graph, options=Options(devices=(ALIKE,)))(*inputs)
    expected = function(*inputs)
    torch.testing.assert_close(tuple(results), expected if isinstance(expected, tuple) else (expected,))


def test_graphs_that_were_traced_with_real_tensors() -> None:
    """Each of their values comes with a fake mode of its own."""
    inputs = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)

    def function(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(torch.addmm(bias, x, w.t()))
        return hidden.add_(1), hidden[1:]

    graph = make_fx(function)(*inputs)
    program = fxwrap.lower(graph, options=Options(devices=(ALIKE,)))
    assert extern_targets(program) == [ADDMM_ACTIVATION]
    results = fxwrap.compile_graph(graph, inputs, options=Options(devices=(ALIKE,)))(*inputs)
    torch.testing.assert_close(tuple(results), function(*inputs))


# --- products of vectors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_outer_products_are_fused(dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(x[:, :1], y[:1]) + 1, torch.bmm(x[None, :, 1:2], y[None, 1:2])

    x, y = torch.arange(12).view(4, 3).to(dtype), torch.arange(15).view(3, 5).to(dtype)
    program = lowered(function, x, y)
    assert extern_targets(program) == [] and any(isinstance(line, Launch) for line in program.body.lines)
    run(function, x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inner_products_are_sums_of_rows(dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("bk,bk->b", x, y), torch.bmm(x[:, None, 3:], y[:, 3:, None]) * 2

    x, y = torch.rand(6, 300).to(dtype), torch.randn(6, 300).to(dtype)
    program = lowered(function, x, y)
    assert extern_targets(program) == [] and len([line for line in program.body.lines if isinstance(line, Launch)]) <= 2
    results = fxwrap.compile_graph(make_fx(function, tracing_mode="fake")(x, y))(x, y)
    for result, eager, exact in zip(results, function(x, y), function(x.double(), y.double()), strict=True):
        assert_as_exact(result, eager, exact, slack=1e-6)


@pytest.mark.parametrize("emitter", ["python", "fx", "interpreter"])
def test_a_slice_of_unknown_length_of_an_outer_product(emitter: str) -> None:
    """The view is propagated again, and its length keeps the symbol that the graph binds."""

    def function(a: Tensor, b: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        start, end = counts[0].item(), counts[1].item()
        part = aten.slice.Tensor(a @ b, 1, start, end)
        return part * 2, part.sum()

    graph = make_fx(function, tracing_mode="symbolic")(torch.randn(3, 1), torch.randn(1, 5), torch.tensor([1, 3]))
    compiled = fxwrap.compile_graph(graph, options=Options(emitter=emitter))
    for counts in ([1, 4], [0, 5], [2, 2]):
        inputs = torch.randn(3, 1), torch.randn(1, 5), torch.tensor(counts)
        torch.testing.assert_close(tuple(compiled(*inputs)), function(*inputs))


def test_a_rotary_embedding_of_any_length() -> None:
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    def function(frequencies: Tensor, positions: Tensor) -> Tensor:
        return (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2).cos()

    compiled = torch.compile(function, backend="fxwrap", dynamic=True, options={"passes": (keep,)})
    for length in (5, 9):
        inputs = torch.linspace(0.1, 1, 4), torch.arange(length)[None]
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert [extern_targets(program) for program in programs] == [[]]


# --- activations ------------------------------------------------------------------------------------------------------


def formula(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def factored(x: Tensor) -> Tensor:
    return x * 0.5 * (torch.tanh(x * 0.7978845608 * (x * x * 0.044715 + 1.0)) + 1.0)


def nearly_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.0447 * torch.pow(x, 3.0))))


def large_power(x: Tensor) -> Tensor:
    return torch.tanh(torch.pow(x, 1000.0))


def inverse(x: Tensor) -> Tensor:
    return torch.tanh(torch.pow(x, -1.0))


def by_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def behind_matmul(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A product with a bias, seen as three dimensions, an activation, and something else behind it."""
    return lambda x, w, b: activation(aten.addmm(b, x, w).view(2, 3, 4)).sin()


FUSED_ACTIVATIONS = {"relu": torch.relu, "by_tanh": by_tanh, "formula": formula, "factored": factored}
UNFUSED_ACTIVATIONS = {
    "gelu": F.gelu, "almost": nearly_gelu, "silu": F.silu, "tanh": torch.tanh, "large_power": large_power,
    "inverse": inverse,
}  # fmt: skip


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator, dtype=dtype) for size in ((6, 8), (8, 4), (4,))]


@pytest.mark.parametrize("name", [*FUSED_ACTIVATIONS, *UNFUSED_ACTIVATIONS])
def test_fused_activations(name: str) -> None:
    program = lowered(behind_matmul((FUSED_ACTIVATIONS | UNFUSED_ACTIVATIONS)[name]), *operands())
    assert extern_targets(program) == [ADDMM_ACTIVATION if name in FUSED_ACTIVATIONS else "aten.addmm.default"]
    (call,) = [line for line in program.body.lines if isinstance(line, ExternCall)]
    assert dict(call.keywords) == ({"use_gelu": True} if name in FUSED_ACTIVATIONS and name != "relu" else {})


def test_a_matmul_without_bias_gets_a_zero_bias() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.relu(torch.relu(x @ w) @ v)

    x, w, v = torch.randn(6, 8), torch.randn(8, 4), torch.randn(4, 4)
    program = lowered(function, x, w, v)
    assert extern_targets(program) == [ADDMM_ACTIVATION] * 2
    assert sum(isinstance(line, Launch) for line in program.body.lines) == 1, "one tensor of zeros"
    run(function, x, w, v)


OTHERWISE: dict[str, tuple[Callable[..., Any], torch.dtype, dict[str, Any]]] = {
    "read by two": (lambda x, w, b: aten.addmm(b, x, w).relu() * aten.addmm(b, x, w).sin(), torch.float32, {}),
    "given back": (lambda x, w, b: ((y := aten.addmm(b, x, w)), y.relu()), torch.float32, {}),
    "another dtype": (lambda x, w, b: aten.addmm(b, x, w).relu(), torch.float64, {}),
    "terms that are not aligned": (lambda x, w, b: aten.addmm(b, x[:, :5], w[:5]).relu(), torch.float32, {}),
    "columns that are not aligned": (lambda x, w, b: aten.addmm(b[:3], x, w[:, :3]).relu(), torch.float32, {}),
    "a factor": (lambda x, w, b: aten.addmm(b, x, w, alpha=2).relu(), torch.float32, {}),
    "a bias of rows": (lambda x, w, b: aten.addmm(x[:, :4], x, w).relu(), torch.float32, {}),
    "preserved": (
        lambda x, w, b: aten.addmm(b, x, w).relu(),
        torch.float32,
        {"preserve_ops": frozenset({"aten.relu.default"})},
    ),
    "not fused": (lambda x, w, b: aten.addmm(b, x, w).relu(), torch.float32, {"fuse": False}),
}


@pytest.mark.parametrize("reason", OTHERWISE)
def test_unsupported_activations_are_not_fused(reason: str) -> None:
    function, dtype, options = OTHERWISE[reason]
    actual = extern_targets(lowered(function, *operands(dtype), **options))
    assert "aten.addmm.default" in actual and ADDMM_ACTIVATION not in actual


def test_cpus_have_no_gemm_epilogues() -> None:
    """Its `_addmm_activation` computes another GELU, and nothing at once."""
    graph = make_fx(behind_matmul(by_tanh), tracing_mode="fake")(*operands())
    assert extern_targets(fxwrap.lower(graph)) == ["aten.addmm.default"]


# --- several products of one tensor -----------------------------------------------------------------------------------


def heads(x: Tensor, *weights: Tensor) -> Tensor:
    """Products seen as heads, as attention takes them."""
    q, k, v = [(x @ w.t()).view(2, 3, 2, -1).transpose(1, 2) for w in weights]
    return (torch.sin(q) * k).sum(-1) + v.cos().sum(-1)


def columns(x: Tensor, *weights: Tensor) -> Tensor:
    return sum([(x @ w).sin() for w in weights], torch.zeros(()))


def biased(x: Tensor, *items: Tensor) -> Tensor:
    return sum([aten.addmm(b, x, w.t()).cos() for w, b in zip(items[:4], items[4:], strict=True)], torch.zeros(()))


def of_several_tensors(x: Tensor, *weights: Tensor) -> Tensor:
    return columns(x, *weights[:2]) + columns(x + 1, *weights[2:])


def weights(count: int, *size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*size, generator=generator) for _ in range(count)]


JOINED: dict[str, tuple[Callable[..., Any], list[Tensor], list[str]]] = {
    "heads": (heads, weights(3, 4, 5), ["aten.mm.default"]),
    "columns": (columns, weights(3, 5, 4), ["aten.mm.default"]),
    "unequal columns": (heads, [*weights(2, 4, 5), *weights(1, 8, 5)], ["aten.mm.default"]),
    "biased": (biased, [*weights(4, 4, 5), *weights(4, 4)], ["aten.addmm.default"]),
    "of several tensors": (of_several_tensors, weights(4, 5, 4), ["aten.mm.default"] * 2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", JOINED)
def test_matmuls_of_one_tensor_are_packed(name: str) -> None:
    function, inputs, expected = JOINED[name]
    x = weights(1, 6, 5)[0]
    assert extern_targets(lowered(function, x, *inputs)) == expected
    run(function, x, *inputs)


def flattened(x: Tensor, *weights: Tensor) -> Tensor:
    return sum([(x @ w.t()).view(-1).sin() for w in weights], torch.zeros(()))


def returned(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple([(x @ w.t())[1:] for w in weights])


def read_by_an_extern_call(x: Tensor, *weights: Tensor) -> Tensor:
    return sum([torch.linalg.svdvals(x @ w.t()) for w in weights], torch.zeros(()))


def computed_weights(x: Tensor, *weights: Tensor) -> Tensor:
    return columns(x, *[w.t() + 1 for w in weights])


APART: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "a view of rows beside each other": (flattened, weights(3, 4, 5)),
    "given back": (returned, weights(3, 4, 5)),
    "read by a call": (read_by_an_extern_call, weights(3, 4, 5)),
    "matrices that are computed": (computed_weights, weights(3, 4, 5)),
    "too much to copy": (heads, weights(3, 64, 5)),
}


@pytest.mark.parametrize("reason", APART)
def test_ineligible_matmuls_are_not_packed(reason: str) -> None:
    function, inputs = APART[reason]
    x = weights(1, 6, 5)[0]
    program = lowered(function, x, *inputs)
    assert extern_targets(program).count("aten.mm.default") == len(inputs)


def test_layouts_of_equal_layers_are_propagated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.fx.Node] = []

    def counted(node: torch.fx.Node, *arguments: Any) -> Any:
        calls.append(node)
        return run_on_fakes(node, *arguments)

    def layers(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        matrices = [x[:, :3] @ weight.t() for weight in weights]
        return tuple([matrix.view(2, 3, 4).sin() for matrix in matrices] + [x[:5].cos() @ x])

    graph = make_fx(layers, tracing_mode="fake")(torch.randn(6, 6), *weights(3, 4, 3))
    prepared = prepare_graph(graph, None, Options().resolve_devices())
    aliases = StorageAliases(prepared, FxPassContext(Options(), frozenset({"aten.sin.default"})))
    first, *others = [node for node in prepared.nodes if node.target == aten.mm.default][:3]
    monkeypatch.setattr(graph_copy, "run_on_fakes", counted)

    def accepts(node: torch.fx.Node, strides: tuple[int, int]) -> bool:
        calls.clear()
        with prepared.fakes[node].fake_mode:
            return aliases.accepts_layout(node, torch.empty_strided((6, 4), strides))  # type: ignore[arg-type]

    assert accepts(first, (8, 1)) and len(calls) == 2, "the view and its reader"
    assert all(accepts(node, (8, 1)) and not calls for node in others)
    assert not accepts(first, (1, 8)), "no view of it has one stride for both dimensions of rows"


@pytest.mark.parametrize(("function", "count"), [(heads, 3), (biased, 4)])
def test_readers_of_matmuls_with_large_weights_are_not_examined(
    function: Callable[..., Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of each layer would be, for nothing."""
    examined: list[torch.fx.Node] = []
    monkeypatch.setattr(rewrites, "_may_be_slice", lambda _views, node: examined.append(node) or True)

    def targets(size: int) -> list[str]:
        biases = weights(count, size) if function is biased else []
        return extern_targets(lowered(function, torch.randn(6, 5), *weights(count, size, 5), *biases))

    assert len(targets(64)) == count and examined == []
    assert len(targets(4)) == 1 and len(examined) == count


def test_symbolic_sizes_are_not_packed() -> None:
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    options = {"passes": (keep,), "devices": (ALIKE,)}
    compiled = torch.compile(columns, backend="fxwrap", dynamic=True, options=options)
    x, inputs = torch.randn(6, 5), weights(3, 5, 4)
    torch.testing.assert_close(compiled(x, *inputs), columns(x, *inputs))
    assert [extern_targets(program) for program in programs] == [["aten.mm.default"] * 3]


# --- biases -----------------------------------------------------------------------------------------------------------

UNFUSED_BIAS = Options(
    devices=(
        dataclasses.replace(
            CPU, matmuls=dataclasses.replace(CPU.matmuls, unfused_bias_dtypes=frozenset({torch.float32}))
        ),
    )
)
BIASES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "read by a kernel": (lambda b, x, w: aten.addmm(b, x, w).cos(), "aten.mm.default"),
    "read by kernels through views": (
        lambda b, x, w: torch.softmax(aten.addmm(b, x, w).view(2, 2, 6), 2), "aten.mm.default",
    ),
    "read by a call": (lambda b, x, w: torch.linalg.svdvals(aten.addmm(b, x, w)), "aten.addmm.default"),
    "read by a kernel and a call": (
        lambda b, x, w: (y := aten.addmm(b, x, w)).cos().sum() + torch.linalg.svdvals(y), "aten.addmm.default",
    ),
    "given back": (lambda b, x, w: aten.addmm(b, x, w), "aten.addmm.default"),
    "written": (lambda b, x, w: aten.addmm(b, x, w).relu_().cos(), "aten.addmm.default"),
    "of other numbers": (lambda b, x, w: aten.addmm(b.double(), x.double(), w.double()).cos(), "aten.addmm.default"),
    "a factor": (lambda b, x, w: aten.addmm(b, x, w, alpha=2).cos(), "aten.addmm.default"),
    "a matrix": (lambda b, x, w: aten.addmm(b.expand(4, 6), x, w).cos(), "aten.addmm.default"),
}  # fmt: skip
"""What becomes of a product with a bias, by what reads it."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BIASES)
def test_biases_are_moved_into_reading_kernels(name: str) -> None:
    function, expected = BIASES[name]
    inputs = torch.randn(6), torch.randn(4, 5), torch.randn(5, 6)
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    compiled = fxwrap.compile_graph(graph, options=UNFUSED_BIAS)
    assert [target for target in extern_targets(compiled.program) if "mm" in target] == [expected]
    if expected == "aten.mm.default":
        assert sum(isinstance(line, Launch) for line in compiled.program.body.lines) == 1
    torch.testing.assert_close(compiled(*inputs)[0], function(*inputs))
    preserved = fxwrap.lower(graph, options=UNFUSED_BIAS.replace(preserve_ops=frozenset({"aten.addmm.default"})))
    assert "aten.addmm.default" in extern_targets(preserved)
