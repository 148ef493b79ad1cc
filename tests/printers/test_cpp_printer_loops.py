"""Loops in C++ against the loop IR's evaluator: reductions and scans of every kind in every shape, stages, stores."""

from __future__ import annotations

from itertools import product

import pytest
import sympy
import torch

from fxwrap.loop_ir import (
    REDUCTIONS,
    SCANS,
    ZERO,
    Axis,
    Buffer,
    Kernel,
    KernelBuilder,
    Scalar,
    as_index,
    linearize_index,
)
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.runtime.kernels import load_kernel
from fxwrap.runtime.native import build_bridge, compiler
from fxwrap.symbolic import make_symbol
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together, matrix, pointwise, reduction
from tests.printers.triton_kernels import squares_kernel

DTYPES = (F32, torch.float64, torch.int64, torch.int32, torch.uint8)


SHAPES = {
    "row": ((5, 70), (1,)),
    "one_element_row": ((5, 1), (1,)),
    "column": ((70, 37), (0,)),
    "wide_columns": ((9, 300), (0,)),
    "both": ((7, 9), (0, 1)),
    "outer_and_inner": ((4, 5, 66), (0, 2)),
    "middle": ((3, 40, 20), (1,)),
}


def kinds_and_dtypes() -> list[tuple[str, torch.dtype]]:
    cases = []
    for kind, spec in REDUCTIONS.items():
        cases += [(kind, dtype) for dtype in (*DTYPES, torch.bool) if spec.domain.accepts(dtype)]
    return cases


compiled_reductions = compiled_together(lambda kind, dtype, shape: reduction(kind, dtype, *SHAPES[shape]))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("compiled_reductions")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "dtype"), kinds_and_dtypes(), ids=str)
def test_reductions(kind: str, dtype: torch.dtype, shape: str) -> None:
    check(reduction(kind, dtype, *SHAPES[shape]))


LONG = {
    "full": ((70000,), (0,)),
    "row": ((2, 40000), (1,)),
    "column": ((3000, 3), (0,)),
    "outer": ((40, 3, 1100), (0, 2)),
}


LONG_KINDS = ("sum", "max", "argmin", "welford", "softmax")

compiled_long_reductions = compiled_together(lambda kind, shape: reduction(kind, F32, *LONG[shape]))


@pytest.mark.usefixtures("compiled_long_reductions")
@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize("kind", LONG_KINDS)
def test_long_reductions_are_split(kind: str, shape: str) -> None:
    check(reduction(kind, F32, *LONG[shape]), rtol=1e-4)


@pytest.mark.parametrize("kind", ["max", "min", "argmax", "argmin"])
@pytest.mark.parametrize("shape", ["row", "column"])
def test_nan_propagates_and_ties_return_the_first_index(kind: str, shape: str) -> None:
    sizes, reduced = ((4, 200), (1,)) if shape == "row" else ((200, 4), (0,))
    x = torch.zeros(4, 200)
    x[1, 150] = x[1, 70] = float("nan")
    x[2] = -float("inf")
    x[3] = torch.arange(200) % 3
    arguments = {"x": (x if shape == "row" else x.T).contiguous().flatten()}
    check(reduction(kind, F32, sizes, reduced), arguments=arguments)


@pytest.mark.parametrize("kind", ["sum", "prod", "any", "all"])
@pytest.mark.parametrize("sizes", [(3, 0), (0, 3)])
def test_empty_reductions_and_empty_results(kind: str, sizes: tuple[int, int]) -> None:
    dtype = torch.bool if kind in ("any", "all") else F32
    check(reduction(kind, dtype, sizes, (1,)))


@pytest.mark.parametrize("loaded", [BF16, torch.float16])
@pytest.mark.parametrize("shape", ["row", "column"])
def test_half_precision_is_reduced_in_float32(loaded: torch.dtype, shape: str) -> None:
    check(reduction("sum", F32, *SHAPES[shape], loaded=loaded))


def test_a_long_float32_sum_is_accurate() -> None:
    x = torch.rand(1 << 20, generator=torch.Generator().manual_seed(3))
    kernel = reduction("sum", F32, (1 << 20,), (0,))
    printed = print_cpp_kernel(kernel)
    out = torch.empty(1)
    load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), x, out)
    assert abs(out.item() / x.double().sum().item() - 1) < 3e-7


