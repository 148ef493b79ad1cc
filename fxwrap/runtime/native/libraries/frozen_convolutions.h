// Convolutions with frozen weights: the operators of prepacked.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

namespace fxwrap {

// The convolution with the batch norm `norm` (weight, bias, mean and variance, or nothing) folded in, plus a residual.
at::Tensor frozen_convolution(const at::Tensor& image, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              std::vector<at::Tensor> norm, double epsilon, at::IntArrayRef stride, at::IntArrayRef padding,
                              at::IntArrayRef dilation, int64_t groups, const std::optional<at::Tensor>& residual,
                              std::string_view activation, at::IntArrayRef strides);

// That with a residual, in its memory.
void frozen_convolution_(at::Tensor& residual, const at::Tensor& image, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, std::vector<at::Tensor> norm, double epsilon,
                         at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                         std::string_view activation);

}  // namespace fxwrap
