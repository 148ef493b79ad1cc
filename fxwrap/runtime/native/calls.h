// A prepared call of one operator: typed for the common schemas, through the boxed stack for all others.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>

#include "values.h"

namespace fxwrap {

// Immutable once made, shared by all threads, kept for the life of the process.
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
std::unique_ptr<PreparedCall> make_typed_call(const c10::OperatorHandle& handle, std::vector<Value>& arguments,
                                              std::vector<Result>& results);

std::unique_ptr<PreparedCall> prepare_call(const Site& site);

}  // namespace fxwrap
