// What the runtime needs from a library of tensors and operators. The bridge implements it with libtorch, and cpu/engine.cpp
// without, for programs that call no operators.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../../../include/fxwrap/runtime.h"
#include "bridge/bridge.h"
#include "engine/failure.h"

namespace fxwrap {

using TensorHandle = std::shared_ptr<void>;  // a tensor of the engine

struct TensorLayout {
  DType dtype;
  std::vector<int64_t> sizes, strides;  // strides in elements
};

// Why something cannot be used, and what to do; no reason if it can.
struct Problem {
  std::string reason, remedy;
};

// A function of a program whose work is captured and replayed as a device graph.
struct ReplayedFunction {
  std::string name, device;
  const Program* program;
  int64_t max_captures;
  std::vector<int64_t> static_operands, mutated_operands;  // positions of tensors
  std::vector<ReplayedFunction> functions;                 // those that it replays itself
};

// One call of a program.
struct EngineCall {
  const FxwrapRunOptions* options;
  FxwrapValue* inputs;  // those that the call consumes are replaced by FXWRAP_NONE
  int64_t input_count;
  void* const* constants;  // the tensors of the handles
  void* functions;         // of `make_functions`, the constant after these; null for none
  FxwrapValue* outputs;
  int64_t output_count;
};

// Every function throws Failure. Thread-safe.
class Engine {
 public:
  virtual ~Engine() = default;

  // Memory that exists while `owner` does, copied if it is for another device than the CPU; and a tensor in it.
  virtual TensorHandle make_memory(const uint8_t* bytes, int64_t size, std::shared_ptr<void> owner,
                                   const std::string& device) = 0;
  virtual TensorHandle make_empty_memory(int64_t size, const std::string& device) = 0;
  virtual TensorHandle make_view(const TensorHandle& memory, int64_t start, const TensorLayout& layout) = 0;

  // A tensor that the caller passed, which is consumed as an input of a call is.
  virtual TensorHandle import_tensor(FxwrapValue& value, const std::string& name) = 0;
  virtual TensorLayout layout_of(const TensorHandle& tensor) = 0;
  // The tensor on a device and with these strides, copied only if necessary.
  virtual TensorHandle with_layout(const TensorHandle& tensor, const TensorLayout& layout, const std::string& device) = 0;
  virtual void copy(const TensorHandle& target, const TensorHandle& source) = 0;
  virtual bool equal(const TensorHandle& a, const TensorHandle& b) = 0;

  // Why an operator cannot be called by a program that was compiled with this schema of it.
  virtual Problem operator_problem(const std::string& name, const std::string& overload, const std::string& schema) = 0;
  // The constant by which a program reaches its replayed functions.
  virtual TensorHandle make_functions(const std::vector<ReplayedFunction>& functions) = 0;
  virtual std::string missing_device(const std::string& device) = 0;  // why a device cannot be used, or ""
  virtual void set_threads(int32_t count) = 0;
  virtual void run(const Program& program, const EngineCall& call) = 0;
  virtual void delete_value(FxwrapValue& value) = 0;
};

}  // namespace fxwrap

// The bridge's engine, for this version of the interface; null for another.
FXWRAP_EXPORT fxwrap::Engine* fxwrap_engine(int64_t abi);
