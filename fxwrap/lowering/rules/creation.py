"""Tensors made of numbers alone. Random numbers stay operator calls: they must be those that eager gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from fxwrap.loop_ir import INTEGERS, Number, Scalar, as_index
from fxwrap.lowering.definitions import Indices, Pointwise, Reader, pointwise
from fxwrap.lowering.rules.positions import choose, same
from fxwrap.lowering.rules.registry import Call
from fxwrap.lowering.rules.rows import kernel_rule
from fxwrap.symbolic import Size


def filled(sizes: Sequence[Size], dtype: torch.dtype, device: torch.device, value: Number | sympy.Basic) -> Pointwise:
    """Returns a tensor of one number."""
    return pointwise(sizes, dtype, device, lambda reader, indices: reader.number(value, dtype))


_VALUE_ARGUMENT = {
    "aten.scalar_tensor.default": 0,
    "aten.full.default": 1,
    "aten.full_like.default": 1,
    "aten.new_full.default": 2,
}
"""Which argument of an operator is the number that it fills with."""

_CONSTANTS = {
    f"aten.{name}.default": number
    for number, word in enumerate(("zeros", "ones"))
    for name in (word, f"{word}_like", f"new_{word}")
}
"""Operators that fill with a number that their name says."""


@kernel_rule(*_VALUE_ARGUMENT)
def _full(call: Call, *arguments: Any, **keywords: Any) -> Pointwise:
    position = _VALUE_ARGUMENT[call.name]
    value = arguments[position] if len(arguments) > position else keywords.get("fill_value", keywords.get("value"))
    return filled(call.sizes, call.dtype, call.device, value)


@kernel_rule(*_CONSTANTS)
def _constant(call: Call, *_: Any, **__: Any) -> Pointwise:
    return filled(call.sizes, call.dtype, call.device, _CONSTANTS[call.name])


@kernel_rule("aten.eye.default", "aten.eye.m")
def _eye(call: Call, *_: Any, **__: Any) -> Pointwise:
    dtype = call.dtype

    def body(reader: Reader, indices: Indices) -> Scalar:
        on_diagonal = same(reader, indices[0], indices[1])
        return choose(reader, on_diagonal, lambda: reader.number(1, dtype), lambda: reader.number(0, dtype))

    return pointwise(call.sizes, dtype, call.device, body)


# --- rows of numbers -------------------------------------------------------------------------------------------------


@kernel_rule("aten.arange.default")
def _arange(call: Call, end: Any, **_: Any) -> Any:
    return _progression(call, 0, 1)


@kernel_rule("aten.arange.start")
def _arange_from(call: Call, start: Any, end: Any, **_: Any) -> Any:
    return _progression(call, start, 1)


@kernel_rule("aten.arange.start_step")
def _arange_by(call: Call, start: Any, end: Any, step: Any = 1, **_: Any) -> Any:
    return _progression(call, start, step)


@kernel_rule("prims.iota.default")
def _iota(call: Call, length: Any, *, start: Any, step: Any, **_: Any) -> Any:
    return _progression(call, start, step)


def _progression(call: Call, start: Any, step: Any) -> Pointwise | str:
    """Returns start, start + step, start + 2*step...; exact integers wherever the numbers are whole.

    A float progression is computed in float64, as eager does on the CPU, so that it does not drift.
    """
    dtype = call.dtype
    if dtype in INTEGERS and _is_number(start) and _is_number(step):
        start, step = int(start), int(step)
    if not _whole(step):
        return _float_progression(call, start, step)
    if not _whole(start):
        return _float_progression(call, start, step) if _is_number(start) else _from_symbolic(call, start, int(step))
    first, each = int(start), int(step)
    return pointwise(
        call.sizes, dtype, call.device,
        lambda reader, indices: reader.body.index(as_index(indices[0]) * each + first),
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    """Whether a value is a number that is known when the program is made."""
    return isinstance(value, int | float)


def _whole(number: Any) -> bool:
    return _is_number(number) and float(number).is_integer()


def _from_symbolic(call: Call, start: sympy.Expr, step: int) -> Pointwise | str:
    if not start.is_integer:
        return "it starts at a symbolic float"

    def body(reader: Reader, indices: Indices) -> Scalar:
        # The start is a number and no part of the index: its sign is not known, as that of sizes is.
        return reader.body.index(as_index(indices[0]) * step) + reader.number(start, torch.int64)

    return pointwise(call.sizes, call.dtype, call.device, body)


def _float_progression(call: Call, start: Any, step: Any) -> Pointwise:
    if call.dtype in INTEGERS:
        computes = torch.int64  # a number is symbolic: eager converts numbers to the dtype first
    else:
        computes = torch.float64 if call.spec.rounds_as_cpu or call.dtype is torch.float64 else torch.float32

    def body(reader: Reader, indices: Indices) -> Scalar:
        position = reader.body.index(indices[0]).to(computes)
        return reader.number(start, computes) + reader.number(step, computes) * position

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten.linspace.default")
def _linspace(call: Call, start: Any, end: Any, steps: Any, **_: Any) -> Any:
    """Counts from the nearer end, so that both ends are exact."""
    if not (_is_number(start) and _is_number(end) and isinstance(steps, int)):
        return "an end or the number of steps is symbolic"
    dtype = call.dtype
    if dtype in INTEGERS:
        start, end = int(start), int(end)
    computes = torch.float32 if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float64
    step = (end - start) / max(steps - 1, 1)

    def body(reader: Reader, indices: Indices) -> Scalar:
        number, index = reader.number, as_index(indices[0])
        first = number(start, computes) + number(step, computes) * reader.body.index(index).to(computes)
        back = reader.body.index(as_index(steps - 1) - index).to(computes)
        last = number(end, computes) - number(step, computes) * back
        return first if steps == 1 else (reader.body.index(index) < steps // 2).where(first, last)

    return pointwise(call.sizes, dtype, call.device, body)
