// Numbers of 16 bits, as the tests' libraries read and write them.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

inline float read(const int16_t* from, bool is_bfloat) {
  return is_bfloat ? float(*reinterpret_cast<const c10::BFloat16*>(from)) : float(*reinterpret_cast<const c10::Half*>(from));
}

inline void write(int16_t* to, bool is_bfloat, float value) {
  if (is_bfloat) {
    *reinterpret_cast<c10::BFloat16*>(to) = c10::BFloat16(value);
  } else {
    *reinterpret_cast<c10::Half*>(to) = c10::Half(value);
  }
}
