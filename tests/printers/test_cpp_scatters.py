"""Values that C++ kernels combine with memory in the order of the loops: in blocks, and by threads that never meet."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.loop_ir import Axis, Buffer, Kernel, KernelBuilder, as_index
from fxwrap.printers.cpp import print_cpp_kernel
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together, matrix

F16, I64 = torch.float16, torch.int64
TABLE = 50


def sums_along_rows(rows: int, length: int, dtype: torch.dtype, form: str) -> Kernel:
    """Rows of values that are added to rows of a table at an index of each value.

    The form: "plain"; "costly", exponentials; "masked", some of these; "same", all rows are added to one; "columns",
    the index is one of a row of the table.
    """
    body, row, element = KernelBuilder(), Axis("row", rows), Axis("element", length)
    index = body.load("index", matrix(row, element), I64)
    body.device_assert((index >= 0) & (index < TABLE), "out of bounds")
    chosen = body.indirect_index(index, TABLE)
    value = body.load("x", matrix(row, element), dtype)
    if form in ("costly", "masked", "columns"):
        value = value.to(F32).exp().to(dtype)
    mask = body.index(element) + body.index(row) < length if form == "masked" else None
    target = {"same": chosen, "columns": chosen * length + element}.get(form, as_index(row) * TABLE + chosen)
    body.store("out", target, value, mask, "add")
    extent = TABLE * {"same": 1, "columns": length}.get(form, rows)
    inputs = [Buffer("index", I64, rows * length), Buffer("x", dtype, rows * length)]
    return body.finish([row, element], [], inputs, [Buffer("out", dtype, extent)])


FORMS = ("plain", "costly", "masked", "same", "columns")
CASES = list(product((1, 3, 700), (7, 64, 100), (F32, torch.float64, BF16, F16, I64), FORMS))

compiled_sums = compiled_together(sums_along_rows)


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("compiled_sums")
@pytest.mark.parametrize(("rows", "length", "dtype", "form"), CASES, ids=str)
def test_sums_at_indices(rows: int, length: int, dtype: torch.dtype, form: str) -> None:
    kernel = sums_along_rows(rows, length, dtype, form)
    generator = torch.Generator().manual_seed(3)
    arguments = {
        "index": torch.randint(0, TABLE, (rows * length,), generator=generator),
        "x": (torch.rand(rows * length, generator=generator) < 0.05).to(dtype),  # sums are exact in any order
        "out": torch.zeros(kernel.outputs[0].extent, dtype=dtype),  # type: ignore[arg-type]
    }
    source = check(kernel, arguments=arguments, rtol=1e-4)
    has_rows_apart = rows == 700 and length > 7 and form in ("plain", "costly", "masked")
    assert ("omp parallel" in source) >= has_rows_apart
    assert "omp parallel" not in source or form != "same", "rows are added to one"
    if length == 64 and rows > 1 and form in ("costly", "masked"):
        assert "_block[lane] = " in source, "exponentials are vectors"


def test_rows_closer_than_a_line_of_the_cache_are_of_one_thread() -> None:
    body, row, element = KernelBuilder(), Axis("row", 2), Axis("element", 40000)
    chosen = body.indirect_index(body.load("index", as_index(element), I64), TABLE)
    body.store("out", chosen * 2 + row, body.load("x", matrix(row, element), F32), None, "add")
    inputs = [Buffer("index", I64, 40000), Buffer("x", F32, 80000)]
    kernel = body.finish([row, element], [], inputs, [Buffer("out", F32, 2 * TABLE)])
    assert "omp parallel" not in print_cpp_kernel(kernel).source


def add_at(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums at indices of all elements, of the elements of rows, and of rows of two elements."""
    flat = torch.zeros(TABLE, dtype=x.dtype).index_put((index.flatten(),), torch.sin(x).flatten(), accumulate=True)
    rows = torch.zeros(len(x), TABLE, dtype=x.dtype).scatter_add(1, index, x * 2)
    pairs = torch.zeros(TABLE, 2, dtype=x.dtype).index_add(0, index[:, 0], x[:, :2])
    return flat, rows, pairs


@pytest.mark.parametrize("dtype", [F32, torch.float64, BF16, F16], ids=str)
def test_sums_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    x, index = torch.randn(600, 99).to(dtype), torch.randint(0, TABLE, (600, 99))
    compiled = fxwrap.compile_graph(make_fx(add_at)(x, index), [x, index])
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(compiled(x, index))
    torch.set_num_threads(threads)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    wanted = add_at(x.double(), index)
    for result, exact in zip(results[0], wanted, strict=True):
        tolerance = 1e-2 if dtype in (F16, BF16) else 1e-4
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        compiled(x, index + 1)
