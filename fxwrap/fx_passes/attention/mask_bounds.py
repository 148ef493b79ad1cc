"""Bounds of the elements of masks, from the operators that build them. Sizes may be symbolic.

A mask with one value everywhere says nothing: ones of any size, `arange(n) < n`, a triangle whose diagonal is beyond
the last column, and what is computed from such. No guard is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import expression_of

Number: TypeAlias = Any
"""An int, a float or an expression of sizes."""

Bounds: TypeAlias = "tuple[Number, Number] | None"
"""The lowest and the highest value that an element may have, False and True as 0 and 1; None if unknown."""

_SUBSETS = frozenset({
    "alias", "clone", "contiguous", "detach", "expand", "expand_as", "flip", "getitem", "lift_fresh_copy", "permute",
    "repeat", "reshape", "select", "slice", "squeeze", "transpose", "unsafe_view", "unsqueeze", "view",
})  # fmt: skip
"""Operators whose result has elements of their first operand only."""
_CASTS = frozenset({"to", "to_copy", "bool", "float", "int", "long", "type_as"})
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
_MAX_OPERATORS = 64


def uniform_value(
    node: Node, fake_of: Callable[[Node], Any], is_written: Callable[[Node], bool]
) -> bool | int | float | None:
    """Returns the value that all elements of a tensor have, whatever the graph's inputs are; None if unknown.

    `is_written` tells whether a call writes a node's memory.
    """
    bounds = _Search(fake_of, is_written).of(node)
    if bounds is None or isinstance(bounds[0], sympy.Basic) or bounds[0] != bounds[1]:
        return None
    return bool(bounds[0]) if fake_of(node).dtype is torch.bool else bounds[0]


class _Search:
    def __init__(self, fake_of: Callable[[Node], Any], is_written: Callable[[Node], bool]) -> None:
        self.fake_of = fake_of
        self.is_written = is_written
        self.known: dict[Node, Bounds] = {}

    def of(self, item: Any) -> Bounds:
        """Returns the bounds of a tensor, or of a number."""
        if not isinstance(item, Node):
            return self._of_number(item)
        fake = self.fake_of(item)
        if not isinstance(fake, torch.Tensor):
            return self._of_number(fake)
        if item not in self.known:
            self.known[item] = None
            supported = item.op in ("call_function", "call_method") and len(self.known) <= _MAX_OPERATORS
            if supported and not fake.is_complex() and not self.is_written(item):
                self.known[item] = self._of_call(item, fake)
        return self.known[item]

    def _of_number(self, number: object) -> Bounds:
        if isinstance(number, torch.SymInt):
            expression = expression_of(number)
            return expression, expression
        known = isinstance(number, bool | int | float) and not (isinstance(number, float) and math.isnan(number))
        return (_plain(number), _plain(number)) if known else None

    def _of_call(self, node: Node, fake: torch.Tensor) -> Bounds:
        name, arguments = name_of(node), list(node.args)
        if name in _SUBSETS and arguments:
            return self.of(arguments[0]) if isinstance(self._fake(arguments[0]), torch.Tensor) else None
        if name in _CASTS and arguments:
            return self._cast(arguments[0], fake)
        if name in ("ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros"):
            number = 1 if "ones" in name else 0
            return number, number
        if name in ("full", "full_like", "new_full", "scalar_tensor"):
            position = {"new_full": 2, "scalar_tensor": 0}.get(name, 1)
            return self.of(arguments[position] if len(arguments) > position else node.kwargs.get("fill_value"))
        if name == "arange":
            return self._arange(node, fake)
        if name in ("tril", "triu"):
            return self._triangle(node, name)
        if any(key not in ("device", "layout", "pin_memory", "dtype", "value") for key in node.kwargs):
            return None
        arguments.extend([item for key, item in node.kwargs.items() if key == "value"])
        operands = [self.of(item) for item in arguments]
        known = [item for item in operands if item is not None]
        if name in ("where", "masked_fill"):
            return _selected(name, operands)
        if len(known) != len(operands) or not known:
            return None
        return self._combined(name, known, fake)

    def _fake(self, item: Any) -> Any:
        return self.fake_of(item) if isinstance(item, Node) else None

    def _cast(self, source: Any, fake: torch.Tensor) -> Bounds:
        bounds, before = self.of(source), self._fake(source)
        if bounds is None or not isinstance(before, torch.Tensor):
            return None
        if fake.dtype is torch.bool and before.dtype is not torch.bool:
            if _less(0, bounds[0]) or _less(bounds[1], 0):
                return 1, 1
            return (0, 0) if bounds == (0, 0) else (0, 1)
        if before.dtype.is_floating_point and not fake.dtype.is_floating_point:
            return None
        is_small = before.dtype is torch.bool or bounds in ((0, 0), (1, 1))
        widens = fake.dtype == before.dtype or (not fake.dtype.is_floating_point and fake.dtype is torch.int64)
        return bounds if is_small or widens else None

    def _arange(self, node: Node, fake: torch.Tensor) -> Bounds:
        values = [self.of(item) for item in node.args]
        if fake.dtype.is_floating_point or any(item is None for item in values) or not 1 <= len(values) <= 3:
            return None
        if any(key in node.kwargs for key in ("start", "end", "step")):
            return None
        start = values[0][0] if len(values) > 1 and values[0] is not None else 0
        step = values[2][0] if len(values) > 2 and values[2] is not None else 1
        if type(step) is not int or step <= 0:
            return None
        return start, start + (expression_of(fake.shape[0]) - 1) * step

    def _triangle(self, node: Node, name: str) -> Bounds:
        """Returns the bounds of a triangle, which has all elements if its diagonal is beyond a corner."""
        bounds, source = self.of(node.args[0]), self._fake(node.args[0])
        diagonal = self.of(node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0))
        if bounds is None or diagonal is None or not isinstance(source, torch.Tensor):
            return None
        rows, columns = [expression_of(size) for size in source.shape[-2:]]
        may_cut = _may_exceed(columns - 1, diagonal[0]) if name == "tril" else _may_exceed(diagonal[0], 1 - rows)
        return _hull(bounds, (0, 0)) if may_cut else bounds

    def _combined(self, name: str, operands: list[tuple[Number, Number]], fake: torch.Tensor) -> Bounds:
        one, other = operands[0], operands[-1]
        is_bool = fake.dtype is torch.bool
        match name:
            case "neg":
                return -one[1], -one[0]
            case "not" | "inv" | "invert" | "bitwise_not" | "logical_not" if is_bool:
                return (1 - one[1], 1 - one[0]) if _is_truth(one) else None
        if len(operands) != 2:
            return None
        if name in _COMPARISONS:
            return _compared(name, one, other)
        both_truths = is_bool and _is_truth(one) and _is_truth(other)
        match name:
            case "and" | "bitwise_and" | "logical_and" | "mul" if both_truths:
                return min(one[0], other[0]), min(one[1], other[1])
            case "or" | "bitwise_or" | "logical_or" | "add" if both_truths:
                return max(one[0], other[0]), max(one[1], other[1])
            case "add" if not is_bool:
                return _finite(one[0] + other[0], one[1] + other[1])
            case "sub" if not is_bool:
                return _finite(one[0] - other[1], one[1] - other[0])
            case "rsub" if not is_bool:
                return _finite(other[0] - one[1], other[1] - one[0])
            case "mul" if not any(isinstance(item, sympy.Basic) for item in (*one, *other)):
                products = [left * right for left in one for right in other]
                return _finite(min(products), max(products))
            case _:
                return None


def _plain(number: Any) -> Number:
    return int(number) if isinstance(number, bool) else number


def _finite(low: Number, high: Number) -> Bounds:
    """Returns bounds, None where an infinite operand made them NaN."""
    return None if any(isinstance(item, float) and math.isnan(item) for item in (low, high)) else (low, high)


def _is_truth(bounds: tuple[Number, Number]) -> bool:
    return bounds in ((0, 0), (0, 1), (1, 1))


def _less(low: Number, high: Number) -> bool:
    """Whether a number is provably less than another one."""
    difference = high - low
    return bool(difference.is_positive) if isinstance(difference, sympy.Basic) else bool(difference > 0)


def _may_exceed(low: Number, high: Number) -> bool:
    """Whether a number may be greater than another one."""
    difference = high - low
    is_below = difference.is_nonnegative if isinstance(difference, sympy.Basic) else difference >= 0
    return not is_below


def _compared(name: str, one: tuple[Number, Number], other: tuple[Number, Number]) -> Bounds:
    """Returns the bounds of a comparison."""
    if name in ("gt", "ge"):
        one, other, name = other, one, {"gt": "lt", "ge": "le"}[name]
    always, never = {
        "lt": (_less(one[1], other[0]), not _may_exceed(other[1], one[0])),
        "le": (not _may_exceed(one[1], other[0]), _less(other[1], one[0])),
        "eq": (one[0] == one[1] == other[0] == other[1], _less(one[1], other[0]) or _less(other[1], one[0])),
        "ne": (_less(one[1], other[0]) or _less(other[1], one[0]), one[0] == one[1] == other[0] == other[1]),
    }[name]
    return (1, 1) if always else (0, 0) if never else (0, 1)


def _hull(one: Bounds, other: Bounds) -> Bounds:
    if one is None or other is None or any(isinstance(item, sympy.Basic) for item in (*one, *other)):
        return one if one == other else None
    return min(one[0], other[0]), max(one[1], other[1])


def _selected(name: str, operands: list[Bounds]) -> Bounds:
    """Returns the bounds of `where(condition, value, other)` or `masked_fill(other, condition, value)`."""
    if len(operands) != 3:
        return None
    condition, value, other = operands if name == "where" else (operands[1], operands[2], operands[0])
    if condition == (1, 1):
        return value
    return other if condition == (0, 0) else _hull(value, other)
