// Calls with less work around a library's function than torch's operators do, for GPUs by cached plans.
#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bridge/calls.h"

namespace fxwrap {

// Memory of a tensor's device that a library may use on the current stream. Up to `max_cached_bytes` bytes are cached per
// stream, whose work runs in order, as for torch's own workspaces; but not during a graph capture, which has its own memory.
class Workspace {
 public:
  static constexpr size_t max_cached_bytes = 32 << 20;  // as torch's workspace of cuBLAS on newer architectures

  Workspace(size_t bytes, const at::Tensor& like);
  // Null for no bytes.
  operator void*() const { return memory_.defined() ? memory_.mutable_data_ptr() : nullptr; }

 private:
  at::Tensor memory_;
};

// A call by a plan, or by its operator if no plan supports it.
class PlannedCall : public PreparedCall {
 public:
  using PreparedCall::PreparedCall;
  void run(Frame& f) const final {
    if (!run_planned(f)) fallback_->run(f);
  }
  void set_fallback(std::unique_ptr<PreparedCall> fallback) { fallback_ = std::move(fallback); }

 protected:
  // Returns false, without effects, if only the operator supports the call.
  virtual bool run_planned(Frame& f) const = 0;

  // A tensor argument; undefined for an index below 0.
  const at::Tensor& argument(const Frame& f, int index) const;
  // Stores the result: a new tensor, or the written out argument.
  void store(Frame& f, at::Tensor&& result, bool is_out_variant) const;

 private:
  std::unique_ptr<PreparedCall> fallback_;
};

// The plans of the last problems, of one call site by default. A `Plan` is constructed from a `Problem` and returns it.
template <class Plan, class Problem, size_t most = 8>
class PlanCache {
 public:
  // Guards this object and its plans.
  std::mutex mutex;

  Plan& find(const Problem& problem) {
    for (const auto& plan : plans_) {
      if (plan->problem() == problem) return *plan;
    }
    auto plan = std::make_unique<Plan>(problem);
    if (plans_.size() < most) return *plans_.emplace_back(std::move(plan));
    oldest_ = (oldest_ + 1) % most;
    return *(plans_[oldest_] = std::move(plan));
  }

 private:
  std::vector<std::unique_ptr<Plan>> plans_;
  size_t oldest_ = 0;
};

// Whether calls use plans in this process.
bool uses_library_plans();

// Whether a tensor is a plain strided GPU tensor with the dtype and device of another.
bool is_plain(const at::Tensor& tensor, const at::Tensor& like);

// Whether a tensor is a plain strided GPU tensor of 16-bit floats.
bool is_plain_half(const at::Tensor& tensor);

// The largest power of two that divides an address, at most 256.
inline uint32_t alignment_of(const at::Tensor& tensor) {
  return 1u << std::countr_zero(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) | 256u);
}

// Each returns null for calls of other operators.
std::unique_ptr<PlannedCall> matmul_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                          const std::vector<Result>& results);
std::unique_ptr<PlannedCall> cpu_addmm_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                            const std::vector<Result>& results);
std::unique_ptr<PlannedCall> attention_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                            const std::vector<Result>& results);
std::unique_ptr<PlannedCall> convolution_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                              const std::vector<Result>& results);

}  // namespace fxwrap
