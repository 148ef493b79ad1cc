// A prepared call of one operator: typed for the common schemas, through the boxed stack for all others.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

#include "values.h"

namespace fxwrap {

// Shared by all threads, and kept for the life of the process.
class PreparedCall {
 public:
  PreparedCall(std::vector<Value> arguments, std::vector<Result> results)
      : arguments_(std::move(arguments)), results_(std::move(results)) {}
  virtual ~PreparedCall() = default;
  virtual void run(Frame& f) const = 0;

 protected:
  const std::vector<Value> arguments_;
  const std::vector<Result> results_;
};

// A call with the operator's own C++ signature, or null if it is not one of those in typed_calls.cpp.
std::unique_ptr<PreparedCall> make_typed_call(const c10::OperatorHandle& handle, const std::vector<Value>& arguments,
                                              const std::vector<Result>& results);

// A product of matrices or a convolution that its library keeps plans for, and its operator for what no plan is for; the
// call of the operator alone where it is neither (plans.h).
std::unique_ptr<PreparedCall> with_plans(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                         const std::vector<Result>& results, std::unique_ptr<PreparedCall> by_operator);

std::unique_ptr<PreparedCall> prepare_call(const Site& site);

// Modes and Python tensors must see an operator; plain tensors may be made and used directly.
inline bool only_plain_tensors() { return !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python); }

}  // namespace fxwrap
