// A host of saved programs without Python and torch, for tests: it runs the commands of its arguments, one after another.
//
//   library PATH | device NAME | trust KEY | copy | open PATH (with these options) | share | leaves | tensor DTYPE SIZES FILE | int N | float X | bool B | none | named NAME (of the next input) | run FILE
//   constant NAME DTYPE SIZES FILE | old_constant ... | replace | try_replace | replace_file PATH | operators
//   constant2 (of another version of DLPack)
//   libraries (that the process has loaded) | leak | race (defects that sanitizers report)
//   call_in_threads THREADS CALLS | open_in_threads THREADS PATH | alive
//
// Tensors are raw files; `run` writes each result to FILE.0, FILE.1... An error is printed and ends it with exit code 3.
#include <fxwrap/dlpack.h>
#include <fxwrap/fxwrap.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <thread>

namespace {

struct Owned {
  std::vector<char> bytes;
  std::vector<int64_t> sizes;
  DLManagedTensorVersioned tensor;
};

std::atomic<int> alive{0};

std::vector<int64_t> parse_sizes(const std::string& text) {
  std::vector<int64_t> sizes;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) sizes.push_back(std::atoll(part.c_str()));
  return sizes;
}

DLDataType parse_dtype(const std::string& name) {
  const uint8_t bits = uint8_t(std::atoi(name.c_str() + 1));
  switch (name[0]) {
    case 'f': return {kDLFloat, bits, 1};
    case 'b': return name == "bf16" ? DLDataType{kDLBfloat, 16, 1} : DLDataType{kDLBool, 8, 1};
    case 'i': return {kDLInt, bits, 1};
    case 'u': return {kDLUInt, bits, 1};
    default: return {kDLBool, 8, 1};
  }
}

DLManagedTensorVersioned* make_tensor(const std::string& dtype, const std::string& sizes, const std::string& file,
                                      uint32_t version = 1) {
  auto* owned = new Owned;
  std::ifstream stream(file, std::ios::binary);
  owned->bytes.assign(std::istreambuf_iterator<char>(stream), {});
  owned->sizes = parse_sizes(sizes);
  owned->tensor = {{version, 0}, owned, [](DLManagedTensorVersioned* self) {
    delete static_cast<Owned*>(self->manager_ctx);
    --alive;
  }, 0, {owned->bytes.data(), {kDLCPU, 0}, int32_t(owned->sizes.size()), parse_dtype(dtype), owned->sizes.data(), nullptr, 0}};
  ++alive;
  return &owned->tensor;
}

struct Numbers {
  int threads, calls;
};

struct Recipe {  // of an input, which each call consumes
  std::string kind, dtype, sizes, file;
};

fxwrap::Value make_value(const Recipe& recipe) {
  if (recipe.kind == "int") return fxwrap::Value(int64_t(std::atoll(recipe.file.c_str())));
  if (recipe.kind == "float") return fxwrap::Value(std::atof(recipe.file.c_str()));
  if (recipe.kind == "bool") return fxwrap::Value(recipe.file == "true");
  if (recipe.kind == "none") return fxwrap::Value();
  return fxwrap::Value(make_tensor(recipe.dtype, recipe.sizes, recipe.file, recipe.kind == "tensor2" ? 2 : 1));
}

// The elements of a tensor one after another, whatever its strides.
std::string bytes_of(const fxwrap::Value& value) {
  if (value.kind() != FXWRAP_DLPACK) return "";
  const DLTensor& tensor = value.dlpack()->dl_tensor;
  const char* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  const int64_t bytes = tensor.dtype.bits / 8;
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
  std::string result;
  for (int64_t element = 0; element < count; ++element) {
    int64_t offset = 0, left = element;
    for (int i = tensor.ndim - 1; i >= 0; left /= tensor.shape[i--]) offset += left % tensor.shape[i] * tensor.strides[i];
    result.append(data + offset * bytes, size_t(bytes));
  }
  return result;
}

