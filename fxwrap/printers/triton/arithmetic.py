"""The arithmetic of a kernel as expressions: which form of an operation is written, and with what beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import Compute, Constant, Index, IndexValue, Kernel, Load, Operation, Require, Store
from fxwrap.loop_ir.builder import without_dead_operations
from fxwrap.printers.triton.operations import TRITON_DTYPES, cast_text, number_text, template
from fxwrap.printers.triton.precision import coarse_operations, erfs_beside_one, is_sum_of_exponentials


def flags_cast_once(kernel: Kernel) -> Kernel:
    """Returns a kernel in which a bool becomes a number in one step, however many the graph takes over other dtypes.

    0 and 1 are the same numbers in all of them, and a GPU converts 64-bit integers at an eighth of its speed.
    """
    sources: dict[int, int] = {}
    operations: list[Operation] = []
    for position, operation in enumerate(kernel.operations):
        if isinstance(operation, Compute) and operation.name == "cast" and operation.dtype is not torch.bool:
            (used,) = operation.operands
            source = kernel.operations[used]
            if used in sources:
                operation = replace(operation, operands=(sources[used],))
                sources[position] = sources[used]
            elif not isinstance(source, Store | Require) and source.dtype is torch.bool:
                sources[position] = used
        operations.append(operation)
    return without_dead_operations(replace(kernel, operations=tuple(operations)))


@dataclass(frozen=True)
class Expression:
    """The text of an operation's value, a name for it, and the helper functions that the text calls."""

    name: str
    text: str
    helpers: tuple[str, ...] = ()


class Arithmetic:
    """Writes the arithmetic operations of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.coarse = coarse_operations(kernel)
        self.beside_one = erfs_beside_one(kernel, self.coarse)

    def __call__(
        self, position: int, operation: Compute, value: Callable[[int], str], text: Callable[[int], str]
    ) -> Expression:
        """Returns an operation as an expression.

        `value` gives an operand as a value of its dtype, `text` what is written for it, a literal for a number.
        """
        used = operation.operands
        if operation.name == "cast":
            name = "flag" if operation.dtype is torch.bool else self._base_name(used[0])
            return Expression(name, cast_text(value(used[0]), self._dtype(used[0]), operation.dtype))
        if operation.name == "bitcast":
            return Expression("bits", f"{value(used[0])}.to({TRITON_DTYPES[operation.dtype]}, bitcast=True)")
        factor = self._factor(position, operation) if operation.name == "div" else None
        if factor is not None:
            return Expression("quotient", f"{text(used[0])} * {factor}")
        narrow = self._narrow(operation, value)
        if narrow is not None:
            return narrow
        coarse = position in self.coarse
        if operation.name == "div":  # the fast form gives 0 for the largest divisors
            coarse = coarse and is_sum_of_exponentials(self.kernel, used[1])
        name = "erf_beside_one" if position in self.beside_one else operation.name
        found = template(name, self._dtype(used[-1]), coarse)
        numbers = used[1:] if operation.name == "where" else used
        literal = found.literals and not all(isinstance(self.kernel.operations[item], Constant) for item in numbers)
        texts = [text(item) if literal and item in numbers else value(item) for item in used]
        return Expression(operation.name, found.text.format(*texts), found.helpers)

    def _factor(self, position: int, operation: Compute) -> str | None:
        """Returns what to multiply with instead of dividing by a constant, where that gives the same or nearly does.

        None where the difference could be seen.
        """
        dividend, constant = [self.kernel.operations[item] for item in operation.operands]
        if isinstance(dividend, Constant) or not isinstance(constant, Constant):
            return None
        if not 2.0**-60 < abs(constant.value) < 2.0**60:
            return None
        exact = abs(math.frexp(constant.value)[0]) == 0.5
        if not exact and not (position in self.coarse and operation.dtype is torch.float32):
            return None
        factor = number_text(1.0 / constant.value, operation.dtype)
        if operation.dtype is not torch.float32:
            factor = f"tl.full((), {factor}, {TRITON_DTYPES[operation.dtype]})"
        return factor

    def _narrow(self, operation: Compute, value: Callable[[int], str]) -> Expression | None:
        """Returns the comparison of positions in a row with one number of the row in 32 bits, as in a one-hot.

        None for what is no such comparison. A GPU compares 64 bits in two instructions for every element.
        """
        sign = {"eq": "==", "ne": "!="}.get(operation.name)
        if sign is None:
            return None
        for index, other in (operation.operands, operation.operands[::-1]):
            position, varying = self.kernel.operations[index], self.kernel.varying
            if isinstance(position, IndexValue) and varying[index] and not varying[other] and _fits(position.index):
                text = f"narrowed({value(other)}) {sign} {value(index)}.to(tl.int32)"
                return Expression(operation.name, text, ("narrowed",))
        return None

    def _base_name(self, position: int) -> str:
        operation = self.kernel.operations[position]
        if isinstance(operation, Load):
            return operation.buffer
        return operation.name if isinstance(operation, Compute) else "cast"

    def _dtype(self, position: int) -> torch.dtype:
        operation = self.kernel.operations[position]
        assert not isinstance(operation, Store | Require), "neither has a value"
        return operation.dtype


def _fits(index: Index) -> bool:
    """Whether an index is shown to be a 32-bit integer that is not negative."""
    limits = index.bounds()
    if limits is None:
        return False
    low, high = limits[0].constant, limits[1].constant
    return low is not None and high is not None and low >= 0 and high < 2**31
