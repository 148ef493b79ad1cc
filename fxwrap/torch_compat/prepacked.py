"""Calls of libraries that torch has no public operators for: oneDNN's and MKL's weights, and cuDNN's epilogues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fxwrap.torch_compat.processor import multiplies_bytes_exactly


@cache
def _has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
    operators: Any = torch.ops.mkldnn
    return bool(torch.backends.mkldnn.is_available() and operators._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


def packs_for_rows(dtype: torch.dtype) -> bool:
    """Whether the fastest packed weight of a dtype is for one number of rows: MKL's on processors of Intel.

    Why: as for `prepack_linear_weight`.
    """
    return dtype is torch.float32 and _is_intel() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


@cache
def _is_intel() -> bool:
    """Whether MKL has code for this processor: on others its matmuls of float32 are slower than oneDNN's."""
    with Path("/proc/cpuinfo").open() as file:
        return "GenuineIntel" in next((line for line in file if line.startswith("vendor_id")), "")


def prepack_linear_weight(weight: torch.Tensor, rows: int | None) -> torch.Tensor | None:
    """Returns a weight of shape (columns, terms) in a library's layout: MKL's for so many rows, else oneDNN's for any.

    None if torch has no library for its dtype. The result is opaque: only `prepacked_linear` reads it.

    Why: torch has public operators for neither library's packed matmuls.
    """
    mkl: Any = torch.ops.mkl
    onednn: Any = torch.ops.mkldnn
    packed: torch.Tensor | None = None
    if rows is not None:
        packed = mkl._mkl_reorder_linear_weight(weight.contiguous(), rows)
    elif _has_bfloat16() if weight.dtype is torch.bfloat16 else _has_float32(weight.dtype):
        packed = onednn._reorder_linear_weight(weight.contiguous())
    return packed


def _has_float32(dtype: torch.dtype) -> bool:
    return dtype is torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def prepacked_linear(
    left: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int | None
) -> torch.Tensor:
    """Returns `left @ weight.t() + bias` by the packed form of the weight for so many rows, or for any."""
    result: torch.Tensor
    if rows is not None:
        result = torch.ops.mkl._mkl_linear(left, packed, weight, bias, rows)
    else:
        result = torch.ops.mkldnn._linear_pointwise(left, packed, bias, "none", [], "")
    return result


def prepack_int8_weight(weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Returns an int8 weight of shape (columns, terms) in oneDNN's layout, and its scales and zeros: ones and zeros.

    None where torch has no oneDNN, or its sums are not exact. The result is opaque: only `prepacked_int8_linear` reads
    it.

    Why: as for `prepack_linear_weight`.
    """
    if not torch.backends.mkldnn.is_available() or not multiplies_bytes_exactly():  # type: ignore[no-untyped-call]
        return None
    packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed, torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.int32)


def prepacked_int8_linear(rows: torch.Tensor, packed: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the product of uint8 rows minus 128 and a packed weight, in float32.

    Why: as for `prepack_linear_weight`.
    """
    result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, 128, *packed, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return result


def int8_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns the int32 product of int8 matrices.

    Why: torch publishes no function for it.
    """
    return torch._int_mm(left, right)


def onednn_linear(left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """Returns `left @ weight.t() + bias`, the bias added to accumulators; None where oneDNN lacks the dtype.

    Why: `torch.addmm` copies the bias into each row of the result, to which oneDNN then adds.
    """
    if left.dtype is not torch.bfloat16 or not _has_bfloat16():
        return None
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, bias, "none", [], "")
    return result


@dataclass(frozen=True)
class ConvolutionGeometry:
    """The numbers of a convolution that is not transposed: one of each for each dimension of the image, and groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """The numbers as torch's and cuDNN's operators take them; oneDNN's take the padding first."""
        return self.stride, self.padding, self.dilation, self.groups


def prepack_convolution_weight(
    weight: torch.Tensor, geometry: ConvolutionGeometry, image_sizes: Sequence[int]
) -> torch.Tensor | None:
    """Returns a weight in oneDNN's layout for images of these sizes; None without oneDNN for its dtype.

    The result is opaque: only `prepacked_convolution` reads it.

    Why: as for `prepack_linear_weight`.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if weight.dtype is torch.bfloat16 and not _has_bfloat16():
        return None
    packed: torch.Tensor = torch.ops.aten.mkldnn_reorder_conv2d_weight(
        weight.to_mkldnn(), geometry.padding, geometry.stride, geometry.dilation, geometry.groups, image_sizes
    )
    return packed


ACTIVATIONS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "none": ("none", ()),
    "relu": ("relu", ()),
    "relu6": ("hardtanh", (0.0, 6.0)),
    "hardswish": ("hardswish", ()),
    "silu": ("swish", ()),
    "sigmoid": ("sigmoid", ()),
}
"""The activations that oneDNN computes of its accumulators: its name of each, and its numbers."""


def prepacked_convolution(
    image: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, geometry: ConvolutionGeometry, activation: str
) -> torch.Tensor:
    """Returns an activation of a convolution by the packed form of its weight.

    The bias may be of float32 although the image is of bfloat16.
    """
    operators: Any = torch.ops.mkldnn
    name, scalars = ACTIVATIONS[activation]
    result: torch.Tensor = operators._convolution_pointwise(
        image, packed, bias, *_onednn_numbers(geometry), name, scalars, ""
    )
    return result


def prepacked_convolution_sum(
    image: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: ConvolutionGeometry,
    residual: torch.Tensor,
    relu: bool,
    in_place: bool,
) -> torch.Tensor:
    """Returns a convolution by the packed form of its weight plus a tensor, or its positive part if `relu`.

    `in_place` computes it in the memory of the tensor.
    """
    operators: Any = torch.ops.mkldnn
    numbers = (*_onednn_numbers(geometry), "add", 1.0, "relu" if relu else None, [], None)
    result: torch.Tensor
    if in_place:
        result = operators._convolution_pointwise_.binary(residual, image, packed, bias, *numbers)
    else:
        result = operators._convolution_pointwise.binary(image, residual, packed, bias, *numbers)
    return result


def _onednn_numbers(geometry: ConvolutionGeometry) -> tuple[object, ...]:
    return geometry.padding, geometry.stride, geometry.dilation, geometry.groups


def fused_convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: ConvolutionGeometry,
    residual: torch.Tensor | None,
) -> torch.Tensor | None:
    """Returns the positive part of a convolution, plus a tensor of its layout, by one call of cuDNN.

    None where the device's library has no such call.

    Why: torch has no public operators for cuDNN's epilogues.
    """
    has_cudnn: bool = torch.version.hip is None and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    if image.device.type != "cuda" or not has_cudnn:
        return None
    operators: Any = torch.ops.aten
    result: torch.Tensor
    if residual is None:
        result = operators.cudnn_convolution_relu(image, weight, bias, *geometry.arguments)
    else:
        result = operators.cudnn_convolution_add_relu(image, weight, residual, 1.0, bias, *geometry.arguments)
    return result
