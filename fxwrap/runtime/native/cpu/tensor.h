// Tensors on the CPU, of programs that call no operators.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bridge/bridge.h"
#include "engine/checks.h"
#include "engine/dtypes.h"

namespace fxwrap::cpu {

// Bytes with their owner. `device` is not "cpu" for a tensor of the caller's that no program takes.
struct Memory {
  std::shared_ptr<void> owner;
  char* start = nullptr;
  int64_t bytes = 0;
  std::string device = "cpu";
};

struct Tensor {
  std::shared_ptr<const Memory> memory;  // null for an undefined tensor
  DType dtype = DType::uint8;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // in elements

  bool is_defined() const { return memory != nullptr; }
  int64_t item_bytes() const { return find_dtype(dtype)->bytes; }
  int64_t count() const {
    int64_t result = 1;
    for (int64_t size : sizes) result *= size;
    return result;
  }
  char* data() const { return memory->start + offset * item_bytes(); }
};

inline checks::Layout layout_of(const Tensor& tensor) {
  return {tensor.dtype, tensor.sizes.size(), tensor.sizes.data(), tensor.strides.data(), tensor.memory->device};
}

// New memory, aligned as torch's is, whose content is undefined. Throws std::bad_alloc.
std::shared_ptr<const Memory> allocate(int64_t bytes);

// The bytes from the first element of a layout to the last one. Throws Failure if they are more than 64 bits count.
int64_t extent(const int64_t* sizes, const int64_t* strides, size_t rank, int64_t item_bytes);

// A tensor that begins `distance` bytes after the first element of another one, in its memory. Throws Failure.
Tensor window(const Tensor& base, int64_t distance, Ints sizes, Ints strides, DType dtype);

// Copies the elements of a tensor to another of the same dtype and sizes.
void copy(const Tensor& to, const Tensor& from);

// Calls `visit(a, b)` for each element of two tensors of the same sizes, with its bytes in both.
template <class Visit> void for_each_element(const Tensor& first, const Tensor& second, const Visit& visit) {
  const size_t rank = first.sizes.size();
  const int64_t item = first.item_bytes();
  std::vector<int64_t> index(rank, 0);
  char *a = first.data(), *b = second.data();
  for (int64_t remaining = first.count(); remaining > 0; --remaining) {
    visit(a, b);
    for (size_t dim = rank; dim-- > 0;) {
      a += first.strides[dim] * item;
      b += second.strides[dim] * item;
      if (++index[dim] < first.sizes[dim]) break;
      a -= first.strides[dim] * first.sizes[dim] * item;
      b -= second.strides[dim] * first.sizes[dim] * item;
      index[dim] = 0;
    }
  }
}

// The functions for emitted programs.
extern const Functions functions;

inline Tensor& tensor_at(const Frame& f, int64_t slot) { return static_cast<Tensor*>(f.tensors)[slot]; }

}  // namespace fxwrap::cpu
