"""Matmuls and convolutions with frozen weights, which are converted to the library's layout at their first call.

These are the implementations of processes without the C++ bridge, which has its own of all of them
(`native/libraries/prepacked.cpp`): a call in Python takes longer than a small convolution.

The converted forms are cached by the weight, and by the memory and the version of all tensors that they were computed
from. So a write into a weight converts it again, unless the write evades torch's version counter
(`weight.data.add_(1)`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxwrap.torch_compat import (
    ConvolutionGeometry,
    fused_convolution,
    int8_matmul,
    onednn_linear,
    packs_for_rows,
    prepack_convolution_weight,
    prepack_int8_weight,
    prepack_linear_weight,
    prepacked_convolution,
    prepacked_convolution_sum,
    version_of,
)
from fxwrap.torch_compat import prepacked_int8_linear as library_int8_linear
from fxwrap.torch_compat import prepacked_linear as library_linear

_MOST_FORMS = 4
"""The converted forms of a weight, such as those for several numbers of rows, that are cached at a time."""

_FEW_PIXELS = 64
"""oneDNN's layout of a convolution's weight is one for images of so many pixels, and may be another for smaller ones.

It rearranges a weight in another layout in each call.
"""

_Content: TypeAlias = tuple[tuple[int, int], ...]
_Form: TypeAlias = tuple[torch.Tensor | None, ...]

_lock = threading.Lock()
_cache: MutableMapping[torch.Tensor, OrderedDict[Hashable, tuple[_Content, _Form]]] = WeakTensorKeyDictionary()


def _form(sources: Sequence[torch.Tensor], variant: Hashable, convert: Callable[[], _Form]) -> _Form:
    """Returns the converted form of a weight, the first of `sources`; it is cached while none of them is written."""
    content = tuple([(item.data_ptr(), 0 if item.is_inference() else version_of(item)) for item in sources])
    with _lock:
        forms = _cache.get(sources[0])
        if forms is None:
            forms = _cache[sources[0]] = OrderedDict()
        cached = forms.get(variant)
        if cached is not None and cached[0] == content:
            return cached[1]
        with torch.no_grad():
            form = convert()
        forms[variant] = content, form
        if len(forms) > _MOST_FORMS:
            forms.popitem(last=False)
        return form


def forget_forms() -> None:
    """Frees all converted forms: of calls before the bridge was compiled, which has its own."""
    with _lock:
        _cache.clear()


def prepacked_linear(
    left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool, rows: int | None = None
) -> torch.Tensor:
    """Returns `left @ weight + bias`, of `weight.t()` if `transposed`: contiguous matrices, and a vector or None.

    The weight's layout may be for the number of rows if this is static: `rows`.
    """
    columns_first = weight if transposed else weight.t()
    rows = rows if packs_for_rows(weight.dtype) else None
    (packed,) = _form([weight], (rows, transposed), lambda: (prepack_linear_weight(columns_first, rows),))
    with torch.no_grad():
        if packed is not None:
            return library_linear(left, packed, columns_first, bias, rows)
        right = columns_first.t()
        return left @ right if bias is None else torch.addmm(bias, left, right)


def biased_linear(left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Returns `left @ weight + bias`, of `weight.t()` if `transposed`; the weight may change between calls."""
    columns_first = weight if transposed else weight.t()
    with torch.no_grad():
        result = onednn_linear(left, columns_first, bias)
        return torch.addmm(bias, left, columns_first.t()) if result is None else result


def prepacked_int8_linear(rows: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Returns `(rows - 128) @ weight` in float32, of `weight.t()` if `transposed`: uint8 and int8 matrices."""
    columns_first = weight if transposed else weight.t()
    form = _form([weight], ("int8", transposed), lambda: prepack_int8_weight(columns_first) or ())
    packed = [item for item in form if item is not None]
    with torch.no_grad():
        if packed:
            return library_int8_linear(rows, packed)
        signed = (rows ^ 128).view(torch.int8)
        return int8_matmul(signed, columns_first.t()).float()


def prepacked_int8_linear_fake(rows: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The fake implementation: a contiguous matrix."""
    return rows.new_empty(rows.shape[0], weight.shape[0 if transposed else 1], dtype=torch.float32)


def linear_fake(
    left: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None, transposed: bool, _rows: int | None = None
) -> torch.Tensor:
    """The fake implementation of both: a contiguous matrix."""
    return left.new_empty(left.shape[0], weight.shape[0 if transposed else 1])


def frozen_grouped_mm(
    rows: torch.Tensor, matrices: Sequence[torch.Tensor], transposed: bool, ends: torch.Tensor
) -> torch.Tensor:
    """Returns rows times the matrix of their group, by the device's library; the stack of the matrices is kept.

    Args:
        rows: of shape (rows, terms), sorted by group.
        matrices: for each group, of shape (terms, columns), or (columns, terms) if `transposed`.
        transposed: whether the matrices are transposed.
        ends: the position after the last row of each group, of int32 on the device.
    """
    (stack,) = _form(matrices, ("stack", len(matrices)), lambda: (torch.stack(tuple(matrices)),))
    assert stack is not None
    with torch.no_grad():
        return torch.nn.functional.grouped_mm(rows, stack.mT if transposed else stack, offs=ends)


def frozen_grouped_mm_fake(
    rows: torch.Tensor, matrices: Sequence[torch.Tensor], transposed: bool, _ends: torch.Tensor
) -> torch.Tensor:
    """The fake implementation: rows of the result are aligned."""
    return rows.new_empty(rows.shape[0], matrices[0].shape[0 if transposed else 1])


def frozen_convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Sequence[torch.Tensor],
    epsilon: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    residual: torch.Tensor | None,
    activation: str,
    strides: Sequence[int],
) -> torch.Tensor:
    """Returns a convolution, with batch norm's statistics and affine parameters `norm` folded into its weight and bias.

    The weight's layout is for images of any number and lengths, unless they are small.
    `norm` holds weight, bias, mean and variance, or nothing. Then adds `residual`, which has the result's layout, and
    applies the activation, one of `torch_compat.ACTIVATIONS`. The result has these strides. oneDNN adds a folded bias
    in float32, except with a residual, whose sum then has one rounding less than eager's.
    """
    geometry = ConvolutionGeometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    with torch.no_grad():
        result = _convolution(image, weight, bias, norm, epsilon, geometry, residual, activation)
        return _with_strides(result, strides)


