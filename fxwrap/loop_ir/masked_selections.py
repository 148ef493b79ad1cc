"""Selections by the mask of a load that they select: the load has their other value where the mask is false."""

from __future__ import annotations

from fxwrap.loop_ir.body_operations import Compute, Constant, Load
from fxwrap.loop_ir.builder import OperationCopier, replace_operations
from fxwrap.loop_ir.kernel import Kernel
from fxwrap.loop_ir.operations import EXACT_NUMBERS


def drop_repeated_masks(kernel: Kernel) -> Kernel:
    """Returns the kernel without selections of a constant where masked loads make their other operand that constant."""
    masks = {item.mask for item in kernel.operations if isinstance(item, Load)}
    repeated = {
        position
        for position, item in enumerate(kernel.operations)
        if isinstance(item, Compute) and item.name == "where" and item.operands[0] in masks and _repeats(kernel, item)
    }
    if not repeated:
        return kernel

    def operand(body: OperationCopier, position: int) -> int:
        selection = kernel.operations[position]
        assert isinstance(selection, Compute)
        return body.new[selection.operands[1]]

    return replace_operations(kernel, repeated, operand)


def _repeats(kernel: Kernel, selection: Compute) -> bool:
    mask, chosen, other = selection.operands
    constant = kernel.operations[other]
    if not isinstance(constant, Constant) or constant.value not in EXACT_NUMBERS:
        return False
    return _is_constant(kernel, chosen, mask, _text(constant.value))


def _text(value: float) -> str:
    return repr(float(value))


def _is_constant(kernel: Kernel, position: int, mask: int, text: str) -> bool:
    """Whether an operation has a value, as text, where a mask is false."""
    match kernel.operations[position]:
        case Constant(value=value):
            return _text(value) == text
        case Load(mask=own, other=other):
            return own == mask and _text(other) == text
        case Compute(name="cast", operands=(operand,), dtype=dtype) if dtype.is_floating_point:
            return _is_constant(kernel, operand, mask, text)
        case Compute(name="where", operands=(_, true, false)):
            return _is_constant(kernel, true, mask, text) and _is_constant(kernel, false, mask, text)
        case _:
            return False
