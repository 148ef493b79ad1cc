// The runtime's engine on libtorch's tensors and operators.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/dlpack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <optional>
#include <sstream>

#include "bridge/checks.h"
#include "bridge/frame.h"
#include "cuda/stream_operators.h"
#include "engine/call.h"
#include "engine/observer.h"
#include "graph_capture/replay.h"
#include "libraries/grouped_matmuls.h"
#include "libraries/matmuls.h"
#include "libraries/prepacked.h"

namespace at {
// Of ATen/DLConvertor.h, which includes every operator.
TORCH_API DLManagedTensorVersioned* toDLPackVersioned(const Tensor& source);
TORCH_API ScalarType toScalarType(const DLDataType& dtype);
TORCH_API Device dlDeviceToTorchDevice(DLDeviceType type, c10::DeviceIndex index, void* data);
}  // namespace at

namespace fxwrap {
namespace {

const at::Tensor& tensor_of(const TensorHandle& handle) { return *static_cast<at::Tensor*>(handle.get()); }
TensorHandle handle_of(at::Tensor tensor) { return std::make_shared<at::Tensor>(std::move(tensor)); }

// The name of the Python error that torch raises for one of its C++ errors.
const char* error_kind(const c10::Error& error) {
  if (dynamic_cast<const c10::IndexError*>(&error)) return "IndexError";
  if (dynamic_cast<const c10::ValueError*>(&error)) return "ValueError";
  if (dynamic_cast<const c10::TypeError*>(&error)) return "TypeError";
  if (dynamic_cast<const c10::NotImplementedError*>(&error)) return "NotImplementedError";
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error)) return "OutOfMemoryError";
  return "RuntimeError";
}

