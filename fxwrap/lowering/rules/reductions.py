"""Reductions over dimensions: sums, products, extrema and their positions, any and all, variances and norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.definitions import Definition, Indices, Reader, broadcast_indices, pointwise
from fxwrap.lowering.rules.pointwise import broadcast_sizes
from fxwrap.lowering.rules.registry import Call, Result
from fxwrap.lowering.rules.rows import Rows, combine, kernel_rule, reduced_result, row_result, rows_of
from fxwrap.symbolic import Size, minimum


def _same(value: Scalar) -> Scalar:
    return value


def _truth(value: Scalar) -> Scalar:
    return value if value.dtype is torch.bool else value.differs(0)


def _count(value: Scalar) -> Scalar:
    return _truth(value).to(torch.int64)


def _number(value: Scalar) -> Scalar:
    """Returns 0 for NaN."""
    return value.apply("isnan").where(0.0, value) if value.dtype.is_floating_point else value


_KINDS_OF_BOOL = {"sum": "any", "prod": "all", "max": "any", "min": "all"}
"""What a reduction is when its result is a bool."""


def _one_result(kind: str, element: Callable[[Scalar], Scalar], *names: str) -> None:
    """Registers operators (operand, dims, keepdim, dtype=) that combine a function of each element."""

    @kernel_rule(*names)
    def lowered(call: Call, x: Definition, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Result:
        return _combined(call, kind, element, x, rows_of(x, dims))


def _combined(call: Call, kind: str, element: Callable[[Scalar], Scalar], x: Definition, rows: Rows) -> Definition:
    """Returns a reduction of a function of each element; it happens in the dtype of the result."""
    dtype = torch.bool if kind in ("any", "all") else call.dtype
    chosen = _KINDS_OF_BOOL.get(kind, kind) if dtype is torch.bool else kind

    def body(reader: Reader, kept: Indices, reduced: Indices) -> Scalar:
        return element(reader.load(x, rows.joined(kept, reduced)))

    (part,) = combine(call, chosen, rows, dtype, body)
    return reduced_result(call, call.fake, rows, part)


for _kind, _element, _names in (
    ("sum", _same, ("aten.sum.default", "aten.sum.dim_IntList")),
    ("sum", _count, ("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")),
    ("prod", _same, ("aten.prod.default", "aten.prod.dim_int")),
    ("max", _same, ("aten.amax.default", "aten.max.default")),
    ("min", _same, ("aten.amin.default", "aten.min.default")),
    ("any", _truth, ("aten.any.default", "aten.any.dim")),
    ("all", _truth, ("aten.all.default", "aten.all.dim")),
):
    _one_result(_kind, _element, *_names)


@kernel_rule("aten.nansum.default")
def _nansum(call: Call, x: Definition, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Result | str:
    if dims is not None and not len(dims) and x.sizes:
        return "torch's shape rule and its kernel differ for an empty list of dimensions"
    return _combined(call, "sum", _number, x, rows_of(x, dims))


@kernel_rule("aten.any.dims")
def _any_dims(call: Call, x: Definition, dims: Any = None, keepdim: bool = False) -> Result:
    return _truth_over("any", call, x, dims)


@kernel_rule("aten.all.dims")
def _all_dims(call: Call, x: Definition, dims: Any = None, keepdim: bool = False) -> Result:
    return _truth_over("all", call, x, dims)


def _truth_over(kind: str, call: Call, x: Definition, dims: Any) -> Definition:
    """Reduces over dimensions; here, unlike elsewhere, an empty list of them means none."""
    if dims is None or len(dims):
        return _combined(call, kind, _truth, x, rows_of(x, dims))
    return pointwise(call.sizes, call.dtype, call.device, lambda reader, indices: _truth(reader.load(x, indices)))


@kernel_rule("aten.mean.default", "aten.mean.dim")
def _mean(call: Call, x: Definition, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Result:
    return mean_of(call, call.fake, rows_of(x, dims), rows_of(x, dims).element(x))


def mean_of(
    call: Call, fake: torch.Tensor, rows: Rows, body: Callable[[Reader, Indices, Indices], Scalar]
) -> Definition:
    """Returns the mean of `body` over rows: a sum, divided in the dtype that arithmetic happens in; NaN for none."""
    (total,) = combine(call, "sum", rows, fake.dtype, body)

    def divided(reader: Reader, row: Indices) -> Scalar:
        return reader.load(total, row) / reader.number(rows.count, fake.dtype)

    return row_result(call, fake, rows, divided)


@kernel_rule("aten.trace.default")
def _trace(call: Call, x: Definition) -> Result:
    rows = Rows((minimum(*x.sizes),), (0,))
    (total,) = combine(call, "sum", rows, call.dtype, lambda reader, _, at: reader.load(x, (at[0], at[0])))
    return reduced_result(call, call.fake, rows, total)


# --- extrema with positions, and both extrema ---------------------------------------------------------------------


def _position(call: Call, kind: str, x: Definition, dims: Any, fake: torch.Tensor) -> Definition:
    """Returns the first position of the largest or smallest along dimensions; NaN is both."""
    rows = rows_of(x, dims)
    dtype = torch.uint8 if x.dtype is torch.bool else x.dtype
    (part,) = combine(call, kind, rows, dtype, rows.element(x))
    return reduced_result(call, fake, rows, part)


def _extremum(call: Call, kind: str, x: Definition, dims: Any, fake: torch.Tensor) -> Definition:
    rows = rows_of(x, dims)
    chosen = _KINDS_OF_BOOL[kind] if x.dtype is torch.bool else kind
    (part,) = combine(call, chosen, rows, x.dtype, rows.element(x))
    return reduced_result(call, fake, rows, part)


@kernel_rule("aten.argmax.default")
def _argmax(call: Call, x: Definition, dim: Any = None, keepdim: bool = False) -> Result:
    return _position(call, "argmax", x, dim, call.fake)


@kernel_rule("aten.argmin.default")
def _argmin(call: Call, x: Definition, dim: Any = None, keepdim: bool = False) -> Result:
    return _position(call, "argmin", x, dim, call.fake)


@kernel_rule("aten.max.dim")
def _max_dim(call: Call, x: Definition, dim: int, keepdim: bool = False) -> Result:
    values, positions = call.fake
    return _extremum(call, "max", x, dim, values), _position(call, "argmax", x, dim, positions)


@kernel_rule("aten.min.dim")
def _min_dim(call: Call, x: Definition, dim: int, keepdim: bool = False) -> Result:
    values, positions = call.fake
    return _extremum(call, "min", x, dim, values), _position(call, "argmin", x, dim, positions)


@kernel_rule("aten.aminmax.default")
def _aminmax(call: Call, x: Definition, dim: Any = None, keepdim: bool = False) -> Result:
    low, high = call.fake
    return _extremum(call, "min", x, dim, low), _extremum(call, "max", x, dim, high)


# --- variance -----------------------------------------------------------------------------------------------------


@kernel_rule("aten.var.correction")
def _var(call: Call, x: Definition, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Result:
    return _moments(call, x, dims, correction, _same, call.fake)[0]


@kernel_rule("aten.std.correction")
def _std(call: Call, x: Definition, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Result:
    return _moments(call, x, dims, correction, Scalar.sqrt, call.fake)[0]


@kernel_rule("aten.var_mean.correction")
def _var_mean(call: Call, x: Definition, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Result:
    return _moments(call, x, dims, correction, _same, *call.fake)


@kernel_rule("aten.std_mean.correction")
def _std_mean(call: Call, x: Definition, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Result:
    return _moments(call, x, dims, correction, Scalar.sqrt, *call.fake)


def _moments(
    call: Call, x: Definition, dims: Any, correction: Any, finish: Callable[[Scalar], Scalar], *fakes: torch.Tensor
) -> tuple[Definition, ...]:
    """Returns `finish` of the variance and, if two fakes are given, the mean."""
    rows = rows_of(x, dims)
    mean, squares = combine(call, "welford", rows, x.dtype, rows.element(x))
    less = 1 if correction is None else correction

    def spread(reader: Reader, row: Indices) -> Scalar:
        return finish(reader.load(squares, row) / _degrees(reader, rows.count, less, mean.dtype))

    variance = row_result(call, fakes[0], rows, spread)
    return (variance, *[reduced_result(call, fake, rows, mean) for fake in fakes[1:]])


def _degrees(reader: Reader, count: Size, correction: Any, dtype: torch.dtype) -> Scalar:
    """Returns count - correction, 0 where that is negative."""
    if isinstance(count, int) and isinstance(correction, int | float):
        return reader.number(float(max(count - correction, 0)), dtype)
    return (reader.number(count, dtype) - reader.number(correction, dtype)).maximum(0.0)


# --- norms --------------------------------------------------------------------------------------------------------


@kernel_rule("aten.linalg_vector_norm.default")
def _vector_norm(
    call: Call, x: Definition, order: Any = 2, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Result | str:
    rows = rows_of(x, dims)
    return _norm(call, rows, order, rows.element(x))


@kernel_rule(
    "aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dtype", "aten.norm.ScalarOpt_dim_dtype"
)
def _old_norm(
    call: Call, x: Definition, order: Any = 2, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Result | str:
    rows = rows_of(x, dims)
    return _norm(call, rows, 2 if order is None else order, rows.element(x))


@kernel_rule("aten.dist.default")
def _dist(call: Call, x: Definition, y: Definition, order: Any = 2) -> Result | str:
    sizes = broadcast_sizes((x, y))
    rows = Rows(sizes, tuple(range(len(sizes))))
    computes = compute_dtype(call.dtype)

    def difference(reader: Reader, kept: Indices, reduced: Indices) -> Scalar:
        at = rows.joined(kept, reduced)
        left, right = [reader.load(item, broadcast_indices(item.sizes, at)).to(computes) for item in (x, y)]
        return left - right

    return _norm(call, rows, order, difference)


def _norm(call: Call, rows: Rows, order: Any, body: Callable[[Reader, Indices, Indices], Scalar]) -> Definition | str:
    """Returns the norm of an order, over rows, in the dtype that arithmetic on the result's happens in."""
    if not isinstance(order, int | float):
        return "the order of the norm is symbolic"
    computes = compute_dtype(call.dtype)
    kind, element, finish = _NORMS.get(order) or _general_norm(float(order))

    def combined(reader: Reader, kept: Indices, reduced: Indices) -> Scalar:
        return element(body(reader, kept, reduced).to(computes))

    (part,) = combine(call, kind, rows, computes, combined)
    return row_result(call, call.fake, rows, lambda reader, row: finish(reader.load(part, row)))


def _general_norm(order: float) -> tuple[str, Callable[[Scalar], Scalar], Callable[[Scalar], Scalar]]:
    return "sum", lambda value: abs(value).apply("pow", order), lambda total: total.apply("pow", 1.0 / order)


_NORMS: dict[float, tuple[str, Callable[[Scalar], Scalar], Callable[[Scalar], Scalar]]] = {
    0: ("sum", lambda value: value.differs(0.0).to(value.dtype), _same),
    1: ("sum", abs, _same),
    2: ("sum", lambda value: value * value, Scalar.sqrt),
    math.inf: ("max", abs, _same),
    -math.inf: ("min", abs, _same),
}
"""Norms that need no power, by order: a reduction, what it combines of an element, and what it ends with."""
