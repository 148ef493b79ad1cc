// A reader of JSON texts, for the manifests of saved programs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fxwrap::host {

// A text that is not JSON, or data of another form than its reader expects.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Json {
 public:
  enum class Kind { null, boolean, integer, real, string, array, object };

  // Reads a whole text. Throws JsonError.
  static Json parse(std::string_view text);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }

  // The value; each throws JsonError for another kind.
  bool boolean() const;
  int64_t integer() const;
  double real() const;  // of an integer too
  const std::string& string() const;
  const std::vector<Json>& items() const;
  const std::vector<std::pair<std::string, Json>>& members() const;

  // A member of an object: `at` throws JsonError if it has none, `find` returns null.
  const Json& at(std::string_view name) const;
  const Json* find(std::string_view name) const;

 private:
  friend class JsonParser;
  void expect(Kind kind) const;

  Kind kind_ = Kind::null;
  int64_t integer_ = 0;
  double real_ = 0;
  std::string string_;
  std::vector<Json> items_;
  std::vector<std::pair<std::string, Json>> members_;
};

}  // namespace fxwrap::host
