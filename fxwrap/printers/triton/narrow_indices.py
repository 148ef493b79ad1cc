"""Computed indices in 32 bits.

An operator computes an index in 64 bits, as the rows of a resampled image from its own row. GPUs compute those in pairs
of instructions, and convert them from and to floats slowly.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fxwrap.loop_ir import (
    Compute,
    Constant,
    IndexValue,
    IndirectIndex,
    Kernel,
    OperationCopier,
    indices,
    operands,
    operation_dtype,
    value_range,
)
from fxwrap.loop_ir.builder import eliminate_dead_operations

_DIVISIONS = frozenset({"floor_divide", "integer_remainder"})
"""Operations that take GPUs many instructions in 64 bits."""

_EXACT = _DIVISIONS | {"abs", "add", "cast", "maximum", "minimum", "mul", "neg", "sub", "where"}
"""Operations that have the same result in 32 bits if their operands and their result have a 32-bit value."""


def narrow_indirect_indices(kernel: Kernel) -> Kernel:
    """Returns a kernel that computes 64-bit integers in 32 bits where indirect indices need them and the range allows.

    Kernels that divide integers compute all so: offsets in windows are quotients and remainders. Other operations read
    them cast to 64 bits, which the compiler removes from conversions and comparisons.
    """
    used = {
        atom.operation for operation in kernel.operations for index in indices(operation) for atom in index.atoms()
        if isinstance(atom, IndirectIndex)
    }  # fmt: skip
    divides = any(isinstance(item, Compute) and item.name in _DIVISIONS for item in kernel.operations)
    needed = kernel.backward_slice(range(len(kernel.operations)) if divides else sorted(used))
    copier, narrow = OperationCopier(kernel), dict[int, int]()
    for position in range(len(kernel.operations)):
        copier.copy(position)
        if position in needed and _fits_int32(kernel, position):
            result = _add_narrow(copier, kernel, position, narrow)
            if result is not None:
                narrow[position] = result
                copier.new[position] = copier.compute("cast", result, dtype=torch.int64)
    return eliminate_dead_operations(replace(kernel, operations=tuple(copier.operations))) if narrow else kernel


def _fits_int32(kernel: Kernel, position: int) -> bool:
    operation = kernel.operations[position]
    if not isinstance(operation, IndexValue | Constant | Compute) or operation_dtype(operation) is not torch.int64:
        return False
    low, high = value_range(kernel.operations, position)
    return low >= -(2**31) and high < 2**31


def _add_narrow(copier: OperationCopier, kernel: Kernel, position: int, narrow: dict[int, int]) -> int | None:
    """Adds an operation in 32 bits; None if its operands have more, or it is none of those."""
    operation = kernel.operations[position]
    copied = copier.operations[copier.new[position]]
    if isinstance(copied, IndexValue | Constant):
        return copier.add(replace(copied, dtype=torch.int32))
    if not isinstance(operation, Compute) or operation.name not in _EXACT:
        return None
    wide = [item for item in operands(operation) if operation_dtype(kernel.operations[item]) is torch.int64]
    if any(item not in narrow for item in wide):
        return None
    return copier.compute(
        operation.name, *[narrow.get(item, copier.new[item]) for item in operation.operands], dtype=torch.int32
    )
