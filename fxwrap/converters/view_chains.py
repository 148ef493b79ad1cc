"""Views as chains of operators that people write: found by algebra on strides, checked by applying each operator.

A dimension of a view walks through one dimension of its base, or through several that are adjacent in memory. So each
group of base dimensions is divided into digits, as a number is: one for each dimension of the view that walks through
the group. A chain divides the groups (`view`), narrows or selects each digit (`slice`, `select`), orders what is left
(`permute`), and adds or drops dimensions of size 1 (`view`) and repeated ones (`expand`). Walks along a diagonal and
overlapping windows come before it (`diagonal`, `unfold`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import sympy

from fxwrap.caching import bounded_cache
from fxwrap.symbolic import Size, canonicalize, ceiling_divide, product, total
from fxwrap.wrapper_ir import TensorType

ViewKind: TypeAlias = Literal["view", "permute", "expand", "slice", "select", "diagonal", "unfold", "as_strided"]

_MAX_SPECIAL_STEPS = 2
"""Diagonals and windows in one chain."""


@dataclass(frozen=True, slots=True)
class ViewForm:
    """A view operator with its arguments after the tensor.

    `kind` is "view" (sizes), "permute" (dims), "expand" (sizes), "slice" (dim, start, end, step), "select" (dim,
    index), "diagonal" (offset, dim1, dim2), "unfold" (dim, size, step) or "as_strided" (sizes, strides, offset relative
    to the base's first element).
    """

    kind: ViewKind
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ViewStep:
    """An operator of a chain, and the type of its result."""

    form: ViewForm
    type: TensorType


def view_chain(base: TensorType, view: TensorType) -> tuple[ViewStep, ...]:
    """Returns operators that turn a tensor of type `base` into a view of type `view`; as_strided if there are none.

    The last step has the type `view`, whose dimensions of size 1 may have other strides than the operator gives them.
    """
    return _chain(_sizes_only(base), _sizes_only(view), base, view)


def view_form(base: TensorType, view: TensorType) -> ViewForm:
    """Returns the one operator from a tensor of type `base` to a view of type `view`, else `as_strided`."""
    chain = view_chain(base, view)
    return chain[0].form if len(chain) == 1 else _as_strided(base, view)


def _as_strided(base: TensorType, view: TensorType) -> ViewForm:
    return ViewForm("as_strided", (view.sizes, view.strides, _difference(view.storage_offset, base.storage_offset)))


def _sizes_only(type_: TensorType) -> tuple[object, ...]:
    return (type_.sizes, type_.strides, type_.storage_offset)


@bounded_cache(4096)
def _chain(_base: object, _view: object, base: TensorType, view: TensorType) -> tuple[ViewStep, ...]:
    found = min((chain for chain in _chains(base, view, _MAX_SPECIAL_STEPS)), key=len, default=None)
    if found is None:
        return (ViewStep(_as_strided(base, view), view),)
    return (*found[:-1], replace(found[-1], type=view))


def _chains(base: TensorType, view: TensorType, special_steps: int) -> Iterator[list[ViewStep]]:
    """Yields chains to a view, each checked."""
    regular = _regular_chain(base, view)
    is_regular = bool(regular) and _same_view(regular[-1].type, view)
    if is_regular:
        yield regular
    if special_steps == 0 or (is_regular and len(regular) == 1):
        return
    for form in (*_in_memory_order(base), *_diagonals(base, view), *_windows(base, view), *_joined(base)):
        type_ = apply_form(form, base)
        if type_ is not None and _same_view(type_, view):
            yield [ViewStep(form, type_)]
        elif type_ is not None and not is_regular:
            yield from ([ViewStep(form, type_), *rest] for rest in _chains(type_, view, special_steps - 1))


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _difference(left: Size, right: Size) -> Size:
    return total((left, product((-1, right))))


def _equal(left: Size, right: Size) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return left == right or sympy.expand(_without_guards(left) - _without_guards(right)) == 0


def _without_guards(size: Size) -> sympy.Basic:
    """Returns a stride without `max(size, 1)`, by which torch makes the strides of empty tensors."""
    return sympy.sympify(size).replace(
        lambda node: node.func.__name__ in ("max", "Max") and 1 in node.args and len(node.args) == 2,
        lambda *operands: next((item for item in operands if item != 1), sympy.Integer(1)),
    )


def _quotient(dividend: Size, divisor: Size) -> Size | None:
    """Returns an exact quotient, None if there is none for all values of the symbols."""
    if isinstance(dividend, int) and isinstance(divisor, int):
        return dividend // divisor if divisor and dividend % divisor == 0 else None
    if divisor == 0:
        return None
    quotient = sympy.cancel(_without_guards(dividend) / _without_guards(divisor))
    terms = sympy.Add.make_args(sympy.expand(quotient))
    if any(sympy.fraction(term)[1] != 1 for term in terms):
        return None
    return canonicalize(sympy.expand(quotient))


def _at_most(left: Size, right: Size) -> bool:
    """Whether `left <= right` for all values of the symbols, as far as polynomials with positive coefficients show."""
    if isinstance(left, int) and isinstance(right, int):
        return left <= right
    rest = sympy.expand(_without_guards(right) - _without_guards(left))
    return all(term.as_coeff_Mul()[0] >= 0 for term in sympy.Add.make_args(rest))


def _same_view(found: TensorType, view: TensorType) -> bool:
    """Whether two views have the same elements; the strides of dimensions of size 1 do not matter."""
    if len(found.sizes) != len(view.sizes) or not all(map(_equal, found.sizes, view.sizes)):
        return False
    if 0 in view.sizes:
        return True
    strides = [
        (one, other) for size, one, other in zip(view.sizes, found.strides, view.strides, strict=True) if size != 1
    ]
    return all(_equal(one, other) for one, other in strides) and _equal(found.storage_offset, view.storage_offset)


# --- operators --------------------------------------------------------------------------------------------------------


def apply_form(form: ViewForm, base: TensorType) -> TensorType | None:
    """Returns the type of an operator's result as torch defines it; None where the operator refuses the tensor."""
    sizes, strides, offset, arguments = base.sizes, base.strides, base.storage_offset, form.arguments
    match form.kind:
        case "view":
            return _reshaped(base, arguments[0])
        case "permute":
            (order,) = arguments
            return _with_dimensions(base, [(sizes[dim], strides[dim]) for dim in order], offset)
        case "expand":
            return _expanded(base, arguments[0])
        case "slice":
            dim, start, end, step = arguments
            size = ceiling_divide(_difference(end, start), step)
            dimension = (size, product((strides[dim], step)))
            return _with_dimensions(base, _replaced(base, dim, [dimension]), _moved(offset, start, strides[dim]))
        case "select":
            dim, index = arguments
            return _with_dimensions(base, _replaced(base, dim, []), _moved(offset, index, strides[dim]))
        case "diagonal":
            return _diagonal(base, *arguments)
        case "unfold":
            dim, size, step = arguments
            windows = [((sizes[dim] - size) // step + 1, strides[dim] * step)]
            return _with_dimensions(base, [*_replaced(base, dim, windows), (size, strides[dim])], offset)
        case _:
            raise AssertionError(f"{form.kind} has no rule")


_Dimension: TypeAlias = tuple[Any, Any]
"""A size and a stride."""


def _with_dimensions(base: TensorType, dimensions: Sequence[_Dimension], offset: Size) -> TensorType:
    sizes, strides = zip(*dimensions, strict=True) if dimensions else ((), ())
    return replace(base, sizes=tuple(sizes), strides=tuple(strides), storage_offset=offset)


def _dimensions(type_: TensorType) -> list[_Dimension]:
    return list(zip(type_.sizes, type_.strides, strict=True))


def _replaced(base: TensorType, dim: int, by: Sequence[_Dimension]) -> list[_Dimension]:
    dimensions = _dimensions(base)
    return [*dimensions[:dim], *by, *dimensions[dim + 1 :]]


def _moved(offset: Size, steps: Size, stride: Size) -> Size:
    return total((offset, product((steps, stride))))


def _diagonal(base: TensorType, distance: int, first: int, second: int) -> TensorType | None:
    rows, columns = base.sizes[first], base.sizes[second]
    if not all(isinstance(item, int) for item in (rows, columns)):
        return None
    size = min(rows, columns - distance) if distance >= 0 else min(rows + distance, columns)
    others = [item for dim, item in enumerate(_dimensions(base)) if dim not in (first, second)]
    start = _moved(base.storage_offset, abs(distance), base.strides[second if distance > 0 else first])
    stride = total((base.strides[first], base.strides[second]))
    return None if size <= 0 else _with_dimensions(base, [*others, (size, stride)], start)


def _expanded(base: TensorType, sizes: Sequence[Size]) -> TensorType | None:
    added = len(sizes) - len(base.sizes)
    dimensions: list[_Dimension] = [(size, 0) for size in sizes[:added]]
    for (old, stride), new in zip(_dimensions(base), sizes[added:], strict=True):
        if old != new and old != 1:
            return None
        dimensions.append((new, stride if old == new else 0))
    return _with_dimensions(base, dimensions, base.storage_offset)


def _reshaped(base: TensorType, sizes: Sequence[Size]) -> TensorType | None:
    """Returns the type of `view(sizes)`: each run of dimensions that are adjacent in memory is divided anew."""
    runs: list[_Dimension] = []  # from the last one
    for size, stride in reversed(_dimensions(base)):
        if size == 1:
            continue
        if runs and _equal(stride, product(runs[-1])):
            runs[-1] = (product((runs[-1][0], size)), runs[-1][1])
        else:
            runs.append((size, stride))
    remaining = list(reversed(runs))
    strides: list[Size] = []
    inner: Size = 1  # elements of the current run that later dimensions cover
    for size in reversed(sizes):
        stride = remaining[-1][1] if remaining else 1
        strides.append(product((stride, inner)))
        if size == 1:
            continue
        if not remaining:
            return None
        inner = product((inner, size))
        if _equal(inner, remaining[-1][0]):
            remaining.pop()
            inner = 1
        elif _quotient(remaining[-1][0], inner) is None:
            return None
    if remaining or inner != 1:
        return None
    return replace(base, sizes=tuple(sizes), strides=tuple(reversed(strides)))


# --- regular chains ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Digit:
    """A part of a group of base dimensions: `size` positions of `stride` elements.

    `walk` is the dimension of the view that walks through it, or None.
    """

    size: Size
    stride: Size
    walk: int | None


def _regular_chain(base: TensorType, view: TensorType) -> list[ViewStep]:
    """Returns a chain of view, slice, select, permute, view and expand; an empty one if there is none."""
    if 0 in base.sizes or 0 in view.sizes:
        return []
    walks = [dim for dim, (size, stride) in enumerate(_dimensions(view)) if size != 1 and stride != 0]
    groups = _grouped(base, view, walks)
    if groups is None:
        return []
    digits: list[_Digit] = []
    for group in groups:
        parts = _digits(base, view, *group)
        if parts is None:
            return []
        digits += parts
    steps = _Steps(base)
    if [(item.size, item.stride) for item in digits] != [item for item in _dimensions(base) if item[0] != 1]:
        steps.add("view", tuple(item.size for item in digits))
    else:
        ones = [digit_of_one for digit_of_one, size in enumerate(base.sizes) if size == 1]
        for dim in ones:
            digits.insert(dim, _Digit(1, base.strides[dim], None))
    order = _narrow(steps, digits, view, _difference(view.storage_offset, base.storage_offset))
    if order is None:
        return []
    return _finish(steps, order, view)


class _Steps:
    """A chain under construction; after an operator that cannot be applied, `type` is None."""

    def __init__(self, base: TensorType) -> None:
        self.base = base
        self.type: TensorType | None = base
        self.steps: list[ViewStep] = []

    def add(self, kind: ViewKind, *arguments: Any) -> None:
        """Applies an operator, unless an earlier one could not be applied; the last of several `view` stands."""
        form = ViewForm(kind, arguments)
        if kind == "view" and self.steps and self.steps[-1].form.kind == "view":
            self.steps.pop()
            self.type = self.steps[-1].type if self.steps else self.base
        self.type = None if self.type is None else apply_form(form, self.type)
        if self.type is not None:
            self.steps.append(ViewStep(form, self.type))


def _grouped(base: TensorType, view: TensorType, walks: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Returns groups of adjacent base dimensions, each with the view's dimensions that walk through it."""
    dims = [dim for dim, size in enumerate(base.sizes) if size != 1]
    joined: set[int] = set()  # with the dimension before
    innermost: dict[int, int] = {}
    for walk in walks:
        place = _innermost(base, dims, view.sizes[walk], view.strides[walk], innermost.values())
        if place is None:
            return None
        innermost[walk] = place
        steps = _quotient(view.strides[walk], base.strides[dims[place]])
        assert steps is not None
        last, count = product((steps, _difference(view.sizes[walk], 1))), base.sizes[dims[place]]
        while not _at_most(total((last, 1)), count):
            if place == 0 or not _is_adjacent(base, dims[place - 1], dims[place]):
                return None
            joined.add(place)
            place -= 1
            count = product((count, base.sizes[dims[place]]))
    groups: list[tuple[list[int], list[int]]] = []
    for place, dim in enumerate(dims):
        if place not in joined:
            groups.append(([], []))
        groups[-1][0].append(dim)
        groups[-1][1].extend(walk for walk, inner in innermost.items() if inner == place)
    return groups


def _is_adjacent(base: TensorType, outer: int, inner: int) -> bool:
    return _equal(base.strides[outer], product((base.sizes[inner], base.strides[inner])))


def _innermost(base: TensorType, dims: Sequence[int], size: Size, stride: Size, walked: Collection[int]) -> int | None:
    """Returns the place of the base dimension with the largest stride that divides a stride.

    Of several with equal strides, as windows have, it is one that no other dimension walks through, of the same size.
    """
    strides = [base.strides[dim] for dim in dims]
    dividing = [place for place, other in enumerate(strides) if other != 0 and _quotient(stride, other) is not None]

    def preference(place: int) -> tuple[int, bool, bool]:
        rank = _rank(strides[place], [strides[other] for other in dividing])
        return rank, place not in walked, base.sizes[dims[place]] == size

    return max(dividing, key=preference, default=None)


def _rank(stride: Size, strides: Sequence[Size]) -> int:
    """Returns how many of the strides divide a stride."""
    return sum(_quotient(stride, other) is not None for other in strides)


def _digits(base: TensorType, view: TensorType, dims: Sequence[int], walks: Sequence[int]) -> list[_Digit] | None:
    """Divides a group into digits, the one with the largest stride first; None if the view's dimensions overlap."""
    unit = base.strides[dims[-1]]
    ordered = sorted(walks, key=lambda walk: _rank(view.strides[walk], [view.strides[other] for other in walks]))
    if len(dims) == 1 and len(walks) <= 1:
        return [_Digit(base.sizes[dims[0]], unit, walks[0] if walks else None)]
    bounds: list[Size] = [unit]
    for lower, walk in pairwise(ordered):
        bound = _boundary(base, view, dims, lower, walk, bounds[-1])
        if bound is None:
            return None
        bounds.append(bound)
    bounds.append(product((base.sizes[dims[0]], base.strides[dims[0]])))
    digits = []
    for walk, (low, high) in zip(ordered, pairwise(bounds), strict=True):
        size = _quotient(high, low)
        if size is None:
            return None
        digits.append(_Digit(size, low, walk))
    return digits[::-1]


def _boundary(
    base: TensorType, view: TensorType, dims: Sequence[int], lower: int, walk: int, last: Size
) -> Size | None:
    """Returns the stride at which the digit of a dimension begins: that of a base dimension if one fits."""
    reach = product((view.strides[lower], _difference(view.sizes[lower], 1)))
    for bound in (*[base.strides[dim] for dim in dims], view.strides[walk]):
        divides = _quotient(view.strides[walk], bound) is not None and _quotient(bound, last) is not None
        if divides and bound != last and _at_most(total((reach, 1)), bound):
            return bound
    return None


def _narrow(steps: _Steps, digits: Sequence[_Digit], view: TensorType, offset: Size) -> list[int] | None:
    """Adds slices and selections; returns the view's dimension of each digit that is left, -1 for those of size 1."""
    starts = _starts(digits, offset)
    if starts is None:
        return None
    order: list[int] = []
    walks = sum(digit.walk is not None for digit in digits)
    missing = len(view.sizes) - walks - sum(digit.size == 1 for digit in digits)  # dimensions of size 1, or repeated
    for digit, start in zip(digits, starts, strict=True):
        if digit.walk is None:
            if digit.size != 1:
                if not _at_most(total((start, 1)), digit.size):
                    return None
                if missing <= 0:
                    steps.add("select", len(order), start)
                    continue
                steps.add("slice", len(order), start, total((start, 1)), 1)
                missing -= 1
            order.append(-1)
            continue
        step = _quotient(view.strides[digit.walk], digit.stride)
        size = view.sizes[digit.walk]
        if not isinstance(step, int):
            return None
        end = total((start, product((step, _difference(size, 1))), 1))
        if not _at_most(end, digit.size):
            return None
        if start != 0 or step != 1 or not _equal(size, digit.size):
            steps.add("slice", len(order), start, end, step)
        order.append(digit.walk)
    return order


def _starts(digits: Sequence[_Digit], offset: Size) -> list[Size] | None:
    """Divides an offset among the digits, those with the largest strides first."""
    divided = [index for index, digit in enumerate(digits) if digit.size != 1 and digit.stride != 0]
    starts: list[Size] = [0] * len(digits)
    if not isinstance(offset, int) or not all(isinstance(digit.stride, int) for digit in digits):
        strides = [digit.stride for digit in digits]
        divided.sort(key=lambda index: -_rank(strides[index], strides))
        return _symbolic_starts(digits, divided, offset)
    rest = offset
    for index in sorted(divided, key=lambda index: -int(digits[index].stride)):
        starts[index], rest = divmod(rest, int(digits[index].stride))
    return starts if rest == 0 and offset >= 0 else None


def _symbolic_starts(digits: Sequence[_Digit], divided: Sequence[int], offset: Size) -> list[Size] | None:
    starts: list[Size] = [0] * len(digits)
    for term in sympy.Add.make_args(sympy.expand(_without_guards(offset))):
        for index in divided if term != 0 else ():
            steps = _quotient(canonicalize(term), digits[index].stride)
            if steps is not None and _at_most(0, steps):
                starts[index] = total((starts[index], steps))
                break
        else:
            if term != 0:
                return None
    return starts


def _finish(steps: _Steps, order: Sequence[int], view: TensorType) -> list[ViewStep]:
    """Adds what orders the dimensions, adds and drops those of size 1, and repeats elements.

    `order` has the view's dimension of each present one, -1 for those of size 1.
    """
    position = {walk: index for index, walk in enumerate(order) if walk >= 0}
    ones = [index for index, walk in enumerate(order) if walk < 0]
    ordered = []
    for dim in range(len(view.sizes)):
        if dim in position:
            ordered.append(position[dim])
        elif ones:
            ordered.append(ones.pop(0))
    ordered += ones
    if ordered != list(range(len(order))):
        steps.add("permute", tuple(ordered))
    once = tuple([1 if stride == 0 else size for size, stride in _dimensions(view)])
    if steps.type is not None and steps.type.sizes != once and not _can_expand(steps.type.sizes, view):
        steps.add("view", once)
    if steps.type is not None and steps.type.sizes != view.sizes:
        steps.add("expand", view.sizes)
    if not steps.steps:
        steps.add("view", view.sizes)
    return [] if steps.type is None else steps.steps


def _can_expand(sizes: Sequence[Size], view: TensorType) -> bool:
    """Whether `expand` alone makes the view's sizes: it adds repeated dimensions in front."""
    added = len(view.sizes) - len(sizes)
    if added < 0 or any(stride != 0 or size == 1 for size, stride in _dimensions(view)[:added]):
        return False
    rest = zip(sizes, _dimensions(view)[added:], strict=True)
    return all(old == (1 if stride == 0 else size) for old, (size, stride) in rest)


# --- other first steps --------------------------------------------------------------------------------------------


def _diagonals(base: TensorType, view: TensorType) -> Iterator[ViewForm]:
    """Yields diagonals along which a dimension of the view may walk."""
    if not (base.is_static and view.is_static):
        return
    distance = int(view.storage_offset) - int(base.storage_offset)
    for first in range(len(base.sizes)):
        for second in range(len(base.sizes)):
            rows, columns = int(base.strides[first]), int(base.strides[second])
            if first == second or rows < columns or not columns or rows + columns not in view.strides:
                continue
            down, right = distance % rows // columns, distance // rows
            for offset in dict.fromkeys((0, down if down < int(base.sizes[second]) else 0, -right)):
                yield ViewForm("diagonal", (offset, first, second))


def _windows(base: TensorType, view: TensorType) -> Iterator[ViewForm]:
    """Yields windows of a dimension of the base, where two dimensions of the view walk through it and overlap."""
    if not (base.is_static and view.is_static):
        return
    for dim, (length, stride) in enumerate(_dimensions(base)):
        for width, step in itertools.permutations(_dimensions(view), 2):
            if stride and width[1] == stride and step[1] % stride == 0 and 1 < width[0] <= length and step[1] > 0:
                yield ViewForm("unfold", (dim, width[0], step[1] // stride))


def _in_memory_order(base: TensorType) -> Iterator[ViewForm]:
    """Yields the permutation of a base to descending strides, if it has another order: only then do dimensions join."""
    strides = base.strides
    order = sorted(range(len(strides)), key=lambda dim: -_rank(strides[dim], strides))
    if order != list(range(len(strides))):
        yield ViewForm("permute", (tuple(order),))


def _joined(base: TensorType) -> Iterator[ViewForm]:
    """Yields the view of a base whose dimensions are all adjacent as one dimension, if it has several."""
    if len(base.sizes) > 1:
        yield ViewForm("view", ((base.element_count,),))
