"""Elements combined from several tensors, or from a tensor and a number: concatenation, padding, triangles, windows.

Indices outside the source tensor are masked, so that nothing outside is ever loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fxwrap.fx_passes.effects import expand_to_rank
from fxwrap.loop_ir import INTEGERS, Index, IndexLike, Scalar, as_index
from fxwrap.lowering.fusion.definitions import (
    Definition,
    ElementReader,
    EvenConcatenation,
    Indices,
    Pointwise,
    broadcast_indices,
    pointwise,
    reduction,
)
from fxwrap.lowering.rules.indexing_common import (
    Condition,
    all_of,
    canonicalize_dim,
    check_region,
    index_equal,
    index_greater_equal,
    index_in_range,
    index_less,
    masked_sum,
    masked_where,
    replace_index,
    resolve_checked_index,
    resolve_slice_start,
    unchecked_indirect_index,
)
from fxwrap.lowering.rules.registry import (
    Declined,
    ElementBody,
    LoweringResult,
    NumberOrSymbol,
    OperatorCall,
    lowering_rule,
)
from fxwrap.symbolic import Size, ceiling_divide, diagonal_length, slice_length, slice_start, total

MAX_CAT_INPUTS = 16
"""The most tensors that a kernel concatenates; copying more of them one by one is faster."""


# --- concatenation ---------------------------------------------------------------------------------------------------


@lowering_rule("aten.cat.default", dtypes="stored")
def _cat(call: OperatorCall, tensors: Sequence[Definition], dim: int) -> LoweringResult:
    sizes = call.sizes
    dim = canonicalize_dim(dim, len(sizes))
    full = [item for item in tensors if len(item.sizes) == len(sizes) and item.sizes[dim] != 0]  # others: legacy empty
    ends: list[Size] = [0]
    for item in full:
        ends.append(total((ends[-1], item.sizes[dim])))

    def load(number: int) -> ElementBody:
        start = as_index(ends[number])
        return lambda reader, indices: reader.load(
            full[number], replace_index(indices, dim, as_index(indices[dim]) - start)
        )  # fmt: skip

    return _concatenate(call, dim, ends, [load(number) for number in range(len(full))])


@lowering_rule("aten.stack.default", dtypes="stored")
def _stack(call: OperatorCall, tensors: Sequence[Definition], dim: int) -> LoweringResult:
    dim = canonicalize_dim(dim, len(call.sizes))

    def load(item: Definition) -> ElementBody:
        return lambda reader, indices: reader.load(item, [*indices[:dim], *indices[dim + 1 :]])

    return _concatenate(call, dim, range(len(tensors) + 1), [load(item) for item in tensors])


def _concatenate(call: OperatorCall, dim: int, ends: Sequence[Size], loads: Sequence[ElementBody]) -> Pointwise:
    """Returns a tensor whose part n, from `ends[n]` to `ends[n + 1]` along a dimension, is read by `loads[n]`."""
    if len(loads) > MAX_CAT_INPUTS:
        raise Declined(f"a kernel would choose among {len(loads)} tensors for each element")
    dtype = call.dtype

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        result: Scalar | None = None
        position = as_index(indices[dim])
        for number in reversed(range(len(loads))):
            before_end = index_less(reader, position, ends[number + 1])
            inside = all_of(index_greater_equal(reader, position, ends[number]), before_end)
            if inside is False:
                continue
            value = _load_masked(reader, inside, lambda: loads[number](reader, indices))  # noqa: B023
            value = value.to(reader.number(0, dtype).dtype)
            result = value if result is None or before_end is True else before_end.where(value, result)  # type: ignore[union-attr]
        return reader.number(0, dtype) if result is None else result  # of a tensor without elements

    whole = call.define(body)
    lengths = {as_index(end) - as_index(start) for start, end in itertools.pairwise(ends)}
    if len(lengths) != 1:
        return whole
    sizes = (*whole.sizes[:dim], ends[1], *whole.sizes[dim + 1 :])
    parts = [
        pointwise(sizes, dtype, call.device, partial(_shifted, load, dim, start))
        for load, start in zip(loads, ends[:-1], strict=True)
    ]
    return EvenConcatenation(whole.sizes, dtype, call.device, whole.body, tuple(parts))


def _shifted(load: ElementBody, dim: int, start: Size, reader: ElementReader, indices: Indices) -> Scalar:
    """Returns the element that a body computes further along a dimension."""
    return load(reader, replace_index(indices, dim, as_index(indices[dim]) + start))


def _load_masked(reader: ElementReader, condition: Condition, inside: Callable[[], Scalar]) -> Scalar:
    if isinstance(condition, bool):
        return inside()
    with reader.body.masked(condition):
        return inside()


# --- padding ---------------------------------------------------------------------------------------------------------


@lowering_rule("aten.constant_pad_nd.default")
def _constant_pad(call: OperatorCall, x: Definition, pad: Sequence[Size], value: NumberOrSymbol) -> LoweringResult:
    left = _leading_pads(pad, len(x.sizes))

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        source = [as_index(index) - before for index, before in zip(indices, left, strict=True)]
        inside = all_of(*[index_in_range(reader, index, size) for index, size in zip(source, x.sizes, strict=True)])
        return masked_where(
            reader, inside, lambda: reader.load(x, source), lambda: reader.number(value, x.dtype)
        )  # fmt: skip

    return call.define(body)


def _leading_pads(pad: Sequence[Size], rank: int) -> list[int]:
    """Returns the number of elements before each dimension. A pad has two numbers per dimension, the last one first."""
    before = list(pad[::2])[::-1]
    before = [0] * (rank - len(before)) + before
    widths = [width for width in before if isinstance(width, int)]
    if len(widths) < len(before):
        raise Declined("the sign of a symbolic width is not known")
    return widths


@lowering_rule(
    "aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default",
    "aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default",
)  # fmt: skip
def _border_pad(call: OperatorCall, x: Definition, pad: Sequence[Size]) -> LoweringResult:
    if "reflection" in call.name and x.dtype == torch.bool:
        raise Declined(f"its operands are of {x.dtype}, for which eager raises")
    left = _leading_pads(pad, len(x.sizes))
    border = _reflect_index if "reflection" in call.name else _clamp_index
    padded_dims = range(len(x.sizes) - len(pad) // 2, len(x.sizes))

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        source = list(indices)
        for dim in padded_dims:
            source[dim] = border(reader, as_index(indices[dim]) - left[dim], x.sizes[dim])
        return reader.load(x, source)

    return call.define(body)


def _reflect_index(reader: ElementReader, position: Index, size: Size) -> Index:
    """Returns a position mirrored at the first and at the last element: |p|, then last - |last - p|."""
    if position.is_nonnegative() and (as_index(size) - 1 - position).is_nonnegative():
        return position
    last = reader.body.index(as_index(size) - 1)
    return unchecked_indirect_index(reader, last - abs(last - abs(reader.body.index(position))), size)


@lowering_rule(
    "aten.reflection_pad1d_backward.default", "aten.reflection_pad2d_backward.default",
    "aten.reflection_pad3d_backward.default", dtypes="equal float",
)  # fmt: skip
def _reflection_pad_backward(
    call: OperatorCall, grad: Definition, x: Definition, padding: Sequence[Size]
) -> LoweringResult:
    """An element sums its own gradient and those of its reflections, in the compute dtype."""
    left, right = _leading_pads(padding, len(x.sizes)), _leading_pads(padding[1:], len(x.sizes))

    def sources(reader: ElementReader, dim: int, index: IndexLike) -> list[tuple[Index, Condition]]:
        """Returns the positions of an index in the gradient, and whether they exist."""
        at, last = as_index(index), as_index(x.sizes[dim]) - 1
        positions: list[tuple[Index, Condition]] = [(at + left[dim], True)]
        if left[dim] > 0:
            positions.append((left[dim] - at, index_greater_equal(reader, at, 1)))
        if right[dim] > 0:
            positions.append((left[dim] + 2 * last - at, index_less(reader, at, last)))
        return [(place, all_of(ok, index_in_range(reader, place, grad.sizes[dim]))) for place, ok in positions]

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        choices = [sources(reader, dim, index) for dim, index in enumerate(indices)]
        terms = [
            (all_of(*[ok for _, ok in chosen]), partial(reader.load, grad, [place for place, _ in chosen]))
            for chosen in itertools.product(*choices)
        ]
        return masked_sum(reader, terms, x.dtype)

    return call.define(body)


def _clamp_index(reader: ElementReader, position: Index, size: Size) -> Index:
    """Returns the nearest position in bounds."""
    if position.is_nonnegative() and (as_index(size) - 1 - position).is_nonnegative():
        return position
    value = reader.body.index(position).apply("maximum", 0)
    return unchecked_indirect_index(reader, value.apply("minimum", reader.body.index(as_index(size) - 1)), size)


# --- regions of a tensor ---------------------------------------------------------------------------------------------

Region = Callable[[ElementReader, Indices], tuple[Condition, Sequence[IndexLike]]]
"""Returns whether an element is in a region, and its indices in the region's source."""


