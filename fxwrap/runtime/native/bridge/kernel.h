// The functions of generated CPU kernels: storage types, casts, the scalar operations as torch defines them, and lanes.
//
// Small on purpose: it includes no header of the standard library but stdint.h, because <cmath> alone takes longer to
// compile than the kernels do. Functions are inlined into loops, which the compiler vectorises.
#pragma once

#include <stdint.h>

#include "kernel_failure.h"

#define INLINE inline __attribute__((always_inline))

// glibc has vector versions (libmvec) of these functions, accurate to 4 ULP; GCC calls them from vectorised loops, and
// Clang does so by a flag (build.py).
#if defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && defined(__x86_64__)
#if __GLIBC__ > 2 || __GLIBC_MINOR__ >= 35
#define HAS_VECTOR_MATH
#define VECTOR_MATH __attribute__((simd("notinbranch"), const))
#endif
#endif
#ifndef VECTOR_MATH
#define VECTOR_MATH __attribute__((const))
#endif

extern "C" {
#define MATH_1(name) VECTOR_MATH double name(double) noexcept; VECTOR_MATH float name##f(float) noexcept;
#define MATH_2(name) VECTOR_MATH double name(double, double) noexcept; VECTOR_MATH float name##f(float, float) noexcept;
MATH_1(exp) MATH_1(exp2) MATH_1(expm1) MATH_1(log) MATH_1(log2) MATH_1(log10) MATH_1(log1p)
MATH_1(tan) MATH_1(sinh) MATH_1(cosh) MATH_1(tanh)
MATH_1(asin) MATH_1(acos) MATH_1(atan) MATH_1(asinh) MATH_1(acosh) MATH_1(atanh) MATH_1(erf) MATH_1(erfc)
MATH_2(pow) MATH_2(atan2) MATH_2(hypot)
// Under other names: GCC would compute a sine and a cosine of one angle by a function without a vector form.
VECTOR_MATH double sine(double) noexcept __asm__("sin");
VECTOR_MATH double cosine(double) noexcept __asm__("cos");
VECTOR_MATH float sinef(float) noexcept __asm__("sinf");
VECTOR_MATH float cosinef(float) noexcept __asm__("cosf");
double lgamma(double) noexcept;
float lgammaf(float) noexcept;
double nextafter(double, double) noexcept;
float nextafterf(float, float) noexcept;
double fmod(double, double) noexcept;
float fmodf(float, float) noexcept;
// The same, with the vector forms of vector_math.h, which kernels that call them include.
VECTOR_MATH double vector_fmod(double, double) noexcept __asm__("fmod");
VECTOR_MATH float vector_fmodf(float, float) noexcept __asm__("fmodf");
}

constexpr double infinity = __builtin_inf();
constexpr double nan = __builtin_nan("");

[[noreturn]] inline void fxwrap_index_error(const char* message) { throw fxwrap::KernelFailure{"IndexError", message}; }
[[noreturn]] inline void fxwrap_runtime_error(const char* message) {
  throw fxwrap::KernelFailure{"RuntimeError", message};
}

// --- types ------------------------------------------------------------------------------------------------------------

enum class bfloat16 : uint16_t {};
#ifdef __AVX512FP16__
using float16 = _Float16;
#else  // compilers vectorise loops over _Float16 four elements at a time, if at all
enum class float16 : uint16_t {};
#endif

template <class T> struct Limits;
template <> struct Limits<float> { static constexpr float lowest = -__builtin_inff(), highest = __builtin_inff(); };
template <> struct Limits<double> { static constexpr double lowest = -infinity, highest = infinity; };
template <> struct Limits<int8_t> { static constexpr int8_t lowest = INT8_MIN, highest = INT8_MAX; };
template <> struct Limits<int16_t> { static constexpr int16_t lowest = INT16_MIN, highest = INT16_MAX; };
template <> struct Limits<int32_t> { static constexpr int32_t lowest = INT32_MIN, highest = INT32_MAX; };
template <> struct Limits<int64_t> { static constexpr int64_t lowest = INT64_MIN, highest = INT64_MAX; };
template <> struct Limits<uint8_t> { static constexpr uint8_t lowest = 0, highest = UINT8_MAX; };

template <class T, class U> INLINE T bitcast(U value) { return __builtin_bit_cast(T, value); }

// A zero that the compiler cannot know. The type in memory is like no other, so that no store can change it, and loops load
// it once. Kernels combine it with indirect indices that derive from a bool: GCC 12 and 13 vectorise loads at the index
// int64_t(condition) and take the lane's mask, -1 where the condition holds, for the index.
enum class Unknown : uint16_t {};
__attribute__((weak, visibility("hidden"))) Unknown unknown_zero{};
INLINE int64_t opaque_zero() { return static_cast<int64_t>(unknown_zero); }

// A float cast to an integer. GCC would take a cast to an integer and back for trunc, which returns -0.0 for -0.5, and NaN
// for NaN.
template <class T, class U> INLINE T to_integer(U value) {
  return static_cast<T>(value) ^ static_cast<T>(opaque_zero());
}

