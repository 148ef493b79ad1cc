"""Depthwise convolutions and their gradients as kernels, by the evaluator against eager mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.devices import CPU
from fxwrap.loop_ir import Kernel, Load, evaluate_kernel, share_windows, shared_windows
from fxwrap.options import Options
from tests.lowering.planned_programs import STRICT, check, plan

aten = torch.ops.aten
_WINDOWS = 125
_LIMITS = tuple([(dtype, (_WINDOWS, _WINDOWS, _WINDOWS)) for dtype in (torch.float32, torch.float64, torch.bfloat16)])


def _options(limits: tuple[tuple[torch.dtype, tuple[int, int, int]], ...]) -> Options:
    """Returns the options of a device whose kernels compute depthwise convolutions with windows up to some limits."""
    traits = dataclasses.replace(CPU.convolutions, depthwise_windows=limits, channels_last_dtypes=frozenset())
    return STRICT.replace(devices=(dataclasses.replace(CPU, massively_parallel=True, convolutions=traits),))


DEPTHWISE = _options(_LIMITS)
WITHOUT_WEIGHTS = _options(((torch.float32, (_WINDOWS, _WINDOWS, 0)),))
"""Those of a device where a library computes the gradients of weights faster."""

CONVOLUTIONS: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]]] = {
    "of 3": ((2, 3, 8, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    "with steps": ((2, 3, 7, 12), (3, 5), (2, 2), (1, 2), (1, 1)),
    "with steps larger than windows": ((1, 4, 9, 8), (2, 1), (3, 2), (0, 0), (1, 1)),
    "dilated": ((2, 2, 10, 8), (3, 2), (1, 2), (2, 1), (2, 3)),
    "without padding": ((1, 3, 6, 5), (5, 3), (1, 1), (0, 0), (1, 1)),
    "padded beyond the windows": ((1, 3, 5, 4), (2, 2), (2, 1), (1, 2), (1, 1)),
    "of a sequence": ((2, 5, 12), (4,), (1,), (3,), (1,)),
    "of a volume": ((1, 2, 4, 3, 5), (3, 1, 2), (1, 2, 1), (1, 0, 1), (1, 1, 1)),
    "of one row": ((3, 4, 1, 8), (1, 3), (1, 1), (0, 1), (1, 1)),
    "of an empty batch": ((0, 4, 4, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
}  # fmt: skip
"""The sizes of the image, and the kernel's sizes, strides, padding and dilation."""


