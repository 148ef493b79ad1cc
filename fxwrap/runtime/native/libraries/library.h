// Functions of a library that torch has loaded, resolved by name without the library's headers.
#pragma once

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fxwrap {

// Resolves the functions of an open library and records whether one is missing.
class SymbolResolver {
 public:
  explicit SymbolResolver(void* library) : library_(library), complete_(library != nullptr) {}

  template <class Function>
  void resolve(Function& function, const char* name) {
    if (complete_) function = reinterpret_cast<Function>(dlsym(library_, name));
    complete_ = complete_ && function != nullptr;
  }
  bool complete() const { return complete_; }

 private:
  void* const library_;
  bool complete_;
};

// `Functions` has a member for each function, and is constructed from a SymbolResolver. It is never freed.
template <class Functions>
class Library {
 public:
  explicit Library(std::vector<const char*> names) : names_(std::move(names)) {}

  // Null if the library is not loaded or lacks a function. It is never loaded here: a second copy beside torch's would
  // allocate its own memory.
  const Functions* functions() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const char* name : names_) {
      if (!searched_ && functions_ == nullptr) find(dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD));
    }
    searched_ = true;
    return functions_;
  }

  // Uses the functions of this file from now on, if it has all of them.
  void override_library(const char* path) {
    std::lock_guard<std::mutex> lock(mutex_);
    find(dlopen(path, RTLD_NOW | RTLD_LOCAL));
    searched_ = true;
  }

 private:
  void find(void* library) {
    SymbolResolver symbols(library);
    auto resolved = std::make_unique<Functions>(symbols);
    functions_ = symbols.complete() ? resolved.release() : nullptr;
  }

  const std::vector<const char*> names_;
  std::mutex mutex_;
  const Functions* functions_ = nullptr;
  bool searched_ = false;
};

}  // namespace fxwrap
