"""The scalar operations of kernels: names, operand domains, result dtypes and reference functions.

The reference of an operation is a torch function on CPU tensors. Printers translate the name and are tested against it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

import torch

ResultDtype: TypeAlias = Literal["same", "bool", "declared"]


class Domain(Enum):
    """The dtypes that an operation accepts. Half precision and float8 are storage only: casts, `where` and moves."""

    FLOAT = "float"
    NUMBER = "number"
    INTEGER = "integer"
    BOOL = "bool"
    BITS = "bits"  # integers and bool
    ANY = "any"

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether operands of this dtype are in the domain."""
        return self is Domain.ANY or dtype in _DOMAIN_DTYPES[self]


INTEGERS: frozenset[torch.dtype] = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
"""The integer dtypes that kernels compute in, with wrap-around."""

_COMPUTED_FLOATS = frozenset({torch.float32, torch.float64})

_DOMAIN_DTYPES: Mapping[Domain, frozenset[torch.dtype]] = {
    Domain.FLOAT: _COMPUTED_FLOATS, Domain.NUMBER: _COMPUTED_FLOATS | INTEGERS, Domain.INTEGER: INTEGERS,
    Domain.BOOL: frozenset({torch.bool}), Domain.BITS: INTEGERS | {torch.bool},
}  # fmt: skip

HALF_PRECISION: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})
"""The 16-bit dtypes, in which processors multiply matrices."""

FLOAT8: frozenset[torch.dtype] = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
"""The 8-bit floating-point dtypes. Both half precisions represent each of their numbers exactly."""

STORAGE_ONLY: frozenset[torch.dtype] = HALF_PRECISION | FLOAT8
"""Dtypes that are loaded, cast and stored, but computed with as float32."""

WITH_INFINITIES: frozenset[torch.dtype] = HALF_PRECISION | _COMPUTED_FLOATS
"""The floating-point dtypes that have infinities."""

EXACT_NUMBERS = (0, math.inf, -math.inf)
"""The numbers that all dtypes which have them represent exactly."""

KERNEL_DTYPES: frozenset[torch.dtype] = INTEGERS | STORAGE_ONLY | {torch.bool, torch.float32, torch.float64}
"""The dtypes of kernel buffers."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which kernels compute with elements of a dtype."""
    return torch.float32 if dtype in STORAGE_ONLY else dtype


@dataclass(frozen=True, slots=True)
class Float8Format:
    """The bits of a float8 dtype: sign, exponent with a bias, mantissa; and how torch rounds floats to it.

    Fields: `largest` is the code of the largest finite number without its sign, `overflow` that of larger floats and
    infinities, `nan` that of NaN. In an `unsigned_zero` format (fnuz) the code of -0.0 is the only NaN.
    """

    mantissa_bits: int
    bias: int
    largest: int
    overflow: int
    nan: int
    unsigned_zero: bool = False


def float8_format(dtype: torch.dtype) -> Float8Format:
    """Returns the format of a dtype of `FLOAT8`. Before torch 2.13, floats that e4m3fn cannot hold are NaN there."""
    return _FLOAT8_FORMATS[dtype]


_E4M3FN_OVERFLOW: int = torch.tensor(torch.inf).to(torch.float8_e4m3fn).view(torch.uint8).item()  # type: ignore[assignment]

_FLOAT8_FORMATS: Mapping[torch.dtype, Float8Format] = {
    torch.float8_e4m3fn: Float8Format(3, 7, 0x7E, _E4M3FN_OVERFLOW, 0x7F),
    torch.float8_e5m2: Float8Format(2, 15, 0x7B, 0x7C, 0x7F),
    torch.float8_e4m3fnuz: Float8Format(3, 8, 0x7F, 0x80, 0x80, unsigned_zero=True),
    torch.float8_e5m2fnuz: Float8Format(2, 16, 0x7F, 0x80, 0x80, unsigned_zero=True),
}


@dataclass(frozen=True, slots=True)
class OperationSpec:
    """A scalar operation.

    `result` is "same" (the operands' dtype), "bool" or "declared" (the dtype of the `Compute`, for casts). `cost` is an
    estimate of arithmetic instructions per element. `reference` maps torch tensors to a torch tensor.
    """

    name: str
    operands: int
    domain: Domain
    result: ResultDtype
    cost: int
    reference: Callable[..., torch.Tensor]


def _torch_specs(
    domain: Domain, operands: int, cost: int, *references: Callable[..., torch.Tensor], result: ResultDtype = "same"
) -> list[OperationSpec]:
    return [OperationSpec(item.__name__, operands, domain, result, cost, item) for item in references]


def _named_spec(
    name: str, operands: int, domain: Domain, cost: int, reference: Callable[..., torch.Tensor]
) -> OperationSpec:
    return OperationSpec(name, operands, domain, "same", cost, reference)


COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
"""The comparisons, of Python's numbers."""

OPPOSITES = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
"""The comparison of integers that holds where another one does not."""

_FLOAT, _NUMBER, _INTEGER, _BOOL, _BITS = Domain.FLOAT, Domain.NUMBER, Domain.INTEGER, Domain.BOOL, Domain.BITS

