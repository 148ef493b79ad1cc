"""Vectorised loops in C++: gathered halves, indices from bools, bools that select, accuracy of sums, interior loops."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap import Options, compile_graph
from fxwrap.loop_ir import Axis, Buffer, Index, KernelBuilder, Scalar, as_index
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.runtime.kernels import load_kernel
from fxwrap.runtime.native import COMMON_FLAGS, KERNEL_FLAGS, PROGRAM_HEADERS, find_compiler, run_compiler
from tests.printers.cpp_kernels import BF16, F32, check, matrix, pointwise, reduction


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32, torch.int16, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_scalar_gathers_in_vector_loops(dtype: torch.dtype, first: int) -> None:
    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        at = body.load("index", matrix(row, column), torch.int64)
        chosen = body.load("table", body.indirect_index(at, 101), dtype)
        even = at.to(F32) >= 50.0
        masked = body.where(even, lambda: body.load("table", body.indirect_index(at, 101), dtype).to(F32), -1.0)
        body.store("out", matrix(row, column), chosen.to(F32) * 2.0 + masked)

    generator = torch.Generator().manual_seed(5)
    elements = torch.randn(101 + first, generator=generator) * 9
    table = (elements.abs() if dtype is torch.uint8 else elements).to(dtype)[first:]  # one begins within a word, too
    index = torch.randint(0, 101, (5 * 75,), generator=generator)
    source = check(
        pointwise(formula, 5, 75, Buffer("index", torch.int64, 375), Buffer("table", dtype, 101)),
        arguments={"table": table, "index": index},
    )
    assert ("gather(" in source) == (dtype is not F32)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32], ids=str)
@pytest.mark.parametrize("stride", [2, 40])
def test_halves_that_are_far_from_each_other_are_gathered(dtype: torch.dtype, stride: int) -> None:
    body, row, column = KernelBuilder(), Axis("row", 7), Axis("column", 70)
    far = body.load("far", as_index(column) * stride + row, dtype).to(F32)
    (total,) = body.reduce("sum", far * body.load("x", matrix(row, column), F32))
    body.store("out", as_index(row), total)
    inputs = [Buffer("far", dtype, 69 * stride + 7), Buffer("x", F32, 490)]
    source = check(body.finish([row], [column], inputs, [Buffer("out", F32, 7)]), rtol=1e-4)
    assert ("gather(far, " in source) == (dtype is not F32 and stride > 8)


@pytest.mark.parametrize("transposed", [False, True])
def test_bools_of_tiles_are_compared_as_bytes(transposed: bool) -> None:
    """A condition that is a byte in memory is not vectorised."""

    def masked(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(hidden, -1.0) if transposed else x.masked_fill(hidden, -1.0).softmax(-1)

    size = (70, 90) if transposed else (70, 5)
    x, hidden = torch.randn(size), torch.rand(size[::-1]).t() > 0.5 if transposed else torch.rand(size) > 0.5
    compiled = compile_graph(make_fx(masked)(x, hidden), [x, hidden], options=Options(emitter="interpreter"))
    (result,) = compiled(x, hidden)
    torch.testing.assert_close(result, masked(x, hidden))
    (kernel,) = compiled.program.kernels
    assert re.search(r"load_bool\(in\d_\d+_tile\[", kernel.source)


def test_loops_over_rows_at_checked_indices_combine_no_assertions() -> None:
    def rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index]

    x, index = torch.randn(40, 300), torch.randint(-40, 40, (9,))
    compiled = compile_graph(make_fx(rows)(x, index), [x, index], options=Options(emitter="interpreter"))
    assert torch.equal(compiled(x, index)[0], rows(x, index))
    (kernel,) = compiled.program.kernels
    assert "failed |= " in kernel.source and "omp simd\n" in kernel.source


_FROM_BOOLS: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "cast": lambda flag, number: flag.to(torch.int64),
    "comparison": lambda flag, number: (number > 4).to(torch.int64),
    "not": lambda flag, number: (~flag).to(torch.int64),
    "difference": lambda flag, number: 1 - flag.to(torch.int64),
    "where": lambda flag, number: flag.where(flag.body.constant(3, torch.int64), 2),
    "nested_where": lambda flag, number: flag.where((number > 4).where(flag.body.constant(1, torch.int64), 0), 0),
    "scaled": lambda flag, number: flag.to(torch.int64) * 3 + 1,
    "int8": lambda flag, number: flag.to(torch.int8),
    "int32": lambda flag, number: flag.to(torch.int32).to(torch.int64),
    "wrapped": lambda flag, number: _wrapped(flag.to(torch.int64)),
}


def _wrapped(index: Scalar) -> Scalar:
    return (index < 0).where(index + 5, index)


_TABLES = [torch.uint8, torch.int16, torch.int32, torch.int64, F32, torch.float64, BF16, torch.float16, torch.bool]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[("cast", dtype) for dtype in _TABLES],
        *[(name, dtype) for name in list(_FROM_BOOLS)[1:] for dtype in (F32, torch.bool)],
    ],
    ids=str,
)
def test_indices_from_bools_in_vector_loops(name: str, dtype: torch.dtype) -> None:
    """GCC 12 takes the mask of a vectorised condition, -1, for the index 1, unless it is hidden (`opaque_zero`)."""
    body, axis = KernelBuilder(), Axis("place", 150)
    flag, number = body.load("flag", as_index(axis), torch.bool), body.load("number", as_index(axis), torch.int8)
    place = body.indirect_index(_FROM_BOOLS[name](flag, number), 5)
    body.store("out", as_index(axis), body.load("table", place, dtype))
    inputs = [Buffer("flag", torch.bool, 150), Buffer("number", torch.int8, 150), Buffer("table", dtype, 5)]
    kernel = body.finish([axis], [], inputs, [Buffer("out", dtype, 150)])
    for first in (1, 0):
        elements = torch.arange(15) + 1 if dtype is not torch.bool else torch.arange(15) % 2 == first
        source = check(kernel, arguments={"table": elements.to(dtype)[5:10]})  # wrong indices read its neighbours
        assert "^ zero" in source


@pytest.mark.parametrize("emitter", ["python", "cpp", "fx", "interpreter"])
def test_fused_indices_from_bools(emitter: str) -> None:
    def function(flags: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flags[flags.to(torch.int64).remainder(5)], table[(~flags).to(torch.int64)]

    flags, table = torch.tensor([True, True, True, True, False]).repeat(30), torch.tensor([1.0, 2.0])
    graph = make_fx(function, tracing_mode="fake")(flags, table)
    options = Options(emitter=emitter, cpu_kernels="cpp", fallback="error")
    for result, eager in zip(
        compile_graph(graph, [flags, table], options=options)(flags, table), function(flags, table), strict=True
    ):
        assert torch.equal(result, eager)


def test_other_indices_are_not_hidden_from_the_compiler() -> None:
    """Hidden from it, 32-bit indices would be gathered in 64 bits."""

    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        place = body.load("index", matrix(row, column), torch.int32).to(torch.int64)
        body.store("out", matrix(row, column), body.load("table", body.indirect_index(_wrapped(place), 9), F32))

    source = check(pointwise(formula, 5, 75, Buffer("index", torch.int32, 375), Buffer("table", F32, 9)))
    assert "zero" not in source


def test_bool_selects() -> None:
    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        hidden = body.load("hidden", matrix(row, column), torch.bool)
        value = body.load("x", matrix(row, column), F32)
        body.store("out", matrix(row, column), hidden.where(-float("inf"), value / 3.0))

    source = check(pointwise(formula, 5, 75, Buffer("hidden", torch.bool, 375), Buffer("x", F32, 375)))
    assert "op::where(load_bool(hidden[75 * row + column])" in source, "what compilers vectorise"


@pytest.mark.parametrize("sizes", [(1024, 96), (40000, 3)])
def test_float32_column_sums_are_accurate(sizes: tuple[int, int]) -> None:
    x = torch.rand(sizes, generator=torch.Generator().manual_seed(3))
    printed = print_cpp_kernel(reduction("sum", F32, sizes, (0,)))
    out = torch.empty(sizes[1])
    load_kernel("cpp", printed.source, printed.signature, printed.options)((1, 1, 1), x, out)
    wanted = x.double().sum(0)
    assert float((out - wanted).norm() / wanted.norm()) < 1.2e-7


def test_a_strided_window_has_loops_without_masks() -> None:
    """A pool with padding: the first row, and the first and the last column, have loops of their own."""

    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        total = body.constant(0.0, F32)
        for down in range(3):
            for right in range(3):
                high, wide = as_index(row) * 2 + (down - 1), as_index(column) * 2 + (right - 1)
                inside = (body.index(high) >= 0) & (body.index(wide) >= 0) & (body.index(wide) < 39)

                def load(high: Index = high, wide: Index = wide) -> Scalar:
                    return body.load("x", high * 39 + wide, F32)

                total = total + body.where(inside, load, 0.5)
        body.store("out", matrix(row, column), total)

    source = check(pointwise(formula, 12, 20, Buffer("x", F32, 25 * 39)))
    first, rest = source.split("if (row < 1) {")[1].split("else {")
    for loops in (first, rest):
        assert [loop.split(";")[0] for loop in loops.split("for (int64_t column = ")[1:]] == ["0", "1", "19"]
    assert "?" not in source


@pytest.mark.parametrize(
    ("operation", "stride", "inner"),
    [("neg", 1, "column"), ("exp", 1, "row"), ("neg", 2, "row")],
    ids=["short rows", "vectors of exponentials", "strided rows"],
)
def test_short_contiguous_rows_are_inner_loops(operation: str, stride: int, inner: str) -> None:
    """Along the other axis, a loop would pass over the memory once for each column."""

    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        value = body.load("x", as_index(row) * 12 + as_index(column) * stride, F32)
        body.store("out", matrix(row, column), value.apply(operation))

    source = print_cpp_kernel(pointwise(formula, 90, 5, Buffer("x", F32, 90 * 12))).source
    assert source.split("for (int64_t ")[-1].startswith(inner)


def test_rows_with_gaps_may_be_none() -> None:
    """As in the gradient of a factorisation of an empty complex matrix."""

    def formula(body: KernelBuilder, row: Axis, column: Axis) -> None:
        body.store("out", as_index(row) * 4 + as_index(column), body.constant(0.0, F32))

    assert "fxwrap_empty(float* out)" in print_cpp_kernel(pointwise(formula, 0, 2), "empty").source


def in_several_layouts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x.float() * 1.5 + 1).to(torch.float16)
    return y, y.mT.contiguous(), y.flip(-1), torch.stack([y, y], -1)


@pytest.mark.parametrize("shape", [(32, 40), (7, 130)])
def test_a_half_precision_value_has_stores_in_several_layouts(shape: tuple[int, int]) -> None:
    """Of which one converts blocks of float32: the others store the value that the loop converts."""
    inputs = [torch.randn(shape).half()]
    compiled = compile_graph(make_fx(in_several_layouts)(*inputs), inputs)
    for result, expected in zip(compiled(*inputs), in_several_layouts(*inputs), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def half_precision(x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normalised = torch.nn.functional.layer_norm(x, (100,), weight, weight)
    over_operands = torch.tanh(x @ x.t()), torch.nn.functional.layer_norm(x[rows] @ x.t(), (70,))
    return normalised, x.sum(0), x[rows] + weight, torch.cat([x.abs(), x * 2], 1), *over_operands


def test_float16_is_converted_in_blocks_of_whole_rows_columns_and_segments() -> None:
    """Compilers convert elements one by one. The last two results are in the memory of an operand of their kernel."""
    inputs = [torch.randn(70, 100).half(), torch.randn(100).half(), torch.randint(70, (9,))]
    compiled = compile_graph(make_fx(half_precision)(*inputs), inputs, options=Options(emitter="interpreter"))
    sources = [kernel.source for kernel in compiled.program.kernels]
    assert all("widen(" in source and "to<float>" not in source for source in sources)
    assert sum("narrow(" in source for source in sources) == len(sources) - 1  # but the sum
    assert sum("const float16*" not in source for source in sources) == 2
    wide = [item.double() if item.is_floating_point() else item for item in inputs]
    for result, expected in zip(compiled(*inputs), half_precision(*wide), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-3, atol=1e-3)


def short_sums(
    rows: torch.Tensor, columns: torch.Tensor, half: torch.Tensor, empty: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return rows.sum(1), columns.sum(0), torch.cat([half, half[:40].neg()]), empty.sum(0)


def test_short_sums_are_not_in_order_and_short_rows_of_a_concatenation_are_one_loop() -> None:
    """In order, errors would be larger than those of eager's sums."""
    inputs = [torch.randn(900, 31), torch.randn(63, 900), torch.randn(90, 5).bfloat16(), torch.randn(0, 900)]
    compiled = compile_graph(make_fx(short_sums)(*inputs), inputs, options=Options(emitter="interpreter"))
    *sums, joined, zeros = compiled(*inputs)
    for result, terms in zip(sums, (inputs[0].t(), inputs[1]), strict=True):
        exact, in_order = terms.double().sum(0), torch.zeros(900)
        for term in terms:
            in_order = in_order + term
        assert (result - exact).norm() < 0.85 * (in_order - exact).norm()
    assert torch.equal(joined, torch.cat([inputs[2], -inputs[2][:40]]))
    assert torch.equal(zeros, torch.zeros(900))
    assert any("p0 = 450; p0 < 650" in kernel.source for kernel in compiled.program.kernels)


