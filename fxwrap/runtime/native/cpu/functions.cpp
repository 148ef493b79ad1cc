// The functions that emitted programs call, on memory of the CPU alone.
#include <cmath>
#include <cstdlib>
#include <new>

#include "cpu/tensor.h"
#include "engine/failure.h"
#include "engine/observer.h"

namespace fxwrap::cpu {
namespace {

constexpr size_t alignment = 64;

bool is_contiguous(const Tensor& tensor) {
  int64_t step = 1;
  for (size_t dim = tensor.sizes.size(); dim-- > 0;) {
    if (tensor.sizes[dim] != 1 && tensor.strides[dim] != step) return false;
    step *= tensor.sizes[dim];
  }
  return true;
}

std::vector<int64_t> copied(Ints values) { return {values.begin(), values.end()}; }

float from_half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return sign * (exponent == 0 ? std::ldexp(float(fraction), -24) : std::ldexp(float(fraction + 1024), exponent - 25));
}

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}

template <class T> T read_as(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// Calls `use` with the one element of a tensor, a number of C++.
template <class Use> auto use_item(Frame& f, Slot slot, const Use& use) -> decltype(use(1.0)) {
  const Tensor& tensor = tensor_at(f, slot);
  if (!tensor.is_defined() || tensor.count() != 1) {
    throw Failure("RuntimeError", "a Tensor with " + std::to_string(tensor.is_defined() ? tensor.count() : 0) +
                                      " elements cannot be converted to Scalar");
  }
  const char* data = tensor.data();
  switch (tensor.dtype) {
    case DType::bool_: return use(read_as<uint8_t>(data) != 0);
    case DType::uint8: return use(read_as<uint8_t>(data));
    case DType::uint16: return use(read_as<uint16_t>(data));
    case DType::uint32: return use(read_as<uint32_t>(data));
    case DType::uint64: return use(read_as<uint64_t>(data));
    case DType::int8: return use(read_as<int8_t>(data));
    case DType::int16: return use(read_as<int16_t>(data));
    case DType::int32: return use(read_as<int32_t>(data));
    case DType::int64: return use(read_as<int64_t>(data));
    case DType::float16: return use(from_half(read_as<uint16_t>(data)));
    case DType::bfloat16: return use(from_bfloat16(read_as<uint16_t>(data)));
    case DType::float32: return use(read_as<float>(data));
    case DType::float64: return use(read_as<double>(data));
    default: throw Failure("RuntimeError", std::string("an element of dtype ") + find_dtype(tensor.dtype)->name +
                                               " is read as a number only with libtorch");
  }
}

// --- functions -------------------------------------------------------------------------------------------------------

void empty_strided(Frame& f, Slot out, Ints sizes, Ints strides, DType dtype, Device&) {
  Tensor tensor{nullptr, dtype, copied(sizes), copied(strides), 0};
  for (int64_t size : sizes) {
    if (size < 0) throw Failure("RuntimeError", "a tensor has the negative size " + std::to_string(size));
  }
  tensor.memory = allocate(extent(sizes.begin(), strides.begin(), sizes.size(), tensor.item_bytes()));
  tensor_at(f, out) = std::move(tensor);
}

void view(Frame& f, Slot out, Slot base, Ints sizes, Ints strides, int64_t offset) {
  const Tensor& from = tensor_at(f, base);
  tensor_at(f, out) = {from.memory, from.dtype, copied(sizes), copied(strides), from.offset + offset};
}

void reuse(Frame& f, Slot out, Slot from, Ints sizes, Ints strides, DType dtype) {
  const Tensor memory = std::move(tensor_at(f, from));
  tensor_at(f, from) = Tensor{};
  tensor_at(f, out) = window(memory, 0, sizes, strides, dtype);
}

void pool_slice(Frame& f, Slot out, Slot pool, int64_t offset, Ints sizes, Ints strides, DType dtype) {
  tensor_at(f, out) = window(tensor_at(f, pool), offset, sizes, strides, dtype);
}

void copy(Frame& f, Slot to, Slot from) {
  const ObservedLine observed(f, "aten::copy_");
  copy(tensor_at(f, to), tensor_at(f, from));
}
void alias(Frame& f, Slot out, Slot from) { tensor_at(f, out) = Tensor(tensor_at(f, from)); }
void move(Frame& f, Slot out, Slot from) {
  Tensor tensor = std::move(tensor_at(f, from));
  tensor_at(f, from) = Tensor{};
  tensor_at(f, out) = std::move(tensor);
}
void drop(Frame& f, Slot slot) { tensor_at(f, slot) = Tensor{}; }

bool defined(Frame& f, Slot slot) { return tensor_at(f, slot).is_defined(); }
int64_t size(Frame& f, Slot slot, int64_t dim) { return tensor_at(f, slot).sizes.at(size_t(dim)); }
int64_t stride(Frame& f, Slot slot, int64_t dim) { return tensor_at(f, slot).strides.at(size_t(dim)); }
int64_t storage_offset(Frame& f, Slot slot) { return tensor_at(f, slot).offset; }
int64_t item_int(Frame& f, Slot slot) {
  return use_item(f, slot, [](auto value) { return int64_t(value); });
}
double item_float(Frame& f, Slot slot) {
  return use_item(f, slot, [](auto value) { return double(value); });
}
bool item_bool(Frame& f, Slot slot) {
  return use_item(f, slot, [](auto value) { return value != 0; });
}
void* data_ptr(Frame& f, Slot slot) { return tensor_at(f, slot).data(); }
void bump_version(Frame&, Slot) {}
void enter_range(Frame&, const char*) {}
void exit_range(Frame&) {}

void check_layout(Frame& f, Slot slot, const char* name, Ints sizes, Ints strides, DType dtype, Device& device,
                  const char* operator_name) {
  const Tensor& tensor = tensor_at(f, slot);
  const size_t rank = tensor.sizes.size();
  if (tensor.is_defined() && tensor.dtype == dtype && tensor.memory->device == device.name &&
      checks::has_sizes(sizes, tensor.sizes.data(), rank) &&
      (tensor.count() == 0 || checks::has_strides(strides, tensor.sizes.data(), tensor.strides.data(), rank))) {
    return;
  }
  const std::string got = tensor.is_defined() ? checks::describe(layout_of(tensor)) : "None";
  checks::fail_layout(name, operator_name, {dtype, sizes.size(), sizes.begin(), strides.begin(), device.name}, got);
}

void check_rank(Frame& f, Slot slot, const char* name, int64_t rank) {
  const Tensor& tensor = tensor_at(f, slot);
  if (tensor.is_defined() && int64_t(tensor.sizes.size()) == rank) return;
  checks::fail_rank(name, rank, tensor.is_defined() ? checks::describe(layout_of(tensor)) : "None");
}

void check_alignment(Frame& f, Slot slot, const char* name, int64_t alignment) {
  checks::check_alignment(name, tensor_at(f, slot).data(), alignment);
}

void fail_assert(Frame&, const char* message, const char* error, const int64_t* shown) {
  checks::fail_assert(message, error, shown);
}

// Stands in for functions that the manifest of a program for this engine rules out.
template <class Result, class... Arguments> Result unavailable(Frame&, Arguments...) {
  throw Failure("RuntimeError", "the program needs libtorch, which its file does not say. Save it again");
}

}  // namespace

