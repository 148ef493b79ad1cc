// Running a program: frames and dispatch guards.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdlib>
#include <new>

#include "bridge/frame.h"
#include "bridge/functions.h"
#include "bridge/kernel_failure.h"
#include "engine/failure.h"

namespace fxwrap {

constexpr int64_t list_words = 2;

Execution::Execution(const Program& program) : program_(program), storage_(inline_storage_) {
  static_assert(sizeof(at::Tensor) == sizeof(int64_t) && sizeof(double) == sizeof(int64_t));
  static_assert(sizeof(c10::IValue) == list_words * sizeof(int64_t) && alignof(c10::IValue) <= alignof(int64_t));
  const int64_t words = program.slots + program.ints + program.floats + list_words * program.lists;
  if (words > inline_words) {
    storage_ = static_cast<int64_t*>(std::malloc(size_t(words) * sizeof(int64_t)));
    if (storage_ == nullptr) throw std::bad_alloc();
  }
  at::Tensor* tensors = reinterpret_cast<at::Tensor*>(storage_);
  for (int64_t i = 0; i < program.slots; ++i) {
    new (tensors + i) at::Tensor();
  }
  frame_.functions = &bridge::functions;
  frame_.tensors = tensors;
  frame_.ints = storage_ + program.slots;
  frame_.floats = reinterpret_cast<double*>(frame_.ints + program.ints);
  frame_.lists = frame_.floats + program.floats;
  for (int64_t i = 0; i < program.lists; ++i) {
    new (&list_at(frame_, i)) c10::IValue();
  }
}

void Execution::release_borrowed(const Arg& value) {
  if (value.kind == Arg::Tensor) tensor_at(frame_, value.integer).unsafeReleaseTensorImpl();
}

Execution::~Execution() {
  for (int64_t i = 0; i < program_.inputs.size; ++i) {
    release_borrowed(program_.inputs.data[i].value);
  }
  for (int64_t i = 0; i < program_.constants.size; ++i) {
    release_borrowed(program_.constants.data[i]);
  }
  for (int64_t i = 0; i < program_.slots; ++i) {
    tensor_at(frame_, i).~Tensor();
  }
  for (int64_t i = 0; i < program_.lists; ++i) {
    list_at(frame_, i).~IValue();
  }
  if (storage_ != inline_storage_) std::free(storage_);
}

void Execution::run() {
  // ADInplaceOrView stays active: it increments the version counters of mutated inputs.
  at::AutoDispatchBelowAutograd below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  DeviceStackGuard devices_left;
  RangeStackGuard ranges_left;
  try {
    program_.run(frame_);
  } catch (const KernelFailure& failure) {
    throw Failure(failure.kind, failure.message);
  }
}

}  // namespace fxwrap