template <class T, class U> struct Cast { static INLINE T of(U value) { return static_cast<T>(value); } };
template <class T> struct Cast<T, T> { static INLINE T of(T value) { return value; } };
template <class U> struct Cast<bool, U> { static INLINE bool of(U value) { return value != 0; } };
template <> struct Cast<bool, bool> { static INLINE bool of(bool value) { return value; } };
// GCC vectorises no conversion of a condition to a floating-point number, but the selection of one.
template <> struct Cast<float, bool> { static INLINE float of(bool value) { return value ? 1.0f : 0.0f; } };
template <> struct Cast<double, bool> { static INLINE double of(bool value) { return value ? 1.0 : 0.0; } };
template <> struct Cast<int32_t, float> { static INLINE int32_t of(float v) { return to_integer<int32_t>(v); } };
template <> struct Cast<int32_t, double> { static INLINE int32_t of(double v) { return to_integer<int32_t>(v); } };
template <> struct Cast<int64_t, float> { static INLINE int64_t of(float v) { return to_integer<int64_t>(v); } };
template <> struct Cast<int64_t, double> { static INLINE int64_t of(double v) { return to_integer<int64_t>(v); } };
template <> struct Cast<uint8_t, float> { static INLINE uint8_t of(float v) { return uint8_t(int64_t(v)); } };
template <> struct Cast<uint8_t, double> { static INLINE uint8_t of(double v) { return uint8_t(int64_t(v)); } };
template <> struct Cast<int8_t, float> { static INLINE int8_t of(float v) { return int8_t(int32_t(v)); } };
template <> struct Cast<int8_t, double> { static INLINE int8_t of(double v) { return int8_t(int32_t(v)); } };
template <> struct Cast<int16_t, float> { static INLINE int16_t of(float v) { return int16_t(int32_t(v)); } };
template <> struct Cast<int16_t, double> { static INLINE int16_t of(double v) { return int16_t(int32_t(v)); } };
template <> struct Cast<float, bfloat16> {
  static INLINE float of(bfloat16 value) { return bitcast<float>(uint32_t(value) << 16); }
};
template <> struct Cast<bfloat16, float> {  // to the nearest, ties to even
  static INLINE bfloat16 of(float value) {
    const uint32_t bits = bitcast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return bfloat16(value != value ? 0x7fc0 : rounded);
  }
};
template <> struct Cast<bfloat16, bfloat16> { static INLINE bfloat16 of(bfloat16 value) { return value; } };
template <class T> struct Cast<T, bfloat16> {
  static INLINE T of(bfloat16 value) { return Cast<T, float>::of(Cast<float, bfloat16>::of(value)); }
};
template <class U> struct Cast<bfloat16, U> {
  static INLINE bfloat16 of(U value) { return Cast<bfloat16, float>::of(static_cast<float>(value)); }
};
template <> struct Cast<bool, bfloat16> {
  static INLINE bool of(bfloat16 value) { return Cast<float, bfloat16>::of(value) != 0; }
};
#ifdef __AVX512FP16__
template <> struct Cast<float, float16> { static INLINE float of(float16 value) { return value; } };
template <> struct Cast<float16, float> { static INLINE float16 of(float value) { return float16(value); } };
#else  // by integers, which are vectorised; GCC 12 vectorises the conversions of these processors one by one
template <> struct Cast<float, float16> {
  static INLINE float of(float16 value) {
    const uint32_t bits = uint32_t(int32_t(bitcast<int16_t>(value))), magnitude = (bits << 13) & 0x0fffe000;
    const float subnormal = bitcast<float>(magnitude + (113u << 23)) - 0x1p-14f;
    const float normal = bitcast<float>(magnitude + (224u << 23)) * 0x1p-112f;  // also infinity and NaN
    return bitcast<float>((bits & 0x80000000) | bitcast<uint32_t>(magnitude < (1u << 23) ? subnormal : normal));
  }
};
template <> struct Cast<float16, float> {  // to the nearest, ties to even
  static INLINE float16 of(float value) {
    const uint32_t bits = bitcast<uint32_t>(value), magnitude = bits & 0x7fffffff;
    const uint32_t small = bitcast<uint32_t>(bitcast<float>(magnitude) + 0.5f) - (126u << 23);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t finite = magnitude < (113u << 23) ? small : normal < 0x7c00 ? normal : 0x7c00;
    return bitcast<float16>(uint16_t((bits >> 16 & 0x8000) | (magnitude > 0x7f800000 ? 0x7e00 : finite)));
  }
};
#endif
template <> struct Cast<bfloat16, float16> {
  static INLINE bfloat16 of(float16 value) { return Cast<bfloat16, float>::of(Cast<float, float16>::of(value)); }
};
template <> struct Cast<float16, bfloat16> {
  static INLINE float16 of(bfloat16 value) { return Cast<float16, float>::of(Cast<float, bfloat16>::of(value)); }
};
template <class T> struct Cast<T, float16> {
  static INLINE T of(float16 value) { return Cast<T, float>::of(Cast<float, float16>::of(value)); }
};
template <class U> struct Cast<float16, U> {
  static INLINE float16 of(U value) { return Cast<float16, float>::of(static_cast<float>(value)); }
};
template <> struct Cast<float16, float16> { static INLINE float16 of(float16 value) { return value; } };
template <> struct Cast<bool, float16> {
  static INLINE bool of(float16 value) { return Cast<float, float16>::of(value) != 0; }
};

// 8-bit floats: a sign, an exponent with a bias, M bits of mantissa. `largest` is the code of the largest finite number
// without its sign, `overflow` that of larger ones, `not_a_number` that of NaN. A format with `unsigned_zero` has its only
// NaN where -0.0 would be. `float8_e4m3fn` saturates, as since torch 2.13; before, floats that it cannot hold were NaN.
enum class float8_e4m3fn : uint8_t {};
enum class float8_e4m3fn_nan : uint8_t {};
enum class float8_e5m2 : uint8_t {};
enum class float8_e4m3fnuz : uint8_t {};
enum class float8_e5m2fnuz : uint8_t {};