std::shared_ptr<const Memory> allocate(int64_t bytes) {
  Memory memory;
  memory.bytes = bytes;
  if (bytes > 0) {
    const size_t rounded = (size_t(bytes) + alignment - 1) / alignment * alignment;
    memory.owner = std::shared_ptr<void>(std::aligned_alloc(alignment, rounded), std::free);
    if (memory.owner == nullptr) throw std::bad_alloc();
    memory.start = static_cast<char*>(memory.owner.get());
  }
  return std::make_shared<const Memory>(std::move(memory));
}

int64_t extent(const int64_t* sizes, const int64_t* strides, size_t rank, int64_t item_bytes) {
  int64_t last = 0;
  bool overflows = false;
  for (size_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0) return 0;
    int64_t step = 0;
    overflows |= __builtin_mul_overflow(sizes[i] - 1, strides[i], &step) || __builtin_add_overflow(last, step, &last);
  }
  int64_t bytes = 0;
  overflows |= __builtin_add_overflow(last, 1, &last) || __builtin_mul_overflow(last, item_bytes, &bytes);
  if (overflows) throw Failure("RuntimeError", "a tensor has more bytes than 64 bits count");
  return bytes;
}

void copy(const Tensor& to, const Tensor& from) {
  const int64_t item = to.item_bytes(), bytes = to.count() * item;
  if (bytes > 0 && is_contiguous(to) && is_contiguous(from)) {
    std::memmove(to.data(), from.data(), size_t(bytes));
    return;
  }
  for_each_element(to, from, [&](char* target, const char* source) { std::memcpy(target, source, size_t(item)); });
}

Tensor window(const Tensor& base, int64_t distance, Ints sizes, Ints strides, DType dtype) {
  Tensor result{base.memory, dtype, copied(sizes), copied(strides), 0};
  const int64_t item = result.item_bytes(), start = base.offset * base.item_bytes() + distance;
  if (start < 0 || start % item != 0) {
    throw Failure("RuntimeError", "byte " + std::to_string(start) + " cannot hold elements of " + std::to_string(item) + " bytes");
  }
  const int64_t needed = start + extent(sizes.begin(), strides.begin(), sizes.size(), item);
  if (needed > base.memory->bytes) {
    throw Failure("RuntimeError", "a tensor that ends at byte " + std::to_string(needed) + " does not fit memory of " +
                                      std::to_string(base.memory->bytes));
  }
  result.offset = start / item;
  return result;
}

const Functions functions = {
    .call = unavailable,
    .empty_strided = empty_strided,
    .view = view,
    .reuse = reuse,
    .pool_slice = pool_slice,
    .copy = copy,
    .alias = alias,
    .move = move,
    .drop = drop,
    .alias_list = unavailable,
    .move_list = unavailable,
    .drop_list = unavailable,
    .element = unavailable,
    .element_int = unavailable,
    .element_float = unavailable,
    .element_bool = unavailable,
    .defined = defined,
    .size = size,
    .stride = stride,
    .storage_offset = storage_offset,
    .item_int = item_int,
    .item_float = item_float,
    .item_bool = item_bool,
    .data_ptr = data_ptr,
    .bump_version = bump_version,
    .launch = unavailable,
    .replay = unavailable,
    .save_random_state = unavailable,
    .restore_random_state = unavailable,
    .exchange_random_state = unavailable,
    .enter_device = unavailable,
    .enter_stream = unavailable,
    .exit_device = unavailable,
    .enter_range = enter_range,
    .exit_range = exit_range,
    .check_layout = check_layout,
    .check_rank = check_rank,
    .check_alignment = check_alignment,
    .fail_assert = fail_assert,
};

}  // namespace fxwrap::cpu
