#include "cpu/engine.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

#include "../../include/fxwrap/dlpack.h"
#include "bridge/kernel_failure.h"
#include "cpu/tensor.h"
#include "engine/call.h"
#include "engine/observer.h"

namespace fxwrap::cpu {
namespace {

const Tensor& tensor_of(const TensorHandle& handle) { return *static_cast<Tensor*>(handle.get()); }
TensorHandle handle_of(Tensor tensor) { return std::make_shared<Tensor>(std::move(tensor)); }

// --- DLPack ----------------------------------------------------------------------------------------------------------

void delete_dlpack(DLManagedTensorVersioned* tensor) {
  if (tensor != nullptr && tensor->deleter != nullptr) tensor->deleter(tensor);
}

// torch's name of a device, which is not the CPU's for memory that this engine cannot use.
std::string device_text(const DLDevice& device) {
  switch (int(device.device_type)) {
    case kDLCPU: return "cpu";
    case kDLCUDA:
    case kDLROCM: return "cuda:" + std::to_string(device.device_id);
    default: return "DLPack's device " + std::to_string(int(device.device_type));
  }
}

const DTypeName* dtype_of(const DLDataType& dtype) {
  for (const DTypeName& item : dtype_names) {
    if (item.bits != 0 && item.code == dtype.code && item.bits == dtype.bits && item.lanes == dtype.lanes) return &item;
  }
  return nullptr;
}

// Takes a DLPack tensor out of a value.
Tensor consume_dlpack(FxwrapValue& value, const char* name) {
  const std::shared_ptr<DLManagedTensorVersioned> owner(value.as.dlpack, delete_dlpack);
  value = FxwrapValue{};
  const auto fail = [&](const std::string& reason) {
    throw Failure("InputError", "input '" + std::string(name) + "': " + reason);
  };
  if (owner == nullptr) fail("its DLPack tensor is NULL");
  if (owner->version.major != DLPACK_MAJOR_VERSION) {
    fail("its DLPack version is " + std::to_string(owner->version.major) +
         ", expected 1. Pass a DLManagedTensorVersioned of DLPack 1.x");
  }
  const DLTensor& source = owner->dl_tensor;
  const DTypeName* dtype = dtype_of(source.dtype);
  if (dtype == nullptr) {
    fail("its DLPack type has the code " + std::to_string(source.dtype.code) + ", " + std::to_string(source.dtype.bits) +
         " bits and " + std::to_string(source.dtype.lanes) + " lanes, which is no dtype of torch's");
  }
  Tensor tensor;
  tensor.dtype = dtype->dtype;
  if (source.ndim > 0) tensor.sizes.assign(source.shape, source.shape + source.ndim);
  tensor.strides.assign(tensor.sizes.size(), 1);
  for (size_t i = tensor.sizes.size(); i-- > 0;) {
    if (tensor.sizes[i] < 0) fail("its size " + std::to_string(i) + " is negative");
    if (source.strides != nullptr) {
      tensor.strides[i] = source.strides[i];
    } else if (i + 1 < tensor.sizes.size()) {
      tensor.strides[i] = tensor.strides[i + 1] * std::max<int64_t>(tensor.sizes[i + 1], 1);
    }
    if (tensor.strides[i] < 0) fail("its stride " + std::to_string(i) + " is negative");
  }
  Memory memory;
  memory.bytes = extent(tensor.sizes.data(), tensor.strides.data(), tensor.sizes.size(), dtype->bytes);
  memory.start = source.data == nullptr ? nullptr : static_cast<char*>(source.data) + source.byte_offset;
  if (memory.start == nullptr && memory.bytes > 0) fail("its DLPack tensor has no memory");
  memory.owner = owner;
  memory.device = device_text(source.device);
  tensor.memory = std::make_shared<const Memory>(std::move(memory));
  return tensor;
}

struct Exported {
  DLManagedTensorVersioned dlpack;
  Tensor tensor;
};

FxwrapValue tensor_output(const Tensor& tensor) {
  FxwrapValue value{};
  if (!tensor.is_defined()) return value;
  const DTypeName& dtype = *find_dtype(tensor.dtype);
  if (dtype.bits == 0) throw Failure("RuntimeError", std::string("DLPack has no type for ") + dtype.name);
  auto* exported = new Exported{{}, tensor};
  exported->dlpack.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  exported->dlpack.manager_ctx = exported;
  exported->dlpack.deleter = [](DLManagedTensorVersioned* self) { delete static_cast<Exported*>(self->manager_ctx); };
  exported->dlpack.dl_tensor = {tensor.data(),
                                {kDLCPU, 0},
                                int32_t(tensor.sizes.size()),
                                {dtype.code, dtype.bits, dtype.lanes},
                                exported->tensor.sizes.data(),
                                exported->tensor.strides.data(),
                                0};
  value.kind = FXWRAP_DLPACK;
  value.as.dlpack = &exported->dlpack;
  return value;
}

[[noreturn]] void fail_torch_tensor(const std::string& subject) {
  throw Failure("InputError", subject + " an at::Tensor, and this process had not loaded libtorch when the program was "
                                        "opened. Load libtorch first, or use DLPack tensors");
}

// --- runs ------------------------------------------------------------------------------------------------------------

// The values of one run.
class Execution {
 public:
  explicit Execution(const Program& program)
      : tensors_(size_t(program.slots)), ints_(size_t(program.ints)), floats_(size_t(program.floats)) {
    frame_ = {&functions, tensors_.data(), ints_.data(), floats_.data(), nullptr};
  }
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  Frame& frame() { return frame_; }

