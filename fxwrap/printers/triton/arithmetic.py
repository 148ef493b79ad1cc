"""The arithmetic of a kernel as Triton expressions: the choice between forms of an operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import Compute, Constant, DeviceAssert, Index, IndexValue, Kernel, Load, Operation, Store
from fxwrap.loop_ir.builder import eliminate_dead_operations
from fxwrap.printers.triton.operations import TRITON_DTYPES, cast_text, literal_text, template
from fxwrap.printers.triton.precision import fast_erf_operations, fast_math_operations, is_sum_of_exponentials


def collapse_bool_casts(kernel: Kernel) -> Kernel:
    """Returns a kernel that casts a bool directly to the last dtype of a chain of casts.

    0 and 1 are exact in all dtypes, and conversions of 64-bit integers are slow on GPUs.
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
            elif not isinstance(source, Store | DeviceAssert) and source.dtype is torch.bool:
                sources[position] = used
        operations.append(operation)
    return eliminate_dead_operations(replace(kernel, operations=tuple(operations)))


@dataclass(frozen=True)
class PrintedExpression:
    """The text of an operation's value, a name for it, and the helper functions it calls."""

    name: str
    text: str
    helpers: tuple[str, ...] = ()


class Arithmetic:
    """Writes the arithmetic operations of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.fast_math = fast_math_operations(kernel)
        self.fast_erfs = fast_erf_operations(kernel, self.fast_math)

    def __call__(
        self, position: int, operation: Compute, value: Callable[[int], str], text: Callable[[int], str]
    ) -> PrintedExpression:
        """Returns an operation as an expression.

        `value` returns the text of an operand as a value of its dtype; `text` returns a plain literal for a constant.
        """
        used = operation.operands
        if operation.name == "cast":
            name = "flag" if operation.dtype is torch.bool else self._base_name(used[0])
            return PrintedExpression(name, cast_text(value(used[0]), self.dtype(used[0]), operation.dtype))
        if operation.name == "bitcast":
            return PrintedExpression("bits", f"{value(used[0])}.to({TRITON_DTYPES[operation.dtype]}, bitcast=True)")
        factor = self._reciprocal_factor(position, operation) if operation.name == "div" else None
        if factor is not None:
            return PrintedExpression("quotient", f"{text(used[0])} * {factor}")
        narrow = self._narrow_comparison(operation, value)
        if narrow is not None:
            return narrow
        fast_math = position in self.fast_math
        if operation.name == "div":  # the fast form returns 0 for the largest divisors
            fast_math = fast_math and is_sum_of_exponentials(self.kernel, used[1])
        name = "fast_erf" if position in self.fast_erfs else operation.name
        form = template(name, self.dtype(used[-1]), fast_math)
        typed = used[1:] if operation.name == "where" else used
        literal = form.literals and not all(isinstance(self.kernel.operations[item], Constant) for item in typed)
        texts = [text(item) if literal and item in typed else value(item) for item in used]
        return PrintedExpression(operation.name, form.text.format(*texts), form.helpers)

    def _reciprocal_factor(self, position: int, operation: Compute) -> str | None:
        """Returns the reciprocal of a constant divisor if multiplication is as accurate as the context needs.

        Returns None for other divisions.
        """
        dividend, constant = [self.kernel.operations[item] for item in operation.operands]
        if isinstance(dividend, Constant) or not isinstance(constant, Constant):
            return None
        if not 2.0**-60 < abs(constant.value) < 2.0**60:
            return None
        exact = abs(math.frexp(constant.value)[0]) == 0.5
        if not exact and not (position in self.fast_math and operation.dtype is torch.float32):
            return None
        factor = literal_text(1.0 / constant.value, operation.dtype)
        if operation.dtype is not torch.float32:
            factor = f"tl.full((), {factor}, {TRITON_DTYPES[operation.dtype]})"
        return factor

    def _narrow_comparison(self, operation: Compute, value: Callable[[int], str]) -> PrintedExpression | None:
        """Returns the comparison of indices with a value that does not vary in 32 bits, as in a one-hot.

        Returns None for other operations. GPUs need two instructions for a 64-bit comparison.
        """
        sign = {"eq": "==", "ne": "!="}.get(operation.name)
        if sign is None:
            return None
        for index, other in (operation.operands, operation.operands[::-1]):
            left, varying = self.kernel.operations[index], self.kernel.varying
            if isinstance(left, IndexValue) and varying[index] and not varying[other] and _fits_int32(left.index):
                text = f"to_int32_or_minus_one({value(other)}) {sign} {value(index)}.to(tl.int32)"
                return PrintedExpression(operation.name, text, ("to_int32_or_minus_one",))
        return None

    def _base_name(self, position: int) -> str:
        operation = self.kernel.operations[position]
        if isinstance(operation, Load):
            return operation.buffer
        return operation.name if isinstance(operation, Compute) else "cast"

    def dtype(self, position: int) -> torch.dtype:
        """Returns the dtype of an operation's value."""
        operation = self.kernel.operations[position]
        assert not isinstance(operation, Store | DeviceAssert), "neither has a value"
        return operation.dtype


def _fits_int32(index: Index) -> bool:
    """Whether an index is proved to be a non-negative 32-bit integer."""
    limits = index.bounds()
    if limits is None:
        return False
    low, high = limits[0].constant, limits[1].constant
    return low is not None and high is not None and low >= 0 and high < 2**31
