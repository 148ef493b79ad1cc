#include "host/code.h"

#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "cpu/engine.h"

namespace fxwrap::host {
namespace {

#ifndef FXWRAP_LINKED_ENGINE
constexpr const char* engine_library = "libfxwrap_bridge.so";

std::string folder_of_runtime() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&torch_engine), &info) == 0 || info.dli_fname == nullptr) return "";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

// The lines of the file beside the runtime, which its installation writes: the library itself is the same in every folder.
struct Target {
  std::string interface, machine;  // those that compiled programs must be for
  std::string torch_libraries;     // the folder of libtorch
};

const Target& installed_target() {
  static const Target result = [] {
    Target read;
    const std::string path = folder_of_runtime() + "libfxwrap_runtime.target";
    std::ifstream file(path);
    for (std::string* line : {&read.interface, &read.machine, &read.torch_libraries}) {
      if (!std::getline(file, *line)) {
        throw Failure("ImportError", "'" + path + "' is missing or damaged. Install the runtime again");
      }
    }
    return read;
  }();
  return result;
}

Engine& open_engine() {
  const std::string path = folder_of_runtime() + engine_library;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {  // a bridge of a wheel does not know the folder of libtorch
    dlopen((installed_target().torch_libraries + "/libtorch_cpu.so").c_str(), RTLD_LAZY | RTLD_GLOBAL);
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) throw Failure("ImportError", std::string("the runtime cannot load libtorch: ") + dlerror());
  auto* find = reinterpret_cast<Engine* (*)(int64_t)>(dlsym(library, "fxwrap_engine"));
  Engine* engine = find == nullptr ? nullptr : find(abi_version);
  if (engine == nullptr) {
    throw Failure("ImportError", "'" + path + "' is of another version of fxwrap than this runtime. Install both again");
  }
  return *engine;
}
#else
// A runtime that is linked with its program, in an exported project: the macro says whether with the bridge too.
Engine& open_engine() {
#if FXWRAP_LINKED_ENGINE
  return *fxwrap_engine(abi_version);
#else
  throw Failure("ImportError", "this host is built without libtorch");
#endif
}
#endif

bool has_loaded_torch() {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library != nullptr) dlclose(library);
  return library != nullptr;
}

std::set<std::string> words(std::istream& stream) {
  std::set<std::string> result;
  for (std::string word; stream >> word;) result.insert(word);
  return result;
}

std::set<std::string> processor_instructions() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream flags(line.substr(line.find(':') + 1));
    return words(flags);
  }
  return {};
}

std::vector<int> version_numbers(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, '.');) numbers.push_back(std::atoi(part.c_str()));
  return numbers;
}

std::string written(const std::string& text) { return "'" + text + "'"; }

// Opens a library without a file on disk: files of packages that load at the same time never meet.
void* open_library(const Content& content, const std::string& name, std::string& failure) {
  const int file = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (file < 0) {
    failure = "memfd_create failed";
    return nullptr;
  }
  for (size_t done = 0; done < content.size;) {
    const ssize_t count = write(file, content.data + done, content.size - done);
    if (count <= 0) {
      failure = "there is not enough memory";
      close(file);
      return nullptr;
    }
    done += size_t(count);
  }
  void* library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  // The loader knows libraries by their paths: while the file is open, no other program has this one.
  if (library != nullptr) return library;
  failure = dlerror();
  close(file);
  return nullptr;
}

struct LoadedCode {
  std::mutex mutex;
  std::map<std::string, const Program*> programs;  // by the hash of their library
};

LoadedCode& loaded_code() {
  static auto* code = new LoadedCode;  // never destroyed: threads may run programs while the process ends
  return *code;
}

}  // namespace

Engine& torch_engine() {
  static Engine& engine = open_engine();
  return engine;
}

Engine& find_engine(const std::string& name) {
  if (name != "cpu" && name != "torch") throw JsonError("it names the unknown engine '" + name + "'");
  return name == "cpu" && !has_loaded_torch() ? cpu::engine() : torch_engine();
}

#ifdef FXWRAP_LINKED_ENGINE
std::string incompatibility_reason(const Json&) { return "this runtime only runs the program that is linked with it"; }
#else
std::string incompatibility_reason(const Json& target) {
  const Target& installed = installed_target();
  const std::pair<const char*, std::string> here[] = {
      {"interface", installed.interface}, {"machine", installed.machine}};
  for (const auto& [name, text] : here) {
    const std::string& wanted = target.at(name).string();
    if (wanted != text) return "it is for " + std::string(name) + " " + written(wanted) + ", not " + written(text);
  }
  const std::string& libc = target.at("libc").string();
  if (version_numbers(libc) > version_numbers(gnu_get_libc_version())) {
    return "it is for the C library " + libc + ", not " + gnu_get_libc_version();
  }
  const std::set<std::string> available = processor_instructions();
  std::string missing;
  for (const Json& item : target.at("instructions").items()) {
    if (available.count(item.string()) == 0) missing += (missing.empty() ? "" : ", ") + item.string();
  }
  return missing.empty() ? "" : "it uses instructions that this processor lacks: " + missing;
}
#endif

const Program& load_code(const Archive& archive, const std::string& entry) {
  LoadedCode& code = loaded_code();
  const std::string hash = archive.content_hash_of(entry);
  const Content content = archive.read(entry);
  const std::lock_guard<std::mutex> lock(code.mutex);
  const auto loaded = code.programs.find(hash);
  if (loaded != code.programs.end()) return *loaded->second;
  std::string failure;
  void* library = open_library(content, "fxwrap program", failure);
  if (library == nullptr) throw archive.error("", "compiled code cannot be loaded: " + failure);
  auto* program = static_cast<const Program*>(dlsym(library, "fxwrap_program"));
  if (program == nullptr || program->abi != abi_version) {
    throw archive.error(entry, "it is not a program of this version of fxwrap");
  }
  code.programs[hash] = program;
  return *program;
}

}  // namespace fxwrap::host
