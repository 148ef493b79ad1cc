// Checks of run-time inputs for every engine. The texts are those of fxwrap/runtime/checks.py; a test compares them.
#pragma once

#include <string>

#include "bridge/bridge.h"

namespace fxwrap::checks {

// The layout of a strided tensor; its device is torch's name.
struct Layout {
  DType dtype;
  size_t rank;
  const int64_t* sizes;
  const int64_t* strides;
  std::string device;
};

std::string describe(const Layout& layout);

// Whether sizes are equal, and strides of dimensions that have more than one element.
inline bool has_sizes(Ints expected, const int64_t* sizes, size_t rank) {
  if (expected.size() != rank) return false;
  for (size_t i = 0; i < rank; ++i) {
    if (expected.begin()[i] != sizes[i]) return false;
  }
  return true;
}
inline bool has_strides(Ints expected, const int64_t* sizes, const int64_t* strides, size_t rank) {
  for (size_t i = 0; i < rank; ++i) {
    if (sizes[i] != 1 && expected.begin()[i] != strides[i]) return false;
  }
  return true;
}

// These throw Failure. `got` describes the tensor: "None", or describe(...). `operator_name` is "" for an input.
[[noreturn]] void fail_layout(const char* name, const char* operator_name, const Layout& expected, const std::string& got);
[[noreturn]] void fail_rank(const char* name, int64_t rank, const std::string& got);
[[noreturn]] void fail_assert(const char* message, const char* error, const int64_t* shown);
void check_alignment(const char* name, const void* address, int64_t alignment);

}  // namespace fxwrap::checks
