"""Views, and what rearranges elements by index arithmetic alone: never a kernel of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from fxwrap.loop_ir import IndexLike, as_index, linear_index, unflattened
from fxwrap.lowering.definitions import Definition, Indices, Viewed, broadcast_indices, view
from fxwrap.lowering.rules.positions import dimension, known_position, replaced, slice_start
from fxwrap.lowering.rules.registry import Call, rule
from fxwrap.lowering.rules.rows import kernel_rule
from fxwrap.symbolic import Size, product, total

IndexMap: TypeAlias = Callable[[Indices], Indices]


# --- shapes ----------------------------------------------------------------------------------------------------------


def reshaped(old: Sequence[Size], new: Sequence[Size]) -> IndexMap:
    """Returns the map from indices of a reshaped tensor to those of the tensor itself.

    Runs of dimensions with the same number of elements are mapped by themselves, so that dimensions that a reshape
    leaves alone keep their index; dimensions of size 1 have index 0.
    """
    groups = _groups(old, new)

    def index_map(indices: Indices) -> Indices:
        found: list[IndexLike] = [0] * len(old)
        for old_dims, new_dims in groups:
            if len(old_dims) == len(new_dims) == 1:
                found[old_dims[0]] = indices[new_dims[0]]
                continue
            position = linear_index([indices[dim] for dim in new_dims], [new[dim] for dim in new_dims])
            for dim, index in zip(old_dims, unflattened(position, [old[dim] for dim in old_dims]), strict=True):
                found[dim] = index
        return found

    return index_map


def _groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Returns the runs of dimensions, without those of size 1, that hold the same elements before and after."""
    if 0 in (*old, *new):
        return []  # no element is ever asked for
    old_ends, new_ends = _ends(old), _ends(new)
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
    if old_run:  # symbolic products that are equal only by what the graph guards
        groups.append((old_run, [dim for dim, _ in rest]))
    return groups


def _ends(sizes: Sequence[Size]) -> list[tuple[int, Size]]:
    """Returns each dimension but those of size 1, with the product of the sizes up to it."""
    found: list[tuple[int, Size]] = []
    count: Size = 1
    for dim, size in enumerate(sizes):
        if size != 1:
            count = product((count, size))
            found.append((dim, count))
    return found


@kernel_rule(
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.view_copy.default",
    "aten._reshape_copy.default", "aten.view_as.default", "aten.reshape_as.default",
    "aten.flatten.using_ints", "aten.unflatten.int", "aten.unsqueeze.default", "aten.unsqueeze_copy.default",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.default",
    "aten.squeeze_copy.dim", "aten.squeeze_copy.dims", "aten.alias.default", "aten.detach.default",
)  # fmt: skip
def _reshape(call: Call, base: Definition, *_: Any, **__: Any) -> Viewed:
    return view(base, call.sizes, reshaped(base.sizes, call.sizes))


@kernel_rule("aten.expand.default", "aten.expand_copy.default", "aten.expand_as.default")
def _expand(call: Call, base: Definition, *_: Any, **__: Any) -> Viewed:
    return view(base, call.sizes, lambda indices: broadcast_indices(base.sizes, indices))


# --- orders of dimensions --------------------------------------------------------------------------------------------


def permuted(call: Call, base: Definition, order: Sequence[int]) -> Viewed:
    """Returns a view whose dimension d is the base's dimension `order[d]`."""
    places = [order.index(dim) for dim in range(len(order))]
    return view(base, call.sizes, lambda indices: [indices[place] for place in places])


@kernel_rule("aten.permute.default", "aten.permute_copy.default")
def _permute(call: Call, base: Definition, dims: Any) -> Viewed:
    return permuted(call, base, [dimension(dim, len(dims)) for dim in dims])


@kernel_rule("aten.transpose.int", "aten.transpose_copy.int", "aten.swapaxes.default", "aten.swapdims.default")
def _transpose(call: Call, base: Definition, first: int, second: int) -> Viewed:
    rank = len(base.sizes)
    order = list(range(rank))
    if rank:
        first, second = dimension(first, rank), dimension(second, rank)
        order[first], order[second] = second, first
    return permuted(call, base, order)


@kernel_rule("aten.t.default", "aten.t_copy.default", "aten.numpy_T.default")
def _reversed(call: Call, base: Definition) -> Viewed:
    return permuted(call, base, list(range(len(base.sizes)))[::-1])


@kernel_rule("aten.mT.default")
def _matrix_transpose(call: Call, base: Definition) -> Viewed:
    rank = len(base.sizes)
    return permuted(call, base, [*range(rank - 2), rank - 1, rank - 2])


