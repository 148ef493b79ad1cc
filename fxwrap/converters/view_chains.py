"""The shortest chain of view operators from a base to a view, by affine and mixed-radix index algebra.

Dimensions of the base that are adjacent in memory are one index range, as in `view`. The dimensions of the view that
step through a range divide it into mixed-radix factors, one for each: the step within a factor and its first position
follow from stride and offset. A chain divides the ranges (`view`), narrows each factor (`slice`, `select`), orders the
dimensions (`permute`), and adds those of size 1 (`unsqueeze`, `view`) and repeated elements (`expand`). Diagonals and
overlapping windows come before it (`diagonal`, `unfold`), and so does the `slice` of a range that no factor of the view
divides. The layout of each chain is computed by the rules of its operators and compared with the view's, so the search
may use heuristics.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fxwrap.caching import bounded_cache
from fxwrap.converters.view_factors import Factor, FactorDivision, Piece, Pieces, element_count, magnitude
from fxwrap.converters.view_operators import (
    SLICE_END,
    StridedLayout,
    ViewKind,
    ViewOperator,
    coalesced,
    is_same_view,
    layout_of,
    result_layout,
)
from fxwrap.symbolic import Size, SymbolInfo, difference, divide_exactly, is_equal, product, size_symbols, total
from fxwrap.wrapper_ir import TensorType

Infos: TypeAlias = Mapping[str, SymbolInfo]

_MAX_SPECIAL_STEPS = 2
"""Diagonals, windows, merged dimensions and cuts in one chain."""


@dataclass(frozen=True, slots=True)
class ViewStep:
    """An operator of a chain, and the layout of its result. The `reason` of `as_strided` says why there is no chain."""

    operator: ViewOperator
    layout: StridedLayout
    reason: str = ""

    def result_type(self, base: TensorType) -> TensorType:
        """Returns the type of the result, of a chain on a tensor of type `base`."""
        sizes, strides, offset = self.layout.sizes, self.layout.strides, self.layout.offset
        return replace(base, sizes=sizes, strides=strides, storage_offset=offset)


def view_chain(base: TensorType, view: TensorType, infos: Infos = {}) -> tuple[ViewStep, ...]:  # noqa: B006 - read only
    """Returns operators that turn a tensor of type `base` into a view of type `view`; as_strided if there are none.

    `infos` are the ranges of symbols, by which slices are within their dimensions. The last step has the layout of
    `view`; dimensions of size 1 and empty tensors may have other strides than the operator gives them, but a view that
    only orders dimensions has its own.
    """
    old, new = layout_of(base), layout_of(view)
    if old.is_static and new.is_static:
        return _chain(old, new, ())
    names = set().union(*map(size_symbols, _numbers(old) + _numbers(new)))
    return _chain(old, new, tuple([infos[name] for name in sorted(names) if name in infos]))


def single_view_operator(base: TensorType, view: TensorType) -> ViewOperator:
    """Returns the one operator from a tensor of type `base` to a view of type `view`, else `as_strided`."""
    chain = view_chain(base, view)
    return chain[0].operator if len(chain) == 1 else _as_strided(layout_of(base), layout_of(view))


def _numbers(layout: StridedLayout) -> tuple[Size, ...]:
    return (*layout.sizes, *layout.strides, layout.offset)


def _as_strided(base: StridedLayout, view: StridedLayout) -> ViewOperator:
    return ViewOperator("as_strided", (view.sizes, view.strides, difference(view.offset, base.offset)))


@bounded_cache(4096)
def _chain(base: StridedLayout, view: StridedLayout, infos: tuple[SymbolInfo, ...]) -> tuple[ViewStep, ...]:
    ranges = {info.name: info for info in infos}
    search = _ChainSearch(view.simplified(ranges), ranges)
    shortest = min(search.chains(base.simplified(ranges), _MAX_SPECIAL_STEPS), key=_cost, default=None)
    if shortest is None:
        return (ViewStep(_as_strided(base, view), view, search.reason),)
    if (0 in view.sizes or 1 in view.sizes) and (order := _permutation(base, view)):
        return (ViewStep(ViewOperator("permute", (order,)), view),)
    last = shortest[-1].operator
    if last.kind in ("view", "expand"):
        last = ViewOperator(last.kind, (view.sizes,))
    return (*shortest[:-1], ViewStep(last, view))


def _permutation(base: StridedLayout, view: StridedLayout) -> tuple[int, ...]:
    """Returns the order of a base's dimensions that a view has, with their strides; () for none or the base's own.

    Other chains have other strides of dimensions of size 1 and of empty tensors, which some operators check, as grouped
    matmuls do.
    """
    dims, order = [*zip(base.sizes, base.strides, strict=True)], list[int]()
    for dim in zip(view.sizes, view.strides, strict=True):
        position = next((at for at, other in enumerate(dims) if other == dim and at not in order), None)
        if position is None:
            return ()
        order.append(position)
    is_whole = len(order) == len(dims) and base.offset == view.offset
    return tuple(order) if is_whole and order != sorted(order) else ()


def _cost(chain: Sequence[ViewStep]) -> tuple[int, int]:
    """Returns the number of windows, which few compilers know, and the length."""
    return sum(step.operator.kind == "unfold" for step in chain), len(chain)


class _Steps:
    """A chain under construction; after an operator that cannot be applied, `layout` is None."""

    def __init__(self, base: StridedLayout) -> None:
        self.base = base
        self.layout: StridedLayout | None = base
        self.steps: list[ViewStep] = []

    def add(self, kind: ViewKind, *arguments: Any) -> None:
        """Applies an operator, unless an earlier one could not be applied; a `view` replaces one before it."""
        if kind == "view" and self.steps and self.steps[-1].operator.kind == "view":
            self.steps.pop()
            self.layout = self.steps[-1].layout if self.steps else self.base
        operator = ViewOperator(kind, arguments)
        self.layout = None if self.layout is None else result_layout(operator, self.layout)
        if self.layout is not None:
            self.steps.append(ViewStep(operator, self.layout))

    def copy(self) -> _Steps:
        """Returns a chain that can be continued independently."""
        other = _Steps(self.base)
        other.layout, other.steps = self.layout, list(self.steps)
        return other


class _ChainSearch:
    """Searches chains of operators to one view. `infos` are the ranges of symbols.

    `reason` says why the first attempt failed: the one that merges adjacent dimensions of the view.
    """

    def __init__(self, view: StridedLayout, infos: Infos) -> None:
        self.view = view
        self.division = FactorDivision(view, infos)
        self.reason = ""

    def chains(self, base: StridedLayout, special_steps: int) -> Iterator[list[ViewStep]]:
        """Yields chains to the view, each checked."""
        attempts = list(self._regular_chains(base))
        regular = [steps for steps in attempts if is_same_view(steps[-1].layout, self.view)]
        if attempts and not regular:
            self.reason = self.reason or f"the operators that divide its base give {attempts[0][-1].layout}"
        yield from regular
        if special_steps == 0 or any(len(chain) == 1 for chain in regular):
            return
        for operator in (*_diagonals(base, self.view), *_windows(base, self.view), *_cuts(base, self.view)):
            layout = result_layout(operator, base)
            if layout is not None and is_same_view(layout, self.view):
                yield [ViewStep(operator, layout)]
            elif layout is not None and not regular:
                first = ViewStep(operator, layout)
                yield from ([first, *rest] for rest in self.chains(layout, special_steps - 1))

    def _regular_chains(self, base: StridedLayout) -> Iterator[list[ViewStep]]:
        """Yields chains without diagonals and windows, from the base and from its dimensions in memory order."""
        if 0 in base.sizes or 0 in self.view.sizes:
            yield from _chain_to_empty(base, self.view)
            return
        yield from self._narrowed_chains(_Steps(base))
        order = sorted(range(len(base.sizes)), key=lambda dim: -magnitude(base.strides[dim]))
        if order != list(range(len(order))):
            steps = _Steps(base)
            steps.add("permute", tuple(order))
            yield from self._narrowed_chains(steps)

    def _narrowed_chains(self, start: _Steps) -> Iterator[list[ViewStep]]:
        """Yields chains that divide the base into factors, for dimensions of the view that are adjacent or each."""
        base = start.layout
        assert base is not None
        previous = None
        for coalesce in (True, False):
            factors = self.division.divide(base, coalesce)
            if isinstance(factors, str):
                self.reason = self.reason or factors
            elif factors != previous:
                yield from self._chains_by_factors(start.copy(), base, list(factors))
            previous = factors

    def _chains_by_factors(self, steps: _Steps, base: StridedLayout, factors: list[Factor]) -> Iterator[list[ViewStep]]:
        sizes = [size for size in base.sizes if size != 1]
        if len(sizes) != len(factors) or not all(map(is_equal, sizes, [factor.size for factor in factors])):
            steps.add("view", tuple([factor.size for factor in factors]))
        else:
            for dim in [dim for dim, size in enumerate(base.sizes) if size == 1]:
                factors.insert(dim, Factor(1, 0, 0, ()))
        dims = self._narrow(steps, factors)
        if dims is None or steps.layout is None:
            return
        for merge_first in (True, False):
            chain = self._finish(steps.copy(), dims, merge_first)
            if chain:
                yield chain

    def _narrow(self, steps: _Steps, factors: Sequence[Factor]) -> list[Pieces] | None:
        """Adds slices and selections; returns the pieces of each remaining dimension, none for those of size 1."""
        single = sum(size == 1 for size in self.view.sizes) - sum(factor.size == 1 for factor in factors)
        dims: list[Pieces] = []
        for factor in factors:
            size, start = factor.size, factor.start
            if not factor.pieces and size != 1 and single <= 0:
                steps.add("select", len(dims), _from_end(start, size))
                continue
            if not factor.pieces and size != 1:
                steps.add("slice", len(dims), _from_end(start, size), _from_end(total((start, 1)), size), 1)
                single -= 1
            elif factor.pieces and factor.stride != 0 and not self._narrow_to_pieces(steps, len(dims), factor):
                return None
            dims.append(factor.pieces)
        return dims

    def _narrow_to_pieces(self, steps: _Steps, dim: int, factor: Factor) -> bool:
        """Adds the slice of a factor to its pieces, if it has more positions; False if its step is not constant."""
        step = divide_exactly(factor.pieces[-1].stride, factor.stride)
        if not isinstance(step, int):
            self.reason = self.reason or f"the step {step} of a slice is not constant"
            return False
        count = element_count(factor.pieces)
        end = total((factor.start, product((step, difference(count, 1))), 1))
        if factor.start != 0 or step != 1 or not is_equal(count, factor.size):
            steps.add("slice", dim, _from_end(factor.start, factor.size), _from_end(end, factor.size), step)
        return True

    def _finish(self, steps: _Steps, dims: list[Pieces], merge_first: bool) -> list[ViewStep]:
        """Adds operators that divide, order and merge dimensions, add those of size 1, and repeat elements.

        With `merge_first`, dimensions that are adjacent before they are ordered are merged there.
        """
        divided = [part for pieces in dims for part in _parts(pieces)]
        if merge_first:
            merged = _parts([piece for part in divided for piece in part])
            divided = divided if len(merged) == sum(bool(part) for part in divided) else merged
        once = tuple([1 if size == 1 or self._is_repeated(dim, dims) else size
                      for dim, size in enumerate(self.view.sizes)])  # fmt: skip
        names = [part[0].dim for part in divided if part]
        if divided != dims:
            in_order = names == sorted(set(names))
            steps.add("view", once if in_order else tuple([element_count(part) for part in divided]))
            if in_order:
                return self._expand(steps)
        if names != sorted(names):
            steps.add("permute", tuple(_order(divided, len(self.view.sizes))))
        self._add_single_dims(steps, once)
        return self._expand(steps)

    def _is_repeated(self, dim: int, dims: Sequence[Pieces]) -> bool:
        return self.view.strides[dim] == 0 and not any(piece.dim == dim for pieces in dims for piece in pieces)

    def _add_single_dims(self, steps: _Steps, once: tuple[Size, ...]) -> None:
        """Adds dimensions of size 1, merges those that are parts of one, unless `expand` alone adds what is missing."""
        sizes = None if steps.layout is None else steps.layout.sizes
        if sizes is None or sizes == once or self._can_expand(sizes, once):
            return
        added, dropped = _single_dim(once, sizes), _single_dim(sizes, once)
        if added is not None:
            steps.add("unsqueeze", added)
        elif dropped is not None:
            steps.add("select", dropped, 0)
        else:
            steps.add("view", once)

    def _can_expand(self, sizes: Sequence[Size], once: Sequence[Size]) -> bool:
        """Whether `expand` adds all dimensions that are missing: repeated ones in front."""
        added = len(once) - len(sizes)
        return added > 0 and tuple(sizes) == tuple(once[added:]) and 1 not in self.view.sizes[:added]

    def _expand(self, steps: _Steps) -> list[ViewStep]:
        sizes = None if steps.layout is None else steps.layout.sizes
        if sizes is not None and (len(sizes) != len(self.view.sizes) or not all(map(is_equal, sizes, self.view.sizes))):
            steps.add("expand", self.view.sizes)
        if not steps.steps:
            steps.add("view", self.view.sizes)
        return [] if steps.layout is None else steps.steps


def _single_dim(sizes: tuple[Size, ...], others: tuple[Size, ...]) -> int | None:
    """Returns the dimension of size 1 without which sizes equal others, None if there is none."""
    dims = [dim for dim, size in enumerate(sizes) if size == 1 and sizes[:dim] + sizes[dim + 1 :] == others]
    return dims[0] if dims else None


def _from_end(position: Size, size: Size) -> Size:
    """Returns a position in a symbolic dimension, relative to its end if the distance is constant."""
    if isinstance(size, int) and isinstance(position, int):
        return position
    distance = difference(position, size)
    if isinstance(position, int) or not isinstance(distance, int):
        return position
    return SLICE_END if distance == 0 else distance


def _parts(pieces: Sequence[Piece]) -> list[Pieces]:
    """Returns pieces by the dimension of the view that they belong to."""
    if not pieces:
        return [()]
    return [tuple(part) for _, part in itertools.groupby(pieces, key=lambda piece: piece.dim)]


def _order(dims: Sequence[Pieces], rank: int) -> list[int]:
    """Returns the positions of dimensions in the view's order; those of size 1 where the view has others."""
    positions: dict[int, list[int]] = {}
    single = []
    for position, pieces in enumerate(dims):
        if pieces:
            positions.setdefault(pieces[0].dim, []).append(position)
        else:
            single.append(position)
    order: list[int] = []
    for dim in range(rank):
        if dim in positions:
            order += positions[dim]
        elif single:
            order.append(single.pop(0))
    return order + single