def _operands(name: str, dtype: torch.dtype, channels_last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of a convolution's result, the image and the weight."""
    sizes, kernel, *windows = CONVOLUTIONS[name]
    image, weight = torch.randn(sizes).to(dtype), torch.randn(sizes[1], 1, *kernel).to(dtype)
    rank = len(kernel)
    gradient = torch.randn_like(aten.convolution(image, weight, None, *windows, False, [0] * rank, sizes[1]))
    if channels_last and rank == 2:
        gradient, image = [item.to(memory_format=torch.channels_last) for item in (gradient, image)]
    return gradient, image, weight


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, channels_last: bool) -> None:
    _, kernel, *windows = CONVOLUTIONS[name]
    for dtype in (torch.float32, torch.float64):
        _, image, weight = _operands(name, dtype, channels_last)
        bias = torch.randn(image.shape[1]).to(dtype)

        def convolution(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return aten.convolution(image, weight, bias, *windows, False, [0] * len(kernel), image.shape[1]).relu()

        planned = check(convolution, image, weight, bias, options=DEPTHWISE)
        assert not planned.calls and len(planned.launches) <= 2, "the rows of the weight, and the convolution"


@pytest.mark.parametrize("needed", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients(name: str, needed: Sequence[bool]) -> None:
    _, kernel, *windows = CONVOLUTIONS[name]
    operands = _operands(name, torch.float32, channels_last=needed[0])
    channels = operands[1].shape[1]

    def backward(gradient: Tensor, image: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        results = aten.convolution_backward(
            gradient, image, weight, [channels], *windows, False, [0] * len(kernel), channels, [*needed]
        )
        return tuple([item for item, is_needed in zip(results, needed, strict=True) if is_needed])

    assert not check(backward, *operands, options=DEPTHWISE).calls


def test_gradients_of_images_alone() -> None:
    """Where a library computes the gradient of the weight faster, its call computes that alone."""

    def backward(gradient: Tensor, image: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return aten.convolution_backward(
            gradient, image, weight, [3], [1, 1], [1, 1], [1, 1], False, [0, 0], 3, [True, True, True]
        )

    planned = check(backward, *_operands("of 3", torch.float32, False), options=WITHOUT_WEIGHTS)
    assert planned.calls == ["aten.convolution_backward.default"]
    assert "[false, true, true]" in str(planned.program) or "[false, true, false]" in str(planned.program)


def test_gradients_of_transposed_convolutions_stay_one_call() -> None:
    def backward(gradient: Tensor, image: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return aten.convolution_backward(
            gradient, image, weight, None, [1, 1], [1, 1], [1, 1], True, [0, 0], 3, [True, True, False]
        )[:2]

    planned = check(backward, *_operands("of 3", torch.float32, False), options=WITHOUT_WEIGHTS)
    assert planned.calls == ["aten.convolution_backward.default"]


@pytest.mark.parametrize(
    ("sizes", "filters", "groups", "transposed"),
    [
        ((2, 4, 8, 8), (8, 1, 3, 3), 4, False),  # two results of a channel
        ((2, 4, 8, 8), (4, 2, 3, 3), 2, False),
        ((2, 4, 8, 8), (4, 1, 3, 3), 4, True),
        ((2, 1, 8, 8), (1, 1, 3, 3), 1, False),
        ((2, 4, 11, 11), (4, 1, 3, 3), 4, False),  # no windows that share loads
        ((2, 4, 16, 16), (4, 1, 13, 13), 4, False),
    ],
)
def test_other_convolutions_are_calls(
    sizes: Sequence[int], filters: Sequence[int], groups: int, transposed: bool
) -> None:
    def convolution(image: Tensor, weight: Tensor) -> Tensor:
        return aten.convolution(image, weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)

    planned = check(convolution, torch.randn(*sizes), torch.randn(*filters), options=DEPTHWISE)
    assert planned.calls == ["aten.convolution.default"]


def test_values_that_are_not_finite() -> None:
    """They spread to the windows that cover them, and to no others."""
    _, image, weight = _operands("of 3", torch.float32, channels_last=False)
    image[0, 0, 0, 0], image[1, 2, 3, 3] = torch.inf, torch.nan

    def convolution(image: Tensor, weight: Tensor) -> Tensor:
        return aten.convolution(image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 3)

    graph = make_fx(convolution)(image, weight)
    (result,) = plan(graph, (image, weight), DEPTHWISE).run((image, weight))
    expected = convolution(image.double(), weight.double())
    assert torch.equal(result.isfinite(), expected.isfinite())


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if name != "of an empty batch"])
@pytest.mark.parametrize("kind", ["result", "image", "weight"])
def test_neighbouring_windows_share_loads(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, kernel, *windows = CONVOLUTIONS[name]
    operands = _operands(name, torch.float32, channels_last=True)
    channels = operands[1].shape[1]
    options = (*windows, False, [0] * len(kernel), channels)

    def compute(gradient: Tensor, image: Tensor, weight: Tensor) -> Tensor:
        if kind == "result":
            return aten.convolution(image, weight, None, *options)
        needed = [kind == "image", kind == "weight", False]
        return aten.convolution_backward(gradient, image, weight, None, *options, needed)[needed.index(True)]

    saved: list[float] = []

    def evaluate_shared(kernel: Kernel, *arguments: object) -> None:
        shared = share_windows(kernel, int)
        loads = [sum(isinstance(item, Load) for item in each.operations) for each in (kernel, shared)]
        points = [each.count * each.reduced_count for each in (kernel, shared)]
        saved.append(loads[1] * points[1] / (loads[0] * points[0]))
        evaluate_kernel(shared, *arguments)  # type: ignore[arg-type]

    planned = plan(make_fx(compute)(*operands), operands, DEPTHWISE)
    monkeypatch.setattr(shared_windows, "MIN_WINDOW_ITERATIONS", 1)
    (result,) = planned.run(operands, evaluate_shared)
    torch.testing.assert_close(result, compute(*[item.double() for item in operands]).float())
    if name == "of 3":
        assert min(saved) < 0.6
