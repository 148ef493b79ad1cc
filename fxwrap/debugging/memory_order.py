"""Elements of tensors in the order of their memory.

A pass that folds views into a value changes its sizes and strides, and not the content of its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxwrap.errors import ExpressionError
from fxwrap.symbolic import Number, evaluate_size
from fxwrap.wrapper_ir import TensorType


def in_memory_order(tensor: Tensor, layout: Sequence[int] | None = None) -> Tensor | None:
    """Returns a flat tensor of the elements in the order of memory, None if memory has gaps or shared elements.

    `layout` are the strides of another tensor with these sizes, whose order counts instead of the tensor's own.
    """
    strides = tuple(tensor.stride() if layout is None else layout)
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] > 1, -strides[dim], dim))
    laid_out = torch.empty_strided(tensor.shape, strides, device="meta").permute(order)
    return tensor.permute(order).reshape(-1) if laid_out.is_contiguous() else None


def strides_of(type_: TensorType, symbols: Mapping[str, Number]) -> tuple[int, ...] | None:
    """Returns the strides of a type, None if they have unknown symbols."""
    try:
        return tuple([evaluate_size(stride, symbols) for stride in type_.strides])
    except (ExpressionError, ArithmeticError, KeyError):
        return None
