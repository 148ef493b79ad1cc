// Types of elements in memory, the casts between them, and rounding to half precision.
#pragma once

#include "kernel_library.h"

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

// The integer of so many bytes.
template <int size> struct Bits;
template <> struct Bits<1> { using Type = uint8_t; };
template <> struct Bits<2> { using Type = uint16_t; };
template <> struct Bits<4> { using Type = uint32_t; };
template <> struct Bits<8> { using Type = uint64_t; };

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
#ifdef __x86_64__  // all floats of 2^31 and more are multiples of 256, and conversions give 0x80000000 for them
template <> struct Cast<uint8_t, float> { static INLINE uint8_t of(float v) { return uint8_t(int32_t(v)); } };
#else
template <> struct Cast<uint8_t, float> { static INLINE uint8_t of(float v) { return uint8_t(int64_t(v)); } };
#endif
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
