"""Import of nodes that allocate, reuse and view memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fxwrap.converters.from_fx.calls import import_operator_call, infer_view_type
from fxwrap.converters.from_fx.functional import copy_operand, import_view_scatter
from fxwrap.converters.from_fx.graph_importer import GraphImporter, NodeImporters
from fxwrap.converters.from_fx.numbers import import_storage_offset
from fxwrap.converters.view_operators import VIEW_OVERLOADS, returns_view, view_operator
from fxwrap.lines import Alloc, ExternCall, Pool, PoolSlice, Reuse, View, Workspace
from fxwrap.symbolic import Size, make_symbol, product, total
from fxwrap.torch_compat import is_plain_view
from fxwrap.wrapper_ir import TensorType, Value, symmetric_space

_ATEN, _FXWRAP = torch.ops.aten, torch.ops.fxwrap


# --- memory -----------------------------------------------------------------------------------------------------------


def _new_value(
    importer: GraphImporter,
    node: Node,
    line_class: type[Alloc | Reuse | Pool | PoolSlice | Workspace],
    type_: TensorType,
) -> Value:
    """Returns the value of new memory, in the memory space and layout of the original line if its type agrees."""
    line = importer.original_line(node, line_class)
    known = line.result.type if line is not None else None
    if isinstance(known, TensorType) and replace(type_, memory_space=known.memory_space, layout=known.layout) == known:
        type_ = known
    return importer.value(node.name, type_)


def _alloc(importer: GraphImporter, node: Node) -> None:
    keywords = dict(node.kwargs)
    dtype, device = keywords.pop("dtype", None), keywords.pop("device", None)
    is_plain = len(node.args) == 2 and isinstance(dtype, torch.dtype) and isinstance(device, torch.device | str)
    if not is_plain or any(keywords.values()):
        import_operator_call(importer, node)
        return
    sizes, strides = (importer.argument(node, item) for item in node.args)
    type_ = TensorType(dtype, sizes, strides, torch.device(device))  # type: ignore[arg-type]
    value = _new_value(importer, node, Alloc, type_)
    importer.emit_definition(Alloc(value), node, value)


def _alloc_symmetric(importer: GraphImporter, node: Node) -> None:
    sizes, strides, dtype, device, group = (importer.argument(node, item) for item in node.args)
    space = symmetric_space(str(group))
    value = importer.value(node.name, TensorType(dtype, sizes, strides, torch.device(device), 0, space))
    importer.emit_definition(Alloc(value), node, value)


def _reuse(importer: GraphImporter, node: Node) -> None:
    root = importer.tensor(node, node.args[0])
    sizes, strides, dtype = (importer.argument(node, item) for item in node.args[1:])
    old = root.tensor_type
    value = _new_value(importer, node, Reuse, TensorType(dtype, sizes, strides, old.device, 0, old.memory_space))
    importer.emit_definition(Reuse(value, root), node, value)
    importer.consume(node, root)


def _byte_buffer_type(size: Size, device: torch.device | str) -> TensorType:
    return TensorType(torch.uint8, (size,), (1,), torch.device(device))


def _pool(importer: GraphImporter, node: Node) -> None:
    size, device = (importer.argument(node, item) for item in node.args)
    value = _new_value(importer, node, Pool, _byte_buffer_type(size, device))
    importer.emit_definition(Pool(value), node, value)


def _workspace(importer: GraphImporter, node: Node) -> None:
    size, zeroed, device = (importer.argument(node, item) for item in node.args)
    value = _new_value(importer, node, Workspace, _byte_buffer_type(size, device))
    importer.emit_definition(Workspace(value, zeroed), node, value)


def _pool_slice(importer: GraphImporter, node: Node) -> None:
    pool = importer.tensor(node, node.args[0])
    offset, sizes, strides, dtype = (importer.argument(node, item) for item in node.args[1:])
    type_ = TensorType(dtype, sizes, strides, pool.tensor_type.device, 0, pool.tensor_type.memory_space)
    value = _new_value(importer, node, PoolSlice, type_)
    importer.emit_definition(PoolSlice(value, pool, offset), node, value)


# --- views ------------------------------------------------------------------------------------------------------------


def _identity(importer: GraphImporter, node: Node) -> None:
    """Imports an alias as its operand. A detached one is no other: programs record no gradients."""
    if importer.original_line(node, ExternCall) is not None or node.kwargs or not _has_no_lazy_bits(node):
        import_operator_call(importer, node)
        return
    importer.env[node] = importer.tensor(node, node.args[0])


def _view(importer: GraphImporter, node: Node) -> None:
    """Imports an overload that views are emitted as."""
    if not _is_view_line(importer, node):
        import_operator_call(importer, node)
        return
    base = importer.tensor(node, node.args[0])
    value = importer.value(node.name, _original_type(importer, node, base) or infer_view_type(importer, node))
    _emit_view(importer, node, value, base)


def _is_view_line(importer: GraphImporter, node: Node) -> bool:
    """Whether a node becomes the line of a view, not a call of its operator."""
    is_call = importer.original_line(node, ExternCall) is not None
    return not (is_call or node.kwargs or _is_symbolic_select(importer, node) or not _has_no_lazy_bits(node))


def _emit_view(importer: GraphImporter, node: Node, value: Value, base: Value) -> None:
    """Adds the line of a view, or none if it is a step of a chain: the other views are views of its base."""
    line = View(value, importer.folded_views.get(base.name, base))
    if _is_chain_step(importer, node):
        importer.folded_views[value.name] = line.base
        importer.root_of[value.name] = importer.root_of[line.base.name]
        importer.env[node] = value
    else:
        importer.emit_definition(line, node, value)


def _is_chain_step(importer: GraphImporter, node: Node) -> bool:
    """Whether only other views use a view, and it was not emitted for a line of its own."""
    if not node.users or (importer.original_line(node, View) is not None and "fxwrap_chain_step" not in node.meta):
        return False
    return all(_is_folding_user(importer, user, node) for user in node.users)


def _is_folding_user(importer: GraphImporter, user: Node, base: Node) -> bool:
    """Whether a user of a view becomes the line of a view."""
    if user.op != "call_function" or user.target not in _VIEWS or user.args[0] is not base:
        return False
    return _is_view_line(importer, user)


def _original_type(importer: GraphImporter, node: Node, base: Value) -> TensorType | None:
    """Returns the type of the view that a node was emitted for, if base and arguments still fit; inference is slow."""
    line = importer.original_line(node, View)
    if line is None or line.base.type != base.type:
        return None
    operator_ = view_operator(node.target, [importer.argument(node, item) for item in node.args[1:]])
    type_ = line.result.tensor_type
    return type_ if returns_view(operator_, base.tensor_type, type_, importer.state.symbols.infos) else None


def _has_no_lazy_bits(node: Node) -> bool:
    """Whether the metadata shows no conjugate or negative bits, which the type of a view does not have."""
    val, operand = node.meta.get("val"), node.args[0]
    base = operand.meta.get("val") if isinstance(operand, Node) else None
    if not isinstance(val, torch.Tensor) or not isinstance(base, torch.Tensor) or val.dtype != base.dtype:
        return True
    return is_plain_view(val, base) and not val.is_conj() and not val.is_neg()


def _is_symbolic_select(importer: GraphImporter, node: Node) -> bool:
    """Whether a `select` has a symbolic index: eager checks it, so the import keeps the call."""
    is_select = node.target is _ATEN.select.int and len(node.args) == 3
    return is_select and not isinstance(node.args[2], int) and importer.original_line(node, View) is None


def _strided_type(importer: GraphImporter, node: Node, base: Value, layout: Sequence[Any]) -> TensorType:
    """Returns the type of a view whose `layout` has sizes, strides and, unless it is that of `base`, storage offset."""
    sizes, strides = [importer.argument(node, item) for item in layout[:2]]
    offset = _offset_in_root(importer, node, base, layout[2] if len(layout) > 2 else None)
    return replace(base.tensor_type, sizes=sizes, strides=strides, storage_offset=offset)


def _as_strided(importer: GraphImporter, node: Node) -> None:
    if importer.original_line(node, ExternCall) is not None or node.kwargs or len(node.args) < 3:
        import_operator_call(importer, node)
        return
    base = importer.tensor(node, node.args[0])
    _emit_view(importer, node, importer.value(node.name, _strided_type(importer, node, base, node.args[1:])), base)


def _as_strided_scatter(importer: GraphImporter, node: Node) -> None:
    if importer.original_line(node, ExternCall) is not None or node.kwargs or len(node.args) < 4:
        import_operator_call(importer, node)
        return
    base = importer.tensor(node, node.args[0])
    type_ = _strided_type(importer, node, base, node.args[2:])
    distance = total((type_.storage_offset, product((-1, base.tensor_type.storage_offset))))
    type_ = replace(type_, storage_offset=distance)
    import_view_scatter(importer, node, copy_operand(importer, node, base), type_)


def _offset_in_root(importer: GraphImporter, node: Node, base: Value, item: Any) -> Size:
    """Returns the offset of a view in its root; torch counts from the storage, the IR from the root."""
    base_offset = base.tensor_type.storage_offset
    if item is None or _is_offset_of(item, node.args[0]):
        return base_offset
    if isinstance(item, Node) and item.target is operator.add and _is_offset_of(item.args[0], node.args[0]):
        return total((base_offset, importer.argument(node, item.args[1])))
    offset: Size = importer.argument(node, item)
    root = importer.root_of[base.name]
    if root not in importer.external_values:
        return offset  # a root of the program begins where its storage does
    root_offset = importer.size_symbols.get((root, "storage_offset", 0))
    if root_offset is None:
        info = importer.state.symbols.fresh("n")
        importer.emit(importer.size_line(info, importer.external_values[root], 0, "storage_offset"), node)
        root_offset = make_symbol(info.name)
    return total((offset, product((root_offset, -1))))


def _is_offset_of(item: object, base: object) -> bool:
    return isinstance(item, Node) and item.target is _ATEN.sym_storage_offset.default and item.args[0] is base


def _storage_offset(importer: GraphImporter, node: Node) -> None:
    """Imports a storage offset as a line, unless only offsets of views use it."""
    sums = [user for user in node.users if user.target is operator.add and user.args[0] is node]
    if "fxwrap_symbol" not in node.meta and _only_offsets_views(node, sums):
        importer.env[node] = None
        importer.absorbed.update(sums)
        return
    import_storage_offset(importer, node)


def _only_offsets_views(node: Node, sums: list[Node]) -> bool:
    base = node.args[0]
    for user in node.users:
        if user in sums and "fxwrap_symbol" not in user.meta:
            if not all(_is_as_strided_at(view, user, base) for view in user.users):
                return False
        elif not _is_as_strided_at(user, node, base):
            return False
    return bool(node.users)


def _is_as_strided_at(view: Node, offset: Node, base: object) -> bool:
    count = {_ATEN.as_strided.default: 4, _ATEN.as_strided_scatter.default: 5}.get(view.target)  # type: ignore[call-overload]
    return count == len(view.args) and view.args[-1] is offset and view.args[0] is base


_VIEWS = frozenset(VIEW_OVERLOADS.values()) - {_ATEN.as_strided.default}

MEMORY: NodeImporters = {
    _ATEN.empty_strided.default: _alloc,
    _FXWRAP.allocate_symmetric.default: _alloc_symmetric,
    _FXWRAP.reuse.default: _reuse,
    _FXWRAP.pool.default: _pool,
    _FXWRAP.pool_slice.default: _pool_slice,
    _FXWRAP.workspace.default: _workspace,
    _ATEN.alias.default: _identity,
    _ATEN.detach.default: _identity,
    _ATEN.as_strided.default: _as_strided,
    _ATEN.as_strided_scatter.default: _as_strided_scatter,
    _ATEN.sym_storage_offset.default: _storage_offset,
    **dict.fromkeys(_VIEWS, _view),
}
