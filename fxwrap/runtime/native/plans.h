// Calls that a library keeps plans for, where torch's operators ask it the same questions each time.
#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "calls.h"

namespace fxwrap {

// Memory of a tensor's device that a library may use on the current stream. Up to `most_kept` bytes are kept for each
// stream, whose work is done in order, as torch keeps its libraries' workspaces; not in a graph that is being captured, which
// has memory of its own.
class Workspace {
 public:
  static constexpr size_t most_kept = 32 << 20;  // what torch gives cuBLAS on newer chips

  Workspace(size_t bytes, const at::Tensor& like);
  // Null for no bytes.
  operator void*() const { return memory_.defined() ? memory_.mutable_data_ptr() : nullptr; }

 private:
  at::Tensor memory_;
};

// A call that is left to its operator where no plan will do.
class PlannedCall : public PreparedCall {
 public:
  using PreparedCall::PreparedCall;
  void run(Frame& f) const final {
    if (!run_planned(f)) by_operator_->run(f);
  }
  void set_operator(std::unique_ptr<PreparedCall> by_operator) { by_operator_ = std::move(by_operator); }

 protected:
  // Returns false, and has done nothing, where only the operator will do.
  virtual bool run_planned(Frame& f) const = 0;

  // The tensor that an argument is; undefined for an index below 0.
  const at::Tensor& argument(const Frame& f, int index) const;
  // Stores the result: one that was made here, or that was given and is written now.
  void store(Frame& f, at::Tensor&& result, bool given) const;

 private:
  std::unique_ptr<PreparedCall> by_operator_;
};

// Plans for the problems that one call site met last. A `Plan` is made of a `Problem`, and says of which.
template <class Plan, class Problem>
class Plans {
 public:
  // Of this object and of the plans that it gives.
  std::mutex mutex;

  Plan& find(const Problem& problem) {
    for (const auto& plan : kept_) {
      if (plan->problem() == problem) return *plan;
    }
    auto made = std::make_unique<Plan>(problem);
    if (kept_.size() < most) return *kept_.emplace_back(std::move(made));
    oldest_ = (oldest_ + 1) % most;
    return *(kept_[oldest_] = std::move(made));
  }

 private:
  static constexpr size_t most = 8;
  std::vector<std::unique_ptr<Plan>> kept_;
  size_t oldest_ = 0;
};

// Whether a tensor is a GPU's memory and nothing else, of the dtype and device of another.
bool is_plain(const at::Tensor& tensor, const at::Tensor& like);

// Whether it is so, and has 16 bits a number.
bool is_plain_half(const at::Tensor& tensor);

// The largest power of two that divides an address, at most 256.
inline uint32_t alignment_of(const at::Tensor& tensor) {
  return 1u << std::countr_zero(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) | 256u);
}

// Each returns null for calls that are none of its own.
std::unique_ptr<PlannedCall> product_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                          const std::vector<Result>& results);
std::unique_ptr<PlannedCall> attention_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                            const std::vector<Result>& results);
std::unique_ptr<PlannedCall> convolution_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                              const std::vector<Result>& results);

}  // namespace fxwrap
