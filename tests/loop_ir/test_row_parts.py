"""Kernels that reduce rows and columns, split along rows, equal whole ones; their Triton text equals the evaluator."""

from __future__ import annotations

import dataclasses

import pytest

from fxwrap.loop_ir import Kernel, find_rows_and_columns, parse_kernel, split_rows
from fxwrap.printers.triton.candidates import configurations
from fxwrap.symbolic import Size, evaluate
from tests.loop_ir.test_column_parts import check
from tests.loop_ir.test_column_parts import statistics as matmul
from tests.printers.triton_kernels import check as check_printed


def backward(rows: int | str, columns: int, kind: str = "sum", over_rows: str = "sum") -> Kernel:
    """The sum of each row, what remains of its elements, and a reduction of their columns and of those of x."""
    return parse_kernel(f"""kernel(x: f32[{rows}*{columns}], w: f32[{columns}]) -> \
(out: f32[{rows}*{columns}], first: f32[{columns}], second: f32[{columns}], sums: f32[{rows}]) \
for [] reduce [i: {rows}, j: {columns}] {{
  %0 = f32 load x[{columns}*i + j]
  %1 = f32 reduce {over_rows} %0 over j
  %2 = f32 load w[j]
  %3 = f32 mul %0 %2
  %4 = f32 sub %3 %1
  store out[{columns}*i + j] %4
  store sums[i] %1
  %7 = f32 reduce {kind} %4 over i
  store first[j] %7
  %9 = f32 reduce sum %0 over i
  %10 = f32 mul %9 %2
  store second[j] %10
}}
""")


def hint(size: Size) -> int:
    return size if isinstance(size, int) else int(evaluate(size, {"s0": 64}))


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize(("rows", "parts"), [(64, 4), (70, 5), (40, 5), (9, 3)])
def test_parts_combine_to_the_whole(kind: str, rows: int, parts: int) -> None:
    kernel = backward(rows, 5, kind)
    split = split_rows(kernel, hint, 4)
    assert split is not None and len(split.kernels) == 2
    assert split.kernels[0].count == parts
    check(kernel, split)


def test_few_long_rows_are_parts_for_all_multiprocessors() -> None:
    for rows, parts in ((768, 192), (1024, 128), (2112, 132)):
        split = split_rows(backward(rows, 4096), hint, 132)
        assert split is not None and split.kernels[0].count == parts


def test_symbolic_rows_are_in_parts_of_one_size() -> None:
    kernel = backward("s0", 5)
    split = split_rows(kernel, hint, 2)
    assert split is not None
    assert [axis.size for axis in split.kernels[0].reduced] == [16, 5]
    for rows in (1, 16, 43):
        check(kernel, split, {"s0": rows})


def test_rows_of_several_axes() -> None:
    text = (
        str(backward(12, 5))
        .replace("i: 12", "b: 3, i: 4")
        .replace("5*i", "20*b + 5*i")
        .replace("sums[i]", "sums[4*b + i]")
    )
    text = text.replace("over i", "over b i")
    kernel = parse_kernel(text)
    split = split_rows(kernel, hint, 4)
    assert split is not None
    check(kernel, split)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("store sums[i] %1", "%6 = f32 reduce sum %4 over i\n  %7 = f32 sub %0 %6\n  store out[5*i + j] %7"),
        ("%7 = f32 reduce sum", "%7 = f32 reduce argmax"),
        ("%9 = f32 reduce sum %0 over i", "%9 = f32 reduce sum %0"),
    ],
    ids=["an element depends on a column", "two results of a column", "a sum of all elements"],
)
def test_other_kernels_stay_whole(old: str, new: str) -> None:
    text = str(backward(64, 5))
    assert old in text
    operations = text.replace(old, new).splitlines()
    if old.startswith("store"):
        operations = [*operations[: operations.index("  store out[5*i + j] %7") + 1], "}"]
        operations[0] = operations[0].replace(", first: f32[5], second: f32[5], sums: f32[64]", "")
    kernel = parse_kernel("\n".join(operations) + "\n")
    assert find_rows_and_columns(kernel) is None and split_rows(kernel, hint, 4) is None


def test_columns_are_contiguous_elements_not_statistics_of_rows() -> None:
    """Where both groups of axes may be rows, most elements decide, whatever numbers of a row are beside each other."""
    kernel = parse_kernel("""kernel(x: f32[320], mean: f32[64], rstd: f32[64], gate: f32[64]) -> \
(sums: f32[64], first: f32[5]) for [] reduce [i: 64, j: 5] {
  %0 = f32 load x[5*i + j]
  %1 = f32 load mean[i]
  %2 = f32 sub %0 %1
  %3 = f32 load rstd[i]
  %4 = f32 mul %2 %3
  %5 = f32 load gate[i]
  %6 = f32 mul %4 %5
  %7 = f32 reduce sum %6 over j
  store sums[i] %7
  %9 = f32 reduce sum %6 over i
  store first[j] %9
}
""")
    for axes in (kernel.reduced, kernel.reduced[::-1]):
        form = find_rows_and_columns(dataclasses.replace(kernel, reduced=axes))
        assert form is not None and [axis.name for axis in (*form.rows, *form.columns)] == ["i", "j"]


def test_rows_of_a_matmul_are_no_columns() -> None:
    assert find_rows_and_columns(matmul(300)) is None


@pytest.mark.parametrize(("rows", "columns", "kinds"), [(33, 96, ("sum", "sum")), (40, 37, ("max", "prod"))])
def test_every_configuration_equals_the_evaluator(rows: int, columns: int, kinds: tuple[str, str]) -> None:
    split = split_rows(backward(rows, columns, *kinds), hint, 3)
    assert split is not None
    kernel = split.kernels[0]
    candidates = configurations(kernel)
    form = find_rows_and_columns(kernel)
    assert form is not None and all(item.rows == form.rows for item in candidates)
    small = dataclasses.replace(candidates[0], row_block=4, num_stages=1, chunk=0)
    for item in (candidates[0], small, dataclasses.replace(small, chunk=16)):
        text = check_printed(kernel, item)
        assert text.count("tl.load(x_ptr") == 1 and ("CHUNK_BLOCK" in text) == bool(item.chunk)


def test_accesses_that_are_contiguous_across_rows_are_of_whole_sectors() -> None:
    """As of the layer norm of channels-first sequences: the default has eight rows of four bytes at once."""
    text = str(backward(64, 640)).replace("[640*i + j]", "[i + 64*j]")
    split = split_rows(parse_kernel(text), hint, 3)
    assert split is not None
    first = configurations(split.kernels[0])[0]
    assert first.row_block >= 8 and not first.chunk
    check_printed(split.kernels[0], first)
