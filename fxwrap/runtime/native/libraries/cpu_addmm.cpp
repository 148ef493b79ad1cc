// addmm on the CPU with less of the operator's work around its GEMM.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/record_function.h>

#include <cstring>

#include "libraries/plans.h"

namespace fxwrap {
namespace {

// The operator copies larger biases with several threads.
constexpr int64_t most_elements = 1 << 16;

bool is_plain_on_cpu(const at::Tensor& tensor, at::ScalarType dtype, int64_t rank) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == dtype &&
         tensor.dim() == rank && !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// `bias + left @ right`: the bias is written into the result's rows first, so that the operator, whose `self` is its result
// then, neither expands nor copies it.
class CpuAddmmCall final : public PlannedCall {
 public:
  CpuAddmmCall(int bias, int left, int right, std::vector<Value> arguments, std::vector<Result> results)
      : PlannedCall(std::move(arguments), std::move(results)), bias_(bias), left_(left), right_(right) {}

 private:
  bool run_planned(Frame& f) const override {
    const at::Tensor &bias = argument(f, bias_), &left = argument(f, left_), &right = argument(f, right_);
    if (!supports(bias, left, right)) return false;
    RECORD_FUNCTION("aten::addmm", c10::ArrayRef<const c10::IValue>{});
    const int64_t rows = left.size(0), columns = right.size(1);
    at::Tensor result = at::detail::empty_cpu({rows, columns}, left.scalar_type());
    const size_t row_bytes = size_t(columns) * result.itemsize();
    char* row = static_cast<char*>(result.mutable_data_ptr());
    for (int64_t i = 0; i < rows; ++i, row += row_bytes) {
      std::memcpy(row, bias.const_data_ptr(), row_bytes);
    }
    at::cpu::addmm_out(result, result, left, right);
    store(f, std::move(result), false);
    return true;
  }

  static bool supports(const at::Tensor& bias, const at::Tensor& left, const at::Tensor& right) {
    if (!left.defined() || (left.scalar_type() != at::kFloat && left.scalar_type() != at::kDouble)) return false;
    const at::ScalarType dtype = left.scalar_type();
    if (!is_plain_on_cpu(left, dtype, 2) || !is_plain_on_cpu(right, dtype, 2) || !is_plain_on_cpu(bias, dtype, 1)) return false;
    const int64_t rows = left.size(0), columns = right.size(1);
    const bool fits = left.size(1) == right.size(0) && bias.size(0) == columns && bias.stride(0) == 1;
    return fits && rows > 0 && columns > 1 && columns <= most_elements / rows && only_plain_tensors() &&
           !at::globalContext().deterministicAlgorithms();
  }

  const int bias_, left_, right_;
};

}  // namespace

std::unique_ptr<PlannedCall> cpu_addmm_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                            const std::vector<Result>& results) {
  if (schema.name() != "aten::addmm" || !schema.overload_name().empty()) return nullptr;
  const auto at = [&](const char* name) { return schema.argumentIndexWithName(name).value_or(-1); };
  for (const char* factor : {"alpha", "beta"}) {
    const Value& value = arguments[at(factor)];
    if (value.source != Value::Source::Constant || !value.scalar.equal(1)) return nullptr;
  }
  return std::make_unique<CpuAddmmCall>(at("self"), at("mat1"), at("mat2"), arguments, results);
}

}  // namespace fxwrap
