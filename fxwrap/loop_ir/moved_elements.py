"""Half-precision elements that are widened, selected and narrowed again: they are selected as they are in memory.

So are the parts of a stack, which would be converted twice. The bits of NaNs stay, too.
"""

from __future__ import annotations

from fxwrap.loop_ir.body_operations import Compute, Constant
from fxwrap.loop_ir.builder import OperationCopier, replace_operations
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import EXACT_NUMBERS, HALF_PRECISION


def select_unconverted_elements(kernel: Kernel) -> Kernel:
    """Returns the kernel in which selections of widened elements that are only narrowed again have no conversions."""
    moved = {
        position
        for position, item in enumerate(kernel.operations)
        if isinstance(item, Compute)
        and item.name == "cast"
        and item.dtype in HALF_PRECISION
        and _is_selection(kernel, item.operands[0])
        and _is_moved(kernel, item.operands[0], item)
    }
    if not moved:
        return kernel

    def unconverted(body: OperationCopier, position: int) -> int:
        cast = kernel.operations[position]
        assert isinstance(cast, Compute)
        return _unconverted(body, cast.operands[0], cast)

    return replace_operations(kernel, moved, unconverted)


def _is_selection(kernel: Kernel, position: int) -> bool:
    item = kernel.operations[position]
    return isinstance(item, Compute) and item.name == "where" and len(kernel.users[position]) == 1


def _is_moved(kernel: Kernel, position: int, cast: Compute) -> bool:
    """Whether a value is one of elements of the dtype of `cast`, or a number that is exact in it."""
    item = kernel.operations[position]
    match item:
        case Constant(value=value):
            return value in EXACT_NUMBERS
        case Compute(name="cast", operands=(source,)):
            return getattr(kernel.operations[source], "dtype", None) is cast.dtype
        case Compute(name="where", operands=(_, *values)) if _is_selection(kernel, position):
            return all(_is_moved(kernel, value, cast) for value in values)
        case _:
            return False


def _unconverted(body: OperationCopier, position: int, cast: Compute) -> int:
    """Adds a selection of elements in memory; returns its position."""
    item = body.kernel.operations[position]
    if isinstance(item, Constant):
        return body.constant(item.value, cast.dtype)
    assert isinstance(item, Compute)
    if item.name == "cast":
        return body.new[item.operands[0]]
    condition, true, false = item.operands
    chosen = [_unconverted(body, value, cast) for value in (true, false)]
    return body.compute("where", body.new[condition], *chosen, dtype=cast.dtype)
