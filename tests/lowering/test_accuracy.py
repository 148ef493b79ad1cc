"""Reductions are as accurate as eager's, whatever they are fused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from tests.lowering.accuracy import Case, draw_cases, excess_errors

SCANNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "sum": lambda x: x.sum(),
    "mean_of_scan": lambda x: x.cumsum(0).mean(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_a_long_sum_beside_a_scan_is_computed_in_parts(emitter: Literal["python", "cpp"]) -> None:
    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        both = [(function(x), x.cumsum(0)) for function, x in zip(SCANNED.values(), inputs, strict=True)]
        return [item for pair in both for item in pair]

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(1 << 22, generator=generator) + 0.1 for _ in SCANNED]
    compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=Options(emitter=emitter))
    assert len(compiled.program.kernels) == len(SCANNED), "each reduction is fused with its scan"
    for actual, expected in zip(compiled(*inputs), function(*[item.double() for item in inputs]), strict=True):
        assert (actual - expected).norm() <= 1e-7 * expected.norm()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [*draw_cases(seed=0, count=5, largest=1 << 18)], ids=str)
def test_random_reductions_are_as_accurate_as_eager(case: Case) -> None:
    assert not excess_errors(case, Options(fallback="error"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*draw_cases(seed=0, count=30)], ids=str)
def test_random_reductions_on_a_gpu_are_as_accurate_as_eager(case: Case) -> None:
    assert not excess_errors(case, Options(fallback="error"), "cuda")


LONG = [
    Case(("sum_of_maxima", "norm3"), "cummax", (1 << 22,), 0, torch.float32, "uniform"),
    Case(("prod", "norm1"), "cumsum", (1 << 22,), 0, torch.float32, "shifted"),
]
"""One program walks each of these rows: a sum of equal elements and a product of factors close to 1."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG, ids=str)
def test_equal_rounding_errors_on_a_gpu_do_not_add_up(case: Case) -> None:
    assert not excess_errors(case, Options(fallback="error"), "cuda")


