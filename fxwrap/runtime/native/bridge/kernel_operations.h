// Operations on numbers as torch defines them, and those on integer sizes and indices.
#pragma once

#include "kernel_types.h"

namespace fxwrap {
INLINE int64_t floordiv(int64_t base, int64_t divisor) {
  const int64_t quotient = base / divisor;
  return quotient - (base % divisor != 0 && (base < 0) != (divisor < 0));
}
INLINE int64_t mod(int64_t base, int64_t divisor) { return base - floordiv(base, divisor) * divisor; }
INLINE int64_t ceildiv(int64_t base, int64_t divisor) { return -floordiv(-base, divisor); }
INLINE int64_t modular_indexing(int64_t base, int64_t divisor, int64_t modulus) {
  return mod(floordiv(base, divisor), modulus);
}
INLINE double truediv(double base, double divisor) { return base / divisor; }
INLINE double power(double base, double exponent) { return ::pow(base, exponent); }
INLINE int64_t natural_power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  for (; exponent > 0; --exponent) result *= base;
  return result;
}
template <class T> INLINE T max(T first, T second) { return second > first ? second : first; }
template <class T> INLINE constexpr T min(T first, T second) { return second < first ? second : first; }
INLINE int64_t to_int(double number) { return int64_t(number); }
}  // namespace fxwrap

// --- operations -------------------------------------------------------------------------------------------------------

