"""Views and other rearrangements of elements by index arithmetic alone, which need no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeAlias

from fxwrap.loop_ir import IndexLike, as_index, delinearize_index, linearize_index
from fxwrap.lowering.fusion.definitions import Definition, Indices, Viewed, broadcast_indices, view
from fxwrap.lowering.rules.indexing_common import (
    canonicalize_dim,
    replace_index,
    resolve_checked_index,
    resolve_index,
    resolve_slice_start,
)
from fxwrap.lowering.rules.registry import Declined, LoweringResult, OperatorCall, lowering_rule
from fxwrap.symbolic import Size, product, total

IndexMap: TypeAlias = Callable[[Indices], Indices]

view_rule = partial(lowering_rule, dtypes="stored")
"""Registers a rule that moves elements of any dtype."""


# --- shapes ----------------------------------------------------------------------------------------------------------


def reshape_index_map(old: Sequence[Size], new: Sequence[Size]) -> IndexMap:
    """Returns the map from indices of a reshaped tensor to those of the original.

    Runs of dimensions with the same number of elements are mapped separately, so that unchanged dimensions keep their
    index; dimensions of size 1 have index 0.
    """
    groups = _reshape_groups(old, new)

    def index_map(indices: Indices) -> Indices:
        result: list[IndexLike] = [0] * len(old)
        for old_dims, new_dims in groups:
            if len(old_dims) == len(new_dims) == 1:
                result[old_dims[0]] = indices[new_dims[0]]
                continue
            position = linearize_index([indices[dim] for dim in new_dims], [new[dim] for dim in new_dims])
            for dim, index in zip(old_dims, delinearize_index(position, [old[dim] for dim in old_dims]), strict=True):
                result[dim] = index
        return result

    return index_map


def _reshape_groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Returns the runs of dimensions, without those of size 1, that hold the same elements before and after."""
    if 0 in (*old, *new):
        return []  # an empty tensor has no element to read
    old_ends, new_ends = _cumulative_sizes(old), _cumulative_sizes(new)
    groups, old_run, new_run = [], list[int](), list[int]()
    rest = iter(new_ends)
    for dim, end in old_ends:
        old_run.append(dim)
        if not any(end == other for _, other in new_ends):
            continue
        for new_dim, new_end in rest:
            new_run.append(new_dim)
            if new_end == end:
                break
        groups.append((old_run, new_run))
        old_run, new_run = [], []
    if old_run:  # symbolic products that are equal only by guards
        groups.append((old_run, [dim for dim, _ in rest]))
    return groups


def _cumulative_sizes(sizes: Sequence[Size]) -> list[tuple[int, Size]]:
    """Returns each dimension but those of size 1, with the product of the sizes up to it."""
    result: list[tuple[int, Size]] = []
    count: Size = 1
    for dim, size in enumerate(sizes):
        if size != 1:
            count = product((count, size))
            result.append((dim, count))
    return result


@view_rule(
    "aten.view.default", "aten._unsafe_view.default", "aten.view_copy.default", "aten._reshape_copy.default",
    "aten.unsqueeze.default", "aten.unsqueeze_copy.default",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.default",
    "aten.squeeze_copy.dim", "aten.squeeze_copy.dims", "aten.alias.default", "aten.detach.default",
)  # fmt: skip
def _reshape(call: OperatorCall, base: Definition) -> Viewed:
    return view(base, call.sizes, reshape_index_map(base.sizes, call.sizes))


@view_rule("aten.expand.default", "aten.expand_copy.default")
def _expand(call: OperatorCall, base: Definition) -> Viewed:
    return view(base, call.sizes, lambda indices: broadcast_indices(base.sizes, indices))


# --- orders of dimensions --------------------------------------------------------------------------------------------


def permute_dims(call: OperatorCall, base: Definition, order: Sequence[int]) -> Viewed:
    """Returns a view whose dimension d is the base's dimension `order[d]`."""
    inverse = [order.index(dim) for dim in range(len(order))]
    return view(base, call.sizes, lambda indices: [indices[dim] for dim in inverse])


@view_rule("aten.permute.default", "aten.permute_copy.default")
def _permute(call: OperatorCall, base: Definition, dims: Sequence[int]) -> Viewed:
    return permute_dims(call, base, [canonicalize_dim(dim, len(dims)) for dim in dims])


@view_rule("aten.transpose.int", "aten.transpose_copy.int")
def _transpose(call: OperatorCall, base: Definition, first: int, second: int) -> Viewed:
    rank = len(base.sizes)
    order = list(range(rank))
    if rank:
        first, second = canonicalize_dim(first, rank), canonicalize_dim(second, rank)
        order[first], order[second] = second, first
    return permute_dims(call, base, order)


