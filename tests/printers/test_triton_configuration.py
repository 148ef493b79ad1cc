"""The blocks of default configurations: filled steps of loops, few elements of a thread where each is an access."""

from __future__ import annotations

import pytest

from fxwrap.loop_ir import Axis, Index, Kernel, KernelBuilder, as_index, linearize_index
from fxwrap.printers.triton import TileConfiguration, configurations
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


def rotated(count: int, length: int) -> Kernel:
    """The product of each element of a row and others at a distance in it."""
    rows, inner = Axis("a", 1 << 20), Axis("b", count)
    other: Index = (as_index(inner) + length) % count
    position = linearize_index([rows, inner], [1 << 20, count])

    def write(body: KernelBuilder) -> None:
        product = body.load("x", position, BF16).to(F32)
        for name in "xyz":
            product = product * body.load(name, position - inner + other, BF16).to(F32)
        body.store("out", position, product.to(BF16))

    elements = count << 20
    inputs = dict.fromkeys("xyz", (BF16, elements))
    return build([rows, inner], [], inputs, {"out": (BF16, elements)}, write)


def elements_of_a_thread(kernel: Kernel) -> int:
    first = configurations(kernel)[0]
    assert isinstance(first, TileConfiguration)
    return first.x_block * first.y_block // (32 * first.num_warps)


def test_a_thread_has_few_elements_that_are_accessed_one_by_one() -> None:
    p = Axis("p0", 1 << 22)

    def copy(body: KernelBuilder) -> None:
        body.store("out", as_index(p), body.load("x", as_index(p), BF16))

    whole = build([p], [], {"x": (BF16, 1 << 22)}, {"out": (BF16, 1 << 22)}, copy)
    assert elements_of_a_thread(whole) == 8, "a vector"
    assert elements_of_a_thread(rotated(5, 2)) == 4
