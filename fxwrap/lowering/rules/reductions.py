"""Reductions over dimensions: sums, products, extrema and their positions, any and all, variances and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxwrap.loop_ir import POSITION_RESULTS, REDUCTIONS, SCANS, Scalar, compute_dtype
from fxwrap.lowering.fusion.definitions import (
    Definition,
    ElementReader,
    Indices,
    Pointwise,
    Reduced,
    Scanned,
    ScanSource,
    broadcast_indices,
    merge_indices,
    pointwise,
    reduction,
    reduction_dims,
)
from fxwrap.lowering.rules.indexing_common import broadcast_sizes
from fxwrap.lowering.rules.registry import (
    Declined,
    ElementBody,
    LoweringResult,
    NumberOrSymbol,
    OperatorCall,
    lowering_rule,
)
from fxwrap.symbolic import Size, minimum, product

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

    (part,) = build_reduction(call, kind, rows, dtype, lambda reader, at: element(reader.load(x, at)))
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
    total = sum_rows(call, rows, dtype, x)
    return outer_result(
        call, call.result, rows, lambda reader, row: reader.load(total, row) / reader.number(rows.count, dtype)
    )


@lowering_rule("aten.trace.default", dtypes="number")
def _trace(call: OperatorCall, x: Definition) -> LoweringResult:
    rows = ReductionShape((minimum(*x.sizes),), (0,))
    total = sum_rows(call, rows, call.dtype, lambda reader, at: reader.load(x, (at[0], at[0])))
    return reduced_result(call, call.result, rows, total)


# --- extrema with positions, and both extrema ------------------------------------------------------------------------


def _first_extremum(call: OperatorCall, kind: str, rows: ReductionShape, x: Definition) -> tuple[Reduced, ...]:
    """Returns the first of the largest or smallest elements of each row, and its position; the first NaN wins."""
    return build_reduction(call, f"arg{kind}", rows, torch.uint8 if x.dtype is torch.bool else x.dtype, x)


def _extremum(call: OperatorCall, kind: str, x: Definition, dims: Dims, fake: torch.Tensor) -> Definition:
    rows = reduction_shape(x, dims)
    kind = _BOOL_KINDS[kind] if x.dtype is torch.bool else kind
    (part,) = build_reduction(call, kind, rows, x.dtype, x)
    return reduced_result(call, fake, rows, part)


@lowering_rule("aten.argmax.default", "aten.argmin.default", dtypes="number")
def _argmax_or_argmin(call: OperatorCall, x: Definition, dim: int | None) -> LoweringResult:
    _check_not_empty(call, x, dim)
    rows = reduction_shape(x, dim)
    _, position = _first_extremum(call, call.operator.removeprefix("arg"), rows, x)
    return reduced_result(call, call.result, rows, position)


@lowering_rule("aten.max.dim", "aten.min.dim")
def _extremum_and_position(call: OperatorCall, x: Definition, dim: int) -> LoweringResult:
    """Returns the first of equal elements, as eager does: a zero has the sign of the element at its position."""
    _check_not_empty(call, x, dim)
    rows, (values, positions) = reduction_shape(x, dim), call.results
    value, position = _first_extremum(call, call.operator, rows, x)
    if x.dtype is torch.bool:
        values_result = _extremum(call, call.operator, x, dim, values)
    else:
        values_result = reduced_result(call, values, rows, value)
    return values_result, reduced_result(call, positions, rows, position)


@lowering_rule("aten.aminmax.default")
def _aminmax(call: OperatorCall, x: Definition, dim: int | None) -> LoweringResult:
    """Returns zeros of either sign: finding the first of equal elements takes more than twice as long."""
    _check_not_empty(call, x, dim)
    low, high = call.results
    return _extremum(call, "min", x, dim, low), _extremum(call, "max", x, dim, high)


# --- variance --------------------------------------------------------------------------------------------------------


@lowering_rule(
    "aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction", dtypes="float"
)
def _variance(call: OperatorCall, x: Definition, dims: Dims, correction: NumberOrSymbol | None) -> LoweringResult:
    """Returns the variance or its square root, and the mean where the operator has two results."""
    rows = reduction_shape(x, dims)
    mean, squares = build_reduction(call, "welford", rows, x.dtype, x)

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
    return _norm(call, rows, 2 if order is None else order, lambda reader, at: reader.load(x, at))


@lowering_rule("aten.dist.default", dtypes="number")
def _dist(call: OperatorCall, x: Definition, y: Definition, order: NumberOrSymbol) -> LoweringResult:
    sizes = broadcast_sizes([x.sizes, y.sizes])
    rows = ReductionShape(sizes, tuple(range(len(sizes))))
    computes = compute_dtype(call.dtype)

    def difference(reader: ElementReader, indices: Indices) -> Scalar:
        left, right = [reader.load(item, broadcast_indices(item.sizes, indices)).to(computes) for item in (x, y)]
        return left - right

    return _norm(call, rows, order, difference)


def _norm(call: OperatorCall, rows: ReductionShape, order: NumberOrSymbol, body: ElementBody) -> Definition:
    """Returns the norm of an order over rows, in the compute dtype of the result."""
    if not isinstance(order, int | float):
        raise Declined("the order of the norm is symbolic")
    computes = compute_dtype(call.dtype)
    kind, element, finish = _NORMS.get(order) or _general_norm(float(order))

    (part,) = build_reduction(call, kind, rows, computes, lambda reader, at: element(body(reader, at).to(computes)))
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


@dataclass(frozen=True)
class ReductionShape:
    """An operand's sizes and the reduced dimensions. A tensor of rank 0 is one element."""

    sizes: tuple[Size, ...]
    dims: tuple[int, ...]

    @property
    def parallel(self) -> tuple[Size, ...]:
        """The sizes of the dimensions that are not reduced."""
        return tuple([size for dim, size in enumerate(self.sizes) if dim not in self.dims])

    @property
    def reduced(self) -> tuple[Size, ...]:
        """The sizes of the reduced dimensions, (1,) for none."""
        return tuple([self.sizes[dim] for dim in self.dims]) or (1,)

    @property
    def count(self) -> Size:
        """The number of elements that each reduction combines."""
        return product(self.reduced)

    def operand_indices(self, parallel: Indices, reduced: Indices) -> Indices:
        """Returns the operand's indices, given its parallel and its reduced indices."""
        return merge_indices(len(self.sizes), self.dims, parallel, reduced)

    def outer_indices(self, indices: Indices) -> Indices:
        """Returns the parallel indices among an operand's."""
        return [index for dim, index in enumerate(indices) if dim not in self.dims]