template <int M, int bias, uint32_t largest, uint32_t overflow, uint32_t not_a_number, bool unsigned_zero>
struct Float8Format {
  static constexpr bool is_format = true;
  static constexpr uint32_t float_infinity = 0x7f800000, sign_bit = 0x80000000;
  static INLINE float decode(uint8_t code) {
    const uint32_t magnitude = code & 0x7f, sign = uint32_t(code & 0x80) << 24;
    const float normal = bitcast<float>((magnitude << (23 - M)) + (uint32_t(127 - bias) << 23));
    const float subnormal = float(int32_t(magnitude)) * bitcast<float>(uint32_t(128 - bias - M) << 23);
    const uint32_t finite = bitcast<uint32_t>(magnitude < (1u << M) ? subnormal : normal);
    if (unsigned_zero) return bitcast<float>(code == 0x80 ? float_infinity + 1 : finite | sign);
    const uint32_t special = magnitude == overflow && overflow == largest + 1 && overflow != not_a_number
        ? float_infinity : 0x7fc00000;
    return bitcast<float>((magnitude > largest ? special : finite) | sign);
  }
  static INLINE uint8_t encode(float value) {  // to the nearest, ties to even
    const uint32_t bits = bitcast<uint32_t>(value), magnitude = bits & ~sign_bit;
    constexpr uint32_t magic = uint32_t(128 - bias + 23 - M) << 23;  // its last digit is the smallest subnormal number
    const uint32_t subnormal = bitcast<uint32_t>(bitcast<float>(magnitude) + bitcast<float>(magic)) - magic;
    const uint32_t odd = (magnitude >> (23 - M)) & 1;
    const uint32_t half = (1u << (22 - M)) - 1 + odd;
    const uint32_t normal = (magnitude - (uint32_t(127 - bias) << 23) + half) >> (23 - M);
    const uint32_t finite = magnitude < uint32_t(128 - bias) << 23 ? subnormal : normal;
    const uint32_t limited = finite > largest ? overflow : finite;
    const uint32_t code = magnitude > float_infinity ? not_a_number : limited;
    return uint8_t(code | (unsigned_zero && code == 0 ? 0 : (bits >> 24) & 0x80));
  }
};
template <class T> struct Float8 { static constexpr bool is_format = false; };
template <> struct Float8<float8_e4m3fn> : Float8Format<3, 7, 0x7e, 0x7e, 0x7f, false> {};
template <> struct Float8<float8_e4m3fn_nan> : Float8Format<3, 7, 0x7e, 0x7f, 0x7f, false> {};
template <> struct Float8<float8_e5m2> : Float8Format<2, 15, 0x7b, 0x7c, 0x7f, false> {};
template <> struct Float8<float8_e4m3fnuz> : Float8Format<3, 8, 0x7f, 0x80, 0x80, true> {};
template <> struct Float8<float8_e5m2fnuz> : Float8Format<2, 16, 0x7f, 0x80, 0x80, true> {};

// A number as another type, as torch converts it: 8-bit floats through float32.
template <class T, class U> INLINE T to(U value) {
  if constexpr (__is_same(T, U)) return value;
  else if constexpr (Float8<U>::is_format) return to<T>(Float8<U>::decode(uint8_t(value)));
  else if constexpr (Float8<T>::is_format) return T(Float8<T>::encode(to<float>(value)));
  else return Cast<T, U>::of(value);
}

// A bool in memory. Compilers vectorise the comparison of its byte, but no condition that is a byte itself.
INLINE bool load_bool(const bool& element) { return reinterpret_cast<const uint8_t&>(element) != 0; }

// A number rounded to what half precision can hold, and left as wide as it was.
template <class T> INLINE float rounded(float value) { return to<float>(to<T>(value)); }
template <> INLINE float rounded<bfloat16>(float value) {
  const uint32_t bits = bitcast<uint32_t>(value);
  const float nearest = bitcast<float>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
  return value != value ? value : nearest;
}
#ifndef __AVX512FP16__
template <> INLINE float rounded<float16>(float value) {
  const uint32_t bits = bitcast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const float subnormal = (bitcast<float>(magnitude) + 0.5f) - 0.5f;
  const uint32_t nearest = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & 0xffffe000;
  const uint32_t normal = nearest < (143u << 23) ? nearest : 0x7f800000;
  const uint32_t result = magnitude < (113u << 23) ? bitcast<uint32_t>(subnormal) : normal;
  return value != value ? value : bitcast<float>((bits & 0x80000000) | result);
}
#endif

// --- integer sizes and indices --------------------------------------------------------------------------------------

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
template <class T> INLINE T min(T first, T second) { return second < first ? second : first; }
INLINE int64_t to_int(double number) { return int64_t(number); }
}  // namespace fxwrap

// --- operations -------------------------------------------------------------------------------------------------------

