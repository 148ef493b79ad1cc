"""Contractions with row reductions, split along columns, equal whole ones."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import (
    Kernel,
    SplitKernel,
    evaluate_kernel,
    find_contraction,
    parallel_column_block,
    parse_kernel,
    split_columns,
)
from fxwrap.symbolic import evaluate


def statistics(columns: int | str, kind: str = "softmax", rows: int = 5) -> Kernel:
    """A matmul, its results plus 1, and the results of a reduction of these along rows."""
    whole = f"""kernel(a: f32[{rows}*8], b: f32[{columns}*8]) -> (out: f32[{rows}*{columns}], first: TYPE[{rows}]) \
for [i: {rows}] reduce [j: {columns}, k: 8] {{
  %0 = f32 load a[8*i + k]
  %1 = f32 load b[8*j + k]
  %2 = f32 mul %0 %1
  %3 = f32 reduce sum %2 over k
  %4 = f32 1.0
  %5 = f32 add %3 %4
  store out[{columns}*i + j] %5
  %7 = f32 reduce {kind} %5 over j
"""
    results = ["f32", "i64"] if kind == "argmax" else ["f32", "f32"] if kind in ("softmax", "welford") else ["f32"]
    if len(results) == 1:
        return parse_kernel(whole.replace("TYPE", "f32") + "  store first[i] %7\n}\n")
    text = whole.replace("first: TYPE", f"second: {results[1]}[{rows}], first: f32") + "  %8 = f32 part 0 %7\n"
    return parse_kernel(f"{text}  store first[i] %8\n  %10 = {results[1]} part 1 %7\n  store second[i] %10\n}}\n")


def check(kernel: Kernel, split: SplitKernel, numbers: dict[str, int] | None = None) -> None:
    """Evaluates both and compares the outputs."""
    known, generator = numbers or {}, torch.Generator().manual_seed(3)

    def empty(dtype: torch.dtype, extent: object) -> torch.Tensor:
        return torch.full((int(evaluate(extent, known)),), 77).to(dtype)

    inputs = {item.name: torch.randn(int(evaluate(item.extent, known)), generator=generator) for item in kernel.inputs}
    expected, actual = [{item.name: empty(item.dtype, item.extent) for item in kernel.outputs} for _ in range(2)]
    between = {item.name: empty(item.dtype, item.extent) for item in split.temporaries}
    evaluate_kernel(kernel, {**inputs, **expected}, known)
    for part in split.kernels:
        evaluate_kernel(part, {**inputs, **actual, **between}, known)
    for name, want in expected.items():
        torch.testing.assert_close(actual[name], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [512, 300])
@pytest.mark.parametrize("kind", ["sum", "max", "min", "softmax", "argmax", "welford"])
def test_parts_combine_to_the_whole(kind: str, columns: int) -> None:
    kernel = statistics(columns, kind)
    split = split_columns(kernel)
    if kind == "welford" and columns % 128:
        assert split is None, "unequal parts have no plain combination"
        return
    assert split is not None and len(split.kernels) == 2
    first = find_contraction(split.kernels[0])
    assert first is not None and first.reduced_column_count == 128 and first.row_reductions
    check(kernel, split)


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(5, 4096, 16), (5, 16384, 64), (5, 40000, 128), (65, 4096, 128)]
)
def test_few_rows_have_small_parts_on_gpus(rows: int, columns: int, block: int) -> None:
    kernel = statistics(columns, "max", rows)
    assert parallel_column_block(kernel, lambda size: int(evaluate(size, {})), 132) == block
    split = split_columns(kernel, block)
    assert split is not None
    check(kernel, split)


def test_symbolic_columns() -> None:
    kernel = statistics("s0")
    split = split_columns(kernel)
    assert split is not None
    for size in (1, 128, 700):
        check(kernel, split, {"s0": size})


def test_few_columns_are_in_one_tile() -> None:
    assert split_columns(statistics(256)) is None


def test_elements_that_depend_on_a_row_would_need_their_products_again() -> None:
    text = str(statistics(512, "max")).replace("store first[i] %7", "%8 = f32 sub %5 %7\n  store out[512*i + j] %8")
    assert split_columns(parse_kernel(text.replace(", first: f32[5]", ""))) is None
    text = str(statistics(512, "max")).replace(
        "store first[i] %7", "%8 = f32 sub %5 %7\n  %9 = f32 reduce sum %8 over j"
    )
    assert split_columns(parse_kernel(text.replace("over j\n}", "over j\n  store first[i] %9\n}"))) is None
