"""Products of matrices: outer ones fuse, activations go into the call, biases out of it, several become one.

A CPU with a GPU's facts shows what a GPU's programs are; what its library computes, tests on one show.
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
from fxwrap.device_spec import CPU
from fxwrap.lines import Call, Launch

aten = torch.ops.aten
ALIKE = dataclasses.replace(CPU, activated_products=frozenset({torch.float32}), joined_products=1 << 10)
ACTIVATED = "aten._addmm_activation.default"


def lowered(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> fxwrap.Program:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return fxwrap.lower(graph, options=Options(devices=(ALIKE,), **options))


def called(program: fxwrap.Program) -> list[str]:
    return [line.target for line in program.body.lines if isinstance(line, Call)]


def run(function: Callable[..., Any], *inputs: Tensor) -> None:
    """Compares a program with the function, to float32's rounding."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    results = fxwrap.compile_graph(graph, options=Options(devices=(ALIKE,)))(*inputs)
    wanted = function(*inputs)
    torch.testing.assert_close(tuple(results), wanted if isinstance(wanted, tuple) else (wanted,))


def test_graphs_that_were_traced_with_real_tensors() -> None:
    """Each of their values comes with a fake mode of its own."""
    given = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)

    def function(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(torch.addmm(bias, x, w.t()))
        return hidden.add_(1), hidden[1:]

    graph = make_fx(function)(*given)
    program = fxwrap.lower(graph, options=Options(devices=(ALIKE,)))
    assert called(program) == [ACTIVATED]
    results = fxwrap.compile_graph(graph, given, options=Options(devices=(ALIKE,)))(*given)
    torch.testing.assert_close(tuple(results), function(*given))


# --- outer products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_products_over_one_term_are_fused(dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(x[:, :1], y[:1]) + 1, torch.bmm(x[None, :, 1:2], y[None, 1:2])

    x, y = torch.arange(12).view(4, 3).to(dtype), torch.arange(15).view(3, 5).to(dtype)
    program = lowered(function, x, y)
    assert called(program) == [] and any(isinstance(line, Launch) for line in program.body.lines)
    run(function, x, y)


def test_a_rotary_embedding_of_any_length(fresh_dynamo: None) -> None:
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    def function(frequencies: Tensor, positions: Tensor) -> Tensor:
        return (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2).cos()

    compiled = torch.compile(function, backend="fxwrap", dynamic=True, options={"passes": (keep,)})
    for length in (5, 9):
        given = torch.linspace(0.1, 1, 4), torch.arange(length)[None]
        torch.testing.assert_close(compiled(*given), function(*given))
    assert [called(program) for program in programs] == [[]]


# --- activations ------------------------------------------------------------------------------------------------------


def formula(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def factored(x: Tensor) -> Tensor:
    return x * 0.5 * (torch.tanh(x * 0.7978845608 * (x * x * 0.044715 + 1.0)) + 1.0)


def almost(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.0447 * torch.pow(x, 3.0))))


