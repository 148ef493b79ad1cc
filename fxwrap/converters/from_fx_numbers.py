"""Nodes that give or check numbers, read back: arithmetic is folded into expressions, other nodes define symbols."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.converters.from_fx_reader import Element, Reader, Table, failure, origin_of
from fxwrap.converters.from_fx_symbols import new_prefix
from fxwrap.errors import ExpressionError
from fxwrap.lines import Assert, Bind, Item, Let, SizeOf
from fxwrap.symbolic import CHAINED, Number, SymbolInfo, as_computed, computed, make_symbol, print_expr, product
from fxwrap.wrapper_ir import ListType, ScalarType, Tag, TensorType, Value, element_type

_ATEN = torch.ops.aten


# --- arithmetic -------------------------------------------------------------------------------------------------------


def arithmetic(reader: Reader, node: Node) -> None:
    """Reads a call of a Python function on numbers. Raises ReadBackError for a function that no expression has."""
    info = node.meta.get("fxwrap_symbol")
    info = None if info is not None and info.name in reader.shared.symbols.defined else info
    if info is not None and bind(reader, node, info):
        return
    plain = _computed(reader, node)
    if info is not None and isinstance(plain, sympy.Basic | int):
        _let(reader, node, info, _exact(reader, node, plain))
        return
    reader.set_number(node, _exact(reader, node, plain), plain)


def _computed(reader: Reader, node: Node) -> Number:
    """Returns what a node computes; sums and products of many as wholes, or sympy would multiply out parts of them."""
    operands = [_number(reader, node, item) for item in node.args]
    function: Any = node.target
    chain = CHAINED.get(function)
    if chain is not None:
        first = reader.factors.get(node.args[0]) if isinstance(node.args[0], Node) else None
        operands = [*(first[1] if first is not None and first[0] == chain else operands[:1]), *operands[1:]]
        if "fxwrap_symbol" not in node.meta and "fxwrap_expression" not in node.meta:
            reader.factors[node] = (chain, tuple(operands))
    try:
        return computed(function, operands)
    except (ExpressionError, ArithmeticError, ValueError, TypeError) as error:
        remedy = "Compute with numbers by Python's operators, and with tensors by torch.ops.aten overloads"
        raise failure(node, str(error), remedy) from error


def _number(reader: Reader, node: Node, item: Any) -> Number:
    found = reader.argument(node, item)
    if isinstance(item, Node) and item in reader.plain:
        return reader.plain[item]
    if isinstance(found, Value) and isinstance(found.type, ScalarType):
        return _bound(reader, item, found)
    if isinstance(found, int | float | bool | sympy.Basic):
        return found
    name = getattr(node.target, "__name__", str(node.target))
    shown = f"'{item.name}'" if isinstance(item, Node) else repr(item)
    reason = f"the Python function '{name}' is applied to {shown}, which is no number"
    raise failure(node, reason, "Call the torch.ops.aten overload that it stands for")


def _bound(reader: Reader, item: Node, value: Value) -> Number:
    """Returns the symbol of a number that an operator gave and no symbol stands for yet."""
    info = reader.shared.symbols.fresh(new_prefix(item.meta.get("val")))
    reader.emit(Bind(info, value, (), origin=origin_of(item)), item)
    reader.set_number(item, make_symbol(info.name))
    return reader.plain[item]


def _exact(reader: Reader, node: Node, plain: Number) -> Any:
    """Returns the expression that a node was written for, where it still computes that."""
    written = node.meta.get("fxwrap_expression")
    if written is None or written is plain:
        return plain
    try:
        return written if as_computed(written) == plain else plain
    except ExpressionError:
        return plain


def _let(reader: Reader, node: Node, info: SymbolInfo, expression: Any) -> None:
    info = reader.shared.symbols.to_define(info)
    reader.shared.rules.definitions[info.name] = expression
    reader.emit(Let(info, expression, origin=origin_of(node)), node)
    _stand_for(reader, node, info, is_let=True)


def _stand_for(reader: Reader, node: Node, info: SymbolInfo, is_let: bool = False) -> None:
    symbol = make_symbol(info.name)
    reader.set_number(node, symbol)
    if not is_let:
        reader.shared.symbols.stands_for(node.meta.get("val"), symbol)


def choice(reader: Reader, node: Node) -> None:
    """Reads an item of a pair of numbers: (otherwise, then) at a condition."""
    pair = [_number(reader, node, item) for item in node.args[0]]  # type: ignore[union-attr]
    position = _number(reader, node, node.args[1])
    try:
        if len(pair) != 2:
            raise ExpressionError("only one of two numbers can be chosen")
        plain = computed(torch.sym_ite, [computed(operator.ne, [position, 0]), pair[1], pair[0]])
    except ExpressionError as error:
        raise failure(node, str(error), "Choose by torch.sym_ite") from error
    written = node.meta.get("fxwrap_expression")
    if written is not None and _is_choice(written, position, pair):
        reader.set_number(node, written, as_computed(written))
    else:
        reader.set_number(node, plain)


def _is_choice(written: Any, position: Number, pair: list[Number]) -> bool:
    condition, then, otherwise = [as_computed(part) for part in written.args]
    return computed(torch.sym_int, [condition]) == position and [otherwise, then] == pair


# --- sizes ------------------------------------------------------------------------------------------------------------


def _reads_size(of: str) -> Any:
    def read(reader: Reader, node: Node) -> None:
        info = node.meta.get("fxwrap_symbol")
        if info is not None and info.name not in reader.shared.symbols.defined and bind(reader, node, info):
            return
        element = reader.env.get(node.args[0]) if isinstance(node.args[0], Node) else None
        if isinstance(element, Element) and isinstance(element.type, TensorType):
            reader.env[node] = Element(element.source, (*element.path, _step(reader, node, of)), ScalarType("int"))
            return
        tensor = reader.tensor(node, node.args[0])
        dim = reader.argument(node, node.args[1]) if len(node.args) > 1 else 0
        type_ = tensor.tensor_type
        if of != "storage_offset":
            if type(dim) is not int or not -len(type_.sizes) <= dim < len(type_.sizes):
                raise failure(node, f"'{tensor.name}' has no dimension {dim}", "Name a dimension that it has")
            dim %= len(type_.sizes)
        _size(reader, node, tensor, dim, of)

    return read


def _size(reader: Reader, node: Node, tensor: Value, dim: int, of: str) -> None:
    type_ = tensor.tensor_type
    info = node.meta.get("fxwrap_symbol")
    if info is None or info.name in reader.shared.symbols.defined:
        known = reader.sizes.get((tensor.name, of, dim))
        if known is None and of != "storage_offset":
            known = (type_.sizes if of == "size" else type_.strides)[dim]
        if known is not None:
            reader.set_number(node, known)
            return
        info = reader.shared.symbols.fresh("n")
    line = reader.hint(node, SizeOf)
    if of == "storage_offset" and line is not None:
        dim = line.dim
    info = reader.shared.symbols.to_define(info)
    reader.emit(reader.size_line(info, tensor, dim, of, node), node)
    _stand_for(reader, node, info)


storage_offset = _reads_size("storage_offset")
"""Reads the storage offset of a tensor as a symbol."""


def _count(reader: Reader, node: Node) -> None:
    reader.set_number(node, product(reader.tensor(node, node.args[0]).tensor_type.sizes))


def check_rank(reader: Reader, node: Node) -> None:
    """Reads a check that the next size of the same tensor holds."""
    tensor = reader.tensor(node, node.args[0])
    reader.ranks[tensor.name] = (tensor, int(node.args[2]))  # type: ignore[arg-type]
    reader.env[node] = None


# --- numbers of results -----------------------------------------------------------------------------------------------


def bind(reader: Reader, node: Node, info: SymbolInfo) -> bool:
    """Reads a node as a symbol that is found in an operator's result, if the key path that it was made for is there."""
    line = reader.hint(node, Bind)
    if line is None or not line.path:
        return False
    found: Any = node
    for step in reversed(line.path):
        if not isinstance(found, Node) or not _is_step(found, step):
            return False
        found = found.args[0]
    source = reader.env.get(found) if isinstance(found, Node) else None
    if not isinstance(source, Value):
        return False
    info = reader.shared.symbols.to_define(info)
    reader.emit(Bind(info, source, line.path, origin=origin_of(node)), node)
    _stand_for(reader, node, info)
    return True


