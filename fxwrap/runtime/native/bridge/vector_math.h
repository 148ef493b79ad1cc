// Vector forms of functions of the C library for which glibc has none. Kernels that call these include it after kernel.h:
// its functions are compiled with each that does.
//
// Their names are those of the x86-64 vector function ABI, by which GCC calls them from vectorised loops: b, c, d and e
// are SSE, AVX, AVX2 and AVX-512, and the number of lanes follows.
#pragma once

#ifdef HAS_VECTOR_MATH
namespace fxwrap {

template <class T> struct FloatFormat;
template <> struct FloatFormat<float> {
  using Word = int32_t;
  static constexpr float whole = 0x1p23f;  // from here on, all numbers are integers
  static INLINE float fmod(float a, float b) { return ::fmodf(a, b); }
};
template <> struct FloatFormat<double> {
  using Word = int64_t;
  static constexpr double whole = 0x1p52;
  static INLINE double fmod(double a, double b) { return ::fmod(a, b); }
};

// The remainder a - k * b, for the integer k next to a / b, is exact: it is a multiple of the last digit of a or b, and
// smaller than b. Larger quotients are rare; the lanes of a vector that has one are computed one by one.
template <class T, int lanes, class V> INLINE V fmod_lanes(V dividends, V divisors) {
  constexpr T whole = FloatFormat<T>::whole;
  T a[lanes], b[lanes], result[lanes];
  __builtin_memcpy(a, &dividends, sizeof(V));
  __builtin_memcpy(b, &divisors, sizeof(V));
  typename FloatFormat<T>::Word far = 0;
#pragma omp simd reduction(| : far)
  for (int lane = 0; lane < lanes; ++lane) {
    const T dividend = op::abs(a[lane]), divisor = op::abs(b[lane]);
    const T quotient = dividend / divisor, k = (quotient + whole) - whole;
    const T rest = multiply_add(-k, divisor, dividend), shifted = rest < 0 ? rest + divisor : rest;
    far |= (quotient >= whole) & (dividend < Limits<T>::highest) & (divisor > 0);
    result[lane] = op::copysign(dividend < divisor ? dividend : shifted, a[lane]);
  }
  if (__builtin_expect(far != 0, 0)) {
    for (int lane = 0; lane < lanes; ++lane) dividends[lane] = FloatFormat<T>::fmod(a[lane], b[lane]);
    return dividends;
  }
  V vector;
  __builtin_memcpy(&vector, result, sizeof(V));
  return vector;
}

#define VECTOR_FORM_2(isa, lanes, type, name, function)                                                             \
  typedef type name##_##isa __attribute__((vector_size(lanes * sizeof(type))));                                     \
  extern "C" __attribute__((weak, visibility("hidden"))) name##_##isa _ZGV##isa##N##lanes##vv_##name(               \
      name##_##isa a, name##_##isa b) {                                                                             \
    return function<type, lanes>(a, b);                                                                             \
  }
#ifdef __AVX512F__
#define VECTOR_FORMS_512(name, function) \
  VECTOR_FORM_2(e, 16, float, name##f, function) VECTOR_FORM_2(e, 8, double, name, function)
#else
#define VECTOR_FORMS_512(name, function)
#endif
#ifdef __AVX__
#define VECTOR_FORMS_256(name, function)                                                       \
  VECTOR_FORM_2(c, 8, float, name##f, function) VECTOR_FORM_2(c, 4, double, name, function)    \
  VECTOR_FORM_2(d, 8, float, name##f, function) VECTOR_FORM_2(d, 4, double, name, function)
#else
#define VECTOR_FORMS_256(name, function)
#endif
#define VECTOR_FORMS(name, function)                                                          \
  VECTOR_FORM_2(b, 4, float, name##f, function) VECTOR_FORM_2(b, 2, double, name, function)   \
  VECTOR_FORMS_256(name, function) VECTOR_FORMS_512(name, function)

VECTOR_FORMS(fmod, fmod_lanes)

}  // namespace fxwrap
#endif
