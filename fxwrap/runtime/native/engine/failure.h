// Errors of the runtime: the class and the message that Python's error has.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace fxwrap {

class __attribute__((visibility("default"))) Failure : public std::exception {
 public:
  Failure(std::string kind, std::string message) : kind_(std::move(kind)), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  const std::string& kind() const { return kind_; }

 private:
  std::string kind_;  // the name of the class in fxwrap.errors, or of Python's builtin error
  std::string message_;
};

}  // namespace fxwrap
