// The arguments and results of a call site in the form that calls use: converted once from Arg by the schema's types.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Scalar.h>

#include <vector>

#include "bridge/frame.h"

namespace fxwrap {

// One argument. Constants are converted when the site is prepared; the rest is read from the frame at each call.
struct Value {
  enum class Source : uint8_t { Constant, Tensor, Int, Float, Bool, List, DynamicList };
  Source source = Source::Constant;
  int32_t index = -1;        // slot or symbol
  c10::TypePtr type;         // the schema's type without Optional; for a List the element's type
  std::vector<Value> items;  // of a List

  // A constant, and the same in the forms that typed calls take.
  c10::IValue constant;
  at::Tensor tensor;
  at::Scalar scalar;
  std::vector<int64_t> integers;

  bool is_none() const { return source == Source::Constant && constant.isNone(); }
};

// Where one result goes: a slot, a symbol, nowhere, or a list of these; a list of any length as a whole.
struct Result {
  Arg::Kind kind = Arg::None;
  int32_t index = -1;
  std::vector<Result> items;
};

// Errors (a wrong kind, too many arguments, an unknown name) name the operator and argument; they are RuntimeErrors.
std::vector<Value> prepare_arguments(const c10::FunctionSchema& schema, const Arg* data, int64_t size);
std::vector<Result> prepare_results(const c10::FunctionSchema& schema, const Arg* data, int64_t size);

inline const at::Tensor& read_tensor(const Frame& f, const Value& value) {
  return value.source == Value::Source::Tensor ? tensor_at(f, value.index) : value.tensor;
}
c10::IValue read_value(const Frame& f, const Value& value);
at::Scalar read_scalar(const Frame& f, const Value& value);
at::Tensor number_tensor(const at::Scalar& scalar);
void store_result(Frame& f, const Result& result, c10::IValue value);

}  // namespace fxwrap