namespace op {

template <class T> INLINE bool isnan(T x) { return x != x; }
INLINE bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
INLINE bool isinf(double x) { return __builtin_fabs(x) == infinity; }
INLINE bool signbit(float x) { return bitcast<int32_t>(x) < 0; }
INLINE bool signbit(double x) { return bitcast<int64_t>(x) < 0; }

template <int bytes> struct Bits;
template <> struct Bits<4> { using type = uint32_t; };
template <> struct Bits<8> { using type = uint64_t; };

// Both values are computed, so that a loop around it is vectorised: compilers move calls and loads, of which a condition
// selects the result, into branches, but not those whose bits it selects.
template <class T> INLINE T where(bool condition, T a, T b) {
  if constexpr (sizeof(T) < 4) {
    return condition ? a : b;
  } else {
    using Word = typename Bits<sizeof(T)>::type;
    const Word first = bitcast<Word>(a), second = bitcast<Word>(b);
    return bitcast<T>(second ^ ((first ^ second) & -Word(condition)));
  }
}

template <class T> INLINE T maximum(T a, T b) {
  const T larger = a > b ? a : b;  // b where one is NaN, as the processor's instruction is
  return a != a ? a : larger;
}
template <class T> INLINE T minimum(T a, T b) {
  const T smaller = a < b ? a : b;
  return a != a ? a : smaller;
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
UNARY(asin) UNARY(acos) UNARY(atan) UNARY(asinh) UNARY(acosh) UNARY(atanh) UNARY(erfc)
BINARY(atan2) BINARY(hypot) BINARY(nextafter)
#undef UNARY
#undef BINARY
INLINE float sin(float x) { return ::sinef(x); }
INLINE double sin(double x) { return ::sine(x); }
INLINE float cos(float x) { return ::cosinef(x); }
INLINE double cos(double x) { return ::cosine(x); }
INLINE float fmod(float a, float b) { return ::vector_fmodf(a, b); }
INLINE double fmod(double a, double b) { return ::vector_fmod(a, b); }

INLINE double pow(double a, double b) { return ::pow(a, b); }
#if defined(__x86_64__) && !defined(__FMA__)
INLINE double exp(double x) { return ::exp(x); }
INLINE float pow(float a, float b) { return ::powf(a, b); }
#endif
INLINE double erf(double x) { return ::erf(x); }
INLINE double tanh(double x) { return ::tanh(x); }

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
  float p = 1.96113455e-4f;
  p = __builtin_fmaf(p, r, 1.41046802e-3f);
  p = __builtin_fmaf(p, r, 8.33610911e-3f);
  p = __builtin_fmaf(p, r, 4.16612588e-2f);
  p = __builtin_fmaf(p, r, 1.66666135e-1f);
  p = __builtin_fmaf(p, r, 5.00000358e-1f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  return p * power * power;
}

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
  double p = 2.510038549551032e-08;
  p = __builtin_fma(p, r, 2.7620088445409746e-07);
  p = __builtin_fma(p, r, 2.7557268459997064e-06);
  p = __builtin_fma(p, r, 2.4801521295954376e-05);
  p = __builtin_fma(p, r, 1.9841269863053618e-04);
  p = __builtin_fma(p, r, 1.3888888917213717e-03);
  p = __builtin_fma(p, r, 8.333333333330062e-03);
  p = __builtin_fma(p, r, 4.166666666662413e-02);
  p = __builtin_fma(p, r, 1.6666666666666669e-01);
  p = __builtin_fma(p, r, 5.000000000000001e-01);
  return (__builtin_fma(p * r, r, r) + 1.0) * power * rest;
}

// The power in double, 2^(b * log2|a|): the logarithm is a series in s = (m - 1) / (m + 1) for the mantissa m.
INLINE float pow(float a, float b) {
  constexpr double rounding = 6755399441055744.0 + 1023.0;
  constexpr uint64_t lowest = 0x3fe6a09e667f3bcd, bias = 0x3ff0000000000000;  // the bits of sqrt(0.5) and of 1
  const double base = __builtin_fabsf(a), exponent = b;
  const uint64_t bits = bitcast<uint64_t>(base), scale = (bits + (bias - lowest)) >> 52;
  const double m = bitcast<double>(bits - (scale << 52) + bias);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 0.28288718263073565;
  p = __builtin_fma(p, z, 0.3199066608891474);
  p = __builtin_fma(p, z, 0.41220922733052445);
  p = __builtin_fma(p, z, 0.5770779426302618);
  p = __builtin_fma(p, z, 0.9617966941123595);
  p = __builtin_fma(p, z, 2.8853900817778504);
  const double whole = bitcast<double>(scale | 0x4330000000000000) - (4503599627370496.0 + 1023.0);
  const double finite = __builtin_fma(p, s, whole);
  const double logarithm = base == 0 ? -infinity : base < infinity ? finite : base;
  const double product = exponent * logarithm;
  const double above = product < -200.0 ? -200.0 : product, limited = above > 200.0 ? 200.0 : above;
  const double shifted = limited + rounding, r = limited - (shifted - rounding);
  double q = 1.5303700711365693e-05;
  q = __builtin_fma(q, r, 1.5469729214118296e-04);
  q = __builtin_fma(q, r, 1.3333478473685416e-03);
  q = __builtin_fma(q, r, 9.618025613318034e-03);
  q = __builtin_fma(q, r, 5.5504109063258665e-02);
  q = __builtin_fma(q, r, 2.4022651213498092e-01);
  q = __builtin_fma(q, r, 6.931471805568324e-01);
  q = __builtin_fma(q, r, 9.999999999595618e-01);
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
  float p = 8.31248052e-3f;
  p = __builtin_fmaf(p, r, 4.18905467e-2f);
  p = __builtin_fmaf(p, r, 1.66671157e-1f);
  p = __builtin_fmaf(p, r, 4.99992281e-1f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
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
  float small = -5.96761703e-4f;
  small = __builtin_fmaf(small, s, 4.99119423e-3f);
  small = __builtin_fmaf(small, s, -2.67681349e-2f);
  small = __builtin_fmaf(small, s, 1.12819925e-1f);
  small = __builtin_fmaf(small, s, -3.76125336e-1f);
  small = __builtin_fmaf(small, s, 1.28379166e-1f);
  small = __builtin_fmaf(small, x, x);
  return t > 0.927734375f ? __builtin_copysignf(large, x) : small;
}

// 1 - 2 y / (1 + y) with y = exp(-2x) for large x, a polynomial (Cephes) for small.
INLINE float tanh(float x) {
  const float t = __builtin_fabsf(x), s = x * x;
  const float y = exp_nonpositive(-2.0f * t), large = 1.0f - 2.0f * y / (1.0f + y);
  float small = -5.70498872745e-3f;
  small = __builtin_fmaf(small, s, 2.06390887954e-2f);
  small = __builtin_fmaf(small, s, -5.37397155531e-2f);
  small = __builtin_fmaf(small, s, 1.33314422036e-1f);
  small = __builtin_fmaf(small, s, -3.33332819422e-1f);
  small = __builtin_fmaf(small * s, x, x);
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

// Stirling's series at y >= 8 and the recurrence below, in double because the two cancel near 1 and 2; reflection of
// negative numbers.
INLINE float lgamma(float number) {
  const double x = number, z = x < 0 ? 1 - x : x;
  const bool is_small = z < 8;
  const double low = ((z * (z + 1)) * ((z + 2) * (z + 3))) * (((z + 4) * (z + 5)) * ((z + 6) * (z + 7)));
  const double y = is_small ? z + 8 : z, shift = is_small ? low : 1.0;
  const double inverse = 1 / y, square = inverse * inverse;
  double series = -3617.0 / 122400;
  series = __builtin_fma(series, square, 1.0 / 156);
  series = __builtin_fma(series, square, -691.0 / 360360);
  series = __builtin_fma(series, square, 1.0 / 1188);
  series = __builtin_fma(series, square, -1.0 / 1680);
  series = __builtin_fma(series, square, 1.0 / 1260);
  series = __builtin_fma(series, square, -1.0 / 360);
  series = __builtin_fma(series, square, 1.0 / 12);
  const double large = (y - 0.5) * ::log(y) - y + 0.91893853320467274178 + series * inverse;
  const double angle = 3.14159265358979323846 * abs(x - round(x));  // exact up to the product
  const double reflected = 3.14159265358979323846 * shift / sin(angle);
  const double logarithm = ::log(x < 0 ? reflected : shift);
  const float nearest = float(x < 0 ? logarithm - large : large - logarithm);
  const float result = (number == 1.0f) | (number == 2.0f) ? 0.0f : nearest;
  return abs(number) < Limits<float>::highest || number != number ? result : Limits<float>::highest;
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

// Combines two partial results of a reduction.
namespace combine {
struct Sum { template <class T> INLINE T operator()(T a, T b) const { return T(a + b); } };
struct Prod { template <class T> INLINE T operator()(T a, T b) const { return T(a * b); } };
struct Max { template <class T> INLINE T operator()(T a, T b) const { return op::maximum(a, b); } };
struct Min { template <class T> INLINE T operator()(T a, T b) const { return op::minimum(a, b); } };
struct Any { INLINE bool operator()(bool a, bool b) const { return a | b; } };
struct All { INLINE bool operator()(bool a, bool b) const { return a & b; } };
struct LogAddExp { template <class T> INLINE T operator()(T a, T b) const { return op::logaddexp(a, b); } };
constexpr Sum sum;
constexpr Prod prod;
constexpr Max max;
constexpr Min min;
constexpr Any any;
constexpr All all;
constexpr LogAddExp logaddexp;
}  // namespace combine

// Combines an element of memory with a value, in the type that arithmetic on it happens in.
template <class T> struct Arithmetic { using Type = T; };
template <> struct Arithmetic<bfloat16> { using Type = float; };
template <> struct Arithmetic<float16> { using Type = float; };
template <class T, class Combine> INLINE void update(T& element, T value, Combine combine) {
  using Type = typename Arithmetic<T>::Type;
  element = to<T>(combine(to<Type>(element), to<Type>(value)));
}

// Adds a value to an element of memory to which other threads add values too.
template <class T> INLINE void add_atomically(T& element, T value) {
#pragma omp atomic
  element += value;
}

// The number of columns of scattered rows that one thread updates: a multiple of 16.
#ifdef _OPENMP
extern "C" int omp_get_max_threads() noexcept;
INLINE int64_t scattered_columns(int64_t columns) {
  const int64_t threads = omp_get_max_threads();
  return (columns + 16 * threads - 1) / (16 * threads) * 16;
}
#else
INLINE int64_t scattered_columns(int64_t columns) { return columns; }
#endif

// An element of a table, at a different index in each lane. Processors gather words of 32 bits and none of 16, so a half is
// extracted from the aligned word that contains the element.
template <class T> INLINE T gather(const T* table, int64_t place) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 2) {
    typedef uint32_t Word __attribute__((may_alias));
    const uint64_t address = reinterpret_cast<uint64_t>(table);
    const Word* words = reinterpret_cast<const Word*>(address & ~uint64_t(3));
    const int64_t half = place + int64_t((address >> 1) & 1);
    return bitcast<T>(uint16_t(words[half >> 1] >> (int32_t(half & 1) * 16)));
  }
#endif
  return table[place];
}

// --- lanes ------------------------------------------------------------------------------------------------------------

// Runs body(element, lane) for 0 <= element < count, `lanes` elements at a time: loops over a reduced axis use it.
template <int lanes, class Body> INLINE void for_lanes(int64_t count, Body body) {
  int64_t start = 0;
  for (; start + lanes <= count; start += lanes)
#pragma omp simd
    for (int lane = 0; lane < lanes; ++lane) body(start + lane, lane);
#pragma omp simd
  for (int lane = 0; lane < int(count - start); ++lane) body(start + lane, lane);
}

// Runs body(element, lane, place, is_new) for all elements of a row, `width` or more at a time: the last block begins early
// enough to be a whole one, and its first elements are not new. `place` is where the element is in a buffer of whole blocks.
template <int lanes, int width, class Body> INLINE void for_overlapping_lanes(int64_t count, Body body) {
  int64_t start = 0;
  for (; start + lanes <= count; start += lanes)
#pragma omp simd
    for (int lane = 0; lane < lanes; ++lane) body(start + lane, lane, start + lane, true);
  for (; start + width <= count; start += width)
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) body(start + lane, lane, start + lane, true);
  if (start < count) {
    const int64_t first = count - width;
    int repeated = int(start - first);
    __asm__("" : "+r"(repeated));  // a number that the compiler knows would split the loop there
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) body(first + lane, lane, start + lane, lane >= repeated);
  }
}

