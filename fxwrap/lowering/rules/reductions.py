"""Reductions over dimensions: sums, products, extrema and their positions, any and all, variances and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fxwrap.loop_ir import Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, broadcast_indices
from fxwrap.lowering.rules.indexing_common import broadcast_sizes
from fxwrap.lowering.rules.reduction_common import (
    ReductionShape,
    build_reduction,
    outer_result,
    reduced_result,
    reduction_shape,
)
from fxwrap.lowering.rules.registry import (
    Declined,
    LoweringResult,
    NumberOrSymbol,
    OperatorCall,
    ReductionBody,
    lowering_rule,
)
from fxwrap.symbolic import Size, minimum

Dims: TypeAlias = Sequence[int] | int | None

ElementFunction: TypeAlias = Callable[[Scalar], Scalar]


def _identity(value: Scalar) -> Scalar:
    return value


def _is_nonzero(value: Scalar) -> Scalar:
    return value if value.dtype is torch.bool else value.differs(0)


def _nonzero_as_int(value: Scalar) -> Scalar:
    return _is_nonzero(value).to(torch.int64)


_BOOL_KINDS = {"sum": "any", "prod": "all", "max": "any", "min": "all"}
"""The reduction that replaces another one on bools."""


def _register_reduction(kind: str, element: ElementFunction, *names: str) -> None:
    """Registers operators (operand, dims, ...) that combine a function of each element."""

    @lowering_rule(*names)
    def _reduction(call: OperatorCall, x: Definition, dims: Dims = None) -> LoweringResult:
        if kind in ("max", "min"):
            _check_not_empty(call, x, dims)
        return _reduce_elements(call, kind, element, x, dims)


def _check_not_empty(call: OperatorCall, x: Definition, dims: Dims) -> None:
    if call.may_be_zero(reduction_shape(x, dims).count):
        raise Declined("the dimension may be empty, for which eager raises")


def _reduce_elements(call: OperatorCall, kind: str, element: ElementFunction, x: Definition, dims: Dims) -> Definition:
    """Returns a reduction of a function of each element, in the dtype of the result."""
    rows = reduction_shape(x, dims)
    dtype = torch.bool if kind in ("any", "all") else call.dtype
    kind = _BOOL_KINDS.get(kind, kind) if dtype is torch.bool else kind

    def body(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        return element(reader.load(x, rows.operand_indices(row, reduced)))

    (part,) = build_reduction(call, kind, rows, dtype, body)
    return reduced_result(call, call.result, rows, part)


for _kind, _element, _names in (
    ("sum", _identity, ("aten.sum.default", "aten.sum.dim_IntList")),
    ("sum", _nonzero_as_int, ("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")),
    ("prod", _identity, ("aten.prod.default", "aten.prod.dim_int")),
    ("max", _identity, ("aten.amax.default", "aten.max.default")),
    ("min", _identity, ("aten.amin.default", "aten.min.default")),
    ("any", _is_nonzero, ("aten.any.default", "aten.any.dim")),
    ("all", _is_nonzero, ("aten.all.default", "aten.all.dim")),
):
    _register_reduction(_kind, _element, *_names)


@lowering_rule("aten.nansum.default")
def _nansum(call: OperatorCall, x: Definition, dims: Sequence[int] | None) -> LoweringResult:
    if dims is not None and not len(dims) and x.sizes:
        raise Declined("torch's shape rule and its kernel differ for an empty list of dimensions")
    is_float = x.dtype.is_floating_point
    element: ElementFunction = (lambda value: value.apply("isnan").where(0.0, value)) if is_float else _identity
    return _reduce_elements(call, "sum", element, x, dims)


@lowering_rule("aten.any.dims", "aten.all.dims")
def _any_or_all(call: OperatorCall, x: Definition, dims: Sequence[int] | None) -> LoweringResult:
    """Reduces over dimensions; unlike elsewhere, an empty list means none."""
    if dims is None or len(dims):
        return _reduce_elements(call, call.operator, _is_nonzero, x, dims)
    return call.define(lambda reader, indices: _is_nonzero(reader.load(x, indices)))


@lowering_rule("aten.mean.default", "aten.mean.dim")
def _mean(call: OperatorCall, x: Definition, dims: Dims = None) -> LoweringResult:
    """Returns a sum, divided in the compute dtype; the mean of no element is NaN."""
    rows, dtype = reduction_shape(x, dims), call.dtype
    (total,) = build_reduction(call, "sum", rows, dtype, rows.load_element(x))
    return outer_result(
        call, call.result, rows, lambda reader, row: reader.load(total, row) / reader.number(rows.count, dtype)
    )


@lowering_rule("aten.trace.default")
def _trace(call: OperatorCall, x: Definition) -> LoweringResult:
    rows = ReductionShape((minimum(*x.sizes),), (0,))
    (total,) = build_reduction(call, "sum", rows, call.dtype, lambda reader, _, at: reader.load(x, (at[0], at[0])))
    return reduced_result(call, call.result, rows, total)


# --- extrema with positions, and both extrema ------------------------------------------------------------------------


def _arg_extremum(call: OperatorCall, kind: str, x: Definition, dims: Dims, fake: torch.Tensor) -> Definition:
    """Returns the first position of the largest or smallest element along dimensions; the first NaN wins."""
    rows = reduction_shape(x, dims)
    dtype = torch.uint8 if x.dtype is torch.bool else x.dtype
    (part,) = build_reduction(call, kind, rows, dtype, rows.load_element(x))
    return reduced_result(call, fake, rows, part)


def _extremum(call: OperatorCall, kind: str, x: Definition, dims: Dims, fake: torch.Tensor) -> Definition:
    rows = reduction_shape(x, dims)
    kind = _BOOL_KINDS[kind] if x.dtype is torch.bool else kind
    (part,) = build_reduction(call, kind, rows, x.dtype, rows.load_element(x))
    return reduced_result(call, fake, rows, part)


@lowering_rule("aten.argmax.default", "aten.argmin.default")
def _argmax_or_argmin(call: OperatorCall, x: Definition, dim: int | None) -> LoweringResult:
    _check_not_empty(call, x, dim)
    return _arg_extremum(call, call.operator, x, dim, call.result)


@lowering_rule("aten.max.dim", "aten.min.dim")
def _extremum_and_position(call: OperatorCall, x: Definition, dim: int) -> LoweringResult:
    _check_not_empty(call, x, dim)
    (values, positions), kind = call.results, call.operator
    return _extremum(call, kind, x, dim, values), _arg_extremum(call, f"arg{kind}", x, dim, positions)


@lowering_rule("aten.aminmax.default")
def _aminmax(call: OperatorCall, x: Definition, dim: int | None) -> LoweringResult:
    _check_not_empty(call, x, dim)
    low, high = call.results
    return _extremum(call, "min", x, dim, low), _extremum(call, "max", x, dim, high)


# --- variance --------------------------------------------------------------------------------------------------------


@lowering_rule("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction")
def _variance(call: OperatorCall, x: Definition, dims: Dims, correction: NumberOrSymbol | None) -> LoweringResult:
    """Returns the variance or its square root, and the mean where the operator has two results."""
    rows = reduction_shape(x, dims)
    mean, squares = build_reduction(call, "welford", rows, x.dtype, rows.load_element(x))

    def body(reader: ElementReader, row: Indices) -> Scalar:
        variance = reader.load(squares, row) / _degrees_of_freedom(
            reader, rows.count, 1 if correction is None else correction, mean.dtype
        )
        return variance.sqrt() if call.operator.startswith("std") else variance

    variance = outer_result(call, call.results[0], rows, body)
    if len(call.results) == 1:
        return variance
    return variance, reduced_result(call, call.results[1], rows, mean)


def _degrees_of_freedom(reader: ElementReader, count: Size, correction: NumberOrSymbol, dtype: torch.dtype) -> Scalar:
    """Returns count - correction, 0 where that is negative."""
    if isinstance(count, int) and isinstance(correction, int | float):
        return reader.number(float(max(count - correction, 0)), dtype)
    return (reader.number(count, dtype) - reader.number(correction, dtype)).maximum(0.0)


# --- norms -----------------------------------------------------------------------------------------------------------


@lowering_rule(
    "aten.linalg_vector_norm.default", "aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dtype",
    "aten.norm.ScalarOpt_dim_dtype",
)  # fmt: skip
def _vector_norm(call: OperatorCall, x: Definition, order: NumberOrSymbol | None, dims: Dims = None) -> LoweringResult:
    rows = reduction_shape(x, dims)
    return _norm(call, rows, 2 if order is None else order, rows.load_element(x))


@lowering_rule("aten.dist.default")
def _dist(call: OperatorCall, x: Definition, y: Definition, order: NumberOrSymbol) -> LoweringResult:
    sizes = broadcast_sizes([x.sizes, y.sizes])
    rows = ReductionShape(sizes, tuple(range(len(sizes))))
    computes = compute_dtype(call.dtype)

    def difference(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        indices = rows.operand_indices(row, reduced)
        left, right = [reader.load(item, broadcast_indices(item.sizes, indices)).to(computes) for item in (x, y)]
        return left - right

    return _norm(call, rows, order, difference)


def _norm(call: OperatorCall, rows: ReductionShape, order: NumberOrSymbol, body: ReductionBody) -> Definition:
    """Returns the norm of an order over rows, in the compute dtype of the result."""
    if not isinstance(order, int | float):
        raise Declined("the order of the norm is symbolic")
    computes = compute_dtype(call.dtype)
    kind, element, finish = _NORMS.get(order) or _general_norm(float(order))

    def combined(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        return element(body(reader, row, reduced).to(computes))

    (part,) = build_reduction(call, kind, rows, computes, combined)
    return outer_result(call, call.result, rows, lambda reader, row: finish(reader.load(part, row)))


def _general_norm(order: float) -> tuple[str, ElementFunction, ElementFunction]:
    return "sum", lambda value: abs(value).apply("pow", order), lambda total: total.apply("pow", 1.0 / order)


_NORMS: dict[float, tuple[str, ElementFunction, ElementFunction]] = {
    0: ("sum", lambda value: value.differs(0.0).to(value.dtype), _identity),
    1: ("sum", abs, _identity),
    2: ("sum", lambda value: value * value, Scalar.sqrt),
    math.inf: ("max", abs, _identity),
    -math.inf: ("min", abs, _identity),
}
"""Norms without powers, by order: the reduction, the function of each element, and the function of the result."""
