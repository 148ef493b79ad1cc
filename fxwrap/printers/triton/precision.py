"""Which operations may round in their last bits as the hardware's fast instructions do.

Exponentials, divisions and square roots have forms that are some units of float32's last place off, at a fraction of
the instructions. Where the result goes, through multiplications alone, into a number of eight or eleven bits, nothing
of that is left; so is it where exponentials of such numbers are summed, which is their weighting in a softmax.
"""

from __future__ import annotations

from fxwrap.loop_ir import STORAGE_ONLY, Compute, Constant, Kernel, Load, Operation, Part, Reduce, operands

_KEEPING = frozenset({"mul", "div", "neg", "abs", "where", "reciprocal", "sqrt", "rsqrt"})
"""Operations whose relative error is about that of their operands."""


def coarse_operations(kernel: Kernel) -> frozenset[int]:
    """Returns the operations whose results need no more than about twenty correct bits."""
    users: dict[int, list[int]] = {}
    for position, operation in enumerate(kernel.operations):
        for used in operands(operation):
            users.setdefault(used, []).append(position)
    half = reads_half_precision(kernel)
    found: set[int] = set()
    for position in range(len(kernel.operations) - 1, -1, -1):
        using = [(user, kernel.operations[user]) for user in users.get(position, [])]
        this = kernel.operations[position]
        if using and all(_tolerates(operation, user in found, this, half) for user, operation in using):
            found.add(position)
    return frozenset(found)


def _tolerates(user: Operation, coarse: bool, operation: Operation, half: bool) -> bool:
    if isinstance(user, Compute):
        return (user.name == "cast" and user.dtype in STORAGE_ONLY) or (coarse and user.name in _KEEPING)
    exponential = isinstance(operation, Compute) and operation.name == "exp"
    return isinstance(user, Reduce) and user.kind == "sum" and exponential and half


def erfs_beside_one(kernel: Kernel, coarse: frozenset[int]) -> frozenset[int]:
    """Returns the error functions that only sums with constants of about 1 use, as in gelu, where those are coarse.

    An absolute error of 1e-7 is what such a sum has anyway.
    """
    erfs = {p for p, item in enumerate(kernel.operations) if isinstance(item, Compute) and item.name == "erf"}
    if not erfs:
        return frozenset()
    for position, operation in enumerate(kernel.operations):
        for used in erfs.intersection(operands(operation)):
            beside = [kernel.operations[other] for other in operands(operation) if other != used]
            constant = any(isinstance(item, Constant) and abs(item.value) >= 0.5 for item in beside)
            if not (isinstance(operation, Compute) and operation.name == "add" and constant and position in coarse):
                erfs.discard(used)
    return frozenset(erfs)


def is_sum_of_exponentials(kernel: Kernel, position: int) -> bool:
    """Whether an operation is what a softmax divides by, which fast division takes: neither tiny nor huge."""
    operation = kernel.operations[position]
    if isinstance(operation, Part):
        source = kernel.operations[operation.operation]
        return isinstance(source, Reduce) and source.kind == "softmax" and operation.position == 1
    if not isinstance(operation, Reduce) or operation.kind != "sum":
        return False
    summed = kernel.operations[operation.operands[0]]
    return isinstance(summed, Compute) and summed.name == "exp"


def reads_half_precision(kernel: Kernel) -> bool:
    """Whether all floating-point numbers that vary along rows come from memory with eight or eleven bits."""
    loads = [item for item, varies in zip(kernel.operations, kernel.varying, strict=True) if varies]
    types = [item.dtype for item in loads if isinstance(item, Load) and item.dtype.is_floating_point]
    return bool(types) and all(dtype in STORAGE_ONLY for dtype in types)


def coarse_softmax(kernel: Kernel) -> bool:
    """Whether the exponentials inside `softmax` reductions may be fast: where those around them are."""
    coarse = coarse_operations(kernel)
    exact = [
        position
        for position, operation in enumerate(kernel.operations)
        if isinstance(operation, Compute) and operation.name == "exp" and kernel.varying[position]
        if position not in coarse
    ]
    return reads_half_precision(kernel) and not exact
