"""Elements put together from several tensors, or from one and a number: joining, padding, triangles, windows.

What lies outside of the tensor an element comes from is masked, so that nothing outside is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxwrap.loop_ir import Index, IndexLike, Scalar, as_index
from fxwrap.lowering.definitions import Definition, Indices, Pointwise, Reader, pointwise, reduction
from fxwrap.lowering.rules.positions import (
    Condition,
    at_least,
    below,
    both,
    bounded_index,
    choose,
    dimension,
    known_position,
    replaced,
    same,
    slice_start,
    within,
)
from fxwrap.lowering.rules.registry import Call
from fxwrap.lowering.rules.rows import kernel_rule
from fxwrap.symbolic import Size, ceiling_divide, total

MOST_JOINED = 16
"""Tensors that a kernel chooses among for each element; joining more copies faster piece by piece."""


# --- joining ---------------------------------------------------------------------------------------------------------


@kernel_rule("aten.cat.default", "aten.concat.default")
def _cat(call: Call, tensors: Sequence[Definition], dim: int = 0) -> Any:
    sizes = call.sizes
    dim = dimension(dim, len(sizes))
    full = [item for item in tensors if len(item.sizes) == len(sizes) and item.sizes[dim] != 0]  # others: legacy empty
    ends: list[Size] = [0]
    for item in full:
        ends.append(total((ends[-1], item.sizes[dim])))

    def load(number: int) -> Callable[[Reader, Indices], Scalar]:
        start = as_index(ends[number])
        return lambda reader, indices: reader.load(
            full[number], replaced(indices, dim, as_index(indices[dim]) - start)
        )  # fmt: skip

    return _joined(call, dim, ends, [load(number) for number in range(len(full))])


@kernel_rule("aten.stack.default")
def _stack(call: Call, tensors: Sequence[Definition], dim: int = 0) -> Any:
    dim = dimension(dim, len(call.sizes))

    def load(item: Definition) -> Callable[[Reader, Indices], Scalar]:
        return lambda reader, indices: reader.load(item, [*indices[:dim], *indices[dim + 1 :]])

    return _joined(call, dim, range(len(tensors) + 1), [load(item) for item in tensors])


def _joined(
    call: Call, dim: int, ends: Sequence[Size], loads: Sequence[Callable[[Reader, Indices], Scalar]]
) -> Pointwise | str:
    """Returns a tensor whose piece n, from `ends[n]` to `ends[n + 1]` along a dimension, is read by `loads[n]`."""
    if len(loads) > MOST_JOINED:
        return f"a kernel would choose among {len(loads)} tensors for each element"
    dtype = call.dtype

    def body(reader: Reader, indices: Indices) -> Scalar:
        found: Scalar | None = None
        position = as_index(indices[dim])
        for number in reversed(range(len(loads))):
            before_end = below(reader, position, ends[number + 1])
            inside = both(at_least(reader, position, ends[number]), before_end)
            if inside is False:
                continue
            value = _masked(reader, inside, lambda: loads[number](reader, indices))  # noqa: B023
            value = value.to(reader.number(0, dtype).dtype)
            found = value if found is None or before_end is True else before_end.where(value, found)  # type: ignore[union-attr]
        return reader.number(0, dtype) if found is None else found  # of a tensor without elements

    return pointwise(call.sizes, dtype, call.device, body)


def _masked(reader: Reader, condition: Condition, inside: Callable[[], Scalar]) -> Scalar:
    if isinstance(condition, bool):
        return inside()
    with reader.body.masked(condition):
        return inside()


# --- padding ---------------------------------------------------------------------------------------------------------


@kernel_rule("aten.constant_pad_nd.default", "aten.pad.default")
def _constant_pad(call: Call, x: Definition, pad: Sequence[Any], *others: Any, **named: Any) -> Any:
    mode, value = "constant", others[-1] if others else named.get("value", 0)
    if call.name == "aten.pad.default":
        mode = others[0] if others else named.get("mode", "constant")
        value = (others[1] if len(others) > 1 else named.get("value")) or 0
    left = _left_pads(pad, len(x.sizes))
    if mode != "constant":
        return f"it pads in the mode {mode}"
    if isinstance(left, str):
        return left

    def body(reader: Reader, indices: Indices) -> Scalar:
        places = [as_index(index) - before for index, before in zip(indices, left, strict=True)]
        inside = both(*[within(reader, place, size) for place, size in zip(places, x.sizes, strict=True)])
        return choose(reader, inside, lambda: reader.load(x, places), lambda: reader.number(value, x.dtype))

    return pointwise(call.sizes, call.dtype, call.device, body)


def _left_pads(pad: Sequence[Any], rank: int) -> list[int] | str:
    """Returns how many elements come before each dimension. A pad names the last dimension first, two numbers each."""
    before = list(pad[::2])[::-1]
    before = [0] * (rank - len(before)) + before
    return before if all(isinstance(item, int) for item in before) else "the sign of a symbolic width is not known"


@kernel_rule(
    "aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default",
    "aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default",
)  # fmt: skip
def _border_pad(call: Call, x: Definition, pad: Sequence[Any]) -> Any:
    left = _left_pads(pad, len(x.sizes))
    if isinstance(left, str):
        return left
    border = _reflected if "reflection" in call.name else _repeated
    touched = range(len(x.sizes) - len(pad) // 2, len(x.sizes))

    def body(reader: Reader, indices: Indices) -> Scalar:
        places = list(indices)
        for dim in touched:
            places[dim] = border(reader, as_index(indices[dim]) - left[dim], x.sizes[dim])
        return reader.load(x, places)

    return pointwise(call.sizes, call.dtype, call.device, body)


def _reflected(reader: Reader, position: Index, size: Size) -> Index:
    """Returns a position mirrored at the first and at the last element: |p|, then last - |last - p|."""
    if position.never_negative() and (as_index(size) - 1 - position).never_negative():
        return position
    last = reader.body.index(as_index(size) - 1)
    return bounded_index(reader, last - abs(last - abs(reader.body.index(position))), size)


def _repeated(reader: Reader, position: Index, size: Size) -> Index:
    """Returns the nearest position in bounds."""
    if position.never_negative() and (as_index(size) - 1 - position).never_negative():
        return position
    value = reader.body.index(position).apply("maximum", 0)
    return bounded_index(reader, value.apply("minimum", reader.body.index(as_index(size) - 1)), size)


# --- parts put into a tensor -----------------------------------------------------------------------------------------


def _placed(
    call: Call,
    source: Definition,
    background: Callable[[Reader, Indices], Scalar],
    place: Callable[[Reader, Indices], tuple[Condition, Sequence[IndexLike]]],
) -> Pointwise:
    """Returns a tensor that has an element of `source` where `place` says so, with its indices, else the background."""

    def body(reader: Reader, indices: Indices) -> Scalar:
        inside, places = place(reader, indices)
        computes = reader.number(0, call.dtype).dtype
        return choose(
            reader, inside, lambda: reader.load(source, places).to(computes), lambda: background(reader, indices)
        )  # fmt: skip

    return pointwise(call.sizes, call.dtype, call.device, body)


def _over(x: Definition) -> Callable[[Reader, Indices], Scalar]:
    return lambda reader, indices: reader.load(x, indices)


def _over_zero(dtype: torch.dtype) -> Callable[[Reader, Indices], Scalar]:
    return lambda reader, indices: reader.number(0, dtype)


def _slice_place(dim: int, start: Size, step: int, length: Size) -> Any:
    end = as_index(start) + as_index(length) * step

    def place(reader: Reader, indices: Indices) -> tuple[Condition, Sequence[IndexLike]]:
        index = as_index(indices[dim])
        offset = index - start
        inside = both(at_least(reader, index, start), below(reader, index, end), same(reader, offset % step, 0))
        return inside, replaced(indices, dim, offset // step)

    return place


@kernel_rule("aten.slice_scatter.default")
def _slice_scatter(
    call: Call, x: Definition, source: Definition, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    dim = dimension(dim, len(x.sizes))
    first = slice_start(start, end, step, x.sizes[dim], source.sizes[dim])
    if isinstance(first, str):
        return first
    return _placed(call, source, _over(x), _slice_place(dim, first, step, source.sizes[dim]))


@kernel_rule("aten.slice_backward.default")
def _slice_backward(call: Call, grad: Definition, sizes: Any, dim: int, start: Any, end: Any, step: Any) -> Any:
    dim = dimension(dim, len(call.sizes))
    first = slice_start(start, end, step, call.sizes[dim], grad.sizes[dim])
    if isinstance(first, str):
        return first
    return _placed(call, grad, _over_zero(grad.dtype), _slice_place(dim, first, step, grad.sizes[dim]))


def _select_place(dim: int, position: Size) -> Any:
    def place(reader: Reader, indices: Indices) -> tuple[Condition, Sequence[IndexLike]]:
        return same(reader, indices[dim], position), [*indices[:dim], *indices[dim + 1 :]]

    return place


@kernel_rule("aten.select_scatter.default")
def _select_scatter(call: Call, x: Definition, source: Definition, dim: int, index: Any) -> Any:
    dim = dimension(dim, len(x.sizes))
    position = known_position(index, x.sizes[dim])
    return position if isinstance(position, str) else _placed(call, source, _over(x), _select_place(dim, position))


@kernel_rule("aten.select_backward.default")
def _select_backward(call: Call, grad: Definition, sizes: Any, dim: int, index: Any) -> Any:
    dim = dimension(dim, len(call.sizes))
    position = known_position(index, call.sizes[dim])
    if isinstance(position, str):
        return position
    return _placed(call, grad, _over_zero(grad.dtype), _select_place(dim, position))


def _diagonal_place(rank: int, offset: int, dim1: int, dim2: int) -> Any:
    dim1, dim2 = dimension(dim1, rank), dimension(dim2, rank)

    def place(reader: Reader, indices: Indices) -> tuple[Condition, Sequence[IndexLike]]:
        row, column = as_index(indices[dim1]), as_index(indices[dim2])
        others = [index for dim, index in enumerate(indices) if dim not in (dim1, dim2)]
        return same(reader, column, row + offset), [*others, row if offset >= 0 else column]

    return place


@kernel_rule("aten.diagonal_scatter.default")
def _diagonal_scatter(
    call: Call, x: Definition, source: Definition, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    return _placed(call, source, _over(x), _diagonal_place(len(x.sizes), offset, dim1, dim2))


@kernel_rule("aten.diagonal_backward.default")
def _diagonal_backward(call: Call, grad: Definition, sizes: Any, offset: int, dim1: int, dim2: int) -> Any:
    return _placed(call, grad, _over_zero(grad.dtype), _diagonal_place(len(call.sizes), offset, dim1, dim2))


@kernel_rule("aten.diag_embed.default")
def _diag_embed(call: Call, x: Definition, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return _placed(call, x, _over_zero(x.dtype), _diagonal_place(len(call.sizes), offset, dim1, dim2))


# --- triangles -------------------------------------------------------------------------------------------------------


@kernel_rule("aten.tril.default", "aten.triu.default")
def _triangle(call: Call, x: Definition, diagonal: Any = 0) -> Pointwise:
    lower = call.name == "aten.tril.default"

    def kept(reader: Reader, row: Index, column: Index) -> Condition:
        if isinstance(diagonal, int):
            if lower:
                return below(reader, column, row + diagonal + 1)
            return at_least(reader, column, row + diagonal)
        distance, limit = reader.body.index(column - row), reader.number(diagonal, torch.int64)
        return distance <= limit if lower else distance >= limit

    def body(reader: Reader, indices: Indices) -> Scalar:
        inside = kept(reader, as_index(indices[-2]), as_index(indices[-1]))
        return choose(reader, inside, lambda: reader.load(x, indices), lambda: reader.number(0, x.dtype))

    return pointwise(call.sizes, call.dtype, call.device, body)


# --- windows ---------------------------------------------------------------------------------------------------------


@kernel_rule("aten.unfold_backward.default")
def _unfold_backward(call: Call, grad: Definition, _: Any, dim: int, size: int, step: int) -> Any:
    """An element is the sum over the windows that hold it: those that start at most `size` - 1 elements before it."""
    sizes = call.sizes
    if not sizes:
        return pointwise((), call.dtype, call.device, lambda reader, indices: reader.load(grad, (0,)))
    dim = dimension(dim, len(sizes))
    windows = grad.sizes[dim]

    def share(reader: Reader, indices: Indices, back: IndexLike) -> Scalar:
        index = as_index(indices[dim])
        window = index // step - back
        place = index - window * step
        inside = both(within(reader, window, windows), below(reader, place, size))
        return choose(
            reader, inside, lambda: reader.load(grad, [*replaced(indices, dim, window), place]),
            lambda: reader.number(0, grad.dtype),
        )  # fmt: skip

    if size <= step:
        return pointwise(sizes, call.dtype, call.device, lambda reader, indices: share(reader, indices, 0))
    overlap = ceiling_divide(size, step)
    (found,) = reduction(
        "any" if call.dtype is torch.bool else "sum", sizes, (overlap,), call.device, call.dtype,
        lambda reader, kept, reduced: share(reader, kept, reduced[0]), (call.dtype,),
    )  # fmt: skip
    return found


@kernel_rule("aten.im2col.default")
def _im2col(call: Call, x: Definition, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    kernel, dilation, padding, stride = [_pair(item) for item in (kernel, dilation, padding, stride)]
    height, width = x.sizes[-2:]
    across = total((width, 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1))
    columns = as_index(across) // stride[1] + 1

    def body(reader: Reader, indices: Indices) -> Scalar:
        depth, place = as_index(indices[-2]), as_index(indices[-1])
        channel, down, right = depth // (kernel[0] * kernel[1]), depth // kernel[1] % kernel[0], depth % kernel[1]
        row = place // columns * stride[0] - padding[0] + down * dilation[0]
        column = place % columns * stride[1] - padding[1] + right * dilation[1]
        inside = both(within(reader, row, height), within(reader, column, width))
        places = [*indices[:-2], channel, row, column]
        return choose(reader, inside, lambda: reader.load(x, places), lambda: reader.number(0, x.dtype))

    return pointwise(call.sizes, call.dtype, call.device, body)


def _pair(item: Any) -> tuple[int, int]:
    if isinstance(item, int):
        return item, item
    return (item[0], item[-1])
