// Functions of a library that torch has loaded, found by their names. No header of the library takes part.
#pragma once

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fxwrap {

// What takes each function from a library that is open, and remembers whether one was missing.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library), complete_(library != nullptr) {}

  template <class Function>
  void take(Function& function, const char* name) {
    if (complete_) function = reinterpret_cast<Function>(dlsym(library_, name));
    complete_ = complete_ && function != nullptr;
  }
  bool complete() const { return complete_; }

 private:
  void* const library_;
  bool complete_;
};

// `Functions` has a member for each function, and is made of Symbols. What was found is kept for the life of the process.
template <class Functions>
class Library {
 public:
  explicit Library(std::vector<const char*> names) : names_(std::move(names)) {}

  // Null where there is no such library, or a function of it is missing. Only of one that is there already: another copy
  // than torch's would take its own memory.
  const Functions* functions() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const char* name : names_) {
      if (!looked_ && found_ == nullptr) find(dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD));
    }
    looked_ = true;
    return found_;
  }

  // Takes them from this file from now on, if it has them.
  void use(const char* path) {
    std::lock_guard<std::mutex> lock(mutex_);
    find(dlopen(path, RTLD_NOW | RTLD_LOCAL));
    looked_ = true;
  }

 private:
  void find(void* library) {
    Symbols symbols(library);
    auto made = std::make_unique<Functions>(symbols);
    found_ = symbols.complete() ? made.release() : nullptr;
  }

  const std::vector<const char*> names_;
  std::mutex mutex_;
  const Functions* found_ = nullptr;
  bool looked_ = false;
};

}  // namespace fxwrap
