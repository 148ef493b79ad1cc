// Launches of GPU kernels: the compiled variants of each kernel in a process, and the choice among them.
//
// Triton compiles a kernel anew for arguments that differ in class: a pointer's dtype and whether it is divisible by
// 16, and of an integer whether it is 1, divisible by 16, and fits in 32 bits. A variant is launched if all
// classes are those it was compiled for. fxwrap/runtime/triton/variants.py must match this file.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "bridge/bridge.h"
#include "cuda/driver.h"

namespace fxwrap {

enum class Parameter : uint8_t { pointer, integer, real, boolean };

// Classes of integers; those of a pointer are 2 * dtype, and 1 more where it is divisible by 16; all others are 0.
enum IntegerClass : uint8_t { one, narrow, narrow_divisible, wide, wide_divisible };

// How a variant receives a parameter: not at all, unchanged (an integer's low bytes), or as a 32-bit float.
enum class ParameterPassing : uint8_t { omitted, by_value, as_float32 };

// The arguments of one launch with their classes. `add_tensor` returns false for tensors that only Triton can handle.
class Arguments {
 public:
  static constexpr int most = 256;  // parameters of a kernel

  bool add_tensor(const at::Tensor& tensor) {
    const c10::Device where = tensor.device();
    if (!where.is_cuda() || (device_ >= 0 && where.index() != device_)) return false;
    device_ = where.index();
    const uint64_t address = reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
    const int dtype = int(tensor.scalar_type());
    const bool is_float8 = dtype >= int(fxwrap::DType::float8_e5m2) && dtype <= int(fxwrap::DType::float8_e4m3fnuz);
    add(address, uint8_t(2 * (is_float8 ? 0 : dtype) + (address % 16 == 0)));
    return true;
  }
  void add_integer(int64_t value) {
    const bool divisible = value % 16 == 0;
    const bool fits = value == int32_t(value);
    add(uint64_t(value), value == 1 ? one : fits ? narrow + divisible : wide + divisible);
  }
  void add_float(double value) { add(__builtin_bit_cast(uint64_t, value), 0); }
  void add_bool(bool value) { add(value, 0); }

  int device() const { return device_; }

 private:
  friend class KernelVariantCache;
  void add(uint64_t value, int which) {
    values_[count_] = value;
    classes_[count_++] = uint8_t(which);
  }

  int count_ = 0;
  int device_ = -1;  // the index, of all tensors
  uint64_t values_[most];
  uint8_t classes_[most];
};

// A kernel with its compiled variants: one object per kernel in a process, shared by all launchers. Thread-safe; variants
// are never removed.
class FXWRAP_API KernelVariantCache {
 public:
  // Returns the kernel of this name, which identifies its content. `signature` is fxwrap's: "*f32, i64, f64, i1".
  static KernelVariantCache& named(const char* symbol, const char* signature);

  const std::vector<Parameter>& parameters() const { return parameters_; }
  int64_t variant_count() const;
  bool holds(const uint8_t* classes, int device) const { return find(classes, device) != nullptr; }

  // Adds a variant, which must outlive all launches; its first launch on a device loads it there.
  void add_variant(const Variant& variant);
  // Adds a variant that is already loaded on a device.
  void add_loaded_variant(const Variant& variant, int device, driver::Function function);

  // Launches the kernel and returns true; returns false if no variant matches the arguments on their device.
  // There must be as many arguments as parameters. Throws std::runtime_error.
  bool launch(const Grid& grid, Arguments& arguments) const;

 private:
  struct Entry;
  explicit KernelVariantCache(std::string_view signature);
  void add(Entry* entry);
  Entry* find(const uint8_t* classes, int device) const;

  std::vector<Parameter> parameters_;
  std::atomic<Entry*> first_{nullptr};
};

// The comma-separated entries of a signature, and the kind of parameter that an entry describes.
std::vector<std::string> signature_entries(std::string_view signature);
Parameter parameter_of(const std::string& entry);

// Launches a kernel by the operator of fxwrap's runtime in Python, which compiles it for the arguments.
void launch_by_operator(Frame& f, const Kernel& kernel, const Grid& grid, Slots tensors, Slots outs, Numbers numbers);

}  // namespace fxwrap
