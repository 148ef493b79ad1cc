"""Rules of matmuls of quantised operands: contractions with dequantisation as prologue, and scales as epilogue.

They stay library calls as other matmuls do (`check_choice`).
"""

from __future__ import annotations

import torch

from fxwrap.loop_ir import FLOAT8, HALF_PRECISION, Scalar, as_index
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, broadcast_indices, reduction
from fxwrap.lowering.graph_definitions import library_call_reason
from fxwrap.lowering.rules.matmuls import check_choice
from fxwrap.lowering.rules.registry import LIBRARY_RULES, Declined, LoweringResult, OperatorCall, lowering_rule
from fxwrap.symbolic import product

_TILE = 16  # elements along the reduced dimension of the tiles of m16n8k16, tensor cores' matmul


@lowering_rule("aten._weight_int8pack_mm.default", rules=LIBRARY_RULES)
def _weight_int8pack_mm(call: OperatorCall, left: Definition, weight: Definition, scales: Definition) -> LoweringResult:
    """Rows times int8 columns, each with a scale, which multiplies the sum."""
    if weight.dtype is not torch.int8 or not left.dtype.is_floating_point or scales.dtype is not left.dtype:
        raise Declined("its operands are of other dtypes than int8 and one floating-point dtype")
    check_choice(call, left, left.sizes[0])

    def element(reader: ElementReader, at: Indices, reduced: Indices) -> Scalar:
        column = reader.load(weight, (at[1], *reduced)).to(left.compute_dtype)
        return reader.load(left, (at[0], *reduced)) * column

    sizes = (left.sizes[0], weight.sizes[0])
    (total,) = reduction(
        "sum", sizes, left.sizes[-1:], call.device, left.compute_dtype, element, (call.dtype,), left.dtype
    )
    return call.define(lambda reader, at: reader.load(total, at) * reader.load(scales, at[1:]))


@lowering_rule("aten._weight_int4pack_mm.default", rules=LIBRARY_RULES)
def _weight_int4pack_mm(
    call: OperatorCall, left: Definition, weight: Definition, group: int, scales_and_zeros: Definition
) -> LoweringResult:
    """Rows times int4 columns, packed as `_convert_weight_to_int4pack` packs them for NVIDIA GPUs.

    Words are [columns / 8, width / (16 * tiles), 32, tiles / 2]. The lane 4 * n + k of a tile of 8 columns has elements
    2k, 2k + 1, 2k + 8 and 2k + 9 of its column n; a word holds those of two tiles, first the even elements, then the
    odd ones. An element is (int4 - 8) * scale + zero, with scales and zeros of `group` elements of a column.
    """
    if call.matmul_kernels == "auto" and not call.tunes_matmuls:  # not even one row is known to be faster
        raise Declined(library_call_reason(call.name) or "a library call")
    check_choice(call, left, left.sizes[0])
    blocks, _, _, pairs = weight.sizes
    if torch.version.hip is not None or not isinstance(pairs, int) or not isinstance(blocks, int):
        raise Declined("kernels have int4 weights of constant sizes, as they are packed for NVIDIA GPUs")
    if left.dtype not in HALF_PRECISION or scales_and_zeros.dtype is not left.dtype:
        raise Declined("its operands are not of one half-precision dtype")

    def element(reader: ElementReader, at: Indices, reduced: Indices) -> Scalar:
        column, k = as_index(at[1]), as_index(reduced[0])
        digit = k % _TILE
        lane = column % 8 * 4 + digit % 8 // 2
        word = reader.load(weight, (column // 8, k // (2 * _TILE * pairs), lane, k // (2 * _TILE) % pairs))
        shift = reader.body.index(k // _TILE % 2 * 8 + digit // 8 * 4 + digit % 2 * 16).to(torch.int32)
        nibble = word.apply("bitwise_right_shift", shift).apply("bitwise_and", 15) - 8
        scale, zero = [reader.load(scales_and_zeros, (k // group, column, part)) for part in (0, 1)]
        return reader.load(left, (at[0], k)) * (nibble.to(torch.float32) * scale + zero)

    sizes = (left.sizes[0], 8 * blocks)
    (total,) = reduction("sum", sizes, left.sizes[-1:], call.device, torch.float32, element, (call.dtype,), left.dtype)
    return total


@lowering_rule("aten._scaled_mm.default", dtypes="stored", rules=LIBRARY_RULES)
def _scaled_mm(
    call: OperatorCall,
    left: Definition,
    right: Definition,
    left_scale: Definition,
    right_scale: Definition,
    bias: Definition | None,
    result_scale: Definition | None,
) -> LoweringResult:
    """The product of two float8 matrices, times a scale of each matrix, or of each row and each column.

    The matrices are in memory, where tensor cores read them: the kernel that computes scales of rows also rounds.
    """
    check_choice(call, left, left.sizes[0])
    if not {left.dtype, right.dtype} <= FLOAT8 or call.dtype in FLOAT8 or result_scale is not None:
        raise Declined("kernels of scaled matmuls have float8 operands and wider results")
    (rows, width), columns = left.sizes, right.sizes[1]
    scales = ((left_scale, (rows, 1)), (right_scale, (1, columns)))
    for scale, sizes in scales:
        if scale.dtype is not torch.float32 or (product(scale.sizes) != 1 and scale.sizes != sizes):
            raise Declined("kernels of scaled matmuls have float32 scales of matrices, or of rows and columns")

    call.in_memory.add(left)
    call.in_memory.add(right)

    def element(reader: ElementReader, at: Indices, reduced: Indices) -> Scalar:
        return reader.load(left, (at[0], *reduced)) * reader.load(right, (*reduced, at[1]))

    (total,) = reduction("sum", (rows, columns), (width,), call.device, torch.float32, element, (torch.float32,))

    def scaled(reader: ElementReader, at: Indices) -> Scalar:
        value = reader.load(total, at)
        for scale, _ in scales:
            value = value * reader.load(scale, broadcast_indices(scale.sizes, at))
        return value if bias is None else value + reader.load(bias, at[1:])

    return call.define(scaled)
