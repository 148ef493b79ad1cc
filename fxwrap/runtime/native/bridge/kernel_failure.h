// The error of a kernel, which it throws after its loops. A plain object, so that kernels include nothing for it.
#pragma once

namespace fxwrap {

struct __attribute__((visibility("default"))) KernelFailure {
  const char* kind;  // the name of Python's error
  const char* message;
};

}  // namespace fxwrap
