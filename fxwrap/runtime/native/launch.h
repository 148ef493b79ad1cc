// Launches of GPU kernels: the compilations of each kernel that a process holds, and the choice among them.
//
// Triton compiles a kernel anew for arguments that differ in class: a pointer's dtype and whether it is divisible by
// 16, and of an integer whether it is 1, divisible by 16, and fits in 32 bits. A compilation is taken where all classes
// are those it was made for; the twin of what is written here is fxwrap/runtime/triton_variants.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "bridge.h"
#include "driver.h"

namespace fxwrap {

enum class Parameter : uint8_t { pointer, integer, real, truth };

// Classes of integers; those of a pointer are 2 * dtype, and 1 more where it is divisible by 16; all others are 0.
enum IntegerClass : uint8_t { one, narrow, narrow_divisible, wide, wide_divisible };

// How a compilation takes a parameter: not at all, as it is (an integer's low bytes), as a float of 32 bits.
enum class Passed : uint8_t { left_out, whole, single };

// The arguments of one launch with their classes. `add_*` return false where only Triton knows what to do.
class Arguments {
 public:
  static constexpr int most = 256;  // parameters of a kernel

  bool add_tensor(const at::Tensor& tensor) {
    const c10::Device where = tensor.device();
    if (!where.is_cuda() || (device_ >= 0 && where.index() != device_)) return false;
    device_ = where.index();
    const uint64_t address = reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
    add(address, uint8_t(2 * int(tensor.scalar_type()) + (address % 16 == 0)));
    return true;
  }
  void add_integer(int64_t value) {
    const bool divisible = value % 16 == 0;
    const bool fits = value == int32_t(value);
    add(uint64_t(value), value == 1 ? one : fits ? narrow + divisible : wide + divisible);
  }
  void add_real(double value) { add(__builtin_bit_cast(uint64_t, value), 0); }
  void add_truth(bool value) { add(value, 0); }

  int device() const { return device_; }

 private:
  friend class HeldKernel;
  void add(uint64_t value, int which) {
    values_[count_] = value;
    classes_[count_++] = uint8_t(which);
  }

  int count_ = 0;
  int device_ = -1;  // the index, of all tensors
  uint64_t values_[most];
  uint8_t classes_[most];
};

// A kernel with the compilations of it that are held. There is one for each kernel of the process, whoever launches it.
// Safe to use from several threads; compilations are added and never taken away.
class FXWRAP_API HeldKernel {
 public:
  // Returns the kernel of this name, which stands for its content. `signature` is fxwrap's: "*f32, i64, f64, i1".
  static HeldKernel& named(const char* symbol, const char* signature);

  const std::vector<Parameter>& parameters() const { return parameters_; }
  int64_t held() const;  // how many compilations
  bool holds(const uint8_t* classes, int device) const { return find(classes, device) != nullptr; }

  // Holds a compilation, which must outlive the process's launches; it is loaded where it is first launched.
  void hold(const Variant& variant);
  // Holds one that is loaded on a device, as a function there.
  void hold_loaded(const Variant& variant, int device, driver::Function function);

  // Launches the kernel, and returns true; false where no compilation holds for these arguments on their device.
  // Arguments must be as many as parameters. Throws std::runtime_error.
  bool launch(const Grid& grid, Arguments& arguments) const;

 private:
  struct Entry;
  explicit HeldKernel(std::string_view signature);
  void add(Entry* entry);
  Entry* find(const uint8_t* classes, int device) const;

  std::vector<Parameter> parameters_;
  std::atomic<Entry*> first_{nullptr};
};

// The entries of a signature, which commas separate, and what a parameter is by its entry.
std::vector<std::string> signature_entries(std::string_view signature);
Parameter parameter_of(const std::string& entry);

// Launches a kernel by the operator of fxwrap's runtime in Python, which compiles it for the arguments.
void launch_by_operator(Frame& f, const Kernel& kernel, const Grid& grid, Slots tensors, Slots outs, Numbers numbers);

}  // namespace fxwrap
