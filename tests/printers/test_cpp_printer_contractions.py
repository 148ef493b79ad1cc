"""Contractions in C++ against the loop IR's evaluator."""

from __future__ import annotations

import re

import pytest

from fxwrap.loop_ir import Kernel, parse_kernel, split_columns
from fxwrap.printers.cpp import plan_contraction, print_cpp_kernel
from fxwrap.runtime.native import NativeSource, compile_cpp
from tests.conftest import NO_X86, ON_X86
from tests.loop_ir.test_column_parts import statistics
from tests.printers.cpp_kernels import check, compiled_together


def matmul(rows: int | str, columns: int | str, reduced: int | str, dtype: str = "f32", epilogue: str = "") -> Kernel:
    """The product of a matrix and a transposed one, both contiguous, with a pointwise epilogue of %6."""
    wide = "f64" if dtype == "f64" else "f32"
    return parse_kernel(
        f"""kernel(a: {dtype}[{rows}*{reduced}], b: {dtype}[{columns}*{reduced}]) -> \
(out: {dtype}[{rows}*{columns}]) for [i: {rows}, j: {columns}] reduce [k: {reduced}] {{
  %0 = {dtype} load a[{reduced}*i + k]
  %1 = {wide} cast %0
  %2 = {dtype} load b[{reduced}*j + k]
  %3 = {wide} cast %2
  %4 = {wide} mul %1 %3
  %5 = {wide} reduce sum %4
  %6 = {wide} {epilogue or "neg %5"}
  %7 = {dtype} cast %6
  store out[{columns}*i + j] %7
}}
"""
    )


BATCHED = """kernel(a: f32[2*3*5*33], b: f32[2*7*5*33], c: f32[7]) -> (out: f32[42], other: f32[42]) \
for [n: 2, i: 3, j: 7] reduce [g: 5, k: 33] {
  %0 = f32 load a[495*n + 165*i + 33*g + k]
  %1 = f32 exp %0
  %2 = f32 load b[1155*n + 33*j + 231*g + k]
  %3 = f32 mul %2 %1
  %4 = f32 reduce sum %3
  %5 = f32 abs %2
  %6 = f32 mul %1 %5
  %7 = f32 reduce sum %6
  %8 = f32 load c[j]
  %9 = f32 add %4 %8
  %10 = f32 mul %9 %7
  store out[21*n + 7*i + j] %10
  store other[21*n + 3*j + i] %7
}
"""
"""Two products of a computed operand in one kernel, over two reduced axes, with a bias and two results."""

QUANTISED = """kernel(a: bf16[2*70], b: i8[9*70], scale: f32[9]) -> (out: f32[18]) for [i: 2, j: 9] reduce [k: 70] {
  %0 = bf16 load a[70*i + k]
  %1 = f32 cast %0
  %2 = i8 load b[70*j + k]
  %3 = f32 cast %2
  %4 = f32 load scale[j]
  %5 = f32 mul %3 %4
  %6 = f32 mul %1 %5
  %7 = f32 reduce sum %6 of bf16
  store out[9*i + j] %7
}
"""


PACKED = """kernel(a: bf16[5*200], b: bf16[2*35*70]) -> (out: bf16[5*35]) for [i: 5, j: 35] reduce [k: 70] {
  %0 = bf16 load a[200*i + k + 3]
  %1 = f32 cast %0
  %2 = bf16 load b[70*j + k]
  %3 = f32 cast %2
  %4 = f32 mul %3 %1
  %5 = f32 reduce sum %4
  %6 = bf16 load b[70*j + k + 2450]
  %7 = f32 cast %6
  %8 = f32 mul %1 %7
  %9 = f32 reduce sum %8
  %10 = f32 mul %5 %9
  %11 = bf16 cast %10
  store out[35*i + j] %11
}
"""
"""Two products of one tensor, whose rows are far apart, by the halves of another."""


NORMALISED = """kernel(a: bf16[3*70], scale: f32[3], b: bf16[9*70]) -> (out: f32[27]) \
for [i: 3, j: 9] reduce [k: 70] {
  %0 = bf16 load a[70*i + k]
  %1 = f32 cast %0
  %2 = f32 load scale[i]
  %3 = f32 mul %1 %2
  %4 = bf16 cast %3
  %5 = f32 cast %4
  %6 = bf16 load b[70*j + k]
  %7 = f32 cast %6
  %8 = f32 mul %5 %7
  %9 = f32 reduce sum %8
  store out[9*i + j] %9
}
"""
"""Rows that are computed and rounded."""


ROW_REDUCTIONS = """kernel(a: f32[2*5*70], b: f32[2*6*19*70], c: f32[114], d: i64[10]) \
-> (out: f32[1140], largest: f32[60], total: f32[60], picked: f32[60], share: f32[60]) \
for [n: 2, i: 5, g: 6] reduce [j: 19, k: 70] {
  %0 = f32 load a[350*n + 70*i + k]
  %1 = f32 load b[7980*n + 1330*g + 70*j + k]
  %2 = f32 mul %0 %1
  %3 = f32 reduce sum %2 over k
  %4 = f32 load c[19*g + j]
  %5 = f32 add %3 %4
  %6 = f32 reduce softmax %5 over j
  %7 = f32 part 0 %6
  %8 = f32 part 1 %6
  store largest[30*n + 6*i + g] %7
  store total[30*n + 6*i + g] %8
  %11 = f32 sub %5 %7
  %12 = f32 exp %11
  %13 = f32 div %12 %8
  store out[570*n + 114*i + 19*g + j] %13
  %15 = f32 mul %13 %13
  %16 = f32 reduce sum %15 over j
  store share[30*n + 6*i + g] %16
  %18 = i64 load d[5*n + i]
  %19 = i64 index j
  %20 = bool eq %18 %19
  %21 = f32 0.0
  %22 = f32 where %20 %5 %21
  %23 = f32 reduce sum %22 over j
  store picked[30*n + 6*i + g] %23
}
"""
"""Products, a softmax of each group of columns, a later sum of its squares, and one chosen column."""


