// C++17 over fxwrap/runtime.h: RAII, exceptions, and at::Tensor where libtorch's headers are included.
//
//   fxwrap::Model model("model.fxw");
//   fxwrap::NamedValues inputs;
//   inputs["input_ids"] = fxwrap::Value(ids);
//   std::vector<fxwrap::Value> results = model.run_named(std::move(inputs));
//   at::Tensor logits = results[0].tensor();
#pragma once

#include <fxwrap/runtime.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if __has_include(<ATen/core/Tensor.h>)
#include <ATen/core/Tensor.h>
#define FXWRAP_HAS_TORCH 1
#endif

namespace fxwrap {

// An error of the runtime; `kind` is the class of the Python error.
class Error : public std::runtime_error {
 public:
  Error(std::string kind, const std::string& message) : std::runtime_error(message), kind_(std::move(kind)) {}
  const std::string& kind() const { return kind_; }

 private:
  std::string kind_;
};

// Throws an error that the C interface returned.
inline void check(FxwrapError* error) {
  if (error == nullptr) return;
  Error copy(fxwrap_error_kind(error), fxwrap_error_message(error));
  fxwrap_error_delete(error);
  throw copy;
}

// An input or output, which it owns.
class Value {
 public:
  Value() : value_{} {}
  explicit Value(DLManagedTensorVersioned* dlpack) : value_{} { value_.kind = FXWRAP_DLPACK, value_.as.dlpack = dlpack; }
  explicit Value(bool number) : value_{} { value_.kind = FXWRAP_BOOL, value_.as.integer = number; }
  explicit Value(int number) : Value(int64_t(number)) {}
  explicit Value(int64_t number) : value_{} { value_.kind = FXWRAP_INT, value_.as.integer = number; }
  explicit Value(double number) : value_{} { value_.kind = FXWRAP_FLOAT, value_.as.real = number; }
#ifdef FXWRAP_HAS_TORCH
  explicit Value(at::Tensor tensor) : value_{} {
    value_.kind = FXWRAP_TENSOR, value_.as.tensor = new at::Tensor(std::move(tensor));
  }
#endif
  Value(Value&& other) noexcept : value_(std::exchange(other.value_, FxwrapValue{})) {}
  Value& operator=(Value&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Value() {
    if (value_.kind == FXWRAP_DLPACK || value_.kind == FXWRAP_TENSOR) fxwrap_value_delete(&value_);
  }

  FxwrapKind kind() const { return FxwrapKind(value_.kind); }
  bool is_none() const { return value_.kind == FXWRAP_NONE; }
  int64_t integer() const { return expect(value_.kind == FXWRAP_INT || value_.kind == FXWRAP_BOOL), value_.as.integer; }
  double real() const { return expect(value_.kind == FXWRAP_FLOAT), value_.as.real; }
  DLManagedTensorVersioned* dlpack() const { return expect(value_.kind == FXWRAP_DLPACK), value_.as.dlpack; }
#ifdef FXWRAP_HAS_TORCH
  const at::Tensor& tensor() const {
    expect(value_.kind == FXWRAP_TENSOR);
    return *static_cast<const at::Tensor*>(value_.as.tensor);
  }
#endif

  // Gives the value to a C function that consumes it.
  FxwrapValue release() { return std::exchange(value_, FxwrapValue{}); }
  static Value own(FxwrapValue value) {
    Value result;
    result.value_ = value;
    return result;
  }

 private:
  static void expect(bool condition) {
    if (!condition) throw Error("TypeError", "the value is of another kind");
  }

  FxwrapValue value_;
};

// Inputs by the names of leaves: "input_ids", "cache.0.key".
using NamedValues = std::map<std::string, Value>;

// A stream for the calls of a model: a cudaStream_t and its device, "cuda:0".
struct Stream {
  const char* device;
  void* handle;
};

// A saved program. Calls and replacements of constants may be made from any number of threads at the same time.
class Model {
 public:
  explicit Model(const std::string& path, FxwrapOpenOptions options = {}) {
    options.size = sizeof options;
    check(fxwrap_open(path.c_str(), &options, &model_));
  }
  // A program that is linked into the host: `extern "C" const FxwrapProgram fxwrap_program;`
  Model(const FxwrapProgram& program, const std::string& path, FxwrapOpenOptions options = {}) {
    options.size = sizeof options;
    check(fxwrap_open_linked(&program, path.c_str(), &options, &model_));
  }
  Model(Model&& other) noexcept : model_(std::exchange(other.model_, nullptr)) {}
  Model& operator=(Model&& other) noexcept {
    std::swap(model_, other.model_);
    return *this;
  }
  ~Model() { fxwrap_close(model_); }

