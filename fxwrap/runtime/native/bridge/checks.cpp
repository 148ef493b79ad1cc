// Checks of run-time inputs.
#include "bridge/checks.h"

#include "bridge/frame.h"
#include "bridge/functions.h"
#include "engine/checks.h"

namespace fxwrap {
namespace {

std::string describe(const at::Tensor& tensor) {
  return checks::describe({DType(tensor.scalar_type()), size_t(tensor.dim()), tensor.sizes().data(),
                           tensor.strides().data(), tensor.device().str()});
}

bool is_strided(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested();
}

// Describes a tensor of a rejected class of layouts, or none.
std::string describe_other(const at::Tensor& tensor) {
  if (!tensor.defined()) return "None";
  return tensor.is_nested() ? "a nested tensor" : "a tensor of another layout than torch.strided";
}

bool same_device(const c10::Device& expected, const c10::Device& actual) {
  return expected.type() == actual.type() && (!expected.has_index() || expected.index() == actual.index());
}

}  // namespace

c10::Device resolve_device(Device& device) {
  int32_t code = __atomic_load_n(&device.code, __ATOMIC_RELAXED);
  if (code < 0) {
    const c10::Device parsed{std::string(device.name)};
    code = int32_t(parsed.type()) * 1024 + (parsed.index() + 1);
    __atomic_store_n(&device.code, code, __ATOMIC_RELAXED);
  }
  return c10::Device(c10::DeviceType(code / 1024), c10::DeviceIndex(code % 1024 - 1));
}

namespace bridge {

void check_layout(Frame& f, Slot slot, const char* name, Ints sizes, Ints strides, DType dtype, Device& device,
                  const char* operator_name) {
  const at::Tensor& tensor = tensor_at(f, slot);
  const c10::Device where = resolve_device(device);
  const bool strided = is_strided(tensor);
  if (strided && DType(tensor.scalar_type()) == dtype && same_device(where, tensor.device()) &&
      checks::has_sizes(sizes, tensor.sizes().data(), size_t(tensor.dim())) &&
      (tensor.numel() == 0 ||
       checks::has_strides(strides, tensor.sizes().data(), tensor.strides().data(), size_t(tensor.dim())))) {
    return;
  }
  const std::string got = strided ? describe(tensor) : describe_other(tensor);
  checks::fail_layout(name, operator_name, {dtype, sizes.size(), sizes.begin(), strides.begin(), where.str()}, got);
}

void check_rank(Frame& f, Slot slot, const char* name, int64_t rank) {
  const at::Tensor& tensor = tensor_at(f, slot);
  if (tensor.defined() && tensor.dim() == rank && !tensor.is_nested()) return;
  const std::string got = is_strided(tensor)                           ? describe(tensor)
                          : tensor.defined() && !tensor.is_nested() ? "Tensor"
                                                                       : describe_other(tensor);
  checks::fail_rank(name, rank, got);
}

void check_alignment(Frame& f, Slot slot, const char* name, int64_t alignment) {
  checks::check_alignment(name, tensor_at(f, slot).data_ptr(), alignment);
}

}  // namespace bridge
}  // namespace fxwrap