class Driver {
 public:
  void run(std::vector<std::string> arguments) {
    for (size_t i = 0; i < arguments.size();) {
      const std::string command = arguments[i++];
      auto next = [&] { return arguments.at(i++); };
      if (command == "open") open(next());
      else if (command == "library") libraries_.push_back(next());
      else if (command == "device") device_ = next();
      else if (command == "trust") trust_ = next();
      else if (command == "copy") options_.copy_constants = 1;
      else if (command == "threads") options_.threads = std::atoi(next().c_str());
      else if (command == "share") models_.push_back(model().share());
      else if (command == "first") models_.erase(models_.begin() + 1, models_.end());
      else if (command == "leaves") print_leaves();
      else if (command == "tensor" || command == "tensor2") inputs_.push_back(Recipe{command, next(), next(), next()});
      else if (command == "int" || command == "float" || command == "bool") inputs_.push_back({command, "", "", next()});
      else if (command == "none") inputs_.push_back({command, "", "", ""});
      else if (command == "run") write_results(next());
      else if (command == "named") names_.push_back(next());
      else if (command == "lines") run_observed();
      else if (command == "constant") constants_.push_back(Recipe{next(), next(), next(), next()});
      else if (command == "constant2") constants_.push_back(Recipe{next(), next(), next(), next()}), version_ = 2;
      else if (command == "old_constant") old_constants_.push_back(Recipe{next(), next(), next(), next()});
      else if (command == "replace") replace(constants_), constants_.clear();
      else if (command == "try_replace") try_replace();
      else if (command == "replace_file") model().load_constants(next());
      else if (command == "call_in_threads") call_in_threads(Numbers{std::atoi(next().c_str()), std::atoi(next().c_str())});
      else if (command == "open_in_threads") open_in_threads(std::atoi(arguments.at(i).c_str()), arguments.at(i + 1)), i += 2;
      else if (command == "libraries") print_libraries();
      else if (command == "leak") leak();
      else if (command == "race") race();
      else if (command == "alive") std::printf("alive %d\n", alive.load());
      else throw std::runtime_error("unknown command " + command);
    }
  }

 private:
  fxwrap::Model& model() { return models_.back(); }

  void open(const std::string& path) {
    std::vector<const char*> libraries;
    for (const std::string& library : libraries_) libraries.push_back(library.c_str());
    options_.libraries = libraries.data();
    options_.library_count = int64_t(libraries.size());
    options_.device = device_.empty() ? nullptr : device_.c_str();
    options_.trust = trust_.empty() ? nullptr : trust_.c_str();
    models_.emplace_back(path, options_);
  }

  // The last constant has the version of DLPack that `constant2` selects.
  void try_replace() {
    try {
      replace(constants_);
    } catch (const fxwrap::Error& error) {
      std::printf("%s: %s\n", error.kind().c_str(), error.what());
    }
    constants_.clear();
  }

  std::vector<fxwrap::Value> call(const fxwrap::Model& model) {
    std::vector<fxwrap::Value> values;
    for (const Recipe& recipe : inputs_) values.push_back(make_value(recipe));
    if (names_.empty()) return model.run(std::move(values));
    fxwrap::NamedValues named;
    for (size_t i = 0; i < names_.size(); ++i) named[names_[i]] = std::move(values.at(i));
    return model.run_named(std::move(named));
  }

  void write_results(const std::string& file) {
    const std::vector<fxwrap::Value> results = call(model());
    for (size_t i = 0; i < results.size(); ++i) {
      std::ofstream(file + "." + std::to_string(i), std::ios::binary) << bytes_of(results[i]);
      if (results[i].kind() == FXWRAP_INT) std::printf("result %zu int %lld\n", i, (long long)results[i].integer());
    }
  }

  void run_observed() {
    FxwrapRunOptions options{};
    options.size = sizeof options;
    options.on_line = [](void*, const char* name, int32_t begins) { std::printf("%s %s\n", begins ? "begin" : "end", name); };
    std::vector<fxwrap::Value> values;
    for (const Recipe& recipe : inputs_) values.push_back(make_value(recipe));
    model().run(std::move(values), options);
  }