def parts(rows: int, columns: int, kind: str = "softmax") -> Kernel:
    """The first kernel of statistics of a matmul's rows that are split along columns."""
    split = split_columns(statistics(columns, kind, rows))
    assert split is not None
    return split.kernels[0]


def kernels() -> list[Kernel]:
    """Kernels whose sizes are and are not multiples of tiles and vectors."""
    return [
        *[matmul(*case) for case in [(1, 40, 1100), (2, 9, 64), (5, 8, 33), (11, 13, 5), (16, 12, 1100)]],
        matmul(4, 6, 31, "f64"), matmul(9, 4, 1500, "f16"), matmul("s0", "s1", "s2"), matmul("s0", 9, 40, "f16"),
        parse_kernel(BATCHED), parse_kernel(QUANTISED), parse_kernel(ROW_REDUCTIONS),
        parts(3, 300), parts(11, 512, "welford"), statistics(40, "max", 1),
    ]  # fmt: skip


def matrix_kernels() -> list[Kernel]:
    """Contractions of bfloat16 matrices, whose sizes are and are not multiples of tiles."""
    sizes = [(1, 40, 1100), (3, 17, 70), (8, 64, 96), (16, 33, 64), (21, 5, 31)]
    computed = [parse_kernel(PACKED), parse_kernel(NORMALISED)]
    return [*[matmul(*size, "bf16") for size in sizes], *computed]


compiled_kernels = compiled_together(lambda position: kernels()[position])


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("position", range(len(kernels())))
def test_contractions(position: int) -> None:
    kernel = kernels()[position]
    assert plan_contraction(kernel) is not None
    for numbers in [{"s0": 7, "s1": 9, "s2": 40}, {"s0": 0, "s1": 3, "s2": 2}, {"s0": 2, "s1": 3, "s2": 0}]:
        values = {symbol.name: numbers[symbol.name] for symbol in kernel.symbols}
        assert "ProductTile" in check(kernel, values, rtol=1e-4)
        if not values:
            break


GROUPED = """kernel(a: f32[2*4*32], b: u8[9*4*32], scale: f32[36]) -> (out: f32[18]) \
for [i: 2, j: 9] reduce [g: 4, k: 32] {
  %0 = f32 load a[128*i + 32*g + k]
  %1 = u8 load b[128*j + 32*g + k]
  %2 = f32 cast %1
  %3 = f32 load scale[4*j + g]
  %4 = f32 mul %2 %3
  %5 = f32 mul %0 %4
  %6 = f32 reduce sum %5
  store out[9*i + j] %6
}
"""


def test_short_groups_are_whole_vectors_whose_lanes_are_added_once() -> None:
    """32 bytes widen to two vectors of float32; four would leave all elements to the loop after the last step."""
    lines = check(parse_kernel(GROUPED), rtol=1e-4).splitlines()
    products, end = [
        [at for at, line in enumerate(lines) if text in line] for text in (".template add<2>", ".finish()")
    ]
    loop = [at for at, line in enumerate(lines) if "for (int64_t g = 0" in line][-1]
    depth = [len(line) - len(line.lstrip()) for line in lines]
    assert loop < products[0] < end[0] and depth[end[0]] == depth[loop]


PREFETCH = re.compile(rb"\x0f\x18[\x10-\x17\x50-\x57\x90-\x97]")
"""The instruction `prefetcht1`."""


@pytest.mark.skipif(not ON_X86, reason=NO_X86)
def test_columns_that_are_read_later_are_prefetched() -> None:
    """GCC omits calls of functions that only call __builtin_prefetch."""
    source = NativeSource(print_cpp_kernel(matmul(8, 96, 1024)).source, kernels=1)
    assert PREFETCH.search(compile_cpp("", name="prefetches", extra_sources=[source]).read_bytes())


compiled_matrix_kernels = compiled_together(lambda position: matrix_kernels()[position])


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("compiled_matrix_kernels")
@pytest.mark.parametrize("position", range(len(matrix_kernels())))
def test_contractions_of_matrices(position: int) -> None:
    assert "MatrixTile" in check(matrix_kernels()[position])


NO_PERMISSION = """#if MATRIX_TILES
static const int denied = (matrix_permission = 2);
#endif
"""


def test_contractions_of_matrices_without_permission_for_matrix_instructions() -> None:
    for kernel in matrix_kernels()[2::3]:
        check(kernel, preamble=NO_PERMISSION)


def test_other_contractions_have_no_plan() -> None:
    strided = str(matmul(5, 9, 33)).replace("b[33*j + k]", "b[9*k + j]")
    assert plan_contraction(parse_kernel(strided)) is None, "columns are not contiguous"
    assert plan_contraction(matmul(0, 9, 33)) is None, "nothing is computed"
    assert plan_contraction(matmul(4096, 8192, 2048)) is None, "the row operand does not fit"
    assert plan_contraction(statistics(300)) is None, "no block has all columns"
    assert plan_contraction(statistics(40, "argmax")) is None, "row reductions have one value"