_SPECS: list[OperationSpec] = [
    *_torch_specs(_NUMBER, 2, 1, torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum),
    *_torch_specs(_NUMBER, 1, 1, torch.neg, torch.abs, torch.sign),
    *_torch_specs(_FLOAT, 2, 4, torch.div, torch.fmod, torch.remainder, torch.hypot, torch.copysign, torch.nextafter),
    *_torch_specs(_FLOAT, 2, 1, torch.fmax, torch.fmin),
    *_torch_specs(_FLOAT, 2, 20, torch.atan2, torch.pow),
    *_torch_specs(_FLOAT, 1, 1, torch.floor, torch.ceil, torch.round, torch.trunc),
    *_torch_specs(_FLOAT, 1, 4, torch.sqrt, torch.rsqrt, torch.reciprocal),
    *_torch_specs(_FLOAT, 1, 10, torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p),
    *_torch_specs(_FLOAT, 1, 12, torch.sin, torch.cos, torch.tan, torch.sinh, torch.cosh, torch.tanh, torch.sigmoid),
    *_torch_specs(_FLOAT, 1, 15, torch.asin, torch.acos, torch.atan, torch.asinh, torch.acosh, torch.atanh),
    *_torch_specs(_FLOAT, 1, 15, torch.erf, torch.erfc),
    *_torch_specs(_FLOAT, 1, 40, torch.erfinv, torch.lgamma, torch.digamma),
    _named_spec("floor_divide", 2, _NUMBER, 8, lambda left, right: torch.div(left, right, rounding_mode="floor")),
    _named_spec("trunc_divide", 2, _NUMBER, 8, lambda left, right: torch.div(left, right, rounding_mode="trunc")),
    _named_spec("integer_remainder", 2, _INTEGER, 8, torch.remainder),
    _named_spec("integer_fmod", 2, _INTEGER, 8, torch.fmod),
    _named_spec("integer_pow", 2, _INTEGER, 20, torch.pow),
    *_torch_specs(_NUMBER, 2, 1, torch.lt, torch.le, torch.gt, torch.ge, result="bool"),
    *_torch_specs(Domain.ANY, 2, 1, torch.eq, torch.ne, result="bool"),
    *_torch_specs(_FLOAT, 1, 1, torch.isnan, torch.isinf, torch.signbit, result="bool"),
    *_torch_specs(_BOOL, 2, 1, torch.logical_and, torch.logical_or, torch.logical_xor),
    *_torch_specs(_BOOL, 1, 1, torch.logical_not),
    *_torch_specs(_BITS, 2, 1, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor),
    *_torch_specs(_BITS, 1, 1, torch.bitwise_not),
    *_torch_specs(_INTEGER, 2, 1, torch.bitwise_left_shift, torch.bitwise_right_shift),
    OperationSpec("where", 3, Domain.ANY, "same", 1, torch.where),
    OperationSpec("cast", 1, Domain.ANY, "declared", 1, lambda value, dtype: value.to(dtype)),
    OperationSpec("bitcast", 1, Domain.ANY, "declared", 0, lambda value, dtype: value.view(dtype)),
]

OPERATIONS: Mapping[str, OperationSpec] = {spec.name: spec for spec in _SPECS}
"""Every scalar operation by name. `where` takes a bool first; `eq` and `ne` also compare bools."""


@dataclass(frozen=True, slots=True)
class CombineSpec:
    """A reduction or scan with its numbers of operands and results."""

    name: str
    operands: int
    results: int
    domain: Domain


REDUCTIONS: Mapping[str, CombineSpec] = {
    spec.name: spec
    for spec in (
        CombineSpec("sum", 1, 1, Domain.NUMBER),
        CombineSpec("prod", 1, 1, Domain.NUMBER),
        CombineSpec("max", 1, 1, Domain.NUMBER),  # NaN where any element is
        CombineSpec("min", 1, 1, Domain.NUMBER),
        CombineSpec("argmax", 1, 2, Domain.NUMBER),  # the first of the largest elements, or NaNs; its int64 position
        CombineSpec("argmin", 1, 2, Domain.NUMBER),
        CombineSpec("any", 1, 1, Domain.BOOL),
        CombineSpec("all", 1, 1, Domain.BOOL),
        CombineSpec("welford", 1, 2, Domain.FLOAT),  # mean, and the sum of squared differences from it
        CombineSpec("softmax", 1, 2, Domain.FLOAT),  # maximum m, and the sum of exp(x - m)
    )
}
"""Reductions over all reduced axes of a kernel, in row-major order where the order matters.

The results of a `softmax` whose maximum is -inf are (-inf, 0).
"""

SCANS: Mapping[str, CombineSpec] = {
    spec.name: spec
    for spec in (
        CombineSpec("cumsum", 1, 1, Domain.NUMBER),
        CombineSpec("cumprod", 1, 1, Domain.NUMBER),
        CombineSpec("cummax", 1, 2, Domain.NUMBER),  # values, and int64 positions of the last largest so far
        CombineSpec("cummin", 1, 2, Domain.NUMBER),
        CombineSpec("logcumsumexp", 1, 1, Domain.FLOAT),
    )
}
"""Scans along the only reduced axis of a kernel."""

POSITION_RESULTS: frozenset[tuple[str, int]] = frozenset({("argmax", 1), ("argmin", 1), ("cummax", 1), ("cummin", 1)})
"""Results (kind, part) that are int64 positions along the reduced axes, whatever the operand's dtype."""

ORDERED_REDUCTIONS: frozenset[str] = frozenset({"argmax", "argmin"})
"""Reductions whose results depend on the order of the elements."""

STORE_MODES = ("set", "add", "max", "min", "prod")
"""How a store combines with memory. All but "set" are atomic: several iterations may write one element."""
