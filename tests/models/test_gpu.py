"""What needs a GPU: models, random numbers, kernels, memory and errors on CUDA tensors, through every emitter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.comparison import GRADIENT_NORM_FLOOR
from fxwrap.compile import emit
from fxwrap.errors import InputError
from fxwrap.options import EMITTERS
from fxwrap.wrapper_ir import live_bytes
from tests.support.models import MODELS, ModelCase, TrainingStep, train_step
from tests.support.samples import SAMPLES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_convolutions")]

DEVICE = "cuda"


def on_gpu(tree: Any) -> Any:
    """The same inputs on the GPU."""
    if isinstance(tree, torch.Tensor):
        return tree.to(DEVICE)
    if isinstance(tree, Mapping):
        return {name: on_gpu(item) for name, item in tree.items()}
    return tree


def gradient_floor(gradients: Mapping[str, torch.Tensor]) -> float:
    """What the norm of a gradient counts as at least: it may be zero in exact arithmetic, and then all of it is
    rounding of what it is summed from."""
    return GRADIENT_NORM_FLOOR * math.hypot(*[float(gradient.double().norm()) for gradient in gradients.values()])


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected value; infinite for NaN."""
    difference = (result.double() - expected.double()).norm()
    error = (difference / expected.double().norm().clamp_min(1e-12)).item()
    return error if error == error else float("inf")


