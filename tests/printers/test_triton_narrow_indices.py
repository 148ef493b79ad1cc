"""Computed indices of Triton kernels: 32 bits where their range is known, 64 where memory tells them."""

from __future__ import annotations

import torch

from fxwrap.loop_ir import Axis, Kernel, KernelBuilder, as_index
from tests.printers.triton_kernels import F32, I64, build, check


def _resampled(is_loaded: bool) -> Kernel:
    """Rows of an image of twice the size, and the same with the positions from memory."""
    i = Axis("p0", 12)

    def write(body: KernelBuilder) -> None:
        at = ((body.index(i).to(F32) + 0.5) * 0.5 - 0.5).apply("floor").to(I64)
        at = body.load("at", as_index(i), I64) if is_loaded else at
        row = body.indirect_index((at - 1).maximum(0).minimum(abs(-(at * 0 + 5))), 6)
        body.store("out", as_index(i), body.load("x", row, F32) + at.to(F32))

    inputs = {"x": (F32, 6), **({"at": (I64, 12)} if is_loaded else {})}
    return build([i], [], inputs, {"out": (F32, 12)}, write)


def test_computed_indices_have_32_bits() -> None:
    text = check(_resampled(is_loaded=False))
    assert "floor.to(tl.int32)" in text and "floor.to(tl.int64)" not in text


def test_loaded_indices_have_64_bits() -> None:
    large = torch.tensor([2**40, -(2**40), 2**32, 2**32 + 1, -1, 0, 1, 2, 3, 4, 5, 6])
    check(_resampled(is_loaded=True), inputs={"at": large})


def test_positions_are_computed_from_positions() -> None:
    """A position that is computed from another computed position, which has another number in the narrow kernel."""
    i = Axis("p0", 12)

    def write(body: KernelBuilder) -> None:
        at = body.index(as_index(i)) - 3
        row = body.indirect_index((at < 0).where(at + 12, at), 12)
        body.store("out", as_index(i), body.load("x", body.indirect_index(body.index(row), 12), F32))

    check(build([i], [], {"x": (F32, 12)}, {"out": (F32, 12)}, write))


def test_quotients_of_offsets_have_32_bits() -> None:
    """Positions in a plane of the offsets in windows of three columns, which are bytes."""
    i = Axis("p0", 40)

    def write(body: KernelBuilder) -> None:
        offset = body.load("offsets", as_index(i), torch.int8).to(I64)
        row, column = offset.apply("floor_divide", 3), offset.apply("integer_remainder", 3)
        body.store("out", as_index(i), body.index(as_index(i)) - 20 + row * 1000 + column)

    kernel = build([i], [], {"offsets": (torch.int8, 40)}, {"out": (I64, 40)}, write)
    text = check(kernel, inputs={"offsets": torch.arange(-20, 20, dtype=torch.int8)})
    assert ".to(tl.int32)" in text and text.count("tl.int64") == 1, "more than the result has 64 bits"
