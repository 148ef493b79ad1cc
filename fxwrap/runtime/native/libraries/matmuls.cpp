// Matmuls on GPUs without torch's operators, and the operator of those that store the input of their GELU.
#include "libraries/matmuls.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <c10/util/env.h>

#include <optional>
#include <tuple>

#include "libraries/cublas.h"
#include "libraries/operators.h"
#include "libraries/plans.h"

namespace fxwrap {
namespace {

using cublas::Epilogue;
using cublas::Layout;
using cublas::Plan;
using cublas::Problem;

// The positions of a matmul operator's arguments.
struct MatmulSchema {
  const char* name;
  Epilogue epilogue;
  int left, right;
  int bias = -1, out = -1;
};

std::optional<MatmulSchema> matmul_schema(const c10::FunctionSchema& schema, const std::vector<Value>& arguments) {
  const auto at = [&](const char* name) { return schema.argumentIndexWithName(name).value_or(-1); };
  const auto is_one = [&](const char* name) {
    const Value& value = arguments[at(name)];
    return value.source == Value::Source::Constant && value.scalar.equal(1);
  };
  if (schema.name() == "aten::mm") return MatmulSchema{"aten::mm", Epilogue::none, at("self"), at("mat2"), -1, at("out")};
  const bool activated = schema.name() == "aten::_addmm_activation";
  if ((!activated && schema.name() != "aten::addmm") || !is_one("alpha") || !is_one("beta")) return std::nullopt;
  MatmulSchema form{"aten::addmm", Epilogue::bias, at("mat1"), at("mat2"), at("self"), at("out")};
  if (activated) {
    const Value& gelu = arguments[at("use_gelu")];
    if (gelu.source != Value::Source::Constant) return std::nullopt;
    form.name = "aten::_addmm_activation";
    form.epilogue = gelu.constant.toBool() ? Epilogue::gelu_bias : Epilogue::relu_bias;
  }
  return form;
}

// Whether torch tunes its matmuls in this process.
bool is_tunable_op_enabled() {
  static const bool enabled = c10::utils::check_env("PYTORCH_TUNABLEOP_ENABLED").value_or(false);
  return enabled;
}

// Whether torch's math settings are the ones that these matmuls follow.
bool uses_default_math_mode(at::ScalarType type) {
  at::Context& context = at::globalContext();
  constexpr auto usual = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  const bool rounds = type == at::kBFloat16 ? context.allowBF16ReductionCuBLAS() == usual
                                            : context.allowFP16ReductionCuBLAS() == usual &&
                                                  !context.allowFP16AccumulationCuBLAS();
  return rounds && !context.deterministicAlgorithms() && !context._SMCarveout_EXPERIMENTAL().has_value();
}

// The layout of a matrix; empty if neither its rows nor its columns are contiguous.
std::optional<Layout> layout_of(const at::Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  const uint32_t alignment = alignment_of(matrix);
  if (matrix.stride(1) == 1 && matrix.stride(0) >= columns) return Layout{false, matrix.stride(0), alignment};
  if (matrix.stride(0) == 1 && matrix.stride(1) >= rows) return Layout{true, matrix.stride(1), alignment};
  return std::nullopt;
}

bool is_size(int64_t size) { return size > 1 && size <= INT32_MAX; }

// The problem of a matmul into a new matrix, if the library supports its operands; an undefined bias is none.
std::optional<Problem> problem_of(Epilogue epilogue, const at::Tensor& left, const at::Tensor& right, const at::Tensor& bias) {
  if (!is_plain_half(left) || !is_plain(right, left)) return std::nullopt;
  if (left.dim() != 2 || right.dim() != 2 || left.size(1) != right.size(0)) return std::nullopt;
  Problem problem;
  problem.device = left.device().index();
  problem.is_bfloat16 = left.scalar_type() == at::kBFloat16;
  problem.epilogue = epilogue;
  problem.rows = left.size(0);
  problem.inner = left.size(1);
  problem.columns = right.size(1);
  if (!is_size(problem.rows) || !is_size(problem.inner) || !is_size(problem.columns)) return std::nullopt;
  const auto left_layout = layout_of(left), right_layout = layout_of(right);
  if (!left_layout || !right_layout || !uses_default_math_mode(left.scalar_type())) return std::nullopt;
  problem.left = *left_layout;
  problem.right = *right_layout;
  problem.result = {false, problem.columns, 256};
  if (bias.defined()) {
    if (!is_plain(bias, left) || bias.dim() != 1 || bias.size(0) != problem.columns || bias.stride(0) != 1) return {};
    problem.bias_alignment = alignment_of(bias);
  }
  return problem;
}

class MatmulCall final : public PlannedCall {
 public:
  MatmulCall(const MatmulSchema& form, std::vector<Value> arguments, std::vector<Result> results)
      : PlannedCall(std::move(arguments), std::move(results)), form_(form) {}

