"""Transposed operands in C++: tiles of half precision, under conditions, and blocks of float16 of any length."""

from __future__ import annotations

import pytest
import sympy
import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, as_index
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.symbolic import Size
from tests.printers.cpp_kernels import BF16, F32, check, matrix, random_tensor

F16 = torch.float16
SHAPES = [(64, 96), (77, 33), (33, 130), (17, 18)]


def product_of(dtype: torch.dtype, rows: int, columns: int) -> Kernel:
    """A matrix times a transposed one."""
    body, row, column = KernelBuilder(), Axis("i", rows), Axis("j", columns)
    x = body.load("x", matrix(row, column), dtype).to(F32)
    y = body.load("y", as_index(column) * rows + row, dtype).to(F32)
    body.store("out", matrix(row, column), (x * y).to(dtype))
    count = rows * columns
    return body.finish([row, column], [], [Buffer(name, dtype, count) for name in "xy"], [Buffer("out", dtype, count)])


def concatenation_of(dtype: torch.dtype, rows: int, columns: int, dimension: int) -> Kernel:
    """A transposed matrix and a contiguous one, one after the other along a dimension."""
    sizes = (2 * rows, columns) if dimension == 0 else (rows, 2 * columns)
    body, row, column = KernelBuilder(), Axis("i", sizes[0]), Axis("j", sizes[1])
    axis, size = ((row, rows), (column, columns))[dimension]
    is_first = body.index(axis) < size
    second = (as_index(row) - rows, as_index(column)) if dimension == 0 else (as_index(row), as_index(column) - columns)
    with body.masked(is_first):
        transposed = body.load("x", as_index(column) * rows + row, dtype)
    with body.masked(~is_first):
        contiguous = body.load("y", second[0] * columns + second[1], dtype)
    value = is_first.where(transposed, contiguous)
    body.store("out", as_index(row) * sizes[1] + column, value)
    count = rows * columns
    return body.finish(
        [row, column], [], [Buffer(name, dtype, count) for name in "xy"], [Buffer("out", dtype, 2 * count)]
    )


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_of_halves_are_converted_in_blocks(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    source = check(product_of(dtype, *shape))
    assert "transpose(" in source
    assert source.count("widen(") == (2 if dtype is F16 else 0)


@pytest.mark.parametrize("dtype", [F16, F32, torch.uint8], ids=str)
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed_operands_of_concatenations_are_tiled(
    dtype: torch.dtype, dimension: int, shape: tuple[int, int]
) -> None:
    assert "transpose(" in check(concatenation_of(dtype, *shape, dimension))


def test_contiguous_operands_of_concatenations_are_loops_in_one() -> None:
    body, row, column = KernelBuilder(), Axis("i", 64), Axis("j", 32)
    is_first = body.index(row) < 32
    with body.masked(is_first):
        x = body.load("x", matrix(row, column), F32)
    with body.masked(~is_first):
        y = body.load("y", matrix(row, column) - 1024, F32)
    value = is_first.where(x, y)
    body.store("out", matrix(row, column), value)
    inputs = [Buffer(name, F32, 1024) for name in "xy"]
    assert (
        "transpose(" not in print_cpp_kernel(body.finish([row, column], [], inputs, [Buffer("out", F32, 2048)])).source
    )


def rows_of(length: int) -> Kernel:
    """Rows of float16 with gaps between them, scaled."""
    body, row, element = KernelBuilder(), Axis("i", 5), Axis("j", length)
    x = body.load("x", as_index(row) * (length + 3) + element, F16).to(F32)
    body.store("out", matrix(row, element), (x * 3.0).to(F16))
    return body.finish([row, element], [], [Buffer("x", F16, 5 * (length + 3))], [Buffer("out", F16, 5 * length)])


@pytest.mark.parametrize("length", [*range(3, 37), 63, 64, 65, 79])
@pytest.mark.sampled(4)
def test_float16_rows_of_any_length(length: int) -> None:
    source = check(rows_of(length))
    block = length if length >= 16 else 5 * length
    assert "widen(" in source
    assert ("for_lane_block" in source) == (block > 64), "the length of a short block is a constant"


def row_softmax_of(dtype: torch.dtype, rows: int, columns: int, batches: int) -> Kernel:
    """The softmax of rows of a sum of a matrix and a transposed one, and the sums of these rows."""
    body, batch, row, column = KernelBuilder(), Axis("b", batches), Axis("i", rows), Axis("j", columns)
    whole, result = rows * columns, F32 if dtype.itemsize == 1 else dtype
    x = body.load("x", as_index(batch) * whole + matrix(row, column), dtype).to(F32)
    y = body.load("y", as_index(batch) * whole + as_index(column) * rows + row, dtype).to(F32)
    value = (x + y) * 0.5
    power = (value - body.reduce("max", value)[0]).exp()
    quotient = power / body.reduce("sum", power)[0]
    body.store("out", as_index(batch) * whole + matrix(row, column), quotient.to(result))
    body.store("total", as_index(batch) * rows + row, body.reduce("sum", value)[0])
    count = batches * whole
    outputs = [Buffer("out", result, count), Buffer("total", F32, batches * rows)]
    return body.finish([batch, row], [column], [Buffer(name, dtype, count) for name in "xy"], outputs)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 200)], ids=str)
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.sampled(2)
def test_rows_with_transposed_operands(dtype: torch.dtype, shape: tuple[int, int], batches: int) -> None:
    assert "transpose(" in check(row_softmax_of(dtype, *shape, batches), rtol=2e-5)