namespace op {

template <class T> INLINE bool isnan(T x) { return x != x; }
INLINE bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
INLINE bool isinf(double x) { return __builtin_fabs(x) == infinity; }
INLINE bool signbit(float x) { return bitcast<int32_t>(x) < 0; }
INLINE bool signbit(double x) { return bitcast<int64_t>(x) < 0; }

// Both values are computed, so that a loop around it is vectorised: compilers move calls and loads, of which a condition
// selects the result, into branches, but not those whose bits it selects.
template <class T> INLINE T where(bool condition, T a, T b) {
  if constexpr (__is_same(T, bool)) {
    return condition ? a : b;
  } else {
    using Word = typename Bits<sizeof(T)>::Type;
    const Word first = bitcast<Word>(a), second = bitcast<Word>(b);
    return bitcast<T>(Word(second ^ ((first ^ second) & -Word(condition))));
  }
}

// The second number where both are equal, as torch.maximum, and NaN where one is. A constant is not NaN: compilers make no
// case of it, whose conditions multiply where results are compared with further constants.
template <class T> INLINE T maximum(T a, T b) {
  if (__builtin_constant_p(b) && b == b) return a <= b ? b : a;
  const T larger = a > b ? a : b;
  return __builtin_constant_p(a) && a == a ? larger : a != a ? a : larger;
}
template <class T> INLINE T minimum(T a, T b) {
  if (__builtin_constant_p(b) && b == b) return a >= b ? b : a;
  const T smaller = a < b ? a : b;
  return __builtin_constant_p(a) && a == a ? smaller : a != a ? a : smaller;
}
template <class T> INLINE T fmax(T a, T b) {
  const T larger = b > a ? b : a;
  return a != a ? b : larger;
}
template <class T> INLINE T fmin(T a, T b) {
  const T smaller = b < a ? b : a;
  return a != a ? b : smaller;
}
template <class T> INLINE T abs(T x) { return x < 0 ? -x : x; }
template <> INLINE float abs(float x) { return __builtin_fabsf(x); }
template <> INLINE double abs(double x) { return __builtin_fabs(x); }
template <class T> INLINE T sign(T x) { return T((x > 0) - (x < 0)); }

#define ROUNDING(name, builtin)                                  \
  INLINE float name(float x) { return __builtin_##builtin##f(x); } \
  INLINE double name(double x) { return __builtin_##builtin(x); }
ROUNDING(floor, floor)
ROUNDING(ceil, ceil)
ROUNDING(trunc, trunc)
ROUNDING(round, rint)  // half to even
ROUNDING(sqrt, sqrt)
#undef ROUNDING
template <class T> INLINE T rsqrt(T x) { return T(1) / sqrt(x); }
template <class T> INLINE T reciprocal(T x) { return T(1) / x; }
INLINE float copysign(float a, float b) { return __builtin_copysignf(a, b); }
INLINE double copysign(double a, double b) { return __builtin_copysign(a, b); }

#define UNARY(name)                                \
  INLINE float name(float x) { return ::name##f(x); } \
  INLINE double name(double x) { return ::name(x); }
#define BINARY(name)                                           \
  INLINE float name(float a, float b) { return ::name##f(a, b); } \
  INLINE double name(double a, double b) { return ::name(a, b); }
UNARY(exp2) UNARY(expm1) UNARY(log) UNARY(log2) UNARY(log10) UNARY(log1p)
UNARY(tan) UNARY(sinh) UNARY(cosh)
UNARY(atan) UNARY(asinh) UNARY(acosh) UNARY(erfc)
BINARY(atan2) BINARY(hypot)
#undef UNARY
#undef BINARY
INLINE float sin(float x) { return ::sinef(x); }
INLINE double sin(double x) { return ::sine(x); }
INLINE float cos(float x) { return ::cosinef(x); }
INLINE double cos(double x) { return ::cosine(x); }
// The bits of numbers of one sign are in the order of their size.
template <class T> INLINE T nextafter(T a, T b) {
  using Word = typename Bits<sizeof(T)>::Type;
  const Word bits = bitcast<Word>(a), farther = bits + 1, nearer = bits - 1;
  const T moved = bitcast<T>((a < b) == (a > 0) ? farther : nearer);
  const T smallest = copysign(bitcast<T>(Word(1)), b);
  const T next = a == b ? b : a == 0 ? smallest : moved;
  return (a != a) | (b != b) ? a + b : next;
}
INLINE float fmod(float a, float b) { return ::vector_fmodf(a, b); }
INLINE double fmod(double a, double b) { return ::vector_fmod(a, b); }

INLINE double pow(double a, double b) { return ::pow(a, b); }
#if defined(__x86_64__) && !defined(__FMA__)
INLINE double exp(double x) { return ::exp(x); }
INLINE float pow(float a, float b) { return ::powf(a, b); }
#endif
INLINE double erf(double x) { return ::erf(x); }
INLINE double tanh(double x) { return ::tanh(x); }
INLINE double asin(double x) { return ::asin(x); }
INLINE double acos(double x) { return ::acos(x); }
INLINE double atanh(double x) { return ::atanh(x); }

INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
// A polynomial by its coefficients, of which that of the highest power is the first (Horner's rule).
template <class T, class... Rest> INLINE T polynomial(T x, T value, Rest... coefficients) {
  ((value = multiply_add(value, x, coefficients)), ...);
  return value;
}

// Of |x| <= 0.5, asin(x) is an odd polynomial (Cephes); of others, pi / 2 - 2 * asin(sqrt((1 - x) / 2)). The vector form of
// the C library computes lanes of 1 and -1 one by one, to which operands are often clamped.
struct ArcSine {
  float result;  // asin of x, or of the root
  bool is_far;   // whether |x| > 0.5
  INLINE explicit ArcSine(float x) : is_far(__builtin_fabsf(x) > 0.5f) {
    const float size = __builtin_fabsf(x), square = is_far ? 0.5f * (1.0f - size) : x * x;
    const float at = is_far ? __builtin_sqrtf(square) : size;
    const float series = polynomial(square, 4.2163199048e-2f, 2.4181311049e-2f, 4.5470025998e-2f, 7.4953002686e-2f,
                                            1.6666752422e-1f);
    result = __builtin_fmaf(series * square, at, at);
  }
};
INLINE float asin(float x) {
  const ArcSine part(x);
  const float far = __builtin_fmaf(-2.0f, part.result, 1.57079632679f);
  return __builtin_copysignf(part.is_far ? far : part.result, x);
}
INLINE float acos(float x) {
  const ArcSine part(x);
  const float twice = 2.0f * part.result, far = x < 0 ? 3.14159265359f - twice : twice;
  return part.is_far ? far : 1.57079632679f - __builtin_copysignf(part.result, x);
}
INLINE float atanh(float x) {  // after Cephes, too; the sum keeps the logarithm in all lanes, for which there are vectors
  const bool is_small = __builtin_fabsf(x) < 0.5f;
  const float square = x * x, large = log(is_small ? 1.0f : (1.0f + x) / (1.0f - x));
  const float series = polynomial(square, 1.81740078349e-1f, 8.24370301058e-2f, 1.46691431730e-1f, 1.99782164500e-1f,
                                          3.33337300303e-1f);
  const float small = __builtin_fmaf(series * square, x, x);
  return __builtin_fmaf(0.5f, large, is_small ? small : -0.0f);
}

// 4^k * exp(r) with |r| <= log(2). The power of two is 2^k twice, whose bits are those of x / log(4) rounded by the
// addition of a large number; so results may be denormal or infinite. Where the result is 0 the power is, because some
// processors are a hundred times slower for products that underflow.
INLINE float exp(float x) {
  constexpr float rounding = 12582912.0f + 127.0f;  // 1.5 * 2^23, and the bias of exponents
  const bool vanishes = x < -104.0f;
  const float limited = vanishes ? -104.0f : x;
  const int32_t bits = bitcast<int32_t>(__builtin_fmaf(limited, 0.72134752f, rounding));
  const int32_t shifted = bits > 0x4B4000BF ? 0x4B4000BF : bits;  // k <= 64
  const float k = bitcast<float>(shifted) - rounding, power = vanishes ? 0.0f : bitcast<float>(shifted << 23);
  const float r = __builtin_fmaf(k, -2.85721354e-6f, __builtin_fmaf(k, -1.386291504f, limited));
  const float p = polynomial(r, 1.96113455e-4f, 1.41046802e-3f, 8.33610911e-3f, 4.16612588e-2f, 1.66666135e-1f,
                                5.00000358e-1f, 1.0f, 1.0f);
  return p * power * power;
}

// The mantissa from sqrt(0.5) to sqrt(2) and the exponent of a positive number.
struct BinaryParts {
  double mantissa, exponent;
  INLINE explicit BinaryParts(double value) {
    constexpr uint64_t lowest = 0x3fe6a09e667f3bcd, bias = 0x3ff0000000000000;  // the bits of sqrt(0.5) and of 1
    const uint64_t bits = bitcast<uint64_t>(value), scale = (bits + (bias - lowest)) >> 52;
    mantissa = bitcast<double>(bits - (scale << 52) + bias);
    exponent = bitcast<double>(scale | 0x4330000000000000) - (4503599627370496.0 + 1023.0);
  }
};

#if !defined(__x86_64__) || defined(__FMA__)
// 2^k * exp(r) with |r| <= log(2) / 2; the power of two is a product of two halves, so that results may be denormal.
INLINE double exp(double x) {
  constexpr double rounding = 6755399441055744.0 + 2046.0;  // 1.5 * 2^52, and twice the bias of exponents
  const bool vanishes = x < -746.0;
  const double above = vanishes ? -746.0 : x, limited = above > 710.0 ? 710.0 : above;
  const double shifted = __builtin_fma(limited, 1.4426950408889634, rounding), k = shifted - rounding;
  const uint64_t exponent = bitcast<uint64_t>(shifted) & 0xfff, half = exponent >> 1;
  const double power = vanishes ? 0.0 : bitcast<double>(half << 52), rest = bitcast<double>((exponent - half) << 52);
  const double r = __builtin_fma(k, -2.3190468138462996e-17, __builtin_fma(k, -0.6931471805599453, limited));
  const double p = polynomial(r, 2.510038549551032e-08, 2.7620088445409746e-07, 2.7557268459997064e-06,
                                 2.4801521295954376e-05, 1.9841269863053618e-04, 1.3888888917213717e-03,
                                 8.333333333330062e-03, 4.166666666662413e-02, 1.6666666666666669e-01,
                                 5.000000000000001e-01);
  return (__builtin_fma(p * r, r, r) + 1.0) * power * rest;
}

// The power in double, 2^(b * log2|a|): the logarithm is a series in s = (m - 1) / (m + 1) for the mantissa m.
INLINE float pow(float a, float b) {
  constexpr double rounding = 6755399441055744.0 + 1023.0;
  const double base = __builtin_fabsf(a), exponent = b;
  const BinaryParts parts(base);
  const double s = (parts.mantissa - 1.0) / (parts.mantissa + 1.0), z = s * s;
  const double p = polynomial(z, 0.28288718263073565, 0.3199066608891474, 0.41220922733052445, 0.5770779426302618,
                                 0.9617966941123595, 2.8853900817778504);
  const double finite = __builtin_fma(p, s, parts.exponent);
  const double logarithm = base == 0 ? -infinity : base < infinity ? finite : base;
  const double product = exponent * logarithm;
  const double above = product < -200.0 ? -200.0 : product, limited = above > 200.0 ? 200.0 : above;
  const double shifted = limited + rounding, r = limited - (shifted - rounding);
  const double q = polynomial(r, 1.5303700711365693e-05, 1.5469729214118296e-04, 1.3333478473685416e-03,
                                 9.618025613318034e-03, 5.5504109063258665e-02, 2.4022651213498092e-01,
                                 6.931471805568324e-01, 9.999999999595618e-01);
  const float size = float(q * bitcast<double>(bitcast<uint64_t>(shifted) << 52));
  const bool is_whole = __builtin_truncf(b) == b, is_odd = is_whole & (__builtin_truncf(b * 0.5f) != b * 0.5f);
  const float signed_size = is_odd ? __builtin_copysignf(size, a) : size;
  const bool is_undefined = (a < 0) & (a > -__builtin_inff()) & !is_whole;
  const bool is_one = (b == 0) | (a == 1.0f) | ((a == -1.0f) & (__builtin_fabsf(b) == __builtin_inff()));
  return is_one ? 1.0f : is_undefined ? __builtin_nanf("") : signed_size;
}
#endif

// The weight of a score in a softmax, from its difference to the largest one. Small weights change no sum that contains
// a weight of 1, but subnormal ones slow products down.
template <class T> INLINE T weight(T x) {
  const T power = exp(x);
  return x < T(-80) ? T(0) : power;
}

// exp of a number that is not positive, where an absolute error of 2e-7 does not matter: 2^k * exp(r).
INLINE float exp_nonpositive(float x) {
  constexpr float rounding = 12582912.0f + 127.0f;
  const float limited = x < -87.0f ? -87.0f : x;
  const float shifted = __builtin_fmaf(limited, 1.44269504f, rounding);
  const float k = shifted - rounding, power = bitcast<float>(bitcast<uint32_t>(shifted) << 23);
  const float r = __builtin_fmaf(k, -0.693147182f, limited);
  const float p = polynomial(r, 8.31248052e-3f, 4.18905467e-2f, 1.66671157e-1f, 4.99992281e-1f, 1.0f, 1.0f);
  return p * power;
}

// Two polynomials, after N. Juffa: 1 - exp(polynomial) for large x, x * polynomial(x * x) for small.
INLINE float erf(float x) {
  const float t = __builtin_fabsf(x), s = x * x;
  const float q = __builtin_fmaf(-3.88396438e-3f, t, 2.42546219e-2f);
  float large = __builtin_fmaf(__builtin_fmaf(-1.72853470e-5f, t, 3.83197126e-4f), s, q);
  large = __builtin_fmaf(large, t, -1.06777877e-1f);
  large = __builtin_fmaf(large, t, -6.34846687e-1f);
  large = __builtin_fmaf(large, t, -1.28717512e-1f);
  large = 1.0f - exp_nonpositive(__builtin_fmaf(large, t, -t));
  const float series = polynomial(s, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f,
                                  -3.76125336e-1f, 1.28379166e-1f);
  const float small = __builtin_fmaf(series, x, x);
  return t > 0.927734375f ? __builtin_copysignf(large, x) : small;
}

// 1 - 2 y / (1 + y) with y = exp(-2x) for large x, a polynomial (Cephes) for small.
INLINE float tanh(float x) {
  const float t = __builtin_fabsf(x), s = x * x;
  const float y = exp_nonpositive(-2.0f * t), large = 1.0f - 2.0f * y / (1.0f + y);
  const float series = polynomial(s, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                                  -3.33332819422e-1f);
  const float small = __builtin_fmaf(series * s, x, x);
  return __builtin_copysignf(t > 0.625f ? large : small, x);  // of -0.0 it is -0.0
}

template <class T> INLINE T sigmoid(T x) { return T(1) / (T(1) + exp(-x)); }

template <class T> INLINE T remainder(T a, T b) {
  const T rest = fmod(a, b);
  return ((rest != 0) & ((b < 0) != (rest < 0))) ? rest + b : rest;
}
template <class T> INLINE T floor_divide(T a, T b) {
  const T rest = fmod(a, b);
  const T quotient = (b == 0 ? a : a - rest) / b - T((rest != 0) & ((b < 0) != (rest < 0)));
  const T whole = floor(quotient), nearest = whole + T(quotient - whole > T(0.5));
  return quotient == 0 ? copysign(T(0), signbit(a) != signbit(b) ? T(-1) : T(1)) : nearest;
}
template <class T> INLINE T trunc_divide(T a, T b) { return trunc(a / b); }

// Integer division by zero, which torch rejects, returns 0 here; a kernel must not trap.
template <class T> INLINE T integer_trunc_divide(T a, T b) { return b == 0 ? T(0) : b == T(-1) ? T(-a) : T(a / b); }
template <class T> INLINE T integer_fmod(T a, T b) { return b == 0 || b == T(-1) ? T(0) : T(a % b); }
template <> INLINE uint8_t integer_trunc_divide(uint8_t a, uint8_t b) { return b == 0 ? 0 : a / b; }
template <> INLINE uint8_t integer_fmod(uint8_t a, uint8_t b) { return b == 0 ? 0 : a % b; }
template <class T> INLINE T integer_floor_divide(T a, T b) {
  return T(integer_trunc_divide(a, b) - T(integer_fmod(a, b) != 0 && (a < 0) != (b < 0)));
}
template <class T> INLINE T integer_remainder(T a, T b) {
  const T rest = integer_fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? T(rest + b) : rest;
}
template <class T> INLINE T integer_pow(T base, T exponent) {
  if (exponent < 0) return base == 1 ? T(1) : base == T(-1) ? T(exponent & 1 ? -1 : 1) : T(0);
  T result = 1;
  for (; exponent > 0; exponent /= 2, base = T(base * base))
    if (exponent & 1) result = T(result * base);
  return result;
}
template <class T> INLINE T bitwise_left_shift(T a, T b) {
  const bool inside = b >= 0 && b < T(sizeof(T) * 8);
  return inside ? T(uint64_t(a) << b) : T(0);
}
template <class T> INLINE T bitwise_right_shift(T a, T b) {
  constexpr T most = T(sizeof(T) * 8 - (T(-1) < 0));
  const bool inside = b >= 0 && b < most;
  return T(a >> (inside ? b : most));
}

INLINE double lgamma(double x) { return ::lgamma(x); }

// The logarithm of a number that is finite and not negative, a series in s = (m - 1) / (m + 1) for the mantissa m.
INLINE double finite_log(double x) {
  const BinaryParts parts(x);
  const double s = (parts.mantissa - 1.0) / (parts.mantissa + 1.0), z = s * s;
  const double p = polynomial(z, 0.16837659970680488, 0.18121934431215214, 0.22223434547517906, 0.2857141602110767,
                                 0.40000000061741614, 0.6666666666655292, 2.0000000000000004);
  return x == 0 ? -infinity : __builtin_fma(p, s, parts.exponent * 0.6931471805599453);
}

// In double, because terms cancel near 1 and 2. Small numbers are 2 + t and factors, for |t| <= 0.5, from where on lgamma is
// a polynomial; that of others is Stirling's formula, and that of negative numbers its reflection.
INLINE float lgamma(float number) {
  const double x = number, z = x < 0 ? 1 - x : x, nearest = round(z), t = z - nearest;
  const bool is_small = z < 4;
  const double above = nearest > 3 ? (z - 1) * (z - 2) : nearest > 2 ? z - 1 : 1.0;
  const double factors = nearest < 1 ? z * (z + 1) : nearest < 2 ? z : above;
  const double logarithm = finite_log(is_small ? factors : z), inverse = 1 / z, w = inverse * inverse;
  const double p = polynomial(t, 5.3193215132047825e-06, -1.1453943505060186e-05, 2.0169787019584055e-05,
                                 -4.420674109062643e-05, 9.951609827275654e-05, -0.00022327966351536556,
                                 0.000509664345964222, -0.0011927428713188603, 0.0028905105477798577,
                                 -0.007385551491347285, 0.020580808424383427, -0.06735230104594789, 0.3224670334241219,
                                 0.42278433509844865);
  const double rest = polynomial(w, 0.0028604692159294133, -0.0016725924381064833, 0.0008323422465029553,
                                    -0.0005950434756704944, 0.0007936488286327422, -0.002777777770220398,
                                    0.08333333333332853);
  const double small = __builtin_fma(t, p, nearest < 2 ? -logarithm : logarithm);
  const double large = __builtin_fma(z - 0.5, logarithm, __builtin_fma(rest, inverse, 0.9189385332046728 - z));
  const double size = is_small ? small : large;
  const double r = abs(x - round(x)), square = r * r;  // exact
  const double sine = polynomial(square, -2.113362735205297e-05, 0.0004659870158043378, -0.0073703643265304155,
                                         0.08214587881631043, -0.599264528825224, 2.5501640398618677,
                                         -5.1677127800497855, 3.1415926535897927);
  const double reflected = 1.1447298858494002 - finite_log(r * sine) - size;
  const float result = float(x < 0 ? reflected : size);
  return abs(number) < Limits<float>::highest ? result : number * number;
}

// The digamma function, after Cephes: reflection, recurrence up to 10, then an asymptotic series.
template <class T> T digamma(T x) {
  if (x == 0) return copysign(T(infinity), -x);
  double shift = 0, at = x;
  if (at < 0) {
    if (trunc(at) == at) return T(nan);
    const double fraction = at - trunc(at);
    shift = -3.14159265358979323846 / ::tan(3.14159265358979323846 * fraction);
    at = 1 - at;
  }
  for (; at < 10; at += 1) shift -= 1 / at;
  if (at == 10) return T(shift + 2.25175258906672110764);
  double series = 0;
  if (at < 1e17) {
    const double z = 1 / (at * at);
    constexpr double terms[] = {8.33333333333333333333e-2, -2.10927960927960927961e-2, 7.57575757575757575758e-3,
                                -4.16666666666666666667e-3, 3.96825396825396825397e-3, -8.33333333333333333333e-3,
                                8.33333333333333333333e-2};
    for (const double term : terms) series = series * z + term;
    series *= z;
  }
  return T(shift + ::log(at) - 0.5 / at - series);
}

// The inverse of erf: a rational approximation by the central or tail range, then two steps of Newton.
template <class T> T erfinv(T y) {
  const T size = abs(y);
  if (size > 1) return T(nan);
  if (size == 1) return copysign(T(infinity), y);
  double x;
  if (size <= T(0.7)) {
    const double z = double(y) * y;
    const double above = ((-0.140543331 * z + 0.914624893) * z - 1.645349621) * z + 0.886226899;
    const double below = (((0.012229801 * z - 0.329097515) * z + 1.442710462) * z - 2.118377725) * z + 1.0;
    x = y * above / below;
  } else {
    const double z = __builtin_sqrt(-::log((1.0 - double(size)) / 2.0));
    const double above = ((1.641345311 * z + 3.429567803) * z - 1.624906493) * z - 1.970840454;
    x = __builtin_copysign(above / ((1.637067800 * z + 3.543889200) * z + 1.0), double(y));
  }
  for (int step = 0; step < 2; ++step)
    x -= (::erf(x) - double(y)) / (1.1283791670955126 * ::exp(-x * x));
  return T(x);
}

// log(exp(a) + exp(b)), which a running logcumsumexp is made of.
template <class T> INLINE T logaddexp(T a, T b) {
  const T small = minimum(a, b), large = maximum(a, b);
  return small != large || !isinf(small) ? large + log1p(exp(small - large)) : a;
}

}  // namespace op
