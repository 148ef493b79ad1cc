"""Accesses to adjacent elements (pairs, quadruples): one access of a wide block, split or joined in registers."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, as_index, linearize_index
from fxwrap.printers.triton import TileConfiguration, configurations
from fxwrap.symbolic import Size, make_symbol, product
from tests.printers.test_triton_printer_compile import instructions
from tests.printers.triton_kernels import BF16, F32, F64, build, check, random

SYMBOL = make_symbol("s0")


def neighbours(sizes: tuple[Size, ...], count: int, dtype: torch.dtype = F32, place: str = "x") -> Kernel:
    """Adds to each of `count` adjacent elements the next one, to the last a number of the column; in place if "out"."""
    axes = [Axis(name, size) for name, size in zip("ij", sizes, strict=True)]

    def write(body: KernelBuilder) -> None:
        at = linearize_index(axes, sizes) * count
        elements = [body.load(place, at + number, dtype).to(F32) for number in range(count)]
        following = [*elements[1:], body.load("c", as_index(axes[1]), dtype).to(F32)]
        for number in range(count):
            body.store("out", at + number, (elements[number] + following[number]).to(dtype))

    inputs = {"c": (dtype, sizes[1]), "x": (dtype, product((*sizes, count)))}
    return build(axes, [], {name: inputs[name] for name in ("c", place) if name in inputs}, {"out": inputs["x"]}, write)


@pytest.mark.parametrize(
    ("sizes", "count", "dtype", "blocks"),
    [
        ((5, 64), 2, BF16, (64, 4)),  # whole rows
        ((5, 48), 4, F32, (32, 2)),  # masks along both dimensions
        ((3, 20), 8, torch.uint8, (16, 0)),  # axes in one dimension
        ((SYMBOL, 21), 2, F64, (32, 0)),
        ((SYMBOL, 64), 2, torch.int64, (64, 8)),
    ],
)
def test_adjacent_elements_are_one_access(
    sizes: tuple[Size, ...], count: int, dtype: torch.dtype, blocks: tuple[int, int]
) -> None:
    kernel = neighbours(sizes, count, dtype)
    i, j = kernel.axes
    x_block, y_block = blocks
    tile = TileConfiguration(x=(i, j), x_block=x_block)
    if y_block:
        tile = TileConfiguration(x=(j,), y=(i,), x_block=x_block, y_block=y_block)
    text = check(kernel, tile, numbers={"s0": 7})
    assert text.count("tl.load(") == 2 and text.count("tl.store(") == 1
    in_place = neighbours(sizes, count, dtype, "out")
    total = int(product((*[size if isinstance(size, int) else 7 for size in sizes], count)))
    start = random(dtype, total, torch.Generator().manual_seed(2))
    assert text != check(in_place, tile, numbers={"s0": 7}, in_place={"out": start})


@pytest.mark.parametrize(("count", "dtype"), [(8, F32), (4, torch.int64)], ids=str)
def test_elements_of_several_vectors_are_accesses_of_their_own(count: int, dtype: torch.dtype) -> None:
    """Halves of two vectors of a thread would go through shared memory."""
    kernel = neighbours((512, 64), count, dtype)
    assert check(neighbours((5, 64), count, dtype)).count("tl.load(") == count + 1
    assert "bar.sync" not in instructions(kernel, configurations(kernel)[0])


def test_three_elements_are_three_accesses() -> None:
    text = check(neighbours((5, 20), 3))
    assert text.count("tl.load(") == 4 and text.count("tl.store(") == 3


def test_a_pair_is_one_vector_access() -> None:
    kernel = neighbours((4096, 64), 2, BF16)
    text = instructions(kernel, configurations(kernel)[0])
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", text)) == 1 == len(re.findall(r"st\.global\S*\.v4\.b32", text))
    assert "b16" not in "".join(re.findall(r"(?:ld|st)\.global\S*", text))
    assert "bar.sync" not in text, "registers are exchanged through shared memory"


@pytest.mark.parametrize(("size", "alignment"), [(10007, 1), (10004, 4), (10016, 16)])
def test_positions_are_as_aligned_as_their_mask(size: int, alignment: int) -> None:
    """A thread whose vector the mask may divide would access its elements one by one, far from the next thread's."""
    axis = Axis("i", size)
    kernel = build(
        [axis], [], {"x": (BF16, size)}, {"out": (BF16, size)},
        lambda body: body.store("out", as_index(axis), body.load("x", as_index(axis), BF16)),
    )  # fmt: skip
    tile = TileConfiguration(x=(axis,), x_block=1024)
    assert ("tl.multiple_of(" in check(kernel, tile)) == (alignment < 16)
    loads = re.findall(r"ld\.global[.\w]*", instructions(kernel, tile))
    assert loads and all(item.endswith({1: ".b16", 4: ".v2.b32", 16: ".v4.b32"}[alignment]) for item in loads)