@kernel_rule("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist")
def _move(call: Call, base: Definition, source: Any, destination: Any) -> Viewed:
    rank = len(base.sizes)
    sources = [dimension(dim, rank) for dim in (source if isinstance(source, list | tuple) else (source,))]
    targets = destination if isinstance(destination, list | tuple) else (destination,)
    places = [dimension(dim, rank) for dim in targets]
    moved = dict(zip(places, sources, strict=True))
    others = iter([dim for dim in range(rank) if dim not in sources])
    return permuted(call, base, [moved[dim] if dim in moved else next(others) for dim in range(rank)] if rank else [])


# --- parts -----------------------------------------------------------------------------------------------------------


def _part(base: Definition, sizes: Sequence[Size], dim: int, start: Size, step: int = 1) -> Viewed:
    """Returns every `step`-th element of a dimension, from `start` on."""
    first = as_index(start)
    return view(base, sizes, lambda indices: replaced(indices, dim, as_index(indices[dim]) * step + first))


@kernel_rule("aten.slice.Tensor", "aten.slice_copy.Tensor")
def _slice(call: Call, base: Definition, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    dim = dimension(dim, len(base.sizes))
    first = slice_start(start, end, step, base.sizes[dim], call.sizes[dim])
    return first if isinstance(first, str) else _part(base, call.sizes, dim, first, step)


@kernel_rule("aten.narrow.default", "aten.narrow_copy.default")
def _narrow(call: Call, base: Definition, dim: int, start: Any, length: Any) -> Any:
    dim = dimension(dim, len(base.sizes))
    first = start if start == base.sizes[dim] else known_position(start, base.sizes[dim])
    return first if isinstance(first, str) else _part(base, call.sizes, dim, first)


@kernel_rule("aten.select.int", "aten.select_copy.int")
def _select(call: Call, base: Definition, dim: int, index: Any) -> Any:
    dim = dimension(dim, len(base.sizes))
    position = known_position(index, base.sizes[dim])
    return position if isinstance(position, str) else _selected(base, dim, position)


def _selected(base: Definition, dim: int, position: Size) -> Viewed:
    sizes = (*base.sizes[:dim], *base.sizes[dim + 1 :])
    return view(base, sizes, lambda indices: [*indices[:dim], position, *indices[dim:]])


@kernel_rule(
    "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default",
    "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default", "aten.unsafe_chunk.default",
    "aten.split_copy.Tensor", "aten.split_with_sizes_copy.default",
)  # fmt: skip
def _split(call: Call, base: Definition, _: Any, dim: int = 0) -> tuple[Viewed, ...]:
    dim = dimension(dim, len(base.sizes))
    parts, start = [], 0
    for fake in call.fake:
        sizes = call.sizes_of(fake)
        parts.append(_part(base, sizes, dim, start))
        start = total((start, sizes[dim]))
    return tuple(parts)


@kernel_rule("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(call: Call, base: Definition, dim: int = 0) -> tuple[Viewed, ...]:
    dim = dimension(dim, len(base.sizes))
    return tuple([_selected(base, dim, number) for number in range(len(call.fake))])


@kernel_rule("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(call: Call, base: Definition, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Viewed:
    rank = len(base.sizes)
    dim1, dim2 = dimension(dim1, rank), dimension(dim2, rank)

    def index_map(indices: Indices) -> Indices:
        others, along = iter(indices[:-1]), as_index(indices[-1])
        ends = {dim1: along + max(-offset, 0), dim2: along + max(offset, 0)}
        return [ends[dim] if dim in ends else next(others) for dim in range(rank)]

    return view(base, call.sizes, index_map)


@kernel_rule("aten.unfold.default", "aten.unfold_copy.default")
def _unfold(call: Call, base: Definition, dim: int, size: int, step: int) -> Viewed:
    rank = len(base.sizes)
    if not rank:
        return view(base, call.sizes, lambda indices: ())
    dim = dimension(dim, rank)

    def index_map(indices: Indices) -> Indices:
        return replaced(indices[:-1], dim, as_index(indices[dim]) * step + as_index(indices[-1]))

    return view(base, call.sizes, index_map)


# --- rearrangements that eager copies, each element from one place ----------------------------------------------------


@kernel_rule("aten.flip.default", "aten.fliplr.default", "aten.flipud.default")
def _flip(call: Call, base: Definition, dims: Any = None) -> Viewed:
    sizes = base.sizes
    dims = {"aten.fliplr.default": (1,), "aten.flipud.default": (0,)}.get(call.name, dims)
    flipped = {dimension(dim, len(sizes)) for dim in dims}
    return view(base, sizes, lambda indices: _flipped(indices, sizes, flipped))


def _flipped(indices: Indices, sizes: Sequence[Size], dims: set[int]) -> list[IndexLike]:
    return [as_index(sizes[dim]) - 1 - index if dim in dims else index for dim, index in enumerate(indices)]


@kernel_rule("aten.roll.default")
def _roll(call: Call, base: Definition, shifts: Any, dims: Any = ()) -> Any:
    shifts = shifts if isinstance(shifts, list | tuple) else (shifts,)
    dims = dims if isinstance(dims, list | tuple) else (dims,)
    if not all(isinstance(shift, int) for shift in shifts):
        return "the sign of a symbolic shift is not known"
    sizes = base.sizes
    if dims:
        moves = [(dimension(dim, len(sizes)), shift) for dim, shift in zip(dims, shifts, strict=True)]
        return view(base, sizes, lambda indices: _rolled(indices, sizes, moves))
    flat = (product(sizes),)
    to_flat, from_flat = reshaped(flat, sizes), reshaped(sizes, flat)
    return view(base, sizes, lambda indices: from_flat(_rolled(to_flat(indices), flat, [(0, shifts[0])])))


def _rolled(indices: Indices, sizes: Sequence[Size], moves: Sequence[tuple[int, int]]) -> Indices:
    found = list(indices)
    for dim, shift in moves:
        size = sizes[dim]
        if size != 0:
            back = (-shift) % size if isinstance(size, int) else -shift
            found[dim] = (as_index(found[dim]) + back) % size
    return found


@kernel_rule("aten.rot90.default")
def _rot90(call: Call, base: Definition, k: int = 1, dims: Any = (0, 1)) -> Viewed:
    rank, sizes = len(base.sizes), base.sizes
    first, second = dimension(dims[0], rank), dimension(dims[1], rank)
    flipped: set[int] = [set[int](), {second}, {first, second}, {first}][k % 4]

    def index_map(indices: Indices) -> Indices:
        found = list(indices)
        if k % 2:
            found[first], found[second] = found[second], found[first]
        return _flipped(found, sizes, flipped)

    return view(base, call.sizes, index_map)


@kernel_rule("aten.repeat.default", "aten.tile.default")
def _repeat(call: Call, base: Definition, _: Any) -> Viewed:
    sizes = base.sizes

    def index_map(indices: Indices) -> Indices:
        aligned = indices[len(indices) - len(sizes) :] if sizes else ()
        return [0 if size in (0, 1) else as_index(index) % size for size, index in zip(sizes, aligned, strict=True)]

    return view(base, call.sizes, index_map)


@kernel_rule("aten.repeat_interleave.self_int")
def _repeat_interleave(call: Call, base: Definition, repeats: Any, dim: int | None = None, **_: Any) -> Any:
    if not isinstance(repeats, int):
        return "the number of repetitions is symbolic"
    sizes = base.sizes if dim is not None else (product(base.sizes),)
    place = dimension(dim or 0, len(sizes))
    flat = reshaped(base.sizes, sizes)
    divisor = max(repeats, 1)
    return view(
        base, call.sizes, lambda indices: flat(replaced(indices, place, as_index(indices[place]) // divisor))
    )  # fmt: skip


@kernel_rule("aten.pixel_shuffle.default")
def _pixel_shuffle(call: Call, base: Definition, factor: int) -> Viewed:
    def index_map(indices: Indices) -> Indices:
        channel, row, column = [as_index(index) for index in indices[-3:]]
        depth = channel * factor * factor + row % factor * factor + column % factor
        return [*indices[:-3], depth, row // factor, column // factor]

    return view(base, call.sizes, index_map)


@kernel_rule("aten.pixel_unshuffle.default")
def _pixel_unshuffle(call: Call, base: Definition, factor: int) -> Viewed:
    def index_map(indices: Indices) -> Indices:
        depth, row, column = [as_index(index) for index in indices[-3:]]
        small_row, small_column = depth // factor % factor, depth % factor
        return [*indices[:-3], depth // (factor * factor), row * factor + small_row, column * factor + small_column]

    return view(base, call.sizes, index_map)


@kernel_rule("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def _channel_shuffle(call: Call, base: Definition, groups: Any) -> Any:
    channels = base.sizes[1]
    if not isinstance(groups, int) or not isinstance(channels, int):
        return "the number of channels is symbolic"
    each = max(channels // groups, 1)

    def index_map(indices: Indices) -> Indices:
        channel = as_index(indices[1])
        return replaced(indices, 1, channel % groups * each + channel // groups)

    return view(base, call.sizes, index_map)


# --- views that stay operator calls ----------------------------------------------------------------------------------


def _refuse(reason: str, *names: str) -> None:
    for name in names:
        rule(name)(lambda call, *_, **__: reason)


_refuse(
    "it addresses memory, and where a tensor that is computed lies is decided later",
    "aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default",
    "aten._reshape_alias.default",
)  # fmt: skip
_refuse("it sees bytes as another dtype", "aten.view.dtype", "aten.view_copy.dtype")
_refuse(
    "kernels have no complex numbers",
    "aten.view_as_real.default", "aten.view_as_real_copy.default", "aten.view_as_complex.default",
    "aten.view_as_complex_copy.default",
)  # fmt: skip
_refuse("where it begins is read from a tensor", "aten.narrow.Tensor")
