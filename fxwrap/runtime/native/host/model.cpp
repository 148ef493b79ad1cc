#include "host/model.h"

#include <dlfcn.h>

#include <charconv>

#include "host/code.h"
#include "engine/dtypes.h"

namespace fxwrap::host {
namespace {

// The text of a number or an expression; "" for null.
std::string text_of(const Json& number) {
  if (number.is(Json::Kind::null)) return "";
  if (number.is(Json::Kind::real)) return std::to_string(number.real());
  return number.is(Json::Kind::string) ? number.string() : std::to_string(number.integer());
}

std::string text_or_empty(const Json& entry, const char* name) {
  const Json* value = entry.find(name);
  return value == nullptr || value->is(Json::Kind::null) ? "" : value->string();
}

std::vector<std::string> texts_of(const Json& entry, const char* name) {
  std::vector<std::string> texts;
  const Json* items = entry.find(name);
  if (items == nullptr) return texts;
  for (const Json& item : items->items()) texts.push_back(text_of(item));
  return texts;
}

std::vector<int64_t> integers_of(const Json& entry, const char* name) {
  std::vector<int64_t> integers;
  for (const Json& item : entry.at(name).items()) integers.push_back(item.integer());
  return integers;
}

std::vector<std::string> texts_of(const std::vector<int64_t>& numbers) {
  std::vector<std::string> texts;
  for (int64_t number : numbers) texts.push_back(std::to_string(number));
  return texts;
}

}  // namespace

// --- leaves ----------------------------------------------------------------------------------------------------------

const char* const* Leaves::keep(const std::vector<std::string>& texts) {
  std::vector<const char*>& array = arrays_.emplace_back();
  for (const std::string& text : texts) array.push_back(keep(text));
  return array.data();
}

void Leaves::add(const Json& entry) {
  const std::string& kind = entry.at("kind").string();
  FxwrapLeaf leaf{keep(entry.at("name").string()), keep(kind), keep(text_or_empty(entry, "dtype")),
                  keep(text_or_empty(entry, "device")), keep(text_or_empty(entry, "ownership")), -1, nullptr, nullptr};
  if (kind == "tensor") {
    const std::vector<std::string> sizes = texts_of(entry, "shape");
    leaf.rank = int32_t(sizes.size());
    leaf.sizes = keep(sizes);
    leaf.strides = keep(texts_of(entry, "strides"));
  }
  leaves_.push_back(leaf);
}

void Leaves::add(const SavedConstant& constant) {
  const auto& [dtype, sizes, strides] = constant.layout;
  leaves_.push_back({keep(constant.name), "tensor", find_dtype(dtype)->name, keep(constant.device), "borrowed",
                     int32_t(sizes.size()), keep(texts_of(sizes)), keep(texts_of(strides))});
}

int64_t Leaves::index_of(std::string_view name) const {
  for (int64_t index = 0; index < count(); ++index) {
    if (leaves_[size_t(index)].name == name) return index;
  }
  return -1;
}

void Symbols::add(const std::string& name, const Json& entry) {
  const std::vector<Json>& range = entry.at("range").items();
  if (range.size() != 2) throw JsonError("the range of '" + name + "' has not two numbers");
  symbols_.push_back({keep(name), keep(text_of(range[0])), keep(text_of(range[1]))});
}

// --- fixed inputs ----------------------------------------------------------------------------------------------------

namespace {

bool is_number(const Json& value) {
  return value.is(Json::Kind::boolean) || value.is(Json::Kind::integer) || value.is(Json::Kind::real);
}

// The text of a value as Python's repr() has it.
std::string shown(const FxwrapValue& value) {
  if (value.kind == FXWRAP_BOOL) return value.as.integer != 0 ? "True" : "False";
  if (value.kind == FXWRAP_INT) return std::to_string(value.as.integer);
  if (value.kind != FXWRAP_FLOAT) return "a Tensor";
  char text[32];
  const std::string real(text, std::to_chars(text, text + sizeof text, value.as.real).ptr);
  return real.find_first_not_of("-0123456789") == std::string::npos ? real + ".0" : real;
}

}  // namespace

FixedInput::FixedInput(int64_t index, std::string name, const Json& constant) : index_(index), name_(std::move(name)) {
  if (constant.is(Json::Kind::real)) {
    value_.kind = FXWRAP_FLOAT, value_.as.real = constant.real();
  } else if (constant.is(Json::Kind::boolean)) {
    value_.kind = FXWRAP_BOOL, value_.as.integer = constant.boolean();
  } else {
    value_.kind = FXWRAP_INT, value_.as.integer = constant.integer();
  }
}

void FixedInput::apply(const std::string& program, FxwrapValue& value) const {
  if (value.kind == FXWRAP_NONE) {
    value = value_;
    return;
  }
  const bool is_real = value_.kind == FXWRAP_FLOAT;
  if (value.kind == value_.kind &&
      (is_real ? value.as.real == value_.as.real : value.as.integer == value_.as.integer)) {
    return;
  }
  throw Failure("InputError", "program '" + program + "': '" + name_ + "' is " + shown(value_) +
                                  " in this program, which was exported with it; got " + shown(value) +
                                  ". Export the model with the other value, or with a dynamic number");
}

// --- saved programs --------------------------------------------------------------------------------------------------

SavedProgram::SavedProgram(const std::string& path, const FxwrapOpenOptions& options, const Program* linked)
    : archive(path, options.trust == nullptr ? "full" : options.trust) {
  try {
    read(options, linked);
  } catch (const JsonError& failure) {
    throw archive.error(manifest_name, std::string("it does not describe the program: ") + failure.what());
  }
  archive.check_unread_entries();
}

void SavedProgram::read(const FxwrapOpenOptions& options, const Program* linked) {
  const Json& manifest = archive.manifest();
  const Json* native = manifest.at("binaries").find("native");
  if (native == nullptr) {
    throw archive.error("", "the file has no compiled code for the emitter 'cpp'",
                        "Save it again with target='native'");
  }
  const auto& obstacles = native->at("obstacles").items();
  if (!obstacles.empty()) {
    throw archive.error("", "the program does not run without Python: " + obstacles[0].string(),
                        "Save it with target='native', which lists all reasons");
  }
  engine = &find_engine(native->at("engine").string());
  program = &load(*native, linked);
  check_devices(options.device);
  load_libraries(options);
  check_operators(native->at("operators"));
  std::vector<std::string> devices;
  for (const Json& device : native->at("constant_devices").items()) devices.push_back(device.string());
  layout = read_layout(archive, devices);
  functions = load_functions(*native);
  if (int64_t(layout.size()) + (functions.empty() ? 0 : 1) != program->constants.size) {
    throw archive.error(manifest_name, "it describes other constants than the program has");
  }
  has_constants = manifest.at("constants").at("inside").boolean();
  const Json& signature = manifest.at("signature");
  for (const Json& entry : signature.at("inputs").items()) {
    const Json* constant = entry.find("constant");
    if (constant != nullptr && is_number(*constant)) {
      fixed_inputs.emplace_back(inputs.count(), entry.at("name").string(), *constant);
    }
    inputs.add(entry);
  }
  for (const Json& entry : signature.at("outputs").items()) outputs.add(entry);
  if (inputs.count() != program->inputs.size || outputs.count() != program->outputs.size) {
    throw archive.error(manifest_name, "it describes other inputs and outputs than the program has");
  }
  for (const SavedConstant& constant : layout) constants.add(constant);
  for (const auto& [symbol, entry] : manifest.at("symbols").members()) symbols.add(symbol, entry);
  name = manifest.at("name").string();
  metadata = std::string(archive.manifest_text());
}

const Program& SavedProgram::load(const Json& native, const Program* linked) const {
  const std::string& library = native.at("library").string();
  if (linked != nullptr) {
    if (linked->abi == abi_version) return *linked;
    throw archive.error("", "the linked program is of another version of fxwrap than the runtime", "Export both again");
  }
  if (library.empty()) {
    throw archive.error("", "the file has no compiled code for the emitter 'cpp'",
                        "Open it with fxwrap_open_linked and the program that was exported with it");
  }
  const std::string reason = incompatibility_reason(archive.manifest().at("binaries").at("target"));
  if (!reason.empty()) throw archive.error("", reason, "Save it again on this kind of machine");
  return load_code(archive, library);
}

std::vector<ReplayedFunction> SavedProgram::load_functions(const Json& native) const {
  std::vector<ReplayedFunction> result;
  for (const Json& entry : native.at("functions").items()) {
    ReplayedFunction function{entry.at("name").string(), entry.at("device").string(), &load(entry, nullptr),
                              entry.at("max_captures").integer(), integers_of(entry, "static_operands"),
                              integers_of(entry, "mutated_operands"), load_functions(entry)};
    if (function.program->constants.size != (function.functions.empty() ? 0 : 1)) {
      throw JsonError("it describes other functions than the program has");
    }
    result.push_back(std::move(function));
  }
  return result;
}

void SavedProgram::load_libraries(const FxwrapOpenOptions& options) const {
  for (int64_t i = 0; i < options.library_count; ++i) {
    if (dlopen(options.libraries[i], RTLD_NOW | RTLD_LOCAL) != nullptr) continue;
    throw archive.error("", std::string("the library of custom operators cannot be loaded: ") + dlerror(),
                        "Build it against the libtorch of this process, and pass its path");
  }
}

void SavedProgram::check_devices(const char* only) const {
  for (const Json& device : archive.manifest().at("devices").items()) {
    if (only != nullptr && device.string() != only) {
      throw archive.error("", "it was compiled for " + device.string() + ", not for " + only,
                          "Compile the model for that device, or open the file without the option");
    }
    const std::string reason = engine->missing_device(device.string());
    if (reason.empty()) continue;
    throw archive.error("", "it was compiled for " + device.string() + ", and " + reason,
                        "Run it on a machine with that device, or compile it for another");
  }
}

void SavedProgram::check_operators(const Json& operators) const {
  for (const Json& item : operators.items()) {
    const std::string& full = item.at("name").string();
    const Problem problem = engine->operator_problem(full, item.at("overload").string(), item.at("schema").string());
    if (!problem.reason.empty()) throw archive.error("", "its operator '" + full + "' " + problem.reason, problem.remedy);
  }
}

}  // namespace fxwrap::host

