"""Digits of four bits as factors of tensor cores, by their bits alone.

The bits of a natural number below 256, as those of a bfloat16, are that number times 2**-133: most of these are
subnormal, and tensor cores multiply subnormal numbers exactly. So one instruction isolates two digits of a word, where
others first put each byte into a register of its own. High digits stay where they are, and are sixteen times as large.

Elements of rows are multiplied by a power of two, so that products and their sums are normal: exactly, unless they are
2**64 or more, which become infinite. Sums are then multiplied by the reciprocal. What is smaller than 2**-80 in these
is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxwrap.loop_ir import Compute, Constant, GroupedSums, Kernel, Load

DIGIT_BITS = 4
"""The bits of a digit."""

_ROW_EXPONENT, _BITS_EXPONENT = 64, -133
"""The powers of two by which elements of rows are multiplied, and that of the lowest bit of a bfloat16."""

_EXPONENT_BIAS, _MANTISSA_BITS = 127, 7

SUM_FACTOR = 2.0 ** -(_ROW_EXPONENT + _BITS_EXPONENT)
"""What sums are multiplied by in the end."""

DIGITS = (
    "{ .reg .b32 t; and.b32 $0, $4, 0x000f000f; and.b32 $2, $4, 0x00f000f0; shr.u32 t, $4, 8; "
    "and.b32 $1, t, 0x000f000f; and.b32 $3, t, 0x00f000f0; }"
)
"""Instructions that isolate the low digits of four bytes, and the high ones: each of bytes 0 and 2, and of 1 and 3."""


@dataclass(frozen=True)
class Digit:
    """A digit of four bits: the position of the byte that is loaded, and whether it is the high one."""

    byte: int
    is_high: bool

    @property
    def unit(self) -> int:
        """The bits of the number one."""
        return 1 << DIGIT_BITS if self.is_high else 1

    @property
    def row_exponent(self) -> int:
        """The power of two by which elements of rows are multiplied."""
        return _ROW_EXPONENT - (DIGIT_BITS if self.is_high else 0)

    @property
    def row_assembly(self) -> str:
        """Instructions that multiply two elements of rows."""
        factor = f"0x{f'{(self.row_exponent + _EXPONENT_BIAS) << _MANTISSA_BITS:04x}' * 2}"
        return f"{{ .reg .b32 f, z; mov.b32 f, {factor}; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, f, z; }}"


def find_digits(form: GroupedSums, row_dtype: torch.dtype | None) -> dict[int, Digit]:
    """Returns the digits that the operands of columns and of rows are, or are multiplied by, by position.

    There are none unless all operands of columns are digits, and rows bfloat16 that are multiplied by one kind alone.
    `form` is one of `sum_groups` without bias.
    """
    digits: dict[int, Digit] = {}
    for row, column in [term for item in form.sums for term in item.terms if term[1] is not None]:
        digit = None if column is None else _digit(form.contraction.kernel, column)
        if column is None or digit is None or digits.setdefault(row, digit).is_high != digit.is_high:
            return {}
        digits[column] = digit
    rows = {row for item in form.sums for row, _ in item.terms}
    return digits if row_dtype is torch.bfloat16 and rows <= digits.keys() else {}


def _digit(kernel: Kernel, position: int) -> Digit | None:
    """Returns the digit that an operation casts to a number."""
    operation = kernel.operations[position]
    if not isinstance(operation, Compute) or operation.name != "cast":
        return None
    mask, masked = _constant_operand(kernel, operation.operands[0], "bitwise_and")
    is_low = mask == (1 << DIGIT_BITS) - 1
    source = masked if is_low else operation.operands[0]
    count, shifted = _constant_operand(kernel, source, "bitwise_right_shift")
    is_high = count == DIGIT_BITS
    source = shifted if is_high else source
    byte = kernel.operations[source]
    is_byte = isinstance(byte, Load) and byte.dtype is torch.uint8 and byte.mask is None
    return Digit(source, is_high) if is_byte and (is_low or is_high) else None


def _constant_operand(kernel: Kernel, position: int, name: str) -> tuple[float | None, int]:
    """Returns the constant of an operation of bytes, or None, and the position of its other operand."""
    operation = kernel.operations[position]
    if isinstance(operation, Compute) and operation.name == name and operation.dtype is torch.uint8:
        constant = kernel.operations[operation.operands[1]]
        if isinstance(constant, Constant):
            return constant.value, operation.operands[0]
    return None, position
