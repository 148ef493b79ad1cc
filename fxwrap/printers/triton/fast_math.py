"""The precision that operations of a kernel need: which may be computed by faster, less exact forms."""

from __future__ import annotations

from fxwrap.loop_ir import HALF_PRECISION, Compute, Constant, Kernel, Load, Operation, Reduce, ReductionResult, operands

_ERROR_PRESERVING = frozenset({"mul", "div", "neg", "abs", "where", "reciprocal", "sqrt", "rsqrt"})
"""Operations that do not amplify the relative error of their operands."""


def fast_math_operations(kernel: Kernel) -> frozenset[int]:
    """Returns the operations whose results need at most about 20 correct bits."""
    users: dict[int, list[int]] = {}
    for position, operation in enumerate(kernel.operations):
        for used in operands(operation):
            users.setdefault(used, []).append(position)
    half = reads_half_precision(kernel)
    fast: set[int] = set()
    for position, operation in reversed(list(enumerate(kernel.operations))):
        using = [(user, kernel.operations[user]) for user in users.get(position, [])]
        if using and all(_allows_fast_math(item, user in fast, operation, half) for user, item in using):
            fast.add(position)
    return frozenset(fast)


def _allows_fast_math(user: Operation, fast_math: bool, operation: Operation, half: bool) -> bool:
    if isinstance(user, Compute):
        return (user.name == "cast" and user.dtype in HALF_PRECISION) or (fast_math and user.name in _ERROR_PRESERVING)
    exponential = isinstance(operation, Compute) and operation.name == "exp"
    return isinstance(user, Reduce) and user.kind == "sum" and exponential and half


def fast_erf_operations(kernel: Kernel, fast_math: frozenset[int]) -> frozenset[int]:
    """Returns the erf operations that are only added to constants of about 1 in fast-math operations, as in gelu.

    These sums have an absolute error of 1e-7 themselves.
    """
    erfs = {p for p, item in enumerate(kernel.operations) if isinstance(item, Compute) and item.name == "erf"}
    if not erfs:
        return frozenset()
    for position, operation in enumerate(kernel.operations):
        for used in erfs.intersection(operands(operation)):
            beside = [kernel.operations[other] for other in operands(operation) if other != used]
            constant = any(isinstance(item, Constant) and abs(item.value) >= 0.5 for item in beside)
            if not (isinstance(operation, Compute) and operation.name == "add" and constant and position in fast_math):
                erfs.discard(used)
    return frozenset(erfs)


def is_sum_of_exponentials(kernel: Kernel, position: int) -> bool:
    """Whether an operation is the divisor of a softmax, which is in the range of fast division."""
    operation = kernel.operations[position]
    if isinstance(operation, ReductionResult):
        source = kernel.operations[operation.operation]
        return isinstance(source, Reduce) and source.kind == "softmax" and operation.position == 1
    if not isinstance(operation, Reduce) or operation.kind != "sum":
        return False
    summed = kernel.operations[operation.operands[0]]
    return isinstance(summed, Compute) and summed.name == "exp"


def reads_half_precision(kernel: Kernel) -> bool:
    """Whether all floating-point loads that vary along rows have half precision."""
    loads = [item for item, varies in zip(kernel.operations, kernel.varying, strict=True) if varies]
    types = [item.dtype for item in loads if isinstance(item, Load) and item.dtype.is_floating_point]
    return bool(types) and all(dtype in HALF_PRECISION for dtype in types)


def allows_fast_softmax(kernel: Kernel) -> bool:
    """Whether the exponentials of `softmax` reductions may be fast: if all other exponentials are."""
    fast_math = fast_math_operations(kernel)
    exact = [
        position
        for position, operation in enumerate(kernel.operations)
        if isinstance(operation, Compute) and operation.name == "exp" and kernel.varying[position]
        if position not in fast_math
    ]
    return reads_half_precision(kernel) and not exact
