// The operators of matmuls of groups of rows, for processes that have not imported fxwrap: twins of those of
// fxwrap/runtime/matmuls.py. The numbers of rows are in memory of the host.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <optional>
#include <vector>

#include "libraries/grouped_matmuls.h"
#include "libraries/operators.h"

namespace fxwrap {
namespace {

using at::Tensor;

Tensor to_host(const Tensor& tensor) {
  return tensor.to(tensor.options().device(at::kCPU), /*non_blocking=*/false, /*copy=*/true);
}

// Calls a function with the number, the begin and the end of each group.
template <class Function>
void for_each_group(const Tensor& ends, Function function) {
  const Tensor positions = ends.contiguous();
  const int32_t* end = positions.const_data_ptr<int32_t>();
  for (int64_t group = 0, begin = 0; group < positions.numel(); begin = end[group++]) function(group, begin, end[group]);
}

Tensor grouped_matmul(const Tensor& rows, at::TensorList matrices, bool transposed, const std::optional<Tensor>& biases,
                      const Tensor& ends) {
  const at::NoGradGuard no_grad;
  const std::vector<Tensor> items = matrices.size() == 1 ? matrices[0].unbind() : matrices.vec();
  Tensor result = at::empty({rows.size(0), items[0].size(transposed ? 0 : 1)}, rows.options());
  for_each_group(ends, [&](int64_t group, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const Tensor matrix = transposed ? items[group].t() : items[group], own = rows.slice(0, begin, end);
    Tensor part = result.slice(0, begin, end);
    if (biases.has_value()) {
      at::addmm_out(part, biases->select(0, group), own, matrix);
    } else {
      at::mm_out(part, own, matrix);
    }
  });
  return result;
}

Tensor grouped_products(const Tensor& left, const Tensor& right, const Tensor& ends) {
  const at::NoGradGuard no_grad;
  const Tensor results = at::empty({ends.size(0), left.size(0), right.size(1)}, left.options());
  for_each_group(ends, [&](int64_t group, int64_t begin, int64_t end) {
    Tensor result = results.select(0, group);
    at::mm_out(result, left.slice(1, begin, end), right.slice(0, begin, end));
  });
  return results;
}

}  // namespace

void register_grouped_matmuls() {
  define_operators("fxwrap::grouped_matmul", [](const auto& add) {
    add("to_host(Tensor tensor) -> Tensor", "to_host", &to_host);
    add("grouped_matmul(Tensor rows, Tensor[] matrices, bool transposed, Tensor? biases, Tensor ends) -> Tensor",
        "grouped_matmul", &grouped_matmul);
    add("grouped_products(Tensor left, Tensor right, Tensor ends) -> Tensor", "grouped_products", &grouped_products);
  });
}

}  // namespace fxwrap