// Calls a function, whose errors become Failures.
template <class Function> auto translated(const Function& function) -> decltype(function()) {
  try {
    return function();
  } catch (const Failure&) {
    throw;
  } catch (const c10::Error& failure) {
    throw Failure(error_kind(failure), failure.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    throw Failure("MemoryError", "there is not enough memory");
  } catch (const std::exception& failure) {
    throw Failure("RuntimeError", failure.what());
  }
}

void delete_dlpack(DLManagedTensorVersioned* tensor) {
  if (tensor != nullptr && tensor->deleter != nullptr) tensor->deleter(tensor);
}

// Takes a DLPack tensor out of a value.
at::Tensor consume_dlpack(FxwrapValue& value, const char* name) {
  const std::shared_ptr<DLManagedTensorVersioned> owner(value.as.dlpack, delete_dlpack);
  value = FxwrapValue{};
  const std::string where = "input '" + std::string(name) + "': ";
  if (owner == nullptr) throw Failure("InputError", where + "its DLPack tensor is NULL");
  if (owner->version.major != DLPACK_MAJOR_VERSION) {
    throw Failure("InputError", where + "its DLPack version is " + std::to_string(owner->version.major) +
                     ", expected 1. Pass a DLManagedTensorVersioned of DLPack 1.x");
  }
  const DLTensor& source = owner->dl_tensor;
  try {
    char* data = source.data == nullptr ? nullptr : static_cast<char*>(source.data) + source.byte_offset;
    const c10::Device device =
        at::dlDeviceToTorchDevice(source.device.device_type, c10::DeviceIndex(source.device.device_id), data);
    const auto options = at::TensorOptions().device(device).dtype(at::toScalarType(source.dtype));
    const at::IntArrayRef sizes(source.shape, size_t(source.ndim));
    auto release = [owner](void*) {};
    if (source.strides == nullptr) return at::from_blob(data, sizes, release, options, device);
    return at::from_blob(data, sizes, at::IntArrayRef(source.strides, size_t(source.ndim)), release, options, device);
  } catch (const c10::Error& failure) {
    throw Failure("InputError", where + failure.what_without_backtrace());
  }
}

// Makes a stream of the caller current, and the previous one when it ends.
class StreamGuard {
 public:
  explicit StreamGuard(const FxwrapRunOptions* options) {
    if (options == nullptr || options->has_stream == 0) return;
    const c10::Device device{std::string(options->device == nullptr ? "cuda:0" : options->device)};
    guard_.emplace(device.type());
    device_ = guard_->exchangeDevice(device);
    // torch's number of a stream that it did not create is its address.
    const auto id = c10::StreamId(reinterpret_cast<intptr_t>(options->stream));
    stream_ = guard_->exchangeStream(c10::Stream(c10::Stream::UNSAFE, device, id));
  }
  ~StreamGuard() {
    if (!guard_) return;
    guard_->exchangeStream(*stream_);
    guard_->uncheckedSetDevice(*device_);
  }
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::optional<c10::Device> device_;
  std::optional<c10::Stream> stream_;
};

// The inputs of a call. Tensors that it consumes live until the end of the call.
class CallInputs {
 public:
  CallInputs(const Program& program, const EngineCall& call) : program_(program), call_(call) {
    check_counts(program, call);
    consumed_.reserve(size_t(call.input_count));
  }

  void set(Execution& execution) {
    const auto set_tensor = [&](const Input& input, FxwrapValue& value) { this->set_tensor(execution, input, value); };
    for (int64_t i = 0; i < program_.inputs.size; ++i) {
      set_input(execution.frame(), program_.inputs.data[i], call_.inputs[i], set_tensor);
    }
  }

 private:
  void set_tensor(Execution& execution, const Input& input, FxwrapValue& value) {
    at::Tensor* tensor = value.kind == FXWRAP_TENSOR ? static_cast<at::Tensor*>(value.as.tensor) : nullptr;
    if (tensor == nullptr) {
      consumed_.push_back(consume_dlpack(value, input.name));
      tensor = &consumed_.back();
    }
    if (!tensor->defined()) return;
    if (tensor->is_neg() || tensor->is_conj()) {
      throw Failure("InputError", "input '" + std::string(input.name) +
                                      "': it has a negative or conjugate bit, which kernels ignore: resolve it first");
    }
    if (input.value.kind == Arg::OwnedTensor) {
      execution.own(input.value.integer, std::move(*tensor));
    } else {
      execution.borrow(input.value.integer, *tensor);
    }
  }

  const Program& program_;
  const EngineCall& call_;
  std::vector<at::Tensor> consumed_;
};

FxwrapValue tensor_output(const at::Tensor& tensor, bool as_tensor) {
  FxwrapValue value{};
  if (!tensor.defined()) return value;
  value.kind = as_tensor ? FXWRAP_TENSOR : FXWRAP_DLPACK;
  if (as_tensor) {
    value.as.tensor = new at::Tensor(tensor);
  } else {
    value.as.dlpack = at::toDLPackVersioned(tensor);
  }
  return value;
}

class TorchEngine final : public Engine {
 public:
  TensorHandle make_memory(const uint8_t* bytes, int64_t size, std::shared_ptr<void> owner,
                           const std::string& device) override {
    return translated([&] {
      const c10::InferenceMode ordinary(false);
      const auto options = at::TensorOptions().dtype(at::kByte);
      at::Tensor memory = size == 0 ? at::empty({0}, options)
                                    : at::from_blob(const_cast<uint8_t*>(bytes), {size},
                                                    [owner = std::move(owner)](void*) {}, options);
      const c10::Device target{device};
      return handle_of(target.is_cpu() ? memory : memory.to(target));
    });
  }

  TensorHandle make_empty_memory(int64_t size, const std::string& device) override {
    return translated([&] {
      const c10::InferenceMode ordinary(false);
      return handle_of(at::zeros({size}, at::TensorOptions().dtype(at::kByte).device(c10::Device{device})));
    });
  }

  TensorHandle make_view(const TensorHandle& memory, int64_t start, const TensorLayout& layout) override {
    return translated([&] {
      const c10::InferenceMode ordinary(false);
      const at::Tensor& bytes = tensor_of(memory);
      const auto meta = c10::scalarTypeToTypeMeta(at::ScalarType(layout.dtype));
      c10::TensorImpl* impl = bytes.unsafeGetTensorImpl();
      auto view = c10::make_intrusive<c10::TensorImpl>(c10::Storage(impl->storage()), impl->key_set(), meta);
      view->set_sizes_and_strides(layout.sizes, layout.strides, start / int64_t(meta.itemsize()));
      return handle_of(at::Tensor(std::move(view)));
    });
  }

  TensorHandle import_tensor(FxwrapValue& value, const std::string& name) override {
    return translated([&]() -> TensorHandle {
      if (value.kind == FXWRAP_DLPACK) return handle_of(consume_dlpack(value, name.c_str()));
      if (value.kind != FXWRAP_TENSOR) fail_kind(name.c_str(), "a torch.Tensor", value);
      return handle_of(static_cast<at::Tensor*>(value.as.tensor)->detach());
    });
  }

  TensorLayout layout_of(const TensorHandle& tensor) override {
    const at::Tensor& value = tensor_of(tensor);
    return {DType(value.scalar_type()), value.sizes().vec(), value.strides().vec()};
  }

  TensorHandle with_layout(const TensorHandle& tensor, const TensorLayout& layout, const std::string& device) override {
    return translated([&] {
      const c10::InferenceMode ordinary(false);
      const at::NoGradGuard no_grad;
      const c10::Device target{device};
      const at::Tensor& value = tensor_of(tensor);
      bool same = value.device() == target && !value.is_conj() && !value.is_neg();
      for (size_t i = 0; i < layout.sizes.size(); ++i) {
        same = same && (layout.sizes[i] < 2 || value.strides()[i] == layout.strides[i]);
      }
      if (same) return tensor;
      at::Tensor copy = at::empty_strided(layout.sizes, layout.strides, value.options().device(target));
      copy.copy_(value);
      return handle_of(std::move(copy));
    });
  }

  void copy(const TensorHandle& target, const TensorHandle& source) override {
    translated([&] {
      const at::NoGradGuard no_grad;
      at::Tensor(tensor_of(target)).copy_(tensor_of(source));
    });
  }

  bool equal(const TensorHandle& a, const TensorHandle& b) override {
    return translated([&] {
      const at::Tensor& first = tensor_of(a);
      return at::equal(first, tensor_of(b).to(first.device()));
    });
  }

  Problem operator_problem(const std::string& name, const std::string& overload, const std::string& schema) override {
    register_stream_operators();
    register_prepacked_operators();
    register_grouped_matmuls();
    register_gelu_matmul();
    const auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!handle.has_value()) {
      return {"is not registered in this process", "Pass the library that registers it as an option, or load it first"};
    }
    std::ostringstream text;
    text << handle->schema();
    if (text.str() == schema) return {};
    try {
      if (handle->schema().isBackwardCompatibleWith(torch::jit::parseSchema(schema))) return {};
    } catch (const std::exception&) {  // the file has no schema
    }
    return {"has another signature in this libtorch: " + text.str() + ", not " + schema,
            "Save the program with this version of torch"};
  }

  TensorHandle make_functions(const std::vector<ReplayedFunction>& functions) override {
    return translated([&] { return handle_of(GraphedFunctions::handle(functions)); });
  }

  std::string missing_device(const std::string& device) override {
    const c10::Device target{device};
    if (target.is_cpu()) return "";
    if (target.is_cuda() && !at::globalContext().hasCUDA()) dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
    if (target.is_cuda() && !at::globalContext().hasCUDA()) return "this libtorch has no CUDA, or finds no GPU";
    try {
      const c10::impl::VirtualGuardImpl guard(target.type());
      if (target.index() < guard.deviceCount()) return "";
      return "there are " + std::to_string(guard.deviceCount()) + " such devices";
    } catch (const c10::Error& failure) {
      return failure.what_without_backtrace();
    }
  }

  void set_threads(int32_t count) override { at::set_num_threads(count); }

  void run(const Program& program, const EngineCall& call) override {
    translated([&] {
      CallInputs inputs(program, call);
      Execution execution(program);
      inputs.set(execution);
      const int64_t saved = program.constants.size - (call.functions == nullptr ? 0 : 1);
      for (int64_t i = 0; i < program.constants.size; ++i) {
        void* constant = i < saved ? call.constants[i] : call.functions;
        execution.borrow(program.constants.data[i].integer, *static_cast<at::Tensor*>(constant));
      }
      {
        const StreamGuard stream(call.options);
        const RunObserver observer(execution.frame(), call.options);
        execution.run();
      }
      const bool as_tensors = call.options != nullptr && call.options->outputs_as_tensors != 0;
      const Frame& f = execution.frame();
      set_outputs(*this, program, f, call, [&](int64_t slot) { return tensor_output(tensor_at(f, slot), as_tensors); });
    });
  }

  void delete_value(FxwrapValue& value) override {
    if (value.kind == FXWRAP_DLPACK) delete_dlpack(value.as.dlpack);
    if (value.kind == FXWRAP_TENSOR) delete static_cast<at::Tensor*>(value.as.tensor);
    value = FxwrapValue{};
  }
};

}  // namespace
}  // namespace fxwrap

fxwrap::Engine* fxwrap_engine(int64_t abi) {
  static fxwrap::TorchEngine engine;
  return abi == fxwrap::abi_version ? &engine : nullptr;
}
