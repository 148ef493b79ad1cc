"""Products of matrices and what training saves, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fxwrap
from fxwrap.lines import ExternCall
from fxwrap.options import EMITTERS
from tests.fx_passes.test_gelu_matmuls import with_gelu_matmuls
from tests.fx_passes.test_rewrite_matmuls import FUSED_ACTIVATIONS

pytestmark = pytest.mark.gpu

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def extern_targets(program: fxwrap.Program) -> list[str]:
    return [line.target for line in program.body.lines if isinstance(line, ExternCall)]


def check(function: Callable[..., Tensor], inputs: list[Tensor], emitter: str, expected: list[str]) -> None:
    """Compares errors against float64 with eager's."""
    options = fxwrap.Options(emitter=emitter, fallback="error")
    compiled = fxwrap.compile_graph(make_fx(function, tracing_mode="fake")(*inputs), inputs, options=options)
    assert extern_targets(compiled.program) == expected
    truth = function(*[item.double() for item in inputs])
    (result,), eager = compiled(*inputs), function(*inputs)
    assert result.dtype == eager.dtype and result.stride() == eager.stride()
    assert relative_error(result, truth) <= 1.1 * relative_error(eager, truth) + 1e-5


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", FUSED_ACTIVATIONS)
def test_gemm_epilogues(name: str, dtype: torch.dtype, emitter: str) -> None:
    inputs = [torch.randn(*size, device="cuda").to(dtype) for size in ((384, 256), (256, 512), (512,))]
    check(
        lambda x, w, b: FUSED_ACTIVATIONS[name](aten.addmm(b, x, w * 0.1).view(4, 96, 512)), inputs, emitter,
        ["aten._addmm_activation.default"],
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(1, 256, 512), (384, 256, 1), (384, 255, 33)], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_unbiased_matmuls_of_odd_sizes(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    rows, terms, columns = sizes
    inputs = [torch.randn(*size, device="cuda").to(dtype) for size in ((rows, terms), (terms, columns))]
    calls = ["aten.mm.default" if columns % 8 else "aten._addmm_activation.default"]
    check(lambda x, w: torch.relu(x @ w), inputs, "python", calls)


def with_input(left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """GELU of a matmul, and its input."""
    product = left @ right if bias is None else torch.addmm(bias, left, right)
    return F.gelu(product, approximate="tanh"), product


@pytest.mark.parametrize(
    "sizes", [(64, 128, 256), (37, 65, 104), (33, 64, 129), (1, 16, 8), (0, 8, 16), (8, 0, 16)], ids=str
)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_gelu_matmuls(biased: bool, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    for left_transposed in (False, True):
        for right_transposed in (False, True):
            left = torch.randn(*((inner, rows) if left_transposed else (rows, inner)), device="cuda").to(dtype)
            right = torch.randn(*((columns, inner) if right_transposed else (inner, columns)), device="cuda").to(dtype)
            left, right = left.t() if left_transposed else left, right.t() if right_transposed else right
            bias = torch.randn(columns, device="cuda").to(dtype) if biased else None
            results = torch.ops.fxwrap.gelu_matmul(left, right, bias)
            eager = with_input(left, right, bias)
            exact = with_input(left.double(), right.double(), None if bias is None else bias.double())
            for result, other, truth in zip(results, eager, exact, strict=True):
                assert (result.dtype, result.shape, result.stride()) == (other.dtype, other.shape, other.stride())
                assert relative_error(result, truth) <= 1.1 * relative_error(other, truth) + 1e-5 or not truth.norm()


def layer(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A layer with GELU, and what else reads its input."""
    hidden = torch.addmm(b, x, w.t())
    return hidden.sin(), F.gelu(hidden, approximate="tanh")


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_programs_with_gelu_matmuls(dtype: torch.dtype, emitter: str, cuda_graphs: bool) -> None:
    inputs = [torch.randn(*size, device="cuda").to(dtype) for size in ((384, 256), (512, 256), (512,))]
    options = fxwrap.Options(emitter=emitter, fallback="error", cuda_graphs=cuda_graphs)
    graph = with_gelu_matmuls(layer, inputs, options)
    compiled = fxwrap.compile_graph(graph, inputs, options=options)
    assert extern_targets(fxwrap.lower(graph, options=options)) == ["fxwrap.gelu_matmul.default"]
    for _ in range(3):
        inputs = [torch.randn_like(item) for item in inputs]
        exact = layer(*[item.double() for item in inputs])
        for result, eager, truth in zip(compiled(*inputs), layer(*inputs), exact, strict=True):
            assert relative_error(result, truth) <= 1.1 * relative_error(eager, truth) + 1e-5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [part(x).view(*x.shape[:2], 4, 64).transpose(1, 2) for part in self.parts]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_qkv_matmuls_are_packed(emitter: str) -> None:
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    model = Attention().cuda().bfloat16()
    x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
    options = {"emitter": emitter, "fallback": "error", "passes": (keep,)}
    compiled = torch.compile(model, backend="fxwrap", options=options, fullgraph=True)
    with torch.no_grad():
        result, eager = compiled(x), model(x)
        truth = model.double()(x.double())
    assert extern_targets(programs[0]).count("aten.mm.default") == 1
    assert result.stride() == eager.stride()
    assert relative_error(result, truth) <= 1.1 * relative_error(eager, truth) + 1e-5


@pytest.mark.parametrize("words", [32000, 50257])
def test_a_loss_saves_only_the_logits(words: int) -> None:
    """No log softmax in float32: only the logits, which the user holds too, outlive the forward."""

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ w.t()
        return F.cross_entropy(logits.float(), labels), logits

    def step(function: Callable[..., Any]) -> tuple[list[Tensor], int]:
        x = torch.randn(1024, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
        w = torch.randn(words, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        x.requires_grad_(), w.requires_grad_()
        labels = torch.arange(1024, device="cuda") % words
        before = torch.cuda.memory_allocated()
        value, _logits = function(x, w, labels)
        held = torch.cuda.memory_allocated() - before
        value.backward()
        assert x.grad is not None and w.grad is not None
        return [value.detach(), x.grad, w.grad], held

    compiled = torch.compile(loss, backend="fxwrap", options={"fallback": "error"}, fullgraph=True)
    step(compiled)
    actual, held = step(compiled)
    eager, _ = step(loss)
    assert held <= 1.05 * 2 * 1024 * words
    for one, other in zip(actual, eager, strict=True):
        assert relative_error(one, other.double()) < 2e-2
