// Running a program: frames, dispatch guards, and the entry for callers without Python.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <new>

#include "bridge/frame.h"

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
  program_.run(frame_);
}

namespace {

void set_input(Execution& execution, const Arg& place, FxwrapValue value) {
  Frame& f = execution.frame();
  auto* tensor = static_cast<at::Tensor*>(value.tensor);
  const bool reads_tensor = place.kind == Arg::Tensor || place.kind == Arg::OwnedTensor;
  if (reads_tensor && tensor != nullptr && (tensor->is_neg() || tensor->is_conj())) {
    throw InputError("an input has a negative or conjugate bit, which kernels ignore: resolve it first");
  }
  switch (place.kind) {
    case Arg::Tensor:
      if (tensor != nullptr) execution.borrow(place.integer, *tensor);
      return;
    case Arg::OwnedTensor:
      if (tensor != nullptr) execution.own(place.integer, std::move(*tensor));
      return;
    case Arg::IntSymbolIndex:
    case Arg::BoolSymbolIndex:
      f.ints[place.integer] = value.integer;
      return;
    case Arg::FloatSymbolIndex:
      f.floats[place.integer] = value.real;
      return;
    case Arg::DynamicList:
    case Arg::Object:
      throw InputError("the program takes a generator or an object, which only Python can pass");
    default:
      return;
  }
}

FxwrapValue get_output(const Frame& f, const Arg& place, const FxwrapValue* inputs) {
  FxwrapValue value{};
  switch (place.kind) {
    case Arg::InputIndex:
      return inputs[place.integer];
    case Arg::DynamicList:
      throw InputError("the program returns a generator or an object, which only Python can take");
    case Arg::Tensor:
      if (tensor_at(f, place.integer).defined()) value.tensor = new at::Tensor(tensor_at(f, place.integer));
      break;
    case Arg::Int:
    case Arg::Bool:
      value.integer = place.integer;
      break;
    case Arg::Float:
      value.real = place.real;
      break;
    case Arg::IntSymbolIndex:
    case Arg::BoolSymbolIndex:
      value.integer = f.ints[place.integer];
      break;
    case Arg::FloatSymbolIndex:
      value.real = f.floats[place.integer];
      break;
    default:
      break;
  }
  return value;
}

}  // namespace
}  // namespace fxwrap

int fxwrap_run(const fxwrap::Program* program, const FxwrapValue* inputs, const FxwrapValue* constants,
               FxwrapValue* outputs, char* error, size_t error_size) {
  using namespace fxwrap;
  try {
    if (program->abi != abi_version) throw InputError("the program was compiled for another version of the bridge");
    Execution execution(*program);
    for (int64_t i = 0; i < program->inputs.size; ++i) {
      set_input(execution, program->inputs.data[i].value, inputs[i]);
    }
    for (int64_t i = 0; i < program->constants.size; ++i) {
      set_input(execution, program->constants.data[i], constants[i]);
    }
    execution.run();
    for (int64_t i = 0; i < program->outputs.size; ++i) {
      outputs[i] = get_output(execution.frame(), program->outputs.data[i], inputs);
    }
    return 0;
  } catch (const c10::Error& failure) {
    std::snprintf(error, error_size, "%s", failure.what_without_backtrace());
  } catch (const std::exception& failure) {
    std::snprintf(error, error_size, "%s", failure.what());
  }
  return 1;
}

void fxwrap_index_error(const char* message) { throw c10::IndexError({__func__, __FILE__, uint32_t(__LINE__)}, message); }
void fxwrap_runtime_error(const char* message) { throw c10::Error({__func__, __FILE__, uint32_t(__LINE__)}, message); }
