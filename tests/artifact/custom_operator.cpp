// A library with a custom operator, for tests, in torch's stable interface.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

static torch::stable::Tensor scale(const torch::stable::Tensor& x, double factor) {
  torch::stable::Tensor y = torch::stable::clone(x);
  float* numbers = y.mutable_data_ptr<float>();
  for (int64_t i = 0; i < y.numel(); ++i) numbers[i] *= float(factor);
  return y;
}

STABLE_TORCH_LIBRARY(native_host_library, library) { library.def("scale(Tensor x, float factor) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(native_host_library, CPU, library) { library.impl("scale", TORCH_BOX(&scale)); }