def scan(kind: str, dtype: torch.dtype, sizes: tuple[int, int], dim: int) -> Kernel:
    """A scan along one dimension of a matrix, storing all its results."""
    body = KernelBuilder()
    axes = [Axis("row", sizes[0]), Axis("column", sizes[1])]
    at = linearize_index(axes, sizes)
    outputs = []
    for place, result in enumerate(body.scan(kind, body.load("x", at, dtype))):
        body.store(f"out{place}", at, result)
        outputs.append(Buffer(f"out{place}", result.dtype, sizes[0] * sizes[1]))
    return body.finish([axes[1 - dim]], [axes[dim]], [Buffer("x", dtype, sizes[0] * sizes[1])], outputs)


SCAN_CASES = [
    (kind, dtype, dim, sizes)
    for kind, spec in SCANS.items()
    for dtype in (F32, torch.float64, torch.int64, torch.uint8)
    for dim in (0, 1)
    for sizes in ((3, 100), (1, 1), (2, 5000))
    if spec.domain.accepts(dtype)
]

compiled_scans = compiled_together(lambda kind, dtype, dim, sizes: scan(kind, dtype, sizes, dim))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("compiled_scans")
@pytest.mark.parametrize(("kind", "dtype", "dim", "sizes"), SCAN_CASES, ids=str)
def test_scans(kind: str, dtype: torch.dtype, dim: int, sizes: tuple[int, int]) -> None:
    arguments = {"x": torch.ones(sizes[0] * sizes[1], dtype=dtype)} if kind == "cumprod" else None
    check(scan(kind, dtype, sizes, dim), arguments=arguments, rtol=1e-4)


def test_a_scan_of_nan_and_infinity() -> None:
    x = torch.tensor([1.0, float("inf"), 2.0, float("nan"), 5.0, -float("inf"), 3.0, 3.0])
    for kind in SCANS:
        check(scan(kind, F32, (1, 8), 1), arguments={"x": x})


def softmax(rows: int, columns: int, dtype: torch.dtype, dim: int) -> Kernel:
    """A softmax along one dimension of a matrix."""
    body = KernelBuilder()
    axes = [Axis("row", rows), Axis("column", columns)]
    at = linearize_index(axes, (rows, columns))
    x = body.load("x", at, dtype).to(F32)
    largest, total = body.reduce("softmax", x)
    body.store("out", at, ((x - largest).exp() / total).to(dtype))
    count = rows * columns
    return body.finish([axes[1 - dim]], [axes[dim]], [Buffer("x", dtype, count)], [Buffer("out", dtype, count)])


SOFTMAX_CASES = list(product([(3, 100), (100, 3), (1, 1), (2, 40000), (3000, 40)], (F32, BF16), (0, 1)))

compiled_softmaxes = compiled_together(lambda sizes, dtype, dim: softmax(*sizes, dtype, dim))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("compiled_softmaxes")
@pytest.mark.parametrize(("sizes", "dtype", "dim"), SOFTMAX_CASES, ids=str)
def test_softmax_in_one_kernel(sizes: tuple[int, int], dtype: torch.dtype, dim: int) -> None:
    check(softmax(*sizes, dtype, dim))


def layer_norm(rows: int, columns: int, dtype: torch.dtype, dim: int) -> Kernel:
    """Residual and layer norm along one dimension, which stores the sum and the statistics too."""
    body = KernelBuilder()
    axes = [Axis("row", rows), Axis("column", columns)]
    at, along = linearize_index(axes, (rows, columns)), as_index(axes[dim])
    x = body.load("x", at, dtype).to(F32) + body.load("r", at, dtype).to(F32)
    mean, squares = body.reduce("welford", x)
    length = (rows, columns)[dim]
    scale = (squares / float(length) + 1e-5).rsqrt()
    body.store("sum", at, x.to(dtype))
    body.store("out", at, ((x - mean) * scale * body.load("w", along, dtype).to(F32)).to(dtype))
    body.store("mean", as_index(axes[1 - dim]), mean)
    body.store("scale", as_index(axes[1 - dim]), scale)
    count, remaining = rows * columns, (rows, columns)[1 - dim]
    inputs = [Buffer("x", dtype, count), Buffer("r", dtype, count), Buffer("w", dtype, length)]
    outputs = [Buffer("sum", dtype, count), Buffer("out", dtype, count), Buffer("mean", F32, remaining)]
    return body.finish([axes[1 - dim]], [axes[dim]], inputs, [*outputs, Buffer("scale", F32, remaining)])


