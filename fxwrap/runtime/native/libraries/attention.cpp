// Attention on GPUs without torch's operators and without gradients.
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "libraries/cudnn.h"
#include "libraries/plans.h"

namespace fxwrap {
namespace {

// The positions of the operator's tensors, whether it is causal, and its scale unless that is the default.
struct AttentionSchema {
  int query, key, value, bias;
  bool is_causal;
  std::optional<double> scale;
};

std::optional<AttentionSchema> attention_schema(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                            const std::vector<Result>& results) {
  if (schema.name() != "aten::_scaled_dot_product_cudnn_attention") return std::nullopt;
  const auto at = [&](const char* name) { return schema.argumentIndexWithName(name).value_or(-1); };
  const auto is_constant = [](const Value& value) { return value.source == Value::Source::Constant; };
  const auto is_off = [&](const char* name) {
    const Value& value = arguments[at(name)];
    return is_constant(value) && value.scalar.toDouble() == 0;
  };
  const bool only_first = std::all_of(results.begin() + 1, results.end(),
                                      [](const Result& result) { return result.kind == Arg::None; });
  const Value& scale = arguments[at("scale")];
  if (!only_first || !is_off("dropout_p") || !is_off("return_debug_mask") || !is_constant(arguments[at("is_causal")]) ||
      !is_constant(scale)) {
    return std::nullopt;
  }
  AttentionSchema form{at("query"), at("key"), at("value"), at("attn_bias"), !is_off("is_causal"), std::nullopt};
  if (!scale.is_none()) form.scale = scale.scalar.toDouble();
  return form;
}

class AttentionCall final : public PlannedCall {
 public:
  AttentionCall(const AttentionSchema& form, std::vector<Value> arguments, std::vector<Result> results)
      : PlannedCall(std::move(arguments), std::move(results)), form_(form) {}

 private:
  bool run_planned(Frame& f) const override {
    const at::Tensor &query = argument(f, form_.query), &key = argument(f, form_.key), &value = argument(f, form_.value),
                     &bias = argument(f, form_.bias);
    if (!can_be_planned(query, key, value, bias)) return false;
    RECORD_FUNCTION("aten::_scaled_dot_product_cudnn_attention", c10::ArrayRef<const c10::IValue>{});
    const cudnn::Attention problem = problem_of(query, key, value, bias);
    std::lock_guard<std::mutex> lock(plans_.mutex);
    cudnn::AttentionPlan& plan = plans_.find(problem);
    if (!plan.usable()) return false;
    at::Tensor result = at::empty_strided(problem.query, problem.result_strides, query.options());
    const Workspace workspace(plan.workspace(), query);
    memory_.assign({query.const_data_ptr(), key.const_data_ptr(), plan.scale()});
    if (bias.defined()) memory_.push_back(bias.const_data_ptr());
    if (problem.is_causal) memory_.push_back(plan.masked_score());
    memory_.insert(memory_.end(), {value.const_data_ptr(), result.mutable_data_ptr()});
    if (!plan.run(memory_, workspace)) return false;
    store(f, std::move(result), false);
    return true;
  }

  static bool can_be_planned(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const at::Tensor& bias) {
    if (!is_plain_half(query) || !is_plain(key, query) || !is_plain(value, query) || !only_plain_tensors() ||
        at::globalContext().deterministicAlgorithms()) {
      return false;
    }
    if (query.dim() != 4 || key.sizes() != value.sizes() || key.dim() != 4 || query.size(0) != key.size(0) ||
        query.size(1) != key.size(1) || query.size(3) != key.size(3) || query.numel() == 0 || key.numel() == 0) {
      return false;
    }
    const auto is_readable = [](const at::Tensor& tensor) {
      return tensor.stride(3) == 1 && alignment_of(tensor) >= 16;
    };
    if (!is_readable(query) || !is_readable(key) || !is_readable(value)) return false;
    if (!bias.defined()) return true;
    return is_plain(bias, query) && bias.dim() == 4 && is_readable(bias) && bias.size(3) == key.size(2) &&
           fits(bias.size(0), query.size(0)) && fits(bias.size(1), query.size(1)) && fits(bias.size(2), query.size(2));
  }

  static bool fits(int64_t size, int64_t expected) { return size == expected || size == 1; }

  cudnn::Attention problem_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const at::Tensor& bias) const {
    cudnn::Attention problem;
    problem.device = query.device().index();
    problem.is_bfloat16 = query.scalar_type() == at::kBFloat16;
    problem.has_bias = bias.defined();
    problem.is_causal = form_.is_causal;
    problem.scale = float(form_.scale ? *form_.scale : 1 / std::sqrt(double(query.size(3))));
    const auto take = [](const at::Tensor& from, cudnn::Sizes4& sizes, cudnn::Sizes4& strides) {
      std::copy_n(from.sizes().begin(), 4, sizes.begin());
      std::copy_n(from.strides().begin(), 4, strides.begin());
    };
    take(query, problem.query, problem.query_strides);
    take(key, problem.key, problem.key_strides);
    take(value, problem.value, problem.value_strides);
    // Dense, in the order of the query's dimensions.
    problem.result_strides = problem.query_strides;
    if (!query.is_non_overlapping_and_dense()) {
      const std::vector<int64_t> dense = at::infer_dense_strides(query.sizes(), query.strides());
      std::copy_n(dense.begin(), 4, problem.result_strides.begin());
    }
    if (!bias.defined()) return problem;
    take(bias, problem.bias, problem.bias_strides);
    const cudnn::Sizes4 bias_sizes = {query.size(0), bias.size(1), query.size(2), key.size(2)};
    for (int i = 0; i < 4; ++i) {
      if (problem.bias[i] != bias_sizes[i]) problem.bias_strides[i] = 0;
    }
    problem.bias = bias_sizes;
    return problem;
  }

  const AttentionSchema form_;
  mutable PlanCache<cudnn::AttentionPlan, cudnn::Attention> plans_;
  mutable std::vector<const void*> memory_;  // guarded by the plans' mutex
};

}  // namespace

std::unique_ptr<PlannedCall> attention_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                            const std::vector<Result>& results) {
  const std::optional<AttentionSchema> form = attention_schema(schema, arguments, results);
  return form ? std::make_unique<AttentionCall>(*form, arguments, results) : nullptr;
}

}  // namespace fxwrap
