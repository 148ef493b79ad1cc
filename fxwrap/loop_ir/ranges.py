"""Ranges of scalars: the least and the largest number that an operation of the loop IR may have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxwrap.loop_ir.kernel import Compute, Constant, IndexValue, Operation, operation_dtype

Range = tuple[float, float]
"""The least and the largest number."""

UNKNOWN: Range = (-math.inf, math.inf)
"""Of a float that may be anything, NaN too."""

_ROUNDING = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
"""The largest relative error of an operation."""


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
