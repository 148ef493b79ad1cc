"""Copies, casts, fills and selection between tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxwrap.loop_ir import Scalar
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices
from fxwrap.lowering.rules.pointwise import Operand, check_operands, elementwise, fits, load_operand, promoted_dtype
from fxwrap.lowering.rules.registry import (
    Declined,
    LoweringResult,
    NumberOrSymbol,
    OperatorCall,
    TensorOrNumber,
    lowering_rule,
)

# --- copies ----------------------------------------------------------------------------------------------------------


@lowering_rule("aten.clone.default", "prims.convert_element_type.default", dtypes="stored")
def _cast(call: OperatorCall, x: TensorOrNumber) -> LoweringResult:
    """A cast to half precision rounds inside a kernel too, because the model requests it.

    In functions that `torch.vmap` vectorises, numbers are cast too.
    """
    if isinstance(x, Definition) and x.device != call.device:
        raise Declined(f"a copy from {x.device} to {call.device}")
    check_operands(call, (x,), call.dtype, "stored")
    return call.define(lambda reader, indices: load_operand(reader, x, indices, call.dtype))


@lowering_rule("aten._to_copy.default", dtypes="stored")
def _to_copy(
    call: OperatorCall, x: TensorOrNumber, layout: torch.layout | None, pin_memory: bool | None
) -> LoweringResult:
    if layout not in (None, torch.strided):
        raise Declined(f"a copy to the layout {layout}")
    if pin_memory:
        raise Declined("a copy to pinned memory")
    return _cast(call, x)


@lowering_rule("aten.copy.default", dtypes="stored")
def _copy(call: OperatorCall, x: Definition, source: Definition) -> LoweringResult:
    return _cast(call, source)


# --- fills -----------------------------------------------------------------------------------------------------------


@lowering_rule("aten.fill.Scalar", "aten.fill.Tensor")
def _fill(call: OperatorCall, x: Definition, value: TensorOrNumber) -> LoweringResult:
    _check_value(call, (value,), value)
    return call.define(lambda reader, indices: load_operand(reader, value, indices, call.dtype))


@lowering_rule("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(call: OperatorCall, x: Definition, mask: Definition, value: TensorOrNumber) -> LoweringResult:
    def body(reader: ElementReader, indices: Indices) -> Scalar:
        condition = load_operand(reader, mask, indices, torch.bool)
        filling = load_operand(reader, value, indices, call.dtype)
        return condition.where(filling, load_operand(reader, x, indices, call.dtype))

    _check_value(call, (x, mask, value), value)
    return call.define(body)


def _check_value(call: OperatorCall, operands: Sequence[Operand], value: TensorOrNumber) -> None:
    """Declines a number that the filled tensor cannot hold: eager raises for it."""
    check_operands(call, operands, call.dtype)
    if not fits(value, call.dtype):
        raise Declined(f"the number {value} is out of the range of {call.dtype}")


# --- selection -------------------------------------------------------------------------------------------------------


@lowering_rule("aten.where.self")
def _where(call: OperatorCall, condition: Definition, x: Definition, y: Definition) -> LoweringResult:
    dtype = promoted_dtype((x, y))

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        chosen = load_operand(reader, condition, indices, torch.bool)
        return chosen.where(load_operand(reader, x, indices, dtype), load_operand(reader, y, indices, dtype))

    check_operands(call, (x, y), dtype)
    check_operands(call, (condition,), torch.bool)
    return call.define(body)


@lowering_rule("aten.native_dropout_backward.default")
def _dropout_backward(
    call: OperatorCall, gradient: Definition, mask: Definition, scale: NumberOrSymbol
) -> LoweringResult:
    return elementwise(call, (gradient, mask), lambda g, mask, s: g * mask * s, dtypes="float", parameters=(scale,))
