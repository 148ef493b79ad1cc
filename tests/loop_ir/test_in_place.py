"""Which outputs may overwrite which inputs, and the kernel that does so."""

from __future__ import annotations

import pytest
import torch

from fxwrap.loop_ir import (
    Axis,
    Buffer,
    Index,
    Kernel,
    KernelBuilder,
    as_index,
    evaluate_kernel,
    in_place_candidates,
    reinplace_output,
)

F32 = torch.float32
P, R = Axis("p0", 3), Axis("r0", 4)
ELEMENT, FLIPPED = as_index(P) * 4 + R, as_index(P) * -4 + R + 8


def pointwise(load_at: Index, mode: str = "set", masked: bool = False, dtype: torch.dtype = F32) -> Kernel:
    """out[p, r] = y[p, r] + x at an index."""
    body = KernelBuilder()
    value = body.load("x", load_at, F32) + body.load("y", ELEMENT, F32)
    mask = body.index(as_index(R)) < 2 if masked else None
    body.store("out", ELEMENT, value.to(dtype), mask, mode)
    return body.finish([P, R], [], [Buffer("x", F32, 12), Buffer("y", F32, 12)], [Buffer("out", dtype, 12)])


HALVES = (as_index(P) * 4 + R, as_index(P) * 4 + R + 12)


def halves(swapped: bool = False, late: bool = False) -> Kernel:
    """Two stores of an iteration: a sum of x and y, and twice an element of x, perhaps of the other half."""
    body = KernelBuilder()
    first, second = HALVES[::-1] if swapped else HALVES
    one = body.load("x", first, F32) + body.load("y", as_index(P) * 4 + R, F32)
    if late:
        body.store("out", HALVES[0], one)
    two = body.load("x", second, F32) * 2
    if not late:
        body.store("out", HALVES[0], one)
    body.store("out", HALVES[1], two)
    return body.finish([P, R], [], [Buffer("x", F32, 24), Buffer("y", F32, 12)], [Buffer("out", F32, 24)])


def rows(stored: str) -> Kernel:
    """Rows divided by their sums; `early` is stored besides, from the first stage; `summed` is that and the sums."""
    body = KernelBuilder()
    x = body.load("x", ELEMENT, F32)
    (total,) = body.reduce("sum", x)
    outputs = [Buffer("out", F32, 12)]
    if stored != "out":
        body.store(stored, ELEMENT, x + 1)
        outputs.append(Buffer(stored, F32, 12))
    if stored == "summed":
        body.store("out", as_index(P), total)
        return body.finish([P], [R], [Buffer("x", F32, 12)], outputs)
    body.store("out", ELEMENT, x / total)
    return body.finish([P], [R], [Buffer("x", F32, 12)], outputs)


@pytest.mark.parametrize(
    ("kernel", "output", "expected"),
    [
        (pointwise(ELEMENT), "out", ("x", "y")),
        (pointwise(FLIPPED), "out", ("y",)),
        (pointwise(ELEMENT, mode="add"), "out", ()),
        (pointwise(ELEMENT, masked=True), "out", ()),
        (pointwise(ELEMENT, dtype=torch.float64), "out", ()),
        (halves(), "out", ("x", "y")),
        (halves(swapped=True), "out", ("x", "y")),
        (halves(late=True), "out", ("y",)),
        (rows("out"), "out", ("x",)),
        (rows("early"), "early", ()),
        (rows("early"), "out", ("x",)),
        (rows("summed"), "summed", ("x",)),
        (rows("summed"), "out", ()),
    ],
)
def test_in_place_candidates(kernel: Kernel, output: str, expected: tuple[str, ...]) -> None:
    assert in_place_candidates(kernel, output) == expected


def test_a_scan_is_never_in_place() -> None:
    body = KernelBuilder()
    body.store("out", ELEMENT, body.scan("cumsum", body.load("x", ELEMENT, F32))[0])
    kernel = body.finish([P], [R], [Buffer("x", F32, 12)], [Buffer("out", F32, 12)])
    assert in_place_candidates(kernel, "out") == ()


def test_an_overwritten_input_is_read_through_the_output() -> None:
    kernel, x = rows("out"), torch.rand(12) + 1
    merged = reinplace_output(kernel, "x", "out")
    assert merged.inputs == () and [item.name for item in merged.outputs] == ["out"]
    out = x.clone()
    evaluate_kernel(merged, {"out": out})
    torch.testing.assert_close(out.reshape(3, 4), x.reshape(3, 4) / x.reshape(3, 4).sum(1, keepdim=True))
