"""Nodes of one FX graph: calls with their metadata, arguments, and expressions as arithmetic on numbers."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Graph, Node

from fxwrap import symbolic
from fxwrap.converters.access_order import META_KEY, Accesses
from fxwrap.converters.fx.metadata import kernel_metadata, node_metadata
from fxwrap.errors import ExpressionError
from fxwrap.inference import FakeValues
from fxwrap.lines import Launch
from fxwrap.torch_compat import OpOverload, return_aliases, symbolic_function
from fxwrap.wrapper_ir import LineBase, TensorType, Value

_CHAINED = frozenset({"max", "min", "and", "or"})

CallTarget: TypeAlias = Callable[..., Any] | str
"""The target of a call: a function or operator, or the name of a submodule."""

Number: TypeAlias = Node | int | float | bool
"""A number of a graph: a node, or a constant."""


class GraphWriter:
    """One graph, with the node of every value and symbol defined so far.

    Nodes carry `line`, the line that they are emitted for, and its provenance.
    """

    def __init__(self, fakes: FakeValues) -> None:
        self.graph = Graph()
        self.fakes = fakes
        self.nodes: dict[str, Node] = {}
        self.numbers: dict[sympy.Basic, Number] = {}  # of expressions, symbols among them
        self.line: LineBase | None = None
        self.accesses: Accesses | None = None  # of memory whose writes have an order
        self.comments: list[str] = []
        self._parameters: set[str] = set()  # the targets of placeholders

    # --- nodes ------------------------------------------------------------------------------------------------------

    def node(
        self,
        op: str,
        target: CallTarget,
        arguments: Sequence[object],
        keywords: Mapping[str, object],
        name: str | None,
        val: object,
    ) -> Node:
        """Adds a node with its metadata."""
        node = self.graph.create_node(op, target, tuple(arguments), dict(keywords), name)  # type: ignore[arg-type]
        origin, stream = (None, 0) if self.line is None else (self.line.origin, self.line.stream)
        node.meta = node_metadata(val, origin, stream, node.name)
        if self.comments and op != "get_attr":  # whose position has no meaning: torch's tools move them
            node.meta["fxwrap_comments"] = tuple(self.comments)
            self.comments.clear()
        return node

    def call(
        self,
        target: CallTarget,
        arguments: Sequence[object],
        keywords: Mapping[str, object] | None = None,
        *,
        name: str | None = None,
        val: object = None,
    ) -> Node:
        """Adds a call for the current line; `name` is a hint for the node's name, `val` the fake result."""
        node = self._call(target, arguments, val, keywords, name)
        if self.line is not None:
            node.meta["fxwrap_line"] = self.line
        if self.accesses is not None:
            node.meta[META_KEY] = self.accesses
        if isinstance(self.line, Launch):
            node.meta |= kernel_metadata(self.line)
        return node

    def _call(
        self,
        target: CallTarget,
        arguments: Sequence[object],
        val: object,
        keywords: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> Node:
        name_hint = name or str(getattr(target, "__name__", target)).partition(".")[0]
        op = "call_module" if isinstance(target, str) else "call_function"
        return self.node(op, target, arguments, keywords or {}, name_hint, val)

    def define(
        self,
        value: Value,
        target: CallTarget,
        arguments: Sequence[object],
        keywords: Mapping[str, object] | None = None,
        *,
        val: object,
    ) -> None:
        """Adds the call that defines a value."""
        self.nodes[value.name] = self.call(target, arguments, keywords, name=value.name, val=val)

    def placeholder(self, value: Value | symbolic.SymbolInfo, val: object) -> Node:
        """Adds an input that defines a value or symbol."""
        node = self.node("placeholder", value.name, (), {}, value.name, val)
        if not value.name.isidentifier() or keyword.iskeyword(value.name) or value.name in self._parameters:
            node.target = node.name
        self._parameters.add(str(node.target))
        if isinstance(value, Value):
            node.meta["fxwrap_type"] = value.type
            self.nodes[value.name] = node
        else:
            self.symbol(value, node)
        return node

    def symbol(self, info: symbolic.SymbolInfo, number: Number) -> None:
        """Defines a symbol as a number."""
        self.numbers[symbolic.make_symbol(info.name)] = number
        if isinstance(number, Node):
            number.meta["fxwrap_symbol"] = info
            if self.line is not None:
                number.meta.setdefault("fxwrap_line", self.line)

    def named_number(self, info: symbolic.SymbolInfo, expression: symbolic.NumberOrExpression) -> Node:
        """Adds the node of a `symbol.let`: its own one, even if another node computes the same."""
        is_computed = isinstance(expression, sympy.Basic) and not isinstance(expression, sympy.Symbol)
        number = self._compute(expression) if is_computed else self.number(expression)
        if not isinstance(number, Node) or "fxwrap_symbol" in number.meta or "fxwrap_expression" in number.meta:
            number = self._identity(number, symbolic.expression_kind(expression))
        number.meta["fxwrap_expression"] = expression
        self.symbol(info, number)
        return number

    def _identity(self, number: Number, kind: str) -> Node:
        function, more = (operator.and_, (True,)) if kind == "bool" else (operator.pos, ())
        return self._call(function, (number, *more), function(_val_of(number), *more))

    # --- arguments --------------------------------------------------------------------------------------------------

    def argument(self, item: Any) -> Any:
        """Returns an argument of the IR as one of a node: values and expressions as nodes, tuples as lists."""
        kind = type(item)
        if kind is Value:
            return self.nodes[item.name]
        if kind is tuple:
            return [self.argument(part) for part in item]
        return self.number(item) if isinstance(item, sympy.Basic) else item

    def layout(self, type_: TensorType) -> tuple[list[Number], list[Number]]:
        """Returns a type's sizes and strides as arguments."""
        return self.argument(type_.sizes), self.argument(type_.strides)

    # --- expressions ------------------------------------------------------------------------------------------------

    def number(self, expression: symbolic.NumberOrExpression) -> Number:
        """Returns the number of an expression; each sub-expression is computed once in a graph."""
        if not isinstance(expression, sympy.Basic):
            return expression
        number = self.numbers.get(expression)
        if number is None:
            number = self.numbers[expression] = self._compute(expression)
            if isinstance(number, Node):
                number.meta["fxwrap_expression"] = expression
        return number

    def _compute(self, expression: sympy.Basic) -> Number:
        constant = symbolic.constant_value(expression)
        if constant is not None:
            return constant
        if isinstance(expression, sympy.Symbol):
            raise ExpressionError(f"the symbol {expression} is used before a line defines it")
        if isinstance(expression, sympy.Rational):
            return float(expression.p / expression.q)
        if isinstance(expression, sympy.Number):
            return float(expression)
        if isinstance(expression, sympy.Add):
            return self._chain(operator.add, symbolic.ordered_terms(expression))
        if isinstance(expression, sympy.Mul):
            return self._chain(operator.mul, expression.args)
        if isinstance(expression, sympy.Pow):
            return self.apply(pow, self.number(expression.args[0]), int(expression.args[1]))
        relation = symbolic.RELATION_BY_CLASS.get(type(expression))
        if relation is not None:
            return self.apply(symbolic.RELATION_CALLABLES[relation.mark], *map(self.number, expression.args))
        return self._function(expression)

    def _chain(self, function: Callable[..., Any], operands: Sequence[sympy.Basic]) -> Number:
        result = self.number(operands[0])
        for operand in operands[1:]:
            result = self.apply(function, result, self.number(operand))
        return result

    def _function(self, expression: sympy.Basic) -> Number:
        spec = symbolic.FUNCTION_BY_CLASS.get(type(expression))
        if spec is None:
            raise ExpressionError(f"the expression language has no {type(expression).__name__} (in {expression})")
        if spec.name in _CHAINED:
            mixed = len({symbolic.expression_kind(operand) for operand in expression.args}) > 1
            function = _MIXED_KIND_FUNCTIONS.get(spec.name) if mixed else None
            return self._chain(function or symbolic.FUNCTION_CALLABLES[spec.name], expression.args)
        operands = [self.number(operand) for operand in expression.args]
        match spec.name:
            case "identity":
                return self._identity(operands[0], symbolic.expression_kind(expression.args[0]))
            case "modular_indexing":
                quotient = self.apply(operator.floordiv, operands[0], operands[1])
                return self.apply(operator.mod, quotient, operands[2])
            case "where":
                return self._conditional(operands, [symbolic.expression_kind(branch) for branch in expression.args[1:]])
            case "trunc_to_float":
                return self.apply(torch.sym_float, self.apply(math.trunc, operands[0]))
            case name:
                function = symbolic.FUNCTION_CALLABLES.get(name) or symbolic_function(name) or getattr(math, name)
                return self.apply(function, *operands)

    def _conditional(self, operands: Sequence[Number], kinds: Sequence[str]) -> Number:
        """Returns one of two numbers, by a condition; `torch.sym_ite` accepts only numbers of one type."""
        condition, then, otherwise = operands
        if kinds[0] == kinds[1]:
            return self.apply(torch.sym_ite, condition, then, otherwise)
        index = self.apply(torch.sym_int, condition)
        if not isinstance(index, Node):
            return (otherwise, then)[int(index)]
        val = self.fakes.unbacked_number("float" if "float" in kinds else "int")
        return self._call(operator.getitem, [(otherwise, then), index], val)

    def apply(self, function: Callable[..., Any], *operands: Number) -> Number:
        """Adds a call on numbers, or computes it if all of them are constants."""
        if not any(isinstance(operand, Node) for operand in operands):
            number: Number = function(*operands)
            return number
        vals = [_val_of(operand) for operand in operands]
        kind = _unknown_kind(function, vals)  # the metadata must add no guard to the input graph's ShapeEnv
        return self._call(function, operands, function(*vals) if kind is None else self.fakes.unbacked_number(kind))


def _val_of(number: Number) -> Any:
    return number.meta["val"] if isinstance(number, Node) else number


def _unknown_kind(function: Callable[..., Any], operands: Sequence[Any]) -> str | None:
    """Returns the kind of a result that torch cannot compute symbolically without a guard; None if it can."""
    if function in _PLAIN_FLOAT_FUNCTIONS or function in _MIXED_KIND_FUNCTIONS.values():
        return "float"
    is_float = any(isinstance(operand, float | torch.SymFloat) for operand in operands)
    if function is pow:
        if is_float:
            return "float"
        exponent = operands[1]
        return "int" if isinstance(exponent, torch.SymInt) else "float" if exponent < 0 else None
    if function is torch.sym_int and isinstance(operands[0], torch.SymBool):
        return "int"
    if function is torch.sym_ite and type(operands[1]) is not type(operands[2]):  # one of them is a constant
        return "float" if is_float else "int"
    return None


_MIXED_KIND_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"max": max, "min": min}
"""Functions of ints and floats together: torch's symbolic ones convert the result to float and lose digits."""

_PLAIN_FLOAT_FUNCTIONS = frozenset({math.exp, math.log, math.asinh})
"""Functions without a symbolic form in torch."""


def fake_returned_operands(target: CallTarget, arguments: Sequence[object], keywords: Mapping[str, object]) -> object:
    """Returns the fakes of the mutated operands that an operator returns."""
    assert isinstance(target, OpOverload)
    vals = []
    for alias in return_aliases(target):
        operand = None if alias is None else keywords.get(alias[1])
        if alias is not None and alias[0] < len(arguments):
            operand = arguments[alias[0]]
        vals.append(operand.meta["val"] if isinstance(operand, Node) else None)
    return vals[0] if len(vals) == 1 else tuple(vals) or None
