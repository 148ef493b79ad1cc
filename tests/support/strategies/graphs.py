"""Random FX graphs of pointwise, view, reduction, normalisation, scan and indexing operators over small tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxwrap.torch_compat import storage_identity

aten = torch.ops.aten

INPUT_DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.bool)
CAST_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
SIZES = (3, 4, 2, 1, 5, 0)
MOST_ELEMENTS = 300
LARGEST = 1000
"""Of floats of a graph that may be in half precision."""


class RandomGraph:
    """A graph and inputs for it, some of which it may overwrite."""

    def __init__(self, module: GraphModule, inputs: tuple[Tensor, ...]) -> None:
        self.module = module
        self.inputs = inputs

    def __repr__(self) -> str:
        shapes = ", ".join([f"{item.dtype}{list(item.shape)} by {list(item.stride())}" for item in self.inputs])
        return f"inputs {shapes}\n{self.module.graph}"


@dataclass(frozen=True)
class Entry:
    """A node and its value. `exact` states that every order of computation has the same value."""

    node: Node
    value: Tensor
    exact: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


Step: TypeAlias = Callable[["GraphDraw"], None]


class GraphDraw:
    """A graph that is being drawn. Values are computed as nodes are added, for their shapes.

    Only a graph that `writes` has in-place operators. With `rounds`, no float result is exact, since kernels do not
    round between operators in half precision, as eager mode does; and none is so large that float16 would overflow.
    """

    def __init__(
        self, draw: Callable[[Any], Any], writes: bool = True, most_elements: int = MOST_ELEMENTS, rounds: bool = False
    ) -> None:
        self.draw = draw
        self.writes = writes
        self.most_elements = most_elements
        self.rounds = rounds
        self.graph = Graph()
        self.entries: list[Entry] = []
        self.inputs: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(self.integer(0, 1 << 16))
        self.all_exact = True

    # --- choices ----------------------------------------------------------------------------------------------------

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def choice(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def flag(self) -> bool:
        return bool(self.draw(st.booleans()))

    def pick(self, accepts: Callable[[Entry], bool] = lambda _: True) -> Entry:
        """Draws one of the entries that are accepted; raises NothingFits where there is none."""
        candidates = [entry for entry in self.entries if accepts(entry)]
        if not candidates:
            raise NoCandidate
        return candidates[len(candidates) - 1 - self.integer(0, len(candidates) - 1)]

    def floats(self) -> Entry:
        return self.pick(lambda entry: entry.value.dtype.is_floating_point)

    def with_dims(self, accepts: Callable[[Entry], bool] = lambda _: True) -> tuple[Entry, int]:
        """Draws an entry that has dimensions, and one of these."""
        entry = self.pick(lambda entry: bool(entry.shape) and accepts(entry))
        return entry, self.integer(-len(entry.shape), len(entry.shape) - 1)

    def random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns random elements; integers small, so that they repeat."""
        if dtype is torch.bool:
            return torch.rand(tuple(shape), generator=self.generator) < 0.5
        if dtype.is_floating_point:
            return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64).to(dtype)
        return torch.randint(-4, 5, tuple(shape), generator=self.generator).to(dtype)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def placeholder(self, value: Tensor) -> Entry:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(value)
        return self._entry(node, value.clone(), True)

    def parameter(self, shape: Sequence[int], dtype: torch.dtype) -> Entry:
        """Adds one more input: small numbers, or bytes."""
        value = self.random(shape, dtype)
        if dtype is torch.uint8:
            value = torch.randint(0, 256, tuple(shape), generator=self.generator).to(dtype)
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            return self.placeholder(value)

    def call(self, target: Any, *arguments: Any, exact: bool = True, **keywords: Any) -> list[Entry]:
        """Adds a call on entries and literals, and an entry for each of its results."""
        used = [entry for item in arguments for entry in (item if isinstance(item, list) else [item])]
        exact = exact and self.all_exact and all(entry.exact for entry in used if isinstance(entry, Entry))
        value = target(*_part(arguments, "value"), **keywords)
        parts = value if isinstance(value, tuple | list) else (value,)
        if any(part.numel() > self.most_elements for part in parts):
            raise NoCandidate
        if self.rounds and any(_is_large(part) for part in parts):
            raise NoCandidate
        exact = exact and not (self.rounds and any(_is_computed(part, used) for part in parts))
        node = self.graph.call_function(target, tuple(_part(arguments, "node")), keywords)
        if not isinstance(value, tuple | list):
            return [self._entry(node, value, exact)]
        return [
            self._entry(self.graph.call_function(operator.getitem, (node, position)), part, exact)
            for position, part in enumerate(parts)
        ]

    def _entry(self, node: Node, value: Tensor, exact: bool) -> Entry:
        self.entries.append(Entry(node, value, exact))
        return self.entries[-1]

    def position_entry(self, size: int, rank: int) -> Entry:
        """Returns an int64 entry of a rank with elements from 0 to size - 1."""
        if not size:
            raise NoCandidate
        entry = self.pick(lambda entry: entry.value.dtype is torch.int64 and entry.exact and len(entry.shape) == rank)
        return self.call(aten.remainder.Scalar, entry, size)[0]


