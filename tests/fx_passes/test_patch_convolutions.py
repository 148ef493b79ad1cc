"""Convolutions whose kernel is their stride are matmuls of patches, where the device has them faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export
from torch.nn import functional as F

from fxwrap.devices import CPU
from tests.lowering.planned_programs import STRICT, check, plan

NARROW = STRICT.replace(
    devices=(
        dataclasses.replace(
            CPU, convolutions=dataclasses.replace(CPU.convolutions, patch_matmul_widths=((torch.float32, 2),))
        ),
    )
)
"""Kernels of two columns are wide."""

CONVOLUTION = "aten.convolution.default"


def _embedding(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows, and the image, which has the strides that eager mode gives it."""
    image = F.conv2d(x, weight, bias, stride=weight.shape[2:])  # type: ignore[arg-type]
    return F.layer_norm(image.flatten(2).transpose(1, 2) + 1, weight.shape[:1]), image


def _operands(*kernel: int, outputs: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [count * size for count, size in zip((2, 3, 1), kernel, strict=False)]
    return torch.randn(2, 3, *sizes), torch.randn(outputs, 3, *kernel), torch.randn(outputs)


@pytest.mark.parametrize("channels_last", [(False, False), (True, False), (False, True)], ids=str)
def test_images(channels_last: tuple[bool, bool]) -> None:
    """The image and the weight are contiguous or channels-last; results have eager's strides."""
    x, weight, bias = _operands(4, 2)
    x, weight = [
        item.to(memory_format=torch.channels_last) if last else item
        for item, last in zip((x, weight), channels_last, strict=True)
    ]
    assert check(_embedding, x, weight, bias, options=NARROW).calls == ["aten.addmm.default"]


def test_other_numbers_of_dimensions() -> None:
    """A sequence, and images of one patch each, which need no copy."""
    x, weight, bias = _operands(4)
    assert check(lambda x, w, b: F.conv1d(x, w, b, 4), x, weight, bias, options=NARROW).calls == ["aten.addmm.default"]
    video = check(lambda x, w: F.conv3d(x, w, None, (2, 4, 4)).flatten(1),
                  torch.randn(6, 3, 2, 4, 4), torch.randn(7, 3, 2, 4, 4))  # fmt: skip
    assert video.calls == ["aten.mm.default"] and not video.launches


def test_images_of_one_pixel() -> None:
    """Those of squeeze-and-excitation are matmuls where these become kernels, with what follows them."""
    x, first, second = torch.randn(1, 12, 5, 5), torch.randn(6, 12, 1, 1), torch.randn(12, 6, 1, 1)
    bias = torch.randn(6)

    def gate(x: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
        squeezed = F.conv2d(x.mean((2, 3), keepdim=True), first, bias).relu()
        return x * F.hardsigmoid(F.conv2d(squeezed, second))

    for options in (STRICT, STRICT.replace(freeze=True)):
        assert not check(gate, x, first, second, bias, options=options).calls
    images = torch.randn(64, 12, 5, 5)
    assert check(gate, images, first, second, bias).calls == [CONVOLUTION] * 2


OTHERS: dict[str, Callable[..., Tensor]] = {
    "overlap": lambda x, w: F.conv2d(x, w, stride=2),
    "gaps": lambda x, w: F.conv2d(x, w, stride=6),
    "padding": lambda x, w: F.conv2d(x, w, stride=4, padding=2),
    "dilation": lambda x, w: F.conv2d(x, w, stride=4, dilation=2),
    "groups": lambda x, w: F.conv2d(x[:, :2], w[:2, :1], stride=4, groups=2),
    "transposed": lambda x, w: F.conv_transpose2d(x[:, :2], w[:2], stride=4),
    "remainder": lambda x, w: F.conv2d(x[..., 1:], w, stride=4),
    "one element": lambda x, w: F.conv2d(x, w[..., :1, :1]),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_stay(function: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(2, 3, 8, 12), torch.randn(5, 3, 4, 4)
    calls = check(function, x, weight, options=NARROW).calls
    assert calls == [CONVOLUTION] and calls == check(function, x, weight).calls


def test_where_it_is_chosen() -> None:
    """By the width of the kernel, the layout option and `preserve_ops`."""
    for kernel, options, target in [
        ((4, 16), STRICT, "aten.addmm.default"), ((16, 4), STRICT, CONVOLUTION), ((4, 4), NARROW, "aten.addmm.default"),
        ((4, 4), NARROW.replace(layout="preserve"), CONVOLUTION), ((4, 4), NARROW.replace(fuse=False), CONVOLUTION),
        ((4, 4), NARROW.replace(preserve_ops=(CONVOLUTION,)), CONVOLUTION),
    ]:  # fmt: skip
        assert target in check(_embedding, *_operands(*kernel), options=options).calls


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("needs_image", [False, True])
def test_training(needs_image: bool, channels_last: bool) -> None:
    """Gradients of weight and bias are a matmul and a sum; with that of the image, they are the convolution's."""

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        leaves = [item.detach().requires_grad_() for item in (weight, bias)]
        image = x.detach().requires_grad_(needs_image)
        rows, result = _embedding(image, *leaves)
        wanted = [*leaves, image] if needs_image else leaves
        return rows, *torch.autograd.grad(rows.sin().sum() + result.cos().sum(), wanted)

    x, weight, bias = _operands(4, 2)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    calls = check(step, x, weight, bias, options=NARROW).calls
    assert calls == ["aten.addmm.default", "aten.convolution_backward.default" if needs_image else "aten.mm.default"]


def test_symbolic_batches() -> None:
    """One program serves all numbers of images."""

    class Embedding(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return _embedding(x, weight, bias)

    inputs = _operands(4, 4)
    program = export(Embedding(), inputs, dynamic_shapes={"x": {0: Dim("batch", min=2)}, "weight": {}, "bias": {}})
    planned = plan(program, None, NARROW)  # type: ignore[arg-type]
    assert planned.calls == ["aten.addmm.default"]
    for batch in (2, 3):
        images = torch.randn(batch, *inputs[0].shape[1:])
        for result, expected in zip(planned.run([images, *inputs[1:]]), _embedding(images, *inputs[1:]), strict=True):
            torch.testing.assert_close(result, expected)
            assert result.stride() == expected.stride()
