"""Binding the symbols of a graph: by sizes and strides of its inputs, or as inputs of their own."""

from __future__ import annotations

from typing import Any

import sympy

from fxwrap.errors import GraphError
from fxwrap.lines import Let, SizeOf
from fxwrap.lowering.builder import Builder
from fxwrap.symbolic import SymbolInfo, make_symbol
from fxwrap.torch_compat import FloorDiv, symbol_bounds, symbol_hint
from fxwrap.wrapper_ir import Size, TensorType, Value


def symbol_info(builder: Builder, number: Any) -> SymbolInfo:
    """Returns what the graph knows of the symbol that a symbolic number is: bounds and hint."""
    symbol = builder.expression(number)
    if not isinstance(symbol, sympy.Symbol):
        raise GraphError("", f"{symbol} is no symbol", "Pass sizes as plain symbols")
    lower, upper = symbol_bounds(number)
    chosen = builder.symbol_ranges.get(symbol.name)
    if chosen is not None:
        lower, upper = chosen
    info = SymbolInfo(symbol.name, lower, upper, symbol_hint(number))
    builder.infos[symbol.name] = info
    return info


def bind_sizes(builder: Builder, values: list[Value]) -> None:
    """Emits the lines that bind every symbol in the types of these inputs, plain ones first, then solved ones."""
    pending: list[tuple[Size, Value, int, str]] = []
    for value in values:
        if not isinstance(value.type, TensorType) or _is_static(value.type):
            continue
        fake = builder.fake_of[value.name]
        for of, numbers, torch_numbers in (
            ("size", value.type.sizes, tuple(fake.shape)),
            ("stride", value.type.strides, fake.stride()),
        ):
            for dim, number in enumerate(numbers):
                if not isinstance(number, sympy.Symbol):
                    pending.append((number, value, dim, of))
                elif number.name not in builder.known_symbols:
                    info = symbol_info(builder, torch_numbers[dim])
                    builder.known_symbols.add(info.name)
                    builder.emit(SizeOf(info, value, dim, of))
    for number, value, dim, of in pending:
        _solve(builder, number, value, dim, of)


def _is_static(type_: TensorType) -> bool:
    return all(type(number) is int for number in (*type_.sizes, *type_.strides))


def _solve(builder: Builder, number: Size, value: Value, dim: int, of: str) -> None:
    """Binds the one unknown symbol of a linear expression that a size is known to have."""
    if not isinstance(number, sympy.Basic):
        return
    unknown = [symbol for symbol in number.free_symbols if symbol.name not in builder.known_symbols]
    if not unknown:
        return
    symbol = unknown[0]
    factor, rest = number.coeff(symbol, 1), number.coeff(symbol, 0)
    if len(unknown) > 1 or factor == 0 or sympy.expand(factor * symbol + rest - number) != 0:
        reason = f"the {of} {dim} of input '{value.name}' is {number}, which does not give the symbol {symbol}"
        raise GraphError(value.name, reason, "Pass the size as an input, or mark another dimension dynamic")
    whole = make_symbol(builder.state.fresh_symbol("n"))
    builder.known_symbols.add(whole.name)
    builder.emit(SizeOf(SymbolInfo(whole.name), value, dim, of))
    builder.known_symbols.add(symbol.name)
    solved = whole - rest if factor == 1 else FloorDiv(whole - rest, factor)
    builder.emit(Let(builder.infos.get(symbol.name, SymbolInfo(symbol.name)), solved))