@view_rule("aten.t.default", "aten.t_copy.default")
def _reverse_dims(call: OperatorCall, base: Definition) -> Viewed:
    return permute_dims(call, base, list(range(len(base.sizes)))[::-1])


# --- slices ----------------------------------------------------------------------------------------------------------


def _slice_view(base: Definition, sizes: Sequence[Size], dim: int, start: Size, step: int = 1) -> Viewed:
    """Returns every `step`-th element of a dimension, from `start` on."""
    first = as_index(start)
    return view(base, sizes, lambda indices: replace_index(indices, dim, as_index(indices[dim]) * step + first))


@view_rule("aten.slice.Tensor", "aten.slice_copy.Tensor")
def _slice(
    call: OperatorCall, base: Definition, dim: int, start: Size | None, end: Size | None, step: int
) -> LoweringResult:
    dim = canonicalize_dim(dim, len(base.sizes))
    first = resolve_slice_start(start, end, step, base.sizes[dim], call.sizes[dim])
    return _slice_view(base, call.sizes, dim, first, step)


@view_rule("aten.narrow_copy.default")
def _narrow(call: OperatorCall, base: Definition, dim: int, start: Size) -> LoweringResult:
    dim = canonicalize_dim(dim, len(base.sizes))
    first = start if start == base.sizes[dim] else resolve_index(start, base.sizes[dim])
    return _slice_view(base, call.sizes, dim, first)


@view_rule("aten.select.int", "aten.select_copy.int")
def _select(call: OperatorCall, base: Definition, dim: int, index: Size) -> LoweringResult:
    dim = canonicalize_dim(dim, len(base.sizes))
    position = resolve_checked_index(call, index, base.sizes[dim])
    return _select_view(base, dim, position)


def _select_view(base: Definition, dim: int, position: Size) -> Viewed:
    sizes = (*base.sizes[:dim], *base.sizes[dim + 1 :])
    return view(base, sizes, lambda indices: [*indices[:dim], position, *indices[dim:]])


@view_rule(
    "aten.split.Tensor", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default", "aten.split_copy.Tensor", "aten.split_with_sizes_copy.default",
)  # fmt: skip
def _split(call: OperatorCall, base: Definition, _: object, dim: int) -> tuple[Viewed, ...]:
    dim = canonicalize_dim(dim, len(base.sizes))
    parts: list[Viewed] = []
    start: Size = 0
    for fake in call.results:
        sizes = call.sizes_of(fake)
        parts.append(_slice_view(base, sizes, dim, start))
        start = total((start, sizes[dim]))
    return tuple(parts)


