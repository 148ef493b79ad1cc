"""Templates of the loop IR's scalar operations in Triton.

A template has operands `{0}`, `{1}`, ... and `{bits}`, the width of their dtype. Float32 division and square roots are
correctly rounded, and math functions are those of libdevice, as in torch's CUDA kernels.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fxwrap.loop_ir import (
    FLOAT8,
    HALF_PRECISION,
    STORAGE_ONLY,
    Compute,
    Constant,
    DeviceAssert,
    Index,
    IndexValue,
    Kernel,
    Load,
    Operation,
    Reduce,
    ReductionResult,
    Store,
    float8_format,
    operation_dtype,
)
from fxwrap.loop_ir.builder import eliminate_dead_operations
from fxwrap.printers.triton.fast_math import divisions_of_zeros, fast_bounded_operations, fast_math_operations
from fxwrap.printers.triton.helpers import HELPERS

TRITON_DTYPES = {
    torch.float32: "tl.float32", torch.float64: "tl.float64", torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16", torch.bool: "tl.int1", torch.int8: "tl.int8", torch.int16: "tl.int16",
    torch.int32: "tl.int32", torch.int64: "tl.int64", torch.uint8: "tl.uint8", **dict.fromkeys(FLOAT8, "tl.uint8"),
}  # fmt: skip
"""Triton's name of each dtype of kernels. Float8 is computed with as its codes.

Triton has float8 types, but not for all GPUs, and converts to them with another overflow than torch's. Helpers convert
codes with the GPU's instructions where it has them.
"""

_LIBDEVICE = (
    "hypot", "copysign", "nextafter", "atan2", "pow", "fmod", "trunc", "rsqrt", "exp", "exp2", "expm1", "log", "log2",
    "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh",
    "erf", "erfc", "erfinv", "lgamma",
)  # fmt: skip

_BINARY_LIBDEVICE = ("hypot", "copysign", "nextafter", "atan2", "pow", "fmod")

_ANY: dict[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})",
    "neg": "-{0}", "abs": "tl.abs({0})", "sign": "({0} > 0).to({dtype}) - ({0} < 0).to({dtype})",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}",
    "where": "tl.where({0}, {1}, {2})",
}  # fmt: skip

_FLOAT: dict[str, str] = {
    **{name: f"libdevice.{name}({{0}})" for name in _LIBDEVICE},
    **{name: f"libdevice.{name}({{0}}, {{1}})" for name in _BINARY_LIBDEVICE},
    "neg": "{0} * -1.0",  # Triton's negation is 0 - x, which is 0.0 for 0.0
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "fmax": "tl.where(({1} > {0}) | ({0} != {0}), {1}, {0})",
    "fmin": "tl.where(({1} < {0}) | ({0} != {0}), {1}, {0})",
    "div": "{0} / {1}", "remainder": "float_remainder({0}, {1})",
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "round": "libdevice.rint({0})",
    "sqrt": "tl.sqrt({0})", "reciprocal": "1 / {0}", "sigmoid": "1 / (1 + libdevice.exp(-{0}))",
    "digamma": "digamma({0})",
    "floor_divide": "float_floor_divide({0}, {1}, {0} / {1})", "trunc_divide": "libdevice.trunc({0} / {1})",
    "isnan": "{0} != {0}", "isinf": 'tl.abs({0}) == float("inf")',
    "signbit": "{0}.to(tl.int{bits}, bitcast=True) < 0",
}  # fmt: skip

_FLOAT32: dict[str, str] = {
    "div": "tl.div_rn({0}, {1})", "sqrt": "tl.sqrt_rn({0})", "reciprocal": "tl.div_rn(1.0, {0})",
    "div_of_zeros": "float_quotient({0}, {1})", "rsqrt": "float_rsqrt({0})", "exp2": "float_exp2({0})",
    "sigmoid": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))", "erf": "erf({0})", "fast_erf": "fast_erf({0})",
    "fast_tanh": "fast_tanh({0})",
    "floor_divide": "float_floor_divide({0}, {1}, tl.div_rn({0}, {1}))",
    "trunc_divide": "libdevice.trunc(tl.div_rn({0}, {1}))",
}  # fmt: skip

_FAST_MATH: dict[str, str] = {
    "div": "{0} / {1}", "sqrt": "tl.sqrt({0})", "exp": "tl.exp({0})", "exp2": "tl.exp2({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp({0} * -1.0))",  # the exponential of silu, if a kernel has both
}  # fmt: skip

_EQUALITIES = (("eq", "=="), ("ne", "!="))

_HALF: dict[str, str] = {
    name: f"{{0}}.to(tl.float32) {sign} {{1}}.to(tl.float32)" for name, sign in _EQUALITIES
}  # the interpreter would compare the bits of bfloat16

_INTEGER: dict[str, str] = {
    "floor_divide": "floor_quotient({0}, {1})", "trunc_divide": "{0} // {1}",
    "integer_remainder": "floor_modulo({0}, {1})", "integer_fmod": "{0} % {1}",
    "integer_pow": "integer_power({0}, {1}, {bits})",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}", "bitwise_not": "~{0}",
    "bitwise_left_shift": "shift_left({0}, {1}, {bits})", "bitwise_right_shift": "shift_right({0}, {1}, {bits} - 1)",
}  # fmt: skip

_UNSIGNED: dict[str, str] = {
    "neg": "0 - {0}", "abs": "{0}", "bitwise_not": "{0} ^ 255",
    "sign": "({0} > 0).to({dtype})", "floor_divide": "{0} // {1}",
    "integer_remainder": "{0} % {1}", "integer_pow": "unsigned_power({0}, {1}, {bits})",
    "bitwise_right_shift": "shift_right_unsigned({0}, {1}, {bits})",
}  # fmt: skip

_BOOL: dict[str, str] = {
    "logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "logical_xor": "{0} ^ {1}", "logical_not": "~{0}",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}", "bitwise_not": "~{0}",
}  # fmt: skip

_INFIX = re.compile(r"^\{0\} \S+ \{1\}$|^tl\.where\(")
"""Templates in which a literal has the dtype of the operand beside it."""

_OF_LITERAL_DTYPE = re.compile(r"^(tl\.(maximum|minimum|div_rn)|float_quotient)\(")
"""Templates in which a literal has a dtype of its own: float32, int32, or int64 where int32 is too narrow."""


_CALLED_NAME = re.compile(r"(?<![.\w])(\w+)\(")


def helpers_of(text: str) -> tuple[str, ...]:
    """Returns the helpers that a text calls."""
    called = HELPERS.keys() & _CALLED_NAME.findall(text)
    return tuple([name for name in HELPERS if name in called]) if called else ()


@dataclass(frozen=True)
class Template:
    """An operation's text for one dtype; `literals` states whether one operand may be a plain literal."""

    text: str
    literals: bool

    @property
    def helpers(self) -> tuple[str, ...]:
        """The helpers that the text calls."""
        return helpers_of(self.text)