// The same for elements that depend on those before them.
template <int lanes, class Body> INLINE void for_lanes_in_order(int64_t count, Body body) {
  for (int64_t element = 0; element < count; ++element) body(element, int(element % lanes));
}

// Combines each of the first `width` elements with the one `width` places behind it, then half as many, down to one.
template <int width, class T, class Combine> INLINE void fold(T* at, Combine combine) {
  if constexpr (width > 0) {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) at[lane] = combine(at[lane], at[lane + width]);
    fold<width / 2>(at, combine);
  }
}

// One accumulator a lane; together they are one reduction.
template <class T, int lanes> struct Lanes {
  T at[lanes];
  INLINE explicit Lanes(T start) {
    for (int lane = 0; lane < lanes; ++lane) at[lane] = start;
  }
  INLINE T& operator[](int lane) { return at[lane]; }
  template <class Combine> INLINE T combined(Combine combine) {
    fold<lanes / 2>(at, combine);
    return at[0];
  }
  // Combines adjacent lanes: all lanes of a group have the result.
  template <int group, class Combine> INLINE void combine_groups(Combine combine) {
    for (int first = 0; first + group <= lanes; first += group) {
      T result = at[first];
      for (int lane = 1; lane < group; ++lane) result = combine(result, at[first + lane]);
      for (int lane = 0; lane < group; ++lane) at[first + lane] = result;
    }
  }
};

