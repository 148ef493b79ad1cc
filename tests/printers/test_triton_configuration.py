"""The blocks of configurations: steps of loops over rows are filled."""

from __future__ import annotations

import pytest

from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, as_index, linearize_index
from fxwrap.printers.triton import configurations
from tests.printers.triton_kernels import BF16, F32, build


def rows_kernel(rows: int, size: int, tensors: int) -> Kernel:
    """The sum of the products of the elements of a row of several tensors."""
    p, r = Axis("p0", rows), Axis("r0", size)
    position = linearize_index([p, r], [rows, size])

    def write(body: KernelBuilder) -> None:
        product = body.load("x0", position, BF16).to(F32)
        for number in range(1, tensors):
            product = product * body.load(f"x{number}", position, BF16).to(F32)
        body.store("out", as_index(p), body.reduce("sum", product)[0])

    inputs = {f"x{number}": (BF16, rows * size) for number in range(tensors)}
    return build([p], [r], inputs, {"out": (F32, rows)}, write)


@pytest.mark.parametrize("tensors", [1, 3])
@pytest.mark.parametrize("rows", [96, 384, 4096])
@pytest.mark.parametrize("size", [16392, 17248, 24600, 40000, 70000])
def test_steps_of_loops_over_rows_are_filled(size: int, rows: int, tensors: int) -> None:
    """A last step of few elements takes as long as the others."""
    looped = [item for item in configurations(rows_kernel(rows, size, tensors)) if item.r_block < size]
    assert looped
    for item in looped:
        assert -(-size // item.r_block) * item.r_block <= 1.25 * size