@view_rule("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(call: OperatorCall, base: Definition, dim: int) -> tuple[Viewed, ...]:
    dim = canonicalize_dim(dim, len(base.sizes))
    return tuple([_select_view(base, dim, number) for number in range(len(call.results))])


@view_rule("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(call: OperatorCall, base: Definition, offset: int, dim1: int, dim2: int) -> Viewed:
    rank = len(base.sizes)
    dim1, dim2 = canonicalize_dim(dim1, rank), canonicalize_dim(dim2, rank)

    def index_map(indices: Indices) -> Indices:
        others, along = iter(indices[:-1]), as_index(indices[-1])
        ends = {dim1: along + max(-offset, 0), dim2: along + max(offset, 0)}
        return [ends[dim] if dim in ends else next(others) for dim in range(rank)]

    return view(base, call.sizes, index_map)


@view_rule("aten.unfold.default", "aten.unfold_copy.default")
def _unfold(call: OperatorCall, base: Definition, dim: int, size: int, step: int) -> Viewed:
    rank = len(base.sizes)
    if not rank:
        return view(base, call.sizes, lambda indices: ())
    dim = canonicalize_dim(dim, rank)

    def index_map(indices: Indices) -> Indices:
        return replace_index(indices[:-1], dim, as_index(indices[dim]) * step + as_index(indices[-1]))

    return view(base, call.sizes, index_map)


# --- rearrangements that eager copies --------------------------------------------------------------------------------


@view_rule("aten.flip.default")
def _flip(call: OperatorCall, base: Definition, dims: Sequence[int]) -> Viewed:
    sizes = base.sizes
    flipped = {canonicalize_dim(dim, len(sizes)) for dim in dims}
    return view(base, sizes, lambda indices: _flip_indices(indices, sizes, flipped))


def _flip_indices(indices: Indices, sizes: Sequence[Size], dims: set[int]) -> list[IndexLike]:
    return [as_index(sizes[dim]) - 1 - index if dim in dims else index for dim, index in enumerate(indices)]


@view_rule("aten.roll.default")
def _roll(
    call: OperatorCall, base: Definition, shifts: Sequence[Size] | Size, dims: Sequence[int] | int
) -> LoweringResult:
    shifts, dims, sizes = _as_list(shifts), _as_list(dims), base.sizes
    if not all(isinstance(shift, int) for shift in shifts):
        raise Declined("the sign of a symbolic shift is not known")
    if dims:
        moves = [(canonicalize_dim(dim, len(sizes)), shift) for dim, shift in zip(dims, shifts, strict=True)]
        return view(base, sizes, lambda indices: _roll_indices(indices, sizes, moves))
    flat = (product(sizes),)
    to_flat, from_flat = reshape_index_map(flat, sizes), reshape_index_map(sizes, flat)
    return view(base, sizes, lambda indices: from_flat(_roll_indices(to_flat(indices), flat, [(0, shifts[0])])))


def _as_list(option: Sequence[Size] | Size) -> Sequence[Size]:
    return option if isinstance(option, list | tuple) else (option,)


def _roll_indices(indices: Indices, sizes: Sequence[Size], moves: Sequence[tuple[int, int]]) -> Indices:
    rolled = list(indices)
    for dim, shift in moves:
        size = sizes[dim]
        if size != 0:
            back = (-shift) % size if isinstance(size, int) else -shift
            rolled[dim] = (as_index(rolled[dim]) + back) % size
    return rolled


@view_rule("aten.rot90.default")
def _rot90(call: OperatorCall, base: Definition, k: int, dims: Sequence[int]) -> Viewed:
    rank, sizes = len(base.sizes), base.sizes
    first, second = canonicalize_dim(dims[0], rank), canonicalize_dim(dims[1], rank)
    flipped: set[int] = [set[int](), {second}, {first, second}, {first}][k % 4]

    def index_map(indices: Indices) -> Indices:
        rotated = list(indices)
        if k % 2:
            rotated[first], rotated[second] = rotated[second], rotated[first]
        return _flip_indices(rotated, sizes, flipped)

    return view(base, call.sizes, index_map)


@view_rule("aten.repeat.default")
def _repeat(call: OperatorCall, base: Definition) -> Viewed:
    sizes = base.sizes

    def index_map(indices: Indices) -> Indices:
        aligned = indices[len(indices) - len(sizes) :] if sizes else ()
        return [0 if size in (0, 1) else as_index(index) % size for size, index in zip(sizes, aligned, strict=True)]

    return view(base, call.sizes, index_map)


@view_rule("aten.pixel_shuffle.default")
def _pixel_shuffle(call: OperatorCall, base: Definition, factor: int) -> Viewed:
    def index_map(indices: Indices) -> Indices:
        channel, row, column = [as_index(index) for index in indices[-3:]]
        depth = channel * factor * factor + row % factor * factor + column % factor
        return [*indices[:-3], depth, row // factor, column // factor]

    return view(base, call.sizes, index_map)


@view_rule("aten.pixel_unshuffle.default")
def _pixel_unshuffle(call: OperatorCall, base: Definition, factor: int) -> Viewed:
    def index_map(indices: Indices) -> Indices:
        depth, row, column = [as_index(index) for index in indices[-3:]]
        small_row, small_column = depth // factor % factor, depth % factor
        return [*indices[:-3], depth // (factor * factor), row * factor + small_row, column * factor + small_column]

    return view(base, call.sizes, index_map)


@view_rule("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def _channel_shuffle(call: OperatorCall, base: Definition, groups: Size) -> LoweringResult:
    channels = base.sizes[1]
    if not isinstance(groups, int) or not isinstance(channels, int):
        raise Declined("the number of channels is symbolic")
    each = max(channels // groups, 1)

    def index_map(indices: Indices) -> Indices:
        channel = as_index(indices[1])
        return replace_index(indices, 1, channel % groups * each + channel // groups)

    return view(base, call.sizes, index_map)


# --- views that stay extern calls ------------------------------------------------------------------------------------


def _register_declined(reason: str, *names: str) -> None:
    @view_rule(*names)
    def _declined(call: OperatorCall) -> NoReturn:
        raise Declined(reason)


_register_declined(
    "it addresses memory, and the layout of computed tensors is decided later",
    "aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default",
    "aten._reshape_alias.default",
)  # fmt: skip
_register_declined("it reinterprets bytes as another dtype", "aten.view.dtype", "aten.view_copy.dtype")
_register_declined(
    "kernels have no complex numbers",
    "aten.view_as_real.default", "aten.view_as_real_copy.default", "aten.view_as_complex.default",
    "aten.view_as_complex_copy.default",
)  # fmt: skip
