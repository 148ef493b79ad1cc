"""Pointwise operators: a formula on scalars and a promotion rule each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from fxwrap.loop_ir import KERNEL_DTYPES, Scalar, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Pointwise, Reader, broadcast_indices, pointwise
from fxwrap.lowering.rules.registry import RULES, Call
from fxwrap.torch_compat import PROMOTION_KINDS, elementwise_dtypes


def elementwise(call: Call, operands: Sequence[Any], promotion: str, formula: Callable[..., Scalar]) -> Pointwise | str:
    """Returns a formula applied to operands that are broadcast against one another and promoted as torch does.

    `promotion` names torch's rule: "DEFAULT", "NO_OPMATH", "INT_TO_FLOAT", "ALWAYS_BOOL", "COMPLEX_TO_FLOAT" or
    "BOOL_TO_LONG". The formula takes a scalar for each operand, in the promoted compute dtype.
    """
    dtype = computation_dtype(operands, promotion)
    if dtype not in KERNEL_DTYPES or call.dtype not in KERNEL_DTYPES:
        return f"kernels do not compute in {dtype}"
    computes = compute_dtype(dtype)

    def body(reader: Reader, indices: Indices) -> Scalar:
        return formula(*[element(reader, operand, indices, computes) for operand in operands])

    return pointwise(call.sizes, call.dtype, call.device, body)


def element(reader: Reader, operand: Any, indices: Indices, dtype: torch.dtype) -> Scalar:
    """Returns an operand's element at the indices of a result that it is broadcast to; a number is itself."""
    if isinstance(operand, Definition):
        return reader.load(operand, broadcast_indices(operand.sizes, indices)).to(dtype)
    return reader.number(operand, dtype)


def computation_dtype(operands: Sequence[Any], promotion: str) -> torch.dtype:
    """Returns the dtype torch promotes operands to before it computes."""
    examples = [_example(operand) for operand in operands]
    return elementwise_dtypes(*examples, type_promotion_kind=PROMOTION_KINDS[promotion])[0]


def _example(operand: Any) -> Any:
    """Returns what promotion looks at: a meta tensor of the same dtype and rank kind, or a number of the same kind."""
    if isinstance(operand, Definition):
        return torch.empty((1,) * len(operand.sizes), dtype=operand.dtype, device="meta")
    if isinstance(operand, sympy.Basic):
        return 1.0 if operand.is_integer is False else 1
    return operand


def _gelu(x: Scalar, approximate: str = "none") -> Scalar:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


def _simple(name: str, operand_count: int, promotion: str, formula: Callable[..., Scalar]) -> None:
    """Registers an operator whose first arguments are its operands and whose others the formula takes by keyword."""

    def lowered(call: Call) -> Any:
        operands, others = call.arguments[:operand_count], call.arguments[operand_count:]
        return elementwise(call, operands, promotion, lambda *scalars: formula(*scalars, *others, **call.keywords))

    RULES[name] = lowered


def _add(x: Scalar, y: Scalar, alpha: Any = 1) -> Scalar:
    return x + (y if alpha == 1 else y * alpha)


for _name, _count, _promotion, _formula in (
    ("aten.gelu.default", 1, "DEFAULT", _gelu),
    ("aten.add.Tensor", 2, "DEFAULT", _add),
    ("aten.mul.Tensor", 2, "DEFAULT", lambda x, y: x * y),
    ("aten.tanh.default", 1, "INT_TO_FLOAT", lambda x: x.tanh()),
):
    _simple(_name, _count, _promotion, _formula)