def template(name: str, dtype: torch.dtype, fast_math: bool = False) -> Template:
    """Returns the template of an operation on operands of a dtype. Raises KeyError if the dtype has none.

    `fast_math` selects faster float32 forms with errors of a few units in the last place.
    """
    if dtype is torch.bool:
        rows = _BOOL
    elif dtype in (torch.float32, torch.float64):
        rows = _FLOAT | (_FLOAT32 if dtype is torch.float32 else {})
        rows |= _FAST_MATH if fast_math and dtype is torch.float32 else {}
    elif dtype in FLOAT8:
        widened = [cast_text(f"{{{place}}}", dtype, torch.float32) for place in (0, 1)]
        rows = {key: f"{widened[0]} {sign} {widened[1]}" for key, sign in _EQUALITIES}
    elif dtype in HALF_PRECISION:
        rows = _HALF
    else:
        rows = _INTEGER | (_UNSIGNED if dtype is torch.uint8 else {})
    text = rows.get(name) or _ANY[name]
    text = text.replace("{bits}", str(dtype.itemsize * 8)).replace("{dtype}", TRITON_DTYPES[dtype])
    literals = _INFIX.match(text) or (
        dtype in (torch.float32, torch.int32, torch.int64) and _OF_LITERAL_DTYPE.match(text)
    )
    return Template(text, dtype is not torch.float64 and bool(literals))


def cast_text(value: str, source: torch.dtype, target: torch.dtype) -> str:
    """Returns a conversion between dtypes with torch's semantics."""
    if source is target:
        return value
    if source in FLOAT8:
        return cast_text(_from_float8(value, source), torch.float32, target)
    if target in FLOAT8:
        return _to_float8(cast_text(value, source, torch.float32), target)
    half = (*STORAGE_ONLY, torch.float64)
    if target in STORAGE_ONLY and source is not torch.float32 and source is not torch.bool:
        value = f"{value}.to(tl.float32)"  # torch rounds twice too
    elif source in STORAGE_ONLY and target not in (torch.float32, *half):
        value, source = f"{value}.to(tl.float32)", torch.float32
    elif source is torch.bool and target in STORAGE_ONLY:
        value = f"{value}.to(tl.float32)"
    if target is torch.bool:
        return f"({value} != 0)"
    if source.is_floating_point and target in (torch.int8, torch.int16, torch.uint8):
        value = f"{value}.to(tl.int32)"  # out of range wraps around
    return f"{value}.to({TRITON_DTYPES[target]})"


def _from_float8(code: str, dtype: torch.dtype) -> str:
    """Returns the float32 number of a float8's code."""
    match dtype:
        case torch.float8_e4m3fn:
            return f"from_float8_e4m3fn({code})"
        case torch.float8_e5m2:
            return f"from_float8_e5m2({code})"
        case _:
            form = float8_format(dtype)
            return f"from_float8_fnuz({code}, {form.mantissa_bits}, {form.bias})"


