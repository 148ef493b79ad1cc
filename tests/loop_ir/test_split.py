"""Split reductions equal whole ones, and are used only where they are faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Kernel,
    KernelBuilder,
    as_index,
    evaluate_kernel,
    has_contiguous_columns,
    linearize_index,
    parse_kernel,
)
from fxwrap.loop_ir.split import SplitKernel, split_reductions
from fxwrap.symbolic import Size, evaluate, make_symbol

F32, I64 = torch.float32, torch.int64

MULTIPROCESSORS = 132


def hint(size: Size) -> int:
    return size if isinstance(size, int) else int(evaluate(size, {"s0": 1 << 20}))


def kernel_of(
    parallel: list[Axis], reduced: list[Axis], dtype: torch.dtype, outputs: dict[str, bool], write: Callable[..., dict]
) -> Kernel:
    """A kernel over x[parallel, reduced]; `outputs`: does each have one element per input element, or per row?"""
    axes = [*parallel, *reduced]
    position = linearize_index(axes, [axis.size for axis in axes])
    row = linearize_index(parallel, [axis.size for axis in parallel])
    body = KernelBuilder()
    values = write(body, body.load("x", position, dtype))
    rows = 1
    for axis in parallel:
        rows = rows * axis.size
    whole = rows
    for axis in reduced:
        whole = whole * axis.size
    data = []
    for name, varies in outputs.items():
        body.store(name, position if varies else row, values[name])
        data.append(Buffer(name, values[name].dtype, whole if varies else rows))
    return body.finish(parallel, reduced, [Buffer("x", dtype, whole)], data)


def run(kernel: Kernel, split: SplitKernel, data: torch.Tensor, numbers: dict[str, int] | None = None) -> None:
    """Evaluates both and compares the outputs; elements that are never written stay poisoned and differ."""
    known = numbers or {}
    size = lambda buffer: int(evaluate(buffer.extent, known))  # noqa: E731
    expected = {buffer.name: torch.full((size(buffer),), 77).to(buffer.dtype) for buffer in kernel.outputs}
    actual = {name: item.clone() for name, item in expected.items()}
    evaluate_kernel(kernel, {"x": data, **expected}, known)
    between = {buffer.name: torch.full((size(buffer),), 99).to(buffer.dtype) for buffer in split.temporaries}
    for part in split.kernels:
        evaluate_kernel(part, {"x": data, **actual, **between}, known)
    for name, want in expected.items():
        torch.testing.assert_close(actual[name], want, rtol=2e-4, atol=2e-4, equal_nan=True)


def one(kind: str) -> Callable[..., dict]:
    return lambda body, x: {f"out{number}": value for number, value in enumerate(body.reduce(kind, x))}


KINDS = {"sum": 1, "max": 1, "min": 1, "argmax": 2, "argmin": 2, "welford": 2, "softmax": 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("across", [False, True])
def test_parts_combine_to_the_whole(kind: str, across: bool) -> None:
    rows, size = (96, 1 << 14) if across else (3, 1 << 19)
    p, r = Axis("p0", rows), Axis("r0", size)
    body = KernelBuilder()
    index = as_index(r) * rows + p if across else as_index(p) * size + r
    values = body.reduce(kind, body.load("x", index, F32))
    for number, value in enumerate(values):
        body.store(f"out{number}", as_index(p), value)
    outputs = [Buffer(f"out{number}", value.dtype, rows) for number, value in enumerate(values)]
    kernel = body.finish([p], [r], [Buffer("x", F32, rows * size)], outputs)
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None and len(split.kernels) == 2
    data = torch.randn(rows * size, generator=torch.Generator().manual_seed(2))
    data[5] = float("nan") if kind in ("max", "argmax") else 40.0
    data[7] = -float("inf") if kind in ("softmax", "min") else data[7]
    run(kernel, split, data)


@pytest.mark.parametrize(("rows", "size", "parts"), [(1, 32000, 16), (2, 20011, 9), (1, 16384, 0), (300, 32000, 0)])
def test_positions_in_few_rows_are_found_in_parts(rows: int, size: int, parts: int) -> None:
    """The first of equal elements or of several NaNs, and the first element of a row of minus infinities."""
    kernel = kernel_of([Axis("p0", rows)], [Axis("r0", size)], F32, {"out0": False, "out1": False}, one("argmax"))
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert (0 if split is None else split.kernels[0].axes[0].size) == parts
    if split is not None:
        data = torch.randn(rows, size, generator=torch.Generator().manual_seed(5)).round()
        run(kernel, split, data.flatten())
        data[0], data[-1, size // 2 :: 777] = -float("inf"), float("nan")
        run(kernel, split, data.flatten())


@pytest.mark.parametrize("kind", ["sum", "max", "welford"])
def test_parts_need_not_be_equal(kind: str) -> None:
    prime = 1299709
    kernel = kernel_of([], [Axis("r0", prime)], F32, {"out0": False}, one(kind))
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    if kind == "welford":
        assert split is None, "unequal parts have no plain combination"
        return
    assert split is not None
    run(kernel, split, torch.randn(prime, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(("size", "parts"), [(447 * 563 * 8, 447), (43 * 43 * 105 * 1061, 645)])
def test_the_last_parts_do_not_run_alone(size: int, parts: int) -> None:
    """Of a wave of 528, the 35 of 563 parts that are left would take as long as all others; 301 would be too few."""
    split = split_reductions(kernel_of([], [Axis("r0", size)], F32, {"out0": False}, one("sum")), hint, MULTIPROCESSORS)
    assert split is not None and split.kernels[0].axes[0].size == parts


def test_symbolic_rows_are_split() -> None:
    s0 = make_symbol("s0")
    kernel = kernel_of([], [Axis("r0", s0), Axis("r1", 8)], F32, {"out0": False}, one("sum"))
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None
    for size in (1, 1000, 77777):
        run(kernel, split, torch.randn(size * 8), {"s0": size})


def test_several_reduced_axes_keep_their_order() -> None:
    reduced, outputs = [Axis("r0", 1024), Axis("r1", 1024)], {"out0": False, "out1": False}
    kernel = kernel_of([Axis("p0", 2)], reduced, F32, outputs, one("argmax"))
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None
    run(kernel, split, torch.randn(2 << 20, generator=torch.Generator().manual_seed(4)).round())


@pytest.mark.parametrize("kind", ["sum", "argmax", "welford"])
def test_parts_of_several_axes_are_whole_rows(kind: str) -> None:
    reduced = [Axis("r0", 14), Axis("r1", 30), Axis("r2", 600)]
    outputs = {f"out{number}": False for number in range(KINDS[kind])}
    kernel = kernel_of([Axis("p0", 1)], reduced, F32, outputs, one(kind))
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None and split.kernels[0].reduced[-1] == reduced[-1]
    run(kernel, split, torch.randn(14 * 30 * 600, generator=torch.Generator().manual_seed(4)))


def test_variances_whose_parts_must_be_equal_have_more_or_fewer() -> None:
    """Of 2159 rows, 17 parts are equal, though 4 would do."""
    p, r = Axis("p0", 10007), Axis("r0", 2159)
    body = KernelBuilder()
    body.store("out", as_index(p), body.reduce("welford", body.load("x", as_index(r) * 10007 + p, F32))[1])
    kernel = body.finish([p], [r], [Buffer("x", F32, 2159 * 10007)], [Buffer("out", F32, 10007)])
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None and split.kernels[0].axes[0].size == 17


def softmax(body: KernelBuilder, x: object) -> dict:
    largest, total = body.reduce("softmax", x)  # type: ignore[arg-type]
    return {"out": (x - largest).exp() / total, "largest": largest, "log": largest + total.log()}  # type: ignore[operator]


def two_stages(body: KernelBuilder, x: object) -> dict:
    largest = body.reduce("max", x)[0]  # type: ignore[arg-type]
    power = (x - largest).exp()  # type: ignore[operator]
    total = body.reduce("sum", power)[0]
    return {"out": power / total, "doubled": x * 2.0, "total": total, "largest": largest}  # type: ignore[operator]


def test_elements_that_read_results_become_a_separate_kernel() -> None:
    axes = [Axis("p0", 2)], [Axis("r0", 1 << 19)]
    kernel = kernel_of(*axes, F32, {"out": True, "largest": False, "log": False}, softmax)
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None and len(split.kernels) == 3
    assert not split.kernels[2].reduced, "what is left is pointwise"
    run(kernel, split, torch.randn(1 << 20, generator=torch.Generator().manual_seed(4)))


def test_later_stages_are_split_too() -> None:
    axes = [Axis("p0", 2)], [Axis("r0", 1 << 19)]
    kernel = kernel_of(*axes, F32, {"out": True, "doubled": True, "total": False, "largest": False}, two_stages)
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None and len(split.kernels) == 5
    names = [buffer.name for buffer in split.temporaries]
    assert len(set(names)) == len(names)
    run(kernel, split, torch.randn(1 << 20, generator=torch.Generator().manual_seed(4)))


def test_unprofitable_reductions_are_not_split() -> None:
    rows = kernel_of([Axis("p0", 8192)], [Axis("r0", 4096)], F32, {"out0": False}, one("sum"))
    small = kernel_of([], [Axis("r0", 65536)], F32, {"out0": False}, one("sum"))
    assert split_reductions(rows, hint, MULTIPROCESSORS) is None, "enough rows keep every processor busy"
    assert split_reductions(small, hint, MULTIPROCESSORS) is None, "it is over before a second launch would begin"


@pytest.mark.parametrize(("multiprocessors", "parts"), [(132, 64), (16, 8), (2, 0)])
def test_rows_have_parts_for_all_multiprocessors(multiprocessors: int, parts: int) -> None:
    """Eight rows occupy two of them, each of which runs four programs at once."""
    kernel = kernel_of([Axis("p0", 8)], [Axis("r0", 1 << 20)], F32, {"out0": False}, one("sum"))
    split = split_reductions(kernel, hint, multiprocessors)
    assert (0 if split is None else split.kernels[0].axes[0].size) == parts


def test_long_columns_of_a_small_matrix_are_split() -> None:
    """A program reduces 64 columns, one block of rows after another."""
    p, r = Axis("p0", 160), Axis("r0", 3136)
    body = KernelBuilder()
    body.store("out", as_index(p), body.reduce("sum", body.load("x", as_index(r) * 160 + p, F32))[0])
    kernel = body.finish([p], [r], [Buffer("x", F32, 3136 * 160)], [Buffer("out", F32, 160)])
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None
    run(kernel, split, torch.randn(3136 * 160, generator=torch.Generator().manual_seed(2)))


def test_overwritten_rows_are_not_split() -> None:
    p, r = Axis("p0", 2), Axis("r0", 1 << 19)
    body = KernelBuilder()
    x = body.load("x", as_index(p) * (1 << 19) + r, F32)
    body.store("x", as_index(p) * (1 << 19) + r, x * 2.0)
    body.store("out", as_index(p) * (1 << 19) + r, x - body.reduce("max", x)[0])
    kernel = body.finish([p], [r], [], [Buffer("x", F32, 1 << 20), Buffer("out", F32, 1 << 20)])
    assert split_reductions(kernel, hint, MULTIPROCESSORS) is None


def test_column_sums_of_a_large_matrix_are_split_in_eight() -> None:
    p, r = Axis("p0", 4096), Axis("r0", 8192)
    body = KernelBuilder()
    body.store(
        "out", as_index(p), body.reduce("sum", body.load("x", as_index(r) * 4096 + p, torch.bfloat16).to(F32))[0]
    )
    kernel = body.finish([p], [r], [Buffer("x", torch.bfloat16, 8192 * 4096)], [Buffer("out", F32, 4096)])
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None
    assert split.temporaries == (Buffer("partial0", F32, 8 * 4096),)


def sums(parallel: str, reduced: str, operations: str, *, rows: int = 512, stores: str = "") -> Kernel:
    """A kernel whose parallel axis p has 512 elements, or `rows`, and that sums %0 to out[p]."""
    return parse_kernel(f"""kernel(x: f32[99999999], index: i64[99999999]) -> (out: f32[{rows}], y: f32[99999999]) \