NORM_CASES = list(product([(3, 100), (100, 3), (5, 2000), (2, 40000), (1000, 70)], (F32, BF16), (0, 1)))

compiled_norms = compiled_together(lambda sizes, dtype, dim: layer_norm(*sizes, dtype, dim))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("compiled_norms")
@pytest.mark.parametrize(("sizes", "dtype", "dim"), NORM_CASES, ids=str)
def test_layer_norm_in_one_kernel(sizes: tuple[int, int], dtype: torch.dtype, dim: int) -> None:
    check(layer_norm(*sizes, dtype, dim), rtol=1e-4)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("columns", [50, 300])
def test_results_of_rows_are_stored_transposed(dtype: torch.dtype, columns: int) -> None:
    """As in a norm of channels-last images whose result is contiguous: in tiles, of which the last ones are smaller.

    Up to a length, rows are transposed before; longer ones after they are normalised.
    """
    body, image, row, column = KernelBuilder(), Axis("n", 2), Axis("i", 37), Axis("j", columns)
    x = body.load("x", linearize_index([image, row, column], (2, 37, columns)), dtype).to(F32)
    mean, _ = body.reduce("welford", x)
    body.store("out", linearize_index([image, column, row], (2, columns, 37)), (x - mean).to(dtype))
    body.store("mean", linearize_index([image, row], (2, 37)), mean)
    outputs = [Buffer("out", dtype, 74 * columns), Buffer("mean", F32, 74)]
    kernel = body.finish([image, row], [column], [Buffer("x", dtype, 74 * columns)], outputs)
    source = check(kernel, rtol=1e-4)
    assert ("load_columns<50>(x + " if columns == 50 else "transpose(&out_tile") in source


@pytest.mark.parametrize(("dtype", "columns", "rows"), [(F32, 10, 75), (BF16, 21, 75), (F32, 31, None), (F32, 3, 40)])
def test_short_rows_are_transposed_and_written_in_place(dtype: torch.dtype, columns: int, rows: int | None) -> None:
    number = rows if rows is not None else make_symbol("s0")
    body, row, column = KernelBuilder(), Axis("i", number), Axis("j", columns)
    at = as_index(row) * columns + as_index(column)
    x = body.load("x", at, dtype).to(F32) * body.load("weight", as_index(column), F32)
    mean, _ = body.reduce("welford", x)
    _, position = body.reduce("argmax", x)
    body.store("x", at, (x - mean).to(dtype))
    body.store("position", as_index(row), position)
    outputs = [Buffer("x", dtype, number * columns), Buffer("position", torch.int64, number)]
    kernel = body.finish([row], [column], [Buffer("weight", F32, columns)], outputs)
    source = check(kernel, {} if rows is not None else {"s0": 70}, rtol=1e-4)
    assert f"load_columns<{columns}>(x + " in source and f"store_columns<{columns}>(&x_tile" in source


def group_norm(groups: int, columns: int, rows: int, updates_mean: bool = False) -> Kernel:
    """A group norm of channels-last images, which stores the means and the largest elements of groups too."""
    body = KernelBuilder()
    image, group = parallel = [Axis("n", 2), Axis("g", groups)]
    row, column = reduced = [Axis("i", rows), Axis("c", columns)]
    at, result = (
        linearize_index([image, row, group, column], (2, rows, groups, columns)),
        as_index(image) * groups + group,
    )
    x = body.load("x", at, F32)
    mean, squares = body.reduce("welford", x)
    scale = (squares / float(rows * columns) + 1e-5).rsqrt()
    weight = body.load("w", as_index(group) * columns + column, F32)
    body.store("out", at, (x - mean) * scale * weight)
    body.store("mean", result, mean + body.load("mean", result, F32) if updates_mean else mean)
    body.store("highest", result, body.reduce("max", x)[0])
    count = 2 * rows * groups * columns
    inputs = [Buffer("x", F32, count), Buffer("w", F32, groups * columns)]
    outputs = [Buffer("out", F32, count), Buffer("mean", F32, 2 * groups), Buffer("highest", F32, 2 * groups)]
    return body.finish(parallel, reduced, inputs, outputs)


