"""Pooling: a few elements of a window each, written out, so that a pool is pointwise and fuses like any formula.

Windows with many elements stay operator calls, and so do sizes that are symbolic where windows are placed by them.
Backward gathers: an element looks at the windows it can be in, instead of windows adding to elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxwrap.loop_ir import Index, IndexLike, Scalar, as_index
from fxwrap.lowering.definitions import Definition, Indices, Reader, pointwise
from fxwrap.lowering.rules.positions import Condition, at_least, below, both, choose
from fxwrap.lowering.rules.registry import Call, Result
from fxwrap.lowering.rules.rows import kernel_rule
from fxwrap.symbolic import Size

_MOST_ELEMENTS = 27
"""Windows up to 5 by 5 or 3 by 3 by 3; beyond, the code for one element is long, and a library's loop as good."""


@dataclass(frozen=True)
class Windows:
    """Where the windows of a pool are along one dimension: window w covers w * stride - padding + k * dilation."""

    size: Size
    count: Size
    width: int
    stride: int
    padding: int
    dilation: int

    def place(self, window: IndexLike, offset: int) -> Index:
        """Returns where in the input a window has its element number `offset`."""
        return as_index(window) * self.stride + (offset * self.dilation - self.padding)

    def inside(self, reader: Reader, window: IndexLike, offset: int) -> Condition:
        """Returns whether that is in the input."""
        place = self.place(window, offset)
        return both(at_least(reader, place, 0), below(reader, place, self.size))

    def first(self, reader: Reader, window: IndexLike) -> Scalar:
        """Returns where in the input a window has its first element that is inside."""
        start = reader.body.index(self.place(window, 0))
        if at_least(reader, self.place(window, 0), 0) is True:
            return start
        return (start < 0).where(start.apply("integer_remainder", self.dilation), start)

    def within_padding(self, reader: Reader, window: IndexLike, offset: int) -> Condition:
        """Returns whether that is in the input or in the padding around it: windows begin there, but may end beyond."""
        return below(reader, self.place(window, offset), as_index(self.size) + self.padding)

    @property
    def candidates(self) -> int:
        """In how many windows an element can be, without dilation."""
        return -(-self.width // self.stride)

    def candidate(self, reader: Reader, place: IndexLike, number: int) -> tuple[Index, Condition]:
        """Returns a window that an element can be in, and whether there is such a window with it; no dilation."""
        last = (as_index(place) + self.padding) // self.stride
        window = last - number
        covers = below(reader, as_index(place) + self.padding, window * self.stride + self.width)
        exists = both(at_least(reader, last, number), below(reader, last, as_index(self.count) + number))
        return window, both(exists, covers)


Plane = tuple[Windows, ...]


def _plane(
    x: Definition, results: Sequence[Size], kernel: Any, stride: Any, padding: Any, dilation: Any = 1
) -> Plane | str:
    """Returns the windows of each of the last dimensions of `x`, as many as `kernel` has, or a refusal."""
    rank = len(results)
    options = [of_each_dimension(option, rank) for option in (kernel, stride or kernel, padding, dilation)]
    if any(not isinstance(number, int) for option in options for number in option):
        return "its windows are symbolic"
    if math.prod(options[0]) > _MOST_ELEMENTS:
        return f"its windows have {math.prod(options[0])} elements"
    sizes = x.sizes[len(x.sizes) - rank :]
    return tuple([Windows(*numbers) for numbers in zip(sizes, results, *options, strict=True)])


def of_each_dimension(option: Any, rank: int) -> list[Any]:
    """Returns an option for each dimension; one number is for all."""
    numbers = list(option) if isinstance(option, list | tuple) else [option]
    return numbers * rank if len(numbers) == 1 else numbers


def _offsets(plane: Plane) -> list[tuple[int, ...]]:
    return list(itertools.product(*[range(windows.width) for windows in plane]))


def _rank(name: str) -> int:
    return 3 if "3d" in name else 2


# --- maximum ------------------------------------------------------------------------------------------------------


@kernel_rule("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def _max_pool(
    call: Call,
    x: Definition,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Result | str:
    values, positions = call.fake
    rank = _rank(call.name)
    plane = _plane(x, call.sizes_of(values)[-rank:], kernel, stride, padding, dilation)
    if isinstance(plane, str):
        return plane
    if x.dtype is torch.bool:
        return "eager has no maximum of bools in windows"

    def body_of(part: int) -> Callable[[Reader, Indices], Scalar]:
        return lambda reader, indices: _largest(reader, x, plane, indices)[part]

    sizes = call.sizes_of(values)
    return (
        pointwise(sizes, values.dtype, call.device, body_of(0)),
        pointwise(sizes, positions.dtype, call.device, body_of(1)),
    )


def _largest(reader: Reader, x: Definition, plane: Plane, indices: Indices) -> tuple[Scalar, Scalar]:
    """Returns the largest element of a window and where it is in its plane: the first one, or the last NaN.

    Elements outside are the lowest number there is, which wins over nothing: a window of nothing else, in memory or
    not, has its largest at its first element inside.
    """
    outer, at = list(indices[: -len(plane)]), indices[-len(plane) :]
    number = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    lowest = reader.number(number, x.dtype)
    firsts = [windows.first(reader, window) for windows, window in zip(plane, at, strict=True)]
    best, place = lowest, firsts[0]
    for windows, first in zip(plane[1:], firsts[1:], strict=True):
        place = place * reader.body.index(windows.size) + first
    for offset in _offsets(plane):
        valid = _inside(reader, plane, at, offset)
        spot = [windows.place(window, k) for windows, window, k in zip(plane, at, offset, strict=True)]
        value = choose(
            reader, valid,
            lambda spot=spot: reader.load(x, [*outer, *spot], number),  # type: ignore[misc]
            lambda: lowest,
        )  # fmt: skip
        wins = value > best
        if x.dtype.is_floating_point:
            wins = wins | value.apply("isnan")
        best, place = wins.where(value, best), wins.where(reader.body.index(_flat(plane, spot)), place)
    return best, place


def _inside(reader: Reader, plane: Plane, at: Indices, offset: tuple[int, ...]) -> Condition:
    return both(*[windows.inside(reader, window, k) for windows, window, k in zip(plane, at, offset, strict=True)])


def _flat(plane: Plane, spot: Sequence[Index]) -> Index:
    """Returns the position in a row-major plane; its parts may be outside, so nothing is simplified by their ranges."""
    position = as_index(0)
    for windows, index in zip(plane, spot, strict=True):
        position = position * windows.size + index
    return position


@kernel_rule("aten.max_pool2d_with_indices_backward.default")
def _max_pool_backward(
    call: Call,
    grad: Definition,
    x: Definition,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    positions: Definition,
) -> Result | str:
    plane = _plane(x, grad.sizes[-2:], kernel, stride, padding, dilation)
    if isinstance(plane, str):
        return plane
    if any(windows.dilation != 1 for windows in plane):
        return "its windows have gaps"
    if not call.spec.wide:
        return "a CPU is faster at adding each gradient to its place than at looking for it from each place"

    def value(reader: Reader, outer: Sequence[IndexLike], windows: Indices, place: Indices) -> Scalar:
        chosen = reader.load(positions, [*outer, *windows])
        own = reader.body.index(_flat(plane, [as_index(index) for index in place]))
        return chosen.equals(own).where(reader.load(grad, [*outer, *windows]), 0)

    return _gathered(call, plane, value)


# --- average ------------------------------------------------------------------------------------------------------


@kernel_rule("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def _average_pool(
    call: Call,
    x: Definition,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    counts_padding: bool = True,
    divisor: int | None = None,
) -> Result | str:
    rank, computes = _rank(call.name), x.compute_dtype
    plane = _plane(x, call.sizes[-rank:], kernel, stride, padding)
    if isinstance(plane, str):
        return plane
    if not x.dtype.is_floating_point:
        return "an average of integers is rounded"

    def body(reader: Reader, indices: Indices) -> Scalar:
        outer, at = indices[:-rank], indices[-rank:]
        total = None
        for offset in _offsets(plane):
            spot = [windows.place(window, k) for windows, window, k in zip(plane, at, offset, strict=True)]
            value = choose(
                reader, _inside(reader, plane, at, offset),
                lambda spot=spot: reader.load(x, [*outer, *spot]),  # type: ignore[misc]
                lambda: reader.number(0.0, computes),
            )  # fmt: skip
            total = value if total is None else total + value
        assert total is not None, "a window has an element at least"
        return _divided(reader, total, plane, at, counts_padding, divisor)

    return pointwise(call.sizes, call.dtype, call.device, body)


def _divided(
    reader: Reader, total: Scalar, plane: Plane, at: Indices, counts_padding: bool, divisor: int | None
) -> Scalar:
    """Divides by how many elements a window has, without those that do not count."""
    if divisor is not None:
        return total / float(divisor)
    known, computed = 1, []
    for windows, window in zip(plane, at, strict=True):
        counted = windows.within_padding if counts_padding else windows.inside
        conditions = [counted(reader, window, k) for k in range(windows.width)]
        scalars = [item.to(total.dtype) for item in conditions if isinstance(item, Scalar)]
        certain = sum([item is True for item in conditions])
        if scalars:
            computed.append(sum(scalars[1:], scalars[0]) + float(certain))
        else:
            known *= certain
    count = reader.number(float(known), total.dtype)
    for item in computed:
        count = count * item
    return total / count


@kernel_rule("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default")
def _average_pool_backward(
    call: Call,
    grad: Definition,
    x: Definition,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    counts_padding: bool,
    divisor: int | None,
) -> Result | str:
    plane = _plane(x, grad.sizes[-_rank(call.name) :], kernel, stride, padding)
    if isinstance(plane, str):
        return plane
    if not x.dtype.is_floating_point:
        return "an average of integers is rounded"

    def value(reader: Reader, outer: Sequence[IndexLike], windows: Indices, place: Indices) -> Scalar:
        return _divided(reader, reader.load(grad, [*outer, *windows]), plane, windows, counts_padding, divisor)

    return _gathered(call, plane, value)


def _gathered(
    call: Call, plane: Plane, value: Callable[[Reader, Sequence[IndexLike], Indices, Indices], Scalar]
) -> Result:
    """Returns the sum of `value(reader, outer indices, window, place)` over the windows that a place is in."""
    rank = len(plane)

    def body(reader: Reader, indices: Indices) -> Scalar:
        outer, place = indices[:-rank], indices[-rank:]
        total = None
        for numbers in itertools.product(*[range(windows.candidates) for windows in plane]):
            found = [
                windows.candidate(reader, index, number)
                for windows, index, number in zip(plane, place, numbers, strict=True)
            ]
            item = choose(
                reader, both(*[condition for _, condition in found]),
                lambda found=found: value(reader, outer, [window for window, _ in found], place),  # type: ignore[misc]
                lambda: reader.number(0, call.dtype),
            )  # fmt: skip
            total = item if total is None else total + item
        assert total is not None, "a place has a candidate at least"
        return total

    return pointwise(call.sizes, call.dtype, call.device, body)


# --- adaptive average ---------------------------------------------------------------------------------------------


@kernel_rule("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def _adaptive_average_pool(call: Call, x: Definition, sizes: Any) -> Result | str:
    """Window w of n over a size s is from floor(w * s / n) to ceil((w + 1) * s / n)."""
    rank, computes = len(sizes), x.compute_dtype
    pairs = list(zip(x.sizes[-rank:], call.sizes[-rank:], strict=True))
    refusal = _adaptive_refusal(x, pairs)
    if refusal is not None:
        return refusal
    widths = [size // count if size % count == 0 else size // count + 2 for size, count in pairs]
    if math.prod(widths) > _MOST_ELEMENTS:
        return f"its windows have up to {math.prod(widths)} elements"

    def body(reader: Reader, indices: Indices) -> Scalar:
        outer, at = indices[:-rank], indices[-rank:]
        spans = [_span(window, size, count) for window, (size, count) in zip(at, pairs, strict=True)]
        total = None
        for offset in itertools.product(*[range(width) for width in widths]):
            spot = [start + k for (start, _), k in zip(spans, offset, strict=True)]
            value = choose(
                reader, both(*[below(reader, place, end) for place, (_, end) in zip(spot, spans, strict=True)]),
                lambda spot=spot: reader.load(x, [*outer, *spot]),  # type: ignore[misc]
                lambda: reader.number(0.0, computes),
            )  # fmt: skip
            total = value if total is None else total + value
        assert total is not None, "a window has an element at least"
        return total / _elements(reader, spans, computes)

    return pointwise(call.sizes, call.dtype, call.device, body)


@kernel_rule("aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default")
def _adaptive_average_pool_backward(call: Call, grad: Definition, x: Definition) -> Result | str:
    """An element is in windows from floor(p * n / s) to ceil((p + 1) * n / s), the same rule the other way round."""
    rank, computes = _rank(call.name), x.compute_dtype
    pairs = list(zip(x.sizes[-rank:], grad.sizes[-rank:], strict=True))
    refusal = _adaptive_refusal(x, pairs)
    if refusal is not None:
        return refusal
    widths = [1 if size % count == 0 else count // size + 2 for size, count in pairs]
    if math.prod(widths) > _MOST_ELEMENTS:
        return f"an element is in up to {math.prod(widths)} windows"

    def body(reader: Reader, indices: Indices) -> Scalar:
        outer, at = indices[:-rank], indices[-rank:]
        ranges = [_span(place, count, size) for place, (size, count) in zip(at, pairs, strict=True)]
        total = None
        for offset in itertools.product(*[range(width) for width in widths]):
            windows = [start + k for (start, _), k in zip(ranges, offset, strict=True)]

            def share(windows: list[Index] = windows) -> Scalar:
                spans = [_span(window, size, count) for window, (size, count) in zip(windows, pairs, strict=True)]
                return reader.load(grad, [*outer, *windows]) / _elements(reader, spans, computes)

            exist = both(*[below(reader, window, end) for window, (_, end) in zip(windows, ranges, strict=True)])
            item = choose(reader, exist, share, lambda: reader.number(0.0, computes))
            total = item if total is None else total + item
        assert total is not None, "an element is in a window at least"
        return total

    return pointwise(call.sizes, call.dtype, call.device, body)


def _adaptive_refusal(x: Definition, pairs: list[tuple[Any, Any]]) -> str | None:
    if any(not isinstance(number, int) for pair in pairs for number in pair):
        return "its windows are symbolic"
    if any(number < 1 for pair in pairs for number in pair):
        return "it has no windows"
    return None if x.dtype.is_floating_point else "an average of integers is rounded"


def _span(window: IndexLike, size: int, count: int) -> tuple[Index, Index]:
    """Returns where a window begins, and where it has ended."""
    at = as_index(window)
    return (at * size) // count, (at * size + (size + count - 1)) // count


def _elements(reader: Reader, spans: list[tuple[Index, Index]], dtype: torch.dtype) -> Scalar:
    """Returns how many elements a window has."""
    count = reader.number(1.0, dtype)
    for start, end in spans:
        count = count * reader.body.index(end - start).to(dtype)
    return count
