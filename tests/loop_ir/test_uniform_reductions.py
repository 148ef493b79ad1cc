"""Reductions of equal values are folded: sums to products, maxima to the value; the meaning of a kernel stays."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Kernel, Reduce, evaluate_kernel, fold_uniform_reductions, parse_kernel


def kernel_of(kind: str, dtype: str = "f32", size: str = "7") -> Kernel:
    """Reduces row[p], which does not vary along r, and the elements of x that it multiplies."""
    return parse_kernel(f"""kernel(row: {dtype}[5], x: {dtype}[5*{size}]) -> (first: {dtype}[5], second: {dtype}[5]) \
for [p: 5] reduce [r: {size}] {{
  %0 = {dtype} load row[p]
  %1 = {dtype} reduce {kind} %0
  store first[p] %1
  %3 = {dtype} load x[{size}*p + r]
  %4 = {dtype} mul %1 %3
  %5 = {dtype} reduce sum %4
  store second[p] %5
}}
""")


def reductions(kernel: Kernel) -> int:
    return sum(isinstance(item, Reduce) for item in kernel.operations)


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_reductions_of_equal_values_are_folded(kind: str) -> None:
    kernel = kernel_of(kind)
    folded = fold_uniform_reductions(kernel)
    assert reductions(folded) == 1 and folded.outputs == kernel.outputs
    data = {"row": torch.randn(5), "x": torch.randn(35)}
    results = []
    for item in (kernel, folded):
        outputs = {name: torch.zeros(5) for name in ("first", "second")}
        evaluate_kernel(item, {**data, **outputs}, {})
        results.append(outputs)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    "kernel",
    [
        kernel_of("prod"),
        kernel_of("sum", "i64"),  # no factor of its own dtype is a float
        kernel_of("sum", size="s0"),  # which may be 0
        kernel_of("sum", size="0"),
        parse_kernel(
            "kernel(row: f32[5]) -> (out: f32[5]) for [p: 5] reduce [r: 7] {\n"
            "  %0 = f32 load row[p]\n  %1 = f32 reduce sum %0\n  store out[p] %1\n}\n"
        ),
    ],
    ids=["a product", "integers", "a symbolic size", "no element", "nothing else is reduced"],
)
def test_other_reductions_stay(kernel: Kernel) -> None:
    assert fold_uniform_reductions(kernel) is kernel
