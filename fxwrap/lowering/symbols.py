"""Binding the symbols of a graph: by sizes and strides of its inputs, or as inputs of their own.

An input may be any number over symbols, and so may a size: `2*s0`, `s0 + 448`, `s0*s1`. Plain symbols are bound first,
then whatever has one unknown symbol is solved for it. A number that gives none of its symbols away (`s0*s1` or `s0//2`
where neither `s0` nor `s1` is known) becomes a symbol of its own, wherever the graph has it: a graph that computed with
the symbols themselves would have been given them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from fxwrap.errors import GraphError
from fxwrap.lines import Assert, Let, SizeOf
from fxwrap.lowering.builder import Builder
from fxwrap.symbolic import (
    SymbolInfo,
    canonical,
    expression_kind,
    floor_divide,
    make_symbol,
    maximum,
    print_expr,
    product,
    symbol_kind,
    total,
)
from fxwrap.torch_compat import CleanDiv, Where, shape_env_in, symbol_bounds, symbol_hint, symbolic_number
from fxwrap.wrapper_ir import Size, TensorType, Value

_PREFIXES = {"int": "n", "float": "f", "bool": "b"}


def symbol_info(builder: Builder, number: Any) -> SymbolInfo:
    """Returns what the graph knows of the symbol that a symbolic number is: bounds and hint."""
    symbol = builder.expression(number)
    if not isinstance(symbol, sympy.Symbol):
        raise GraphError("", f"{symbol} is no symbol", "Pass sizes as plain symbols")
    return _info(builder, number, symbol.name)


def _info(builder: Builder, number: Any, name: str) -> SymbolInfo:
    lower, upper = symbol_bounds(number)
    hint = builder.symbol_hints.get(name, symbol_hint(number))
    chosen = builder.symbol_ranges.get(name)
    if chosen is not None:
        lower, upper = chosen
    if hint is not None:
        hint = hint if lower is None else max(hint, lower)
        hint = hint if upper is None else min(hint, upper)
    info = builder.infos[name] = SymbolInfo(name, lower, upper, hint)
    return info


def known_info(builder: Builder, symbol: sympy.Symbol, number: Any) -> SymbolInfo:
    """Returns what is known of a symbol of the program; `number` is any fake value that has the same ShapeEnv."""
    found = builder.infos.get(symbol.name)
    if found is not None:
        return found
    original = next((torchs for torchs, ours in builder.symbols.items() if ours == symbol), None)
    shape_env = shape_env_in(number)
    if original is None or shape_env is None:
        return SymbolInfo(symbol.name)
    return _info(builder, symbolic_number(shape_env, original, expression_kind(symbol)), symbol.name)


# --- numbers that give none of their symbols away ---------------------------------------------------------------------


def replace_unsolvable(builder: Builder, fakes: Iterable[Any]) -> None:
    """Gives a symbol of its own to each number of a program's inputs from which no symbol can be solved.

    `fakes` are the inputs' fake tensors and numbers. To be called before the builder makes any type.
    """
    found = {number.node.expr: None for fake in fakes for number in _numbers(fake) if hasattr(number, "node")}
    known = {expression for expression in found if isinstance(expression, sympy.Symbol)}
    pending = [expression for expression in found if expression not in known and expression.free_symbols]
    while pending:
        pending = _solve_all(pending, known)
        if not pending:
            return
        smallest = min(pending, key=lambda expression: (expression.count_ops(), str(expression)))
        symbol = make_symbol(builder.state.fresh_symbol(_PREFIXES[expression_kind(builder.ours(smallest))]))
        builder.symbols[symbol] = symbol
        builder.replaced[smallest] = symbol
        known.add(symbol)
        pending = [expression.subs(smallest, symbol) for expression in pending if expression is not smallest]


def _solve_all(pending: list[sympy.Basic], known: set[sympy.Symbol]) -> list[sympy.Basic]:
    """Adds to the known symbols those that can be solved for; returns the expressions with symbols left unknown."""
    while True:
        rest = []
        for expression in pending:
            unknown = expression.free_symbols - known
            if len(unknown) == 1 and _gives(expression, next(iter(unknown))):
                known |= unknown
            elif unknown:
                rest.append(expression)
        if len(rest) == len(pending):
            return rest
        pending = rest


def _numbers(fake: Any) -> Iterator[Any]:
    if isinstance(fake, torch.Tensor):
        yield from fake.shape
        yield from fake.stride() if fake.layout is torch.strided else ()
    else:
        yield fake


def _gives(expression: sympy.Basic, symbol: sympy.Symbol) -> bool:
    return truth_symbol(expression) == symbol or linear_parts(expression, symbol) is not None


def truth_symbol(expression: Any) -> sympy.Symbol | None:
    """Returns the symbol u of `u == 1`, which is what a ShapeEnv writes for a bool."""
    is_truth = isinstance(expression, sympy.Eq) and expression.rhs == 1 and isinstance(expression.lhs, sympy.Symbol)
    return expression.lhs if is_truth else None


def linear_parts(expression: Any, symbol: sympy.Symbol) -> tuple[Any, Any] | None:
    """Returns factor and rest of `factor*symbol + rest`, free of the symbol; None for what has another form."""
    if isinstance(expression, CleanDiv):  # exact by definition
        inner = linear_parts(expression.args[0], symbol)
        return None if inner is None or inner[1] != 0 else (inner[0] / expression.args[1], sympy.S.Zero)
    if not isinstance(expression, sympy.Add | sympy.Mul):
        return None
    factor, rest = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
    linear = factor != 0 and symbol not in factor.free_symbols and symbol not in rest.free_symbols
    return (factor, rest) if linear and sympy.expand(factor * symbol + rest - expression) == 0 else None


# --- inputs -----------------------------------------------------------------------------------------------------------


def input_symbol(builder: Builder, number: Any) -> SymbolInfo:
    """Returns the symbol that an input is: the number's own, or a new one where the number is none or is known before.

    `bind_sizes` solves what the new one says.
    """
    expression = builder.expression(number)
    if isinstance(expression, sympy.Symbol) and expression.name not in builder.known_symbols:
        info = symbol_info(builder, number)
    else:
        info = _info(builder, number, builder.state.fresh_symbol(_PREFIXES[_kind(number)]))
        builder.given_numbers.append(_Equation(expression, number, make_symbol(info.name)))
    builder.given.append(info)
    builder.known_symbols.add(info.name)
    return info


def _kind(number: Any) -> str:
    return {torch.SymFloat: "float", torch.SymBool: "bool"}.get(type(number), "int")


@dataclass(frozen=True)
class _Equation:
    """A number whose value is at hand when a program starts, and the expression that it is known to be.

    It is the symbol of an input, or a size (or stride) of a tensor, of which a line must make a symbol first.
    """

    expression: Any
    number: Any
    symbol: sympy.Symbol | None = None
    value: Value | None = None
    dim: int = 0
    of: str = "size"

    def __str__(self) -> str:
        where = f"input '{self.symbol}'" if self.value is None else f"{self.of} {self.dim} of input '{self.value.name}'"
        return f"the {where} is {self.expression}"


def bind_sizes(builder: Builder, values: Sequence[Value]) -> None:
    """Emits the lines that bind every symbol in the types of these inputs, plain ones first, then solved ones.

    Raises GraphError, which names an input, for a size that gives no symbol.
    """
    pending = {equation.expression: equation for equation in builder.given_numbers}
    for value in values:
        if not isinstance(value.type, TensorType) or _is_static(value.type):
            continue
        fake = builder.fake_of[value.name]
        for of, sizes, numbers in (
            ("size", value.type.sizes, tuple(fake.shape)),
            ("stride", value.type.strides, fake.stride()),
        ):
            for dim, size in enumerate(sizes):
                if not isinstance(size, sympy.Symbol):
                    pending.setdefault(size, _Equation(size, numbers[dim], None, value, dim, of))
                elif size.name not in builder.known_symbols:
                    _take(builder, symbol_info(builder, numbers[dim]), value, dim, of)
    left = [equation for equation in pending.values() if isinstance(equation.expression, sympy.Basic)]
    while left:
        rest = [equation for equation in left if not _solve(builder, equation)]
        if len(rest) == len(left):
            unknown = ", ".join(sorted(symbol.name for symbol in _unknown(builder, left[0])))
            reason = f"{left[0]}, which does not give the symbol {unknown}"
            raise GraphError("", reason, "Pass the size as an input, or mark another dimension dynamic")
        left = rest


def _is_static(type_: TensorType) -> bool:
    return all(type(number) is int for number in (*type_.sizes, *type_.strides))


def _take(builder: Builder, info: SymbolInfo, value: Value, dim: int, of: str) -> None:
    builder.known_symbols.add(info.name)
    builder.emit(SizeOf(info, value, dim, of))


def _unknown(builder: Builder, equation: _Equation) -> set[sympy.Symbol]:
    return {symbol for symbol in equation.expression.free_symbols if symbol.name not in builder.known_symbols}


def _solve(builder: Builder, equation: _Equation) -> bool:
    """Emits the line that gives the one unknown symbol of an equation, if it has one; returns whether none is left."""
    unknown = _unknown(builder, equation)
    if not unknown:
        return True
    symbol = next(iter(unknown))
    if equation.symbol is not None and truth_symbol(equation.expression) == symbol:
        builder.known_symbols.add(symbol.name)
        number = Where(equation.symbol, sympy.S.One, sympy.S.Zero, evaluate=False)
        builder.emit(Let(SymbolInfo(symbol.name, 0, 1), canonical(number)))
        return True
    parts = linear_parts(equation.expression, symbol) if len(unknown) == 1 else None
    if parts is None:
        return False
    whole = equation.symbol
    if whole is None:
        assert equation.value is not None
        whole = make_symbol(builder.state.fresh_symbol("n"))
        _take(builder, _info(builder, equation.number, whole.name), equation.value, equation.dim, equation.of)
    info = known_info(builder, symbol, equation.number)
    builder.known_symbols.add(symbol.name)
    builder.emit(Let(info, solution(whole, *parts)))
    return True


def solution(whole: sympy.Symbol, factor: sympy.Expr, rest: sympy.Expr) -> Size:
    """Returns `(whole - rest) / factor`, which is exact. A factor that is no number may be 0, and then all is 0."""
    numerator, denominator = sympy.fraction(factor)
    multiple = product((total((whole, canonical(-rest))), canonical(denominator)))
    divisor = canonical(numerator)
    if divisor == 1:
        return multiple
    return floor_divide(multiple, divisor if isinstance(divisor, int) else maximum(divisor, 1))


# --- what inputs must be ----------------------------------------------------------------------------------------------


def check_ranks(builder: Builder, values: Iterable[Value]) -> None:
    """Makes the first line that reads a size of an input check how many dimensions it has, or that it is a tensor."""
    unchecked = {value.name for value in values}
    for position, line in enumerate(builder.lines):
        if isinstance(line, SizeOf) and line.tensor.name in unchecked:
            unchecked.remove(line.tensor.name)
            builder.lines[position] = replace(line, rank=len(line.tensor.tensor_type.sizes))


def check_ranges(builder: Builder) -> None:
    """Emits the checks that inputs have the sizes, and are the numbers, that the graph was traced for.

    One outside its range raises InputError, which names the input, the dimension and the range.
    """
    for line in list(builder.lines):
        if isinstance(line, SizeOf):
            _check_range(builder, line.symbol, f"input '{line.tensor.name}': {line.of} {line.dim}")
    for info in builder.given:
        _check_range(builder, info, f"input '{info.name}'")
    for equation in builder.given_numbers:
        if isinstance(equation.expression, sympy.Basic) and truth_symbol(equation.expression) is None:
            condition = sympy.Eq(equation.symbol, equation.expression, evaluate=False)
            message = f"input '{equation.symbol}' must be {print_expr(equation.expression)}"
            builder.emit(Assert(canonical(condition), message, "InputError", equation.symbol))


def _check_range(builder: Builder, info: SymbolInfo, what: str) -> None:
    symbol, lower, upper = make_symbol(info.name), info.lower, info.upper
    if symbol_kind(info.name) != "int":
        return
    at_least = sympy.Ge(symbol, lower, evaluate=False) if lower is not None and lower > 0 else sympy.true
    at_most = sympy.Le(symbol, upper, evaluate=False) if upper is not None else sympy.true
    if at_least == at_most:
        return
    if lower == upper:
        wanted = f"{lower}"
    elif sympy.true in (at_least, at_most):
        wanted = f"at least {lower}" if at_most == sympy.true else f"at most {upper}"
    else:
        wanted = f"from {lower} to {upper}"
    condition = canonical(sympy.And(at_least, at_most, evaluate=False))
    builder.emit(Assert(condition, f"{what} must be {wanted}", "InputError", symbol))
