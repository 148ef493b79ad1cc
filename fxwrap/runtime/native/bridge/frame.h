// A Frame with its memory, which runs a Program. Used by the C entry and by the Python binding.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "bridge/bridge.h"

namespace fxwrap {

inline at::Tensor& tensor_at(const Frame& f, int64_t slot) {
  return static_cast<at::Tensor*>(f.tensors)[slot];
}

inline c10::IValue& list_at(const Frame& f, int64_t slot) { return static_cast<c10::IValue*>(f.lists)[slot]; }

// One run of a program: set the inputs and constants, `run()`, read the outputs' slots. Small frames live inside the
// object, so it belongs on the stack. The destructor releases all tensors except borrowed ones.
class FXWRAP_API Execution {
 public:
  explicit Execution(const Program& program);
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  void borrow(int64_t slot, const at::Tensor& tensor) {
    at::Tensor& place = tensor_at(frame_, slot);
    // The reference count does not change: the caller keeps the tensor alive, and the destructor does not release it.
    place = at::Tensor(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim(
        tensor.unsafeGetTensorImpl()));
  }
  void own(int64_t slot, at::Tensor tensor) { tensor_at(frame_, slot) = std::move(tensor); }
  Frame& frame() { return frame_; }

  // Runs the program below autograd and autocast; rethrows the errors of operators.
  void run();

 private:
  void release_borrowed(const Arg& value);

  static constexpr int64_t inline_words = 256;
  const Program& program_;
  Frame frame_;
  int64_t inline_storage_[inline_words];
  int64_t* storage_;
};

// On destruction, exits the devices that this thread entered since construction and has not exited.
class DeviceStackGuard {
 public:
  DeviceStackGuard();
  ~DeviceStackGuard();
  DeviceStackGuard(const DeviceStackGuard&) = delete;
  DeviceStackGuard& operator=(const DeviceStackGuard&) = delete;

 private:
  size_t depth_;
};

// On destruction, exits the profiler ranges that this thread entered since construction and has not exited.
class RangeStackGuard {
 public:
  RangeStackGuard();
  ~RangeStackGuard();
  RangeStackGuard(const RangeStackGuard&) = delete;
  RangeStackGuard& operator=(const RangeStackGuard&) = delete;

 private:
  size_t depth_;
};

}  // namespace fxwrap
