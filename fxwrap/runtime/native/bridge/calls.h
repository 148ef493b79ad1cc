// A prepared call of one operator: typed for the common schemas, through the boxed stack for all others.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

#include "bridge/values.h"

namespace fxwrap {

// Shared by all threads and never freed.
class PreparedCall {
 public:
  PreparedCall(std::vector<Value> arguments, std::vector<Result> results)
      : arguments_(std::move(arguments)), results_(std::move(results)) {}
  virtual ~PreparedCall() = default;
  virtual void run(Frame& f) const = 0;

  // The operator neither writes nor returns views of its arguments. Its kernels then run below ADInplaceOrView, as for
  // autograd: views that they create for themselves need neither version counters nor autograd's data.
  void set_functional() { is_functional_ = true; }
  bool is_functional() const { return is_functional_; }

  // How many operators had been deregistered before this call was prepared. The handle may be stale after the next one.
  void set_generation(uint64_t generation) { generation_ = generation; }
  uint64_t generation() const { return generation_; }

 private:
  bool is_functional_ = false;
  uint64_t generation_ = 0;

 protected:
  const std::vector<Value> arguments_;
  const std::vector<Result> results_;
};

// A call with the operator's C++ signature, or null if typed_calls.cpp does not list it.
std::unique_ptr<PreparedCall> make_typed_call(const c10::OperatorHandle& handle, const std::vector<Value>& arguments,
                                              const std::vector<Result>& results);

// A matmul, convolution or attention by a cached plan of its library, with the operator's call as fallback; for other
// operators the fallback itself (plans.h).
std::unique_ptr<PreparedCall> make_planned_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                         const std::vector<Result>& results, std::unique_ptr<PreparedCall> fallback);

std::unique_ptr<PreparedCall> prepare_call(const CallSite& site);

// Whether tensors may be created and used without an operator call: no mode or Python tensor must see the operator.
inline bool only_plain_tensors() { return !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python); }

}  // namespace fxwrap