def _to_float8(value: str, dtype: torch.dtype) -> str:
    """Returns the code of a float32 number rounded to float8."""
    form = float8_format(dtype)
    match dtype:
        case torch.float8_e4m3fn:
            return f"to_float8_e4m3fn({value}, {form.overflow})"
        case torch.float8_e5m2:
            return f"to_float8_e5m2({value})"
        case _:
            codes = ", ".join([str(item) for item in (form.largest, form.overflow, form.nan)])
            return f"to_float8({value}, {form.mantissa_bits}, {form.bias}, {codes}, {form.unsigned_zero})"


def literal_text(value: float | int | bool, dtype: torch.dtype) -> str:
    """Returns a number as a literal; floats are the shortest text with the same value in the dtype, float8 a code."""
    if dtype is torch.bool:
        return str(bool(value))
    if dtype in FLOAT8:
        return str(torch.tensor(float(value)).to(dtype).view(torch.uint8).item())
    if not dtype.is_floating_point:
        return str(int(value))
    value = float(value)
    if value == 0 and math.copysign(1.0, value) < 0:  # Triton parses the literal as 0.0
        whole, bits = ("tl.int64", 63) if dtype is torch.float64 else ("tl.int32", 31)
        return f"tl.full((), {-(2**bits)}, {whole}).to(tl.float{bits + 1}, bitcast=True)"
    if value != value or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if dtype is torch.float64:
        return repr(value)
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if struct.pack("f", float(text)) == struct.pack("f", value):
            return text if "." in text or "e" in text else f"{text}.0"
    return repr(value)


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


def safe_reciprocal(divisor: float | None) -> float | None:
    """Returns the reciprocal of a divisor with which no quotient overflows or underflows earlier; None without one."""
    return 1.0 / divisor if divisor is not None and 2.0**-60 < abs(divisor) < 2.0**60 else None


class Arithmetic:
    """Writes the arithmetic operations of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.fast_math = fast_math_operations(kernel)
        self.fast_bounded = fast_bounded_operations(kernel)
        self.divisions_of_zeros = divisions_of_zeros(kernel)

    def __call__(
        self, position: int, operation: Compute, value: Callable[[int], str], text: Callable[[int], str]
    ) -> PrintedExpression:
        """Returns an operation as an expression.

        `value` returns the text of an operand as a value of its dtype; `text` returns a plain literal for a constant.
        """
        used = operation.operands
        if operation.name == "cast":
            name = "flag" if operation.dtype is torch.bool else self._base_name(used[0])
            converted = cast_text(value(used[0]), self.dtype(used[0]), operation.dtype)
            return PrintedExpression(name, converted, helpers_of(converted))
        if operation.name == "bitcast":
            return PrintedExpression("bits", f"{value(used[0])}.to({TRITON_DTYPES[operation.dtype]}, bitcast=True)")
        factor = self._reciprocal_factor(position, operation) if operation.name == "div" else None
        if factor is not None:
            return PrintedExpression("quotient", f"{text(used[0])} * {factor}")
        if operation.name == "div" and self._is_softmax_quotient(operation):
            total = value(used[1])
            reciprocal = f"(1.0 / {total})" if position in self.fast_math else f"tl.div_rn(1.0, {total})"
            return PrintedExpression("quotient", f"{value(used[0])} * {reciprocal}")
        narrow = self._narrow_comparison(operation, value)
        if narrow is not None:
            return narrow
        fast_math = position in self.fast_math
        name = f"fast_{operation.name}" if position in self.fast_bounded else operation.name
        if position in self.divisions_of_zeros and not fast_math and operation.dtype is torch.float32:
            name = "div_of_zeros"
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
        reciprocal, exact = safe_reciprocal(constant.value), abs(math.frexp(constant.value)[0]) == 0.5
        if reciprocal is None or not (exact or (position in self.fast_math and operation.dtype is torch.float32)):
            return None
        factor = literal_text(reciprocal, operation.dtype)
        if operation.dtype is not torch.float32:
            factor = f"tl.full((), {factor}, {TRITON_DTYPES[operation.dtype]})"
        return factor

    def _is_softmax_quotient(self, operation: Compute) -> bool:
        """Whether elements of a row are divided by the row's sum of exponentials, which is in the range of reciprocals.

        One reciprocal a row and a product an element have an error of 1 unit in the last place.
        """
        dividend, divisor = operation.operands
        result, varying = self.kernel.operations[divisor], self.kernel.varying
        if not isinstance(result, ReductionResult) or operation.dtype is not torch.float32:
            return False
        source = self.kernel.operations[result.operation]
        is_sum = isinstance(source, Reduce) and source.kind == "softmax" and result.position == 1
        return is_sum and varying[dividend] and not varying[divisor]

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
        return operation_dtype(self.kernel.operations[position])


def _fits_int32(index: Index) -> bool:
    """Whether an index is proved to be a non-negative 32-bit integer."""
    limits = index.bounds()
    if limits is None:
        return False
    low, high = limits[0].constant, limits[1].constant
    return low is not None and high is not None and low >= 0 and high < 2**31