def reduction_shape(operand: Definition, dims: Sequence[int] | int | None) -> ReductionShape:
    """Returns the shape of a reduction over dimensions; None or an empty list means all."""
    return ReductionShape(operand.sizes, reduction_dims(len(operand.sizes), dims))


def build_reduction(
    call: OperatorCall, kind: str, rows: ReductionShape, dtype: torch.dtype, element: Definition | ElementBody
) -> tuple[Reduced, ...]:
    """Returns the results of a reduction over rows: in the compute dtype of `dtype`, positions in int64.

    `element` is the operand, or computes an element at the operand's indices.
    """

    def body(reader: ElementReader, row: Indices, reduced: Indices) -> Scalar:
        indices = rows.operand_indices(row, reduced)
        return reader.load(element, indices) if isinstance(element, Definition) else element(reader, indices)

    computes = compute_dtype(dtype)
    parts = range(REDUCTIONS[kind].results)
    types = [torch.int64 if (kind, part) in POSITION_RESULTS else computes for part in parts]
    return reduction(kind, rows.parallel, rows.reduced, call.device, dtype, body, types)


def sum_rows(
    call: OperatorCall, rows: ReductionShape, dtype: torch.dtype, element: Definition | ElementBody
) -> Reduced:
    """Returns the sum of each row, see `build_reduction`."""
    (total,) = build_reduction(call, "sum", rows, dtype, element)
    return total


def reduced_result(call: OperatorCall, fake: torch.Tensor, rows: ReductionShape, part: Reduced) -> Definition:
    """Returns a result of a reduction as a result of the call, in its dtype and with kept dimensions of size 1."""
    if fake.dim() == len(rows.parallel):
        return Reduced(part.sizes, fake.dtype, call.device, part.source, part.part)
    return outer_result(call, fake, rows, lambda reader, row: reader.load(part, row))


def outer_result(call: OperatorCall, fake: torch.Tensor, rows: ReductionShape, body: ElementBody) -> Pointwise:
    """Returns a result of the call that `body(reader, row)` computes for each row; reduced dimensions may be 1."""
    keeps_dims = fake.dim() == len(rows.sizes)

    def element(reader: ElementReader, indices: Indices) -> Scalar:
        return body(reader, rows.outer_indices(indices) if keeps_dims else indices)

    return call.define(element, fake)


@lowering_rule(*[f"aten.{kind}.default" for kind in SCANS])
def _scan(call: OperatorCall, x: Definition, dim: int) -> LoweringResult:
    """Scans in the dtype of the first result; the extrema of bools are scanned as uint8."""
    kind, dtypes = call.operator, [fake.dtype for fake in call.results]
    if dtypes[0] is torch.bool and len(dtypes) == 1:
        raise Declined(f"eager mode has no {kind} in torch.bool")
    computes = torch.uint8 if dtypes[0] is torch.bool else compute_dtype(dtypes[0])
    if not SCANS[kind].domain.accepts(computes):
        raise Declined(f"kernels have no {kind} of {computes}")

    def element(reader: ElementReader, indices: Indices) -> Scalar:
        return reader.load(x, indices).to(computes)

    results: list[Definition] = []
    if x.sizes:
        source = ScanSource(kind, x.sizes, dim % len(x.sizes), computes, element)
        for part, dtype in enumerate(dtypes):
            dtype = torch.int64 if (kind, part) in POSITION_RESULTS else dtype
            results.append(Scanned(source.sizes, dtype, call.device, source, part))
    else:  # a tensor of rank 0 is one element at position 0
        bodies: list[ElementBody] = [element, lambda reader, indices: reader.number(0, torch.int64)]
        results += [pointwise((), dtype, call.device, body) for dtype, body in zip(dtypes, bodies, strict=False)]
    return results[0] if len(results) == 1 else tuple(results)
