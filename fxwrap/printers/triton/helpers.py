"""Helper functions of generated kernels. A kernel's source defines the helpers it uses.

A helper may use other helpers, `tl`, and `libdevice`, CUDA's math library. Triton's interpreter on the CPU replaces the
latter by torch functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from fxwrap.printers.triton.helper_families import HELPER_FAMILIES

_TEXTS = '''
def floor_quotient(a, b):
    """Integer division rounded down."""
    quotient = a // b
    remainder = a - quotient * b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1, quotient)


def floor_modulo(a, b):
    """The remainder of integer division rounded down: it has the sign of b."""
    remainder = a % b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


def to_int32_or_minus_one(a):
    """A 64-bit integer in 32 bits, -1 where it is negative or does not fit."""
    return tl.where((a >= 0) & (a <= 2147483647), a, -1).to(tl.int32)


def float_quotient(a, b):
    """a / b of float32, rounded correctly where neither it nor b is near the limits of the range.

    An approximate quotient is corrected twice by its remainder, which is exact the second time, and a reciprocal that
    is nearly rounded correctly. Unlike tl.div_rn, this has no branch, which runs many instructions for dividends of 0.
    """
    if has_ptx():
        quotient = a / b
        reciprocal = float_reciprocal(b)
        reciprocal = tl.fma(tl.fma(reciprocal * -1.0, b, 1.0), reciprocal, reciprocal)
        corrected = tl.fma(tl.fma(quotient * -1.0, b, a), reciprocal, quotient)
        corrected = tl.fma(tl.fma(corrected * -1.0, b, a), reciprocal, corrected)
        return tl.where((tl.abs(corrected) > 1e-30) & (tl.abs(corrected) < 1e38), corrected, quotient)
    else:
        return tl.div_rn(a, b)


def float_reciprocal(x):
    """1 / x of float32, or 0 below the smallest normal number. In PTX it is one instruction, as in `float_rsqrt`."""
    if has_ptx():
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


def float_rsqrt(x):
    """1 / sqrt(x) of float32. In PTX it is one instruction, for which libdevice need not be linked: that is slow."""
    if has_ptx():
        return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return libdevice.rsqrt(x)


def float_exp2(x):
    """2 ** x of float32, or 0 below the smallest normal number. In PTX it is one instruction, as in `float_rsqrt`."""
    if has_ptx():
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return libdevice.exp2(x)


def exp_ftz(x):
    """exp, or 0 below the smallest normal number, which is two instructions where tl.exp is five."""
    return float_exp2(x * 1.4426950408889634)


def float_remainder(a, b):
    """The remainder that has the sign of b."""
    remainder = libdevice.fmod(a, b)
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


def float_floor_divide(a, b, quotient):
    """Division rounded down, as torch does it: exact where the quotient's own rounding would not be."""
    remainder = libdevice.fmod(a, b)
    below = (remainder != 0) & ((remainder < 0) != (b < 0))
    exact = (a - remainder) / b
    exact = tl.where(below, exact - 1, exact)
    rounded = tl.floor(exact)
    rounded = tl.where(exact - rounded > 0.5, rounded + 1, rounded)
    rounded = tl.where(exact == 0, libdevice.copysign(quotient * 0, quotient), rounded)
    return tl.where(b == 0, quotient, rounded)


def integer_power(base, exponent, BITS: tl.constexpr):
    """Integer power with wrap-around; a negative exponent gives 0 but for the bases 1 and -1."""
    result = base * 0 + 1
    factor = base
    rest = exponent
    for _ in tl.static_range(BITS - 1):
        result = tl.where((rest & 1) != 0, result * factor, result)
        factor = factor * factor
        rest = rest >> 1
    odd = (exponent & 1) != 0
    inverse = tl.where(base == 1, base, tl.where((base == -1) & odd, base, tl.where(base == -1, base * base, base * 0)))
    return tl.where(exponent < 0, inverse, result)


def unsigned_power(base, exponent, BITS: tl.constexpr):
    """Unsigned integer power with wrap-around."""
    result = base * 0 + 1
    factor = base
    rest = exponent
    for _ in tl.static_range(BITS):
        result = tl.where((rest & 1) != 0, result * factor, result)
        factor = factor * factor
        rest = rest >> 1
    return result


def shift_left(value, count, BITS: tl.constexpr):
    """Shift that gives 0 for a count that is negative or too large."""
    valid = (count >= 0) & (count < BITS)
    return tl.where(valid, value << tl.where(valid, count, 0), 0)


