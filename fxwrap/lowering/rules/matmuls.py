"""Rules of matmuls: sums of products, which the printers of kernels schedule as contractions.

A library is faster for most shapes, so that a rule declines a call unless a kernel is expected to be faster on the
device, or the option `matmul_kernels` asks for it. Sums are in float32 (float64 for float64), and results are rounded
once, after what is fused with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fxwrap.loop_ir import ONE, Scalar
from fxwrap.lowering.fusion.definitions import (
    Definition,
    ElementReader,
    Indices,
    Pointwise,
    Reduced,
    broadcast_indices,
    reduction,
    unwrap_views,
)
from fxwrap.lowering.fusion.tracing import read_bytes, resolve_views
from fxwrap.lowering.graph_definitions import library_call_reason
from fxwrap.lowering.rules.indexing_common import unchecked_indirect_index
from fxwrap.lowering.rules.registry import (
    LIBRARY_RULES,
    MAX_TUNED_ROWS,
    Declined,
    LoweringResult,
    NumberOrSymbol,
    OperatorCall,
    lowering_rule,
)
from fxwrap.symbolic import Size, product
from fxwrap.torch_compat import symbol_hint

MAX_TUNED_PRODUCTS = 1024
"""The largest number of products of a sum in matmuls of many rows that are timed beside the library.

The library is faster for long sums by more than a pass over the results takes.
"""

Element = Callable[[Indices, Indices], Indices]
"""The indices of an operand's element by those of the result's element and those of the reduced axis."""


def _sum_of_products(
    call: OperatorCall,
    left: Definition,
    right: Definition,
    sizes: tuple[Size, ...],
    left_at: Element,
    right_at: Element,
) -> Reduced:
    """Returns the sum over the last dimension of `left` for each element of a result of these sizes."""
    dtype = left.compute_dtype

    def body(reader: ElementReader, at: Indices, reduced: Indices) -> Scalar:
        return reader.load(left, left_at(at, reduced)) * reader.load(right, right_at(at, reduced))

    (total,) = reduction("sum", sizes, left.sizes[-1:], call.device, dtype, body, (call.dtype,), left.dtype)
    return total


def check_choice(call: OperatorCall, left: Definition, rows: Size, right: Definition | None = None) -> None:
    """Declines a product that stays a library call.

    `rows` is the number of rows that multiply one matrix, `right` the matrix, if it is an operand of the call as it is.
    """
    match call.matmul_kernels:
        case "library":
            raise Declined(library_call_reason(call.name) or "a library call")
        case "auto" if not _is_candidate(call, left, rows, right) and not _is_dequantised(call, rows, right):
            raise Declined(library_call_reason(call.name) or "a library call")
        case _:
            pass


def _check(call: OperatorCall, left: Definition, right: Definition, rows: Size) -> None:
    """Declines a product that stays a library call, or whose operands and result have several dtypes."""
    check_choice(call, left, rows, right)
    if left.dtype is not right.dtype or left.dtype is not call.dtype:
        raise Declined("its operands and its result are of several dtypes")


def _is_candidate(call: OperatorCall, left: Definition, rows: Size, right: Definition | None) -> bool:
    """Whether a kernel is expected to be faster, or will be timed beside the library."""
    if not isinstance(rows, int):
        return _is_unaligned_candidate(call, left, rows, right)
    if call.tunes_matmuls:
        return rows <= MAX_TUNED_ROWS or _has_short_sums(call, left)
    if right is None or len(right.sizes) != 2:
        return call.spec.matmuls.generates(left.dtype, rows)
    matrix_bytes = call.matrix_bytes or product(right.sizes) * right.dtype.itemsize
    return call.spec.matmuls.generates(left.dtype, rows, matrix_bytes) or _is_unaligned_candidate(
        call, left, rows, right
    )


def _is_unaligned_candidate(call: OperatorCall, left: Definition, rows: Size, right: Definition | None) -> bool:
    """Whether a kernel is expected to be faster than a padded matmul whose result is copied."""
    if right is None or len(right.sizes) != 2:
        return False
    products, columns = right.sizes
    hint = rows if isinstance(rows, int) else symbol_hint(call.fake.shape[0])
    return call.spec.matmuls.generates_unaligned(left.dtype, hint, columns, products)


def _has_short_sums(call: OperatorCall, left: Definition) -> bool:
    """Whether a pass over the results of a matrix product takes a large part of the product's time, on a GPU."""
    products = left.sizes[-1]
    is_short = isinstance(products, int) and products <= MAX_TUNED_PRODUCTS
    return is_short and len(left.sizes) == 2 and call.spec.massively_parallel


def _is_dequantised(call: OperatorCall, rows: Size, right: Definition | None) -> bool:
    """Whether a matrix is computed from tensors of at most 3/4 of its bytes, and few rows multiply it.

    A library's call would read a copy of the matrix, which a kernel writes.
    """
    if right is None or not isinstance(rows, int):
        return False
    count, read = product(right.sizes), None
    if rows <= dict(call.spec.matmuls.generated_dequantised_rows).get(right.dtype, 0):
        read = read_bytes(right)
    return read is not None and isinstance(count, int) and 4 * read <= 3 * count * right.dtype.itemsize


def _matrix_product(call: OperatorCall, left: Definition, right: Definition) -> Reduced:
    """Returns the product of two matrices, or of two batches of matrices.

    A computed matrix times one column is one row: a library's call would read a copy, as of the experts of each token.
    """
    batch, (rows, _), (_, columns) = left.sizes[:-2], left.sizes[-2:], right.sizes[-2:]
    is_copied = columns == 1 and isinstance(unwrap_views(left), Pointwise)
    _check(call, left, right, 1 if is_copied else rows)
    return _sum_of_products(
        call, left, right, (*batch, rows, columns),
        lambda at, reduced: (*at[:-1], *reduced), lambda at, reduced: (*at[:-2], *reduced, at[-1]),
    )  # fmt: skip


