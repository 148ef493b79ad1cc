"""Segments of one length of an axis share iterations where their accesses then transfer fewer bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxwrap.loop_ir import (
    CACHE_LINE_BYTES,
    NEAR_BYTES,
    Axis,
    Buffer,
    Index,
    Kernel,
    KernelBuilder,
    Load,
    Scalar,
    Store,
    access_bytes,
    as_index,
    evaluate_kernel,
    fuse_segments,
    transferred_bytes,
)
from tests.lowering.loop_order import evaluate_in_loop_order
from tests.support.long_form import sample_size

F32 = torch.float32


def condition(draw: st.DrawFn, body: KernelBuilder, axis: Axis, end: int) -> Scalar:
    """`axis < end`, in a form of its own."""
    scale, offset = draw(st.integers(1, 3)), draw(st.integers(-2, 2))
    place = body.index(as_index(axis) * scale + offset)
    match draw(st.sampled_from(("lt", "le", "ge", "gt"))):
        case "lt":
            return place < end * scale + offset
        case "le":
            return place <= end * scale + offset - 1
        case "ge":
            return ~(place >= end * scale + offset)
        case _:
            return ~(place > end * scale + offset - 1)


@st.composite
def concatenations(draw: st.DrawFn) -> Kernel:
    """Segments of one axis, mostly of one length, each a product of elements anywhere in three tensors."""
    dtype = draw(st.sampled_from((F32, torch.float64, torch.int8)))
    length, count = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    ends = [length * number for number in range(1, count + 1)]
    if length > 1 and draw(st.integers(0, 4)) == 0:
        ends[0] -= 1
    whole, other = Axis("a", ends[-1]), Axis("b", draw(st.integers(1, 4)))
    size = ends[-1] * int(other.size)
    steps = draw(st.sampled_from([(int(other.size), 1), (1, ends[-1])]))
    body = KernelBuilder()

    def position(along: Index) -> Index:
        return along * steps[0] + as_index(other) * steps[1]

    def element(start: int, end: int) -> Scalar:
        first = draw(st.sampled_from((0, start, ends[-1] - (end - start))))
        return body.load(draw(st.sampled_from("xyz")), position(as_index(whole) - start + first), dtype)

    value: Scalar | None = None
    for start, end in reversed([*itertools.pairwise((0, *ends))]):
        inside = condition(draw, body, whole, end) & ~condition(draw, body, whole, start)
        with body.masked(inside):
            part = element(start, end)
            for _ in range(draw(st.integers(0, 2))):
                part = part * element(start, end)
        value = part if value is None else condition(draw, body, whole, end).where(part, value)
    assert value is not None
    if draw(st.booleans()):
        value = value + body.load("out", position(as_index(whole)), dtype)
    body.store("out", position(as_index(whole)), value)
    axes = draw(st.permutations((whole, other)))
    return body.finish(axes, [], [Buffer(name, dtype, size) for name in "xyz"], [Buffer("out", dtype, size)])


@st.composite
def rolled(draw: st.DrawFn) -> Kernel:
    """Products of elements anywhere in the rows of short tensors, of which conditions may select some."""
    dtype, count = draw(st.sampled_from((F32, torch.float64, torch.int8, torch.int16))), draw(st.integers(1, 5))
    short, rows = Axis("a", count), Axis("b", draw(st.integers(1, 5)))
    body = KernelBuilder()
    value: Scalar | None = None
    for _ in range(draw(st.integers(1, 4))):
        along = (as_index(short) * draw(st.integers(1, 2)) + draw(st.integers(0, count))) % count
        row = (as_index(rows) + draw(st.integers(0, 4))) % rows.size if draw(st.booleans()) else as_index(rows)
        name = draw(st.sampled_from("xyz"))
        if draw(st.integers(0, 3)):
            element = body.load(name, row * count + along, dtype)
        else:
            with body.masked(condition(draw, body, short, draw(st.integers(0, count)))):
                element = body.load(name, row * count + along, dtype)
        value = element if value is None else value * element
    assert value is not None
    body.store("out", as_index(rows) * count + short, value)
    size = count * int(rows.size)
    buffers = [Buffer(name, dtype, size) for name in "xyz"]
    return body.finish([rows, short], [], buffers, [Buffer("out", dtype, size)])


@settings(max_examples=sample_size(300))
@given(concatenations() | rolled())
def test_fused_segments_compute_the_same(kernel: Kernel) -> None:
    fused = fuse_segments(kernel, int)
    generator = torch.Generator().manual_seed(1)
    names = [item.name for item in (*kernel.inputs, *kernel.outputs)]
    count, dtype = int(kernel.outputs[0].extent), kernel.outputs[0].dtype
    buffers = {name: (5 * torch.randn(count, generator=generator)).to(dtype) for name in names}
    results = []
    for item, evaluate in ((kernel, evaluate_kernel), (fused, evaluate_kernel), (fused, evaluate_in_loop_order)):
        copies = {name: tensor.clone() for name, tensor in buffers.items()}
        evaluate(item, copies, {})
        results.append(copies["out"])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]), f"{kernel}\n{fused}"
    if fused is not kernel:
        (loaded, stored), (fused_loaded, fused_stored) = bytes_of(kernel), bytes_of(fused)
        assert fused_loaded + fused_stored <= loaded + stored and fused_stored <= stored


@pytest.mark.parametrize(
    ("dtype", "count", "near_bytes", "is_fused"),
    [
        (torch.bfloat16, 3, NEAR_BYTES, False),  # stores of single elements cost more than few loads
        (F32, 3, NEAR_BYTES, False),  # a GPU's stores would transfer each sector three times
        (F32, 3, CACHE_LINE_BYTES, True),
        (torch.float64, 3, CACHE_LINE_BYTES, True),
        (torch.bfloat16, 3, CACHE_LINE_BYTES, True),
        (torch.bfloat16, 5, CACHE_LINE_BYTES, False),  # no compiler vectorises so many
    ],
)
def test_elements_that_loads_rotate_share_iterations_where_their_stores_are_near(
    dtype: torch.dtype, count: int, near_bytes: int, is_fused: bool
) -> None:
    kernel = rotated(dtype, count)
    fused = fuse_segments(kernel, int, near_bytes)
    assert (fused is not kernel) == is_fused
    assert len(fused.stores) == (count if is_fused else 1)


def rotated(dtype: torch.dtype, count: int) -> Kernel:
    """The sum of each element of short rows and the next one."""
    short, rows = Axis("a", count), Axis("b", 64)
    body = KernelBuilder()
    places = [as_index(rows) * count + short, as_index(rows) * count + (as_index(short) + 1) % count]
    one, other = [body.load("x", index, dtype) for index in places]
    body.store("out", places[0], (one.to(F32) + other.to(F32)).to(dtype))
    size = count * 64
    return body.finish([rows, short], [], [Buffer("x", dtype, size)], [Buffer("out", dtype, size)])


def test_windows_of_short_axes_are_not_unrolled() -> None:
    """Elements of images of which each reads the windows that have it, as in the gradient of a pool."""
    half, rows = Axis("a", 2), Axis("b", 64)
    body = KernelBuilder()
    windows = [as_index(rows) + (as_index(half) + 1) // 2, as_index(rows) + (as_index(half) + 2) // 2]
    one, other = [body.load("x", index, torch.bfloat16).to(F32) for index in windows]
    body.store("out", as_index(rows) * 2 + half, (one + other).to(torch.bfloat16))
    buffers = [Buffer("x", torch.bfloat16, 66)], [Buffer("out", torch.bfloat16, 128)]
    kernel = body.finish([rows, half], [], *buffers)
    assert fuse_segments(kernel, int) is kernel


def bytes_of(kernel: Kernel) -> tuple[float, float]:
    """The bytes of all loads, masked ones included, and those of all stores."""
    positions = [position for position, item in enumerate(kernel.operations) if isinstance(item, Load | Store)]
    return access_bytes(kernel, dict.fromkeys(positions, 1), int)


def access(axes: list[Axis], index: Index, dtype: torch.dtype = F32) -> Kernel:
    """Stores an element of x, at an index, at that index."""
    body = KernelBuilder()
    body.store("out", index, body.load("x", index, dtype))
    return body.finish(axes, [], [Buffer("x", dtype, 1 << 20)], [Buffer("out", dtype, 1 << 20)])


ROW, COLUMN = Axis("i", 64), Axis("j", 128)


@pytest.mark.parametrize(
    ("index", "dtype", "expected"),
    [
        (as_index(ROW) * 128 + COLUMN, F32, 64 * 128 * 4),
        (as_index(ROW) * 512 + COLUMN + 256, F32, 64 * 128 * 4),
        (as_index(COLUMN), F32, 128 * 4),
        (as_index(COLUMN) * 2, F32, 128 * 8),
        (as_index(COLUMN) * 100, F32, 128 * 32),
        (as_index(COLUMN) * 100, torch.bfloat16, 128 * 32),
        (as_index(COLUMN) * -1 + 127, F32, 128 * 4),
        (as_index(COLUMN) * 64 + ROW, F32, 64 * 128 * 4),
    ],
)  # fmt: skip
def test_transferred_bytes(index: Index, dtype: torch.dtype, expected: int) -> None:
    assert transferred_bytes(access([ROW, COLUMN], index, dtype), 0, int) == expected


@pytest.mark.parametrize(
    ("dtype", "step", "offsets", "factor"),
    [
        (F32, 2, (0, 1), 1),  # a vector
        (F32, 4, (0, 1, 2, 3), 1),
        (torch.int16, 3, (0, 1, 2), 1),  # neighbours in a sector
        (F32, 3, (0, 1, 2), 3),
        (torch.int16, 3, (0, 1), 3),
        (F32, 2, (0, 3), 2),
    ],
)
def test_interleaved_stores_transfer_each_element_once(
    dtype: torch.dtype, step: int, offsets: tuple[int, ...], factor: int
) -> None:
    body = KernelBuilder()
    for offset in offsets:
        body.store("out", as_index(ROW) * step + offset, body.load("x", as_index(ROW), dtype))
    kernel = body.finish([ROW], [], [Buffer("x", dtype, 64)], [Buffer("out", dtype, 64 * step + 2)])
    assert bytes_of(kernel) == (64 * dtype.itemsize, 64 * dtype.itemsize * len(offsets) * factor)