def shift_right(value, count, LIMIT: tl.constexpr):
    """Arithmetic shift; a count that is negative or too large leaves the sign alone."""
    valid = (count >= 0) & (count < LIMIT)
    return value >> tl.where(valid, count, LIMIT)


def shift_right_unsigned(value, count, BITS: tl.constexpr):
    """Shift of a natural number, 0 for a count that is too large."""
    valid = count < BITS
    return tl.where(valid, value >> tl.where(valid, count, 0), 0)


def erf(x):
    """The error function to 1 ULP of float32: two polynomials after N. Juffa, and one choice between them."""
    size = tl.abs(x)
    square = x * x
    tail = tl.fma(size, -1.72853470e-5, 3.83197126e-4)
    tail = tl.fma(tail, square, tl.fma(size, -3.88396438e-3, 2.42546219e-2))
    tail = tl.fma(tail, size, -1.06777877e-1)
    tail = tl.fma(tail, size, -6.34846687e-1)
    tail = tl.fma(tail, size, -1.28717512e-1)
    tail = 1.0 - tl.exp(tl.fma(tail, size, -size))
    tail = tl.where(x < 0, -tail, tail)
    near = tl.fma(square, -5.96761703e-4, 4.99119423e-3)
    near = tl.fma(near, square, -2.67681349e-2)
    near = tl.fma(near, square, 1.12819925e-1)
    near = tl.fma(near, square, -3.76125336e-1)
    near = tl.fma(near, square, 1.28379166e-1)
    near = tl.fma(near, x, x)
    return tl.where(size > 0.927734375, tail, near)


def fast_erf(x):
    """The error function to 1e-7, absolutely: for sums with 1 that half precision keeps little of. 1 - 2 ** P(|x|)."""
    size = tl.minimum(tl.abs(x), 4.1, propagate_nan=tl.PropagateNan.ALL)
    power = tl.fma(size, -4.5360925e-5, 4.455242e-4)
    power = tl.fma(power, size, -1.4894878e-3)
    power = tl.fma(power, size, -7.745651e-4)
    power = tl.fma(power, size, 2.8253634e-2)
    power = tl.fma(power, size, -1.4848159e-1)
    power = tl.fma(power, size, -9.184164e-1)
    power = tl.fma(power, size, -1.6279086)
    magnitude = 1.0 - float_exp2(power * size)
    return tl.where(x < 0, -magnitude, magnitude)


def fast_tanh(x):
    """The hyperbolic tangent to 1e-7, absolutely: for sums with 1 that half precision keeps little of."""
    return 1.0 - 2.0 / (1.0 + float_exp2(x * 2.8853900817779268))


def score_tanh(x):
    """The hyperbolic tangent to a few units in the last place, without the branch of libdevice's."""
    square = x * x
    near = tl.fma(square, 1.7256992e-2, -5.3052951e-2)
    near = tl.fma(near, square, 1.3325988e-1)
    near = tl.fma(near, square, -3.3333150e-1)
    near = tl.fma(near * square, x, x)
    return tl.where(tl.abs(x) < 0.5, near, 1.0 - 2.0 * float_reciprocal(1.0 + float_exp2(x * 2.8853900817779268)))


def log_add_exp(a, b):
    """log(exp(a) + exp(b)) without overflow."""
    largest = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    smallest = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    finite = (largest != smallest) | (tl.abs(largest) != float("inf"))
    difference = tl.where(finite, smallest - largest, 0.0)
    return tl.where(finite, largest + libdevice.log1p(libdevice.exp(difference)), largest)


def digamma(x):
    """The logarithmic derivative of the gamma function, as torch computes it: reflection, recurrence, asymptotics."""
    whole = libdevice.trunc(x)
    reflected = x < 0
    angle = (x - whole) * 3.141592653589793
    reflection = tl.where(reflected, (x * 0 - 3.141592653589793) / libdevice.tan(angle), x * 0)
    y = tl.where(reflected, 1 - x, x)
    start = y
    shifted = y * 0
    for _ in tl.static_range(10):
        small = y < 10
        shifted = tl.where(small, shifted - 1 / y, shifted)
        y = tl.where(small, y + 1, y)
    z = 1 / (y * y)
    series = z * (8.33333333333333333333e-2 + z * (-8.33333333333333333333e-3 + z * (3.96825396825396825397e-3 + z * (
        -4.16666666666666666667e-3 + z * (7.57575757575757575758e-3 + z * (
            -2.10927960927960927961e-2 + z * 8.33333333333333333333e-2))))))
    series = tl.where(y < 1.0e17, series, y * 0)
    result = shifted + libdevice.log(y) - 0.5 / y - series + reflection
    result = tl.where(start == float("inf"), start, result)
    result = tl.where(reflected & (x == whole), float("nan"), result)
    return tl.where(x == 0, libdevice.copysign(x * 0 + float("inf"), x * -1.0), result)


