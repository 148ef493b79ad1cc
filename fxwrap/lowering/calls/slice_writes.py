"""Slices of a tensor that a graph overwrites, also slices of slices.

`slice_scatter`, `select_scatter`, `diagonal_scatter` and `as_strided_scatter` each overwrite a view of their operand.
Positions may be known only at run time: then a line checks them, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import IN_PLACE_VARIANTS
from fxwrap.lines import Assert, View
from fxwrap.lowering.builder import Builder, Fakes, FakeValue
from fxwrap.lowering.calls.copies import emit_copy_into, reuse_operand_memory
from fxwrap.symbolic import (
    Size,
    canonicalize,
    depends_on_data,
    diagonal_length,
    is_in_bounds,
    normalize_index,
    product,
    simplify_by_ranges,
    slice_length,
    slice_start,
    total,
)
from fxwrap.torch_compat import OpOverload, has_distinct_elements, symbol_bounds, symbol_expression
from fxwrap.wrapper_ir import TensorType, Value
from fxwrap.wrapper_ir.operators import operator_name

_aten = torch.ops.aten
_SELECT, _SLICE = _aten.select.int, _aten.slice.Tensor
_DIAGONAL, _STRIDED = _aten.diagonal.default, _aten.as_strided.default
_VIEW_OF: Mapping[object, OpOverload] = {
    _aten.select_scatter.default: _SELECT, _aten.slice_scatter.default: _SLICE,
    _aten.diagonal_scatter.default: _DIAGONAL, _aten.as_strided_scatter.default: _STRIDED,
}  # fmt: skip


@dataclass(frozen=True)
class SliceStep:
    """One view of a tensor.

    Fields:
        operator: the view operator.
        position: the dimension and the index of a select; the dimension, the start and the step of a slice; the offset
            and the dimensions of a diagonal; the sizes, the strides and the offset from the tensor's first element of
            an `as_strided`. Indices may be nodes, and count from the end where negative.
        shape_source: a node of the view's shape.
        end: the end of a slice.
    """

    operator: OpOverload
    position: tuple[Any, ...]
    shape_source: Node
    end: Any = None


@dataclass(frozen=True)
class SliceWrite:
    """A call that overwrites a view of `base`, after several view steps, with `source`.

    Without a source it overwrites the view with its own content. `parts` are calls that only this call uses. With
    `scatters`, the source is one of them: a call that writes a copy of the view at indirect indices.
    """

    base: Node
    view_steps: tuple[SliceStep, ...]
    source: Node | None
    parts: tuple[Node, ...] = ()
    scatters: bool = False


def match_slice_write(node: Node, fakes: Fakes) -> SliceWrite | None:
    """Returns the slice that a call overwrites in a copy of its first operand, or None for other calls."""
    view_steps: list[SliceStep] = []
    parts: list[Node] = []
    call = node
    while True:
        step = _match_view_step(call, fakes)
        if step is None:
            return None
        view_steps.append(step)
        source = step.shape_source
        inner = _match_view_step(source, fakes) if len(source.users) == 1 else None
        if inner is None or not _matches_step(source.args[0], step, call.args[0], fakes):
            break
        parts.append(source)
        call = source
    base = node.args[0]
    assert isinstance(base, Node)
    if _scatters_into_view(source, view_steps, base, fakes):
        return SliceWrite(base, tuple(view_steps), source, (*parts, source), scatters=True)
    copied = source.args[1] if source.target is _aten.copy.default and len(source.users) == 1 else source
    if not _is_view_through(copied, view_steps, base, fakes):
        return SliceWrite(base, tuple(view_steps), source, tuple(parts))
    return SliceWrite(base, tuple(view_steps), None, (*parts, *([source] if copied is not source else [])))


def _scatters_into_view(source: Node, view_steps: Sequence[SliceStep], base: Node, fakes: Fakes) -> bool:
    """Whether a node that only a slice write uses writes a copy of the view: `x[0].index_copy_(...)`."""
    if not isinstance(source.target, OpOverload) or operator_name(source.target) not in IN_PLACE_VARIANTS:
        return False
    return len(source.users) == 1 and _is_view_through(source.args[0], view_steps, base, fakes)


def _is_view_through(view: object, view_steps: Sequence[SliceStep], base: Node, fakes: Fakes) -> bool:
    """Whether a node is the view of `base` after these steps: `x[i] += y` ends with a write of `x[i]` to itself."""
    for step in reversed(view_steps):
        if not isinstance(view, Node) or not view.args or not _matches_step(view, step, view.args[0], fakes):
            return False
        view = view.args[0]
    return view is base


def _match_view_step(node: Node, fakes: Fakes) -> SliceStep | None:
    """Returns the view that a call overwrites, by its own arguments; None for other calls."""
    view = _VIEW_OF.get(node.target)
    if view is None or node.kwargs or len(node.args) < 2:
        return None
    base_node, source_node = node.args[:2]
    if not isinstance(base_node, Node) or not isinstance(source_node, Node):
        return None
    base, source = fakes.get(base_node), fakes.get(source_node)
    if not isinstance(base, torch.Tensor) or not isinstance(source, torch.Tensor) or source.dtype != base.dtype:
        return None
    position = _position(node, view, 2, base)
    end = _argument(node, 4, None) if view is _SLICE else None
    if position is None or not all(_is_static_or_index(item, fakes) for item in (*position, end) if item is not None):
        return None
    return SliceStep(view, position, source_node, end)


def _position(node: Node, view: OpOverload, first: int, base: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns the position of a view whose arguments start at number `first`; None if it is not supported."""
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
    return _strided_position(tuple(sizes), tuple(strides), offset, base)


