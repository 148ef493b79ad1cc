"""Reductions of rows of a few elements become formulas of each row."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, Store, as_index, evaluate_kernel, unroll_short_rows

ROWS = 5
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


@pytest.mark.parametrize(
    "kernel",
    [
        rows_kernel("sum", torch.float32, (5,)),
        rows_kernel("sum", torch.float32, (4,)),
        rows_kernel("sum", torch.float32, (2, 3)),
        rows_kernel("sum", torch.float32, (3,), "columns"),
    ],
    ids=["longer rows", "a vector", "more elements", "columns"],
)
def test_other_kernels_stay(kernel: Kernel) -> None:
    assert unroll_short_rows(kernel) is kernel
