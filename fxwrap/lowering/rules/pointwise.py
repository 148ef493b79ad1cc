"""Pointwise operators: broadcasting, type promotion and the rounding of Python numbers.

The operators are in `arithmetic`, `functions`, `activations`, `pointwise_losses` and `copies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

import sympy
import torch

from fxwrap.caching import bounded_cache
from fxwrap.loop_ir import FLOAT8, HALF_PRECISION, INTEGERS, STORAGE_ONLY, Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import (
    CpuScalar,
    Definition,
    ElementReader,
    Indices,
    Pointwise,
    broadcast_indices,
)
from fxwrap.lowering.rules.registry import (
    Declined,
    DtypeDomain,
    ElementBody,
    LoweringResult,
    OperatorCall,
    TensorOrNumber,
    check_dtype,
    lowering_rule,
)
from fxwrap.torch_compat import PROMOTION_KINDS, elementwise_dtypes

T = TypeVar("T")

Promotion: TypeAlias = Literal[
    "DEFAULT", "NO_OPMATH", "INT_TO_FLOAT", "ALWAYS_BOOL", "COMPLEX_TO_FLOAT", "BOOL_TO_LONG"
]
"""The names of `torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND`."""

NumberRounding: TypeAlias = Literal["rounded", "exact", "rounded on cpu"]
"""Whether an operator on half precision first rounds Python numbers to half precision."""

Operand: TypeAlias = TensorOrNumber | None

Parameter: TypeAlias = "Scalar | float"
"""A formula's argument that takes no part in promotion: a Python number, or a scalar when it is symbolic."""

# --- the formula of an operator --------------------------------------------------------------------------------------


def elementwise(
    call: OperatorCall,
    operands: Sequence[Operand],
    formula: Callable[..., Scalar],
    *,
    promotion: Promotion = "DEFAULT",
    number_rounding: NumberRounding = "rounded",
    dtypes: DtypeDomain = "any",
    parameters: Sequence[object] = (),
) -> Pointwise:
    """Returns a formula applied to operands that are broadcast and promoted as torch does.

    The formula takes a scalar for each operand, in the compute dtype of the promoted dtype (None for an operand that
    is None), then the parameters. `dtypes` is the domain of the promoted dtype.
    """
    dtype = promoted_dtype(operands, promotion)
    check_operands(call, operands, dtype, dtypes)
    exact = numbers_are_exact(call, number_rounding)
    return call.define(elementwise_body(operands, dtype, formula, exact=exact, parameters=parameters))


def elementwise_body(
    operands: Sequence[Operand],
    dtype: torch.dtype,
    formula: Callable[..., Scalar],
    *,
    exact: bool = False,
    parameters: Sequence[object] = (),
) -> ElementBody:
    """Returns the body that applies a formula to operands in a promoted dtype, read at a broadcast result's indices."""
    computes = compute_dtype(dtype)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        scalars = [load_operand(reader, operand, indices, dtype, exact) for operand in operands]
        return formula(*scalars, *[lower_parameter(reader, item, computes) for item in parameters])

    return body


def lower_parameter(reader: ElementReader, item: T | sympy.Basic, dtype: torch.dtype) -> T | Scalar:
    """Returns a symbolic number as a scalar, any other parameter unchanged."""
    return reader.number(item, dtype) if isinstance(item, sympy.Basic) else item


def load_operand(
    reader: ElementReader, operand: Operand, indices: Indices, dtype: torch.dtype, exact: bool = False
) -> Scalar:
    """Returns an operand's element at the indices of a broadcast result, or a number as a constant.

    The element is converted to `dtype`; half precision is rounded and computed with as float32. `exact` skips the
    rounding of numbers and of CPU tensors of rank 0, as some operators do.
    """
    if operand is None:
        return None  # type: ignore[return-value]  # formulas accept None for optional operands
    if isinstance(operand, Definition):
        exact = exact and not operand.sizes and (operand.device.type == "cpu" or isinstance(operand, CpuScalar))
        value = reader.load(operand, broadcast_indices(operand.sizes, indices))
        return value.to(compute_dtype(dtype)) if exact else convert_element(value, operand.dtype, dtype)
    computes = compute_dtype(dtype)
    if isinstance(operand, sympy.Basic):
        value = reader.number(operand, computes)
        return value if exact else round_to_dtype(value, dtype)
    return reader.number(operand if exact else round_number(operand, dtype), computes)


def convert_element(value: Scalar, source: torch.dtype, dtype: torch.dtype) -> Scalar:
    """Returns an element of a tensor of dtype `source`, converted to `dtype`, in the compute dtype of `dtype`."""
    computed = value.to(compute_dtype(dtype))
    is_exact = source is dtype or (source in _EXACT_IN_HALF and dtype in HALF_PRECISION)
    return computed if is_exact else round_to_dtype(computed, dtype)


