"""Pooling with small windows, unrolled, so that a pool is pointwise and fuses like other formulas.

Large windows and symbolic windows stay extern calls. The backward gathers: an element sums over the windows that can
contain it, instead of windows adding to elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fxwrap.fx_passes.effects import expand_to_rank
from fxwrap.loop_ir import Index, IndexLike, Scalar, as_index
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices
from fxwrap.lowering.rules.indexing_common import (
    Condition,
    all_of,
    index_greater_equal,
    index_less,
    masked_sum,
    masked_where,
)
from fxwrap.lowering.rules.registry import Declined, LoweringResult, OperatorCall, lowering_rule
from fxwrap.lowering.rules.windows import (
    CoveringWindow,
    Plane,
    Windows,
    input_indices,
    is_window_in_bounds,
    sum_over_windows,
    window_offsets,
)
from fxwrap.symbolic import Size

_MAX_WINDOW_ELEMENTS = 27
"""Windows up to 5 by 5 or 3 by 3 by 3; unrolling larger ones is not faster than a library's loop."""


def _pooling_windows(call: OperatorCall, x: Definition, counts: Sequence[Size]) -> Plane:
    """Returns the windows of each of the last dimensions of `x`, given the numbers of windows."""
    arguments, rank = call.bind(), len(counts)
    kernel = arguments["kernel_size"]
    stride, padding, dilation = arguments["stride"] or kernel, arguments["padding"], arguments.get("dilation", 1)
    options = [expand_to_rank(option, rank) for option in (kernel, stride, padding, dilation)]
    if any(not isinstance(number, int) for option in options for number in option):
        raise Declined("its windows are symbolic")
    if math.prod(options[0]) > _MAX_WINDOW_ELEMENTS:
        raise Declined(f"its windows have {math.prod(options[0])} elements")
    sizes = x.sizes[len(x.sizes) - rank :]
    return tuple([Windows(*numbers) for numbers in zip(sizes, counts, *options, strict=True)])


def _rank(call: OperatorCall) -> int:
    return 3 if "3d" in call.name else 2


# --- maximum ---------------------------------------------------------------------------------------------------------


@lowering_rule("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default", dtypes="number")
def _max_pool(call: OperatorCall, x: Definition) -> LoweringResult:
    values, positions = call.results
    plane = _pooling_windows(call, x, call.sizes_of(values)[-_rank(call) :])
    return (
        call.define(lambda reader, indices: _window_max(reader, x, plane, indices)[0], values),
        call.define(lambda reader, indices: _window_max(reader, x, plane, indices)[1], positions),
    )


def _window_max(reader: ElementReader, x: Definition, plane: Plane, indices: Indices) -> tuple[Scalar, Scalar]:
    """Returns the largest element of a window and its position in its plane: the first one, or the last NaN.

    Elements outside the input are the lowest number, which never wins: the maximum of a window without a larger
    element is its first element inside. Halves of a window are independent, so that few operations wait for each other.
    The position is that of the window's start plus an offset, one of a few constants.
    """
    outer, at = list(indices[: -len(plane)]), indices[-len(plane) :]
    number = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    offsets = [*window_offsets(windows.width for windows in plane)]

    def element(offset: tuple[int, ...]) -> tuple[Scalar, Scalar]:
        valid, index = is_window_in_bounds(reader, plane, at, offset), input_indices(plane, at, offset)
        load = partial(reader.load, x, [*outer, *index], number)
        value = masked_where(reader, valid, load, lambda: reader.number(number, x.dtype))
        return value, _first_offset(reader, plane, at, ()) if offset == offsets[0] else _offset(reader, plane, offset)

    def largest(start: int, end: int) -> tuple[Scalar, Scalar]:
        middle = (start + end) // 2
        return element(offsets[start]) if end - start == 1 else _larger(largest(start, middle), largest(middle, end))

    value, offset = largest(0, len(offsets))
    return value, reader.body.index(_window_start(plane, at)) + offset


def _window_start(plane: Plane, at: Indices) -> Index:
    """Returns the position of a window's first element in a row-major plane, before it where that is in the padding."""
    return _flat_index(plane, input_indices(plane, at, (0,) * len(plane)))


def _offset(reader: ElementReader, plane: Plane, offset: Sequence[int]) -> Scalar:
    """Returns how far an element of a window is from the window's first one in a row-major plane."""
    distances = [as_index(k * windows.dilation) for windows, k in zip(plane, offset, strict=True)]
    flat = _flat_index(plane, distances)
    return reader.body.index(flat) if flat.constant is None else reader.number(flat.constant, torch.int64)