 private:
  bool run_planned(Frame& f) const override {
    const at::Tensor& left = argument(f, form_.left);
    at::Tensor result = argument(f, form_.out);
    const std::optional<Problem> problem = problem_of(f, result);
    if (!problem) return false;
    RECORD_FUNCTION(form_.name, c10::ArrayRef<const c10::IValue>{});
    std::lock_guard<std::mutex> lock(plans_.mutex);
    Plan& plan = plans_.find(*problem);
    if (!plan.usable()) return false;
    const bool is_out_variant = result.defined();
    if (!is_out_variant) {
      result = at::empty_strided({problem->rows, problem->columns}, {problem->columns, 1}, left.options());
    }
    const Workspace workspace(plan.workspace(), left);
    const at::Tensor& bias = argument(f, form_.bias);
    const bool done = plan.run({left.const_data_ptr(), argument(f, form_.right).const_data_ptr(),
                                bias.defined() ? bias.const_data_ptr() : nullptr, result.mutable_data_ptr(),
                                nullptr, workspace});
    if (!done) return false;
    store(f, std::move(result), is_out_variant);
    return true;
  }

  // The problem of a call, if the library supports it; `result` is undefined for a new result.
  std::optional<Problem> problem_of(const Frame& f, const at::Tensor& result) const {
    const at::Tensor& left = argument(f, form_.left);
    auto problem = fxwrap::problem_of(form_.epilogue, left, argument(f, form_.right), argument(f, form_.bias));
    if (!problem || !only_plain_tensors()) return std::nullopt;
    if (form_.out >= 0) {
      if (!is_plain(result, left) || result.dim() != 2 || result.size(0) != problem->rows ||
          result.size(1) != problem->columns) {
        return std::nullopt;
      }
      const auto result_layout = layout_of(result);
      if (!result_layout || result_layout->transposed) return std::nullopt;
      problem->result = *result_layout;
    }
    return problem;
  }

  const MatmulSchema form_;
  mutable PlanCache<Plan, Problem> plans_;
};

// --- matmuls that store the input of their GELU ---

// Both results by a plan; nothing if the library does not support the call, or only by slow kernels of unaligned rows.
std::optional<std::tuple<at::Tensor, at::Tensor>> run_fused(const at::Tensor& left, const at::Tensor& right, const at::Tensor& bias) {
  static auto& plans = *new PlanCache<Plan, Problem, 64>;  // never destroyed: the library may be unloaded before
  if (!uses_library_plans() || is_tunable_op_enabled()) return std::nullopt;
  const Epilogue epilogue = bias.defined() ? Epilogue::gelu_bias_and_input : Epilogue::gelu_and_input;
  const std::optional<Problem> problem = problem_of(epilogue, left, right, bias);
  const auto is_aligned = [](int64_t elements) { return elements % 8 == 0; };
  if (!problem || !is_aligned(problem->left.leading_dimension) || !is_aligned(problem->right.leading_dimension) ||
      !is_aligned(problem->columns)) {
    return std::nullopt;
  }
  std::lock_guard<std::mutex> lock(plans.mutex);
  Plan& plan = plans.find(*problem);
  if (!plan.usable()) return std::nullopt;
  at::Tensor result = at::empty({problem->rows, problem->columns}, left.options());
  at::Tensor input = at::empty({problem->rows, problem->columns}, left.options());
  const Workspace workspace(plan.workspace(), left);
  const bool done = plan.run({left.const_data_ptr(), right.const_data_ptr(), bias.defined() ? bias.const_data_ptr() : nullptr,
                              result.mutable_data_ptr(), input.mutable_data_ptr(), workspace});
  if (!done) return std::nullopt;
  return std::tuple(std::move(result), std::move(input));
}

// The twin of fxwrap/runtime/matmuls.py.
std::tuple<at::Tensor, at::Tensor> gelu_matmul(const at::Tensor& left, const at::Tensor& right,
                                               const std::optional<at::Tensor>& bias) {
  const at::NoGradGuard no_grad;
  if (auto results = run_fused(left, right, bias.value_or(at::Tensor()))) return *std::move(results);
  at::Tensor input = bias.has_value() ? at::addmm(*bias, left, right) : at::mm(left, right);
  return {at::gelu(input, "tanh"), input};
}

// Where the Python package defines the operator, this is its kernel for GPUs.
TORCH_LIBRARY_IMPL(fxwrap, CUDA, library) { library.impl("gelu_matmul", &gelu_matmul); }

}  // namespace

void register_gelu_matmul() {
  define_operators("fxwrap::gelu_matmul", [](const auto& add) {
    add("gelu_matmul(Tensor left, Tensor right, Tensor? bias) -> (Tensor, Tensor)", "gelu_matmul", &gelu_matmul);
  });
}

std::unique_ptr<PlannedCall> matmul_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                          const std::vector<Result>& results) {
  const std::optional<MatmulSchema> form = is_tunable_op_enabled() ? std::nullopt : matmul_schema(schema, arguments);
  return form ? std::make_unique<MatmulCall>(*form, arguments, results) : nullptr;
}

}  // namespace fxwrap
