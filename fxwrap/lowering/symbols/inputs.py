"""Binds the symbols of a graph: to sizes and strides of its inputs, or to scalar inputs.

An input may be any number over symbols, and so may a size: `2*s0`, `s0 + 448`, `s0*s1`. Plain symbols are bound first;
then each expression with one unknown symbol is solved for it. An expression that determines none of its symbols
(`s0*s1` or `s0//2` where neither `s0` nor `s1` is known) becomes a new symbol wherever the graph contains it: a graph
that computes with the symbols themselves would have them as inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import sympy
import torch

from fxwrap.errors import GraphError
from fxwrap.lines import GUARD_MESSAGE, Assert, Let, SizeOf
from fxwrap.lowering.builder import Builder, FakeValue
from fxwrap.lowering.symbols.table import SymbolicNumber
from fxwrap.symbolic import (
    Expression,
    SymbolInfo,
    canonicalize,
    expression_kind,
    floor_divide,
    make_symbol,
    maximum,
    print_expr,
    product,
    symbol_kind,
    total,
)
from fxwrap.torch_compat import symbol_expression, sympy_functions
from fxwrap.wrapper_ir import LineBase, Size, TensorType, Value

_PREFIXES = {"int": "n", "float": "f", "bool": "b"}


# --- expressions that determine none of their symbols -----------------------------------------------------------------


def replace_unsolvable(builder: Builder, fakes: Iterable[FakeValue]) -> None:
    """Replaces each expression in a program's inputs by a new symbol if it determines none of its symbols.

    `fakes` are the fake values of the inputs. Must run before the builder translates any of their sizes.
    """
    symbols = builder.symbols
    numbers = [number for fake in fakes for number in _numbers(fake) if isinstance(number, SymbolicNumber)]
    if numbers:
        symbols.replace_guarded(numbers[0])
    expressions = dict.fromkeys([symbol_expression(number) for number in numbers])
    symbols.preserve(expressions)
    known = {expression for expression in expressions if isinstance(expression, sympy.Symbol)}
    pending = [expression for expression in expressions if expression not in known and expression.free_symbols]
    while pending:
        pending = _solve_all(pending, known)
        if not pending:
            return
        smallest = min(pending, key=lambda expression: (expression.count_ops(), str(expression)))
        symbol = make_symbol(symbols.program.fresh(_PREFIXES[expression_kind(symbols.translate(smallest))]))
        symbols.replace(smallest, symbol)
        known.add(symbol)
        pending = [expression.subs(smallest, symbol) for expression in pending if expression is not smallest]


def _solve_all(pending: list[sympy.Basic], known: set[sympy.Symbol]) -> list[sympy.Basic]:
    """Adds the symbols that can be solved for to `known`; returns the expressions that still have unknown symbols."""
    while True:
        unsolved = []
        for expression in pending:
            unknown = expression.free_symbols - known
            if len(unknown) == 1 and _determines(expression, next(iter(unknown))):
                known |= unknown
            elif unknown:
                unsolved.append(expression)
        if len(unsolved) == len(pending):
            return unsolved
        pending = unsolved


def _numbers(fake: FakeValue) -> Iterator[object]:
    if isinstance(fake, torch.Tensor):
        yield from fake.shape
        yield from fake.stride() if fake.layout is torch.strided else ()
    else:
        yield fake


def _determines(expression: sympy.Basic, symbol: sympy.Symbol) -> bool:
    return boolean_symbol(expression) == symbol or linear_parts(expression, symbol) is not None


def boolean_symbol(expression: object) -> sympy.Symbol | None:
    """Returns the symbol u of `u == 1`, the expression of a ShapeEnv for a bool; else None."""
    is_truth = isinstance(expression, sympy.Eq) and expression.rhs == 1 and isinstance(expression.lhs, sympy.Symbol)
    return expression.lhs if is_truth else None  # type: ignore[attr-defined]


def linear_parts(expression: object, symbol: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Returns the factor and the rest of `factor*symbol + rest`, both free of the symbol; None for other forms."""
    if isinstance(expression, sympy_functions.CleanDiv):  # exact by definition
        inner = linear_parts(expression.args[0], symbol)
        return None if inner is None or inner[1] != 0 else (inner[0] / expression.args[1], sympy.S.Zero)
    if not isinstance(expression, sympy.Add | sympy.Mul):
        return None
    factor, rest = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
    linear = factor != 0 and symbol not in factor.free_symbols and symbol not in rest.free_symbols
    return (factor, rest) if linear and sympy.expand(factor * symbol + rest - expression) == 0 else None


