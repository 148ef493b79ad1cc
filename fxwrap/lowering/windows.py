"""Slices of a tensor that a graph overwrites, also one within another.

`slice_scatter`, `select_scatter`, `diagonal_scatter` and `as_strided_scatter` each put a tensor where a view of their
operand is. Positions may be numbers that are known when the program runs: a line checks them then, as eager does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.lines import Assert, Mutate, View
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.copies import taken_over
from fxwrap.lowering.slices import from_front, is_within, slice_count, slice_start
from fxwrap.symbolic import canonical, product, total
from fxwrap.torch_compat import symbol_bounds
from fxwrap.wrapper_ir import TensorType, Value

_aten = torch.ops.aten
_SELECT, _SLICE = _aten.select.int, _aten.slice.Tensor
_DIAGONAL, _STRIDED = _aten.diagonal.default, _aten.as_strided.default
_VIEW_OF: Mapping[Any, Any] = {
    _aten.select_scatter.default: _SELECT, _aten.slice_scatter.default: _SLICE,
    _aten.diagonal_scatter.default: _DIAGONAL, _aten.as_strided_scatter.default: _STRIDED,
}  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """One step into a tensor: a view of it.

    Fields: `operator` of the view; `place` says where it is: dimension and index of a select; dimension, start and step
    of a slice; offset and dimensions of a diagonal; sizes, strides and offset from the tensor's first element of
    any other window. `end` is that of a slice. Positions may be nodes, and count from the end where negative. `shown`
    is a node that is as large as what is left.
    """

    operator: Any
    place: tuple[Any, ...]
    shown: Node
    end: Any = None


@dataclass(frozen=True)
class Window:
    """What a call overwrites of `base`: cut by cut, with `source`. `parts` are calls that only this one is made of.

    Without `source` it is overwritten with what is there.
    """

    base: Node
    cuts: tuple[Cut, ...]
    source: Node | None
    parts: tuple[Node, ...] = ()


def overwritten_window(node: Node, fakes: Mapping[Node, Any]) -> Window | None:
    """Returns the slice that a call replaces in a copy of its first operand, or None where it is no such call."""
    cuts: list[Cut] = []
    parts: list[Node] = []
    call = node
    while True:
        cut = _cut(call, fakes)
        if cut is None:
            return None
        cuts.append(cut)
        source = cut.shown
        inner = _cut(source, fakes) if len(source.users) == 1 else None
        if inner is None or not _is_that(source.args[0], cut, call.args[0], fakes):
            break
        parts.append(source)
        call = source
    base = node.args[0]
    assert isinstance(base, Node)
    copied = source.args[1] if source.target is torch.ops.aten.copy.default and len(source.users) == 1 else source
    if not _shows(copied, cuts, base, fakes):
        return Window(base, tuple(cuts), source, tuple(parts))
    return Window(base, tuple(cuts), None, (*parts, *([source] if copied is not source else [])))


def _shows(view: Any, cuts: Sequence[Cut], base: Node, fakes: Mapping[Node, Any]) -> bool:
    """Whether a node is the view of `base` that these cuts lead to: `x[i] += y` ends by putting a slice where it is."""
    for cut in reversed(cuts):
        if not isinstance(view, Node) or not view.args or not _is_that(view, cut, view.args[0], fakes):
            return False
        view = view.args[0]
    return view is base


def _cut(node: Node, fakes: Mapping[Node, Any]) -> Cut | None:
    """Returns what a call replaces, by its own arguments; None where it is another call."""
    view = _VIEW_OF.get(node.target)
    if view is None or node.kwargs or len(node.args) < 2 or not all(isinstance(item, Node) for item in node.args[:2]):
        return None
    base, source = fakes.get(node.args[0]), fakes.get(node.args[1])  # type: ignore[arg-type]
    if not isinstance(base, torch.Tensor) or not isinstance(source, torch.Tensor) or source.dtype != base.dtype:
        return None
    place = _place(node, view, 2, base)
    end = _argument(node, 4, None) if view is _SLICE else None
    if place is None or not all(_is_position(item, fakes) for item in (*place, end) if item is not None):
        return None
    return Cut(view, place, node.args[1], end)  # type: ignore[arg-type]


def _place(node: Node, view: Any, first: int, base: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns where a view is whose arguments begin at number `first` of a call's; None where nothing is made of it."""
    rank = max(base.dim(), 1)
    if view is _SELECT:
        return _argument(node, first, 0) % rank, _argument(node, first + 1, 0)
    if view is _SLICE:
        start, step = _argument(node, first + 1, None), _argument(node, first + 3, 1)
        return (_argument(node, first, 0) % rank, 0 if start is None else start, step) if type(step) is int else None
    if view is _DIAGONAL:
        diagonal = [_argument(node, first + number, default) for number, default in enumerate((0, 0, 1))]
        return (diagonal[0], diagonal[1] % rank, diagonal[2] % rank) if type(diagonal[0]) is int else None
    sizes, strides, offset = (_argument(node, first + number, None) for number in range(3))
    return _strided_place(tuple(sizes), tuple(strides), offset, base)