@pytest.mark.parametrize(("groups", "columns", "rows"), [(3, 6, 20), (35, 10, 70), (2, 24, 2000)])
def test_groups_of_columns_are_reduced_as_columns(groups: int, columns: int, rows: int) -> None:
    """In one block of columns, in several, and in parallel parts of long columns."""
    source = check(group_norm(groups, columns, rows), rtol=1e-4)
    assert f"combine_groups<{columns}>" in source
    assert ("parallel for schedule" in source) == (rows == 2000)


def test_results_of_groups_that_are_read_are_stored_once() -> None:
    assert "combine_groups" not in print_cpp_kernel(group_norm(3, 6, 20, updates_mean=True)).source


def test_a_store_over_an_input_does_not_change_what_later_stages_read() -> None:
    body = KernelBuilder()
    row, column = Axis("row", 3), Axis("column", 100)
    at = linearize_index((row, column), (3, 100))
    x = body.load("x", at, F32) * 2.0
    body.store("x", at, x)
    total = body.reduce("sum", x * x)[0]  # without cancellation
    body.store("out", at, x / total)
    kernel = body.finish([row], [column], [], [Buffer("x", F32, 300), Buffer("out", F32, 300)])
    check(kernel)


def test_two_stores_of_one_element_read_it_first() -> None:
    body, axis = KernelBuilder(), Axis("i", 50)
    x = body.load("x", as_index(axis), F32)
    body.store("x", as_index(axis), x + 1.0)
    body.store("y", as_index(axis), x)
    check(body.finish([axis], [], [], [Buffer("x", F32, 50), Buffer("y", F32, 50)]))


def transposed(sizes: tuple[int, int], dtype: torch.dtype) -> Kernel:
    """A sum of two matrices, of which one is transposed."""

    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        transposed = body.load("x", linearize_index((column, row), (column.size, row.size)), dtype).to(F32)
        body.store("out", matrix(row, column), transposed + body.load("y", matrix(row, column), F32))

    count = sizes[0] * sizes[1]
    return pointwise(formula, *sizes, Buffer("x", dtype, count), Buffer("y", F32, count))


TRANSPOSED_CASES = list(
    product([(1, 1), (7, 33), (64, 64), (65, 130), (100, 144), (3, 1000)], (F32, BF16, torch.float64))
)

compiled_transposed = compiled_together(transposed)