def test_pairs_beside_more_gathers_are_vectors_of_their_own() -> None:
    """Vectors of four stores would exchange indices and masks through shared memory."""
    axis, size = Axis("i", 9600), 4096

    def write(body: KernelBuilder) -> None:
        pair = [body.load("pairs", as_index(axis) * 2 + number, torch.int32) for number in range(2)]
        total = body.constant(0.0, F32)
        for left, right in itertools.product((0, 1), repeat=2):
            row, column = (pair[0] + left).to(torch.int64), (pair[1] + right).to(torch.int64)
            inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
            at = [body.indirect_index(item, size, inside) for item in (row, column)]
            total = total + inside.where(body.load("x", at[0] * size + at[1], F32), 0.0)
        body.store("out", as_index(axis), total)

    inputs = {"pairs": (torch.int32, 2 * 9600), "x": (F32, size * size)}
    kernel = build([axis], [], inputs, {"out": (F32, 9600)}, write)
    text = instructions(kernel, TileConfiguration(x=(axis,), x_block=512))
    assert len(re.findall(r"ld\.global\S*\.v2\.b32", text)) == 4
    assert "bar.sync" not in text


def unpacked(rows: int, columns: int, channels: int) -> Kernel:
    """Writes the four pixels of each place of a channels-last image to one of planes, the rows in turn."""
    c, i, j = Axis("c", channels), Axis("i", rows), Axis("j", columns)

    def write(body: KernelBuilder) -> None:
        place = (as_index(i) * columns + j) * 4 * channels + c
        values = [body.load("x", place + number * channels, BF16) for number in range(4)]
        for value, (column, row) in zip(values, itertools.product((0, 1), repeat=2), strict=True):
            to = (as_index(c) * 2 * rows + 2 * as_index(i) + row) * 2 * columns + 2 * as_index(j) + column
            body.store("out", to, value)

    count = 4 * rows * columns * channels
    return build([c, i, j], [], {"x": (BF16, count)}, {"out": (BF16, count)}, write)


def test_stores_to_other_elements_may_be_between_a_pair() -> None:
    text = check(unpacked(6, 8, 16))
    assert text.count("tl.store(") == 2


def test_short_rows_of_pairs_are_the_side_of_a_tile() -> None:
    """Fourteen pairs fill sectors as 28 elements do; loads are contiguous along the channels."""
    kernel = unpacked(14, 14, 512)
    tile = configurations(kernel)[0]
    assert isinstance(tile, TileConfiguration)
    assert ([axis.name for axis in tile.x], [axis.name for axis in tile.y]) == (["j"], ["c"])


def test_stores_to_one_element_keep_their_order() -> None:
    axis = Axis("i", 32)

    def write(body: KernelBuilder) -> None:
        elements = [body.load("x", as_index(axis) * 2 + number, F32) for number in (0, 1)]
        body.store("out", as_index(axis) * 2, elements[0])
        body.store("out", as_index(axis) * 2 + 1, elements[0])
        body.store("out", as_index(axis) * 2 + 1, elements[1])

    check(build([axis], [], {"x": (F32, 64)}, {"out": (F32, 64)}, write))