// Partial results of the parts of a long reduction, combined pairwise in a fixed order. Few are on the stack.
template <class T> struct PartialResults {
  static constexpr int64_t FEW = 8192 / sizeof(T);
  alignas(64) char few[8192];
  T* at;
  INLINE explicit PartialResults(int64_t count)
      : at(reinterpret_cast<T*>(count <= FEW ? few : __builtin_malloc(uint64_t(count) * sizeof(T)))) {}
  PartialResults(const PartialResults&) = delete;
  INLINE ~PartialResults() {
    if (reinterpret_cast<char*>(at) != few) __builtin_free(at);
  }
  INLINE T& operator[](int64_t part) const { return at[part]; }
  template <class Combine> INLINE T combined(int64_t count, T start, Combine combine) const {
    if (count == 0) return start;
    for (int64_t width = 1; width < count; width *= 2)
      for (int64_t part = 0; part + width < count; part += 2 * width) at[part] = combine(at[part], at[part + width]);
    return at[0];
  }
};

// A value and its position. The first of equal values wins, and the first NaN over everything.
template <class T> struct IndexedValue {
  T value;
  int64_t position;
};
struct Greater { template <class T> INLINE bool operator()(T a, T b) const { return (a > b) | ((a != a) & (b == b)); } };
struct Less { template <class T> INLINE bool operator()(T a, T b) const { return (a < b) | ((a != a) & (b == b)); } };
template <class Better> struct ArgCombine {
  template <class T> INLINE IndexedValue<T> operator()(IndexedValue<T> a, IndexedValue<T> b) const {
    const bool same = !Better{}(a.value, b.value) && !Better{}(b.value, a.value);
    return Better{}(a.value, b.value) || (same && a.position < b.position) ? a : b;
  }
};
namespace combine {
constexpr ArgCombine<Greater> argmax;
constexpr ArgCombine<Less> argmin;
}  // namespace combine

// The step of cummax and cummin: the last of equal values wins.
template <class T> INLINE IndexedValue<T> cummax_step(IndexedValue<T> running, T value, int64_t position) {
  const bool better = ((value >= running.value) & (running.value == running.value)) | (value != value);
  return better ? IndexedValue<T>{value, position} : running;
}
template <class T> INLINE IndexedValue<T> cummin_step(IndexedValue<T> running, T value, int64_t position) {
  const bool better = ((value <= running.value) & (running.value == running.value)) | (value != value);
  return better ? IndexedValue<T>{value, position} : running;
}

// One best value a lane; positions are of type P, which is 32 bits wide where they fit.
template <class T, int lanes, class P, class Better> struct IndexedLanes {
  T value[lanes];
  P position[lanes];
  INLINE explicit IndexedLanes(T start) {
    for (int lane = 0; lane < lanes; ++lane) value[lane] = start, position[lane] = 0;
  }
  INLINE IndexedValue<T> operator[](int lane) const { return {value[lane], position[lane]}; }
  INLINE void update(int lane, T candidate, P where) {
    const bool better = Better{}(candidate, value[lane]);
    value[lane] = better ? candidate : value[lane];
    position[lane] = better ? where : position[lane];
  }
  INLINE IndexedValue<T> combined(ArgCombine<Better> combine) const {
    IndexedValue<T> best = (*this)[0];
    for (int lane = 1; lane < lanes; ++lane) best = combine(best, (*this)[lane]);
    return best;
  }
};

