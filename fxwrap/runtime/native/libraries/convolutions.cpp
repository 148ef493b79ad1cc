// Convolutions on GPUs without torch's operators.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <optional>

#include "libraries/cudnn.h"
#include "libraries/plans.h"

namespace fxwrap {
namespace {

// The parts of a call that are constant, and the positions of its tensor arguments.
struct ConvolutionSchema {
  int input, weight, out;
  int spatial;
  cudnn::Spatial stride{}, padding{}, dilation{};
};

std::optional<ConvolutionSchema> convolution_schema(const c10::FunctionSchema& schema, const std::vector<Value>& arguments) {
  if (schema.name() != "aten::convolution") return std::nullopt;
  const auto at = [&](const char* name) { return schema.argumentIndexWithName(name).value_or(-1); };
  const auto constant = [&](const char* name) -> const Value* {
    const Value& value = arguments[at(name)];
    return value.source == Value::Source::Constant ? &value : nullptr;
  };
  const Value *bias = constant("bias"), *transposed = constant("transposed"), *groups = constant("groups");
  if (bias == nullptr || !bias->is_none() || transposed == nullptr || transposed->constant.toBool() || groups == nullptr ||
      groups->constant.toInt() != 1) {
    return std::nullopt;
  }
  ConvolutionSchema form{at("input"), at("weight"), at("out"), 0};
  const auto take = [&](const char* name, cudnn::Spatial& into, int64_t least) {
    const Value* value = constant(name);
    if (value == nullptr || value->integers.size() < 2 || value->integers.size() > cudnn::most_spatial) return false;
    const auto& numbers = value->integers;
    if (form.spatial != 0 && size_t(form.spatial) != numbers.size()) return false;
    form.spatial = int(numbers.size());
    std::copy(numbers.begin(), numbers.end(), into.begin());
    return std::all_of(numbers.begin(), numbers.end(),
                       [&](int64_t number) { return number >= least && number <= INT32_MAX; });
  };
  const bool is_complete =
      take("stride", form.stride, 1) && take("padding", form.padding, 0) && take("dilation", form.dilation, 1);
  return is_complete ? std::optional(form) : std::nullopt;
}

// Whether torch would call cuDNN, with a plan of cuDNN's choice.
bool uses_default_cudnn_settings() {
  const at::Context& context = at::globalContext();
  return context.userEnabledCuDNN() && !context.benchmarkCuDNN() && !context.deterministicCuDNN() &&
         !context.deterministicAlgorithms() && context.allowTF32CuDNN();
}

class ConvolutionCall final : public PlannedCall {
 public:
  ConvolutionCall(const ConvolutionSchema& form, std::vector<Value> arguments, std::vector<Result> results)
      : PlannedCall(std::move(arguments), std::move(results)), form_(form) {}

 private:
  bool run_planned(Frame& f) const override {
    const at::Tensor &input = argument(f, form_.input), &weight = argument(f, form_.weight);
    at::Tensor result = argument(f, form_.out);
    const std::optional<cudnn::Convolution> problem = problem_of(input, weight, result);
    if (!problem) return false;
    RECORD_FUNCTION("aten::convolution", c10::ArrayRef<const c10::IValue>{});
    std::lock_guard<std::mutex> lock(plans_.mutex);
    cudnn::ConvolutionPlan& plan = plans_.find(*problem);
    if (!plan.usable()) return false;
    const bool is_out_variant = result.defined();
    if (!is_out_variant) {
      const cudnn::Sizes sizes = problem->result();
      result = at::empty(at::IntArrayRef(sizes.data(), problem->dimensions),
                         input.options().memory_format(format_of(*problem)));
    }
    const Workspace workspace(plan.workspace(), input);
    if (!plan.run({input.const_data_ptr(), weight.const_data_ptr(), result.mutable_data_ptr()}, workspace)) return false;
    store(f, std::move(result), is_out_variant);
    return true;
  }

  static at::MemoryFormat format_of(const cudnn::Convolution& problem) {
    if (!problem.channels_last) return at::MemoryFormat::Contiguous;
    return problem.dimensions == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  }

  // The problem of a call, if the library supports it; `result` is undefined for a new result.
  std::optional<cudnn::Convolution> problem_of(const at::Tensor& input, const at::Tensor& weight,
                                           const at::Tensor& result) const {
    const int dimensions = form_.spatial + 2;
    if (!is_plain_half(input) || !is_plain(weight, input) || !only_plain_tensors() || !uses_default_cudnn_settings() ||
        input.dim() != dimensions || weight.dim() != dimensions || input.size(1) != weight.size(1)) {
      return std::nullopt;
    }
    cudnn::Convolution problem;
    problem.device = input.device().index();
    problem.is_bfloat16 = input.scalar_type() == at::kBFloat16;
    problem.dimensions = dimensions;
    problem.channels_last = is_channels_last(input) || is_channels_last(weight);
    const at::MemoryFormat format = format_of(problem);
    if (!input.is_contiguous(format) || !weight.is_contiguous(format)) return std::nullopt;
    std::copy_n(input.sizes().begin(), dimensions, problem.input.begin());
    std::copy_n(weight.sizes().begin(), dimensions, problem.weight.begin());
    problem.stride = form_.stride;
    problem.padding = form_.padding;
    problem.dilation = form_.dilation;
    const cudnn::Sizes sizes = problem.result();
    if (!is_some(problem.input) || !is_some(problem.weight) || !is_some(sizes)) return std::nullopt;
    problem.input_alignment = alignment_of(input);
    problem.weight_alignment = alignment_of(weight);
    problem.result_alignment = 256;
    if (form_.out >= 0) {
      if (!is_plain(result, input) || result.sizes() != at::IntArrayRef(sizes.data(), dimensions) ||
          !result.is_contiguous(format)) {
        return std::nullopt;
      }
      problem.result_alignment = alignment_of(result);
    }
    return problem;
  }

  // By torch's rule, which tensors of one channel or one pixel may not fulfil.
  static bool is_channels_last(const at::Tensor& tensor) {
    return tensor.suggest_memory_format() != at::MemoryFormat::Contiguous;
  }

  // Whether there are elements, and 32 bits can count them.
  bool is_some(const cudnn::Sizes& sizes) const {
    int64_t count = 1;
    for (int i = 0; i < form_.spatial + 2; ++i) {
      if (sizes[i] <= 0 || sizes[i] > INT32_MAX / count) return false;
      count *= sizes[i];
    }
    return true;
  }

  const ConvolutionSchema form_;
  mutable PlanCache<cudnn::ConvolutionPlan, cudnn::Convolution> plans_;
};

}  // namespace

std::unique_ptr<PlannedCall> convolution_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                              const std::vector<Result>& results) {
  const std::optional<ConvolutionSchema> form = convolution_schema(schema, arguments);
  return form ? std::make_unique<ConvolutionCall>(*form, arguments, results) : nullptr;
}

}  // namespace fxwrap
