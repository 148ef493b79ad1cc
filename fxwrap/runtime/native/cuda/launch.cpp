// Kernels by name with their compiled variants, and launches from emitted C++.
#include "cuda/launch.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "bridge/frame.h"
#include "bridge/functions.h"
#include "engine/observer.h"

namespace fxwrap {

namespace {

std::mutex mutex;
const char not_for_this_chip = 0;  // its address marks variants that a device cannot run

}  // namespace

std::vector<std::string> signature_entries(std::string_view signature) {
  std::vector<std::string> entries;
  while (!signature.empty()) {
    const size_t comma = signature.find(", ");
    entries.emplace_back(signature.substr(0, comma));
    signature = comma == signature.npos ? std::string_view() : signature.substr(comma + 2);
  }
  return entries;
}

Parameter parameter_of(const std::string& entry) {
  if (entry.starts_with("*")) return Parameter::pointer;
  if (entry == "i1" || entry == "bool") return Parameter::boolean;
  return entry.starts_with("f") || entry.starts_with("bf") ? Parameter::real : Parameter::integer;
}

struct KernelVariantCache::Entry {
  explicit Entry(const Variant& variant) : variant(variant) {}

  // Returns the function on a device, loading it on first use; null if the device cannot run it.
  driver::Function on(int device) {
    if (device < 0 || device >= driver::max_devices) return nullptr;
    driver::Function function = functions[device].load(std::memory_order_acquire);
    if (function == nullptr) function = first_on(device);
    return function == &not_for_this_chip ? nullptr : function;
  }

  driver::Function first_on(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    driver::Function function = functions[device].load(std::memory_order_acquire);
    if (function != nullptr) return function;
    const driver::Image image{variant.cubin, variant.ptx, variant.capability, variant.arch_specific};
    const bool runs = image.cubin != nullptr && driver::runs_on(image, device);
    function = runs ? driver::load(image, variant.name, variant.shared, device) : const_cast<char*>(&not_for_this_chip);
    functions[device].store(function, std::memory_order_release);
    return function;
  }