// Combines the results of two parts of columns, lane by lane.
template <class Combine> struct Lanewise {
  Combine combine;
  template <class T, int lanes> INLINE Lanes<T, lanes> operator()(Lanes<T, lanes> a, const Lanes<T, lanes>& b) const {
    for (int lane = 0; lane < lanes; ++lane) a.at[lane] = combine(a.at[lane], b.at[lane]);
    return a;
  }
  template <class T, int lanes, class P, class Better>
  INLINE IndexedLanes<T, lanes, P, Better> operator()(IndexedLanes<T, lanes, P, Better> a,
                                                   const IndexedLanes<T, lanes, P, Better>& b) const {
    for (int lane = 0; lane < lanes; ++lane) {
      const IndexedValue<T> best = combine(a[lane], b[lane]);
      a.value[lane] = best.value, a.position[lane] = P(best.position);
    }
    return a;
  }
};

// --- tiles ------------------------------------------------------------------------------------------------------------

template <int size> struct Bits;
template <> struct Bits<1> { using Type = uint8_t; };
template <> struct Bits<2> { using Type = uint16_t; };
template <> struct Bits<4> { using Type = uint32_t; };
template <> struct Bits<8> { using Type = uint64_t; };

// Rows and columns of tiles: a multiple of 16, and `most` at most. A row of a tile is two lines of the nearest cache, or one
// on processors of the Zen family, whose nearest cache holds only 8 lines at addresses that agree in their last 12 bits.
constexpr int tile_size(int most, int bytes) {
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
  const int size = 64 / bytes;
#else
  const int size = 128 / bytes;
#endif
  return size < 16 ? 16 : size < most ? size : most;
}