 private:
  std::vector<Tensor> tensors_;
  std::vector<int64_t> ints_;
  std::vector<double> floats_;
  Frame frame_;
};

std::atomic<int32_t> wanted_threads{0};
thread_local int32_t used_threads = 0;

// Sets the number of threads of kernels, which OpenMP keeps for each thread that calls them.
void apply_threads() {
  const int32_t wanted = wanted_threads.load(std::memory_order_relaxed);
  if (wanted == used_threads) return;
  used_threads = wanted;
  for (const char* name : {"libgomp.so.1", "libomp.so", "libomp.so.5", "libiomp5.so"}) {
    void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);  // of a program with kernels
    if (library == nullptr) continue;
    auto* set_count = reinterpret_cast<void (*)(int)>(dlsym(library, "omp_set_num_threads"));
    if (set_count != nullptr) set_count(wanted);
    dlclose(library);
  }
}

class CpuEngine final : public Engine {
 public:
  TensorHandle make_memory(const uint8_t* bytes, int64_t size, std::shared_ptr<void> owner, const std::string&) override {
    Memory memory{std::move(owner), const_cast<char*>(reinterpret_cast<const char*>(bytes)), size};
    return bytes_of(std::make_shared<const Memory>(std::move(memory)));
  }

  TensorHandle make_empty_memory(int64_t size, const std::string&) override {
    auto memory = allocate(size);
    if (size > 0) std::memset(memory->start, 0, size_t(size));
    return bytes_of(std::move(memory));
  }

  TensorHandle make_view(const TensorHandle& memory, int64_t start, const TensorLayout& layout) override {
    const Tensor& bytes = tensor_of(memory);
    return handle_of({bytes.memory, layout.dtype, layout.sizes, layout.strides, start / find_dtype(layout.dtype)->bytes});
  }

  TensorHandle import_tensor(FxwrapValue& value, const std::string& name) override {
    if (value.kind == FXWRAP_TENSOR) fail_torch_tensor("'" + name + "' is");
    if (value.kind != FXWRAP_DLPACK) fail_kind(name.c_str(), "a torch.Tensor", value);
    Tensor tensor = consume_dlpack(value, name.c_str());
    if (tensor.memory->device == "cpu") return handle_of(std::move(tensor));
    throw Failure("InputError", "input '" + name + "': it is on " + tensor.memory->device + ", not on cpu");
  }

