"""Ranges of scalars: the least and the largest number that an operation of the loop IR may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import assert_never

from fxwrap.loop_ir.atoms import Axis, IndirectIndex, SizeAtom
from fxwrap.loop_ir.body_operations import Compute, Constant, IndexValue, Operation, operation_dtype
from fxwrap.loop_ir.index import Atom, FloorDivide, Index, Modulo
from fxwrap.symbolic import Size, SymbolInfo, bounds

Range = tuple[float, float]
"""The least and the largest number."""

UNKNOWN: Range = (-math.inf, math.inf)
"""Of a float that may be anything, NaN too."""

_ROUNDING = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
"""The largest relative error of an operation."""


def size_range(size: Size, limits: Mapping[str, int]) -> Range:
    """Returns the least and the largest value of a size whose symbols are from 0 to their `limits`, by name.

    Sizes with other symbols are unknown.
    """
    if isinstance(size, int):
        return size, size
    if any(symbol.name not in limits for symbol in size.free_symbols):
        return UNKNOWN
    low, high = bounds(size, {name: SymbolInfo(name, 0, upper) for name, upper in limits.items()})
    return -math.inf if low is None else low, math.inf if high is None else high


def index_range(index: Index, limits: Mapping[str, int]) -> Range:
    """Returns the least and the largest value of an index whose symbols are from 0 to their `limits`, by name."""
    low: float = 0
    high: float = 0
    for monomial, coefficient in index.terms:
        term = _product([(coefficient, coefficient), *[_atom_range(atom, limits) for atom in monomial]])
        low, high = low + term[0], high + term[1]
    return low, high


def _atom_range(atom: Atom, limits: Mapping[str, int]) -> Range:
    match atom:
        case Axis() | IndirectIndex():
            return 0, max(size_range(atom.size, limits)[1] - 1, 0)
        case SizeAtom():
            return size_range(atom.expression, limits)
        case Modulo():
            return 0, max(index_range(atom.divisor, limits)[1] - 1, 0)
        case FloorDivide():
            low, high = index_range(atom.base, limits)
            least, most = [max(limit, 1) for limit in index_range(atom.divisor, limits)]
            return _quotient(low, least if low < 0 else most), _quotient(high, most if high < 0 else least)
        case _:
            assert_never(atom)


def _quotient(number: float, divisor: float) -> float:
    """Returns the quotient rounded down; that of an infinity is infinite."""
    return number // divisor if math.isfinite(number) else number


def _product(factors: Sequence[Range]) -> Range:
    low, high = factors[0]
    for least, most in factors[1:]:
        # the bound of an unknown factor is infinite, but its product with 0 is 0
        products = [one * other if one and other else 0 for one in (low, high) for other in (least, most)]
        low, high = min(products), max(products)
    return low, high


def value_range(operations: Sequence[Operation], position: int) -> Range:
    """Returns the least and the largest number that a bool, integer or float operation may have, as its form tells."""
    return _Ranges(operations).of(position)


class _Ranges:
    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self.known: dict[int, Range] = {}

    def of(self, position: int) -> Range:
        """Returns the range of an operation within that of its dtype."""
        if position not in self.known:
            operation = self.operations[position]
            self.known[position] = _within(self._formula(operation), operation_dtype(operation))
        return self.known[position]

    def _formula(self, operation: Operation) -> Range:
        """Returns the range of an operation's exact result."""
        match operation:
            case Constant():
                return operation.value, operation.value
            case IndexValue():
                limits = operation.index.bounds()
                low, high = (None, None) if limits is None else (limits[0].constant, limits[1].constant)
                return UNKNOWN if low is None or high is None else (low, high)
            case Compute(name, operands):
                return _computed(name, [self.of(item) for item in operands])
            case _:
                return UNKNOWN


def _computed(name: str, ranges: list[Range]) -> Range:
    match name, ranges:
        case "cast", [limits]:
            return limits
        case "where", [_, (low, high), (least, most)]:
            return min(low, least), max(high, most)
        case _ if any(not math.isfinite(number) for limits in ranges for number in limits):
            return UNKNOWN
        case (("floor" | "trunc"), [(low, high)]):
            return math.floor(low), max(math.floor(high), math.trunc(high))
        case "neg", [(low, high)]:
            return -high, -low
        case "abs", [(low, high)]:
            return max(low, -high, 0), max(-low, high)
        case "add", [(low, high), (least, most)]:
            return low + least, high + most
        case "sub", [(low, high), (least, most)]:
            return low - most, high - least
        case "mul", [(low, high), (least, most)]:
            products = [one * other for one in (low, high) for other in (least, most)]
            return min(products), max(products)
        case "maximum", [(low, high), (least, most)]:
            return max(low, least), max(high, most)
        case "minimum", [(low, high), (least, most)]:
            return min(low, least), min(high, most)
        case "floor_divide", [(low, high), (divisor, largest)] if divisor == largest > 0:
            return low // divisor, high // divisor
        case "integer_remainder", [_, (divisor, largest)] if divisor == largest > 0:
            return 0, divisor - 1
        case "bitwise_and", [(low, high), (least, most)] if low >= 0 or least >= 0:
            return 0, min([limit for start, limit in ((low, high), (least, most)) if start >= 0])
        case "bitwise_right_shift", [(low, high), (by, most)] if low >= 0 and by == most and 0 <= by < 64:
            return int(low) >> int(by), int(high) >> int(by)
        case _:
            return UNKNOWN


def _within(limits: Range, dtype: torch.dtype) -> Range:
    """Returns the range of a value of a dtype that an exact result in a range becomes."""
    low, high = limits
    if dtype is torch.bool:
        return 0, 1
    if not low <= high:  # NaN
        low, high = UNKNOWN
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return math.trunc(low), math.trunc(high)  # as a cast from a float
        return info.min, info.max  # it may wrap
    if dtype not in _ROUNDING or max(-low, high) > torch.finfo(dtype).max:
        return UNKNOWN
    error = _ROUNDING[dtype]
    return low - abs(low) * error, high + abs(high) * error
