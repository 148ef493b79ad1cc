"""Forms of the scores of streaming reductions: masks, factors, biases that are linear in the streamed position."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import Axis, Compute, Constant, IndexValue, Kernel, Load, StreamingReduction
from fxwrap.printers.triton.operations import safe_reciprocal

LOWEST = -5e37
"""Maxima of scores below are those of rows that a large negative number masks; as powers of 2 they might overflow."""


@dataclass(frozen=True)
class LinearBias:
    """A bias of scores: an integer that is linear in the streamed position, times values that do not vary over it.

    Fields:
        scores, bias: the positions of the operands of their sum.
        integer: the position of the integer.
        step: its growth from a streamed position to the next one.
        factors: the positions of the values that it is multiplied by.
        constant: what it is multiplied by, too.
        positions: those of the bias and of the floats that it is computed from, factors excluded.
    """

    scores: int
    bias: int
    integer: int
    step: int
    factors: tuple[int, ...] = ()
    constant: float = 1.0
    positions: frozenset[int] = frozenset()

    def is_added(self, kernel: Kernel, position: int) -> bool:
        """Whether an operation of a kernel is the sum of scores and bias."""
        operation = kernel.operations[position]
        if not isinstance(operation, Compute) or operation.name != "add":
            return False
        return {*operation.operands} == {self.scores, self.bias}


def find_linear_bias(kernel: Kernel, parts: StreamingReduction) -> LinearBias | None:
    """Returns the linear bias that is added to the scores of a maximum before they are masked or scaled, if any.

    None where scores may be as low as `LOWEST`: units of such rows differ.
    """
    if parts.softmax is None or may_be_lowest(kernel, parts, parts.softmax.scores):
        return None
    position = parts.softmax.scores
    while True:
        if (masked := masked_score(kernel, position)) is not None:
            position = masked[1]
        elif (scaled := scaled_score(kernel, position)) is not None:
            position = scaled[0]
        else:
            return linear_addition(kernel, parts, position)


def linear_addition(kernel: Kernel, parts: StreamingReduction, position: int) -> LinearBias | None:
    """Returns the linear bias that an operation adds to scores, if it does."""
    operation = kernel.operations[position]
    if not isinstance(operation, Compute) or operation.name != "add" or operation.dtype is not torch.float32:
        return None
    products = {item.position for item in parts.products}
    for scores, other in (operation.operands, operation.operands[::-1]):
        bias = _linear(kernel, parts.axes[-1], other)
        if bias is not None and not products.isdisjoint(kernel.backward_slice([scores])):
            return replace(bias, scores=scores)
    return None


def _linear(kernel: Kernel, axis: Axis, position: int) -> LinearBias | None:
    """Returns the parts of a float32 value that is linear in the index of an axis."""
    operation = kernel.operations[position]
    if not isinstance(operation, Compute) or operation.dtype is not torch.float32:
        return None
    match operation.name, operation.operands:
        case "cast", (operand,):
            step = _step(kernel, axis, operand)
            return LinearBias(-1, position, operand, step, positions=frozenset([position])) if step else None
        case "neg", (operand,):
            return _multiplied(_linear(kernel, axis, operand), position, -1.0)
        case "mul", (left, right):
            for one, other in ((left, right), (right, left)):
                if axis not in kernel.value_axes[other]:
                    number = constant_of(kernel, other)
                    factors = () if number is not None else (other,)
                    return _multiplied(_linear(kernel, axis, one), position, 1.0 if number is None else number, factors)
        case "div", (left, right):
            factor = safe_reciprocal(constant_of(kernel, right))
            return None if factor is None else _multiplied(_linear(kernel, axis, left), position, factor)
        case _:
            pass
    return None


def _multiplied(
    bias: LinearBias | None, position: int, constant: float, factors: tuple[int, ...] = ()
) -> LinearBias | None:
    """Returns the parts of a product of a linear value, which is computed at a position."""
    if bias is None:
        return None
    positions = bias.positions | {position}
    return replace(
        bias, bias=position, constant=bias.constant * constant, factors=(*bias.factors, *factors), positions=positions
    )


def _step(kernel: Kernel, axis: Axis, position: int) -> int | None:
    """Returns the growth of an integer from an index of an axis to the next one; None where it is not constant."""
    operation = kernel.operations[position]
    if axis not in kernel.value_axes[position]:
        return 0
    match operation:
        case IndexValue():
            stride = operation.index.stride(axis)
            return None if stride is None else stride.constant
        case Compute("cast", (operand,)) if operation.dtype in (torch.int32, torch.int64):
            return _step(kernel, axis, operand)
        case Compute("add" | "sub", (left, right)) if operation.dtype in (torch.int32, torch.int64):
            steps = _step(kernel, axis, left), _step(kernel, axis, right)
            if steps[0] is None or steps[1] is None:
                return None
            return steps[0] + steps[1] if operation.name == "add" else steps[0] - steps[1]
        case _:
            return None


def may_be_lowest(kernel: Kernel, parts: StreamingReduction, score: int) -> bool:
    """Whether a score may be below `LOWEST` and finite: it has such a number, or numbers from memory."""
    products, both = {item.position for item in parts.products}, {parts.row, parts.axes[-1]}
    for position in kernel.backward_slice([score], products) - products:
        operation = kernel.operations[position]
        if isinstance(operation, Constant) and operation.dtype.is_floating_point:
            if -math.inf < operation.value < LOWEST:
                return True
        elif isinstance(operation, Load) and operation.dtype.is_floating_point:
            if operation.dtype is not torch.float16 and not both.isdisjoint(kernel.value_axes[position]):
                return True
    return False


def masked_score(kernel: Kernel, position: int) -> tuple[int, int] | None:
    """Returns the condition and the score of a masked score."""
    operation = kernel.operations[position]
    if isinstance(operation, Compute) and operation.name == "where":
        condition, inside, other = operation.operands
        return (condition, inside) if constant_of(kernel, other) == -math.inf else None
    return None


def scaled_score(kernel: Kernel, position: int) -> tuple[int, float] | None:
    """Returns the operand and the factor of a multiplication by a positive constant, or of a division by one."""
    operation = kernel.operations[position]
    if not isinstance(operation, Compute) or operation.dtype is not torch.float32:
        return None
    if operation.name == "mul":
        for one, other in (operation.operands, operation.operands[::-1]):
            number = constant_of(kernel, other)
            if number is not None and 0 < number < math.inf:
                return one, number
    if operation.name == "div":
        factor = safe_reciprocal(constant_of(kernel, operation.operands[1]))
        if factor is not None and factor > 0:
            return operation.operands[0], factor
    return None


def constant_of(kernel: Kernel, position: int) -> float | None:
    """Returns the number of a constant; None for another operation."""
    operation = kernel.operations[position]
    return float(operation.value) if isinstance(operation, Constant) else None
