"""What pointwise rules stand on: broadcasting, torch's promotion, the rounding of numbers, and a row for each operator.

The operators themselves are in `arithmetic`, `functions`, `activations`, `losses` and `copies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias

import sympy
import torch

from fxwrap.loop_ir import INTEGERS, KERNEL_DTYPES, STORAGE_ONLY, Scalar, compute_dtype
from fxwrap.lowering.definitions import (
    Definition,
    HostNumber,
    Indices,
    Pointwise,
    Reader,
    broadcast_indices,
    pointwise,
)
from fxwrap.lowering.rules.registry import RULES, Call, Result
from fxwrap.symbolic import Size
from fxwrap.torch_compat import PROMOTION_KINDS, elementwise_dtypes

Numbers: TypeAlias = Literal["rounded", "exact", "rounded on cpu"]
"""How an operator on half precision takes Python numbers: rounded to half precision first, as most do, or not."""

Accepts: TypeAlias = Literal["any", "float", "number", "integer", "bits"]
"""Which promoted dtypes an operator takes: any, floating point, all but bool, integers, integers and bool."""

Parameter: TypeAlias = "Scalar | float"
"""What a formula takes for an argument that is no operand: a Python number, or a scalar when it is symbolic."""

# --- the formula of an operator --------------------------------------------------------------------------------------


def elementwise(
    call: Call,
    operands: Sequence[Any],
    promotion: str,
    formula: Callable[..., Scalar],
    *,
    numbers: Numbers = "rounded",
    accepts: Accepts = "any",
    parameters: Sequence[Any] = (),
) -> Pointwise | str:
    """Returns a formula applied to operands that are broadcast against one another and promoted as torch does.

    `promotion` names torch's rule: "DEFAULT", "NO_OPMATH", "INT_TO_FLOAT", "ALWAYS_BOOL", "COMPLEX_TO_FLOAT" or
    "BOOL_TO_LONG". The formula takes a scalar for each operand, in the compute dtype of the promoted one, None for an
    operand that is None, and then the parameters, which have no part in promotion: a symbolic one becomes a scalar.
    """
    dtype = promoted_dtype(operands, promotion)
    reason = refusal(call, operands, dtype, accepts)
    if reason is not None:
        return reason
    exact = numbers_are_exact(call, numbers)
    body = body_of(operands, dtype, formula, exact=exact, parameters=parameters)
    return pointwise(call.sizes, call.dtype, call.device, body)


def body_of(
    operands: Sequence[Any],
    dtype: torch.dtype,
    formula: Callable[..., Scalar],
    *,
    exact: bool = False,
    parameters: Sequence[Any] = (),
) -> Callable[[Reader, Indices], Scalar]:
    """Returns the body that applies a formula to operands in a promoted dtype, read at a broadcast result's indices."""
    computes = compute_dtype(dtype)

    def body(reader: Reader, indices: Indices) -> Scalar:
        scalars = [element(reader, operand, indices, dtype, exact) for operand in operands]
        return formula(*scalars, *[parameter(reader, item, computes) for item in parameters])

    return body


def parameter(reader: Reader, item: Any, dtype: torch.dtype) -> Any:
    """Returns what a formula takes for an argument that is no operand: a symbolic number as a scalar, else itself."""
    return reader.number(item, dtype) if isinstance(item, sympy.Basic) else item


def element(reader: Reader, operand: Any, indices: Indices, dtype: torch.dtype, exact: bool = False) -> Scalar:
    """Returns an operand's element at the indices of a result that it is broadcast to; a number is itself.

    The operand is converted to `dtype`, and where that is of half precision then to float32, which rounds it; `exact`
    leaves the rounding out for numbers and for tensors of rank 0 on the CPU, as some operators do.
    """
    if operand is None:
        return None  # type: ignore[return-value]  # the formula knows that this operand may be left out
    if isinstance(operand, Definition):
        exact = exact and not operand.sizes and (operand.device.type == "cpu" or isinstance(operand, HostNumber))
        value = reader.load(operand, broadcast_indices(operand.sizes, indices))
        return value.to(compute_dtype(dtype)) if exact else converted(value, operand.dtype, dtype)
    computes = compute_dtype(dtype)
    if isinstance(operand, sympy.Basic):
        value = reader.number(operand, computes)
        return value if exact else rounded(value, dtype)
    return reader.number(operand if exact else rounded_number(operand, dtype), computes)


def converted(value: Scalar, source: torch.dtype, dtype: torch.dtype) -> Scalar:
    """Returns an element of a tensor of dtype `source` as one of `dtype`, in the compute dtype of that."""
    computed = value.to(compute_dtype(dtype))
    return computed if source in _EXACT_IN_HALF or source is dtype else rounded(computed, dtype)


def rounded(value: Scalar, dtype: torch.dtype) -> Scalar:
    """Returns a value of the compute dtype rounded to what a tensor of `dtype` can hold."""
    return value.to(dtype).to(value.dtype) if dtype in STORAGE_ONLY else value


_EXACT_IN_HALF = frozenset({torch.bool, torch.int8, torch.uint8})
"""Dtypes whose every number both half precisions hold."""


def rounded_number(number: Any, dtype: torch.dtype) -> Any:
    """Returns a Python number rounded to half precision, if `dtype` is that; anything else is itself."""
    if dtype not in STORAGE_ONLY or isinstance(number, sympy.Basic):
        return number
    if isinstance(number, int) and abs(number) <= 256:  # what both half precisions hold
        return number
    return torch.tensor(float(number)).to(dtype).item()