def _is_step(node: Node, step: Tag) -> bool:
    targets: dict[str, Any] = {
        "size": _ATEN.sym_size.int, "stride": _ATEN.sym_stride.int,
        "storage_offset": _ATEN.sym_storage_offset.default, "element": operator.getitem,
        "divide": operator.floordiv, "truth": torch.sym_int,
    }  # fmt: skip
    return node.target is targets[step.name] and tuple(node.args[1:]) == step.arguments


def number_result(reader: Reader, node: Node, value: Value) -> None:
    """Binds the symbol that a result which is a number stands for, directly after it, if the node names one."""
    reader.env[node] = value
    info = node.meta.get("fxwrap_symbol")
    if info is not None and isinstance(value.type, ScalarType):
        info = reader.shared.symbols.to_define(info)
        reader.emit(Bind(info, value, (), origin=origin_of(node)), node)
        _stand_for(reader, node, info)


def item_of_list(reader: Reader, node: Node, found: Value | Element) -> None:
    """Reads an element that is taken out of a list: a step of a key path."""
    info = node.meta.get("fxwrap_symbol")
    if info is None or not bind(reader, node, info):
        source, path = (found.source, found.path) if isinstance(found, Element) else (found, ())
        type_ = element_type(found.type) if isinstance(found.type, ListType) else found.type
        reader.env[node] = Element(source, (*path, _step(reader, node, "element")), type_)