def from_float8_e4m3fn(code):
    """The float32 number of an e4m3fn code. Without an instruction, its bits are those of a 256th in half precision."""
    if has_float8():
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        bits = (code.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        nan = tl.where((code & 127) == 127, 2143289344, 0)
        return (number.to(tl.int32, bitcast=True) | nan).to(tl.float32, bitcast=True)


def from_float8_e5m2(code):
    """The float32 number of an e5m2 code, which is the upper half of a half-precision number."""
    return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


def dot_float8_e4m3fn(code):
    """An operand of a dot: the numbers of e4m3fn codes in float8, without tensor cores for it in half precision."""
    if has_float8():
        return code.to(tl.float8e4nv, bitcast=True)
    else:
        return from_float8_e4m3fn(code).to(tl.float16)


def dot_float8_e5m2(code):
    """An operand of a dot: the numbers of e5m2 codes in float8, without tensor cores for it in half precision."""
    if has_float8():
        return code.to(tl.float8e5, bitcast=True)
    else:
        return from_float8_e5m2(code).to(tl.float16)


def from_float8_fnuz(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The float32 number of a code of a format in which -0.0 is NaN."""
    magnitude = (code & 127).to(tl.int32)
    normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    scale = tl.full((), (128 - BIAS - MANTISSA) << 23, tl.int32).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < (1 << MANTISSA), magnitude.to(tl.float32) * scale, normal)
    return tl.where(code == 128, float("nan"), tl.where(code > 128, number * -1.0, number))


def to_float8(
    x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, OVERFLOW: tl.constexpr, NAN: tl.constexpr,
    UNSIGNED_ZERO: tl.constexpr,
):
    """The code of a float32 number in 8 bits, rounded to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 2147483647
    magic = tl.full((), (151 - BIAS - MANTISSA) << 23, tl.int32)
    sum = magnitude.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    subnormal = sum.to(tl.int32, bitcast=True) - magic
    half = (1 << (22 - MANTISSA)) - 1 + ((magnitude >> (23 - MANTISSA)) & 1)
    normal = (magnitude - ((127 - BIAS) << 23) + half) >> (23 - MANTISSA)
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    code = tl.where(code > LARGEST, OVERFLOW, code)
    code = tl.where(magnitude > 2139095040, NAN, code)
    sign = (bits >> 24) & 128
    if UNSIGNED_ZERO:
        sign = tl.where(code == 0, 0, sign)
    return (code | sign).to(tl.uint8)


def saturated_to_float8(saturated, x, BEYOND: tl.constexpr, OVERFLOW: tl.constexpr, NAN: tl.constexpr):
    """The code of a float32 number: of the conversion that saturates, of floats whose bits exceed `BEYOND`, of NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 2147483647
    special = tl.where(magnitude > 2139095040, NAN, OVERFLOW) | ((bits >> 24) & 128)
    return tl.where(magnitude > BEYOND, special.to(tl.uint8), saturated.to(tl.uint8, bitcast=True))


def to_float8_e4m3fn(x, OVERFLOW: tl.constexpr):
    """The code of a float32 number in e4m3fn."""
    if has_float8():
        return saturated_to_float8(x.to(tl.float8e4nv), x, 1139277824 if OVERFLOW == 127 else 2139095040, OVERFLOW, 127)
    else:
        return to_float8(x, 3, 7, 126, OVERFLOW, 127, False)


def to_float8_e5m2(x):
    """The code of a float32 number in e5m2."""
    if has_float8():
        return saturated_to_float8(x.to(tl.float8e5), x, 1198522367, 124, 127)
    else:
        return to_float8(x, 2, 15, 123, 124, 127, False)


def masked_bytes(code, MASK: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The bits of bytes that a mask has, four bytes at a time where registers hold as many."""
    if has_ptx():
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [code], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return code & MASK


def shifted_bytes(code, COUNT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Bytes shifted to the right, four at a time where registers hold as many."""
    if has_ptx():
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [code], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return code >> COUNT


def half_precision_of_bytes(code, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Four half-precision numbers of four bytes, by instructions that compute two registers from one."""
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [code], dtype=tl.float16, is_pure=True, pack=4)


def biased_bytes(code, BIAS: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The half-precision numbers whose bits are those of a power of two plus bytes: their sums."""
    if has_ptx():
        return half_precision_of_bytes(code, DTYPE, ASSEMBLY)
    else:
        return (code.to(tl.float32) + BIAS).to(DTYPE)


def biased_floats(code, ASSEMBLY: tl.constexpr):
    """The float32 numbers that are 128 plus bytes below 128, by their bits."""
    if has_ptx():
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,=r,=r,r", [code], dtype=tl.float32, is_pure=True, pack=4)
    else:
        return code.to(tl.float32) + 128


def raw_digits(code, ASSEMBLY: tl.constexpr):
    """The low and high digits of bytes as the bits of numbers, of which the second and third of four swap places."""
    if has_ptx():
        digits = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r", [code], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        return digits[0], digits[1]
    else:
        pairs = tl.permute(tl.reshape(code, (code.shape[0], code.shape[1] // 4, 2, 2)), (0, 1, 3, 2))
        swapped = tl.reshape(pairs, (code.shape[0], code.shape[1])).to(tl.int16)
        return (swapped & 15).to(tl.bfloat16, bitcast=True), (swapped & 240).to(tl.bfloat16, bitcast=True)


def scaled_row(x, SCALE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Numbers times a power of two, two at a time."""
    if has_ptx():
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return (x.to(tl.float32) * SCALE).to(tl.bfloat16)


def words_of_bytes(code):
    """Rows of bytes as words of four, the first of which is the lowest."""
    even, odd = tl.split(tl.reshape(code.to(tl.int32), (code.shape[0], code.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first | (second << 8) | (third << 16) | (fourth << 24)


def bytes_of_words(words):
    """The bytes of rows of words, the lowest one of each first."""
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    return tl.reshape(tl.join(even, odd), (words.shape[0], 4 * words.shape[1]))


def ones_like_bytes(code, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Ones in the layout of bytes, so that a dot shares its other operand with dots of these."""
    if has_ptx():
        return half_precision_of_bytes(code, DTYPE, ASSEMBLY)
    else:
        return (code * 0 + 1).to(tl.float32).to(DTYPE)


def maximum_or_nan(a, b):
    """The larger, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def minimum_or_nan(a, b):
    """The smaller, or NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


def multiply(a, b):
    """The product."""
    return a * b


def launch_dependents():
    """Lets the next launch start as soon as all programs of this one are here or have ended."""
    if has_dependent_launch():
        tl.extra.cuda.gdc_launch_dependents()


def wait_for_launches():
    """Waits until the launches before this one have ended, and what they wrote is visible."""
    if has_dependent_launch():
        tl.extra.cuda.gdc_wait()


'''

_HAS_FLOAT8 = '''
def has_float8(_semantic=None):
    """Whether the GPU for which the kernel is compiled converts and multiplies float8; not in Triton's interpreter."""
    return tl.constexpr(_semantic is not None and "fp8e4nv" in _semantic.builder.options.supported_fp8_dtypes)


has_float8.__triton_builtin__ = True
'''.strip()
"""A function of Triton's compiler, which calls it with the options of the compilation."""

_HAS_PTX = '''
def has_ptx(_semantic=None):
    """Whether the kernel is compiled for a GPU with PTX; not in Triton's interpreter."""
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "cuda")


has_ptx.__triton_builtin__ = True
'''.strip()

_HAS_DEPENDENT_LAUNCH = '''
def has_dependent_launch(_semantic=None):
    """Whether the kernel is compiled for a GPU with programmatic dependent launch; not in Triton's interpreter."""
    options = None if _semantic is None else _semantic.builder.options
    is_nvidia = options is not None and options.backend_name == "cuda"
    return tl.constexpr(is_nvidia and int(options.arch[2:].rstrip("af")) >= 90)


has_dependent_launch.__triton_builtin__ = True
'''.strip()

HELPERS: Mapping[str, str] = {
    "has_float8": _HAS_FLOAT8,
    "has_ptx": _HAS_PTX,
    "has_dependent_launch": _HAS_DEPENDENT_LAUNCH,
} | {
    match.group(1): "@triton.jit\n" + match.group(0).strip()
    for match in re.finditer(
        r"^def (\w+)\(.*?(?=^def |\Z)", _TEXTS + "".join(HELPER_FAMILIES), re.MULTILINE | re.DOTALL
    )
}
"""The decorated source of each helper by name."""


def helper_sources(used: Iterable[str]) -> list[str]:
    """Returns the sources of helpers and of the helpers they call, in the order of the table."""
    pending, needed = list(used), set[str]()
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            pending += _called_helpers(name)
    return [text for name, text in HELPERS.items() if name in needed]


@cache
def _called_helpers(name: str) -> frozenset[str]:
    """Returns the names of the helpers that a helper's source calls."""
    return frozenset(HELPERS.keys() & re.findall(r"\b(\w+)\(", HELPERS[name]))
