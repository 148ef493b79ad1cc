// The operators for frozen weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "bridge/bridge.h"

namespace fxwrap {

// The functions of the operators.
struct PrepackedOperators {
  at::Tensor (*prepacked_linear)(const at::Tensor& left, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                 bool transposed, std::optional<int64_t> rows);
  at::Tensor (*prepacked_int8_linear)(const at::Tensor& rows, const at::Tensor& weight, bool transposed);
  at::Tensor (*biased_linear)(const at::Tensor& left, const at::Tensor& weight, const at::Tensor& bias, bool transposed);
  at::Tensor (*frozen_grouped_mm)(const at::Tensor& rows, std::vector<at::Tensor> matrices, bool transposed,
                                  const at::Tensor& ends);
  at::Tensor (*frozen_convolution)(const at::Tensor& image, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                   std::vector<at::Tensor> norm, double epsilon, at::IntArrayRef stride,
                                   at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                                   const std::optional<at::Tensor>& residual, std::string_view activation,
                                   at::IntArrayRef strides);
  void (*frozen_convolution_)(at::Tensor& residual, const at::Tensor& image, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, std::vector<at::Tensor> norm, double epsilon,
                              at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                              std::string_view activation);
};

FXWRAP_API const PrepackedOperators& prepacked_operators();

// Registers them with torch: beside those of fxwrap's Python package where that is imported.
FXWRAP_API void register_prepacked_operators();

}  // namespace fxwrap
