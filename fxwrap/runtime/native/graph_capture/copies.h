// Memory of a graph for the operands that are copied into it.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace fxwrap {

// A tensor on the memory of another, from its first element. It is not a view for autograd.
at::Tensor tensor_on(const at::Tensor& memory, at::IntArrayRef sizes, at::IntArrayRef strides);

// Memory for a copy of a tensor: the destination of the copy, and a view with the tensor's layout. Tensors with overlapping
// elements are copied as a contiguous range of memory.
std::pair<at::Tensor, at::Tensor> allocate_static_copy(const at::Tensor& item);

// The source of a copy: the tensor, or the contiguous range of memory that it covers.
at::Tensor copy_source(const at::Tensor& item, const at::Tensor& destination);

}  // namespace fxwrap
