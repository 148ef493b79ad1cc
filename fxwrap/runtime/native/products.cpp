// Products of matrices on GPUs without torch's operators.
#include <ATen/Context.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/util/env.h>

#include <optional>

#include "cublas.h"
#include "plans.h"

namespace fxwrap {
namespace {

using cublas::Epilogue;
using cublas::Layout;
using cublas::Plan;
using cublas::Problem;

// Where an operator that multiplies matrices has its arguments.
struct Form {
  const char* name;
  Epilogue epilogue;
  int left, right;
  int bias = -1, out = -1;
};

std::optional<Form> form_of(const c10::FunctionSchema& schema, const std::vector<Value>& arguments) {
  const auto at = [&](const char* name) { return schema.argumentIndexWithName(name).value_or(-1); };
  const auto is_one = [&](const char* name) {
    const Value& value = arguments[at(name)];
    return value.source == Value::Source::Constant && value.scalar.toDouble() == 1;
  };
  if (schema.name() == "aten::mm") return Form{"aten::mm", Epilogue::none, at("self"), at("mat2"), -1, at("out")};
  const bool activated = schema.name() == "aten::_addmm_activation";
  if ((!activated && schema.name() != "aten::addmm") || !is_one("alpha") || !is_one("beta")) return std::nullopt;
  Form form{"aten::addmm", Epilogue::bias, at("mat1"), at("mat2"), at("self"), at("out")};
  if (activated) {
    const Value& gelu = arguments[at("use_gelu")];
    if (gelu.source != Value::Source::Constant) return std::nullopt;
    form.name = "aten::_addmm_activation";
    form.epilogue = gelu.constant.toBool() ? Epilogue::gelu_of_bias : Epilogue::relu_of_bias;
  }
  return form;
}

// Whether this process has torch tune its products.
bool are_tuned() {
  static const bool wanted = c10::utils::check_env("PYTORCH_TUNABLEOP_ENABLED").value_or(false);
  return wanted;
}

// Whether nothing was asked of torch that these products do not do.
bool is_as_usual(at::ScalarType type) {
  at::Context& context = at::globalContext();
  constexpr auto usual = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  const bool rounds = type == at::kBFloat16 ? context.allowBF16ReductionCuBLAS() == usual
                                            : context.allowFP16ReductionCuBLAS() == usual &&
                                                  !context.allowFP16AccumulationCuBLAS();
  return rounds && !context.deterministicAlgorithms() && !context._SMCarveout_EXPERIMENTAL().has_value();
}

// How a matrix lies; nothing where neither its rows nor its columns lie together.
std::optional<Layout> layout_of(const at::Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  const uint32_t alignment = alignment_of(matrix);
  if (matrix.stride(1) == 1 && matrix.stride(0) >= columns) return Layout{false, matrix.stride(0), alignment};
  if (matrix.stride(0) == 1 && matrix.stride(1) >= rows) return Layout{true, matrix.stride(1), alignment};
  return std::nullopt;
}

bool is_size(int64_t size) { return size > 1 && size <= INT32_MAX; }

class ProductCall final : public PlannedCall {
 public:
  ProductCall(const Form& form, std::vector<Value> arguments, std::vector<Result> results)
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
    const bool given = result.defined();
    if (!given) result = at::empty_strided({problem->rows, problem->columns}, {problem->columns, 1}, left.options());
    const Workspace workspace(plan.workspace(), left);
    const at::Tensor& bias = argument(f, form_.bias);
    const bool done = plan.run({left.const_data_ptr(), argument(f, form_.right).const_data_ptr(),
                                bias.defined() ? bias.const_data_ptr() : nullptr, result.mutable_data_ptr(),
                                workspace});
    if (!done) return false;
    store(f, std::move(result), given);
    return true;
  }

  // What is to be done, where the library can: into `result` where it is defined, else into new memory.
  std::optional<Problem> problem_of(const Frame& f, const at::Tensor& result) const {
    const at::Tensor &left = argument(f, form_.left), &right = argument(f, form_.right), &bias = argument(f, form_.bias);
    if (!is_plain_half(left) || !is_plain(right, left) || !only_plain_tensors()) return std::nullopt;
    if (left.dim() != 2 || right.dim() != 2 || left.size(1) != right.size(0)) return std::nullopt;
    Problem found;
    found.device = left.device().index();
    found.bfloat = left.scalar_type() == at::kBFloat16;
    found.epilogue = form_.epilogue;
    found.rows = left.size(0);
    found.terms = left.size(1);
    found.columns = right.size(1);
    if (!is_size(found.rows) || !is_size(found.terms) || !is_size(found.columns)) return std::nullopt;
    const auto left_layout = layout_of(left), right_layout = layout_of(right);
    if (!left_layout || !right_layout || !is_as_usual(left.scalar_type())) return std::nullopt;
    found.left = *left_layout;
    found.right = *right_layout;
    found.result = {false, found.columns, 256};
    if (form_.bias >= 0) {
      if (!is_plain(bias, left) || bias.dim() != 1 || bias.size(0) != found.columns || bias.stride(0) != 1) return {};
      found.bias_alignment = alignment_of(bias);
    }
    if (form_.out >= 0) {
      if (!is_plain(result, left) || result.dim() != 2 || result.size(0) != found.rows ||
          result.size(1) != found.columns) {
        return std::nullopt;
      }
      const auto result_layout = layout_of(result);
      if (!result_layout || result_layout->turned) return std::nullopt;
      found.result = *result_layout;
    }
    return found;
  }

  const Form form_;
  mutable Plans<Plan, Problem> plans_;
};

}  // namespace

std::unique_ptr<PlannedCall> product_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                          const std::vector<Result>& results) {
  const std::optional<Form> form = are_tuned() ? std::nullopt : form_of(schema, arguments);
  return form ? std::make_unique<ProductCall>(*form, arguments, results) : nullptr;
}

}  // namespace fxwrap
