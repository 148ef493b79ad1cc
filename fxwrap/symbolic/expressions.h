// The functions of symbolic expressions. Of the C++ standard library they include cstdint alone, and throw none of its
// classes: <cmath> and <stdexcept> take a compiler many times as long as a program does.
#include <cstdint>

#include "kernel_failure.h"

extern "C" double strtod(const char*, char**) noexcept;

namespace fxwrap {

constexpr double infinity = __builtin_inf(), not_a_number = __builtin_nan("");

#define MATH(name) inline double name(double number) { return __builtin_##name(number); }
MATH(trunc) MATH(floor) MATH(ceil) MATH(nearbyint) MATH(acos) MATH(asin) MATH(asinh) MATH(atan) MATH(cos) MATH(cosh)
MATH(exp) MATH(log) MATH(log2) MATH(sin) MATH(sinh) MATH(sqrt) MATH(tan) MATH(tanh)
#undef MATH

inline void check_divisor(bool nonzero) {
  if (!nonzero) throw KernelFailure{"ZeroDivisionError", "division or modulo by zero"};
}

// Python's floor division and modulo; -1 apart, because INT64_MIN / -1 traps.
inline int64_t floordiv(int64_t base, int64_t divisor) {
  check_divisor(divisor != 0);
  if (divisor == -1) return static_cast<int64_t>(0 - static_cast<uint64_t>(base));
  int64_t quotient = base / divisor;
  return quotient - (base % divisor != 0 && (base < 0) != (divisor < 0));
}

inline int64_t mod(int64_t base, int64_t divisor) {
  check_divisor(divisor != 0);
  if (divisor == -1) return 0;
  int64_t remainder = base % divisor;
  return remainder != 0 && (remainder < 0) != (divisor < 0) ? remainder + divisor : remainder;
}

inline int64_t ceildiv(int64_t base, int64_t divisor) {
  check_divisor(divisor != 0);
  if (divisor == -1) return static_cast<int64_t>(0 - static_cast<uint64_t>(base));
  int64_t quotient = base / divisor;
  return quotient + (base % divisor != 0 && (base < 0) == (divisor < 0));
}

inline int64_t modular_indexing(int64_t base, int64_t divisor, int64_t modulus) {
  return mod(floordiv(base, divisor), modulus);
}

inline double truediv(double base, double divisor) {
  check_divisor(divisor != 0);
  return base / divisor;
}

inline int64_t natural_power(int64_t base, int64_t exponent) {
  if (exponent < 0) throw KernelFailure{"TypeError", "exponent of a natural power is negative"};
  uint64_t result = 1, factor = static_cast<uint64_t>(base);
  for (; exponent != 0; exponent >>= 1, factor *= factor)
    if (exponent & 1) result *= factor;
  return static_cast<int64_t>(result);
}

inline double power(double base, double exponent) {
  check_divisor(base != 0 || exponent >= 0);
  return __builtin_pow(base, exponent);
}

template <typename T> inline T max(T first, T second) { return second > first ? second : first; }
template <typename T> inline T min(T first, T second) { return second < first ? second : first; }

inline int64_t to_int(double number) {
  if (!(number >= -9223372036854775808.0 && number < 9223372036854775808.0)) {
    static thread_local char message[400];
    __builtin_snprintf(message, sizeof message, "cannot convert %f to a 64-bit integer", number);
    throw KernelFailure{"OverflowError", message};
  }
  return static_cast<int64_t>(number);
}

// Decimal rounding through the exact decimal expansion, as Python does for digits >= 0.
inline double round_decimal(double number, int64_t digits) {
  if (!__builtin_isfinite(number)) return number;
  if (digits < 0) {
    double scale = __builtin_pow(10.0, static_cast<double>(-digits));
    return nearbyint(number / scale) * scale;
  }
  char text[720];
  __builtin_snprintf(text, sizeof text, "%.*f", static_cast<int>(digits < 340 ? digits : 340), number);
  return strtod(text, nullptr);
}

}  // namespace fxwrap
