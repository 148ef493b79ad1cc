"""Tensors computed from numbers alone. Random tensors stay extern calls, because they must equal eager's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from typing_extensions import TypeIs

from fxwrap.loop_ir import INTEGERS, Scalar, as_index
from fxwrap.lowering.fusion.definitions import ElementReader, Indices, Pointwise, pointwise
from fxwrap.lowering.rules.indexing_common import index_equal, masked_where
from fxwrap.lowering.rules.registry import Declined, LoweringResult, NumberOrSymbol, OperatorCall, lowering_rule
from fxwrap.symbolic import Size


def full_tensor(sizes: Sequence[Size], dtype: torch.dtype, device: torch.device, value: NumberOrSymbol) -> Pointwise:
    """Returns a tensor filled with one number."""
    return pointwise(sizes, dtype, device, lambda reader, indices: reader.number(value, dtype))


@lowering_rule("aten.full.default", "aten.full_like.default", "aten.new_full.default", "aten.scalar_tensor.default")
def _full(call: OperatorCall) -> LoweringResult:
    arguments = call.bind()
    value = arguments["s" if call.operator == "scalar_tensor" else "fill_value"]
    return full_tensor(call.sizes, call.dtype, call.device, value)


CONSTANT_FILLS = {
    f"aten.{name}.default": number
    for number, word in enumerate(("zeros", "ones"))
    for name in (word, f"{word}_like", f"new_{word}")
}
"""Operators that fill with the number of their name."""


@lowering_rule(*CONSTANT_FILLS)
def _constant(call: OperatorCall) -> LoweringResult:
    return full_tensor(call.sizes, call.dtype, call.device, CONSTANT_FILLS[call.name])


@lowering_rule("aten.eye.default", "aten.eye.m")
def _eye(call: OperatorCall) -> LoweringResult:
    dtype = call.dtype

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        on_diagonal = index_equal(reader, indices[0], indices[1])
        return masked_where(reader, on_diagonal, lambda: reader.number(1, dtype), lambda: reader.number(0, dtype))

    return call.define(body)


# --- ranges ----------------------------------------------------------------------------------------------------------


@lowering_rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "prims.iota.default")
def _arange(call: OperatorCall) -> LoweringResult:
    """Computes start + i * step, in exact integers where both are whole numbers.

    A float range is computed in float64, as eager does on the CPU, so that it does not drift.
    """
    arguments = call.bind()
    start: NumberOrSymbol = arguments.get("start", 0)
    step: NumberOrSymbol = arguments.get("step", 1)
    _check_not_bool(call)
    if call.dtype in INTEGERS and _is_known(start) and _is_known(step):
        start, step = int(start), int(step)
    if not _is_whole(step) or (_is_known(start) and not _is_whole(start)):
        return _float_range(call, start, step)
    each = int(step)
    if _is_known(start):
        first = int(start)
        return call.define(lambda reader, indices: reader.body.index(as_index(indices[0]) * each + first))
    if not start.is_integer:
        raise Declined("it starts at a symbolic float")
    # The start is added as a number: an index may contain sizes only, and the start's sign is unknown.
    return call.define(
        lambda reader, indices: reader.body.index(as_index(indices[0]) * each) + reader.number(start, torch.int64)
    )


def _check_not_bool(call: OperatorCall) -> None:
    if call.dtype is torch.bool:
        raise Declined("eager mode has no ranges of torch.bool")


def _is_known(value: NumberOrSymbol) -> TypeIs[int | float]:
    return isinstance(value, int | float)


def _is_whole(value: NumberOrSymbol) -> TypeGuard[int | float]:
    return _is_known(value) and float(value).is_integer()


def _float_range(call: OperatorCall, start: NumberOrSymbol, step: NumberOrSymbol) -> Pointwise:
    if call.dtype in INTEGERS:
        computes = torch.int64  # eager first converts symbolic numbers to the dtype
    else:
        computes = torch.float64 if call.spec.cpu_rounding or call.dtype is torch.float64 else torch.float32

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        position = reader.body.index(indices[0]).to(computes)
        return reader.number(start, computes) + reader.number(step, computes) * position

    return call.define(body)


@lowering_rule("aten.linspace.default")
def _linspace(call: OperatorCall, start: NumberOrSymbol, end: NumberOrSymbol, steps: Size) -> LoweringResult:
    """Counts from the nearer end, so that both ends are exact."""
    if not (_is_known(start) and _is_known(end) and isinstance(steps, int)):
        raise Declined("an end or the number of steps is symbolic")
    _check_not_bool(call)
    dtype, count = call.dtype, steps
    first, last = (int(start), int(end)) if dtype in INTEGERS else (start, end)
    computes = torch.float32 if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float64
    step = (last - first) / max(count - 1, 1)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        number, index = reader.number, as_index(indices[0])
        forward = number(first, computes) + number(step, computes) * reader.body.index(index).to(computes)
        distance = reader.body.index(as_index(count - 1) - index).to(computes)
        backward = number(last, computes) - number(step, computes) * distance
        return forward if count == 1 else (reader.body.index(index) < count // 2).where(forward, backward)

    return call.define(body)