@pytest.mark.parametrize("shape", [(15, 64), (64, 15), (16, 9000)], ids=str)
def test_few_or_long_rows_have_no_tiles(shape: tuple[int, int]) -> None:
    assert "transpose(" not in print_cpp_kernel(row_softmax_of(F32, *shape, 1)).source


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sums_of_gathered_vectors_are_vectors(dtype: torch.dtype) -> None:
    body, bag, item, column = KernelBuilder(), Axis("b", 50), Axis("k", 4), Axis("j", 70)
    index = body.load("index", matrix(bag, item), torch.int64)
    body.device_assert((index >= 0) & (index < 31), "out of bounds")
    element = body.load("table", body.indirect_index(index, 31) * 70 + column, dtype).to(F32)
    body.store("out", matrix(bag, column), body.reduce("sum", element)[0])
    inputs = [Buffer("index", torch.int64, 200), Buffer("table", dtype, 31 * 70)]
    kernel = body.finish([column, bag], [item], inputs, [Buffer("out", F32, 3500)])
    index_of = torch.randint(0, 31, (200,), generator=torch.Generator().manual_seed(1))
    source = check(kernel, arguments={"index": index_of})
    assert "load_columns" not in source, "lanes are elements of vectors"
    before = source[: source.index("failed |=")].splitlines()
    assert not any("lane" in line for line in before[-4:]), "the index of a vector is checked once"


def column_softmax_of(dtype: torch.dtype, rows: Size, columns: int, is_across: str) -> Kernel:
    """The softmax of columns of a sum of a matrix and a transposed one, and their sums; `is_across`: operand, result.

    Where the operand is not transposed, or the result, it has the layout of the matrix.
    """
    body, row, column = KernelBuilder(), Axis("i", rows), Axis("j", columns)
    across = as_index(column) * as_index(rows) + row
    result = F32 if dtype is torch.int8 else dtype
    x = body.load("x", as_index(row) * columns + column, dtype).to(F32)
    y = body.load("y", across if "operand" in is_across else as_index(row) * columns + column, dtype).to(F32)
    value = x * 0.5 + y
    power = (value - body.reduce("max", value)[0]).exp()
    quotient = power / body.reduce("sum", power)[0]
    body.store("out", across if "result" in is_across else as_index(row) * columns + column, quotient.to(result))
    body.store("total", as_index(column), body.reduce("sum", value)[0])
    count = rows * columns
    outputs = [Buffer("out", result, count), Buffer("total", F32, columns)]
    return body.finish([column], [row], [Buffer(name, dtype, count) for name in "xy"], outputs)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(300, 130), (1000, 33), (33, 40), (47, 1000), (2100, 17)], ids=str)
@pytest.mark.parametrize("is_across", ["result", "operand", "operand and result"])
@pytest.mark.sampled(3)
def test_columns_with_operands_or_results_across(dtype: torch.dtype, shape: tuple[int, int], is_across: str) -> None:
    kernel = column_softmax_of(dtype, *shape, is_across)
    values = {item.name: random_tensor(item, int(item.extent), 7) for item in kernel.inputs}
    if dtype is not torch.int8:
        values["x"][5], values["y"][31], values["y"][98] = float("nan"), float("inf"), float("-inf")
    source = check(kernel, arguments=values, rtol=2e-5)
    if (shape, is_across) != ((2100, 17), "operand and result"):  # most accesses are contiguous along the rows
        assert "transpose(" in source or "_columns<" in source


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(9000, 16), (5000, 70), (70, 40)], ids=str)
def test_long_sums_of_products_in_two_layouts_have_tiles(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, columns = shape
    body, row, column = KernelBuilder(), Axis("i", rows), Axis("j", columns)
    x = body.load("x", matrix(row, column), dtype).to(F32)
    y = body.load("y", as_index(column) * rows + row, dtype).to(F32)
    body.store("out", as_index(column), body.reduce("sum", x * y)[0])
    inputs = [Buffer(name, dtype, rows * columns) for name in "xy"]
    assert "transpose(" in check(body.finish([column], [row], inputs, [Buffer("out", F32, columns)]), rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 70, 1000])
def test_columns_of_a_symbolic_length_with_results_across(rows: int) -> None:
    kernel = column_softmax_of(BF16, sympy.Symbol("s0", integer=True, positive=True), 40, "result")
    assert "transpose(" in check(kernel, {"s0": rows}, rtol=2e-5)
