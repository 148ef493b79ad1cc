"""Reductions over some of the reduced axes, streaming reductions, and kernels under assumptions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fxwrap.errors import ParseError
from fxwrap.loop_ir import (
    Buffer,
    Compute,
    Constant,
    DeviceAssert,
    IndexLike,
    KernelBuilder,
    KernelError,
    Scalar,
    Store,
    as_index,
    assume,
    canonicalize_axes,
    evaluate_kernel,
    find_streaming_reduction,
    parse_kernel,
)
from tests.support.attention_kernel import Mask, attention_kernel, gradient_kernel, update_kernel

SUMS = """kernel(in0: f32[24]) -> (out0: f32[2]) for [p0: 2] reduce [r0: 3, r1: 4] {
  %0 = f32 load in0[12*p0 + 4*r0 + r1]
  %1 = f32 reduce sum %0 over r1
  %2 = f32 reduce max %1 over r0
  store out0[p0] %2
}
"""


def test_a_reduction_over_some_axes() -> None:
    kernel = parse_kernel(SUMS)
    assert str(kernel) == SUMS
    assert kernel.varying == (True, True, False, False)
    values, out = torch.randn(24), torch.empty(2)
    evaluate_kernel(kernel, {"in0": values, "out0": out})
    torch.testing.assert_close(out, values.view(2, 3, 4).sum(2).amax(1))
    assert find_streaming_reduction(kernel) is None


def test_canonical_axes_keep_steps_apart() -> None:
    """r0 and r1 are contiguous together, but no reduction reduces both."""
    kernel = canonicalize_axes(parse_kernel(SUMS), int)
    assert [axis.size for axis in kernel.reduced] == [3, 4]
    assert str(kernel) == SUMS


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("over r1", "over r7", ParseError, "there is no axis 'r7'"),
        ("over r1", "over p0", KernelError, "it reduces axes that are no reduced axes"),
        ("over r1", "over r1 r0", KernelError, "in another order"),
        ("reduce sum %0 over r1", "scan cumsum %0 over r1", ParseError, "a scan names no axes"),
    ],
)
def test_invalid_axes(old: str, new: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        parse_kernel(SUMS.replace(old, new))


def test_attention_is_a_streaming_reduction() -> None:
    kernel = attention_kernel()
    assert str(parse_kernel(str(kernel))) == str(kernel)
    parts = find_streaming_reduction(kernel)
    assert parts is not None
    names = parts.row.name, [axis.name for axis in parts.columns], [axis.name for axis in parts.axes]
    assert names == ("p1", ["p2"], ["r1"])
    assert len(parts.sums) == len(parts.weighted_sums) == 1
    buffers = {item.name: torch.randn(int(item.extent)) for item in (*kernel.inputs, *kernel.outputs)}
    evaluate_kernel(kernel, buffers)
    query, key, value = [buffers[name].view(2, -1, width) for name, width in (("query", 5), ("key", 5), ("value", 3))]
    row, column = torch.arange(20)[:, None], torch.arange(35)
    scores = query @ key.mT + buffers["slopes"][:, None, None] * (column - row)
    scores = scores.masked_fill(row < column - 2, -torch.inf)
    torch.testing.assert_close(buffers["out"].view(2, 20, 3), scores.softmax(-1) @ value)
    torch.testing.assert_close(buffers["logsumexp"].view(2, 20), scores.logsumexp(-1))


def test_gradients_of_attention_are_a_streaming_reduction() -> None:
    """Two products, no maximum, two weights, sums along different columns, and two streamed axes."""
    kernel = gradient_kernel(dtype=torch.float64)
    assert str(parse_kernel(str(kernel))) == str(kernel)
    parts = find_streaming_reduction(kernel)
    assert parts is not None
    names = parts.row.name, [axis.name for axis in parts.columns], [axis.name for axis in parts.axes]
    assert names == ("p1", ["p2", "p3"], ["r2", "r3"])
    assert parts.softmax is None
    assert [len(item) for item in (parts.products, parts.weights, parts.sums, parts.weighted_sums)] == [2, 2, 1, 2]
    items = (*kernel.inputs, *kernel.outputs)
    buffers = {item.name: torch.randn(int(item.extent), dtype=torch.float64) for item in items}
    query, grad_out = buffers["query"].view(2, 2, 35, 5), buffers["grad_out"].view(2, 2, 35, 3)
    key, value = buffers["key"].view(2, 1, 20, 5), buffers["value"].view(2, 1, 20, 3)
    weights = (query @ key.mT * 0.25 - buffers["logsumexp"].view(2, 2, 35, 1)).exp()
    weights = weights * (torch.arange(35)[:, None] >= torch.arange(20) - 2)
    evaluate_kernel(kernel, buffers)
    grad_scores = weights * (grad_out @ value.mT - buffers["terms"].view(2, 2, 35, 1))
    torch.testing.assert_close(buffers["grad_key"].view(2, 20, 5), (grad_scores.mT @ query).sum(1))
    torch.testing.assert_close(buffers["grad_value"].view(2, 20, 3), (weights.mT @ grad_out).sum(1))
    torch.testing.assert_close(buffers["total"].view(2, 20), weights.sum((1, 2)))


def test_sums_over_scores_are_updates_of_a_streaming_reduction() -> None:
    kernel = update_kernel(dtype=torch.float64)
    assert str(parse_kernel(str(kernel))) == str(kernel)
    parts = find_streaming_reduction(kernel)
    assert parts is not None
    buffer_names = [
        [kernel.operations[item.position].buffer for item in items]  # type: ignore[union-attr]
        for items in (parts.updates, parts.row_updates)
    ]
    assert buffer_names == [["by_distance", "by_key"], ["by_head", "by_row"]]
    items = (*kernel.inputs, *kernel.outputs)
    buffers = {item.name: torch.randn(int(item.extent), dtype=torch.float64) for item in items}
    before = {name: item.clone() for name, item in buffers.items()}
    evaluate_kernel(kernel, buffers)
    query, key = buffers["query"].view(2, 20, 5), buffers["key"].view(2, 35, 5)
    row, column = torch.arange(20)[:, None], torch.arange(35)
    weights = (query @ key.mT).tanh() * (row >= column - 2)
    distances = (row - column + 35).expand(2, 20, 35).flatten()
    expected = {
        "by_distance": torch.zeros(55, dtype=torch.float64).index_add(0, distances, weights.flatten()),
        "by_key": weights.sum((0, 1)) * (column < 32), "by_head": 2 * weights.sum((1, 2)),
        "by_row": 2 * weights.sum((0, 2)),
    }  # fmt: skip
    for name, change in expected.items():
        torch.testing.assert_close(buffers[name], before[name] + change)


_PRODUCT = """kernel(in0: f32[15], in1: f32[21], in2: i64[2]) -> (out0: f32[30]) \
for [p0: 2, p1: 5, p2: 3] reduce [r0: 3, r1: 7] {
  %0 = i64 load in2[p0]
  %1 = f32 load in0[3*p1 + r0]
  %2 = f32 load in1[r0 + 3*r1]
  %3 = f32 mul %1 %2
  %4 = f32 reduce sum %3 over r0
  %5 = i64 index r1
  %6 = bool lt %5 %0
  %7 = f32 0.0
  %8 = f32 where %6 %4 %7
  %9 = f32 tanh %4
  %10 = f32 where %6 %9 %7
  %11 = f32 mul %8 %10
  %12 = f32 load in1[p2 + 3*r1]
  %13 = f32 mul %11 %12
  %14 = f32 reduce sum %13 over r1
  store out0[15*p0 + p2 + 3*p1] %14
}
"""


@pytest.mark.parametrize(("factor", "bounds"), [("%10", 1), ("%9", 0)])
def test_products_are_zero_beyond_a_bound_of_both_factors(factor: str, bounds: int) -> None:
    """Zero times another factor may be NaN."""
    parts = find_streaming_reduction(parse_kernel(_PRODUCT.replace("mul %8 %10", f"mul %8 {factor}")))
    assert parts is not None
    assert len(parts.bounds) == bounds


def _position(body: KernelBuilder, row: IndexLike = 0) -> Scalar:
    return body.load("position", as_index(row), torch.int64)


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (lambda body, row, key: body.index(key) <= _position(body), 1),
        (lambda body, row, key: body.index(key) < _position(body, row), 1),
        (lambda body, row, key: ~(body.index(key).to(torch.int32) > _position(body, row).to(torch.int32)), 1),
        (lambda body, row, key: ~((body.index(key) > _position(body)) | (_position(body) >= body.index(key) + 3)), 2),
        (lambda body, row, key: (body.index(row) >= body.index(key)) & (body.index(row) - body.index(key) < 4), 2),
        (lambda body, row, key: _position(body, row) - body.index(row) > 2 - body.index(key), 1),
        (lambda body, row, key: (body.index(key) < 7) & body.index(key).apply("ne", _position(body)), 1),
        (lambda body, row, key: (body.index(key) <= body.index(row)) | (_position(body, row) > 5), 1),
        (lambda body, row, key: (_position(body) > 5) | ~(body.index(row) - body.index(key) >= 4), 1),
        (lambda body, row, key: (body.index(key) < 7) | (body.index(key) < _position(body)), 1),
        (lambda body, row, key: (body.index(key) < _position(body)) | (body.index(key) > 7), 0),
        (lambda body, row, key: ~((body.index(key) > 2) & (body.index(key) - 1 > _position(body))), 1),
        (lambda body, row, key: body.index(as_index(key) * 3 + 1) < _position(body), 1),
        (lambda body, row, key: _position(body, row) <= body.index(as_index(key) * 4 + as_index(row)), 1),
        (lambda body, row, key: body.index(as_index(key) * 2 - 5) > _position(body, row), 1),
        (lambda body, row, key: body.index(key) * 2 < _position(body), 0),
        (lambda body, row, key: body.index(key).to(torch.int32).to(torch.float32) < 3.5, 0),
    ],
    ids=[
        "position",
        "lengths",
        "not",
        "nor",
        "window",
        "difference",
        "other",
        "exception of rows",
        "exception of all",
        "either",
        "either side",
        "not both",
        "step",
        "step of rows",
        "step beyond",
        "multiple",
        "floats",
    ],
)
def test_bounds_of_masks(mask: Mask, count: int) -> None:
    """They hold exactly the keys that the comparisons with indices and positions do, whatever the positions are."""
    kernel = attention_kernel(heads=1, rows=6, keys=9, mask=mask)
    parts = find_streaming_reduction(kernel)
    assert parts is not None
    assert len(parts.bounds) == count
    key, limits_of = torch.arange(9), torch.iinfo(torch.int64)
    for bound in parts.bounds:
        outputs = (Buffer("limits", torch.int64, 6), Buffer("holds", torch.bool, 54))
        stores = (
            Store("limits", as_index(parts.row), bound.limit),
            Store("holds", parts.row * as_index(9) + bound.axis, bound.condition),
        )
        operations = (*parts.kernel.operations, *stores)
        tested = replace(parts.kernel, outputs=(*kernel.outputs, *outputs), operations=operations)
        for position in ([0, 3, 8, 9, -1, 40], [limits_of.max, limits_of.min + 9, 2, -7, 5, 1 << 31]):
            items = (*tested.inputs, *tested.outputs)
            buffers = {item.name: torch.zeros(int(item.extent), dtype=item.dtype) for item in items}
            buffers["position"] = torch.tensor(position)
            evaluate_kernel(tested, buffers)
            limits, holds = buffers["limits"][:, None], buffers["holds"].view(6, 9)
            assert torch.equal(key >= limits if bound.is_lower else key < limits, holds == bound.holds)


def test_scores_that_are_no_infinity_have_no_bound() -> None:
    """A row of such scores alone has equal weights."""
    parts = find_streaming_reduction(attention_kernel(masked=torch.finfo(torch.float32).min))
    assert parts is not None
    assert parts.bounds == ()


def test_keys_that_an_assertion_checks_are_visited() -> None:
    kernel = attention_kernel(mask=lambda body, row, key: body.index(key) <= _position(body))
    (position,) = [number for number, item in enumerate(kernel.operations) if str(item).startswith("Compute(name='le'")]
    checked = replace(kernel, operations=(*kernel.operations, DeviceAssert(position, "it is out of bounds")))
    for other, count in ((kernel, 1), (checked, 0)):
        parts = find_streaming_reduction(other)
        assert parts is not None
        assert len(parts.bounds) == count


def test_updates_of_each_column_are_no_streaming_reduction() -> None:
    text = str(update_kernel())
    (first,) = [line for line in text.splitlines() if "bool eq" in line]
    assert find_streaming_reduction(parse_kernel(text.replace(first, first.replace("eq", "ge")))) is None
    assert find_streaming_reduction(parse_kernel(text.replace("store add by_key", "store max by_key"))) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reduce max", "reduce min"),
        ("f32 mul %0 %1", "f32 sub %0 %1"),  # scores are no products
        ("f32 exp", "f32 exp2"),
    ],
)
def test_other_reductions_are_no_streaming_reductions(old: str, new: str) -> None:
    assert find_streaming_reduction(parse_kernel(str(attention_kernel()).replace(old, new))) is None


def test_assumptions_fold_conditions_and_keep_positions() -> None:
    kernel = parse_kernel("""kernel(in0: f32[4]) -> (out0: f32[4]) for [p0: 4] {
  %0 = i64 index p0
  %1 = i64 2
  %2 = bool lt %0 %1
  %3 = bool ge %0 %1
  %4 = bool logical_or %2 %3
  %5 = f32 load in0[p0] if %2 else 0
  %6 = f32 1.0
  %7 = f32 where %2 %5 %6
  store out0[p0] %7 if %4
}
""")
    inside, outside = assume(kernel, {2: True}), assume(kernel, {2: False})
    assert inside.operations[5] == inside.operations[7]
    assert inside.operations[4] == Constant(True, torch.bool) == inside.operations[2]
    assert inside.stores[0].mask is None
    assert outside.operations[7] == kernel.operations[6]
    assert outside.operations[4] == Compute("ge", (0, 1), torch.bool)