SEVERAL_AXES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "of few elements": (lambda x: x.sum(), lambda: torch.randn(1, 257, 1).expand(64, 257, 33)),
    "in rows": (lambda x: x.sum(), lambda: torch.randn(40, 60, 60)[:, :50, :50] + 30),
    "in rows, the first long": (lambda x: x.sum((0, 2, 3)), lambda: torch.randn(3000, 2, 9, 9)[..., :8, :8] + 30),
    "in columns": (lambda x: x.sum((0, 2)), lambda: torch.randn(400, 2, 1, 16).expand(400, 2, 400, 16)),
    "deviation": (lambda x: x.std((0, 2)), lambda: torch.randn(1, 2, 300, 8).expand(200, 2, 300, 8) + 3),
    "position": (lambda x: x.argmax(), lambda: torch.randn(40, 60, 60)[:, :50, :50].round()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", SEVERAL_AXES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_long_reductions_over_several_axes_are_split(case: str, dynamic: bool) -> None:
    """An accumulator combined all elements of the other axes, however many they were."""
    function, make_input = SEVERAL_AXES[case]
    torch.manual_seed(0)
    inputs = [make_input() for _ in range(8)]
    traced = make_fx(function, tracing_mode="symbolic" if dynamic else "real")(inputs[0])
    options = Options(fallback="error")
    compiled = fxwrap.compile_graph(traced, None if dynamic else inputs[:1], options=options)
    errors = []
    for x in inputs:
        exact = function(x.double())
        scale = exact if case == "deviation" else x.double().abs().sum() / exact.numel()
        errors.append(float(((compiled.flat(x)[0] - exact) / scale).abs().max()))
    assert sorted(errors)[len(inputs) // 2] <= 1.5e-7, "about a unit in the last place"


def check_equal_rows(options: Options, device: str = "cpu") -> None:
    """Checks norms of rows of equal elements, which a small standard deviation divides: they are the bias."""

    def function(x: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return [mean, variance, (x - mean) * (variance + 1e-5).rsqrt() + bias]

    for rows, count in ((8, 4190), (2, 40000)):
        generator = torch.Generator().manual_seed(0)
        element, bias = torch.randn(rows, 1, generator=generator), torch.randn(count, generator=generator)
        inputs = [element.expand(rows, count).contiguous().to(device), bias.to(device)]
        compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options)
        mean, variance, normalized = compiled(*inputs)
        assert torch.equal(mean.cpu(), element)
        assert variance.max() <= 1e-18
        assert torch.equal(normalized.cpu(), bias.expand(rows, count))


@pytest.mark.parametrize("kernels", ["cpp", "triton"])
def test_rows_of_equal_elements_equal_their_mean(kernels: Literal["cpp", "triton"]) -> None:
    check_equal_rows(Options(cpu_kernels=kernels))


@pytest.mark.gpu
def test_quotients_of_selected_zeros_on_a_gpu_are_rounded_correctly() -> None:
    """Elements of all magnitudes but those near the limits of the range, zeros, and quotients out of range."""
    magnitudes = [10.0 ** torch.randint(-12, 12, (1 << 20,), device="cuda") for _ in "xy"]
    x, y = [torch.randn(1 << 20, device="cuda") * magnitude for magnitude in magnitudes]
    extreme = torch.tensor([0.0, -0.0, 1.0, -3.0, torch.inf, -torch.inf, torch.nan, 1e-20, 1e20, 3e38], device="cuda")
    pairs = torch.cartesian_prod(extreme, extreme)
    x, y = torch.cat([x, pairs[:, 0]]), torch.cat([y, pairs[:, 1]])

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(y > -1e9, x, 0.0) / y

    compiled = fxwrap.compile_graph(make_fx(function)(x, y), [x, y])
    assert "float_quotient" in str(compiled.program)
    (quotient,), expected = compiled(x, y), function(x, y)
    is_near_limit = ((expected != 0) & (expected.abs() <= 1e-30)) | (expected.abs() >= 1e38) | (y.abs() >= 1e38)
    differs = (quotient != expected) & ~(quotient.isnan() & expected.isnan()) & ~is_near_limit
    assert not differs.any(), torch.stack([x, y, quotient, expected], 1)[differs]
    torch.testing.assert_close(quotient, expected, rtol=3e-7, atol=1e-38, equal_nan=True)


@pytest.mark.gpu
def test_rows_of_equal_elements_equal_their_mean_on_a_gpu() -> None:
    check_equal_rows(Options(fallback="error"), "cuda")


def check_scores_and_norm(options: Options, device: str = "cpu", count: int = 4190) -> None:
    """Checks the steps of PyTorch's `test_tmp_not_defined_issue3`, one and all, against float64.

    The layer norm divides by a small deviation, so that it shows the error of each step before it.
    """

    def function(
        x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, values: torch.Tensor
    ) -> list[torch.Tensor]:
        columns = x.index_select(1, index)
        scores = torch.addmm(bias, columns, weight)
        shares = torch.softmax(scores, -1)
        mixed = shares @ values
        return [scores, shares, mixed, torch.nn.functional.layer_norm(mixed, mixed.shape[1:])]

    generator = torch.Generator().manual_seed(0)
    sizes = ((count // 10, 12), (6, count), (count,), (count, 64))
    x, weight, bias, values = [torch.randn(size, generator=generator) for size in sizes]
    inputs = [item.to(device) for item in (x, torch.tensor([1, 3, 4, 7, 9, 11]), weight, bias, values)]
    compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options)
    exact = function(*[item.double() if item.is_floating_point() else item for item in inputs])
    for actual, eager, expected in zip(compiled(*inputs), function(*inputs), exact, strict=True):
        assert (actual - expected).norm() <= 2 * (eager - expected).norm() + 1e-7 * expected.norm()
        largest = (eager - expected).abs().max() + 1e-6 * expected.abs().max()
        assert (actual - expected).abs().max() <= 3 * largest


def test_scores_and_norms_are_as_accurate_as_eager() -> None:
    check_scores_and_norm(Options(fallback="error"), count=1000)


@pytest.mark.gpu
def test_scores_and_norms_on_a_gpu_are_as_accurate_as_eager() -> None:
    check_scores_and_norm(Options(fallback="error"), "cuda")


def check_rounded_once(options: Options, device: str = "cpu") -> None:
    """Checks sums of half-precision values that kernels compute: they are rounded once, from float32."""
    aten = torch.ops.aten

    def function(a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        padding = [2, 2, 0, -1]
        return [(a + b).sum([1, 2]), (a + b).sum(-1), aten.reflection_pad2d_backward(grad, x, padding)]

    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 9, 3, 21), (8, 9, 3, 21), (1, 1, 7, 12), (1, 1, 8, 8))
    inputs = [torch.randn(shape, generator=generator).half().to(device) for shape in shapes]
    compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options)
    for actual, expected in zip(compiled(*inputs), function(*[item.float() for item in inputs]), strict=True):
        torch.testing.assert_close(actual, expected.half(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kernels", ["cpp", "triton"])
def test_half_precision_sums_of_computed_values_are_rounded_once(kernels: Literal["cpp", "triton"]) -> None:
    check_rounded_once(Options(cpu_kernels=kernels))


@pytest.mark.gpu
def test_half_precision_sums_on_a_gpu_are_rounded_once() -> None:
    check_rounded_once(Options(fallback="error"), "cuda")


def test_batch_norms_of_few_elements_far_from_zero_are_as_accurate_as_eager() -> None:
    """The last layers of a MobileNetV2 on one image: the rounding error of a mean was divided by a small deviation."""

    def function(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        aten = torch.ops.aten
        output, mean, rstd = aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
        mask = [True, True, True]
        return [output, *aten.native_batch_norm_backward(grad, x, weight, None, None, mean, rstd, True, 1e-5, mask)]

    for shape in ((1, 64, 7, 7), (1, 16, 56, 56)):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=generator) * 1e-2 + torch.randn((1, shape[1], 1, 1), generator=generator) * 30
        inputs = [x, torch.randn(shape[1], generator=generator), torch.randn(shape, generator=generator)]
        compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs)
        runs = [run(*inputs) for run in (compiled, function)]
        reference = function(*[item.double() for item in inputs])
        for actual, eager, exact in zip(*runs, reference, strict=True):
            assert (actual - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()


def _block_forward(x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    arguments = (x, weight, weight, weight, weight.square(), True, 0.997, 1e-3)
    normalized, *statistics = torch.ops.aten._native_batch_norm_legit_functional(*arguments)
    clamped = torch.ops.aten.hardtanh(normalized, 0, 6)
    return [normalized + other, torch.ops.aten.constant_pad_nd(clamped, [0, 1, 0, 1]), *statistics]


def _block_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    normalized, mean, rstd = torch.ops.aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-3)
    padded = torch.ops.aten.constant_pad_nd(grad, [0, -1, 0, -1])
    through = torch.ops.aten.hardtanh_backward(padded, normalized, 0, 6)
    mask = [True, True, True]
    return list(torch.ops.aten.native_batch_norm_backward(through, x, weight, None, None, mean, rstd, True, 1e-3, mask))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", ["cpp", "triton"])
def test_blocks_of_batch_norm_and_clamp_are_as_accurate_as_eager(kernels: Literal["cpp", "triton"]) -> None:
    """The kernels of a MobileNetV2 on one image, whose gradients amplify each rounding by thousands.

    Each kernel is compared on equal inputs. Channels have a mean of about 0, so errors of statistics are relative to
    the standard deviation.
    """
    options = Options(cpu_kernels=kernels, fallback="error")
    for shape in ((1, 24, 28, 28), (1, 144, 14, 14)) if kernels == "cpp" else ((1, 16, 7, 7),):
        generator = torch.Generator().manual_seed(0)
        x, other = [torch.randn(shape, generator=generator) * 0.1 for _ in range(2)]
        grad = torch.randn((*shape[:2], shape[2] + 1, shape[3] + 1), generator=generator)
        weight = torch.rand(shape[1], generator=generator) * 4 + 1
        for function, inputs in ((_block_forward, (x, other, weight)), (_block_backward, (grad, x, weight))):
            compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=options)
            assert len(compiled.program.kernels) <= 2, "the block is fused"
            exact = function(*[item.double() for item in inputs])
            for actual, eager, expected in zip(compiled(*inputs), function(*inputs), exact, strict=True):
                scale = max(float(expected.norm()), float(x.std()) * expected.numel() ** 0.5)
                bound = 2 * (eager - expected).norm() + 2 * torch.finfo(torch.float32).eps * scale
                assert (actual - expected).norm() <= bound
