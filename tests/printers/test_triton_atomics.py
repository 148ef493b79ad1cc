"""Atomic stores of Triton kernels: several iterations combine into one element, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import Axis, KernelBuilder, KernelError, as_index, linearize_index
from fxwrap.printers.triton import TileConfiguration, configurations, print_triton
from tests.printers.triton_kernels import BF16, F32, F64, I64, build, check


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("add", F32),
        ("add", BF16),
        ("add", torch.float16),
        ("add", torch.int64),
        ("max", torch.int64),
        ("min", torch.int32),
    ],
)
def test_atomic_stores_count_every_element(mode: str, dtype: torch.dtype) -> None:
    i, j = Axis("p0", 7), Axis("p1", 5)

    def write(body: KernelBuilder) -> None:
        place = body.indirect_index(body.load("index", as_index(i), I64), 3)
        value = body.load("x", linearize_index([i, j], [7, 5]), dtype)
        body.store("out", place, value, mask=body.load("use", as_index(j), torch.bool), mode=mode)

    inputs = {"index": (I64, 7), "x": (dtype, 35), "use": (torch.bool, 5)}
    kernel = build([i, j], [], inputs, {"out": (dtype, 3)}, write)
    start = torch.tensor([1, -2, 3], dtype=dtype)
    for configuration in (*configurations(kernel), TileConfiguration(x=(i,), y=(j,), x_block=4, y_block=2)):
        index = torch.tensor([0, 2, 2, 1, 0, 0, 2])
        check(kernel, configuration, inputs={"index": index}, in_place={"out": start})


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_atomic_extrema_of_floats(mode: str, dtype: torch.dtype) -> None:
    """Every pair of numbers of all kinds, in memory and as operand; NaN in memory has the sign of the mode."""
    odd = torch.tensor(
        [0.0, -0.0, 1.5, -1.5, 3e38, -3e38, 1e-40, -1e-40, torch.inf, -torch.inf, torch.nan], dtype=dtype
    )
    count = len(odd)
    axis = Axis("p0", count * count)

    def write(body: KernelBuilder) -> None:
        place = body.indirect_index(body.load("index", as_index(axis), I64), count * count)
        body.store("out", place, body.load("x", as_index(axis), dtype), mode=mode)

    inputs = {"index": (I64, count * count), "x": (dtype, count * count)}
    kernel = build([axis], [], inputs, {"out": (dtype, count * count)}, write)
    start = odd.repeat_interleave(count)
    start = torch.where(start.isnan(), start.abs().copysign(torch.tensor(1.0 if mode == "max" else -1.0)), start)
    for x in (odd.repeat(count), -odd.repeat(count)):
        arguments = {"index": torch.arange(count * count), "x": x}
        check(kernel, inputs=arguments, in_place={"out": start})
        check(kernel, inputs=arguments | {"index": torch.arange(count * count) // 7}, in_place={"out": start})


@pytest.mark.parametrize(("mode", "dtype"), [("prod", F32), ("max", BF16), ("add", torch.int8)])
def test_unsupported_atomic_stores_are_declined(mode: str, dtype: torch.dtype) -> None:
    axis = Axis("p0", 3)
    kernel = build(
        [axis], [], {"x": (dtype, 3)}, {"out": (dtype, 3)},
        lambda body: body.store("out", 0, body.load("x", as_index(axis), dtype), mode=mode),
    )  # fmt: skip
    with pytest.raises(KernelError, match=f"no atomic {mode}"):
        print_triton(kernel)
