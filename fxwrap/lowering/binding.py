"""Numbers that exist only when a program runs: read from tensors, found in results of operators, and asserted."""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx import Node

from fxwrap.errors import GraphError
from fxwrap.lines import Assert, Bind, Item
from fxwrap.lowering.builder import Builder
from fxwrap.lowering.source import location_of
from fxwrap.lowering.symbols import symbol_info
from fxwrap.symbolic import SymbolInfo
from fxwrap.wrapper_ir import Tag, TensorType, Value


def lower_item(builder: Builder, node: Node, fake: Any) -> None:
    """Reads the number that an element of a tensor is, as a symbol."""
    expression = builder.expression(fake)
    is_truth = isinstance(expression, sympy.Eq) and expression.rhs == 1  # what a ShapeEnv writes for a bool
    symbol = expression.lhs if is_truth else expression
    if not isinstance(symbol, sympy.Symbol):
        raise _error(node, f"the number read from a tensor is {expression}, not a symbol", "Read it with .item()")
    info = SymbolInfo(symbol.name, 0, 1) if is_truth else symbol_info(builder, fake)
    builder.known_symbols.add(info.name)
    builder.emit(Item(info, builder.env[node.args[0]], origin=builder.origin(node)))  # type: ignore[index]
    builder.env[node] = expression


def lower_assert(builder: Builder, node: Node, condition: Any, message: str) -> None:
    """A condition over symbols is a line of its own; one that always holds is none."""
    builder.env[node] = None
    if condition is not True:
        builder.emit(Assert(condition, message, origin=builder.origin(node)))


def bind_symbols(builder: Builder, node: Node, value: Value) -> None:
    """Binds each unbacked symbol that stands alone in a result's sizes, strides or offset, or is the result itself."""
    if not isinstance(value.type, TensorType):
        fake = builder.fakes[node]
        expression = builder.expression(fake)
        builder.numbers[value.name] = expression
        if isinstance(expression, sympy.Symbol) and expression.name not in builder.known_symbols:
            _bind(builder, node, expression, value, ())
        return
    type_ = value.type
    if all(type(number) is int for number in (*type_.sizes, *type_.strides)):
        return
    places = [("size", dim, size) for dim, size in enumerate(type_.sizes)]
    places += [("stride", dim, stride) for dim, stride in enumerate(type_.strides)]
    for step, dim, number in places:
        if isinstance(number, sympy.Symbol) and number.name not in builder.known_symbols:
            _bind(builder, node, number, value, (Tag(step, (dim,)),))
    missing = [symbol.name for _, _, number in places if isinstance(number, sympy.Basic)
               for symbol in number.free_symbols if symbol.name not in builder.known_symbols]  # fmt: skip
    if missing:
        reason = f"the symbol {missing[0]} in the result's type {type_} cannot be read off the result"
        raise _error(node, reason, "Return the size itself from the operator")


def _bind(builder: Builder, node: Node, symbol: sympy.Symbol, value: Value, path: tuple[Tag, ...]) -> None:
    builder.known_symbols.add(symbol.name)
    builder.emit(
        Bind(builder.infos.get(symbol.name, SymbolInfo(symbol.name)), value, path, origin=builder.origin(node))
    )


def _error(node: Node, reason: str, remedy: str) -> GraphError:
    return GraphError(node.name, reason, remedy, location_of(node))
