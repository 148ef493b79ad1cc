"""Operators that return views, and the layouts of their results as torch defines them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import sympy
import torch

from fxwrap.symbolic import (
    Size,
    SymbolInfo,
    ceiling_divide,
    difference,
    divide_exactly,
    is_equal,
    product,
    simplify_by_ranges,
    total,
)
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import TensorType

ViewKind: TypeAlias = Literal[
    "view", "permute", "expand", "unsqueeze", "slice", "select", "diagonal", "unfold", "as_strided"
]

_ATEN = torch.ops.aten

VIEW_OVERLOADS: dict[ViewKind, OpOverload] = {
    "view": _ATEN.view.default,
    "permute": _ATEN.permute.default,
    "expand": _ATEN.expand.default,
    "unsqueeze": _ATEN.unsqueeze.default,
    "slice": _ATEN.slice.Tensor,
    "select": _ATEN.select.int,
    "diagonal": _ATEN.diagonal.default,
    "unfold": _ATEN.unfold.default,
    "as_strided": _ATEN.as_strided.default,
}
"""The overload of a view operator, by its kind."""

_KIND_BY_OVERLOAD = {overload: kind for kind, overload in VIEW_OVERLOADS.items() if kind != "as_strided"}
_PARAMETERS: dict[ViewKind, tuple[Any, ...]] = {
    "slice": (0, None, None, 1), "select": (None, None), "diagonal": (0, 0, 1), "unfold": (None, None, None),
}  # fmt: skip
"""The default values of several parameters."""

SLICE_END = sys.maxsize
"""The end of a slice that reaches the end of the dimension."""


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """Sizes, strides and offset of a view, all in elements."""

    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size

    @property
    def dimensions(self) -> tuple[tuple[Size, Size], ...]:
        """The size and stride of each dimension."""
        return tuple(zip(self.sizes, self.strides, strict=True))

    def simplified(self, infos: Mapping[str, SymbolInfo]) -> StridedLayout:
        """Returns the layout with constants for expressions of one value in the ranges of their symbols."""
        if not infos:
            return self
        sizes, strides = ([simplify_by_ranges(size, infos) for size in part] for part in (self.sizes, self.strides))
        return StridedLayout(tuple(sizes), tuple(strides), simplify_by_ranges(self.offset, infos))

    @property
    def is_static(self) -> bool:
        """Whether all numbers are constant."""
        return {int}.issuperset(map(type, (*self.sizes, *self.strides, self.offset)))


def layout_of(type_: TensorType) -> StridedLayout:
    """Returns the layout of a tensor type."""
    return StridedLayout(type_.sizes, type_.strides, type_.storage_offset)


@dataclass(frozen=True, slots=True)
class ViewOperator:
    """A view operator with its arguments after the tensor.

    `kind` is "view" (sizes), "permute" (dims), "expand" (sizes), "unsqueeze" (dim), "slice" (dim, start, end, step),
    "select" (dim, index), "diagonal" (offset, dim1, dim2), "unfold" (dim, size, step) or "as_strided" (sizes, strides,
    offset relative to the base's first element).
    """

    kind: ViewKind
    arguments: tuple[Any, ...]

    def simplified(self, infos: Mapping[str, SymbolInfo]) -> ViewOperator:
        """Returns the operator with constants for expressions of one value in the ranges of their symbols."""

        def simplify(item: Any) -> Any:
            if isinstance(item, tuple):
                return tuple(map(simplify, item))
            return simplify_by_ranges(item, infos) if isinstance(item, sympy.Basic) else item

        return ViewOperator(self.kind, simplify(self.arguments)) if infos else self


def view_operator(overload: object, arguments: Sequence[Any]) -> ViewOperator | None:
    """Returns the operator of a call with these arguments after the tensor; None for another overload."""
    kind = _KIND_BY_OVERLOAD.get(overload)  # type: ignore[call-overload]
    if kind is None:
        return None
    defaults = _PARAMETERS.get(kind, (None,))
    return ViewOperator(kind, (*arguments, *defaults[len(arguments) :]))


def is_same_view(left: StridedLayout, right: StridedLayout) -> bool:
    """Whether two layouts have the same elements; the strides of dimensions of size 1 do not matter."""
    if len(left.sizes) != len(right.sizes) or not all(map(is_equal, left.sizes, right.sizes)):
        return False
    if 0 in right.sizes:
        return True
    strides = zip(right.sizes, left.strides, right.strides, strict=True)
    return all(size == 1 or is_equal(one, other) for size, one, other in strides) and is_equal(
        left.offset, right.offset
    )


def returns_view(
    operator: ViewOperator | None, base: TensorType, view: TensorType, infos: Mapping[str, SymbolInfo]
) -> bool:
    """Whether an operator returns a view of type `view` of a tensor of type `base`, by the rules."""
    if operator is None:
        return False
    layout = result_layout(operator.simplified(infos), layout_of(base).simplified(infos))
    return layout is not None and is_same_view(layout.simplified(infos), layout_of(view).simplified(infos))


def result_layout(operator: ViewOperator, base: StridedLayout) -> StridedLayout | None:
    """Returns the layout of an operator's result, None if torch rejects the operands or it is not known.

    Symbolic positions of `slice` and `select` are assumed to be within the dimension.
    """
    arguments: Any = operator.arguments
    match operator.kind:
        case "view":
            return _reshaped(base, arguments[0])
        case "permute":
            order = [dim % len(base.sizes) for dim in arguments[0]]
            return _layout([base.dimensions[dim] for dim in order], base.offset)
        case "expand":
            return _expanded(base, arguments[0])
        case "unsqueeze":
            dim = arguments[0] % (len(base.sizes) + 1)
            inner = product(base.dimensions[dim]) if dim < len(base.sizes) else 1
            return _layout([*base.dimensions[:dim], (1, inner), *base.dimensions[dim:]], base.offset)
        case "slice":
            return _sliced(base, *arguments)
        case "select":
            return _selected(base, *arguments)
        case "diagonal":
            return _diagonal(base, *arguments)
        case "unfold":
            return _unfolded(base, *arguments)
        case "as_strided":
            sizes, strides, distance = arguments
            return StridedLayout(sizes, strides, total((base.offset, distance)))


_Dimension: TypeAlias = tuple[Size, Size]


def _layout(dimensions: Sequence[_Dimension], offset: Size) -> StridedLayout:
    return StridedLayout(tuple([size for size, _ in dimensions]), tuple([stride for _, stride in dimensions]), offset)


def _replaced(base: StridedLayout, dim: int, *by: _Dimension) -> list[_Dimension]:
    return [*base.dimensions[:dim], *by, *base.dimensions[dim + 1 :]]


def _moved(base: StridedLayout, dim: int, positions: Size) -> Size:
    return total((base.offset, product((positions, base.strides[dim]))))


def _sliced(base: StridedLayout, dim: int, start: Size | None, end: Size | None, step: Size) -> StridedLayout | None:
    if not base.sizes:
        return None
    dim %= len(base.sizes)
    size = base.sizes[dim]
    first = _bounded(0 if start is None else start, size)
    last = _bounded(SLICE_END if end is None else end, size)
    if first is None or last is None:
        return None
    length = difference(last, first)
    if isinstance(length, int):
        length = max(length, 0)
    dimension = (length if step == 1 else ceiling_divide(length, step), product((base.strides[dim], step)))
    return _layout(_replaced(base, dim, dimension), _moved(base, dim, first))


def _bounded(position: Size, size: Size) -> Size | None:
    """Returns a position of a slice that counts from the start of the dimension; None if that is not known."""
    if not isinstance(position, int):
        return position
    if position >= SLICE_END:
        return size
    if isinstance(size, int):
        return min(max(position + size, 0) if position < 0 else position, size)
    return total((size, position)) if position < 0 else position


def _selected(base: StridedLayout, dim: int, index: Size) -> StridedLayout | None:
    if not base.sizes:
        return None
    dim %= len(base.sizes)
    size = base.sizes[dim]
    if isinstance(index, int) and isinstance(size, int) and not -size <= index < size:
        return None
    position = total((size, index)) if isinstance(index, int) and index < 0 else index
    return _layout(_replaced(base, dim), _moved(base, dim, position))


def _diagonal(base: StridedLayout, distance: int, first: int, second: int) -> StridedLayout | None:
    rank = len(base.sizes)
    if rank < 2 or first % rank == second % rank:
        return None
    first, second = first % rank, second % rank
    rows, columns = base.sizes[first], base.sizes[second]
    if isinstance(rows, int) and isinstance(columns, int):
        size: Size = min(rows, columns - distance) if distance >= 0 else min(rows + distance, columns)
    elif distance == 0 and is_equal(rows, columns):
        size = rows
    else:
        return None
    if isinstance(size, int) and size <= 0:
        return None
    others = [item for dim, item in enumerate(base.dimensions) if dim not in (first, second)]
    start = _moved(base, second if distance > 0 else first, abs(distance))
    return _layout([*others, (size, total((base.strides[first], base.strides[second])))], start)


def _unfolded(base: StridedLayout, dim: int, size: int, step: int) -> StridedLayout | None:
    if not base.sizes:
        return None
    dim %= len(base.sizes)
    length, stride = base.dimensions[dim]
    if not isinstance(length, int) or size > length or step < 1:
        return None
    windows = ((length - size) // step + 1, product((stride, step)))
    return _layout([*_replaced(base, dim, windows), (size, stride)], base.offset)


def _expanded(base: StridedLayout, sizes: Sequence[Size]) -> StridedLayout | None:
    added = len(sizes) - len(base.sizes)
    if added < 0:
        return None
    dimensions: list[_Dimension] = [(size, 0) for size in sizes[:added]]
    for (old, stride), new in zip(base.dimensions, sizes[added:], strict=True):
        if new == -1 or is_equal(old, new):
            dimensions.append((old, stride))
        elif old == 1:
            dimensions.append((new, 0))
        else:
            return None
    return _layout(dimensions, base.offset)


def _reshaped(base: StridedLayout, sizes: Sequence[Size]) -> StridedLayout | None:
    """Returns the layout of `view(sizes)`: each run of dimensions that are adjacent in memory is divided again."""
    if -1 in sizes:
        return None
    if 0 in base.sizes and 0 in sizes:
        return _layout([(size, 1) for size in sizes], base.offset)
    runs = coalesced(base.dimensions)
    strides: list[Size] = []
    inner: Size = 1  # the elements of the current run that later dimensions cover
    for size in reversed(sizes):
        stride = runs[-1][1] if runs else 1
        strides.append(product((stride, inner)))
        if size == 1:
            continue
        if not runs:
            return None
        inner = product((inner, size))
        if is_equal(inner, runs[-1][0]):
            runs.pop()
            inner = 1
        elif divide_exactly(runs[-1][0], inner) is None:
            return None
    if runs or inner != 1:
        return None
    return StridedLayout(tuple(sizes), tuple(reversed(strides)), base.offset)


def coalesced(dimensions: Sequence[_Dimension]) -> list[_Dimension]:
    """Returns the dimensions without those of size 1, each run of them that is adjacent in memory as one."""
    runs: list[_Dimension] = []  # from the last one
    for size, stride in reversed(dimensions):
        if size == 1:
            continue
        if runs and is_equal(stride, product(runs[-1])):
            runs[-1] = (product((runs[-1][0], size)), runs[-1][1])
        else:
            runs.append((size, stride))
    return runs[::-1]
