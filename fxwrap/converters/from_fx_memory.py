"""Nodes that make, rename and window memory, read back."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.converters import from_fx_calls
from fxwrap.converters.from_fx_numbers import storage_offset
from fxwrap.converters.from_fx_reader import Reader, Table, origin_of
from fxwrap.lines import Alloc, Call, Pool, PoolSlice, Reuse, View, Workspace
from fxwrap.symbolic import Size, make_symbol, product, total
from fxwrap.torch_compat import is_plain_view
from fxwrap.wrapper_ir import TensorType, Value, contiguous_strides

_ATEN, _OURS = torch.ops.aten, torch.ops.fxwrap


# --- memory -----------------------------------------------------------------------------------------------------------


def _made(reader: Reader, node: Node, made: Any, type_: TensorType) -> TensorType:
    """Returns the type of new memory, with the memory space and layout that it had where it is the same otherwise."""
    hint = reader.hint(node, made)
    known = hint.result.type if hint is not None else None
    if isinstance(known, TensorType) and replace(type_, memory_space=known.memory_space, layout=known.layout) == known:
        return known
    return type_


def _alloc(reader: Reader, node: Node) -> None:
    given = dict(node.kwargs)
    dtype, device = given.pop("dtype", None), given.pop("device", None)
    if len(node.args) != 2 or not isinstance(dtype, torch.dtype) or device is None or any(given.values()):
        from_fx_calls.call(reader, node)
        return
    sizes, strides = (reader.argument(node, item) for item in node.args)
    type_ = _made(reader, node, Alloc, TensorType(dtype, sizes, strides, torch.device(device)))  # type: ignore[arg-type]
    value = reader.value(node.name, type_)
    reader.make(Alloc(value, origin=origin_of(node)), node, value)


def _reuse(reader: Reader, node: Node) -> None:
    root = reader.tensor(node, node.args[0])
    sizes, strides, dtype = (reader.argument(node, item) for item in node.args[1:])
    old = root.tensor_type
    type_ = TensorType(dtype, sizes, strides, old.device, 0, old.memory_space)
    value = reader.value(node.name, _made(reader, node, Reuse, type_))
    reader.make(Reuse(value, root, origin=origin_of(node)), node, value)
    reader.take(node, root)


def _bytes(size: Any, device: Any) -> TensorType:
    return TensorType(torch.uint8, (size,), (1,), torch.device(device))


def _pool(reader: Reader, node: Node) -> None:
    size, device = (reader.argument(node, item) for item in node.args)
    value = reader.value(node.name, _made(reader, node, Pool, _bytes(size, device)))
    reader.make(Pool(value, origin=origin_of(node)), node, value)


def _workspace(reader: Reader, node: Node) -> None:
    size, zeroed, device = (reader.argument(node, item) for item in node.args)
    value = reader.value(node.name, _made(reader, node, Workspace, _bytes(size, device)))
    reader.make(Workspace(value, zeroed, origin=origin_of(node)), node, value)


def _pool_slice(reader: Reader, node: Node) -> None:
    pool = reader.tensor(node, node.args[0])
    offset, sizes, strides, dtype = (reader.argument(node, item) for item in node.args[1:])
    type_ = TensorType(dtype, sizes, strides, pool.tensor_type.device, 0, pool.tensor_type.memory_space)
    value = reader.value(node.name, _made(reader, node, PoolSlice, type_))
    reader.make(PoolSlice(value, pool, offset, origin=origin_of(node)), node, value)


# --- views ------------------------------------------------------------------------------------------------------------


def _view(reader: Reader, node: Node) -> None:
    """Reads one of the overloads that views are written as; by arithmetic alone where its arguments are as written."""
    is_call = reader.hint(node, Call) is not None
    if is_call or node.kwargs or _is_symbolic_select(reader, node) or not _is_plain(node):
        from_fx_calls.call(reader, node)
        return
    base = reader.tensor(node, node.args[0])
    arguments = [reader.argument(node, item) for item in node.args[1:]]
    type_ = _FORMS[node.target](base.tensor_type, *arguments) if _WHOLE[node.target](arguments) else None
    if type_ is None:
        type_ = from_fx_calls.window_type(reader, node, base)
    value = reader.value(node.name, type_)
    reader.make(View(value, base, origin=origin_of(node)), node, value)


def _is_plain(node: Node) -> bool:
    """Whether the metadata says nothing of conjugate or negative bits, which the type of a view does not have."""
    val, operand = node.meta.get("val"), node.args[0]
    base = operand.meta.get("val") if isinstance(operand, Node) else None
    if not isinstance(val, torch.Tensor) or not isinstance(base, torch.Tensor) or val.dtype != base.dtype:
        return True
    return is_plain_view(val, base) and not val.is_conj() and not val.is_neg()


def _is_symbolic_select(reader: Reader, node: Node) -> bool:
    """Whether it takes an element at a place that only a run knows: eager checks it, so it is a call."""
    if node.target is not _ATEN.select.int or len(node.args) < 3:
        return False
    return isinstance(reader.argument(node, node.args[2]), sympy.Basic)


def _as_strided(reader: Reader, node: Node) -> None:
    if reader.hint(node, Call) is not None or node.kwargs or len(node.args) < 3:
        from_fx_calls.call(reader, node)
        return
    base = reader.tensor(node, node.args[0])
    sizes, strides = (reader.argument(node, item) for item in node.args[1:3])
    offset = _offset_in_root(reader, node, base)
    type_ = replace(base.tensor_type, sizes=sizes, strides=strides, storage_offset=offset)
    value = reader.value(node.name, type_)
    reader.make(View(value, base, origin=origin_of(node)), node, value)


def _offset_in_root(reader: Reader, node: Node, base: Value) -> Size:
    """Returns where a window starts in its root: torch counts from the start of the storage, the IR from the root."""
    own = base.tensor_type.storage_offset
    place = node.args[3] if len(node.args) > 3 else None
    if place is None:
        return own
    if isinstance(place, Node) and place.target is operator.add and _is_offset_of(place.args[0], node.args[0]):
        return total((own, reader.argument(node, place.args[1])))
    if _is_offset_of(place, node.args[0]):
        return own
    start = reader.argument(node, place)
    root = reader.root_of[base.name]
    if root not in reader.given:
        return start  # what the program makes itself starts where its storage does
    known = reader.sizes.get((root, "storage_offset", 0))
    if known is None:
        info = reader.shared.symbols.fresh("n")
        reader.emit(reader.size_line(info, reader.given[root], 0, "storage_offset", node), node)
        known = make_symbol(info.name)
    return total((start, product((known, -1))))


def _is_offset_of(item: Any, base: Any) -> bool:
    return isinstance(item, Node) and item.target is _ATEN.sym_storage_offset.default and item.args[0] is base


def _storage_offset(reader: Reader, node: Node) -> None:
    """Reads a storage offset: a line of its own, unless it only says where windows start."""
    places = [user for user in node.users if user.target is operator.add and user.args[0] is node]
    if "fxwrap_symbol" not in node.meta and _only_places_windows(node, places):
        reader.env[node] = None
        reader.absorbed.update(places)
        return
    storage_offset(reader, node)


def _only_places_windows(node: Node, places: list[Node]) -> bool:
    base = node.args[0]
    for user in node.users:
        if user in places and "fxwrap_symbol" not in user.meta:
            if not all(_starts_at(window, user, base) for window in user.users):
                return False
        elif not _starts_at(user, node, base):
            return False
    return bool(node.users)


def _starts_at(window: Node, place: Node, base: Any) -> bool:
    return (
        window.target is _ATEN.as_strided.default and len(window.args) == 4
        and window.args[3] is place and window.args[0] is base
    )  # fmt: skip


# --- the types of views, where every argument is as the converter writes it -------------------------------------------


def _viewed(base: TensorType, sizes: tuple[Size, ...]) -> TensorType | None:
    if not base.is_contiguous:
        return None
    return replace(base, sizes=sizes, strides=contiguous_strides(sizes))


def _permuted(base: TensorType, order: tuple[int, ...]) -> TensorType:
    return replace(
        base, sizes=tuple([base.sizes[dim] for dim in order]), strides=tuple([base.strides[dim] for dim in order])
    )


def _expanded(base: TensorType, sizes: tuple[Size, ...]) -> TensorType:
    added = len(sizes) - len(base.sizes)
    strides = [0] * added + [
        0 if size == 1 and new != 1 else stride
        for size, stride, new in zip(base.sizes, base.strides, sizes[added:], strict=True)
    ]
    return replace(base, sizes=sizes, strides=tuple(strides))


def _sliced(base: TensorType, dim: int, start: int, end: int, _step: int) -> TensorType | None:
    size = base.sizes[dim]
    if not isinstance(size, int) or end > size:
        return None
    sizes = (*base.sizes[:dim], end - start, *base.sizes[dim + 1 :])
    offset = total((base.storage_offset, product((start, base.strides[dim]))))
    return replace(base, sizes=sizes, storage_offset=offset)


def _selected(base: TensorType, dim: int, index: int) -> TensorType | None:
    size = base.sizes[dim]
    if not isinstance(size, int) or index >= size:
        return None
    offset = total((base.storage_offset, product((index, base.strides[dim]))))
    sizes, strides = (items[:dim] + items[dim + 1 :] for items in (base.sizes, base.strides))
    return replace(base, sizes=sizes, strides=strides, storage_offset=offset)


def _all_natural(items: Any) -> bool:
    return all(isinstance(item, sympy.Basic) or (type(item) is int and item >= 0) for item in items)


_FORMS: dict[Any, Any] = {
    _ATEN.view.default: _viewed,
    _ATEN.permute.default: _permuted,
    _ATEN.expand.default: _expanded,
    _ATEN.slice.Tensor: _sliced,
    _ATEN.select.int: _selected,
}

_WHOLE: dict[Any, Any] = {
    _ATEN.view.default: lambda arguments: _all_natural(arguments[0]),
    _ATEN.permute.default: lambda arguments: _all_natural(arguments[0]),
    _ATEN.expand.default: lambda arguments: _all_natural(arguments[0]),
    _ATEN.slice.Tensor: lambda arguments: len(arguments) == 4
    and all(type(item) is int and item >= 0 for item in arguments)
    and arguments[3] == 1 and arguments[2] >= arguments[1],
    _ATEN.select.int: lambda arguments: all(type(item) is int and item >= 0 for item in arguments),
}  # fmt: skip
"""Whether a view's arguments are written out: no size of -1, no place that counts from the end."""

MEMORY: Table = {
    _ATEN.empty_strided.default: _alloc,
    _OURS.reuse.default: _reuse,
    _OURS.pool.default: _pool,
    _OURS.pool_slice.default: _pool_slice,
    _OURS.workspace.default: _workspace,
    _ATEN.as_strided.default: _as_strided,
    _ATEN.sym_storage_offset.default: _storage_offset,
    **dict.fromkeys(_FORMS, _view),
}
