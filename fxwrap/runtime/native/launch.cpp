// Kernels by name with their compilations, and launches from emitted C++.
#include "launch.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "frame.h"

namespace fxwrap {

namespace {

std::mutex mutex;
const char not_for_this_chip = 0;  // its address stands for a function that a device cannot have

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
  if (entry == "i1" || entry == "bool") return Parameter::truth;
  return entry.starts_with("f") || entry.starts_with("bf") ? Parameter::real : Parameter::integer;
}

struct HeldKernel::Entry {
  explicit Entry(const Variant& variant) : variant(variant) {}

  // Returns the function on a device, loaded if it is not; null where the device cannot run it.
  driver::Function on(int device) {
    if (device < 0 || device >= driver::most_devices) return nullptr;
    driver::Function found = functions[device].load(std::memory_order_acquire);
    if (found == nullptr) found = first_on(device);
    return found == &not_for_this_chip ? nullptr : found;
  }

  driver::Function first_on(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    driver::Function found = functions[device].load(std::memory_order_acquire);
    if (found != nullptr) return found;
    const driver::Image image{variant.cubin, variant.ptx, variant.capability, variant.one_chip};
    const bool runs = image.cubin != nullptr && driver::runs_on(image, device);
    found = runs ? driver::load(image, variant.name, variant.shared, device) : const_cast<char*>(&not_for_this_chip);
    functions[device].store(found, std::memory_order_release);
    return found;
  }

  const Variant variant;
  std::array<std::atomic<driver::Function>, driver::most_devices> functions{};
  Entry* next = nullptr;
};

HeldKernel::HeldKernel(std::string_view signature) {
  for (const std::string& entry : signature_entries(signature)) {
    parameters_.push_back(parameter_of(entry));
  }
}

HeldKernel& HeldKernel::named(const char* symbol, const char* signature) {
  static auto* kernels = new std::unordered_map<std::string, std::unique_ptr<HeldKernel>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<HeldKernel>& found = (*kernels)[symbol];
  if (found == nullptr) found.reset(new HeldKernel(signature));
  return *found;
}

int64_t HeldKernel::held() const {
  int64_t count = 0;
  for (const Entry* entry = first_.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) ++count;
  return count;
}

void HeldKernel::add(Entry* entry) {
  entry->next = first_.load(std::memory_order_relaxed);
  while (!first_.compare_exchange_weak(entry->next, entry, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

void HeldKernel::hold(const Variant& variant) { add(new Entry(variant)); }

void HeldKernel::hold_loaded(const Variant& variant, int device, driver::Function function) {
  TORCH_CHECK(device >= 0 && device < driver::most_devices, "there is no GPU ", device);
  auto* entry = new Entry(variant);
  for (auto& other : entry->functions) other.store(const_cast<char*>(&not_for_this_chip), std::memory_order_relaxed);
  entry->functions[device].store(function, std::memory_order_relaxed);
  add(entry);
}

HeldKernel::Entry* HeldKernel::find(const uint8_t* classes, int device) const {
  for (Entry* entry = first_.load(std::memory_order_acquire); entry != nullptr; entry = entry->next) {
    if (std::memcmp(entry->variant.classes, classes, parameters_.size()) == 0 && entry->on(device) != nullptr) {
      return entry;
    }
  }
  return nullptr;
}

bool HeldKernel::launch(const Grid& grid, Arguments& arguments) const {
  Entry* entry = find(arguments.classes_, arguments.device_);
  if (entry == nullptr) return false;
  const Variant& variant = entry->variant;
  static constexpr int scratch = 2;  // Triton's kernels take two addresses more, of memory that those held do not need
  static void* no_scratch = nullptr;
  void* given[Arguments::most + scratch];
  int count = 0;
  for (int i = 0; i < arguments.count_; ++i) {
    uint64_t& value = arguments.values_[i];
    switch (Passed(variant.passed[i])) {
      case Passed::left_out: continue;
      case Passed::whole: break;
      case Passed::single: value = __builtin_bit_cast(uint32_t, float(__builtin_bit_cast(double, value)));
    }
    given[count++] = &value;
  }
  for (int i = 0; i < scratch; ++i) given[count++] = &no_scratch;
  driver::launch(entry->on(arguments.device_), variant.name, arguments.device_, grid, variant.threads, variant.shared,
                 given);
  return true;
}

// --- from emitted C++ -------------------------------------------------------------------------------------------------

namespace {

HeldKernel& held_of(Kernel& kernel) {
  if (void* held = __atomic_load_n(&kernel.held, __ATOMIC_ACQUIRE)) return *static_cast<HeldKernel*>(held);
  HeldKernel& held = HeldKernel::named(kernel.symbol, kernel.signature);
  static std::mutex first_use;
  std::lock_guard<std::mutex> lock(first_use);
  if (kernel.held == nullptr && kernel.compiled != nullptr) {
    for (int64_t i = 0; i < kernel.compiled->size; ++i) held.hold(kernel.compiled->data[i]);
  }
  __atomic_store_n(&kernel.held, &held, __ATOMIC_RELEASE);
  return held;
}

bool read_numbers(Arguments& arguments, const Parameter* parameters, Numbers numbers) {
  for (const Number& number : numbers) {
    switch (*parameters++) {
      case Parameter::pointer: return false;
      case Parameter::integer:
        if (number.is_real) return false;
        arguments.add_integer(number.integer);
        break;
      case Parameter::real: arguments.add_real(number.is_real ? number.real : double(number.integer)); break;
      case Parameter::truth: arguments.add_truth(number.is_real ? number.real != 0 : number.integer != 0);
    }
  }
  return true;
}

bool read_arguments(Arguments& arguments, Frame& f, const HeldKernel& held, Slots tensors, Slots outs,
                    Numbers numbers) {
  const auto& parameters = held.parameters();
  const size_t pointers = tensors.size() + outs.size();
  if (parameters.size() > Arguments::most) return false;
  for (size_t i = 0; i < pointers; ++i) {
    const Slot slot = i < tensors.size() ? tensors.begin()[i] : outs.begin()[i - tensors.size()];
    if (parameters[i] != Parameter::pointer || !arguments.add_tensor(tensor_at(f, slot))) return false;
  }
  return read_numbers(arguments, parameters.data() + pointers, numbers);
}

}  // namespace

void launch(Frame& f, Kernel& kernel, Grid grid, Slots tensors, Slots outs, Numbers numbers) {
  if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0) return;
  const HeldKernel& held = held_of(kernel);
  const size_t count = tensors.size() + outs.size() + numbers.size();
  TORCH_CHECK(count == held.parameters().size(), "a kernel has ", held.parameters().size(), " parameters, and ", count,
              " arguments");
  Arguments arguments;
  if (read_arguments(arguments, f, held, tensors, outs, numbers) && held.launch(grid, arguments)) return;
  launch_by_operator(f, kernel, grid, tensors, outs, numbers);
}

}  // namespace fxwrap