def _is_large(result: Tensor) -> bool:
    return bool(result.dtype.is_floating_point and result.numel() and not result.abs().max() < LARGEST)


def _is_computed(result: Tensor, operands: Sequence[Any]) -> bool:
    """Whether a result has floats that are not those of an operand."""
    if not result.dtype.is_floating_point:
        return False
    return all(not _overlap(result, entry.value) for entry in operands if isinstance(entry, Entry))


class NoCandidate(Exception):
    """No entry fits a step; another step is drawn."""


def _part(arguments: Any, name: str) -> Any:
    if isinstance(arguments, Entry):
        return getattr(arguments, name)
    return [_part(item, name) for item in arguments] if isinstance(arguments, list | tuple) else arguments


# --- pointwise ------------------------------------------------------------------------------------------------------


def _unary(b: GraphDraw) -> None:
    target = b.choice([aten.tanh, aten.sigmoid, aten.relu, aten.neg, aten.abs, aten.sin, aten.silu, aten.sign])
    jumps = target is aten.sign
    b.call(target.default, b.pick(lambda entry: entry.value.dtype.is_floating_point and (entry.exact or not jumps)))


def _with_number(b: GraphDraw) -> None:
    entry = b.pick(lambda entry: entry.value.dtype is not torch.bool)
    number = 0.5 if entry.value.dtype.is_floating_point and b.flag() else 2
    b.call(b.choice([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor]), entry, number)


def _binary(b: GraphDraw) -> None:
    left = b.pick(lambda entry: entry.value.dtype is not torch.bool)
    right = b.pick(lambda entry: entry.value.dtype is left.value.dtype and _broadcast(left.shape, entry.shape))
    b.call(b.choice([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.maximum.default]), left, right)


def _logic(b: GraphDraw) -> None:
    left = b.pick(lambda entry: entry.value.dtype is torch.bool)
    right = b.pick(lambda entry: entry.value.dtype is torch.bool and _broadcast(left.shape, entry.shape))
    b.call(b.choice([aten.logical_and.default, aten.bitwise_xor.Tensor]), left, right)


def _compare(b: GraphDraw) -> None:
    left = b.pick(lambda entry: entry.exact and entry.value.dtype is not torch.bool)
    right = b.pick(
        lambda entry: entry.exact and entry.value.dtype is left.value.dtype and _broadcast(left.shape, entry.shape)
    )
    b.call(b.choice([aten.lt.Tensor, aten.ge.Tensor, aten.eq.Tensor]), left, right)


def _where(b: GraphDraw) -> None:
    left = b.pick()
    right = b.pick(lambda entry: entry.value.dtype is left.value.dtype and _broadcast(left.shape, entry.shape))
    both = torch.broadcast_shapes(left.shape, right.shape)
    chosen = b.pick(lambda entry: entry.value.dtype is torch.bool and _broadcast(both, entry.shape))
    b.call(aten.where.self, chosen, left, right)