def _strided_position(
    sizes: tuple[Any, ...], strides: tuple[Any, ...], offset: object, base: torch.Tensor
) -> tuple[Any, ...] | None:
    """Returns the position of an `as_strided` if it is static, within the base and without overlaps."""
    first: Any = base.storage_offset()
    numbers = (*sizes, *strides, *base.shape, *base.stride(), first, 0 if offset is None else offset)
    if not all(type(item) is int for item in numbers):
        return None
    start = 0 if offset is None else offset - first
    within = start >= 0 and start + _last_offset(sizes, strides) <= _last_offset(base.shape, base.stride())
    is_valid = within and 0 not in (*sizes, *base.shape) and has_distinct_elements(sizes, strides)
    return (sizes, strides, start) if is_valid else None


def _last_offset(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the offset of a tensor's last element from its first one."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _argument(node: Node, position: int, default: object) -> Any:
    return node.args[position] if position < len(node.args) else default


def _is_static_or_index(item: object, fakes: Fakes) -> bool:
    return isinstance(_fake(item, fakes), int | tuple | torch.SymInt)


def _fake(item: object, fakes: Fakes) -> FakeValue:
    return fakes.get(item) if isinstance(item, Node) else item


def _matches_step(view: object, step: SliceStep, base: object, fakes: Fakes) -> bool:
    """Whether a node is the view of `base` at a step."""
    if not isinstance(view, Node) or view.target is not step.operator or view.args[0] is not base or view.kwargs:
        return False
    return _position(view, step.operator, 1, fakes[base]) == step.position  # type: ignore[index]


# --- types and checks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResolvedSlice:
    """The type of a slice of a tensor, with its offset in the same root, and the checks of its position."""

    type: TensorType
    checks: tuple[Assert, ...]


def resolve_slice(builder: Builder, type_: TensorType, write: SliceWrite) -> ResolvedSlice:
    """Returns the slice of a tensor of a type.

    Positions that the graph's guards cover need no check; a check of any other raises the same error as eager mode.
    """
    resolver = _SliceResolver(builder, list(type_.sizes), list(type_.strides), type_.storage_offset)
    for step in write.view_steps:
        resolver.apply(step)
    sizes, strides = tuple(resolver.sizes), tuple(resolver.strides)
    resolved = TensorType(type_.dtype, sizes, strides, type_.device, resolver.offset)
    return ResolvedSlice(resolved, tuple(resolver.checks))


@dataclass
class _SliceResolver:
    """A view of a tensor, as sizes, strides and offset in its root, and the checks of positions in it."""

    builder: Builder
    sizes: list[Size]
    strides: list[Size]
    offset: Size
    checks: list[Assert] = field(default_factory=list)

    def apply(self, step: SliceStep) -> None:
        """Replaces the view by a view of it."""
        shape = self.builder.fakes[step.shape_source].shape
        if step.operator is _STRIDED:
            sizes, strides, offset = step.position
            self.sizes, self.strides, self.offset = [*sizes], [*strides], total((self.offset, offset))
        elif step.operator is _DIAGONAL:
            self._take_diagonal(self.builder.symbols.size(shape[-1]), *step.position)
        elif step.operator is _SELECT:
            self._select(*step.position)
        else:
            dim, index, stride = step.position
            self._slice(dim, index, step.end, stride, self.builder.symbols.size(shape[dim]))

    def _take_diagonal(self, count: Size, diagonal: int, one: int, other: int) -> None:
        length = diagonal_length(self.sizes[one], self.sizes[other], diagonal)
        if _may_differ(length, count):
            self.checks.append(_check_length(length, count, "the diagonal", None))
        self._move(abs(diagonal), other if diagonal > 0 else one)
        stride = total((self.strides[one], self.strides[other]))
        dims = [dim for dim in range(len(self.sizes)) if dim not in (one, other)]
        self.sizes = [*[self.sizes[dim] for dim in dims], count]
        self.strides = [*[self.strides[dim] for dim in dims], stride]

    def _select(self, dim: int, index: object) -> None:
        position = _size(self.builder, index)
        may_lack = isinstance(index, int) and self.builder.symbols.may_lack(self.sizes[dim], index)
        if may_lack or not _is_guarded(self.builder, index):
            message = f"select(): index out of range for dimension {dim}"
            self.checks.append(Assert(is_in_bounds(position, self.sizes[dim]), message, "IndexError", position))
        self._move(normalize_index(position, self.sizes[dim]), dim)
        del self.sizes[dim], self.strides[dim]

    def _slice(self, dim: int, index: object, end: object, stride: int, count: Size) -> None:
        position = _size(self.builder, index)
        start = simplify_by_ranges(slice_start(position, self.sizes[dim]), self.builder.symbols.program.infos)
        length = slice_length(start, None if end is None else _size(self.builder, end), stride, self.sizes[dim])
        if not _is_guarded(self.builder, index) or _may_differ(length, count):
            self.checks.append(_check_length(length, count, f"dimension {dim} at that position", position))
        self._move(start, dim)
        self.sizes[dim], self.strides[dim] = count, product((self.strides[dim], stride))

    def _move(self, distance: Size, dim: int) -> None:
        """Moves the first element along a dimension."""
        self.offset = total((self.offset, product((distance, self.strides[dim]))))


def _may_differ(length: Size, count: Size) -> bool:
    """Whether the difference of two sizes, which guards say are equal, depends on data."""
    return depends_on_data(total((length, product((count, -1)))))


def _check_length(length: Size, count: Size, where: str, position: Size | None) -> Assert:
    condition = canonicalize(sympy.Eq(length, count, evaluate=False))
    return Assert(condition, f"the source does not fit into {where}", "RuntimeError", position)


def _size(builder: Builder, index: object) -> Size:
    return builder.symbols.expression(_fake(index, builder.fakes))


def _is_guarded(builder: Builder, index: object) -> bool:
    """Whether an index is static, or a backed number with a lower bound of at least 0."""
    fake = _fake(index, builder.fakes)
    if not isinstance(fake, torch.SymInt):
        return True
    lower, _ = symbol_bounds(fake)
    if lower is None or lower < 0:
        return False
    return all(symbol.name.startswith("s") for symbol in symbol_expression(fake).free_symbols)


# --- lines ------------------------------------------------------------------------------------------------------------


def emit_slice_view(builder: Builder, node: Node, base: Value, write: SliceWrite) -> Value:
    """Emits the checks and the view of a slice; returns the view."""
    resolved, origin = resolve_slice(builder, base.tensor_type, write), builder.origin(node)
    for check in resolved.checks:
        builder.emit(replace(check, origin=origin))
    if resolved.type == base.type:
        return base
    value = builder.add_alias(f"{node.name}_window", resolved.type, base)
    builder.emit(View(value, base, origin=origin))
    return value


def lower_slice_write(builder: Builder, node: Node, fake: FakeValue, dead_roots: Collection[str]) -> bool:
    """Emits a slice write whose base may be overwritten; returns whether it did.

    `dead_roots` are the names of the roots that the program owns and that nothing uses after the call.
    """
    step = _match_view_step(node, builder.fakes)
    if step is None:
        return False
    base_node = node.args[0]
    assert isinstance(base_node, Node)
    base, source = builder.value(base_node), builder.value(step.shape_source)
    target = reuse_operand_memory(builder, base, fake, dead_roots, {builder.storages.root(source).name})
    if target is None:
        return False
    view = emit_slice_view(builder, node, target, SliceWrite(base_node, (step,), step.shape_source))
    emit_copy_into(builder, view, source, builder.origin(node))
    builder.env[node] = target
    return True
