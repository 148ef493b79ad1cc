"""Ranges of scalars: every element that the evaluator computes is within the range of its operation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxwrap.loop_ir import Axis, Buffer, KernelBuilder, Scalar, evaluate_kernel, linearize_index, value_range

I64, F32, I8 = torch.int64, torch.float32, torch.int8
ROW, COLUMN = Axis("i", 5), Axis("j", 9)
AT = linearize_index((ROW, COLUMN), (5, 9))
CONSTANTS = st.sampled_from([0, 1, 2, 7, -3, 40, 127, 300])
FRACTIONS = st.sampled_from([0.0, 0.5, -0.5, 0.1, 3.0, -7.25, 1e-3, 1e30])


@st.composite
def scalars(draw: st.DrawFn, body: KernelBuilder, dtype: torch.dtype, depth: int) -> Scalar:
    """An expression of the axes, of numbers and of the elements of `x` (small integers) and of `y`."""

    def other(kind: torch.dtype = dtype) -> Scalar:
        return draw(scalars(body, kind, depth - 1))

    if depth == 0:
        leaves = [body.index(ROW), body.index(AT - 7), body.load("x", AT, I8), body.constant(draw(CONSTANTS), I64)]
        if dtype is F32:
            leaves = [body.load("y", AT, F32), body.constant(draw(FRACTIONS), F32), body.index(COLUMN)]
        return draw(st.sampled_from(leaves)).to(dtype)
    if draw(st.booleans()):
        name = draw(st.sampled_from(["add", "sub", "mul", "maximum", "minimum"]))
        return other().apply(name, other())
    if dtype is F32:
        name = draw(st.sampled_from(["floor", "trunc", "neg", "cast", "where", "clamp"]))
        if name == "clamp":
            return other().maximum(draw(FRACTIONS)).minimum(draw(FRACTIONS))
        if name == "cast":
            return other(I64).to(F32)
    else:
        name = draw(
            st.sampled_from(
                ["bitwise_and", "bitwise_right_shift", "remainder", "quotient", "neg", "narrow", "cast", "where"]
            )
        )
        if name == "bitwise_right_shift":
            return other().apply(name, draw(st.integers(0, 5)))
        if name == "remainder":
            return other().apply("integer_remainder", draw(st.integers(1, 50)))
        if name == "quotient":
            return other().apply("floor_divide", draw(st.integers(1, 50)))
        if name == "bitwise_and":
            return other().apply(name, draw(CONSTANTS))
        if name == "narrow":
            return other().to(I8).to(I64)
        if name == "cast":
            return other(F32).maximum(-1e4).minimum(1e4).to(I64)
    return (other() < other()).where(other(), other()) if name == "where" else other().apply(name)


@given(st.data())
def test_elements_are_within_the_range(data: st.DataObject) -> None:
    body = KernelBuilder()
    dtype = data.draw(st.sampled_from([I64, F32]))
    value = data.draw(scalars(body, dtype, data.draw(st.integers(1, 4))))
    low, high = value_range(body.operations, value.position)
    body.store("out", AT, value)
    inputs = [Buffer("x", I8, 45), Buffer("y", F32, 45)]
    kernel = body.finish([ROW, COLUMN], [], inputs, [Buffer("out", dtype, 45)])
    y = torch.randn(45) * 20
    y[3], y[4] = math.nan, math.inf
    buffers = {"x": torch.arange(-22, 23).to(I8), "y": y, "out": torch.empty(45, dtype=dtype)}
    evaluate_kernel(kernel, buffers, {})
    out = buffers["out"]
    if math.isfinite(low) and math.isfinite(high):
        assert bool(((low <= out) & (out <= high)).all()), (low, high, out)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda b: b.index(AT), (0, 44)),
        (lambda b: b.load("x", AT, I64).maximum(0).minimum(8), (0, 8)),
        (lambda b: b.load("x", AT, I64), (-(2**63), 2**63 - 1)),
        (lambda b: b.load("x", AT, I64) + 1, (-(2**63), 2**63 - 1)),
        (lambda b: (b.index(COLUMN).to(F32) * 0.5 - 0.25).maximum(0.0).to(I64), (0, 3)),
        (lambda b: b.load("y", AT, F32).maximum(0.0), (-math.inf, math.inf)),  # NaN
        (lambda b: b.load("x", AT, I64).apply("integer_remainder", 7), (0, 6)),
        (lambda b: (b.index(COLUMN) - 5).apply("floor_divide", 3), (-2, 1)),
    ],
)
def test_ranges(build: object, expected: tuple[float, float]) -> None:
    body = KernelBuilder()
    value = build(body)  # type: ignore[operator]
    assert value_range(body.operations, value.position) == expected
