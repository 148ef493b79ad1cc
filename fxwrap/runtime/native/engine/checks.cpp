#include "engine/checks.h"

#include <cstdio>

#include "engine/dtypes.h"
#include "engine/failure.h"

namespace fxwrap::checks {
namespace {

std::string join(const int64_t* values, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text;
}

std::string dtype_text(DType dtype) {
  const DTypeName* known = find_dtype(dtype);
  if (known != nullptr) return known->name;
  const int code = int(dtype);  // torch's uint1 to uint7 and int1 to int7 have no kernels: only errors name them
  if (30 <= code && code < 37) return "u" + std::to_string(code - 29);
  if (37 <= code && code < 44) return "i" + std::to_string(code - 36);
  return "dtype " + std::to_string(code);
}

[[noreturn]] void fail_input(const char* name, const std::string& reason) {
  throw Failure("InputError", "input '" + std::string(name) + "': " + reason);
}

}  // namespace

std::string describe(const Layout& layout) {
  const std::string strides = join(layout.strides, layout.rank) + (layout.rank == 1 ? "," : "");
  return dtype_text(layout.dtype) + "[" + join(layout.sizes, layout.rank) + "] on " + layout.device +
         " with strides (" + strides + ")";
}

void fail_layout(const char* name, const char* operator_name, const Layout& expected, const std::string& got) {
  const std::string operator_text = operator_name;
  if (operator_text.empty()) fail_input(name, "expected " + describe(expected) + ", got " + got);
  throw Failure("ResultError", "result '" + std::string(name) + "' of " + operator_text +
                                   ": its fake implementation returns " + describe(expected) + ", the operator " + got +
                                   ". Correct its fake implementation (torch.library.register_fake), or the operator");
}

void fail_rank(const char* name, int64_t rank, const std::string& got) {
  fail_input(name, "expected a tensor of " + std::to_string(rank) + " dimension" + (rank > 1 ? "s" : "") + ", got " + got);
}

void fail_assert(const char* message, const char* error, const int64_t* shown) {
  throw Failure(error, shown == nullptr ? message : message + (", got " + std::to_string(*shown)));
}

void check_alignment(const char* name, const void* address, int64_t alignment) {
  if (reinterpret_cast<uintptr_t>(address) % uintptr_t(alignment) == 0) return;
  char text[24];
  std::snprintf(text, sizeof text, "%#zx", reinterpret_cast<size_t>(address));
  fail_input(name, "its address " + std::string(text) + " is no multiple of " + std::to_string(alignment) + " bytes");
}

}  // namespace fxwrap::checks
