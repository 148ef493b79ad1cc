"""Kernels in a part of whose iterations conditions have known values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fxwrap.loop_ir.body_operations import Compute, Constant, DeviceAssert, Load, Operation, Store, operation_dtype
from fxwrap.loop_ir.kernel import Kernel


def assume(kernel: Kernel, conditions: Mapping[int, bool]) -> Kernel:
    """Returns the kernel for the iterations in which these bool operations have these values.

    Every operation keeps its position; those that the conditions decide become constants or equal simpler operations.
    Sums with zero are their other operand, -0 too.
    """
    operations: list[Operation] = []
    for position, operation in enumerate(kernel.operations):
        if position in conditions:
            operations.append(Constant(conditions[position], torch.bool, operation.origin))
        else:
            operations.append(_simplified(operations, operation))
    return replace(kernel, operations=tuple(operations))


def _simplified(before: list[Operation], operation: Operation) -> Operation:
    match operation:
        case Compute("logical_and" | "logical_or" as name, (left, right)):
            for one, other in ((left, right), (right, left)):
                value = _constant(before, one)
                if value is not None:
                    return before[other] if value is (name == "logical_and") else before[one]
        case Compute("logical_not", (operand,)):
            value = _constant(before, operand)
            if value is not None:
                return Constant(not value, torch.bool, operation.origin)
        case Compute("where", (condition, inside, other)):
            value = _constant(before, condition)
            if value is not None:
                return before[inside if value else other]
        case Compute("cast", (operand,)) if _is_zero(before[operand]):
            return Constant(0, operation.dtype, operation.origin)
        case Compute("add", (left, right)):
            for one, other in ((left, right), (right, left)):
                if _is_zero(before[other]) and operation_dtype(before[one]) == operation.dtype:
                    return before[one]
        case Load() | Store() | DeviceAssert() if operation.mask is not None:
            if _constant(before, operation.mask) is True:
                return replace(operation, mask=None)
        case _:
            pass
    return operation


def _is_zero(operation: Operation) -> bool:
    return isinstance(operation, Constant) and operation.value == 0


def _constant(operations: list[Operation], position: int) -> bool | None:
    operation = operations[position]
    is_constant = isinstance(operation, Constant) and operation.dtype is torch.bool
    return bool(operation.value) if is_constant and isinstance(operation, Constant) else None
