"""Slices of a tensor that a graph overwrites: `slice_scatter` and `select_scatter`, also one within another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.lowering.builder import Builder
from fxwrap.symbolic import minimum, product, total
from fxwrap.torch_compat import symbol_bounds
from fxwrap.wrapper_ir import Size, TensorType

_SELECT, _SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor
_VIEW_OF: Mapping[Any, Any] = {
    torch.ops.aten.select_scatter.default: _SELECT, torch.ops.aten.slice_scatter.default: _SLICE
}  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """One step into a tensor: the view `operator` of dimension `dim` from `start` on, `step` elements apart.

    `shown` is a node that is as large as what is left; starts may be nodes, and count from the end where negative.
    """

    operator: Any
    dim: int
    start: Any
    step: int
    shown: Node


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
    """Returns the slice that a call replaces in a copy of its first operand, or None where it is no such call.

    Also None where nothing known bounds the position: the operator itself would have to check it.
    """
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
    """Returns what a call replaces, by its own arguments; None where it is another call, or the position is unknown."""
    view = _VIEW_OF.get(node.target)
    if view is None or node.kwargs or len(node.args) < 2 or not all(isinstance(item, Node) for item in node.args[:2]):
        return None
    base, source = fakes.get(node.args[0]), fakes.get(node.args[1])  # type: ignore[arg-type]
    if not isinstance(base, torch.Tensor) or not isinstance(source, torch.Tensor) or source.dtype != base.dtype:
        return None
    start, step = _position(node, view, 2)
    if not isinstance(step, int) or not _is_bounded(start, fakes):
        return None
    return Cut(view, _argument(node, 2, 0) % max(base.dim(), 1), start, step, node.args[1])  # type: ignore[arg-type]


def _position(node: Node, view: Any, first: int) -> tuple[Any, Any]:
    """Returns start and step of a call whose arguments from number `first` on are those of a view."""
    if view is _SELECT:
        return _argument(node, first + 1, 0), 1
    start = _argument(node, first + 1, None)
    return 0 if start is None else start, _argument(node, first + 3, 1)


def _argument(node: Node, position: int, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else default


def _is_bounded(start: Any, fakes: Mapping[Node, Any]) -> bool:
    """Whether a position is a number, or one of those that a graph was guarded for."""
    found = fakes.get(start) if isinstance(start, Node) else start
    if not isinstance(found, torch.SymInt):
        return isinstance(found, int)
    lower, _ = symbol_bounds(found)
    return lower is not None and lower >= 0 and all(item.name.startswith("s") for item in found.node.expr.free_symbols)


def _is_that(view: Any, cut: Cut, base: Any, fakes: Mapping[Any, Any]) -> bool:
    """Whether a node is the view of `base` that a cut is."""
    if not isinstance(view, Node) or view.target is not cut.operator or view.args[0] is not base or view.kwargs:
        return False
    dim = _argument(view, 1, 0) % max(int(fakes[base].dim()), 1)
    return dim == cut.dim and _position(view, cut.operator, 1) == (cut.start, cut.step)


def window_type(builder: Builder, type_: TensorType, window: Window) -> TensorType:
    """Returns the type of a window on a tensor of a type, its offset in the same root."""
    sizes, strides, offset = list(type_.sizes), list(type_.strides), type_.storage_offset
    for cut in window.cuts:
        start = _from_front(builder, cut.start, sizes[cut.dim])
        if cut.operator is _SELECT:
            offset = total((offset, product((start, strides[cut.dim]))))
            del sizes[cut.dim], strides[cut.dim]
        else:
            offset = total((offset, product((minimum(start, sizes[cut.dim]), strides[cut.dim]))))
            sizes[cut.dim] = builder.size(builder.fakes[cut.shown].shape[cut.dim])
            strides[cut.dim] = product((strides[cut.dim], cut.step))
    return TensorType(type_.dtype, tuple(sizes), tuple(strides), type_.device, offset)


def _from_front(builder: Builder, start: Any, size: Size) -> Size:
    """Returns a position counted from the front."""
    found = builder.expression(builder.fakes[start] if isinstance(start, Node) else start)
    if isinstance(found, int):
        return found if found >= 0 else total((size, found))
    return found