def round_to_dtype(value: Scalar, dtype: torch.dtype) -> Scalar:
    """Returns a value of the compute dtype, rounded to `dtype`."""
    return value.to(dtype).to(value.dtype) if dtype in STORAGE_ONLY else value


_EXACT_IN_HALF = frozenset({torch.bool, torch.int8, torch.uint8}) | FLOAT8
"""Dtypes that both half precisions represent exactly."""


def round_number(number: T, dtype: torch.dtype) -> T | float:
    """Returns a Python number rounded to `dtype` if that is half precision or float8; any other value unchanged."""
    if dtype not in STORAGE_ONLY or not isinstance(number, int | float):
        return number
    if isinstance(number, int) and abs(number) <= 256 and dtype in HALF_PRECISION:  # exact in both half precisions
        return number
    return torch.tensor(float(number)).to(dtype).item()


def numbers_are_exact(call: OperatorCall, number_rounding: NumberRounding) -> bool:
    """Whether an operator computes with unrounded Python numbers on the call's device."""
    return number_rounding == "exact" or (number_rounding == "rounded on cpu" and not call.spec.cpu_rounding)


# --- promotion -------------------------------------------------------------------------------------------------------

_PromotionKey: TypeAlias = tuple[torch.dtype, int] | type | None
"""What promotion depends on: a tensor's dtype and whether it has dimensions, or the type of a number."""


def promoted_dtype(operands: Sequence[Operand], promotion: Promotion = "DEFAULT") -> torch.dtype:
    """Returns the dtype that torch converts operands to."""
    kind = "DEFAULT" if promotion in ("ALWAYS_BOOL", "NO_OPMATH") else promotion
    keys = tuple([_promotion_key(operand) for operand in operands])
    return _cached_promoted_dtype(keys, kind, torch.get_default_dtype())


@bounded_cache(4096)
def _cached_promoted_dtype(keys: tuple[_PromotionKey, ...], kind: Promotion, _default: torch.dtype) -> torch.dtype:
    examples = [
        torch.empty((1,) * key[1], dtype=key[0], device="meta") if isinstance(key, tuple) else key(0)
        for key in keys
        if key is not None
    ]
    return elementwise_dtypes(*examples, type_promotion_kind=PROMOTION_KINDS[kind])[1]


def _promotion_key(operand: Operand) -> _PromotionKey:
    if isinstance(operand, Definition):
        return operand.dtype, int(bool(operand.sizes))
    if isinstance(operand, sympy.Basic):
        return float if operand.is_integer is False else int
    return None if operand is None else type(operand)


# --- decline reasons -------------------------------------------------------------------------------------------------


def check_operands(
    call: OperatorCall, operands: Sequence[Operand], dtype: torch.dtype, dtypes: DtypeDomain = "any"
) -> None:
    """Declines operands that a kernel cannot compute with in a promoted dtype of the domain `dtypes`."""
    check_dtype(dtype, dtypes)
    for operand in operands:
        if isinstance(operand, Definition):
            if operand.device != call.device:
                raise Declined(f"an operand is on {operand.device}, the result on {call.device}")
        elif isinstance(operand, bool) and dtypes == "number":
            raise Declined("a number is a bool")
        elif not fits(operand, dtype, strict=False):
            raise Declined(f"the number {operand} is out of the range of {dtype}")


def fits(number: object, dtype: torch.dtype, *, strict: bool = True) -> bool:
    """Whether torch converts a number to a dtype; `strict` rejects finite numbers that become infinite."""
    if not isinstance(number, int | float) or isinstance(number, bool) or dtype is torch.bool:
        return True
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return not math.isnan(number) and limits.min <= number <= limits.max
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        return False
    return not strict or not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max


# --- registration ----------------------------------------------------------------------------------------------------


def register_elementwise(
    names: str | Sequence[str],
    formula: Callable[..., Scalar],
    promotion: Promotion = "DEFAULT",
    *,
    operands: int = 1,
    number_rounding: NumberRounding = "rounded",
    dtypes: DtypeDomain = "any",
) -> None:
    """Registers a formula as the rule of ATen overloads.

    The first `operands` arguments are operands; all others are parameters of the formula, in the schema's order.
    `dtypes` is the domain of each tensor and of the promoted dtype.
    """

    @lowering_rule(*((names,) if isinstance(names, str) else names), dtypes=dtypes)
    def _elementwise(call: OperatorCall) -> LoweringResult:
        arguments = list(call.bind().values())
        return elementwise(
            call, arguments[:operands], formula, promotion=promotion, number_rounding=number_rounding, dtypes=dtypes,
            parameters=arguments[operands:],
        )  # fmt: skip