def _chain_to_empty(base: StridedLayout, view: StridedLayout) -> Iterator[list[ViewStep]]:
    """Yields the chain to a view without elements."""
    steps = _Steps(base)
    if 0 not in view.sizes:
        return
    if 0 not in base.sizes:
        if not base.sizes:
            steps.add("unsqueeze", 0)
        steps.add("slice", 0, 0, 0, 1)
    if steps.layout is not None and (steps.layout.sizes != view.sizes or not steps.steps):
        steps.add("view", view.sizes)
    if steps.layout is not None:
        yield steps.steps


# --- diagonals, windows and cuts --------------------------------------------------------------------------------------


def _diagonals(base: StridedLayout, view: StridedLayout) -> Iterator[ViewOperator]:
    """Yields diagonals along which a dimension of the view may step."""
    if not (base.is_static and view.is_static):
        return
    distance = int(view.offset) - int(base.offset)
    for first, second in itertools.permutations(range(len(base.sizes)), 2):
        rows, columns = int(base.strides[first]), int(base.strides[second])
        if rows < columns or not columns or rows + columns not in view.strides:
            continue
        down, right = distance % rows // columns, distance // rows
        for offset in dict.fromkeys((0, down if down < int(base.sizes[second]) else 0, -right)):
            yield ViewOperator("diagonal", (offset, first, second))


