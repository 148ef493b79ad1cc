// An open saved program, and its instances.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "host/archive.h"
#include "host/constants.h"

namespace fxwrap::host {

// Inputs, outputs or constants as the C interface describes them.
class Leaves {
 public:
  // Entries of the manifest's signature. Throws JsonError.
  void add(const Json& entry);
  void add(const SavedConstant& constant);

  int64_t count() const { return int64_t(leaves_.size()); }
  const FxwrapLeaf* at(int64_t index) const { return 0 <= index && index < count() ? &leaves_[index] : nullptr; }
  int64_t index_of(std::string_view name) const;  // -1 for none

 private:
  const char* keep(const std::string& text) { return texts_.emplace_back(text).c_str(); }
  const char* const* keep(const std::vector<std::string>& texts);

  std::vector<FxwrapLeaf> leaves_;
  std::deque<std::string> texts_;  // whose addresses stay
  std::deque<std::vector<const char*>> arrays_;
};

// The symbols of a program with their ranges.
class Symbols {
 public:
  // An entry of the manifest. Throws JsonError.
  void add(const std::string& name, const Json& entry);

  int64_t count() const { return int64_t(symbols_.size()); }
  const FxwrapSymbol* at(int64_t index) const { return 0 <= index && index < count() ? &symbols_[index] : nullptr; }

 private:
  const char* keep(const std::string& text) { return texts_.emplace_back(text).c_str(); }

  std::vector<FxwrapSymbol> symbols_;
  std::deque<std::string> texts_;  // whose addresses stay
};

// An input that was a number when the model was exported, which the program is compiled for.
class FixedInput {
 public:
  // `constant` is the number.
  FixedInput(int64_t index, std::string name, const Json& constant);

  int64_t index() const { return index_; }
  // Replaces none at all by the number. Throws Failure for another value.
  void apply(const std::string& program, FxwrapValue& value) const;

 private:
  int64_t index_;
  std::string name_;
  FxwrapValue value_{};
};

// What instances share. Immutable.
struct SavedProgram {
  // `linked` is the program's code if the host has it, else null: the file has it then. Throws Failure.
  SavedProgram(const std::string& path, const FxwrapOpenOptions& options, const Program* linked);

  Archive archive;
  Engine* engine = nullptr;
  const Program* program = nullptr;
  std::vector<SavedConstant> layout;
  bool has_constants = false;  // in the file
  std::vector<ReplayedFunction> functions;
  Leaves inputs, outputs, constants;
  Symbols symbols;
  std::vector<FixedInput> fixed_inputs;
  std::string name, metadata;

 private:
  void read(const FxwrapOpenOptions& options, const Program* linked);
  const Program& load(const Json& native, const Program* linked) const;
  std::vector<ReplayedFunction> load_functions(const Json& native) const;
  void load_libraries(const FxwrapOpenOptions& options) const;
  void check_operators(const Json& operators) const;
  void check_devices(const char* only) const;
};

}  // namespace fxwrap::host

// An instance: a program with its own choice of constants.
struct FxwrapModel {
  // Throws Failure.
  explicit FxwrapModel(std::shared_ptr<const fxwrap::host::SavedProgram> saved,
                       std::shared_ptr<const fxwrap::host::ConstantSet> constants);

  const fxwrap::host::SavedProgram& saved() const { return *saved_; }
  std::unique_ptr<FxwrapModel> share() const { return std::make_unique<FxwrapModel>(saved_, current_constants()); }

  // Both throw Failure.
  void run(const FxwrapRunOptions* options, FxwrapValue* inputs, int64_t input_count, FxwrapValue* outputs,
           int64_t output_count) const;
  void load_constants(const std::vector<fxwrap::host::NamedTensor>& tensors);

 private:
  std::shared_ptr<const fxwrap::host::ConstantSet> current_constants() const;

  std::shared_ptr<const fxwrap::host::SavedProgram> saved_;
  mutable std::mutex mutex_;  // of `constants_`
  std::mutex loading_;        // one replacement at a time
  std::shared_ptr<const fxwrap::host::ConstantSet> constants_;
  fxwrap::TensorHandle functions_;  // captured graphs read the constants of one instance
};