def solve_linear(whole: sympy.Symbol, factor: sympy.Expr, rest: sympy.Expr) -> Size:
    """Returns `(whole - rest) / factor`, which is exact. A symbolic factor may be 0; then the result is 0."""
    numerator, denominator = sympy.fraction(factor)
    multiple = product((total((whole, canonicalize(-rest))), canonicalize(denominator)))
    divisor = canonicalize(numerator)
    if divisor == 1:
        return multiple
    return floor_divide(multiple, divisor if isinstance(divisor, int) else maximum(divisor, 1))


# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Equation:
    """A number known when a program starts, and its expression.

    The number is the scalar input `symbol`, or a size or stride of a tensor, for which no symbol is defined yet.
    """

    expression: Expression
    number: object
    symbol: sympy.Symbol | None = None
    value: Value | None = None
    dim: int = 0
    of: Literal["size", "stride"] = "size"

    def __str__(self) -> str:
        where = f"input '{self.symbol}'" if self.value is None else f"{self.of} {self.dim} of input '{self.value.name}'"
        return f"the {where} is {self.expression}"


class InputBinder:
    """Defines the symbols of a graph from its inputs; `lines` are the lines that do so, before those of the graph."""

    def __init__(self, builder: Builder) -> None:
        self.lines: list[LineBase] = []
        self._symbols = builder.symbols
        self._storages = builder.storages
        self._scalars: list[SymbolInfo] = []
        self._equations: list[_Equation] = []

    def scalar_input(self, number: SymbolicNumber) -> SymbolInfo:
        """Returns the symbol of a scalar input: the number's own, or a new one where that is no unknown symbol.

        `bind_sizes` solves the equation between a new symbol and the number.
        """
        expression = self._symbols.expression(number)
        if isinstance(expression, sympy.Symbol) and not self._symbols.is_known(expression):
            info = self._symbols.info(number)
        else:
            kind = {torch.SymFloat: "float", torch.SymBool: "bool"}.get(type(number), "int")
            info = self._symbols.program.add(self._symbols.program.fresh(_PREFIXES[kind]), number)
            self._equations.append(_Equation(expression, number, make_symbol(info.name)))
        self._scalars.append(info)
        self._symbols.define(info.name)
        return info

    def bind_sizes(self, values: Sequence[Value]) -> None:
        """Defines every symbol in the types of these inputs, plain ones first.

        Raises GraphError, which names an input, for a size that determines no symbol.
        """
        pending = {equation.expression: equation for equation in self._equations}
        for value in values:
            if not isinstance(value.type, TensorType) or _is_static(value.type):
                continue
            fake = self._storages.fake(value)
            bound: tuple[tuple[Literal["size", "stride"], Sequence[Size], Sequence[object]], ...] = (
                ("size", value.type.sizes, fake.shape),
                ("stride", value.type.strides, fake.stride()),
            )
            for of, sizes, numbers in bound:
                for dim, size in enumerate(sizes):
                    if not isinstance(size, sympy.Symbol):
                        pending.setdefault(size, _Equation(size, numbers[dim], None, value, dim, of))
                    elif not self._symbols.is_known(size):
                        self._bind_size(self._symbols.info(numbers[dim]), value, dim, of)
        equations = [equation for equation in pending.values() if isinstance(equation.expression, sympy.Basic)]
        while equations:
            unsolved = [equation for equation in equations if not self._solve(equation)]
            if len(unsolved) == len(equations):
                names = ", ".join(sorted(symbol.name for symbol in self._symbols.unknown(equations[0].expression)))
                reason = f"{equations[0]}, which does not determine the symbol {names}"
                raise GraphError("", reason, "Pass the size as an input, or mark another dimension dynamic")
            equations = unsolved

    def _bind_size(self, info: SymbolInfo, value: Value, dim: int, of: Literal["size", "stride"]) -> None:
        self._symbols.define(info.name)
        self.lines.append(SizeOf(info, value, dim, of))

    def _solve(self, equation: _Equation) -> bool:
        """Defines the unknown symbol of an equation if it has exactly one; returns whether none is unknown now."""
        unknown = self._symbols.unknown(equation.expression)
        if not unknown:
            return True
        symbol = next(iter(unknown))
        if equation.symbol is not None and boolean_symbol(equation.expression) == symbol:
            self._symbols.define(symbol.name)
            number = sympy_functions.Where(equation.symbol, sympy.S.One, sympy.S.Zero, evaluate=False)
            self.lines.append(Let(SymbolInfo(symbol.name, 0, 1), canonicalize(number)))
            return True
        parts = linear_parts(equation.expression, symbol) if len(unknown) == 1 else None
        if parts is None:
            return False
        whole = equation.symbol
        if whole is None:
            assert equation.value is not None
            whole = make_symbol(self._symbols.program.fresh("n"))
            info = self._symbols.program.add(whole.name, equation.number)
            self._bind_size(info, equation.value, equation.dim, equation.of)
        info = self._symbols.info_of(symbol, equation.number)
        self._symbols.define(symbol.name)
        self.lines.append(Let(info, solve_linear(whole, *parts)))
        return True

    # --- checks -----------------------------------------------------------------------------------------------------

    def add_checks(self, values: Iterable[Value]) -> None:
        """Adds checks that inputs have the ranks, sizes and numbers that the graph was traced for.

        The checks raise InputError, which names the input, the dimension and the range.
        """
        unchecked = {value.name for value in values}
        for position, line in enumerate(self.lines):
            if isinstance(line, SizeOf) and line.tensor.name in unchecked:  # the first read of a size checks the rank
                unchecked.remove(line.tensor.name)
                self.lines[position] = replace(line, rank=len(line.tensor.tensor_type.sizes))
        for line in list(self.lines):
            if isinstance(line, SizeOf):
                self._check_range(line.symbol, f"input '{line.tensor.name}': {line.of} {line.dim}")
        for info in self._scalars:
            self._check_range(info, f"input '{info.name}'")
        for equation in self._equations:
            if boolean_symbol(equation.expression) is None:
                condition = sympy.Eq(equation.symbol, equation.expression, evaluate=False)
                message = f"input '{equation.symbol}' must be {print_expr(equation.expression)}"
                self.lines.append(Assert(canonicalize(condition), message, "InputError", equation.symbol))

    def equality_checks(self) -> list[Assert]:
        """Returns checks of the equalities by which sizes were simplified, of those between symbols of inputs."""
        bound = {line.symbol.name for line in self.lines if isinstance(line, SizeOf | Let)}
        bound |= {info.name for info in self._scalars}
        checks = []
        for left, right in self._symbols.used_equalities():
            condition = canonicalize(sympy.Eq(left, right, evaluate=False))
            if isinstance(condition, int) or condition is sympy.true:
                continue
            if {symbol.name for symbol in condition.free_symbols} <= bound:
                checks.append(Assert(condition, f"{GUARD_MESSAGE}{print_expr(condition)}", "InputError"))
        return checks

    def _check_range(self, info: SymbolInfo, subject: str) -> None:
        symbol, lower, upper = make_symbol(info.name), info.lower, info.upper
        if symbol_kind(info.name) != "int":
            return
        at_least = sympy.Ge(symbol, lower, evaluate=False) if lower is not None and lower > 0 else sympy.true
        at_most = sympy.Le(symbol, upper, evaluate=False) if upper is not None else sympy.true
        if at_least == at_most:
            return
        if lower == upper:
            expected = f"{lower}"
        elif sympy.true in (at_least, at_most):
            expected = f"at least {lower}" if at_most == sympy.true else f"at most {upper}"
        else:
            expected = f"from {lower} to {upper}"
        condition = canonicalize(sympy.And(at_least, at_most, evaluate=False))
        self.lines.append(Assert(condition, f"{subject} must be {expected}", "InputError", symbol))


def _is_static(type_: TensorType) -> bool:
    return all(type(number) is int for number in (*type_.sizes, *type_.strides))