  void print_leaves() {
    for (const auto& [kind, leaves] : {std::pair{"input", model().inputs()}, {"output", model().outputs()},
                                       {"constant", model().constants()}}) {
      for (const FxwrapLeaf& leaf : leaves) {
        std::printf("%s %s %s %s %s %s", kind, leaf.name, leaf.kind, leaf.dtype, leaf.device, leaf.ownership);
        for (int i = 0; i < leaf.rank; ++i) std::printf(" %s/%s", leaf.sizes[i], leaf.strides[i]);
        std::printf("\n");
      }
    }
    for (const FxwrapSymbol& symbol : model().symbols()) std::printf("symbol %s %s %s\n", symbol.name, symbol.lower, symbol.upper);
  }

  void replace(const std::vector<Recipe>& recipes) {  // whose `kind` is the constant's name
    std::vector<std::pair<std::string, fxwrap::Value>> constants;
    for (const Recipe& recipe : recipes) {
      const uint32_t version = &recipe == &recipes.back() ? version_ : 1;
      constants.emplace_back(recipe.kind, fxwrap::Value(make_tensor(recipe.dtype, recipe.sizes, recipe.file, version)));
    }
    model().load_constants(std::move(constants));
  }

  // All threads call one model. If there are constants, another thread replaces them by the old ones and back meanwhile:
  // each result is that of all old or of all new ones.
  void call_in_threads(Numbers numbers) {
    const auto [threads, calls] = numbers;
    const std::string before = bytes_of(call(model())[0]);
    if (!constants_.empty()) replace(constants_);
    const std::string after = bytes_of(call(model())[0]);
    std::atomic<int> wrong{0}, left{threads}, done{0}, swaps{0};
    auto work = [&, calls = calls] {
      for (int i = 0; i < calls; ++i, ++done) {
        const std::string result = bytes_of(call(model())[0]);
        if (result != before && result != after) ++wrong;
      }
      --left;
    };
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) running.emplace_back(work);
    while (!constants_.empty() && left > 0) replace(++swaps % 2 ? old_constants_ : constants_);
    for (std::thread& thread : running) thread.join();
    std::printf("calls %d wrong %d differs %d swapped %d\n", done.load(), wrong.load(), int(before != after), int(swaps > 1));
  }

  static void print_libraries() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      const size_t slash = line.find('/');
      if (slash != std::string::npos && line.find(".so") != std::string::npos) std::printf("%s\n", line.c_str() + slash);
    }
  }

  static void leak() {
    auto* volatile lost = new std::vector<char>(100);
    std::printf("lost %zu\n", lost->size());
    lost = nullptr;
  }

  static void race() {
    static int shared = 0;
    std::thread first([] { ++shared; }), second([] { ++shared; });
    first.join(), second.join();
    std::printf("shared %d\n", shared);
  }

  void open_in_threads(int threads, const std::string& path) {
    std::atomic<int> wrong{0};
    const std::string expected = bytes_of(call(fxwrap::Model(path))[0]);
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) {
      running.emplace_back([&] {
        const fxwrap::Model opened(path);
        if (bytes_of(call(opened)[0]) != expected) ++wrong;
      });
    }
    for (std::thread& thread : running) thread.join();
    std::printf("opened %d wrong %d\n", threads, wrong.load());
  }

  std::vector<fxwrap::Model> models_;
  std::vector<Recipe> inputs_;
  std::vector<std::string> names_;  // of the inputs, in their order; empty for calls by position
  std::vector<Recipe> constants_, old_constants_;
  uint32_t version_ = 1;
  FxwrapOpenOptions options_{};
  std::vector<std::string> libraries_;
  std::string device_, trust_;
};

}  // namespace

int main(int count, char** arguments) {
  try {
    Driver().run({arguments + 1, arguments + count});
  } catch (const fxwrap::Error& error) {
    std::printf("%s: %s\nalive %d\n", error.kind().c_str(), error.what(), alive.load());
    return 3;
  }
}
