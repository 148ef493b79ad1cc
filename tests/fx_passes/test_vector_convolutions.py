"""Frozen convolutions of float32 that the bridge computes by loops of its own: of pixels, and of single channels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxwrap.runtime import native

CHANNELS_LAST = torch.channels_last

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda value: value, "relu": torch.relu, "relu6": F.relu6, "hardswish": F.hardswish, "silu": F.silu,
    "sigmoid": torch.sigmoid,
}  # fmt: skip

LIBRARY_CALLS = frozenset(
    {"mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_", "mkldnn::_linear_pointwise"}
)

HAS_LOOPS = torch.cpu._is_avx2_supported()
"""Whether they are for this processor; else the library computes the same."""


@pytest.fixture(autouse=True)
def _bridge() -> None:
    native.build_bridge()


def _run(
    image: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), groups: int = 1,
    in_place: bool = False,
) -> tuple[Tensor, set[str]]:  # fmt: skip
    """Returns the result of the bridge's operator, and the calls of oneDNN that it made."""
    geometry = (stride, padding, dilation, groups)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if in_place:
            assert residual is not None
            result = residual.clone(memory_format=torch.preserve_format)
            native.native_operator("frozen_convolution_")(result, image, weight, bias, (), 0.0, *geometry, activation)
        else:
            sizes = torch.conv2d(image, weight, None, *geometry).shape
            strides = torch.empty(sizes, memory_format=CHANNELS_LAST).stride()
            result = native.native_operator("frozen_convolution")(
                image, weight, bias, (), 0.0, *geometry, residual, activation, strides
            )
    return result, LIBRARY_CALLS & {event.key for event in profile.key_averages()}


def _check(image: Tensor, weight: Tensor, activation: str = "none", in_place: bool = False, **geometry: object) -> None:
    """Compares results with and without bias and residual with those of float64, beside eager's error."""
    shape = torch.conv2d(image, weight, **geometry).shape  # type: ignore[arg-type]
    residual = torch.randn(shape, dtype=image.dtype).to(memory_format=CHANNELS_LAST)
    for bias, other in itertools.product((None, torch.randn(len(weight), dtype=image.dtype)), (None, residual)):
        if in_place and other is None:
            continue

        def eager(dtype: torch.dtype, bias: Tensor | None = bias, other: Tensor | None = other) -> Tensor:
            shift = None if bias is None else bias.to(dtype)
            total = torch.conv2d(image.to(dtype), weight.to(dtype), shift, **geometry)  # type: ignore[arg-type]
            return ACTIVATIONS[activation](total if other is None else total + other.to(dtype))

        result, calls = _run(image, weight, bias, other, activation, in_place=in_place, **geometry)  # type: ignore[arg-type]
        assert not (calls and HAS_LOOPS) and result.is_contiguous(memory_format=CHANNELS_LAST)
        exact = eager(torch.float64)
        error, usual = [float((item - exact).norm() / exact.norm()) for item in (result, eager(image.dtype))]
        assert error <= 1.2 * usual + 2e-8


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("in_place", [False, True])
def test_activations_and_residuals(activation: str, in_place: bool) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 20, 5, 7).to(memory_format=CHANNELS_LAST)
    _check(image, torch.randn(37, 20, 1, 1), activation, in_place)
    _check(image, torch.randn(20, 1, 3, 3), activation, in_place, groups=20, padding=(1, 1))


def test_pixels_of_any_sizes() -> None:
    """Remainders of tiles in rows and columns, sums of several blocks of terms, and several threads."""
    torch.manual_seed(0)
    for pixels, terms, columns in [(1, 3, 1), (11, 5, 15), (13, 1, 17), (25, 512, 33), (30, 1100, 48), (3000, 16, 70)]:
        image = torch.randn(1, terms, 1, pixels).to(memory_format=CHANNELS_LAST)
        _check(image, torch.randn(columns, terms, 1, 1))