def options_with_kernel_list(emitter: str) -> tuple[dict[str, Any], list[set[str]]]:
    """Options for fused programs that may not fall back to calls; a list that gets the Triton kernels of each."""
    programs: list[set[str]] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append({kernel.name for kernel in program.kernels if kernel.language == "triton"})
        return program

    return {"emitter": emitter, "fallback": "error", "passes": (keep,)}, programs


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("case", MODELS.values(), ids=list(MODELS))
def test_forward(case: ModelCase, emitter: str) -> None:
    model, inputs = case.build(seed=0).eval().to(DEVICE), on_gpu(case.inputs(seed=1))
    options, programs = options_with_kernel_list(emitter)
    compiled = torch.compile(model, backend="fxwrap", options=options, fullgraph=True)
    with torch.no_grad():
        expected, result = model(**inputs).to_tuple(), compiled(**inputs).to_tuple()
    assert [bool(kernels) for kernels in programs] == [True]
    for one, other in zip(result, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.stride() == other.stride()
            assert relative_error(one, other) < 1e-5


def step(case: ModelCase, emitter: str | None, dropout: bool) -> TrainingStep:
    """One training step on the GPU: eager, or compiled."""
    model = case.build(seed=0, dropout=dropout).to(DEVICE)
    inputs = on_gpu(case.inputs(seed=1, training=True))
    if emitter is None:
        return train_step(model, model, inputs, seed=3)
    options, programs = options_with_kernel_list(emitter)
    done = train_step(model, torch.compile(model, backend="fxwrap", options=options, fullgraph=True), inputs, seed=3)
    assert [bool(kernels) for kernels in programs] == [True, True]  # forward and backward
    return done


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("case", MODELS.values(), ids=list(MODELS))
def test_training_step(case: ModelCase, emitter: str) -> None:
    expected, result = step(case, None, False), step(case, emitter, False)
    floor = gradient_floor(expected.gradients)
    assert relative_error(result.loss, expected.loss) < 1e-5
    for name, gradient in expected.gradients.items():
        difference = float((result.gradients[name].double() - gradient.double()).norm())
        assert difference <= 1e-4 * max(float(gradient.double().norm()), floor), name
    for name, buffer in expected.buffers.items():
        assert relative_error(result.buffers[name], buffer) < 1e-5, name


@pytest.mark.parametrize("emitter", EMITTERS)
def test_random_numbers_equal_eager(emitter: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.nn.functional.dropout(x, 0.3), torch.randn(5, device=x.device)

    x = torch.randn(64, 32, device=DEVICE)
    compiled = fxwrap.compile_graph(make_fx(function)(x), [x], options=fxwrap.Options(emitter=emitter))
    torch.manual_seed(7)
    expected = function(x)
    torch.manual_seed(7)
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_rows_and_columns(dtype: torch.dtype, emitter: str) -> None:
    """Softmax, a norm, a transposition, long and short reductions: each shape of kernel, against float64."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
        return torch.softmax(x * 0.5, -1), normed.t() + 1, normed.sum(0), x.exp().mean(), x.cumsum(-1)

    x = torch.randn(515, 1027, device=DEVICE, dtype=dtype)
    options = fxwrap.Options(emitter=emitter, fallback="error")
    compiled = fxwrap.compile_graph(make_fx(function)(x), [x], options=options)
    assert compiled.program.kernels
    eager = function(x)
    for one, other, truth in zip(compiled(x), eager, function(x.double()), strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert relative_error(one, truth) <= 2 * relative_error(other, truth) + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("mode", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scattered_extrema_keep_nan(mode: str, dtype: torch.dtype) -> None:
    """Many values meet in an element, by atomic operations on the bits of floats; NaN of either sign stays NaN."""

    def function(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, index, source, mode)

    nan = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=dtype)
    nan = torch.cat([nan.abs(), nan, -nan.abs()])
    x = torch.randn(1000, dtype=dtype).index_copy(0, torch.arange(18), nan).to(DEVICE)
    source = torch.randn(20_000, dtype=dtype).index_copy(0, torch.arange(0, 180, 10), nan).to(DEVICE)
    index = torch.randint(1000, (20_000,), device=DEVICE)
    options = fxwrap.Options(fallback="error")
    compiled = fxwrap.compile_graph(make_fx(function)(x, index, source), [x, index, source], options=options)
    assert len(compiled.program.kernels) == 2
    (result,) = compiled(x, index, source)
    torch.testing.assert_close(result, function(x, index, source), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [0.5, -math.inf, math.inf, math.nan])
def test_a_one_hot_loss_with_odd_elements(value: float) -> None:
    """Where a row has only numbers, one element is picked; else 0 times infinity counts as in eager."""

    def function(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        target = (torch.arange(x.shape[-1], device=x.device) == labels.unsqueeze(-1)).to(x.dtype)
        return -(target * torch.log_softmax(x, -1)).sum(-1)

    x = torch.randn(301, 1000, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(1000, (301,), device=DEVICE)
    x[3, 7] = x[4, 8] = x[5, 9] = value
    labels[4] = 8
    compiled = fxwrap.compile_graph(make_fx(function)(x, labels), [x, labels], options=fxwrap.Options(fallback="error"))
    assert any("total - total" in kernel.source for kernel in compiled.program.kernels)
    (result,) = compiled(x, labels)
    torch.testing.assert_close(result, function(x, labels), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_triton_kernel(emitter: str) -> None:
    program = fxwrap.parse(SAMPLES["triton_kernel"].full_text().replace("@cpu", "@cuda:0"))
    x = torch.randn(25, 8, device=DEVICE)
    (result,) = emit(program, emitter)(x)
    torch.testing.assert_close(result, x.relu(), rtol=0, atol=0)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_a_tensor_on_the_wrong_device_is_refused(emitter: str) -> None:
    x = torch.randn(4, device=DEVICE)
    compiled = fxwrap.compile_graph(make_fx(lambda x: x + 1)(x), [x], options=fxwrap.Options(emitter=emitter))
    with pytest.raises(InputError, match=r"expected f32\[4\] on cuda:0"):
        compiled(torch.randn(4))


@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_peak_memory_matches_the_live_ranges(emitter: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x * 2).exp().sin() @ x.cos()  # two tensors of a kernel, and a product
        return x

    x = torch.rand(1024, 1024, device=DEVICE)
    compiled = fxwrap.compile_graph(make_fx(function)(x), [x], options=fxwrap.Options(emitter=emitter))
    compiled(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compiled(x)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 1.02 * live_bytes(compiled.program, include_inputs=False).peak