def _step(reader: Reader, node: Node, name: str) -> Tag:
    """Returns the step of a key path that a node takes."""
    positions = [reader.argument(node, item) for item in node.args[1:]]
    for position in positions:
        if type(position) is not int:
            raise failure(node, f"it takes what is at {position}, and a key path has constants", "Name a constant one")
    return Tag(name, tuple(positions))


def item(reader: Reader, node: Node) -> None:
    """Reads the number that is an element of a tensor."""
    tensor = reader.tensor(node, node.args[0])
    dtype = tensor.tensor_type.dtype
    prefix = "uf" if dtype.is_floating_point else "b" if dtype == torch.bool else "u"
    info = node.meta.get("fxwrap_symbol") or reader.shared.symbols.fresh(prefix)
    kinds_differ = dtype.is_floating_point != info.name.startswith(("f", "uf"))
    info = reader.shared.symbols.fresh(prefix) if kinds_differ else reader.shared.symbols.to_define(info)
    reader.emit(Item(info, tensor, origin=origin_of(node)), node)
    _stand_for(reader, node, info)


# --- conditions -------------------------------------------------------------------------------------------------------


def assertion(reader: Reader, node: Node) -> None:
    """Reads a condition that must hold, with its message."""
    condition, message, *more = [reader.argument(node, argument) for argument in node.args]
    error, shown = more if more else ("RuntimeError", None)
    reader.env[node] = None
    if isinstance(condition, Value):
        raise failure(node, "its condition is a tensor", "Read the number with aten._local_scalar_dense first")
    if not isinstance(condition, sympy.Basic):
        condition = bool(condition)
        if condition and reader.hint(node, Assert) is None:
            return  # it holds always
    elif message == f"the condition {print_expr(condition)} does not hold":
        message = ""
    reader.emit(Assert(condition, message, error, shown, origin=origin_of(node)), node)


NUMBERS: Table = {
    _ATEN.sym_size.int: _reads_size("size"),
    _ATEN.sym_stride.int: _reads_size("stride"),
    _ATEN.sym_numel.default: _count,
    _ATEN._local_scalar_dense.default: item,
    _ATEN._assert_scalar.default: assertion,
    torch.ops.fxwrap.require.default: assertion,
    torch.ops.fxwrap.check_rank.default: check_rank,
}