def test_channels_of_any_geometry() -> None:
    """Strides, dilations and padding, also beyond the image; remainders of vectors."""
    torch.manual_seed(0)
    for channels, kernel, stride, padding, dilation in [
        (2, (3, 3), (1, 1), (1, 1), (1, 1)), (15, (5, 5), (2, 2), (2, 2), (1, 1)), (67, (1, 7), (1, 3), (0, 3), (1, 1)),
        (32, (3, 2), (2, 1), (4, 5), (2, 3)), (29, (3, 3), (1, 1), (0, 0), (1, 2)),
        (96, (7, 7), (1, 1), (3, 3), (1, 1)),
    ]:  # fmt: skip
        image = torch.randn(2, channels, 9, 14).to(memory_format=CHANNELS_LAST)
        geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": channels}
        _check(image, torch.randn(channels, 1, *kernel), "relu", **geometry)


def test_values_that_are_not_finite() -> None:
    """Activations of NaN, infinities and large values are eager's."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 200.0, -200.0, 88.5, -88.5, 0.0, -0.0, 1e-30])
    image = values.reshape(1, 1, 1, -1).to(memory_format=CHANNELS_LAST)
    for name, function in ACTIVATIONS.items():
        result, calls = _run(image, torch.ones(1, 1, 1, 1), None, None, name)
        expected = function(image)
        assert not (calls and HAS_LOOPS)
        if name == "silu":  # of minus infinity: NaN, or the limit 0
            result, expected = result[..., 3:], expected[..., 3:]
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-6, atol=1e-35)


def test_bfloat16() -> None:
    """Small images are converted; sums and activations are those of float32."""
    torch.manual_seed(0)
    image = torch.randn(2, 20, 5, 7).bfloat16().to(memory_format=CHANNELS_LAST)
    for in_place in (False, True):
        _check(image, torch.randn(37, 20, 1, 1).bfloat16(), "hardswish", in_place)
        _check(image, torch.randn(20, 1, 3, 3).bfloat16(), "relu", in_place, groups=20, padding=(1, 1))


def test_an_image_may_be_the_residual() -> None:
    """A sum of an image and its convolution in the image's memory."""
    torch.manual_seed(0)
    for weight, groups, padding in [(torch.randn(40, 40, 1, 1), 1, (0, 0)), (torch.randn(40, 1, 3, 3), 40, (1, 1))]:
        image = torch.randn(1, 40, 6, 6).to(memory_format=CHANNELS_LAST)
        expected = image + torch.conv2d(image, weight, padding=padding, groups=groups)
        geometry = ((1, 1), padding, (1, 1), groups)
        native.native_operator("frozen_convolution_")(image, image, weight, None, (), 0.0, *geometry, "none")
        torch.testing.assert_close(image, expected, rtol=1e-4, atol=1e-4)


def test_others_are_the_librarys() -> None:
    """Large images of bfloat16, contiguous images, grouped channels, strides, and a residual in another layout."""
    torch.manual_seed(0)
    image, weight = torch.randn(2, 32, 6, 6).to(memory_format=CHANNELS_LAST), torch.randn(32, 32, 1, 1)
    residual, large = torch.randn(2, 32, 6, 6), torch.randn(2, 128, 6, 6).to(memory_format=CHANNELS_LAST)
    for arguments in (
        (large.bfloat16(), torch.randn(128, 128, 1, 1).bfloat16(), None, None),
        (image.contiguous(), weight, None, None),
        (image, weight[:, :16], None, None, (1, 1), (0, 0), (1, 1), 2), (image, weight, None, None, (2, 2)),
        (image, weight, None, residual),
    ):  # fmt: skip
        first, second, bias, other, *geometry = arguments
        result, calls = _run(first, second, bias, other, "none", *geometry)  # type: ignore[arg-type]
        expected = torch.conv2d(first, second, bias, *geometry)  # type: ignore[arg-type]
        assert calls
        torch.testing.assert_close(result, expected if other is None else expected + other, rtol=2e-2, atol=2e-2)
