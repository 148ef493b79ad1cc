"""Depthwise convolutions: each channel has a window of its own, so that results are pointwise, and fuse like a pool.

The gradient of the image gathers over the windows that cover an element. That of the weight has a sum for each element
of a window; those of one row of a window read the same gradients, and are computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fxwrap.fx_passes.effects import expand_to_rank
from fxwrap.loop_ir import Scalar
from fxwrap.lowering.fusion.definitions import Definition, ElementReader, Indices, Reduced, pointwise, reduction
from fxwrap.lowering.graph_definitions import library_call_reason
from fxwrap.lowering.rules.indexing_common import index_equal, masked_sum, masked_where
from fxwrap.lowering.rules.registry import LIBRARY_RULES, Declined, LoweringResult, OperatorCall, lowering_rule
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


def _depthwise_windows(
    call: OperatorCall, image: Definition, weight: Definition, counts: tuple[Size, ...], results: Sequence[bool]
) -> Plane:
    """Returns the windows of each dimension of the images of a depthwise convolution, given their numbers.

    `results` are whether the result, the gradient of the image and that of the weight are computed. Declines calls that
    stay library calls.
    """
    arguments, kernel, traits = call.bind(), weight.sizes[2:], call.spec.convolutions
    options = [expand_to_rank(arguments[name], len(kernel)) for name in ("stride", "padding", "dilation")]
    groups, transposed = arguments["groups"], arguments["transposed"]
    is_kernel = traits.generates_depthwise(image.dtype, image.sizes, weight.sizes, groups, transposed, results)
    if not is_kernel or not all(isinstance(number, int) for option in options for number in option):
        raise Declined(library_call_reason(call.name) or "a library call")
    call.in_memory.add(image)
    return tuple([Windows(*numbers) for numbers in zip(image.sizes[2:], counts, kernel, *options, strict=True)])


def _rows_of_weight(call: OperatorCall, weight: Definition) -> Definition:
    """Returns the weight as rows of channels, of shape (*kernel, channels), so that lanes read adjacent elements."""

    def define() -> Definition:
        def body(reader: ElementReader, indices: Indices) -> Scalar:
            return reader.load(weight, [indices[-1], 0, *indices[:-1]])

        return pointwise((*weight.sizes[2:], weight.sizes[0]), weight.dtype, call.device, body)

    rows = call.share(("rows of a depthwise weight", weight), define)
    call.in_memory.add(rows)
    return rows


@lowering_rule("aten.convolution.default", dtypes="equal float", rules=LIBRARY_RULES)
def _convolution(call: OperatorCall, image: Definition, weight: Definition, bias: Definition | None) -> LoweringResult:
    plane = _depthwise_windows(call, image, weight, call.sizes[2:], (True, False, False))
    rows = _rows_of_weight(call, weight)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        batch, channel, *at = indices

        def product(offset: tuple[int, ...], factor: Scalar) -> Scalar:
            return reader.load(image, [batch, channel, *input_indices(plane, at, offset)]) * factor

        offsets = [*window_offsets(windows.width for windows in plane)]
        factors = [reader.load(rows, [*offset, channel]) for offset in offsets]
        terms = [
            (is_window_in_bounds(reader, plane, at, offset), partial(product, offset, factor))
            for offset, factor in zip(offsets, factors, strict=True)
        ]
        total = masked_sum(reader, terms, image.dtype)
        return total if bias is None else total + reader.load(bias, [channel])

    return call.define(body)


@lowering_rule("aten.convolution_backward.default", dtypes="equal float", rules=LIBRARY_RULES)
def _convolution_backward(
    call: OperatorCall, gradient: Definition, image: Definition, weight: Definition
) -> LoweringResult:
    of_image, of_weight, of_bias = call.bind()["output_mask"]
    plane = _depthwise_windows(call, image, weight, gradient.sizes[2:], (False, of_image, of_weight))
    call.in_memory.add(gradient)
    return (
        _gradient_of_image(call, gradient, image, weight, plane) if of_image else None,
        _gradient_of_weight(call, gradient, image, plane) if of_weight else None,
        _gradient_of_bias(call, gradient) if of_bias else None,
    )


def _gradient_of_image(
    call: OperatorCall, gradient: Definition, image: Definition, weight: Definition, plane: Plane
) -> Definition:
    rows = _rows_of_weight(call, weight)

    def term(reader: ElementReader, outer: Indices, covering: Sequence[CoveringWindow]) -> Callable[[], Scalar]:
        offset = [item.offset // windows.dilation for item, windows in zip(covering, plane, strict=True)]
        load = partial(reader.load, rows, [*offset, outer[1]])
        factor = load() if all(item.constant is not None for item in offset) else None

        def product() -> Scalar:
            element = reader.load(gradient, [*outer, *[item.window for item in covering]])
            return element * (load() if factor is None else factor)

        return product

    return call.define(sum_over_windows(plane, term, image.dtype), call.results[0])


def _gradient_of_weight(call: OperatorCall, gradient: Definition, image: Definition, plane: Plane) -> Definition:
    sums = [_sums_of_column(call, gradient, image, plane, column) for column in range(plane[-1].width)]

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        channel, _, *rows, column = indices
        loads = [partial(reader.load, item, [*rows, channel]) for item in sums]

        def selected(number: int) -> Scalar:
            if number == len(loads) - 1:
                return loads[number]()
            rest = partial(selected, number + 1)
            return masked_where(reader, index_equal(reader, column, number), loads[number], rest)

        return selected(0)

    return call.define(body, call.results[1])


def _sums_of_column(call: OperatorCall, gradient: Definition, image: Definition, plane: Plane, column: int) -> Reduced:
    """Returns the gradients of the elements in one column of the windows, of shape (rows of a window..., channels)."""
    batch, channels, *counts = gradient.sizes
    rows = [windows.width for windows in plane[:-1]]

    def body(reader: ElementReader, parallel: Indices, reduced: Indices) -> Scalar:
        (*offset, channel), (item, *at) = parallel, reduced
        offset.append(column)
        factor = reader.load(gradient, [item, channel, *at])

        def product() -> Scalar:
            return reader.load(image, [item, channel, *input_indices(plane, at, offset)]) * factor

        is_inside = is_window_in_bounds(reader, plane, at, offset)
        return masked_where(reader, is_inside, product, lambda: reader.number(0, image.dtype))

    dtype = image.compute_dtype
    (total,) = reduction("sum", (*rows, channels), (batch, *counts), call.device, dtype, body, (dtype,))
    return total


def _gradient_of_bias(call: OperatorCall, gradient: Definition) -> Definition:
    batch, channels, *counts = gradient.sizes

    def body(reader: ElementReader, parallel: Indices, reduced: Indices) -> Scalar:
        return reader.load(gradient, [reduced[0], *parallel, *reduced[1:]])

    dtype = gradient.compute_dtype
    (total,) = reduction("sum", (channels,), (batch, *counts), call.device, dtype, body, (gradient.dtype,))
    return total