def numbers_are_exact(call: Call, numbers: Numbers) -> bool:
    """Whether an operator's Python numbers are used as they are, on the device of this call."""
    return numbers == "exact" or (numbers == "rounded on cpu" and not call.spec.rounds_as_cpu)


# --- promotion -------------------------------------------------------------------------------------------------------


def promoted_dtype(operands: Sequence[Any], promotion: str) -> torch.dtype:
    """Returns the dtype that torch converts operands to; half precision is computed with in float32 afterwards."""
    kind = "DEFAULT" if promotion in ("ALWAYS_BOOL", "NO_OPMATH") else promotion
    return _promoted(tuple([_example(operand) for operand in operands]), kind, torch.get_default_dtype())


@lru_cache(maxsize=4096)
def _promoted(examples: tuple[Any, ...], kind: str, _default: torch.dtype) -> torch.dtype:
    made = [
        torch.empty((1,) * item[1], dtype=item[0], device="meta") if isinstance(item, tuple) else item(0)
        for item in examples
        if item is not None
    ]
    return elementwise_dtypes(*made, type_promotion_kind=PROMOTION_KINDS[kind])[1]


def _example(operand: Any) -> Any:
    """Returns what promotion looks at: a dtype and whether there are dimensions, or the kind of a number."""
    if isinstance(operand, Definition):
        return operand.dtype, int(bool(operand.sizes))
    if isinstance(operand, sympy.Basic):
        return float if operand.is_integer is False else int
    return None if operand is None else type(operand)


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(call: Call, operands: Sequence[Any], dtype: torch.dtype, accepts: Accepts = "any") -> str | None:
    """Returns why a call is not computed by a kernel in this promoted dtype, or None."""
    fakes = call.fake if isinstance(call.fake, tuple | list) else (call.fake,)
    types = [dtype, *[fake.dtype for fake in fakes if isinstance(fake, torch.Tensor)]]
    types += [operand.dtype for operand in operands if isinstance(operand, Definition)]
    unknown = next((item for item in types if item not in KERNEL_DTYPES), None)
    if unknown is not None:
        return f"kernels do not compute in {unknown}"
    if not _takes(accepts, dtype):
        return f"its operands are of {dtype}"
    for operand in operands:
        if isinstance(operand, Definition):
            if operand.device != call.device:
                return f"an operand is on {operand.device}, the result on {call.device}"
        elif not fits(operand, dtype, strict=False):
            return f"the number {operand} is out of the range of {dtype}"
    return None


def _takes(accepts: Accepts, dtype: torch.dtype) -> bool:
    return {
        "any": True,
        "float": dtype.is_floating_point,
        "number": dtype is not torch.bool,
        "integer": dtype in INTEGERS,
        "bits": dtype in INTEGERS or dtype is torch.bool,
    }[accepts]


def fits(number: Any, dtype: torch.dtype, *, strict: bool = True) -> bool:
    """Whether torch converts a number to a dtype; `strict` where it raises for a finite one that becomes infinite."""
    if number is None or isinstance(number, sympy.Basic | bool) or dtype is torch.bool:
        return True
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return not math.isnan(number) and limits.min <= number <= limits.max
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        return False
    return not strict or not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max


# --- rows ------------------------------------------------------------------------------------------------------------


def bound_arguments(call: Call) -> list[Any]:
    """Returns the arguments of an ATen call in its schema's order, the schema's defaults for those left out."""
    names, defaults = _signature(call.name)
    given = dict(zip(names, call.arguments)) | call.keywords
    return [given.get(name, default) for name, default in zip(names, defaults)]


@cache
def _signature(name: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    namespace, operator, overload = name.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), operator), overload)._schema
    return tuple([item.name for item in schema.arguments]), tuple([item.default_value for item in schema.arguments])


def row(
    names: str | Sequence[str],
    formula: Callable[..., Scalar],
    promotion: str = "DEFAULT",
    *,
    operands: int = 1,
    numbers: Numbers = "rounded",
    accepts: Accepts = "any",
) -> None:
    """Registers ATen overloads whose first arguments are operands and whose others are parameters of the formula."""

    def lowered(call: Call) -> Result | str:
        arguments = bound_arguments(call)
        return elementwise(
            call, arguments[:operands], promotion, formula,
            numbers=numbers, accepts=accepts, parameters=arguments[operands:],
        )  # fmt: skip

    for name in (names,) if isinstance(names, str) else names:
        register(name, lowered)


def bound(*names: str) -> Callable[[Callable[..., Result | str]], Callable[..., Result | str]]:
    """Registers a function `(call, *arguments)` as the rule of ATen overloads; defaults are the schema's."""

    def register_function(function: Callable[..., Result | str]) -> Callable[..., Result | str]:
        for name in names:
            register(name, lambda call: function(call, *bound_arguments(call)))
        return function

    return register_function


def register(name: str, lowered: Callable[[Call], Result | str]) -> None:
    """Registers the rule of one overload. Raises ValueError where it has one."""
    if name in RULES:
        raise ValueError(f"two rules for {name}")
    RULES[name] = lowered


def broadcast_sizes(operands: Sequence[Any]) -> tuple[Size, ...]:
    """Returns the sizes that tensors among the operands broadcast to."""
    tensors = [operand.sizes for operand in operands if isinstance(operand, Definition)]
    rank = max([len(sizes) for sizes in tensors], default=0)
    found: list[Size] = [1] * rank
    for sizes in tensors:
        for position, size in enumerate(sizes, rank - len(sizes)):
            found[position] = size if found[position] == 1 else found[position]
    return tuple(found)