def sum_of_halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def sum_of_weighted_conditions(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((y > 0).float() * x.exp()).sum()


def quantised_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = (x * y).abs().amax(1, keepdim=True) / 127
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)


def windows_with_padding(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.avg_pool2d(x.view(1, 15, 20, 500).permute(0, 3, 1, 2), 5, 1, 2)


def next_numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(x, y)


def bytes_of_halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).to(torch.uint8)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (sum_of_halves, torch.float16),
        (sum_of_weighted_conditions, F32),
        (quantised_rows, F32),
        (bytes_of_halves, torch.float16),
        (windows_with_padding, BF16),
        (next_numbers, F32),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_gcc_vectorises_loops_over(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Without vectors of at least 16 bytes, these took about ten times as long."""
    compiler = find_compiler()
    if "Free Software Foundation" not in compiler.version:
        return
    inputs = [torch.randn(300, 500).to(dtype) for _ in range(2)]
    program = compile_graph(make_fx(function)(*inputs), inputs, options=Options(emitter="interpreter")).program
    (kernel,) = program.kernels
    (tmp_path / "kernel.cpp").write_text(kernel.source)
    flags = [*COMMON_FLAGS, *KERNEL_FLAGS, *compiler.kernel_flags, f"-I{PROGRAM_HEADERS}"]
    report = tmp_path / "report"
    command = [*compiler.command, *flags, f"-fopt-info-vec-optimized={report}", "-c", "kernel.cpp", "-o", "kernel.o"]
    run_compiler(command, tmp_path)
    note = r"(\w+\.\w+):(\d+):\d+: optimized: loop vectorized using (?:16|32|64) byte vectors"
    reported = re.findall(note, report.read_text())
    vectorised = {(file, int(line)) for file, line in reported}
    simd_loops = lines_of(tmp_path / "kernel.cpp", r"#pragma omp.* simd")
    for file, line in simd_loops:
        assert {(file, line + number) for number in (1, 2, 3)} & vectorised, "the head of the loop, or its body"
    header = PROGRAM_HEADERS / "kernel_reductions.h"
    calls = {"for_lanes<": r"body\(start \+ lane, lane\)", "for_overlapping_lanes<": r"body\(first \+ lane, lane"}
    lane_loops = [lines_of(header, body) for call, body in calls.items() if call in kernel.source]
    assert simd_loops or lane_loops
    assert all(loops <= vectorised for loops in lane_loops)


def test_casts_of_floats_to_bytes_wrap_around() -> None:
    numbers = [-1.5, 255.5, 256.0, 3e9, 2147483520.0, 2147483648.0, -2147483904.0, 4294967552.0, 5e18, 1e20, -3e9]
    x = torch.tensor([*numbers, torch.inf, -torch.inf, torch.nan])
    for dtype in (F32, BF16, torch.float16):
        used = x.to(dtype)
        (result,) = compile_graph(make_fx(lambda x: x.to(torch.uint8))(used), [used])(used)
        assert torch.equal(result, used.to(torch.uint8))


@pytest.mark.parametrize("times", [2, 3, 4])
def test_repeated_elements_are_stored_in_one_iteration(times: int) -> None:
    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(times, -1)

    x = torch.randn(30, 50)
    compiled = compile_graph(make_fx(repeated)(x), [x], options=Options(emitter="interpreter"))
    (result,) = compiled(x)
    assert torch.equal(result, repeated(x))
    (kernel,) = compiled.program.kernels
    assert len(re.findall(r"out0\[.*\] = ", kernel.source)) == times


def rotated_pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Products of complex numbers: rows times one of them."""
    real, imaginary = x[..., 0] * y[..., 0] - x[..., 1] * y[..., 1], x[..., 0] * y[..., 1] + x[..., 1] * y[..., 0]
    return torch.stack([real, imaginary], -1)


def test_loops_along_pairs_whose_elements_are_read_and_written_together() -> None:
    """Along rows, whose elements are far apart, they took five times as long."""
    x, y = torch.randn(60, 50, 2), torch.randn(50, 2)
    compiled = compile_graph(make_fx(rotated_pairs)(x, y), [x, y], options=Options(emitter="interpreter"))
    (result,) = compiled(x, y)
    torch.testing.assert_close(result, rotated_pairs(x, y))
    (kernel,) = compiled.program.kernels
    assert re.search(r"simd\n *for \(int64_t \w+ = 0; \w+ < 50;", kernel.source)


def lines_of(path: Path, pattern: str) -> set[tuple[str, int]]:
    """The file and number of each line that contains a pattern."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return {(path.name, number) for number, line in lines if re.search(pattern, line)}