@pytest.mark.usefixtures("compiled_transposed")
@pytest.mark.parametrize(("sizes", "dtype"), TRANSPOSED_CASES, ids=str)
def test_transposed_loads(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    check(transposed(sizes, dtype))


def test_the_vectorised_axis_is_not_that_of_many_values_of_rows() -> None:
    """As in an inference batch norm of contiguous images, whose statistics and weights belong to channels."""
    names = ("mean", "variance", "weight", "bias")

    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        mean, variance, weight, bias = [body.load(name, as_index(row), F32) for name in names]
        scale = weight / (variance * variance + 1e-5)
        body.store("out", matrix(row, column), (body.load("x", matrix(row, column), F32) - mean) * scale + bias)

    buffers = [Buffer("x", F32, 64 * 64), *[Buffer(name, F32, 64) for name in names]]
    assert "transpose" not in check(pointwise(formula, 64, 64, *buffers))


def test_values_of_one_axis_are_tables() -> None:
    """As the indices and weights of an upsampled image, and the scales of its channels: here all in one kernel."""
    body = KernelBuilder()
    axes = image, row, column, channel = [Axis(name, size) for name, size in zip("nijc", (2, 10, 12, 24), strict=True)]
    at = {}
    for axis in (row, column):
        middle = ((body.index(axis).to(F32) + 0.5) * 0.5 - 0.5).maximum(0.0)
        below = middle.to(torch.int64)
        at[axis] = body.indirect_index(below, axis.size), middle - below.to(F32)
    source = linearize_index([image, at[row][0], at[column][0], channel], (2, 5, 6, 24))
    deviation = body.load("deviation", as_index(channel), F32)
    scale = (deviation * deviation + 1e-5).rsqrt()
    value = body.load("x", source, F32) * (at[row][1] + at[column][1] * 2.0) * scale
    size = 2 * 10 * 12 * 24
    body.store("out", linearize_index(axes, (2, 10, 12, 24)), value)
    inputs = [Buffer("x", F32, 2 * 5 * 6 * 24), Buffer("deviation", F32, 24)]
    printed = check(body.finish(axes, [], inputs, [Buffer("out", F32, size)]))
    tables, loops = printed.split("for (int64_t n = 0", 1)
    assert tables.count("_table[") == 2 * 5 and tables.count("int32_t cast_") == 2
    assert "op::" not in loops


def window_sum(width: int, channels_last: bool) -> Kernel:
    """Sums of the padded windows of images [2, 9, 11] of 24 channels: masks of rows, of columns and of both."""
    body, channels, padding = KernelBuilder(), 24, width // 2
    sizes = (2, 9, 11, channels) if channels_last else (2 * channels, 9, 11)
    axes = [Axis(f"i{place}", size) for place, size in enumerate(sizes)]
    total = body.constant(0.0, F32)
    for row, column in product(range(-padding, padding + 1), repeat=2):
        y, x = as_index(axes[1]) + row, as_index(axes[2]) + column
        inside = (body.index(y) >= 0) & (body.index(y) < 9) & (body.index(x) >= 0) & (body.index(x) < 11)
        at = linearize_index([axes[0], y, x, *axes[3:]], sizes)
        total = total + body.where(inside, lambda at=at: body.load("x", at, F32), 0.5)
    body.store("out", linearize_index(axes, sizes), total)
    count = 2 * 9 * 11 * channels
    return body.finish(axes, [], [Buffer("x", F32, count)], [Buffer("out", F32, count)])


WINDOW_CASES = list(product((3, 5), (True, False)))

compiled_window_sums = compiled_together(window_sum)


@pytest.mark.usefixtures("compiled_window_sums")
@pytest.mark.parametrize(("width", "channels_last"), WINDOW_CASES)
def test_loops_of_masked_windows_have_cases(width: int, channels_last: bool) -> None:
    source = check(window_sum(width, channels_last))
    # Of five columns and five rows, not every pair has a loop of its own. Bits select rows: loops are vectorised.
    masks_remain = "x[op::where<int64_t>(logical_and_" in source
    assert "if (" in source and masks_remain == (width == 5)
    assert " ? " not in source


@pytest.mark.parametrize("split", [0, 5, 7])
def test_a_sum_of_concatenated_rows(split: int) -> None:
    """Rows of one buffer or of another one, which is shorter than the kernel's first rows if `split` is 5 of 7."""
    body, row, column = KernelBuilder(), Axis("i", 7), Axis("j", 70)
    is_first = body.index(row) < split
    first = body.where(is_first, lambda: body.load("x", matrix(row, column), F32), 0.0)
    rest = body.where(~is_first, lambda: body.load("y", matrix(row, column) - 70 * split, F32), 0.0)
    body.store("out", as_index(row), body.reduce("sum", is_first.where(first, rest))[0])
    inputs = [Buffer("x", F32, 70 * split), Buffer("y", F32, 70 * (7 - split))]
    source = check(body.finish([row], [column], inputs, [Buffer("out", F32, 7)]))
    assert (" ? x[" in source) == (split == 0)


def test_masks_and_indices_with_divisions() -> None:
    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        inside = (body.index(column) >= 3) & (body.index(column) < 23)
        padded = body.where(inside, lambda: body.load("x", as_index(row) * 20 + column - 3, F32), -1.5)
        position = as_index(row) * 30 + column
        split = body.load("y", (position // 7) * 2 + position % 7, F32)
        shifted = body.load("z", (as_index(column) - 5) // 2 + 3, F32) + body.index((as_index(column) - 5) % 4).to(F32)
        body.store("out", matrix(row, column), padded + split + shifted)

    check(pointwise(formula, 4, 30, Buffer("x", F32, 80), Buffer("y", F32, 60), Buffer("z", F32, 40)))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_conditions_on_the_vectorised_axis_split_its_loop(dtype: torch.dtype) -> None:
    body, row, column = KernelBuilder(), Axis("row", 5), Axis("column", 30)

    def part(name: str, start: int, size: int) -> Scalar:
        return body.load(name, as_index(row) * size + column - start, dtype)

    at = body.index(column)
    last = body.where(at >= 20, lambda: part("c", 20, 10).to(F32), 0.0)
    middle = body.where((at >= 10) & (at < 20), lambda: part("b", 10, 10).to(F32) * 2.0, 0.0)
    with body.masked(at < 10):
        first = part("a", 0, 10).to(F32)
    body.store("out", matrix(row, column), (at < 10).where(first, (at < 20).where(middle, last)).to(dtype))
    body.store("some", as_index(row) * 30 + column, (~(at.equals(7) | (at > 25))).where(last, 9.0), at >= 3)
    inputs = [Buffer(name, dtype, 50) for name in "abc"]
    kernel = body.finish([row, column], [], inputs, [Buffer("out", dtype, 150), Buffer("some", F32, 150)])
    source = check(kernel)
    assert "?" not in source, "no condition is left"
    assert "where" not in source, "nor a choice"


def test_indirect_indices() -> None:
    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        chosen = body.indirect_index(body.load("index", as_index(row), torch.int64), 9)
        small = body.indirect_index(body.load("small", as_index(column), torch.int32).to(torch.int64), 9)
        value = body.load("table", chosen * 30 + column, F32) + body.load("table", small * 30, F32)
        body.store("out", matrix(row, column), value)

    inputs = [Buffer("index", torch.int64, 4), Buffer("small", torch.int32, 30), Buffer("table", F32, 270)]
    check(pointwise(formula, 4, 30, *inputs))


def combining(mode: str, dtype: torch.dtype) -> Kernel:
    """Rows that are combined with the rows of a table at positions that are read."""
    body, row, column = KernelBuilder(), Axis("row", 50), Axis("column", 8)
    chosen = body.indirect_index(body.load("index", as_index(row), torch.int64), 9)
    value = body.load("x", matrix(row, column), dtype)
    mask = body.index(row) < 45
    body.store("out", chosen * 8 + column, value, mask, mode)
    inputs = [Buffer("index", torch.int64, 50), Buffer("x", dtype, 400)]
    return body.finish([row, column], [], inputs, [Buffer("out", dtype, 72)])


COMBINING_CASES = list(product(("add", "max", "min", "prod"), (F32, torch.int64, BF16)))

compiled_combining = compiled_together(combining)


@pytest.mark.usefixtures("compiled_combining")
@pytest.mark.parametrize(("mode", "dtype"), COMBINING_CASES, ids=str)
def test_combining_stores(mode: str, dtype: torch.dtype) -> None:
    check(combining(mode, dtype), rtol=1e-4)


def table_of_sums(columns: int, dtype: torch.dtype) -> Kernel:
    """Many rows that are added to the few rows of a table."""
    body, row, column = KernelBuilder(), Axis("row", 600), Axis("column", columns)
    chosen = body.indirect_index(body.load("index", as_index(row), torch.int64), 9)
    value = body.load("x", matrix(row, column), dtype)
    body.store("out", chosen * columns + column, value, body.index(row) < 550, "add")
    inputs = [Buffer("index", torch.int64, 600), Buffer("x", dtype, 600 * columns)]
    return body.finish([row, column], [], inputs, [Buffer("out", dtype, 9 * columns)])


TABLE_CASES = list(product((16, 70, 1024), (F32, torch.int64, BF16)))

compiled_tables = compiled_together(table_of_sums)


@pytest.mark.usefixtures("compiled_tables")
@pytest.mark.parametrize(("columns", "dtype"), TABLE_CASES, ids=str)
def test_scattered_row_adds_are_parallel_over_columns(columns: int, dtype: torch.dtype) -> None:
    kernel = table_of_sums(columns, dtype)
    x = torch.randint(0, 2, (600 * columns,)).to(dtype)  # sums of whole numbers are exact in any order
    source = check(kernel, arguments={"x": x, "out": torch.zeros(9 * columns, dtype=dtype)})
    assert "parallel" in source or columns < 70


@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize("columns", [1, 5, 3000])
@pytest.mark.parametrize("dim", [0, 1])
def test_symbolic_sizes(rows: int, columns: int, dim: int) -> None:
    s0, s1 = make_symbol("s0"), make_symbol("s1")
    body, row, column = KernelBuilder(), Axis("row", s0), Axis("column", s1)
    axes = (row, column)
    x = body.load("x", linearize_index(axes, (s0, s1)), F32)
    mean, squares = body.reduce("welford", x)
    body.store("out", linearize_index(axes, (s0, s1)), (x - mean) / (squares + 1.0))
    body.store("mean", as_index(axes[1 - dim]), mean)
    outputs = [Buffer("out", F32, s0 * s1), Buffer("mean", F32, (s0, s1)[1 - dim])]
    kernel = body.finish([axes[1 - dim]], [axes[dim]], [Buffer("x", F32, s0 * s1)], outputs)
    check(kernel, {"s0": rows, "s1": columns}, rtol=1e-4)


def test_powers_of_symbols() -> None:
    for sizes in ((3, 4), (1, 1), (2, 0)):
        check(squares_kernel(), dict(zip(("s0", "s1"), sizes, strict=True)))


def test_scalar_arguments() -> None:
    s0, f0 = make_symbol("s0"), make_symbol("f0")
    body, axis = KernelBuilder(), Axis("i", s0)
    scaled = body.load("x", as_index(axis), F32) * body.number(f0, torch.float64).to(F32)
    body.store("out", as_index(axis), scaled + body.number(sympy.Integer(2) * s0, torch.int64).to(F32))
    kernel = body.finish([axis], [], [Buffer("x", F32, s0)], [Buffer("out", F32, s0)])
    check(kernel, {"s0": 17, "f0": 0.3})


def test_reserved_cplusplus_names_are_renamed() -> None:
    body, axis = KernelBuilder(), Axis("for", 9)
    body.store("lane", as_index(axis), body.load("int", as_index(axis), F32) + body.load("op", as_index(axis), F32))
    inputs = [Buffer("int", F32, 9), Buffer("op", F32, 9)]
    check(body.finish([axis], [], inputs, [Buffer("lane", F32, 9)]))


def test_no_axes() -> None:
    body = KernelBuilder()
    body.store("out", ZERO, body.load("x", ZERO, F32).exp())
    check(body.finish([], [], [Buffer("x", F32, 1)], [Buffer("out", F32, 1)]))


def test_the_source_is_readable() -> None:
    body, row, column = KernelBuilder(), Axis("row", 1024), Axis("column", 256)
    with body.origin_scope("softmax"):
        x = body.load("x", matrix(row, column), F32)
        power = (x - body.reduce("max", x)[0]).exp()
        body.store("out", matrix(row, column), power / body.reduce("sum", power)[0])
    count = 1024 * 256
    kernel = body.finish([row], [column], [Buffer("x", F32, count)], [Buffer("out", F32, count)])
    assert print_cpp_kernel(kernel, "softmax", origin_comments=False).source == SOFTMAX


SOFTMAX = """\
#include "kernel.h"

extern "C" void fxwrap_softmax(const float* x, float* out) {
  #pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < 1024; ++row) {
    float exp_3_row[256];
    Lanes<float, 64> max_1_lanes(Limits<float>::lowest);
    for_lanes<64>(256, [&](int64_t column, int lane) {
      max_1_lanes[lane] = combine::max(max_1_lanes[lane], x[256 * row + column]);
    });
    const float max_1 = max_1_lanes.combined(combine::max);
    Lanes<float, 64> sum_4_lanes(float(0));
    for_lanes<64>(256, [&](int64_t column, int lane) {
      const float exp_3 = op::exp(x[256 * row + column] - max_1);
      exp_3_row[column] = exp_3;
      sum_4_lanes[lane] += exp_3;
    });
    const float sum_4 = sum_4_lanes.combined(combine::sum);
    #pragma omp simd
    for (int64_t column = 0; column < 256; ++column) {
      out[256 * row + column] = exp_3_row[column] / sum_4;
    }
  }
}
"""


@pytest.mark.every_combination
@pytest.mark.parametrize("along", ["row", "column"])
@pytest.mark.parametrize("bad", [None, 9])
def test_a_failing_assertion_fails_the_launch(along: str, bad: int | None) -> None:
    body, row, column = KernelBuilder(), Axis("row", 40), Axis("column", 50)
    position = body.load("index", as_index(row if along == "row" else column), torch.int64)
    inside = (position >= 0) & (position < 9)
    body.device_assert(inside, 'out of "bounds"')
    chosen = body.indirect_index(inside.where(position, 0), 9)
    body.store("out", matrix(row, column), body.load("table", chosen * 50 + column, F32))
    count = 40 if along == "row" else 50
    inputs = [Buffer("index", torch.int64, count), Buffer("table", F32, 450)]
    kernel = body.finish([row, column], [], inputs, [Buffer("out", F32, 2000)])
    positions = torch.arange(count) % 9
    if bad is None:
        check(kernel, arguments={"index": positions})
        return
    positions[-1] = bad
    printed = print_cpp_kernel(kernel)
    launch = load_kernel("cpp", printed.source, printed.signature, printed.options)
    with pytest.raises(IndexError, match='out of "bounds"'):
        launch((1, 1, 1), positions, torch.randn(450), torch.empty(2000))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_assertion_in_a_reduction(dim: int, in_place: bool) -> None:
    """Also about elements that the kernel overwrites."""
    body, axes = KernelBuilder(), (Axis("row", 40), Axis("column", 50))
    at = linearize_index(axes, (40, 50))
    position = body.load("index", at, torch.int64)
    inside = position < 9
    body.device_assert(inside, "out of bounds", "runtime")
    table = body.load("table", body.indirect_index(inside.where(position, 0), 9), F32)
    body.store("out", as_index(axes[1 - dim]), body.reduce("sum", table)[0])
    if in_place:
        body.store("index", at, position * 2)
    index, out = Buffer("index", torch.int64, 2000), Buffer("out", F32, (40, 50)[1 - dim])
    inputs, outputs = ([], [index, out]) if in_place else ([index], [out])
    kernel = body.finish([axes[1 - dim]], [axes[dim]], [*inputs, Buffer("table", F32, 9)], outputs)
    positions = torch.arange(2000) % 9
    check(kernel, arguments={"index": positions})
    positions[777] = 11
    printed = print_cpp_kernel(kernel)
    launch = load_kernel("cpp", printed.source, printed.signature, printed.options)
    arguments = {"index": positions, "table": torch.randn(9), "out": torch.empty(50)}
    with pytest.raises(RuntimeError, match=r"^out of bounds"):
        launch((1, 1, 1), *[arguments[buffer.name] for buffer in (*kernel.inputs, *kernel.outputs)])


@pytest.mark.parametrize("dim", [0, 1])
def test_an_assertion_on_scanned_values(dim: int) -> None:
    """The pass that checks it scans from the start once more."""
    sizes = (40, 50)
    body, axes = KernelBuilder(), (Axis("row", 40), Axis("column", 50))
    at = linearize_index(axes, sizes)
    (position,) = body.scan("cumsum", body.load("steps", at, torch.int64))
    inside = position < 9
    body.device_assert(inside, "out of bounds")
    body.store("out", at, body.load("table", body.indirect_index(inside.where(position, 0), 9), F32))
    inputs = [Buffer("steps", torch.int64, 2000), Buffer("table", F32, 9)]
    kernel = body.finish([axes[1 - dim]], [axes[dim]], inputs, [Buffer("out", F32, 2000)])
    steps = torch.zeros(sizes, dtype=torch.int64)
    steps[(slice(None), slice(0, 40, 5)) if dim else slice(0, 40, 5)] = 1  # sums up to 8
    check(kernel, arguments={"steps": steps.flatten()})
    steps[-1, -1] = 1
    printed = print_cpp_kernel(kernel)
    launch = load_kernel("cpp", printed.source, printed.signature, printed.options)
    with pytest.raises(IndexError, match="out of bounds"):
        launch((1, 1, 1), steps.flatten(), torch.randn(9), torch.empty(2000))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_scan_that_two_stages_need(dim: int) -> None:
    sizes = (40, 50)
    body, axes = KernelBuilder(), (Axis("row", 40), Axis("column", 50))
    at = linearize_index(axes, sizes)
    (running,) = body.scan("cumsum", body.load("x", at, F32))
    body.store("out", at, running - body.reduce("max", running)[0])
    kernel = body.finish([axes[1 - dim]], [axes[dim]], [Buffer("x", F32, 2000)], [Buffer("out", F32, 2000)])
    check(kernel, rtol=1e-4)


def test_a_column_sum_that_hung_gcc_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unroll-and-jam went on for ever."""
    body, sizes = KernelBuilder(), (2, 16, 32, 128)
    batch, state, column, row = axes = [Axis(name, size) for name, size in zip("bscr", sizes, strict=True)]
    b, s, c, r = map(as_index, axes)
    x = body.load("x", c * 4096 + b * 2048 + r * 16 + s, F32)
    y, z = [body.load(name, b * 4096 + r * 32 + c, F32) for name in "yz"]
    body.store("out", b * 512 + c * 16 + s, body.reduce("sum", x * y * z)[0])
    inputs = [Buffer(name, F32, count) for name, count in (("x", 131072), ("y", 8192), ("z", 8192))]
    kernel = body.finish([batch, state, column], [row], inputs, [Buffer("out", F32, 1024)])

    build_bridge()
    monkeypatch.setattr(compiler, "COMPILER_TIMEOUT_SECONDS", 60)
    check(kernel, rtol=1e-4)