def _with_addend(
    call: OperatorCall, addend: Definition, product: Definition, beta: NumberOrSymbol, alpha: NumberOrSymbol
) -> LoweringResult:
    """Returns `beta * addend + alpha * product`; with a beta of 0 the addend does not matter, as in eager mode."""
    if addend.dtype is not product.dtype:
        raise Declined("its operands and its result are of several dtypes")

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        value = reader.load(product, indices)
        if alpha != 1:
            value = value * reader.number(alpha, product.dtype)
        if beta == 0:
            return value
        added = reader.load(addend, broadcast_indices(addend.sizes, indices))
        return value + (added if beta == 1 else added * reader.number(beta, product.dtype))

    return call.define(body)


@lowering_rule("aten.mm.default", "aten.bmm.default", dtypes="float", rules=LIBRARY_RULES)
def _mm(call: OperatorCall, left: Definition, right: Definition) -> LoweringResult:
    return _matrix_product(call, left, right)


@lowering_rule("aten.addmm.default", "aten.baddbmm.default", dtypes="float", rules=LIBRARY_RULES)
def _addmm(
    call: OperatorCall, addend: Definition, left: Definition, right: Definition, *, beta: NumberOrSymbol,
    alpha: NumberOrSymbol,
) -> LoweringResult:  # fmt: skip
    return _with_addend(call, addend, _matrix_product(call, left, right), beta, alpha)


def _groups_of_rows(call: OperatorCall, offsets: Definition, rows: Size) -> Definition:
    """Returns for each row the number of groups that end at or before it: the group of the row.

    Kernels read it from memory: a search in each program would be a chain of loads.
    """

    def ends_before(reader: ElementReader, at: Indices, reduced: Indices) -> Scalar:
        row = reader.body.index(at[0])
        return (reader.load(offsets, reduced).to(torch.int64) <= row).to(torch.int64)

    def define() -> Definition:
        (groups,) = reduction("sum", (rows,), offsets.sizes, call.device, torch.int64, ends_before, (torch.int32,))
        return replace(groups, is_ascending=True)

    return call.share(("groups of rows", offsets, rows), define)


def _has_contiguous_columns(matrices: Definition) -> bool:
    """Whether elements of a column are beside each other in the tensor that matrices are a view of."""
    (*outer, first), (*others, second) = [resolve_views(matrices, (0, row, 0))[1] for row in (0, 1)]
    return outer == others and second - first == ONE


@lowering_rule("aten._grouped_mm.default", rules=LIBRARY_RULES)
def _grouped_mm(
    call: OperatorCall,
    left: Definition,
    right: Definition,
    offsets: Definition | None,
    bias: Definition | None,
    out_dtype: torch.dtype | None,
) -> LoweringResult:
    """Rows times the matrix of their group, which ends at the group's offset; rows beyond the last end: any value."""
    if bias is not None or not left.dtype.is_floating_point:
        raise Declined("kernels of grouped matmuls have floating-point operands and no bias")
    if offsets is None:
        return _matrix_product(call, left, right)
    (count, *_), (rows, *_) = right.sizes, left.sizes
    is_generated = call.spec.generates_grouped
    if not is_generated(call.matmul_kernels, left.dtype, rows, count, _has_contiguous_columns(right)):
        raise Declined(library_call_reason(call.name) or "a library call")
    if len(left.sizes) != 2 or len(right.sizes) != 3 or not isinstance(count, int) or not count:
        raise Declined("kernels of grouped matmuls have groups of rows, and a constant number of matrices")
    if left.dtype is not right.dtype or left.dtype is not call.dtype:
        raise Declined("its operands and its result are of several dtypes")
    groups = _groups_of_rows(call, offsets, rows)

    def element(reader: ElementReader, at: Indices, reduced: Indices) -> Scalar:
        last = reader.load(groups, at[:1]).to(torch.int64).minimum(count - 1)
        group = unchecked_indirect_index(reader, last, count)
        return reader.load(left, (at[0], *reduced)) * reader.load(right, (group, *reduced, at[1]))

    sizes, dtype = (rows, right.sizes[2]), left.compute_dtype
    (total,) = reduction("sum", sizes, left.sizes[-1:], call.device, dtype, element, (call.dtype,), left.dtype)
    return total


def _matrix_vector_product(call: OperatorCall, matrix: Definition, vector: Definition) -> Reduced:
    _check(call, matrix, vector, 1)
    return _sum_of_products(
        call, matrix, vector, matrix.sizes[:1], lambda at, reduced: (*at, *reduced), lambda _, reduced: reduced
    )


@lowering_rule("aten.mv.default", dtypes="float", rules=LIBRARY_RULES)
def _mv(call: OperatorCall, matrix: Definition, vector: Definition) -> LoweringResult:
    return _matrix_vector_product(call, matrix, vector)


@lowering_rule("aten.addmv.default", dtypes="float", rules=LIBRARY_RULES)
def _addmv(
    call: OperatorCall, addend: Definition, matrix: Definition, vector: Definition, *, beta: NumberOrSymbol,
    alpha: NumberOrSymbol,
) -> LoweringResult:  # fmt: skip
    return _with_addend(call, addend, _matrix_vector_product(call, matrix, vector), beta, alpha)
