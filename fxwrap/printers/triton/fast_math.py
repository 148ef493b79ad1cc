"""The precision that operations of a kernel need: which may be computed by faster, less exact forms."""

from __future__ import annotations

from fxwrap.loop_ir import HALF_PRECISION, Compute, Constant, Kernel, Load, Reduce, Store, operands

_ERROR_PRESERVING = frozenset({
    "mul", "div", "neg", "abs", "where", "reciprocal", "sqrt", "rsqrt", "maximum", "minimum", "fmax", "fmin",
})  # fmt: skip
"""Operations that do not amplify the relative error of their operands."""

_SUMS = frozenset({"add", "sub"})
"""Operations that amplify relative errors where leading bits cancel."""

_TRANSCENDENTAL = frozenset({"exp", "exp2", "sigmoid"})
"""Operations whose results are rounded anyway: sums amplify the error of the exact form too, which is little smaller.

Quotients and roots may be exact, so that a difference is 0 (`1 - a / b` of equals).
"""

_SELECTIONS = frozenset({"where", "maximum", "minimum", "fmax", "fmin"})
"""Operations that return one of their operands, as where, relu and clamp do."""

_ZERO_PRESERVING = frozenset({"mul", "neg", "abs", "cast"})
"""Operations whose results are 0 where an operand is."""

_BOUNDED = frozenset({"erf", "tanh"})
"""Such operations whose fast forms have an absolute error of 1e-7."""


def fast_math_operations(kernel: Kernel) -> frozenset[int]:
    """Returns the operations whose results need at most about 20 correct bits."""
    exact_sums = _precision_hidden(kernel, _ERROR_PRESERVING)
    rounded = {position for position in _precision_hidden(kernel) if _is_transcendental(kernel, position)}
    return exact_sums | rounded


def _precision_hidden(kernel: Kernel, passing: frozenset[str] = _ERROR_PRESERVING | _SUMS) -> frozenset[int]:
    """Returns the operations whose results only reach memory in half precision, through operations of these names.

    Sums of elements in half precision, in registers or in memory, hide as much.
    """
    half = reads_half_precision(kernel)
    hidden: set[int] = set()

    def hides(user: int) -> bool:
        operation = kernel.operations[user]
        if isinstance(operation, Reduce):
            return operation.kind == "sum" and half
        if isinstance(operation, Store):
            return operation.mode == "add" and half
        if not isinstance(operation, Compute):
            return False
        is_narrowed = operation.name == "cast" and operation.dtype in HALF_PRECISION
        return is_narrowed or (user in hidden and operation.name in passing)

    for position in reversed(range(len(kernel.operations))):
        if kernel.users[position] and all(map(hides, kernel.users[position])):
            hidden.add(position)
    return frozenset(hidden)


def _is_transcendental(kernel: Kernel, position: int) -> bool:
    """Whether an operation is transcendental, or the quotient of a sum with an exponential, as in silu."""
    operation = kernel.operations[position]
    if not isinstance(operation, Compute):
        return False
    if operation.name != "div":
        return operation.name in _TRANSCENDENTAL
    divisor = kernel.operations[operation.operands[1]]
    summed = operands(divisor) if isinstance(divisor, Compute) and divisor.name == "add" else ()
    return any(isinstance(item := kernel.operations[at], Compute) and item.name == "exp" for at in summed)


def fast_bounded_operations(kernel: Kernel) -> frozenset[int]:
    """Returns the erf and tanh operations that need no relative precision where they are small.

    They, or their squares, are only added to constants of about 1 where half precision hides the sum, as in gelu and
    its gradient. These sums have an absolute error of 1e-7 themselves.
    """
    names = [item.name if isinstance(item, Compute) else "" for item in kernel.operations]
    candidates = [position for position, name in enumerate(names) if name in _BOUNDED]
    if not candidates:
        return frozenset()
    hidden = _precision_hidden(kernel)

    def is_summed(position: int) -> bool:
        return all(user in hidden and allows(position, user) for user in kernel.users[position])

    def allows(position: int, user: int) -> bool:
        beside = [kernel.operations[other] for other in operands(kernel.operations[user]) if other != position]
        if names[user] in _SUMS:
            return any(isinstance(item, Constant) and abs(item.value) >= 0.5 for item in beside)
        return names[user] == "mul" and not beside and is_summed(user)

    return frozenset(filter(is_summed, candidates))


def divisions_of_zeros(kernel: Kernel) -> frozenset[int]:
    """Returns the divisions whose dividends are 0 for many elements: masked loads, selected zeros and their multiples.

    The exact division of such has a branch that takes longer than all other instructions of an element.
    """
    zeros: set[int] = set()
    for position, operation in enumerate(kernel.operations):
        if isinstance(operation, Load):
            is_zero = operation.mask is not None and operation.other == 0
        elif isinstance(operation, Compute) and operation.name in _SELECTIONS:
            used = [kernel.operations[at] for at in operation.operands]
            is_zero = any(isinstance(item, Constant) and item.value == 0 for item in used)
        else:
            is_zero = isinstance(operation, Compute) and operation.name in _ZERO_PRESERVING
            is_zero = is_zero and any(at in zeros for at in operands(operation))
        if is_zero:
            zeros.add(position)
    divisions = [
        position for position, item in enumerate(kernel.operations) if isinstance(item, Compute) and item.name == "div"
    ]
    return frozenset(at for at in divisions if operands(kernel.operations[at])[0] in zeros)


def reads_half_precision(kernel: Kernel) -> bool:
    """Whether all floating-point loads, those that vary along rows if there are any, have half precision."""
    rows = bool(kernel.reduced)
    loads = [item for item, varies in zip(kernel.operations, kernel.varying, strict=True) if varies or not rows]
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
