// The C interface of fxwrap/runtime.h.
#include <algorithm>
#include <cstring>
#include <new>

#include "cpu/engine.h"
#include "host/code.h"
#include "host/model.h"

struct FxwrapError {
  std::string kind, message;
};

namespace {

using fxwrap::Failure;
using fxwrap::host::NamedTensor;

// Calls a function; returns its exception as an error.
template <class Function> FxwrapError* guarded(const Function& function) {
  try {
    function();
    return nullptr;
  } catch (const Failure& failure) {
    return new FxwrapError{failure.kind(), failure.what()};
  } catch (const std::bad_alloc&) {
    return new FxwrapError{"MemoryError", "there is not enough memory"};
  } catch (const std::exception& failure) {
    return new FxwrapError{"RuntimeError", failure.what()};
  }
}

// The options of this version from those that the caller was compiled with. Newer fields are zero.
template <class Options> Options options_of(const Options* options) {
  Options result{};
  if (options != nullptr) std::memcpy(&result, options, std::min(options->size, sizeof result));
  return result;
}

// Deletes the tensors of a call that it has not consumed.
class ConsumedValues {
 public:
  ConsumedValues(FxwrapValue* values, int64_t count) : values_(values), count_(count) {}
  ~ConsumedValues() {
    for (int64_t i = 0; i < count_; ++i) {
      if (values_[i].kind == FXWRAP_DLPACK) fxwrap_value_delete(&values_[i]);
    }
  }
  ConsumedValues(const ConsumedValues&) = delete;
  ConsumedValues& operator=(const ConsumedValues&) = delete;

 private:
  FxwrapValue* values_;
  int64_t count_;
};

}  // namespace

const char* fxwrap_error_kind(const FxwrapError* error) { return error->kind.c_str(); }
const char* fxwrap_error_message(const FxwrapError* error) { return error->message.c_str(); }
void fxwrap_error_delete(FxwrapError* error) { delete error; }

FxwrapError* fxwrap_open(const char* path, const FxwrapOpenOptions* options, FxwrapModel** model) {
  return fxwrap_open_linked(nullptr, path, options, model);
}

FxwrapError* fxwrap_open_linked(const FxwrapProgram* program, const char* path, const FxwrapOpenOptions* options,
                                FxwrapModel** model) {
  return guarded([&] {
    const FxwrapOpenOptions chosen = options_of(options);
    const auto* linked = reinterpret_cast<const fxwrap::Program*>(program);
    auto saved = std::make_shared<const fxwrap::host::SavedProgram>(path, chosen, linked);
    if (chosen.threads > 0) saved->engine->set_threads(chosen.threads);
    auto constants = std::make_shared<const fxwrap::host::ConstantSet>();
    if (saved->has_constants) {
      constants = fxwrap::host::load_saved(saved->archive, saved->layout, *saved->engine, chosen.copy_constants != 0);
    }
    *model = new FxwrapModel(std::move(saved), std::move(constants));
  });
}

FxwrapError* fxwrap_share(const FxwrapModel* model, FxwrapModel** instance) {
  return guarded([&] { *instance = model->share().release(); });
}

void fxwrap_close(FxwrapModel* model) { delete model; }

const char* fxwrap_name(const FxwrapModel* model) { return model->saved().name.c_str(); }
const char* fxwrap_metadata(const FxwrapModel* model) { return model->saved().metadata.c_str(); }
int64_t fxwrap_input_count(const FxwrapModel* model) { return model->saved().inputs.count(); }
int64_t fxwrap_output_count(const FxwrapModel* model) { return model->saved().outputs.count(); }
int64_t fxwrap_constant_count(const FxwrapModel* model) { return model->saved().constants.count(); }
const FxwrapLeaf* fxwrap_input(const FxwrapModel* model, int64_t index) { return model->saved().inputs.at(index); }
const FxwrapLeaf* fxwrap_output(const FxwrapModel* model, int64_t index) { return model->saved().outputs.at(index); }
const FxwrapLeaf* fxwrap_constant(const FxwrapModel* model, int64_t index) { return model->saved().constants.at(index); }
int64_t fxwrap_input_index(const FxwrapModel* model, const char* name) { return model->saved().inputs.index_of(name); }
int64_t fxwrap_symbol_count(const FxwrapModel* model) { return model->saved().symbols.count(); }
const FxwrapSymbol* fxwrap_symbol(const FxwrapModel* model, int64_t index) { return model->saved().symbols.at(index); }

FxwrapError* fxwrap_run(const FxwrapModel* model, const FxwrapRunOptions* options, FxwrapValue* inputs,
                        int64_t input_count, FxwrapValue* outputs, int64_t output_count) {
  const ConsumedValues consumed(inputs, input_count);
  return guarded([&] {
    const FxwrapRunOptions chosen = options_of(options);
    model->run(&chosen, inputs, input_count, outputs, output_count);
  });
}

void fxwrap_value_delete(FxwrapValue* value) {
  if (value->kind == FXWRAP_DLPACK) fxwrap::cpu::engine().delete_value(*value);
  if (value->kind == FXWRAP_TENSOR) fxwrap::host::torch_engine().delete_value(*value);
}

FxwrapError* fxwrap_load_constants(FxwrapModel* model, const char* const* names, FxwrapValue* tensors, int64_t count) {
  const ConsumedValues consumed(tensors, count);
  return guarded([&] {
    std::vector<NamedTensor> named;
    for (int64_t i = 0; i < count; ++i) {
      named.push_back({names[i], model->saved().engine->import_tensor(tensors[i], names[i])});
    }
    model->load_constants(named);
  });
}

FxwrapError* fxwrap_load_constants_file(FxwrapModel* model, const char* path) {
  return guarded([&] { model->load_constants(fxwrap::host::read_tensor_file(path, *model->saved().engine)); });
}
