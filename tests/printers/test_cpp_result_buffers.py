"""Values of several passes that the memory of a result holds until the last pass."""

from __future__ import annotations

import re

import pytest
import torch

from fxwrap.loop_ir import Axis, Buffer, IndexLike, Kernel, KernelBuilder, as_index
from tests.printers.cpp_kernels import BF16, F32, check, compiled_together

F64, F16 = torch.float64, torch.float16


def softmax(dtype: torch.dtype, sizes: tuple[int, int], dim: int, result: str = "plain") -> Kernel:
    """A softmax in a dtype of rows (dim 1) or columns (dim 0) of a float64 or float32 matrix, and its result.

    Results are "plain"; "half", which cannot hold the exponentials; "in place", in the memory of the operand; "twice",
    the result and its double; "masked", stored for positive elements only; "gaps", rows further from each other; or
    "rounded", the exponentials in half precision beside it.
    """
    body, row, column = KernelBuilder(), Axis("i", sizes[0]), Axis("j", sizes[1])
    at = as_index(row) * sizes[1] + as_index(column)
    x = body.load("out" if result == "in place" else "x", at, dtype)
    power = (x - body.reduce("max", x)[0]).exp()
    value = power / body.reduce("sum", power)[0]
    stored: IndexLike = as_index(row) * (sizes[1] + 3) + as_index(column) if result == "gaps" else at
    out = BF16 if result == "half" else dtype
    body.store("out", stored, value.to(out), mask=x > 0 if result == "masked" else None)
    extent = sizes[0] * (sizes[1] + 3 * (result == "gaps"))
    outputs, inputs = [Buffer("out", out, extent)], [Buffer("x", dtype, sizes[0] * sizes[1])]
    if result == "twice":
        body.store("double", at, value + value)
        outputs.append(Buffer("double", dtype, extent))
    if result == "rounded":
        body.store("rounded", at, power.to(BF16))
        outputs.append(Buffer("rounded", BF16, extent))
    axes = ([row], [column]) if dim == 1 else ([column], [row])
    return body.finish(*axes, [] if result == "in place" else inputs, outputs)


SHAPES = [((3, 20011), 1), ((1, 70001), 1), ((1000, 64), 0), ((5000, 20), 0), ((3000, 15), 0), ((9001, 257), 0)]
HELD, OTHERS = ("plain", "twice", "gaps", "rounded"), ("half", "in place", "masked")
CASES = [(dtype, *shape, result) for dtype in (F32, F64) for shape in SHAPES for result in (*HELD, *OTHERS)]
compiled_softmaxes = compiled_together(softmax)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("compiled_softmaxes")
@pytest.mark.parametrize(("dtype", "sizes", "dim", "result"), CASES, ids=str)
def test_a_result_holds_exponentials(dtype: torch.dtype, sizes: tuple[int, int], dim: int, result: str) -> None:
    source = check(softmax(dtype, sizes, dim, result))
    assert bool(re.search(r" out\[[^;]*\] = exp_\d+;", source)) == (result in HELD)


def gates(dtype: torch.dtype, rows: int, columns: int, order: str) -> Kernel:
    """Two gates of a matrix, their sums of columns, and both as results.

    They are in the same order, reversed, or each in the other's result.
    """
    body, row, column = KernelBuilder(), Axis("i", rows), Axis("j", columns)
    at, count = as_index(row) * columns + as_index(column), rows * columns
    x = body.load("x", at, dtype)
    gate, other = x.exp(), (x * 0.5).exp()
    values = {"one": gate, "two": other}
    for name, value in values.items():
        body.store(f"{name}_sum", as_index(column), body.reduce("sum", value)[0])
    names = [*reversed(values)] if order == "reversed" else [*values]
    stored = {"one": other * 2, "two": gate} if order == "exchanged" else values
    for name in names:
        body.store(name, at, stored[name])
    outputs = [Buffer(name, dtype, count) for name in names]
    outputs += [Buffer(f"{name}_sum", dtype, columns) for name in values]
    return body.finish([column], [row], [Buffer("x", dtype, count)], outputs)


@pytest.mark.parametrize("order", ["same", "reversed", "exchanged"])
@pytest.mark.parametrize("columns", [20, 257])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_results_hold_two_values(dtype: torch.dtype, columns: int, order: str) -> None:
    source = check(gates(dtype, 20011, columns, order))
    assert all(re.search(rf" {name}\[[^;]*\] = exp_\d+;", source) for name in ("one", "two"))


@pytest.mark.parametrize("dim", [0, 1])
def test_results_hold_exponentials_of_nan_and_infinities(dim: int) -> None:
    sizes = (20011, 3) if dim == 0 else (3, 20011)
    x = torch.randn(sizes, dtype=F64, generator=torch.Generator().manual_seed(0))
    rows = x.T if dim == 0 else x
    rows[0, 5], rows[1, 7], rows[2, :] = torch.nan, torch.inf, -torch.inf
    check(softmax(F64, sizes, dim), arguments={"x": x.flatten()})