  TensorLayout layout_of(const TensorHandle& tensor) override {
    const Tensor& value = tensor_of(tensor);
    return {value.dtype, value.sizes, value.strides};
  }

  TensorHandle with_layout(const TensorHandle& tensor, const TensorLayout& layout, const std::string&) override {
    const Tensor& value = tensor_of(tensor);
    bool same = true;
    for (size_t i = 0; i < layout.sizes.size(); ++i) {
      same = same && (layout.sizes[i] < 2 || value.strides[i] == layout.strides[i]);
    }
    if (same) return tensor;
    Tensor result{nullptr, value.dtype, layout.sizes, layout.strides, 0};
    result.memory = allocate(extent(layout.sizes.data(), layout.strides.data(), layout.sizes.size(), value.item_bytes()));
    const TensorHandle handle = handle_of(std::move(result));
    copy(handle, tensor);
    return handle;
  }

  void copy(const TensorHandle& target, const TensorHandle& source) override {
    cpu::copy(tensor_of(target), tensor_of(source));
  }

  bool equal(const TensorHandle& a, const TensorHandle& b) override {
    const Tensor &first = tensor_of(a), &second = tensor_of(b);
    const size_t item = size_t(first.item_bytes());
    if (first.dtype != second.dtype || first.sizes != second.sizes) return false;
    bool same = true;
    for_each_element(first, second, [&](const char* x, const char* y) { same = same && std::memcmp(x, y, item) == 0; });
    return same;
  }

  Problem operator_problem(const std::string&, const std::string&, const std::string&) override {
    return {"needs libtorch, which the description of the program excludes", "Save it again"};
  }

  TensorHandle make_functions(const std::vector<ReplayedFunction>&) override {
    throw Failure("RuntimeError", "graph capture needs libtorch, which the description of the program excludes. Save it again");
  }

  std::string missing_device(const std::string& device) override {
    return device == "cpu" ? "" : "programs without libtorch run on the CPU alone";
  }

  void set_threads(int32_t count) override { wanted_threads = count; }

  void run(const Program& program, const EngineCall& call) override {
    check_counts(program, call);
    if (call.options != nullptr && call.options->outputs_as_tensors != 0) fail_torch_tensor("a result shall be");
    Execution execution(program);
    Frame& f = execution.frame();
    const auto set_tensor = [&](const Input& input, FxwrapValue& value) {
      if (value.kind == FXWRAP_TENSOR) fail_torch_tensor("input '" + std::string(input.name) + "' is");
      tensor_at(f, input.value.integer) = consume_dlpack(value, input.name);
    };
    for (int64_t i = 0; i < program.inputs.size; ++i) {
      set_input(f, program.inputs.data[i], call.inputs[i], set_tensor);
    }
    for (int64_t i = 0; i < program.constants.size; ++i) {
      tensor_at(f, program.constants.data[i].integer) = *static_cast<const Tensor*>(call.constants[i]);
    }
    apply_threads();
    try {
      const RunObserver observer(f, call.options);
      program.run(f);
    } catch (const KernelFailure& failure) {
      throw Failure(failure.kind, failure.message);
    }
    set_outputs(*this, program, f, call, [&](int64_t slot) { return tensor_output(tensor_at(f, slot)); });
  }

  void delete_value(FxwrapValue& value) override {
    if (value.kind == FXWRAP_DLPACK) delete_dlpack(value.as.dlpack);
    value = FxwrapValue{};
  }

 private:
  static TensorHandle bytes_of(std::shared_ptr<const Memory> memory) {
    const int64_t size = memory->bytes;
    return handle_of({std::move(memory), DType::uint8, {size}, {1}, 0});
  }
};

}  // namespace

Engine& engine() {
  static auto* engine = new CpuEngine;  // never destroyed: threads may run programs while the process ends
  return *engine;
}

}  // namespace fxwrap::cpu