def by_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def behind(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A product with a bias, seen as three dimensions, an activation, and something else behind it."""
    return lambda x, w, b: activation(aten.addmm(b, x, w).view(2, 3, 4)).sin()


TAKEN = {"relu": torch.relu, "by_tanh": by_tanh, "formula": formula, "factored": factored}
LEFT = {"gelu": F.gelu, "almost": almost, "silu": F.silu, "tanh": torch.tanh}


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator, dtype=dtype) for size in ((6, 8), (8, 4), (4,))]


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_activations(name: str) -> None:
    program = lowered(behind((TAKEN | LEFT)[name]), *operands())
    assert called(program) == [ACTIVATED if name in TAKEN else "aten.addmm.default"]
    (call,) = [line for line in program.body.lines if isinstance(line, Call)]
    assert dict(call.keywords) == ({"use_gelu": True} if name in TAKEN and name != "relu" else {})


def test_a_product_without_bias_gets_zeros() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.relu(torch.relu(x @ w) @ v)

    x, w, v = torch.randn(6, 8), torch.randn(8, 4), torch.randn(4, 4)
    program = lowered(function, x, w, v)
    assert called(program) == [ACTIVATED] * 2
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
    "kept": (lambda x, w, b: aten.addmm(b, x, w).relu(), torch.float32, {"keep": frozenset({"aten.relu.default"})}),
    "not fused": (lambda x, w, b: aten.addmm(b, x, w).relu(), torch.float32, {"fuse": False}),
}


@pytest.mark.parametrize("reason", OTHERWISE)
def test_otherwise_the_activation_stays(reason: str) -> None:
    function, dtype, options = OTHERWISE[reason]
    found = called(lowered(function, *operands(dtype), **options))
    assert "aten.addmm.default" in found and ACTIVATED not in found


def test_a_cpu_has_no_such_call() -> None:
    """Its `_addmm_activation` computes another GELU, and nothing at once."""
    graph = make_fx(behind(by_tanh), tracing_mode="fake")(*operands())
    assert called(fxwrap.lower(graph)) == ["aten.addmm.default"]


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


@pytest.mark.parametrize("name", JOINED)
def test_products_of_one_tensor(name: str) -> None:
    function, given, wanted = JOINED[name]
    x = weights(1, 6, 5)[0]
    assert called(lowered(function, x, *given)) == wanted
    run(function, x, *given)


def flattened(x: Tensor, *weights: Tensor) -> Tensor:
    return sum([(x @ w.t()).view(-1).sin() for w in weights], torch.zeros(()))


def given_back(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple([(x @ w.t())[1:] for w in weights])


def read_by_a_call(x: Tensor, *weights: Tensor) -> Tensor:
    return sum([torch.linalg.svdvals(x @ w.t()) for w in weights], torch.zeros(()))


def computed_weights(x: Tensor, *weights: Tensor) -> Tensor:
    return columns(x, *[w.t() + 1 for w in weights])


APART: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "a view of rows beside each other": (flattened, weights(3, 4, 5)),
    "given back": (given_back, weights(3, 4, 5)),
    "read by a call": (read_by_a_call, weights(3, 4, 5)),
    "matrices that are computed": (computed_weights, weights(3, 4, 5)),
    "too much to copy": (heads, weights(3, 64, 5)),
}


@pytest.mark.parametrize("reason", APART)
def test_otherwise_products_stay_apart(reason: str) -> None:
    function, given = APART[reason]
    x = weights(1, 6, 5)[0]
    program = lowered(function, x, *given)
    assert called(program).count("aten.mm.default") == len(given)


def test_sizes_that_change_stay_apart(fresh_dynamo: None) -> None:
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    options = {"passes": (keep,), "devices": (ALIKE,)}
    compiled = torch.compile(columns, backend="fxwrap", dynamic=True, options=options)
    x, given = torch.randn(6, 5), weights(3, 5, 4)
    torch.testing.assert_close(compiled(x, *given), columns(x, *given))
    assert [called(program) for program in programs] == [["aten.mm.default"] * 3]


# --- biases -----------------------------------------------------------------------------------------------------------

SEPARATE = Options(devices=(dataclasses.replace(CPU, separate_biases=frozenset({torch.float32})),))
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


@pytest.mark.parametrize("name", BIASES)
def test_kernels_that_read_a_product_add_its_bias(name: str) -> None:
    function, wanted = BIASES[name]
    inputs = torch.randn(6), torch.randn(4, 5), torch.randn(5, 6)
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    compiled = fxwrap.compile_graph(graph, options=SEPARATE)
    assert [target for target in called(compiled.program) if "mm" in target] == [wanted]
    if wanted == "aten.mm.default":
        assert sum(isinstance(line, Launch) for line in compiled.program.body.lines) == 1
    torch.testing.assert_close(compiled(*inputs)[0], function(*inputs))
    kept = fxwrap.lower(graph, options=SEPARATE.replace(keep=frozenset({"aten.addmm.default"})))
    assert "aten.addmm.default" in called(kept)