def _cast(b: GraphDraw) -> None:
    dtype = b.choice(CAST_DTYPES)
    fits = dtype.is_floating_point
    b.call(aten._to_copy.default, b.pick(lambda entry: fits or entry.exact), dtype=dtype)


def _broadcast(left: Sequence[int], right: Sequence[int]) -> bool:
    return all(one == other or 1 in (one, other) for one, other in zip(reversed(left), reversed(right)))


# --- views ----------------------------------------------------------------------------------------------------------


def _permute(b: GraphDraw) -> None:
    entry = b.pick(lambda entry: len(entry.shape) > 1)
    b.call(aten.permute.default, entry, b.draw(st.permutations(range(len(entry.shape)))))


def _reshape(b: GraphDraw) -> None:
    entry, left, sizes = b.pick(), 0, []
    left = entry.value.numel()
    while left > 1 and len(sizes) < 3:
        sizes.append(b.choice([size for size in range(1, left + 1) if left % size == 0]))
        left //= sizes[-1]
    b.call(aten.reshape.default, entry, [*sizes, left] if left != 1 or not sizes else sizes)


def _slice(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    size = entry.shape[dim]
    start = b.integer(0, size)
    b.call(aten.slice.Tensor, entry, dim, start, b.integer(start, size), b.integer(1, 2))


def _select(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: 0 not in entry.shape)
    b.call(aten.select.int, entry, dim, b.integer(-entry.shape[dim], entry.shape[dim] - 1))


def _expand(b: GraphDraw) -> None:
    entry = b.pick()
    sizes = [b.choice([2, 3, 4]) if size == 1 else size for size in entry.shape]
    b.call(aten.expand.default, entry, [b.choice([2, 3]), *sizes] if b.flag() else sizes)


def _unsqueeze(b: GraphDraw) -> None:
    entry = b.pick()
    b.call(aten.unsqueeze.default, entry, b.integer(-len(entry.shape) - 1, len(entry.shape)))


def _flip(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    b.call(aten.flip.default, entry, [dim])


def _roll(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    b.call(aten.roll.default, entry, [b.integer(-3, 3)], [dim % len(entry.shape)])


def _cat(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    dim %= len(entry.shape)
    other_sizes = [size for position, size in enumerate(entry.shape) if position != dim]
    others = [
        other for other in b.entries if other.value.dtype is entry.value.dtype and len(other.shape) == len(entry.shape)
        and [size for position, size in enumerate(other.shape) if position != dim] == other_sizes
    ]  # fmt: skip
    b.call(aten.cat.default, [entry, *[b.choice(others) for _ in range(b.integer(0, 2))]], dim)


def _rotate(b: GraphDraw) -> None:
    """Parts that read each other's elements, as those of a rotary embedding do."""
    entry, dim = b.with_dims(lambda entry: entry.value.dtype is not torch.bool)
    size = entry.shape[dim]
    length = max(size // 2, 1)
    (first,) = b.call(aten.slice.Tensor, entry, dim, 0, length)
    if b.flag():
        (second,) = b.call(aten.slice.Tensor, entry, dim, max(size - length, 0), size)
    else:
        (second,) = b.call(aten.flip.default, first, [dim])
    parts = [*b.call(aten.neg.default, second), first]
    if b.flag():
        parts += b.call(aten.mul.Tensor, first, second)
    b.call(b.choice([aten.cat.default, aten.stack.default]), parts, dim)


def _stack(b: GraphDraw) -> None:
    entry = b.pick()
    same = lambda other: other.shape == entry.shape and other.value.dtype is entry.value.dtype  # noqa: E731
    b.call(aten.stack.default, [entry, b.pick(same)], b.integer(0, len(entry.shape)))


def _pad(b: GraphDraw) -> None:
    entry, _ = b.with_dims()
    b.call(aten.constant_pad_nd.default, entry, [b.integer(-1, 2) if min(entry.shape) > 2 else 1, 1], 2)


def _diagonal(b: GraphDraw) -> None:
    b.call(aten.diagonal.default, b.pick(lambda entry: len(entry.shape) > 1), b.integer(-1, 1))


def _unfold(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: bool(entry.shape) and min(entry.shape) >= 2)
    b.call(aten.unfold.default, entry, dim, 2, b.integer(1, 2))


def _split(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    b.call(aten.split.Tensor, entry, max(entry.shape[dim] // 2, 1), dim)


def _triangle(b: GraphDraw) -> None:
    b.call(aten.tril.default, b.pick(lambda entry: len(entry.shape) > 1), b.integer(-1, 1))


def _copy(b: GraphDraw) -> None:
    b.call(aten.clone.default, b.pick(), memory_format=b.choice([torch.contiguous_format, torch.preserve_format]))


# --- reductions, norms, scans ---------------------------------------------------------------------------------------


def _dims(b: GraphDraw, entry: Entry) -> list[int]:
    return sorted(b.draw(st.sets(st.integers(0, len(entry.shape) - 1), min_size=1)))


def _sum(b: GraphDraw) -> None:
    entry, _ = b.with_dims()
    exact = not entry.value.dtype.is_floating_point
    b.call(aten.sum.dim_IntList, entry, _dims(b, entry), b.flag(), exact=exact)


def _whole(b: GraphDraw) -> None:
    entry = b.floats()
    b.call(aten.sum.default, entry, exact=False)


def _mean(b: GraphDraw) -> None:
    entry, _ = b.with_dims(lambda entry: entry.value.dtype.is_floating_point and 0 not in entry.shape)
    b.call(aten.mean.dim, entry, _dims(b, entry), b.flag(), exact=False)


def _extremum(b: GraphDraw) -> None:
    entry, _ = b.with_dims(lambda entry: 0 not in entry.shape and entry.value.dtype is not torch.bool)
    b.call(b.choice([aten.amax.default, aten.amin.default]), entry, _dims(b, entry), b.flag())


def _position(b: GraphDraw) -> None:
    ordered = lambda entry: 0 not in entry.shape and entry.exact and entry.value.dtype is not torch.bool  # noqa: E731
    entry, dim = b.with_dims(ordered)
    b.call(aten.argmax.default, entry, b.choice([dim, None]), b.flag())


def _any(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: entry.value.dtype is torch.bool)
    b.call(b.choice([aten.any.dim, aten.all.dim]), entry, dim, b.flag())


def _variance(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: entry.value.dtype.is_floating_point and min(entry.shape) > 1)
    b.call(aten.var_mean.correction, entry, [dim], correction=b.integer(0, 1), keepdim=b.flag(), exact=False)


def _softmax(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: entry.value.dtype.is_floating_point)
    b.call(b.choice([aten._softmax.default, aten._log_softmax.default]), entry, dim, False, exact=False)


def _layer_norm(b: GraphDraw) -> None:
    entry, _ = b.with_dims(lambda entry: entry.value.dtype is torch.float32 and entry.shape[-1] > 1)
    width = entry.shape[-1]
    scales = [other for other in b.entries if other.shape == (width,) and other.value.dtype is torch.float32]
    scale = b.choice([*scales, None])
    b.call(aten.native_layer_norm.default, entry, [width], scale, None, 1e-2, exact=False)


def _cumulate(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: entry.value.dtype is not torch.bool)
    b.call(aten.cumsum.default, entry, dim, exact=not entry.value.dtype.is_floating_point)


def _cumulate_largest(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: entry.exact and entry.value.dtype is not torch.bool)
    b.call(aten.cummax.default, entry, dim)


# --- indexing -------------------------------------------------------------------------------------------------------


def _index_select(b: GraphDraw) -> None:
    entry, dim = b.with_dims()
    b.call(aten.index_select.default, entry, dim, b.position_entry(entry.shape[dim], 1))


def _index(b: GraphDraw) -> None:
    entry, _ = b.with_dims()
    place = b.position_entry(entry.shape[0], b.integer(1, 2))
    if not place.value.is_contiguous():
        raise NoCandidate  # torch's fake rule gives strides other than those of the operator for transposed positions
    b.call(aten.index.Tensor, entry, [place])


def _gather(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: 0 not in entry.shape)
    place = b.position_entry(entry.shape[dim], len(entry.shape))
    sizes = zip(place.shape, entry.shape, strict=True)
    if any(one > other for at, (one, other) in enumerate(sizes) if at != dim % len(entry.shape)):
        raise NoCandidate
    b.call(aten.gather.default, entry, dim, place)


def _scatter(b: GraphDraw) -> None:
    entry, dim = b.with_dims(lambda entry: entry.value.dtype is torch.int64 and 0 not in entry.shape)
    place = b.position_entry(entry.shape[dim], len(entry.shape))
    sizes = zip(place.shape, entry.shape, strict=True)
    if any(one > other for at, (one, other) in enumerate(sizes) if at != dim % len(entry.shape)):
        raise NoCandidate
    same = lambda other: other.value.dtype is torch.int64 and other.shape == place.shape  # noqa: E731
    source = b.pick(same)
    kind = b.choice(["add", "sum", "prod", "mean", "amax", "amin"])
    if kind == "add":
        b.call(aten.scatter_add.default, entry, dim, place, source)
        return
    in_place = b.writes and _may_be_written(entry, source)
    target = b.choice([aten.scatter_reduce.two, *([aten.scatter_reduce_.two] if in_place else [])])
    b.call(target, entry, dim, place, source, kind, include_self=b.choice([True, False]))


def _index_put(b: GraphDraw) -> None:
    """Adds at positions along the first dimension: which of equal positions comes first does not show."""
    entry = b.pick(lambda entry: entry.value.dtype is torch.int64 and entry.shape and 0 not in entry.shape)
    place = b.position_entry(entry.shape[0], 1)
    sizes = (*place.shape, *entry.shape[1:])
    values = b.pick(
        lambda other: other.value.dtype is torch.int64 and _broadcast(sizes, other.shape)
        and tuple(torch.broadcast_shapes(sizes, other.shape)) == sizes
    )  # fmt: skip
    in_place = b.writes and _may_be_written(entry, values)
    target = b.choice([aten.index_put.default, *([aten.index_put_.default] if in_place else [])])
    b.call(target, entry, [place], values, True)


def _may_be_written(entry: Entry, source: Entry) -> bool:
    """Whether a tensor may be overwritten with a value computed from another: they share no memory."""
    own = entry.value.is_contiguous() and entry.value._base is None
    return own and entry.exact and source.exact and not _overlap(entry.value, source.value)


def _slice_scatter(b: GraphDraw) -> None:
    """Eager mode writes into a copy with the same strides, but for expanded tensors: elements must not overlap."""
    entry, dim = b.with_dims(
        lambda entry: 0 not in entry.shape and (_is_expanded(entry.value) or _is_injective(entry.value))
    )
    dim %= len(entry.shape)
    same = lambda other: (  # noqa: E731
        other.value.dtype is entry.value.dtype and len(other.shape) == len(entry.shape)
        and all(one == two or (at == dim and one <= two) for at, (one, two) in enumerate(zip(other.shape, entry.shape)))
    )  # fmt: skip
    source = b.pick(same)
    start = b.integer(0, entry.shape[dim] - source.shape[dim])
    b.call(aten.slice_scatter.default, entry, source, dim, start, start + source.shape[dim])


# --- calls and writes -----------------------------------------------------------------------------------------------


def _matmul(b: GraphDraw) -> None:
    left = b.pick(lambda entry: len(entry.shape) == 2 and entry.value.dtype is torch.float32)
    right = b.pick(
        lambda entry: len(entry.shape) == 2 and entry.value.dtype is torch.float32 and entry.shape[0] == left.shape[1]
    )
    b.call(aten.mm.default, left, right, exact=False)


def _write(b: GraphDraw) -> None:
    """Overwrites an input, or a computed tensor, with a value; views of it change too."""
    target = b.pick(lambda entry: entry.value.is_contiguous() and entry.value._base is None)
    value = b.pick(
        lambda entry: (
            entry.value.dtype is target.value.dtype
            and not _overlap(entry.value, target.value)
            and _broadcast(target.shape, entry.shape)
            and tuple(torch.broadcast_shapes(target.shape, entry.shape)) == target.shape
        )
    )
    b.all_exact = b.all_exact and value.exact
    if not b.all_exact:
        b.entries = [Entry(entry.node, entry.value, False) for entry in b.entries]
    b.call(b.choice([aten.copy_.default, aten.copy_.default, aten.add_.Tensor]) if target.value.dtype
           is not torch.bool else aten.copy_.default, target, value)  # fmt: skip


def _is_expanded(value: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))


def _is_injective(value: Tensor) -> bool:
    """Whether no two elements of a tensor are at one place in memory."""
    places = torch.arange(value.untyped_storage().nbytes() // value.itemsize)
    return len(places.as_strided(value.shape, value.stride(), value.storage_offset()).unique()) == value.numel()


def _overlap(left: Tensor, right: Tensor) -> bool:
    return storage_identity(left) == storage_identity(right)


POINTWISE: tuple[Step, ...] = (_unary, _with_number, _binary, _logic, _compare, _where, _cast)
VIEWS: tuple[Step, ...] = (
    _permute, _reshape, _slice, _select, _expand, _unsqueeze, _flip, _roll, _cat, _stack, _rotate, _pad, _diagonal,
    _unfold, _split, _triangle, _copy,
)  # fmt: skip
REDUCTIONS: tuple[Step, ...] = (
    _sum, _whole, _mean, _extremum, _position, _any, _variance, _softmax, _layer_norm, _cumulate, _cumulate_largest,
)  # fmt: skip
INDEXING: tuple[Step, ...] = (_index_select, _index, _gather, _scatter, _index_put, _slice_scatter)
PLACING: tuple[Step, ...] = (_gather, _scatter, _scatter, _index_put, _index_put)
CALLS: tuple[Step, ...] = (_matmul,)

NORMS: tuple[Step, ...] = (_sum, _mean, _variance, _softmax, _layer_norm, _unary, _binary, _binary, _with_number)

FAMILIES: tuple[tuple[Step, ...], ...] = (POINTWISE, POINTWISE, POINTWISE, VIEWS, VIEWS, REDUCTIONS, INDEXING, CALLS)


@st.composite
def graphs(
    draw: Any,
    families: Sequence[Sequence[Step]] = FAMILIES,
    steps: int = 18,
    writes: int = 10,
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[torch.dtype] = INPUT_DTYPES,
) -> RandomGraph:
    """Draws a graph of at most `steps` steps from these families; one in `writes` overwrites a tensor, 0 means none."""
    b = GraphDraw(draw, bool(writes))
    shape = [b.choice(sizes) for _ in range(b.integer(1, 3))]
    for number in range(b.integer(1, 4)):
        own = shape if b.flag() else [b.choice([size, 1, size]) for size in shape][b.integer(0, len(shape) - 1) :]
        value = b.random(own, b.choice(dtypes))
        b.placeholder(value.t().contiguous().t() if value.dim() == 2 and number and b.flag() else value)
    for _ in range(b.integer(steps // 3, steps)):
        step = _write if writes and b.integer(1, writes) == writes else b.choice(b.choice(families))
        with suppress(NoCandidate):
            step(b)
    if writes and b.flag():
        with suppress(NoCandidate):
            _write(b)
    computed = b.entries[len(b.inputs) :] or b.entries
    outputs = [b.choice(computed).node for _ in range(b.integer(1, 4))]
    b.graph.output((*outputs, computed[-1].node))
    b.graph.eliminate_dead_code()
    return RandomGraph(GraphModule(torch.nn.Module(), b.graph), tuple(b.inputs))