// Transposes 16 x 16 elements: pairs, then fours of rows are interleaved, then fours of columns change places. Each
// step is one instruction for 32-bit elements.
template <class T> inline void transpose_16(const T* source, int64_t stride, T* target, int64_t target_stride) {
  using Element = typename Bits<sizeof(T)>::Type;
  typedef Element Row __attribute__((vector_size(16 * sizeof(T)), aligned(sizeof(T)), may_alias));
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
  Row a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = *reinterpret_cast<const Row*>(source + i * stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = MIX(a[i], a[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    b[i + 1] = MIX(a[i], a[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; ++k) {
      a[i + 2 * k] = MIX(b[i + k], b[i + k + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      a[i + 2 * k + 1] = MIX(b[i + k], b[i + k + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  for (int i = 0; i < 16; i += 8)
    for (int k = i; k < i + 4; ++k) {
      b[k] = MIX(a[k], a[k + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
      b[k + 4] = MIX(a[k], a[k + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
  for (int i = 0; i < 8; ++i) {
    a[i] = MIX(b[i], b[i + 8], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    a[i + 8] = MIX(b[i], b[i + 8], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#undef MIX
  for (int i = 0; i < 16; ++i) *reinterpret_cast<Row*>(target + i * target_stride) = a[i];
}

// target[i * target_stride + j] = source[j * stride + i], for i < height and j < width. The last blocks overlap those before
// them.
template <class T>
inline void transpose(const T* source, int64_t stride, int height, int width, T* target, int64_t target_stride) {
  if (height < 16 || width < 16) {
    for (int j = 0; j < width; ++j)
      for (int i = 0; i < height; ++i) target[i * target_stride + j] = source[j * stride + i];
    return;
  }
  for (int j = 0; j < width; j += 16)
    for (int i = 0; i < height; i += 16) {
      const int row = fxwrap::min(i, height - 16), column = fxwrap::min(j, width - 16);
      transpose_16(source + column * stride + row, stride, target + row * target_stride + column, target_stride);
    }
}

#include "contractions.h"

// --- scans ------------------------------------------------------------------------------------------------------------

constexpr int SCAN_BLOCK = 256;

// Inclusive scan: combines each value with the running value of those before it. Sixteen at a time: four steps combine
// each with the one 1, 2, 4 and 8 places before it, then all with the running value.
template <class T, class Running, class Combine>
INLINE void scan_block(T* values, int64_t count, Running& running, T neutral, Combine combine) {
  typedef T Row __attribute__((vector_size(16 * sizeof(T)), aligned(sizeof(T)), may_alias));
  int64_t start = 0;
  for (; start + 16 <= count; start += 16) {
    Row& place = *reinterpret_cast<Row*>(values + start);
    const Row none = neutral - Row{};
    Row row = place;
    row = combine(row, __builtin_shufflevector(none, row, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30));
    row = combine(row, __builtin_shufflevector(none, row, 0, 1, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29));
    row = combine(row, __builtin_shufflevector(none, row, 0, 1, 2, 3, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27));
    row = combine(row, __builtin_shufflevector(none, row, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
    place = combine(row, T(running) - Row{});
    running = combine(running, Running(row[15]));
  }
  for (; start < count; ++start) {
    running = combine(running, Running(values[start]));
    values[start] = T(running);
  }
}

// --- streaming reductions --------------------------------------------------------------------------------------------

// result[n][i] = result[n][i] * scale[i] + the sum over k < depth of left[k][i] * right[n * across + k * along], for four
// rows n and the vectors at `column`; without `scale`, the sum alone. Rows of `left` and `result` have `lanes` elements.
template <int lanes, int vectors, class T>
INLINE void contract_four(const T* left, const T* right, int64_t across, int64_t along, int64_t depth, const T* scale,
                          T* result) {
  typedef typename Vector<T>::Type V;
  constexpr int width = Vector<T>::elements;
  V sums[4][vectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    V row[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) row[v] = *reinterpret_cast<const V*>(left + k * lanes + v * width);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const V factor = right[n * across + k * along] - V{};
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[n][v] = multiply_add(row[v], factor, sums[n][v]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      V& at = *reinterpret_cast<V*>(result + n * lanes + v * width);
      const V& factor = *reinterpret_cast<const V*>(scale + v * width);
      at = scale == nullptr ? sums[n][v] : multiply_add(at, factor, sums[n][v]);
    }
}

// The same for `count` rows, rounded up to a multiple of four: both tiles have memory for these.
template <int lanes, class T>
inline void contract(const T* left, const T* right, int64_t across, int64_t along, int64_t depth, int64_t count,
                     const T* scale, T* result) {
  constexpr int width = Vector<T>::elements, step = VECTOR_COLUMNS * width, rest = lanes % step / width;
  for (int64_t n = 0; n < count; n += 4) {
    int column = 0;
    for (; column + step <= lanes; column += step)
      contract_four<lanes, VECTOR_COLUMNS>(left + column, right + n * across, across, along, depth,
                                           scale == nullptr ? nullptr : scale + column, result + n * lanes + column);
    if constexpr (rest > 0)
      contract_four<lanes, rest>(left + column, right + n * across, across, along, depth,
                                 scale == nullptr ? nullptr : scale + column, result + n * lanes + column);
  }
}

// --- streaming reductions of few rows ---------------------------------------------------------------------------------

// The sums of sixteen vectors of sixteen elements each, as one vector: halves of four, then eight vectors at a time.
template <class Row> INLINE Row sums_of_16(Row (&a)[16]) {
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = MIX(a[2 * i], a[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           MIX(a[2 * i], a[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    a[i] = MIX(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           MIX(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    a[i] = MIX(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           MIX(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  return MIX(a[0], a[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         MIX(a[0], a[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#undef MIX
}

// products[i * stride + n] = the sum over k < depth of left[i * depth + k] * right[n * across + k], for n < count, whose
// number is rounded up to a multiple of 16, as depth is. With `ahead`, elements that far behind are read later.
template <int rows, bool prefetches, class T>
inline void contract_rows(const T* left, const T* right, int64_t across, int64_t depth, int64_t count, T* products,
                          int64_t stride, int64_t ahead) {
  typedef T Row __attribute__((vector_size(16 * sizeof(T)), aligned(sizeof(T)), may_alias));
  for (int64_t n = 0; n < count; n += 16) {
    const T* others[16];
    for (int j = 0; j < 16; ++j) others[j] = right + fxwrap::min(n + j, count - 1) * across;
    for (int i = 0; i < rows; ++i) {
      Row sums[16] = {};
      for (int64_t k = 0; k < depth; k += 16) {
        const Row row = *reinterpret_cast<const Row*>(left + i * depth + k);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          if constexpr (prefetches)
            if (i == 0) prefetch_line(others[j] + k + ahead);
          const Row other = *reinterpret_cast<const Row*>(others[j] + k);
          if constexpr (16 * sizeof(T) == VECTOR_BYTES) sums[j] = multiply_add(row, other, sums[j]);
          else sums[j] += row * other;
        }
      }
      *reinterpret_cast<Row*>(products + i * stride + n) = sums_of_16(sums);
    }
  }
}

// result[i][j] = result[i][j] * scale[i] + the sum over n < count of left[i * stride + n] * right[n * across + j],
// for `height` rows and the vectors at `right` and `result`.
template <int height, int vectors, bool prefetches, class T>
INLINE void accumulate_vectors(const T* left, int64_t stride, const T* right, int64_t across, int64_t count,
                               const T* scale, T* result, int64_t width, int64_t ahead) {
  typedef typename Vector<T>::Type V;
  constexpr int lanes = Vector<T>::elements;
  V sums[height][vectors] = {};
  for (int64_t n = 0; n < count; ++n) {
    V values[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      if constexpr (prefetches) prefetch_line(right + n * across + v * lanes + ahead);
      values[v] = *reinterpret_cast<const V*>(right + n * across + v * lanes);
    }
#pragma GCC unroll 4
    for (int i = 0; i < height; ++i) {
      const V factor = left[i * stride + n] - V{};
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[i][v] = multiply_add(values[v], factor, sums[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < height; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      V& at = *reinterpret_cast<V*>(result + i * width + v * lanes);
      at = multiply_add(at, scale[i] - V{}, sums[i][v]);
    }
}

// The same for all rows, and `width` columns, a multiple of 16.
template <int rows, bool prefetches, class T>
inline void accumulate_rows(const T* left, int64_t stride, const T* right, int64_t across, int64_t count, const T* scale,
                            T* result, int64_t width, int64_t ahead) {
  constexpr int lanes = Vector<T>::elements, vectors = VECTOR_COLUMNS, step = vectors * lanes;
  constexpr int height = rows < 4 ? rows : 4, rest = rows % height;
  const auto run = [&](auto number, int64_t j) {
    accumulate_vectors<height, number, prefetches>(left, stride, right + j, across, count, scale, result + j, width, ahead);
    for (int i = height; i + height <= rows; i += height)
      accumulate_vectors<height, number, false>(left + i * stride, stride, right + j, across, count, scale + i,
                                                result + i * width + j, width, ahead);
    if constexpr (rest != 0) {
      constexpr int i = rows - rest;
      accumulate_vectors<rest, number, false>(left + i * stride, stride, right + j, across, count, scale + i,
                                              result + i * width + j, width, ahead);
    }
  };
  int64_t j = 0;
  for (; j + step <= width; j += step) run(Constant<vectors>{}, j);
  for (; j < width; j += lanes) run(Constant<1>{}, j);
}