def _windows(base: StridedLayout, view: StridedLayout) -> Iterator[ViewOperator]:
    """Yields windows of a dimension of the base, where two dimensions of the view step through it and overlap."""
    if not (base.is_static and view.is_static):
        return
    for dim, (length, stride) in enumerate(base.dimensions):
        for width, step in itertools.permutations(view.dimensions, 2):
            if stride and width[1] == stride and step[1] % stride == 0 and 1 < width[0] <= length and step[1] > 0:
                yield ViewOperator("unfold", (dim, width[0], step[1] // stride))


def _cuts(base: StridedLayout, view: StridedLayout) -> Iterator[ViewOperator]:
    """Yields slices that leave a multiple of a stride of the view, and divisions of ranges by a stride."""
    if not (base.is_static and view.is_static):
        return
    for dim, length, row in _rows(base.dimensions, view):
        if length % row:
            for start in {0, (int(view.offset) - int(base.offset)) // int(base.strides[dim]) % length}:
                yield ViewOperator("slice", (dim, start, start + (length - start) // row * row, 1))
    runs = coalesced(base.dimensions)
    sizes = [size for size, _ in runs]
    for dim, length, row in _rows(runs, view):
        divided = (*sizes[:dim], length // row, row, *sizes[dim + 1 :])
        if length % row == 0 and divided != base.sizes:
            yield ViewOperator("view", (divided,))


def _rows(dimensions: Iterable[tuple[Size, Size]], view: StridedLayout) -> Iterator[tuple[int, int, int]]:
    """Yields the index and size of a dimension, and the elements of it that a larger stride of the view spans."""
    for dim, (length, stride) in enumerate(dimensions):
        for step in dict.fromkeys(map(int, view.strides)):
            if 0 < int(stride) < step and step % int(stride) == 0:
                yield dim, int(length), step // int(stride)
