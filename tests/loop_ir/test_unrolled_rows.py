"""Reductions of rows of a few elements become formulas of each row."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Kernel,
    KernelBuilder,
    Load,
    Store,
    as_index,
    evaluate_kernel,
    unroll_short_rows,
)

ROWS, WIDTH = 5, 4
KINDS = {"sum": torch.float32, "prod": torch.int32, "max": torch.float32, "min": torch.float64, "any": torch.bool,
         "all": torch.bool}  # fmt: skip


def rows_kernel(kind: str, dtype: torch.dtype, sizes: tuple[int, ...], layout: str = "rows") -> Kernel:
    """A reduction of each row, the results, and the elements of some rows beside them, also at an index in memory."""
    row, reduced = Axis("p0", ROWS), [Axis(f"r{number}", size) for number, size in enumerate(sizes)]
    count = torch.Size(sizes).numel()
    inner = as_index(0)
    for axis in reduced:
        inner = inner * axis.size + axis
    position = as_index(row) * count + inner if layout == "rows" else inner * ROWS + row
    body = KernelBuilder()
    x = body.load("x", position, dtype)
    at = body.load("index", inner, torch.int64)
    (total,) = body.reduce(kind, x)
    gathered = body.load("x", body.indirect_index(at, ROWS * count), dtype)
    body.store("total", as_index(row), total)
    body.store("element", position, (gathered > 0).where(total, x) if dtype is not torch.bool else gathered & total)
    elements = ROWS * count
    inputs = [Buffer("x", dtype, elements), Buffer("index", torch.int64, count)]
    return body.finish([row], reduced, inputs, [Buffer("total", dtype, ROWS), Buffer("element", dtype, elements)])


@pytest.mark.parametrize("sizes", [(3,), (1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_rows_compute_the_same(kind: str, sizes: tuple[int, ...]) -> None:
    dtype = KINDS[kind]
    kernel = rows_kernel(kind, dtype, sizes)
    unrolled = unroll_short_rows(kernel)
    count = torch.Size(sizes).numel()
    assert not unrolled.reduced and sum(isinstance(item, Store) for item in unrolled.operations) == 1 + count
    x = torch.randint(-4, 5, (ROWS * count,)).to(dtype) if dtype is not torch.bool else torch.rand(ROWS * count) < 0.5
    results = []
    for item in (kernel, unrolled):
        buffers = {"x": x, "index": torch.arange(count).flip(0), "total": torch.zeros(ROWS, dtype=dtype)}
        buffers["element"] = torch.zeros(ROWS * count, dtype=dtype)
        evaluate_kernel(item, buffers)
        results.append((buffers["total"], buffers["element"]))
    torch.testing.assert_close(*results)


def gathered_kernel(count: int) -> Kernel:
    """Sums of a few gathered rows, each with a factor."""
    (row, column), reduced = (Axis("p0", ROWS), Axis("p1", WIDTH)), Axis("r0", count)
    body = KernelBuilder()
    place = as_index(row) * count + reduced
    at = body.indirect_index(body.load("index", place, torch.int64), ROWS)
    x = body.load("x", at * WIDTH + column, torch.float32)
    (total,) = body.reduce("sum", x * body.load("factor", place, torch.float32))
    body.store("total", as_index(row) * WIDTH + column, total)
    inputs = [Buffer("x", torch.float32, ROWS * WIDTH), Buffer("index", torch.int64, ROWS * count)]
    inputs.append(Buffer("factor", torch.float32, ROWS * count))
    return body.finish([row, column], [reduced], inputs, [Buffer("total", torch.float32, ROWS * WIDTH)])


@pytest.mark.parametrize("count", [2, 6, 8])
def test_sums_of_gathered_rows_load_each_place_once(count: int) -> None:
    kernel = gathered_kernel(count)
    unrolled = unroll_short_rows(kernel)
    assert not unrolled.reduced and len([item for item in unrolled.operations if isinstance(item, Load)]) == 3 * count
    inputs = {"x": torch.randn(ROWS * WIDTH), "index": torch.randint(ROWS, (ROWS * count,))}
    inputs["factor"] = torch.randn(ROWS * count)
    totals = [torch.zeros(ROWS * WIDTH) for _ in range(2)]
    for item, total in zip((kernel, unrolled), totals, strict=True):
        evaluate_kernel(item, {**inputs, "total": total})
    torch.testing.assert_close(*totals)


@pytest.mark.parametrize(
    "kernel",
    [
        gathered_kernel(9),
        rows_kernel("sum", torch.float32, (5,)),
        rows_kernel("sum", torch.float32, (4,)),
        rows_kernel("sum", torch.float32, (2, 3)),
        rows_kernel("sum", torch.float32, (3,), "columns"),
    ],
    ids=["more gathered rows", "longer rows", "a vector", "more elements", "columns"],
)
def test_other_kernels_stay(kernel: Kernel) -> None:
    assert unroll_short_rows(kernel) is kernel