def _first_offset(reader: ElementReader, plane: Plane, at: Indices, offset: tuple[int, ...]) -> Scalar:
    """Returns the offset of a window's first element that is in the input, given its leading components."""
    if len(offset) == len(plane):
        return _offset(reader, plane, offset)
    windows, window = plane[len(offset)], at[len(offset)]
    result = _first_offset(reader, plane, at, (*offset, windows.max_before_input))
    for k in reversed(range(windows.max_before_input)):
        is_inside = index_greater_equal(reader, windows.input_index(window, k), 0)
        first = partial(_first_offset, reader, plane, at, (*offset, k))
        result = first() if is_inside is True else result if is_inside is False else is_inside.where(first(), result)
    return result


def _larger(best: tuple[Scalar, Scalar], other: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
    """Returns the larger value with its position: of equal ones the first, of NaN the last."""
    wins = other[0] > best[0]
    if other[0].dtype.is_floating_point:
        wins = wins | other[0].apply("isnan")
    return best[0].maximum(other[0]), wins.where(other[1], best[1])  # NaN too; alone it needs none of the comparisons


def _flat_index(plane: Plane, indices: Sequence[Index]) -> Index:
    """Returns the position in a row-major plane. Indices may be out of bounds, so their ranges simplify nothing."""
    position = as_index(0)
    for windows, index in zip(plane, indices, strict=True):
        position = position * windows.size + index
    return position


@lowering_rule("aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default")
def _max_pool_backward(call: OperatorCall, grad: Definition, x: Definition) -> LoweringResult:
    positions: Definition = call.bind()["indices"]
    plane = _pooling_windows(call, x, grad.sizes[-_rank(call) :])
    if not call.spec.massively_parallel:
        raise Declined("on a CPU it is faster to scatter each gradient than to search for it from each element")

    def value(reader: ElementReader, outer: Indices, covering: Sequence[CoveringWindow]) -> Scalar:
        at = [item.window for item in covering]
        chosen = reader.load(positions, [*outer, *at]) - reader.body.index(_window_start(plane, at))
        own = reader.body.index(_flat_index(plane, [item.offset for item in covering]))
        return chosen.equals(own).where(reader.load(grad, [*outer, *at]), 0)

    return _summed(call, plane, value)


# --- average ---------------------------------------------------------------------------------------------------------


@lowering_rule("aten.avg_pool2d.default", "aten.avg_pool3d.default", dtypes="float")
def _average_pool(call: OperatorCall, x: Definition) -> LoweringResult:
    rank = _rank(call)
    _check_average_dtype(call, x)
    plane = _pooling_windows(call, x, call.sizes[-rank:])

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        outer, at = indices[:-rank], indices[-rank:]
        terms = (
            (
                is_window_in_bounds(reader, plane, at, offset),
                partial(reader.load, x, [*outer, *input_indices(plane, at, offset)]),
            )
            for offset in window_offsets(windows.width for windows in plane)
        )
        total = masked_sum(reader, terms, x.dtype)
        return _divide_by_count(call, reader, total, plane, at)

    return call.define(body)


def _check_average_dtype(call: OperatorCall, x: Definition) -> None:
    if _rank(call) == 3 and call.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        raise Declined(f"eager mode has no {call.operator} of {x.dtype} on a CPU")


def _known_count(call: OperatorCall, plane: Plane) -> float | None:
    """Returns the divisor of all windows: the one that the call names, or the number of elements if all count."""
    arguments = call.bind()
    if arguments["divisor_override"] is not None:
        return float(arguments["divisor_override"])
    if all(windows.counts_all(padding=arguments["count_include_pad"]) for windows in plane):
        return float(math.prod([windows.width for windows in plane]))
    return None


def _divide_by_count(call: OperatorCall, reader: ElementReader, total: Scalar, plane: Plane, at: Indices) -> Scalar:
    """Divides by the divisor or, without one, by the number of elements of a window that count."""
    divisor = _known_count(call, plane)
    if divisor is not None:
        return total / divisor
    is_padded = call.bind()["count_include_pad"]
    known, computed = 1, []
    for windows, window in zip(plane, at, strict=True):
        if windows.counts_all(padding=is_padded):
            known *= windows.width
            continue
        counted = windows.within_padding if is_padded else windows.in_bounds
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


@lowering_rule("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default", dtypes="equal float")
def _average_pool_backward(call: OperatorCall, grad: Definition, x: Definition) -> LoweringResult:
    _check_average_dtype(call, x)
    plane = _pooling_windows(call, x, grad.sizes[-_rank(call) :])

    divisor = _known_count(call, plane)

    def value(reader: ElementReader, outer: Indices, covering: Sequence[CoveringWindow]) -> Scalar:
        at = [item.window for item in covering]
        loaded = reader.load(grad, [*outer, *at])
        return loaded if divisor is not None else _divide_by_count(call, reader, loaded, plane, at)

    return _summed(call, plane, value, divisor)


def _summed(
    call: OperatorCall,
    plane: Plane,
    value: Callable[[ElementReader, Indices, Sequence[CoveringWindow]], Scalar],
    divisor: float | None = None,
) -> LoweringResult:
    """Returns the divided sum of `value(reader, outer indices, covering windows)` over the windows of an element."""

    def term(reader: ElementReader, outer: Indices, covering: Sequence[CoveringWindow]) -> Callable[[], Scalar]:
        return partial(value, reader, outer, covering)

    return call.define(sum_over_windows(plane, term, call.dtype, divisor))


# --- adaptive average ------------------------------------------------------------------------------------------------


@lowering_rule("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default", dtypes="float")
def _adaptive_average_pool(call: OperatorCall, x: Definition) -> LoweringResult:
    """Window w of n over a size s ranges from floor(w * s / n) to ceil((w + 1) * s / n)."""
    rank = _rank(call)
    pairs = _adaptive_sizes(x.sizes[-rank:], call.sizes[-rank:])
    widths = [size // count if size % count == 0 else size // count + 2 for size, count in pairs]
    if math.prod(widths) > _MAX_WINDOW_ELEMENTS:
        raise Declined(f"its windows have up to {math.prod(widths)} elements")

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        outer, at = indices[:-rank], indices[-rank:]
        spans = [_adaptive_window_bounds(window, size, count) for window, (size, count) in zip(at, pairs, strict=True)]

        total = _sum_over_spans(reader, spans, widths, lambda at: reader.load(x, [*outer, *at]), x.dtype)
        return total / _window_numel(reader, spans, x.compute_dtype)

    return call.define(body)


@lowering_rule(
    "aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default", dtypes="equal float"
)
def _adaptive_average_pool_backward(call: OperatorCall, grad: Definition, x: Definition) -> LoweringResult:
    """Element p is in windows from floor(p * n / s) to ceil((p + 1) * n / s): the same rule, n and s swapped."""
    rank = _rank(call)
    pairs = _adaptive_sizes(x.sizes[-rank:], grad.sizes[-rank:])
    widths = [1 if size % count == 0 else count // size + 2 for size, count in pairs]
    if math.prod(widths) > _MAX_WINDOW_ELEMENTS:
        raise Declined(f"an element is in up to {math.prod(widths)} windows")

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        outer, at = indices[:-rank], indices[-rank:]
        ranges = [_adaptive_window_bounds(index, count, size) for index, (size, count) in zip(at, pairs, strict=True)]

        def share(windows: list[Index]) -> Scalar:
            spans = [
                _adaptive_window_bounds(window, size, count)
                for window, (size, count) in zip(windows, pairs, strict=True)
            ]
            return reader.load(grad, [*outer, *windows]) / _window_numel(reader, spans, x.compute_dtype)

        return _sum_over_spans(reader, ranges, widths, share, x.dtype)

    return call.define(body)


def _adaptive_sizes(sizes: Sequence[Size], counts: Sequence[Size]) -> list[tuple[int, int]]:
    """Returns pairs of an input size and its number of windows."""
    pairs = list(zip(sizes, counts, strict=True))
    known = [(size, count) for size, count in pairs if isinstance(size, int) and isinstance(count, int)]
    if len(known) < len(pairs):
        raise Declined("its windows are symbolic")
    if any(size < 1 or count < 1 for size, count in known):
        raise Declined("it has no windows")
    return known


def _adaptive_window_bounds(window: IndexLike, size: int, count: int) -> tuple[Index, Index]:
    """Returns the first index of a window, and the index after its last."""
    at = as_index(window)
    return (at * size) // count, (at * size + (size + count - 1)) // count


def _sum_over_spans(
    reader: ElementReader,
    spans: list[tuple[Index, Index]],
    widths: Sequence[int],
    value: Callable[[list[Index]], Scalar],
    dtype: torch.dtype,
) -> Scalar:
    """Returns the sum of `value(indices)` over spans (first, end), one for each dimension, of at most these widths."""

    def term(offset: tuple[int, ...]) -> tuple[Condition, Callable[[], Scalar]]:
        indices = [start + k for (start, _), k in zip(spans, offset, strict=True)]
        inside = all_of(*[index_less(reader, index, end) for index, (_, end) in zip(indices, spans, strict=True)])
        return inside, partial(value, indices)

    return masked_sum(reader, map(term, window_offsets(widths)), dtype)


def _window_numel(reader: ElementReader, spans: list[tuple[Index, Index]], dtype: torch.dtype) -> Scalar:
    count = reader.number(1.0, dtype)
    for start, end in spans:
        count = count * reader.body.index(end - start).to(dtype)
    return count