def frozen_convolution_(
    residual: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Sequence[torch.Tensor],
    epsilon: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> None:
    """Computes `frozen_convolution` with a residual in the memory of that."""
    geometry = ConvolutionGeometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    with torch.no_grad():
        result = _convolution(image, weight, bias, norm, epsilon, geometry, residual, activation, in_place=True)
        if result is not residual:
            residual.copy_(result)


def _convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Sequence[torch.Tensor],
    epsilon: float,
    geometry: ConvolutionGeometry,
    residual: torch.Tensor | None,
    activation: str,
    in_place: bool = False,
) -> torch.Tensor:
    """Returns the result of `frozen_convolution` in any layout, perhaps in the memory of the residual if `in_place`."""
    is_channels_last = image.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if is_channels_last else torch.contiguous_format

    def convert() -> _Form:
        folded, shift = folded_batch_norm(weight, bias, norm, epsilon)
        folded = folded.contiguous(memory_format=layout)
        packed = prepack_convolution_weight(folded, geometry, (max(1, len(image)), *image.shape[1:]))
        if shift is not None and (packed is None or residual is not None):
            shift = shift.to(weight.dtype)
        # The cache must not own the weight, whose end frees its entry.
        return packed, None if packed is not None or folded is weight else folded, shift

    sources = [weight, *([] if bias is None else [bias]), *norm]
    variant = (geometry, image.shape[2:].numel() < _FEW_PIXELS, epsilon, layout, residual is None)
    packed, folded, shift = _form(sources, variant, convert)
    if packed is None:
        return _plain_convolution(image, weight if folded is None else folded, shift, geometry, residual, activation)
    if residual is None:
        return prepacked_convolution(image, packed, shift, geometry, activation)
    has_relu = activation == "relu"
    result = prepacked_convolution_sum(image, packed, shift, geometry, residual, has_relu, in_place)
    return result if has_relu else _ACTIVATIONS[activation](result)


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda value: value,
    "relu": torch.relu_,
    "relu6": partial(torch.nn.functional.relu6, inplace=True),
    "hardswish": partial(torch.nn.functional.hardswish, inplace=True),
    "silu": partial(torch.nn.functional.silu, inplace=True),
    "sigmoid": torch.sigmoid_,
}
"""Activations of tensors of one's own, in their memory."""


def _plain_convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: ConvolutionGeometry,
    residual: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """Returns a convolution with what follows it, in one call where the device's library has one."""
    result = fused_convolution(image, weight, bias, geometry, residual) if activation == "relu" else None
    if result is not None:
        return result
    result = torch.conv2d(image, weight, bias, *geometry.arguments)
    if residual is not None:
        result.add_(residual)
    return _ACTIVATIONS[activation](result)


def _with_strides(result: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Returns a tensor with these strides: itself, or a copy if the library chose another layout."""
    sizes, own = result.shape, result.stride()
    if all(one == other or size == 1 for size, one, other in zip(sizes, own, strides, strict=True)):
        return result if own == tuple(strides) else result.as_strided(sizes, strides)
    return torch.empty_strided(sizes, strides, dtype=result.dtype, device=result.device).copy_(result)


def folded_batch_norm(
    weight: torch.Tensor, bias: torch.Tensor | None, norm: Sequence[torch.Tensor], epsilon: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of the convolution that computes a convolution and the batch norm after it.

    A bias of a norm is at least of float32: that of half precision would be rounded twice.
    """
    if not norm:
        return weight, bias
    scale, offset, mean, variance = [item.double() for item in norm]
    factor = scale * (variance + epsilon).rsqrt()
    shift = offset - mean * factor if bias is None else offset + (bias.double() - mean) * factor
    precision = torch.promote_types(weight.dtype, torch.float32)
    return (weight.double() * factor.reshape(-1, 1, 1, 1)).to(weight.dtype), shift.to(precision)


def frozen_convolution_fake(
    image: torch.Tensor,
    weight: torch.Tensor,
    _bias: torch.Tensor | None,
    _norm: Sequence[torch.Tensor],
    _epsilon: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    _groups: int,
    _residual: torch.Tensor | None,
    _activation: str,
    strides: Sequence[int],
) -> torch.Tensor:
    """The fake implementation."""
    lengths = [
        (length + 2 * pad - space * (size - 1) - 1) // step + 1
        for length, size, step, pad, space in zip(image.shape[2:], weight.shape[2:], stride, padding, dilation)
    ]
    return image.new_empty_strided((image.shape[0], weight.shape[0], *lengths), tuple(strides))
