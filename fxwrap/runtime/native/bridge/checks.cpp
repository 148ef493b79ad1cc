// Checks of run-time inputs. The texts are those of fxwrap/runtime/checks.py; a test compares them.
#include "bridge/checks.h"

#include <cstdio>
#include <string>

#include "bridge/frame.h"

namespace fxwrap {
namespace {

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte: return "u8";
    case at::kChar: return "i8";
    case at::kShort: return "i16";
    case at::kInt: return "i32";
    case at::kLong: return "i64";
    case at::kUInt16: return "u16";
    case at::kUInt32: return "u32";
    case at::kUInt64: return "u64";
    case at::kHalf: return "f16";
    case at::kBFloat16: return "bf16";
    case at::kFloat: return "f32";
    case at::kDouble: return "f64";
    case at::kComplexHalf: return "c32";
    case at::kComplexFloat: return "c64";
    case at::kComplexDouble: return "c128";
    case at::kBool: return "bool";
    case at::kFloat8_e4m3fn: return "f8e4m3fn";
    case at::kFloat8_e4m3fnuz: return "f8e4m3fnuz";
    case at::kFloat8_e5m2: return "f8e5m2";
    case at::kFloat8_e5m2fnuz: return "f8e5m2fnuz";
    case at::kFloat8_e8m0fnu: return "f8e8m0fnu";
    case at::kQUInt8: return "qu8";
    case at::kQInt8: return "qi8";
    case at::kQInt32: return "qi32";
    default: return std::string(c10::getDtypeNames(dtype).first);
  }
}

std::string join(at::IntArrayRef values) {
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(values[i]);
  }
  return text;
}

std::string tuple(at::IntArrayRef values) {
  return "(" + join(values) + (values.size() == 1 ? ",)" : ")");
}

std::string describe(at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                     const c10::Device& device) {
  return dtype_name(dtype) + "[" + join(sizes) + "] on " + device.str() + " with strides " + tuple(strides);
}

bool same_device(const c10::Device& expected, const c10::Device& actual) {
  return expected.type() == actual.type() && (!expected.has_index() || expected.index() == actual.index());
}

bool same_strides(at::IntArrayRef sizes, at::IntArrayRef expected, at::IntArrayRef actual) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && expected[i] != actual[i]) return false;
  }
  return true;
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

void check_layout(Frame& f, Slot slot, const char* name, Ints sizes, Ints strides, DType dtype, Device& device) {
  const at::Tensor& tensor = tensor_at(f, slot);
  const at::IntArrayRef expected_sizes(sizes.begin(), sizes.size());
  const at::IntArrayRef expected_strides(strides.begin(), strides.size());
  const c10::Device where = resolve_device(device);
  const bool strided = tensor.defined() && tensor.layout() == at::kStrided;
  if (strided && tensor.scalar_type() == at::ScalarType(dtype) && tensor.sizes() == expected_sizes &&
      same_device(where, tensor.device()) &&
      (tensor.numel() == 0 || same_strides(expected_sizes, expected_strides, tensor.strides()))) {
    return;
  }
  std::string got = "None";
  if (strided) {
    got = describe(tensor.scalar_type(), tensor.sizes(), tensor.strides(), tensor.device());
  } else if (tensor.defined()) {
    got = "a tensor of another layout than torch.strided";
  }
  const std::string wanted = describe(at::ScalarType(dtype), expected_sizes, expected_strides, where);
  throw InputError("input '" + std::string(name) + "': expected " + wanted + ", got " + got);
}

void check_rank(Frame& f, Slot slot, const char* name, int64_t rank) {
  const at::Tensor& tensor = tensor_at(f, slot);
  if (tensor.defined() && tensor.dim() == rank) return;
  std::string got = "None";
  if (tensor.defined() && tensor.layout() == at::kStrided) {
    got = describe(tensor.scalar_type(), tensor.sizes(), tensor.strides(), tensor.device());
  } else if (tensor.defined()) {
    got = "Tensor";
  }
  throw InputError("input '" + std::string(name) + "': expected a tensor of " + std::to_string(rank) + " dimension" +
                   (rank > 1 ? "s" : "") + ", got " + got);
}

void check_alignment(Frame& f, Slot slot, const char* name, int64_t alignment) {
  const auto address = reinterpret_cast<uintptr_t>(tensor_at(f, slot).data_ptr());
  if (address % uintptr_t(alignment) == 0) return;
  char text[24];
  std::snprintf(text, sizeof text, "%#zx", size_t(address));
  throw InputError("input '" + std::string(name) + "': its address " + text + " is no multiple of " +
                   std::to_string(alignment) + " bytes");
}

}  // namespace fxwrap