  const Variant variant;
  std::array<std::atomic<driver::Function>, driver::max_devices> functions{};
  Entry* next = nullptr;
};

KernelVariantCache::KernelVariantCache(std::string_view signature) {
  for (const std::string& entry : signature_entries(signature)) {
    parameters_.push_back(parameter_of(entry));
  }
}

KernelVariantCache& KernelVariantCache::named(const char* symbol, const char* signature) {
  static auto* kernels = new std::unordered_map<std::string, std::unique_ptr<KernelVariantCache>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<KernelVariantCache>& cache = (*kernels)[symbol];
  if (cache == nullptr) cache.reset(new KernelVariantCache(signature));
  return *cache;
}

int64_t KernelVariantCache::variant_count() const {
  int64_t count = 0;
  for (const Entry* entry = first_.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) ++count;
  return count;
}

void KernelVariantCache::add(Entry* entry) {
  entry->next = first_.load(std::memory_order_relaxed);
  while (!first_.compare_exchange_weak(entry->next, entry, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

void KernelVariantCache::add_variant(const Variant& variant) { add(new Entry(variant)); }

void KernelVariantCache::add_loaded_variant(const Variant& variant, int device, driver::Function function) {
  TORCH_CHECK(device >= 0 && device < driver::max_devices, "there is no GPU ", device);
  auto* entry = new Entry(variant);
  for (auto& other : entry->functions) other.store(const_cast<char*>(&not_for_this_chip), std::memory_order_relaxed);
  entry->functions[device].store(function, std::memory_order_relaxed);
  add(entry);
}

KernelVariantCache::Entry* KernelVariantCache::find(const uint8_t* classes, int device) const {
  for (Entry* entry = first_.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
    if (std::memcmp(entry->variant.classes, classes, parameters_.size()) == 0 && entry->on(device) != nullptr) {
      return entry;
    }
  }
  return nullptr;
}

// Memory for all blocks of a launch; none if they need none. What is allocated on the same stream later may use it, and
// runs after the launch.
static at::Tensor scratch_memory(const Variant& variant, const Grid& grid, int device) {
  if (variant.scratch == 0) return {};
  const int64_t bytes = grid.x * grid.y * grid.z * variant.scratch;
  return at::empty({bytes}, at::TensorOptions(at::Device(at::kCUDA, device)).dtype(at::kByte));
}

bool KernelVariantCache::launch(const Grid& grid, Arguments& arguments) const {
  Entry* entry = find(arguments.classes_, arguments.device_);
  if (entry == nullptr) return false;
  const Variant& variant = entry->variant;
  const at::Tensor memory = scratch_memory(variant, grid, arguments.device_);
  // Triton's kernels have two more pointers: to scratch memory, and to that of a profiler.
  void* scratch[] = {memory.defined() ? memory.mutable_data_ptr() : nullptr, nullptr};
  void* passed[Arguments::most + std::size(scratch)];
  int count = 0;
  for (int i = 0; i < arguments.count_; ++i) {
    uint64_t& value = arguments.values_[i];
    switch (ParameterPassing(variant.parameter_passing[i])) {
      case ParameterPassing::omitted: continue;
      case ParameterPassing::by_value: break;
      case ParameterPassing::as_float32: value = __builtin_bit_cast(uint32_t, float(__builtin_bit_cast(double, value)));
    }
    passed[count++] = &value;
  }
  for (void*& pointer : scratch) passed[count++] = &pointer;
  // Kernels wait for the one before them if they were compiled for a chip that can; 0 is that of the device.
  const bool waits = variant.capability == 0 || variant.capability >= driver::first_dependent_capability;
  driver::launch(entry->on(arguments.device_), variant.name, arguments.device_, grid, variant.threads, variant.shared,
                 passed, grid.dependent && waits);
  return true;
}

// --- from emitted C++ -------------------------------------------------------------------------------------------------

namespace {

KernelVariantCache& variant_cache_of(Kernel& kernel) {
  if (void* cache = __atomic_load_n(&kernel.held, __ATOMIC_ACQUIRE)) return *static_cast<KernelVariantCache*>(cache);
  KernelVariantCache& cache = KernelVariantCache::named(kernel.symbol, kernel.signature);
  static std::mutex first_use;
  std::lock_guard<std::mutex> lock(first_use);
  if (kernel.held == nullptr && kernel.compiled != nullptr) {
    for (int64_t i = 0; i < kernel.compiled->size; ++i) cache.add_variant(kernel.compiled->data[i]);
  }
  __atomic_store_n(&kernel.held, &cache, __ATOMIC_RELEASE);
  return cache;
}

bool read_numbers(Arguments& arguments, const Parameter* parameters, Numbers numbers) {
  for (const Number& number : numbers) {
    switch (*parameters++) {
      case Parameter::pointer: return false;
      case Parameter::integer:
        if (number.is_real) return false;
        arguments.add_integer(number.integer);
        break;
      case Parameter::real: arguments.add_float(number.is_real ? number.real : double(number.integer)); break;
      case Parameter::boolean: arguments.add_bool(number.is_real ? number.real != 0 : number.integer != 0);
    }
  }
  return true;
}

bool read_arguments(Arguments& arguments, Frame& f, const KernelVariantCache& cache, Slots tensors, Slots outs,
                    Numbers numbers) {
  const auto& parameters = cache.parameters();
  const size_t pointers = tensors.size() + outs.size();
  if (parameters.size() > Arguments::most) return false;
  for (size_t i = 0; i < pointers; ++i) {
    const Slot slot = i < tensors.size() ? tensors.begin()[i] : outs.begin()[i - tensors.size()];
    if (parameters[i] != Parameter::pointer || !arguments.add_tensor(tensor_at(f, slot))) return false;
  }
  return read_numbers(arguments, parameters.data() + pointers, numbers);
}

}  // namespace

void bridge::launch(Frame& f, Kernel& kernel, Grid grid, Slots tensors, Slots outs, Numbers numbers) {
  if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0) return;
  const KernelVariantCache& cache = variant_cache_of(kernel);
  const size_t count = tensors.size() + outs.size() + numbers.size();
  TORCH_CHECK(count == cache.parameters().size(), "a kernel has ", cache.parameters().size(), " parameters, and ", count,
              " arguments");
  const ObservedLine observed(f, kernel.name);
  Arguments arguments;
  if (read_arguments(arguments, f, cache, tensors, outs, numbers) && cache.launch(grid, arguments)) return;
  launch_by_operator(f, kernel, grid, tensors, outs, numbers);
}

}  // namespace fxwrap