// --- instances -------------------------------------------------------------------------------------------------------

using fxwrap::host::ConstantSet;

FxwrapModel::FxwrapModel(std::shared_ptr<const fxwrap::host::SavedProgram> saved,
                         std::shared_ptr<const ConstantSet> constants)
    : saved_(std::move(saved)), constants_(std::move(constants)) {
  if (!saved_->functions.empty()) functions_ = saved_->engine->make_functions(saved_->functions);
}

std::shared_ptr<const ConstantSet> FxwrapModel::current_constants() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return constants_;
}

void FxwrapModel::run(const FxwrapRunOptions* options, FxwrapValue* inputs, int64_t input_count, FxwrapValue* outputs,
                      int64_t output_count) const {
  const std::shared_ptr<const ConstantSet> constants = current_constants();
  if (constants->pointers.size() != saved_->layout.size()) {
    throw fxwrap::host::missing_constants(saved_->archive.path(), saved_->layout);
  }
  for (const auto& fixed : saved_->fixed_inputs) {
    if (fixed.index() < input_count) fixed.apply(saved_->name, inputs[fixed.index()]);
  }
  saved_->engine->run(*saved_->program,
                     {options, inputs, input_count, constants->pointers.data(), functions_.get(), outputs, output_count});
}

void FxwrapModel::load_constants(const std::vector<fxwrap::host::NamedTensor>& tensors) {
  const std::lock_guard<std::mutex> loading(loading_);
  const auto previous = current_constants();
  auto next = fxwrap::host::replaced(saved_->archive.path(), saved_->layout, *previous, tensors, *saved_->engine);
  const std::lock_guard<std::mutex> lock(mutex_);
  constants_ = std::move(next);
}
