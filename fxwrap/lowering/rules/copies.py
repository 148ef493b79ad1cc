"""Copies, casts, fills and choices between tensors."""

from __future__ import annotations

from typing import Any

import torch

from fxwrap.loop_ir import Scalar
from fxwrap.lowering.definitions import Definition, Indices, Reader, pointwise
from fxwrap.lowering.rules.pointwise import (
    bound,
    element,
    elementwise,
    fits,
    promoted_dtype,
    refusal,
)
from fxwrap.lowering.rules.registry import Call, Result, rule

# --- copies ----------------------------------------------------------------------------------------------------------


@bound("aten.clone.default")
def _clone(call: Call, x: Definition, _: Any) -> Result | str:
    return _cast(call, x)


@bound("aten._to_copy.default")
def _to_copy(call: Call, x: Definition, _: Any, layout: Any, device: Any, pinned: Any, *__: Any) -> Result | str:
    if layout not in (None, torch.strided):
        return f"a copy to the layout {layout}"
    return "a copy to pinned memory" if pinned else _cast(call, x)


@rule("prims.convert_element_type.default")
def _convert(call: Call, x: Definition, _: torch.dtype) -> Result | str:
    return _cast(call, x)


@bound("aten.copy.default")
def _copy_of_another(call: Call, x: Definition, source: Definition, *_: Any) -> Result | str:
    return _cast(call, source)


def _cast(call: Call, x: Definition) -> Result | str:
    """Half precision rounds here, because the model asked for it; the same dtype changes nothing."""
    if x.device != call.device:
        return f"a copy from {x.device} to {call.device}"
    reason = refusal(call, (x,), call.dtype)
    if reason is not None:
        return reason

    def body(reader: Reader, indices: Indices) -> Scalar:
        return element(reader, x, indices, call.dtype)

    return pointwise(call.sizes, call.dtype, call.device, body)


# --- fills -----------------------------------------------------------------------------------------------------------


@bound("aten.fill.Scalar", "aten.fill.Tensor")
def _fill(call: Call, x: Definition, value: Any) -> Result | str:
    reason = _value_refusal(call, (value,), value)
    if reason is not None:
        return reason
    return pointwise(
        call.sizes, call.dtype, call.device, lambda reader, indices: element(reader, value, indices, call.dtype)
    )  # fmt: skip


@bound("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(call: Call, x: Definition, mask: Definition, value: Any) -> Result | str:
    reason = _value_refusal(call, (x, mask, value), value)
    if reason is not None:
        return reason

    def body(reader: Reader, indices: Indices) -> Scalar:
        condition = element(reader, mask, indices, torch.bool)
        filling = element(reader, value, indices, call.dtype)
        return condition.where(filling, element(reader, x, indices, call.dtype))

    return pointwise(call.sizes, call.dtype, call.device, body)


def _value_refusal(call: Call, operands: Any, value: Any) -> str | None:
    """A number has to fit into the tensor it is written to: eager raises for those that do not."""
    reason = refusal(call, operands, call.dtype)
    if reason is None and not isinstance(value, Definition) and not fits(value, call.dtype):
        return f"the number {value} is out of the range of {call.dtype}"
    return reason


# --- choices ---------------------------------------------------------------------------------------------------------


@bound("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(call: Call, condition: Definition, x: Any, y: Any) -> Result | str:
    dtype = promoted_dtype((x, y), "DEFAULT")
    reason = refusal(call, (x, y), dtype) or refusal(call, (condition,), torch.bool)
    if reason is not None:
        return reason

    def body(reader: Reader, indices: Indices) -> Scalar:
        chosen = element(reader, condition, indices, torch.bool)
        return chosen.where(element(reader, x, indices, dtype), element(reader, y, indices, dtype))

    return pointwise(call.sizes, call.dtype, call.device, body)


@bound("aten.native_dropout_backward.default")
def _dropout_backward(call: Call, gradient: Definition, mask: Definition, scale: Any) -> Result | str:
    return elementwise(
        call, (gradient, mask), "DEFAULT", lambda g, mask, scale: g * mask * scale, accepts="float", parameters=(scale,)
    )  # fmt: skip