def _strided_place(
    sizes: tuple[Any, ...], strides: tuple[Any, ...], offset: Any, base: torch.Tensor
) -> tuple[Any, ...] | None:
    """Returns where an `as_strided` is, from the base's first element, if it is within the base and shows all once."""
    begins: Any = base.storage_offset()
    numbers = (*sizes, *strides, *base.shape, *base.stride(), begins, 0 if offset is None else offset)
    if not all(type(item) is int for item in numbers):
        return None
    start = 0 if offset is None else offset - begins
    within = start >= 0 and start + _last(sizes, strides) <= _last(base.shape, base.stride())
    if 0 in (*sizes, *base.shape) or not within:
        return None
    reached = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= reached:
            return None
        reached += (size - 1) * stride
    return sizes, strides, start


def _last(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the place of a tensor's last element from its first one."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _argument(node: Node, position: int, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else default


def _is_position(item: Any, fakes: Mapping[Node, Any]) -> bool:
    found = fakes.get(item) if isinstance(item, Node) else item
    return isinstance(found, int | tuple | torch.SymInt)


def _is_that(view: Any, cut: Cut, base: Any, fakes: Mapping[Any, Any]) -> bool:
    """Whether a node is the view of `base` that a cut is."""
    if not isinstance(view, Node) or view.target is not cut.operator or view.args[0] is not base or view.kwargs:
        return False
    return _place(view, cut.operator, 1, fakes[base]) == cut.place


# --- types and checks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A window on a tensor of the program: its type, with its offset in the same root, and what must be checked."""

    type: TensorType
    checks: tuple[Assert, ...]


def place_window(builder: Builder, type_: TensorType, window: Window) -> Placed:
    """Returns where a window on a tensor of a type is.

    What a graph was guarded for needs no check; of other positions one says what eager does.
    """
    sizes, strides, offset = list(type_.sizes), list(type_.strides), type_.storage_offset
    checks: list[Assert] = []
    for cut in window.cuts:
        if cut.operator is _STRIDED:
            sizes, strides, offset = [*cut.place[0]], [*cut.place[1]], total((offset, cut.place[2]))
        elif cut.operator is _DIAGONAL:
            diagonal, one, other = cut.place
            offset = total((offset, product((abs(diagonal), strides[other if diagonal > 0 else one]))))
            step = total((strides[one], strides[other]))
            shown = builder.fakes[cut.shown]
            kept = [dim for dim in range(len(sizes)) if dim not in (one, other)]
            sizes = [*[sizes[dim] for dim in kept], builder.size(shown.shape[-1])]
            strides = [*[strides[dim] for dim in kept], step]
        elif cut.operator is _SELECT:
            dim, given = cut.place
            position = _number(builder, given)
            if not _is_bounded(builder, given):
                what = f"select(): index out of range for dimension {dim}"
                checks.append(Assert(is_within(position, sizes[dim]), what, "IndexError", position))
            offset = total((offset, product((from_front(position, sizes[dim]), strides[dim]))))
            del sizes[dim], strides[dim]
        else:
            dim, given, step = cut.place
            position, count = _number(builder, given), builder.size(builder.fakes[cut.shown].shape[dim])
            start = slice_start(position, sizes[dim])
            if not _is_bounded(builder, given):
                end = None if cut.end is None else _number(builder, cut.end)
                found = slice_count(start, end, step, sizes[dim])
                what = f"what is put into dimension {dim} does not fit at that position"
                condition = canonical(sympy.Eq(found, count, evaluate=False))
                checks.append(Assert(condition, what, "RuntimeError", position))
            offset = total((offset, product((start, strides[dim]))))
            sizes[dim], strides[dim] = count, product((strides[dim], step))
    return Placed(TensorType(type_.dtype, tuple(sizes), tuple(strides), type_.device, offset), tuple(checks))


def _number(builder: Builder, position: Any) -> Any:
    return builder.expression(builder.fakes[position] if isinstance(position, Node) else position)


def _is_bounded(builder: Builder, position: Any) -> bool:
    """Whether a position is a number, or one of those that a graph was guarded for."""
    found = builder.fakes[position] if isinstance(position, Node) else position
    if not isinstance(found, torch.SymInt):
        return True
    lower, _ = symbol_bounds(found)
    return lower is not None and lower >= 0 and all(item.name.startswith("s") for item in found.node.expr.free_symbols)


# --- lines ------------------------------------------------------------------------------------------------------------


def emit_window(builder: Builder, node: Node, base: Value, window: Window) -> Value:
    """Emits the checks and the view of a window on the memory of a value; returns what shows it."""
    placed, origin = place_window(builder, base.tensor_type, window), builder.origin(node)
    for check in placed.checks:
        builder.emit(replace(check, origin=origin))
    if placed.type == base.type:
        return base
    value = Value(builder.unique(f"{node.name}_window"), placed.type)
    builder.root_of[value.name] = builder.root_of[base.name]
    builder.emit(View(value, base, origin=origin))
    return value


def lower_window(builder: Builder, node: Node, fake: Any, dying: Collection[str]) -> bool:
    """Emits a call that puts a tensor in the place of a slice, where its base's memory may be written; says whether.

    `dying` are the roots, by name, that the program owns and that nothing touches after the call.
    """
    cut = _cut(node, builder.fakes)
    if cut is None:
        return False
    base, source = (builder.env[item] for item in node.all_input_nodes[:2])
    target = taken_over(builder, base, fake, dying, {builder.root_of[source.name].name})
    if target is None:
        return False
    window = emit_window(builder, node, target, Window(node.args[0], (cut,), cut.shown))  # type: ignore[arg-type]
    origin = builder.origin(node)
    builder.emit(Mutate((), "aten.copy_.default", (window, source), (window,), origin=origin))
    builder.env[node] = target
    return True