for [{parallel}] reduce [{reduced}] {{
{operations}
{stores}
}}
""")


def test_columns_of_interleaved_pairs_have_parts_for_their_programs() -> None:
    """The stride of each load is 2, and programs have 64 columns."""
    body = """  %0 = f32 load x[2*p + 1024*r]
  %1 = f32 load x[2*p + 1024*r + 1]
  %2 = f32 add %0 %1
  %3 = f32 reduce sum %2"""
    split = split_reductions(sums("p: 512", "r: 16384", body, stores="  store out[p] %3"), hint, MULTIPROCESSORS)
    assert split is not None and split.kernels[0].axes[0].size == 64


def test_rows_at_computed_indices_are_no_columns() -> None:
    """Only the results are beside each other."""
    body = """  %0 = i64 load index[r]
  %1 = f32 load x[%0<5776> + 5776*p]
  %2 = f32 reduce sum %1"""
    kernel = sums("p: 512", "r: 5776", body, stores="  store out[p] %2")
    assert not has_contiguous_columns(kernel, hint) and split_reductions(kernel, hint, MULTIPROCESSORS) is None


@pytest.mark.parametrize(("length", "has_tiles"), [(12544, True), (64, False)])
def test_long_rows_that_are_stored_as_columns_have_tiles_of_both(length: int, has_tiles: bool) -> None:
    body = f"""  %0 = f32 load x[{length}*p + r]
  %1 = f32 reduce sum %0
  store y[512*r + p] %0"""
    kernel = sums("p: 512", f"r: {length}", body, stores="  store out[p] %1")
    assert has_contiguous_columns(kernel, hint) == has_tiles
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert (split is not None) == has_tiles


def test_elements_that_read_results_are_in_the_order_of_memory() -> None:
    """Gates of channels: the mean of each channel, then the elements, which are contiguous along channels."""
    body = """  %0 = f32 load x[48*r + p]
  %1 = f32 reduce sum %0
  %2 = f32 mul %0 %1"""
    kernel = sums("p: 48", "r: 262144", body, rows=48, stores="  store y[48*r + p] %2")
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None and [axis.name for axis in split.kernels[-1].axes] == ["r", "p"]


def test_windows_are_the_work_of_several_elements() -> None:
    """Fifteen rows, in less than a million iterations of nine loads."""
    loads = "\n".join(f"  %{at} = f32 load x[70000*p + r + {at}]" for at in range(9))
    adds = "\n".join(f"  %{9 + at} = f32 add %{8 + at if at else 0} %{at + 1}" for at in range(8))
    plain = "  %0 = f32 load x[70000*p + r]\n  %1 = f32 reduce sum %0"
    for body, result, is_split in ((f"{loads}\n{adds}\n  %17 = f32 reduce sum %16", 17, True), (plain, 1, False)):
        kernel = sums("p: 15", "r: 65536", body, rows=15, stores=f"  store out[p] %{result}")
        assert (split_reductions(kernel, hint, MULTIPROCESSORS) is not None) == is_split


@pytest.mark.parametrize(
    ("channels", "pixels", "parts"),
    [(64, 16384, [("part", 64), ("r1", 64)]), (64, 16381, [("part", 63), ("r1", 64)]), (8, 131072, [("part", 512)])],
    ids=["equal parts", "a shorter last part", "few channels"],
)
@pytest.mark.parametrize("kind", ["sum", "max", "softmax"])
def test_whole_reductions_over_two_layouts_have_tiles_of_both(
    kind: str, channels: int, pixels: int, parts: list[tuple[str, int]]
) -> None:
    """As losses of a prediction in channels-last layout: parts have an element of one contiguous axis each."""
    r0, r1, body = Axis("r0", pixels), Axis("r1", channels), KernelBuilder()
    x = body.load("x", as_index(r0) * channels + r1, F32)
    values = body.reduce(kind, x * body.load("x", as_index(r1) * pixels + r0, F32))
    outputs = [Buffer(f"out{number}", value.dtype, 1) for number, value in enumerate(values)]
    for number, value in enumerate(values):
        body.store(f"out{number}", as_index(0), value)
    kernel = body.finish([], [r0, r1], [Buffer("x", F32, channels * pixels)], outputs)
    split = split_reductions(kernel, hint, MULTIPROCESSORS)
    assert split is not None and [(axis.name, axis.size) for axis in split.kernels[0].axes] == parts
    assert has_contiguous_columns(split.kernels[0], hint) == (len(parts) > 1)
    run(kernel, split, torch.randn(channels * pixels, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(("rows", "is_split"), [(16_000, False), (20_000, True)])
def test_loads_that_wait_for_others_are_the_work_of_many_elements(rows: int, is_split: bool) -> None:
    """A loss reads a score for each row, at the index of its class: steps of a loop wait for two loads each."""
    body = KernelBuilder()
    row = Axis("r", rows)
    position = body.load("classes", row, I64)
    score = body.load("scores", as_index(row) * 32 + body.indirect_index(position, 32), F32)
    body.store("out", 0, body.reduce("sum", score)[0])
    inputs = [Buffer("classes", I64, rows), Buffer("scores", F32, rows * 32)]
    kernel = body.finish([], [row], inputs, [Buffer("out", F32, 1)])
    assert (split_reductions(kernel, hint, MULTIPROCESSORS) is not None) is is_split
