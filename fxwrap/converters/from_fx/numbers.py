"""Import of nodes that compute or check numbers: arithmetic becomes expressions, other nodes define symbols."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap import symbolic
from fxwrap.converters.from_fx.graph_importer import GraphImporter, ListElement, NodeImporter, NodeImporters
from fxwrap.converters.from_fx.nodes import failure
from fxwrap.errors import ExpressionError
from fxwrap.lines import Assert, Bind, Let, ReadItem, SizeOf
from fxwrap.wrapper_ir import LineBase, ListType, ScalarType, Tag, TensorType, Value, element_type

_ATEN = torch.ops.aten


# --- arithmetic -------------------------------------------------------------------------------------------------------


def import_arithmetic(importer: GraphImporter, node: Node) -> None:
    """Imports a call of a Python function on numbers. Raises FxImportError if no expression represents it."""
    info = _undefined_symbol(importer, node)
    if info is not None and _bind_by_path(importer, node, info):
        return
    recomputed = _recompute(importer, node)
    exact = _original_expression(node, recomputed)
    if info is None or not isinstance(recomputed, sympy.Basic | int):
        importer.set_number(node, exact, recomputed)
        return
    info = importer.state.symbols.reserve(info)
    importer.state.inference.definitions[info.name] = exact
    importer.emit(Let(info, exact), node)
    importer.set_number(node, symbolic.make_symbol(info.name))


def _undefined_symbol(importer: GraphImporter, node: Node) -> symbolic.SymbolInfo | None:
    """Returns the symbol that a node declares, if no line defines it yet."""
    info = node.meta.get("fxwrap_symbol")
    return info if isinstance(info, symbolic.SymbolInfo) and info.name not in importer.state.symbols.defined else None


def _recompute(importer: GraphImporter, node: Node) -> symbolic.NumberOrExpression:
    """Returns the number that a node computes; chains of sums and products become one expression.

    Otherwise sympy would multiply out parts of them.
    """
    operands = [_number(importer, node, item) for item in node.args]
    function: Any = node.target
    chain = symbolic.VARIADIC_CALLABLES.get(function)
    if chain is not None:
        first = importer.chain_operands.get(node.args[0]) if isinstance(node.args[0], Node) else None
        operands = [*(first[1] if first is not None and first[0] == chain else operands[:1]), *operands[1:]]
        if "fxwrap_symbol" not in node.meta and "fxwrap_expression" not in node.meta:
            importer.chain_operands[node] = (chain, tuple(operands))
    try:
        return symbolic.apply_callable(function, operands)
    except (ExpressionError, ArithmeticError, ValueError, TypeError) as error:
        remedy = "Compute with numbers by Python's operators, and with tensors by torch.ops.aten overloads"
        raise failure(node, str(error), remedy) from error


def _number(importer: GraphImporter, node: Node, item: object) -> symbolic.NumberOrExpression:
    value = importer.argument(node, item)
    if isinstance(item, Node):
        if item in importer.recomputed:
            return importer.recomputed[item]
        if isinstance(value, Value) and isinstance(value.type, ScalarType):  # an operator's result without a symbol
            info = importer.state.symbols.fresh_for(item.meta.get("val"))
            importer.emit(Bind(info, value, ()), item)
            importer.set_number(item, symbolic.make_symbol(info.name))
            return importer.recomputed[item]
    if isinstance(value, int | float | bool | sympy.Basic):
        return value
    name = getattr(node.target, "__name__", str(node.target))
    shown = f"'{item.name}'" if isinstance(item, Node) else repr(item)
    reason = f"the Python function '{name}' is applied to {shown}, which is no number"
    raise failure(node, reason, "Call the corresponding torch.ops.aten overload")


def _original_expression(node: Node, recomputed: symbolic.NumberOrExpression) -> symbolic.NumberOrExpression:
    """Returns the expression that a node was emitted for, if the node still computes it."""
    original: symbolic.NumberOrExpression | None = node.meta.get("fxwrap_expression")
    if original is None or original is recomputed:
        return recomputed
    try:
        return original if symbolic.normalize_arithmetic(original) == recomputed else recomputed
    except ExpressionError:
        return recomputed


def _emit_symbol(importer: GraphImporter, node: Node, line: LineBase, info: symbolic.SymbolInfo) -> None:
    """Adds a line that defines a symbol as the number of a node."""
    importer.emit(line, node)
    symbol = symbolic.make_symbol(info.name)
    importer.set_number(node, symbol)
    importer.state.symbols.map_torch_symbol(node.meta.get("val"), symbol)


def import_conditional(importer: GraphImporter, node: Node) -> None:
    """Imports an item of a pair of numbers, (otherwise, then), at a condition."""
    pair = [_number(importer, node, item) for item in node.args[0]]  # type: ignore[union-attr]
    index = _number(importer, node, node.args[1])
    try:
        if len(pair) != 2:
            raise ExpressionError("a symbolic index selects one of two numbers only")
        condition = symbolic.apply_callable(operator.ne, [index, 0])
        recomputed = symbolic.apply_callable(torch.sym_ite, [condition, pair[1], pair[0]])
    except ExpressionError as error:
        raise failure(node, str(error), "Use torch.sym_ite") from error
    original = node.meta.get("fxwrap_expression")
    if original is not None:
        condition, then, otherwise = [symbolic.normalize_arithmetic(part) for part in original.args]
        if symbolic.apply_callable(torch.sym_int, [condition]) == index and [otherwise, then] == pair:
            importer.set_number(node, original, symbolic.normalize_arithmetic(original))
            return
    importer.set_number(node, recomputed)


# --- sizes ------------------------------------------------------------------------------------------------------------


def _size_importer(of: str) -> NodeImporter:
    def import_size(importer: GraphImporter, node: Node) -> None:
        info = _undefined_symbol(importer, node)
        if info is not None and _bind_by_path(importer, node, info):
            return
        item = node.args[0]
        element = importer.env.get(item) if isinstance(item, Node) else None
        if isinstance(element, ListElement) and isinstance(element.type, TensorType):
            path = (*element.path, _path_step(importer, node, of))
            importer.env[node] = ListElement(element.source, path, ScalarType("int"))
            return
        tensor = importer.tensor(node, item)
        dim = importer.argument(node, node.args[1]) if len(node.args) > 1 else 0
        type_ = tensor.tensor_type
        if of != "storage_offset":
            if type(dim) is not int or not -len(type_.sizes) <= dim < len(type_.sizes):
                raise failure(node, f"'{tensor.name}' has no dimension {dim}", "Pass an existing dimension")
            dim %= len(type_.sizes)
        _size(importer, node, tensor, dim, of, info)

    return import_size


def _size(
    importer: GraphImporter, node: Node, tensor: Value, dim: int, of: str, info: symbolic.SymbolInfo | None
) -> None:
    type_ = tensor.tensor_type
    if info is None:
        known: symbolic.NumberOrExpression | None = importer.size_symbols.get((tensor.name, of, dim))
        if known is None and of != "storage_offset":
            known = (type_.sizes if of == "size" else type_.strides)[dim]
        if known is not None:
            importer.set_number(node, known)
            return
        info = importer.state.symbols.fresh("n")
    line = importer.original_line(node, SizeOf)
    if of == "storage_offset" and line is not None:
        dim = line.dim
    info = importer.state.symbols.reserve(info)
    _emit_symbol(importer, node, importer.size_line(info, tensor, dim, of), info)


import_storage_offset = _size_importer("storage_offset")
"""Imports the storage offset of a tensor as a symbol."""


def _import_numel(importer: GraphImporter, node: Node) -> None:
    importer.set_number(node, symbolic.product(importer.tensor(node, node.args[0]).tensor_type.sizes))


def _check_rank(importer: GraphImporter, node: Node) -> None:
    """Imports a check that becomes part of the next size of the same tensor."""
    tensor = importer.tensor(node, node.args[0])
    importer.pending_rank_checks[tensor.name] = (tensor, int(node.args[2]))  # type: ignore[arg-type]
    importer.env[node] = None


# --- numbers of results -----------------------------------------------------------------------------------------------


def _bind_by_path(importer: GraphImporter, node: Node, info: symbolic.SymbolInfo) -> bool:
    """Imports a node as the binding of a symbol by the key path that it was emitted for, if that is still there."""
    line = importer.original_line(node, Bind)
    if line is None or not line.path:
        return False
    source: object = node
    for step in reversed(line.path):
        if not isinstance(source, Node) or source.target is not _PATH_TARGETS[step.name]:
            return False
        if tuple(source.args[1:]) != step.arguments:
            return False
        source = source.args[0]
    value = importer.env.get(source) if isinstance(source, Node) else None
    if not isinstance(value, Value):
        return False
    info = importer.state.symbols.reserve(info)
    _emit_symbol(importer, node, Bind(info, value, line.path), info)
    return True


_PATH_TARGETS = {
    "size": _ATEN.sym_size.int, "stride": _ATEN.sym_stride.int, "storage_offset": _ATEN.sym_storage_offset.default,
    "element": operator.getitem, "divide": operator.floordiv, "truth": torch.sym_int,
}  # fmt: skip


def set_result(importer: GraphImporter, node: Node, value: Value) -> None:
    """Sets the value of a node, and binds the symbol of a scalar result right after it, if the node has one."""
    importer.env[node] = value
    info = node.meta.get("fxwrap_symbol")
    if info is not None and isinstance(value.type, ScalarType):
        info = importer.state.symbols.reserve(info)
        _emit_symbol(importer, node, Bind(info, value, ()), info)


def import_list_element(importer: GraphImporter, node: Node, source: Value | ListElement) -> None:
    """Imports an element of a list: a step of a key path."""
    info = node.meta.get("fxwrap_symbol")
    if info is None or not _bind_by_path(importer, node, info):
        value, path = (source.source, source.path) if isinstance(source, ListElement) else (source, ())
        type_ = element_type(source.type) if isinstance(source.type, ListType) else source.type
        importer.env[node] = ListElement(value, (*path, _path_step(importer, node, "element")), type_)


def _path_step(importer: GraphImporter, node: Node, name: str) -> Tag:
    indices = [importer.argument(node, item) for item in node.args[1:]]
    for index in indices:
        if type(index) is not int:
            raise failure(node, f"its index is {index}, and a key path has constants only", "Pass a constant index")
    return Tag(name, tuple(indices))


def _import_item(importer: GraphImporter, node: Node) -> None:
    tensor = importer.tensor(node, node.args[0])
    dtype = tensor.tensor_type.dtype
    prefix = "uf" if dtype.is_floating_point else "b" if dtype == torch.bool else "u"
    info = node.meta.get("fxwrap_symbol") or importer.state.symbols.fresh(prefix)
    kinds_differ = dtype.is_floating_point != info.name.startswith(("f", "uf"))
    info = importer.state.symbols.fresh(prefix) if kinds_differ else importer.state.symbols.reserve(info)
    _emit_symbol(importer, node, ReadItem(info, tensor), info)


# --- conditions -------------------------------------------------------------------------------------------------------


def _import_assertion(importer: GraphImporter, node: Node) -> None:
    condition, message, *more = [importer.argument(node, argument) for argument in node.args]
    error, shown = more or ("RuntimeError", None)
    importer.env[node] = None
    if isinstance(condition, Value):
        raise failure(node, "its condition is a tensor", "Read the number with aten._local_scalar_dense first")
    if not isinstance(condition, sympy.Basic):
        condition = bool(condition)
        if condition and importer.original_line(node, Assert) is None:
            return
    elif message == f"the condition {symbolic.print_expr(condition)} does not hold":
        message = ""
    importer.emit(Assert(condition, message, error, shown), node)


NUMBERS: NodeImporters = {
    _ATEN.sym_size.int: _size_importer("size"),
    _ATEN.sym_stride.int: _size_importer("stride"),
    _ATEN.sym_numel.default: _import_numel,
    _ATEN._local_scalar_dense.default: _import_item,
    _ATEN._assert_scalar.default: _import_assertion,
    torch.ops.fxwrap.require.default: _import_assertion,
    torch.ops.fxwrap.check_rank.default: _check_rank,
}