def _insert(call: OperatorCall, source: Definition, background: Definition | None, region: Region) -> Pointwise:
    """Returns a tensor with the elements of `source` in a region, elsewhere those of the background, or zeros."""

    def outside(reader: ElementReader, indices: Indices) -> Scalar:
        return reader.number(0, source.dtype) if background is None else reader.load(background, indices)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        inside, at = region(reader, indices)
        computes = reader.number(0, call.dtype).dtype
        return masked_where(
            reader, inside, lambda: reader.load(source, at).to(computes), lambda: outside(reader, indices)
        )

    return call.define(body)


def _insert_slice(
    call: OperatorCall,
    source: Definition,
    background: Definition | None,
    dim: int,
    start: Size | None,
    end: Size | None,
    step: Size,
) -> LoweringResult:
    dim = canonicalize_dim(dim, len(call.sizes))
    first = resolve_slice_start(start, end, step, call.sizes[dim], source.sizes[dim])
    if background is not None and isinstance(step, int):
        check_region(
            call, slice_length(slice_start(start, call.sizes[dim]), end, step, call.sizes[dim]), source.sizes[dim]
        )
    limit = as_index(first) + as_index(source.sizes[dim]) * step

    def region(reader: ElementReader, indices: Indices) -> tuple[Condition, Sequence[IndexLike]]:
        index = as_index(indices[dim])
        offset = index - first
        inside = all_of(
            index_greater_equal(reader, index, first),
            index_less(reader, index, limit),
            index_equal(reader, offset % step, 0),
        )
        return inside, replace_index(indices, dim, offset // step)

    return _insert(call, source, background, region)


def _insert_selected(
    call: OperatorCall, source: Definition, background: Definition | None, dim: int, index: Size
) -> LoweringResult:
    dim = canonicalize_dim(dim, len(call.sizes))
    position = resolve_checked_index(call, index, call.sizes[dim])

    def region(reader: ElementReader, indices: Indices) -> tuple[Condition, Sequence[IndexLike]]:
        return index_equal(reader, indices[dim], position), [*indices[:dim], *indices[dim + 1 :]]

    return _insert(call, source, background, region)


def _insert_diagonal(
    call: OperatorCall, source: Definition, background: Definition | None, offset: int, dim1: int, dim2: int
) -> Pointwise:
    rank = len(call.sizes)
    dim1, dim2 = canonicalize_dim(dim1, rank), canonicalize_dim(dim2, rank)
    if background is not None:
        check_region(call, diagonal_length(call.sizes[dim1], call.sizes[dim2], offset), source.sizes[-1])

    def region(reader: ElementReader, indices: Indices) -> tuple[Condition, Sequence[IndexLike]]:
        row, column = as_index(indices[dim1]), as_index(indices[dim2])
        others = [index for dim, index in enumerate(indices) if dim not in (dim1, dim2)]
        return index_equal(reader, column, row + offset), [*others, row if offset >= 0 else column]

    return _insert(call, source, background, region)


def _register_insertion(view: str, insert: Callable[..., LoweringResult]) -> None:
    """Registers a view's scatter of a source into a tensor, and its backward, which inserts a gradient into zeros."""

    @lowering_rule(f"aten.{view}_scatter.default")
    def _scatter(call: OperatorCall, x: Definition, source: Definition, *region: Size) -> LoweringResult:
        return insert(call, source, x, *region)

    @lowering_rule(f"aten.{view}_backward.default")
    def _backward(call: OperatorCall, grad: Definition, sizes: Sequence[Size], *region: Size) -> LoweringResult:
        return insert(call, grad, None, *region)


_register_insertion("slice", _insert_slice)
_register_insertion("select", _insert_selected)
_register_insertion("diagonal", _insert_diagonal)


@lowering_rule("aten.diag_embed.default")
def _diag_embed(call: OperatorCall, x: Definition, offset: int, dim1: int, dim2: int) -> LoweringResult:
    return _insert_diagonal(call, x, None, offset, dim1, dim2)


# --- triangles -------------------------------------------------------------------------------------------------------


@lowering_rule("aten.tril.default", "aten.triu.default")
def _triangle(call: OperatorCall, x: Definition, diagonal: NumberOrSymbol) -> LoweringResult:
    lower = call.operator == "tril"

    def is_inside(reader: ElementReader, row: Index, column: Index) -> Condition:
        if isinstance(diagonal, int):
            if lower:
                return index_less(reader, column, row + diagonal + 1)
            return index_greater_equal(reader, column, row + diagonal)
        distance, limit = reader.body.index(column - row), reader.number(diagonal, torch.int64)
        return distance <= limit if lower else distance >= limit

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        inside = is_inside(reader, as_index(indices[-2]), as_index(indices[-1]))
        return masked_where(reader, inside, lambda: reader.load(x, indices), lambda: reader.number(0, x.dtype))

    return call.define(body)


# --- windows ---------------------------------------------------------------------------------------------------------


@lowering_rule("aten.unfold_backward.default")
def _unfold_backward(call: OperatorCall, grad: Definition, _: object, dim: int, size: int, step: int) -> LoweringResult:
    """Sums over the windows that contain an element: those that start at most `size` - 1 elements before it."""
    sizes = call.sizes
    if not sizes:
        return call.define(lambda reader, indices: reader.load(grad, (0,)))
    dim = canonicalize_dim(dim, len(sizes))
    windows = grad.sizes[dim]

    def share(reader: ElementReader, indices: Indices, back: IndexLike) -> Scalar:
        index = as_index(indices[dim])
        window = index // step - back
        offset = index - window * step
        inside = all_of(index_in_range(reader, window, windows), index_less(reader, offset, size))
        return masked_where(
            reader, inside, lambda: reader.load(grad, [*replace_index(indices, dim, window), offset]),
            lambda: reader.number(0, grad.dtype),
        )  # fmt: skip

    if size <= step:
        return call.define(lambda reader, indices: share(reader, indices, 0))
    overlap = ceiling_divide(size, step)
    (result,) = reduction(
        "any" if call.dtype is torch.bool else "sum", sizes, (overlap,), call.device, call.dtype,
        lambda reader, row, reduced: share(reader, row, reduced[0]), (call.dtype,),
    )  # fmt: skip
    return result


@lowering_rule("aten.im2col.default")
def _im2col(
    call: OperatorCall,
    x: Definition,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> LoweringResult:
    if x.dtype in INTEGERS:
        raise Declined(f"its operands are of {x.dtype}, for which eager raises")
    kernel, dilation, padding, stride = [expand_to_rank(item, 2) for item in (kernel, dilation, padding, stride)]
    height, width = x.sizes[-2:]
    across = total((width, 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1))
    columns = as_index(across) // stride[1] + 1

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        depth, window = as_index(indices[-2]), as_index(indices[-1])
        channel, down, right = depth // (kernel[0] * kernel[1]), depth // kernel[1] % kernel[0], depth % kernel[1]
        row = window // columns * stride[0] - padding[0] + down * dilation[0]
        column = window % columns * stride[1] - padding[1] + right * dilation[1]
        inside = all_of(index_in_range(reader, row, height), index_in_range(reader, column, width))
        source = [*indices[:-2], channel, row, column]
        return masked_where(reader, inside, lambda: reader.load(x, source), lambda: reader.number(0, x.dtype))

    return call.define(body)


# --- cross products --------------------------------------------------------------------------------------------------


@lowering_rule("aten.linalg_cross.default", dtypes="number", equal=("self", "other"))
def _cross(call: OperatorCall, x: Definition, y: Definition, dim: int = -1) -> LoweringResult:
    """Component i of a cross product of vectors of 3 elements is x[i+1] * y[i+2] - x[i+2] * y[i+1], i modulo 3."""
    dim %= len(call.sizes)

    def body(reader: ElementReader, indices: Indices) -> Scalar:
        def component(operand: Definition, step: int) -> Scalar:
            at = [*indices[:dim], (as_index(indices[dim]) + step) % 3, *indices[dim + 1 :]]
            return reader.load(operand, broadcast_indices(operand.sizes, at))

        return component(x, 1) * component(y, 2) - component(x, 2) * component(y, 1)

    return call.define(body)
