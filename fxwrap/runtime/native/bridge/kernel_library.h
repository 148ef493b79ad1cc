// The C library's functions of numbers, in vector forms where it has them, and the errors that kernels raise.
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