  // Another instance with the same code and weights.
  Model share() const {
    FxwrapModel* instance = nullptr;
    check(fxwrap_share(model_, &instance));
    return Model(instance);
  }

  std::string name() const { return fxwrap_name(model_); }
  std::string metadata() const { return fxwrap_metadata(model_); }
  std::vector<FxwrapLeaf> inputs() const { return listed(fxwrap_input, fxwrap_input_count(model_)); }
  std::vector<FxwrapLeaf> outputs() const { return listed(fxwrap_output, fxwrap_output_count(model_)); }
  std::vector<FxwrapLeaf> constants() const { return listed(fxwrap_constant, fxwrap_constant_count(model_)); }
  std::vector<FxwrapSymbol> symbols() const { return listed(fxwrap_symbol, fxwrap_symbol_count(model_)); }

  // Runs the program on the flat inputs, which it consumes, and returns its flat outputs. Tensors of the result are
  // at::Tensor with libtorch's headers, else DLPack tensors.
  std::vector<Value> run(std::vector<Value> inputs, const Stream* stream = nullptr) const {
    FxwrapRunOptions options{};
    options.size = sizeof options;
#ifdef FXWRAP_HAS_TORCH
    options.outputs_as_tensors = 1;
#endif
    if (stream != nullptr) options.has_stream = 1, options.device = stream->device, options.stream = stream->handle;
    return run(std::move(inputs), options);
  }

  std::vector<Value> run(std::vector<Value> inputs, const FxwrapRunOptions& options) const {
    std::vector<FxwrapValue> passed = released(inputs);
    std::vector<FxwrapValue> outputs(size_t(fxwrap_output_count(model_)), FxwrapValue{});
    FxwrapError* error = fxwrap_run(model_, &options, passed.data(), int64_t(passed.size()), outputs.data(),
                                    int64_t(outputs.size()));
    const std::vector<Value> borrowed = owned(passed);  // tensors that the call does not consume
    check(error);
    return owned(outputs);
  }

  // A call with inputs by name, in any order; those that are left out are None. Throws InputError for another name.
  std::vector<Value> run_named(NamedValues inputs, const Stream* stream = nullptr) const {
    std::vector<Value> values(size_t(fxwrap_input_count(model_)));
    for (auto& [name, value] : inputs) {
      const int64_t index = fxwrap_input_index(model_, name.c_str());
      if (index < 0) throw unexpected(name);
      values[size_t(index)] = std::move(value);
    }
    return run(std::move(values), stream);
  }

#ifdef FXWRAP_HAS_TORCH
  // A call with tensors only.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs) const {
    std::vector<Value> values;
    for (const at::Tensor& input : inputs) values.emplace_back(input);
    std::vector<at::Tensor> tensors;
    for (const Value& value : run(std::move(values))) tensors.push_back(value.is_none() ? at::Tensor() : value.tensor());
    return tensors;
  }
#endif

  // Replaces constants by name, all at once; calls that run go on with the old ones.
  void load_constants(std::vector<std::pair<std::string, Value>> constants) {
    std::vector<const char*> names;
    std::vector<Value> tensors;
    for (auto& [name, tensor] : constants) {
      names.push_back(name.c_str());
      tensors.push_back(std::move(tensor));
    }
    std::vector<FxwrapValue> passed = released(tensors);
    FxwrapError* error = fxwrap_load_constants(model_, names.data(), passed.data(), int64_t(passed.size()));
    const std::vector<Value> borrowed = owned(passed);
    check(error);
  }
  void load_constants(const std::string& path) { check(fxwrap_load_constants_file(model_, path.c_str())); }

  FxwrapModel* get() const { return model_; }

 private:
  explicit Model(FxwrapModel* model) : model_(model) {}

  Error unexpected(const std::string& input) const {
    std::string names;
    for (const FxwrapLeaf& leaf : inputs()) names += (names.empty() ? "" : ", ") + std::string(leaf.name);
    return Error("InputError", "program '" + name() + "': it takes no input '" + input + "'; its inputs are (" + names + ")");
  }

  template <class Item> std::vector<Item> listed(const Item* (*get)(const FxwrapModel*, int64_t), int64_t count) const {
    std::vector<Item> items;
    for (int64_t i = 0; i < count; ++i) items.push_back(*get(model_, i));
    return items;
  }

  static std::vector<FxwrapValue> released(std::vector<Value>& values) {
    std::vector<FxwrapValue> passed;
    for (Value& value : values) passed.push_back(value.release());
    return passed;
  }

  static std::vector<Value> owned(const std::vector<FxwrapValue>& values) {
    std::vector<Value> items;
    for (const FxwrapValue& value : values) items.push_back(Value::own(value));
    return items;
  }

  FxwrapModel* model_ = nullptr;
};

}  // namespace fxwrap
