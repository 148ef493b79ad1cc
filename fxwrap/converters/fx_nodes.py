"""Writes the nodes of one FX graph: calls with their metadata, arguments, and expressions as arithmetic on numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from fxwrap.converters.fx_values import FakeValues
from fxwrap.errors import ExpressionError
from fxwrap.symbolic import (
    BY_CLASS,
    COMPARED_BY,
    COMPUTED_BY,
    RELATION_BY_CLASS,
    SymbolInfo,
    constant_value,
    expression_kind,
    make_symbol,
    ordered_terms,
)
from fxwrap.torch_compat import returned_arguments, symbolic_function
from fxwrap.wrapper_ir import LineBase, Origin, TensorType, Value

_CHAINED = frozenset({"max", "min", "and", "or"})

class GraphWriter:
    """One graph with the node of every value and symbol defined so far."""

    def __init__(self, fakes: FakeValues) -> None:
        self.graph = Graph()
        self.fakes = fakes
        self.nodes: dict[str, Node] = {}
        self.numbers: dict[sympy.Basic, Any] = {}  # expressions, symbols among them, as nodes or plain numbers
        self.line: LineBase | None = None
        self.comments: list[str] = []

    # --- nodes ------------------------------------------------------------------------------------------------------

    def begin(self, line: LineBase) -> None:
        """Takes the line that the next nodes are of, which they carry with its origin."""
        self.line = line

    def node(self, op: str, target: Any, arguments: Sequence[Any], keywords: Any, name: str | None, val: Any) -> Node:
        """Adds a node with its metadata."""
        made = self.graph.create_node(op, target, tuple(arguments), keywords, name)
        meta = made.meta
        meta["val"] = val
        if self.line is not None and self.line.origin is not None:
            _mark_origin(meta, self.line.origin)
        if self.comments:
            meta["fxwrap_comments"] = tuple(self.comments)
            self.comments.clear()
        return made

    def call(
        self,
        target: Callable[..., Any] | str,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        val: Any = None,
    ) -> Node:
        """Adds a call, of a submodule by its name too; `name` is the wish for the node's name, `val` what it gives."""
        made = self._call(target, arguments, keywords or {}, name, val)
        if self.line is not None:
            made.meta["fxwrap_line"] = self.line
        return made

    def _call(
        self,
        target: Callable[..., Any] | str,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        name: str | None,
        val: Any,
    ) -> Node:
        wish = name or str(getattr(target, "__name__", target)).partition(".")[0]
        op = "call_module" if isinstance(target, str) else "call_function"
        return self.node(op, target, arguments, dict(keywords), wish, val)

    def placeholder(self, value: Value | SymbolInfo, val: Any) -> Node:
        """Adds an input, and makes the value or symbol stand for it."""
        made = self.node("placeholder", value.name, (), {}, value.name, val)
        if isinstance(value, Value):
            made.meta["fxwrap_type"] = value.type
            self.nodes[value.name] = made
        else:
            self.symbol(value, made)
        return made

    def symbol(self, info: SymbolInfo, number: Any) -> None:
        """Makes a symbol stand for a node or a plain number."""
        self.numbers[make_symbol(info.name)] = number
        if isinstance(number, Node):
            number.meta["fxwrap_symbol"] = info
            if self.line is not None:
                number.meta.setdefault("fxwrap_line", self.line)

    def named_number(self, info: SymbolInfo, expression: Any) -> Node:
        """Adds a node for what an expression names: one of its own, also where another computes the same."""
        is_computed = isinstance(expression, sympy.Basic) and not isinstance(expression, sympy.Symbol)
        made = self._compute(expression) if is_computed else self.number(expression)
        if not isinstance(made, Node) or "fxwrap_symbol" in made.meta or "fxwrap_expression" in made.meta:
            made = self._same(made, expression_kind(expression))
        made.meta["fxwrap_expression"] = expression
        self.symbol(info, made)
        return made

    def _same(self, number: Any, kind: str) -> Node:
        """Adds a node that gives a number as it is."""
        function, more = (operator.and_, (True,)) if kind == "bool" else (operator.pos, ())
        val = function(number.meta["val"] if isinstance(number, Node) else number, *more)
        return self._call(function, (number, *more), {}, None, val)

    # --- arguments --------------------------------------------------------------------------------------------------

    def argument(self, item: Any) -> Any:
        """Returns an argument of the IR as one of a node: values and expressions as nodes, tuples as lists."""
        kind = type(item)
        if kind is Value:
            return self.nodes[item.name]
        if kind is int or kind is float or kind is bool or item is None:
            return item
        if kind is tuple:
            return [self.argument(part) for part in item]
        if isinstance(item, sympy.Basic):
            return self.number(item)
        return item

    def layout(self, type_: TensorType) -> tuple[list[Any], list[Any]]:
        """Returns a type's sizes and strides as arguments."""
        return [self.argument(size) for size in type_.sizes], [self.argument(stride) for stride in type_.strides]

    # --- expressions ------------------------------------------------------------------------------------------------

    def number(self, expression: Any) -> Any:
        """Returns the node or plain number of an expression; each sub-expression is computed once a graph."""
        if not isinstance(expression, sympy.Basic):
            return expression
        found = self.numbers.get(expression)
        if found is None:
            found = self._compute(expression)
            self.numbers[expression] = found
            if isinstance(found, Node):
                found.meta["fxwrap_expression"] = expression
        return found

    def _compute(self, expression: sympy.Basic) -> Any:
        constant = constant_value(expression)
        if constant is not None:
            return constant
        if isinstance(expression, sympy.Symbol):
            raise ExpressionError(f"the symbol {expression} is used before a line defines it")
        if isinstance(expression, sympy.Number):
            return expression.p / expression.q if isinstance(expression, sympy.Rational) else float(expression)
        if isinstance(expression, sympy.Add):
            return self._chain(operator.add, ordered_terms(expression))
        if isinstance(expression, sympy.Mul):
            return self._chain(operator.mul, expression.args)
        if isinstance(expression, sympy.Pow):
            return self.apply(pow, self.number(expression.args[0]), int(expression.args[1]))
        relation = RELATION_BY_CLASS.get(type(expression))
        if relation is not None:
            return self.apply(COMPARED_BY[relation.mark], *[self.number(side) for side in expression.args])
        return self._function(expression)

    def _chain(self, function: Callable[..., Any], operands: Sequence[sympy.Basic]) -> Any:
        total = self.number(operands[0])
        for operand in operands[1:]:
            total = self.apply(function, total, self.number(operand))
        return total

    def _function(self, expression: sympy.Basic) -> Any:
        spec = BY_CLASS.get(type(expression))
        if spec is None:
            raise ExpressionError(f"the expression language has no {type(expression).__name__} (in {expression})")
        if spec.name in _CHAINED:
            mixed = len({expression_kind(operand) for operand in expression.args}) > 1
            function = _MIXED.get(spec.name) if mixed else None
            return self._chain(function or COMPUTED_BY[spec.name], expression.args)
        operands = [self.number(operand) for operand in expression.args]
        match spec.name:
            case "identity":
                return self._same(operands[0], expression_kind(expression.args[0]))
            case "modular_indexing":
                quotient = self.apply(operator.floordiv, operands[0], operands[1])
                return self.apply(operator.mod, quotient, operands[2])
            case "where":
                return self._choice(operands, [expression_kind(branch) for branch in expression.args[1:]])
            case "trunc_to_float":
                return self.apply(torch.sym_float, self.apply(math.trunc, operands[0]))
            case name:
                function = COMPUTED_BY.get(name) or symbolic_function(name) or getattr(math, name)
                return self.apply(function, *operands)

    def _choice(self, operands: Sequence[Any], kinds: Sequence[str]) -> Any:
        """One of two numbers, by a condition; torch's function takes only numbers of one type."""
        condition, then, otherwise = operands
        if kinds[0] == kinds[1]:
            return self.apply(torch.sym_ite, condition, then, otherwise)
        position = self.apply(torch.sym_int, condition)
        if not isinstance(position, Node):
            return (otherwise, then)[position]
        val = self.fakes.unknown("float" if "float" in kinds else "int")
        return self._call(operator.getitem, [(otherwise, then), position], {}, None, val)

    def apply(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Adds a call on numbers, or computes it when all of them are plain."""
        if not any(isinstance(operand, Node) for operand in operands):
            return function(*operands)
        known = [operand.meta["val"] if isinstance(operand, Node) else operand for operand in operands]
        return self._call(function, operands, {}, None, self._number_val(function, known))

    def _number_val(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Returns the number's value in the metadata. It never adds a guard to the input graph's ShapeEnv."""
        kind = _unknown_kind(function, operands)
        return function(*operands) if kind is None else self.fakes.unknown(kind)


def _unknown_kind(function: Callable[..., Any], operands: Sequence[Any]) -> str | None:
    """Returns the kind of a result that torch cannot say without a guard; None where it can."""
    if function in _PLAIN_FLOAT_FUNCTIONS or function in _MIXED.values():
        return "float"
    is_float = any(isinstance(operand, float | torch.SymFloat) for operand in operands)
    if function is pow:
        return "float" if is_float else "int" if isinstance(operands[1], torch.SymInt) else _integer_power(operands[1])
    if function is torch.sym_int and isinstance(operands[0], torch.SymBool):
        return "int"
    if function is torch.sym_ite and type(operands[1]) is not type(operands[2]):  # one of them is a constant
        return "float" if is_float else "int"
    return None


def _integer_power(exponent: int) -> str | None:
    """Returns the kind of an int's power where it is not an int's own: a negative one is a quotient."""
    return "float" if exponent < 0 else None


_MIXED: Mapping[str, Callable[..., Any]] = {"max": max, "min": min}
"""Functions of ints and floats together: torch's own would make the result a float, which holds fewer digits."""

_PLAIN_FLOAT_FUNCTIONS = frozenset({math.exp, math.log, math.asinh})
"""Functions that torch has no symbolic form of: their result is known only at run time."""


def _mark_origin(meta: dict[str, Any], origin: Origin) -> None:
    """Says where a node came from: whole for reading back, and as torch's own tools print it."""
    meta["fxwrap_origin"] = origin
    last = next((source for source in reversed(origin.sources) if source.file), None)
    if last is not None:
        place = f'File "{last.file}", line {last.line}, in {last.module or "forward"}'
        meta["stack_trace"] = f"  {place}\n    {origin}"
    for module in origin.modules[-1:]:
        meta["nn_module_stack"] = {module: (module, "")}


def given_back(target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Returns the fake of what an operator gives back of the operands it has written."""
    given = []
    for place in returned_arguments(target):
        operand = None if place is None else keywords.get(place[1])
        if place is not None and place[0] < len(arguments):
            operand = arguments[place[0]]
        given.append(operand.meta["val"] if isinstance(operand, Node) else None)
    return given[0] if len(given) == 1 else tuple(given) or None
