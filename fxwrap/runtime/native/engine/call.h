// The inputs and outputs of a call of the C interface, for every engine.
#pragma once

#include <string>

#include "engine/engine.h"

namespace fxwrap {

[[noreturn]] inline void fail_kind(const char* name, const char* expected, const FxwrapValue& value) {
  static constexpr const char* python_classes[] = {"NoneType", "Tensor", "Tensor", "int", "float", "bool"};
  const bool known = FXWRAP_NONE <= value.kind && value.kind <= FXWRAP_BOOL;
  throw Failure("InputError", "input '" + std::string(name) + "': expected " + expected + ", got " +
                                  (known ? python_classes[value.kind] : "a value of unknown kind"));
}

inline void check_counts(const Program& program, const EngineCall& call) {
  const std::string name = "program '" + std::string(program.name) + "' ";
  if (call.input_count != program.inputs.size) {
    throw Failure("InputError", name + "takes " + std::to_string(program.inputs.size) + " inputs, got " +
                                    std::to_string(call.input_count));
  }
  if (call.output_count != program.outputs.size) {
    throw Failure("InputError", name + "returns " + std::to_string(program.outputs.size) + " outputs, got room for " +
                                    std::to_string(call.output_count));
  }
}

// Sets an input of a frame; `set_tensor(input, value)` sets tensors.
template <class SetTensor>
void set_input(Frame& f, const Input& input, FxwrapValue& value, const SetTensor& set_tensor) {
  const Arg& place = input.value;
  switch (place.kind) {
    case Arg::Tensor:
    case Arg::OwnedTensor:
      if (value.kind == FXWRAP_NONE) return;
      if (value.kind != FXWRAP_DLPACK && value.kind != FXWRAP_TENSOR) fail_kind(input.name, "a torch.Tensor", value);
      set_tensor(input, value);
      return;
    case Arg::IntSymbolIndex:
      if (value.kind != FXWRAP_INT && value.kind != FXWRAP_BOOL) fail_kind(input.name, "an int", value);
      f.ints[place.integer] = value.as.integer;
      return;
    case Arg::BoolSymbolIndex:
      if (value.kind != FXWRAP_BOOL) fail_kind(input.name, "a bool", value);
      f.ints[place.integer] = value.as.integer != 0;
      return;
    case Arg::FloatSymbolIndex:
      if (value.kind != FXWRAP_INT && value.kind != FXWRAP_FLOAT) fail_kind(input.name, "a float", value);
      f.floats[place.integer] = value.kind == FXWRAP_INT ? double(value.as.integer) : value.as.real;
      return;
    case Arg::DynamicList:
    case Arg::Object:
      throw Failure("InputError", "input '" + std::string(input.name) + "': only Python can pass a generator or an object");
    default:
      return;
  }
}

inline FxwrapValue integer_value(FxwrapKind kind, int64_t integer) {
  FxwrapValue value{};
  value.kind = kind;
  value.as.integer = integer;
  return value;
}

inline FxwrapValue real_value(double real) {
  FxwrapValue value{};
  value.kind = FXWRAP_FLOAT;
  value.as.real = real;
  return value;
}

// An output of a frame; `get_tensor(slot)` exports tensors.
template <class GetTensor> FxwrapValue get_output(const Frame& f, const Arg& place, const GetTensor& get_tensor) {
  switch (place.kind) {
    case Arg::InputIndex:
    case Arg::DynamicList:
    case Arg::Object:
      throw Failure("InputError", "the program returns a generator or an object, which only Python can receive");
    case Arg::Tensor:
    case Arg::OwnedTensor: return get_tensor(place.integer);
    case Arg::Int: return integer_value(FXWRAP_INT, place.integer);
    case Arg::Bool: return integer_value(FXWRAP_BOOL, place.integer);
    case Arg::Float: return real_value(place.real);
    case Arg::IntSymbolIndex: return integer_value(FXWRAP_INT, f.ints[place.integer]);
    case Arg::BoolSymbolIndex: return integer_value(FXWRAP_BOOL, f.ints[place.integer] != 0);
    case Arg::FloatSymbolIndex: return real_value(f.floats[place.integer]);
    default: return FxwrapValue{};
  }
}

// Sets the outputs of a call, all or none.
template <class GetTensor>
void set_outputs(Engine& engine, const Program& program, const Frame& f, const EngineCall& call, const GetTensor& get_tensor) {
  int64_t done = 0;
  try {
    for (; done < program.outputs.size; ++done) {
      call.outputs[done] = get_output(f, program.outputs.data[done], get_tensor);
    }
  } catch (...) {
    while (done > 0) engine.delete_value(call.outputs[--done]);
    throw;
  }
}

}  // namespace fxwrap
