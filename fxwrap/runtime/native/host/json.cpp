#include "host/json.h"

#include <cerrno>
#include <cstdlib>
#include <limits>

namespace fxwrap::host {
namespace {

constexpr int most_nested = 200;

const char* kind_name(Json::Kind kind) {
  switch (kind) {
    case Json::Kind::null: return "null";
    case Json::Kind::boolean: return "a boolean";
    case Json::Kind::integer: return "an integer";
    case Json::Kind::real: return "a number";
    case Json::Kind::string: return "a string";
    case Json::Kind::array: return "an array";
    case Json::Kind::object: return "an object";
  }
  return "";
}

void append_utf8(std::string& text, uint32_t code) {
  if (code < 0x80) {
    text += char(code);
  } else if (code < 0x800) {
    text += {char(0xC0 | code >> 6), char(0x80 | (code & 63))};
  } else if (code < 0x10000) {
    text += {char(0xE0 | code >> 12), char(0x80 | (code >> 6 & 63)), char(0x80 | (code & 63))};
  } else {
    text += {char(0xF0 | code >> 18), char(0x80 | (code >> 12 & 63)), char(0x80 | (code >> 6 & 63)), char(0x80 | (code & 63))};
  }
}

}  // namespace

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Json whole() {
    Json value = read(0);
    skip_space();
    if (at_ != text_.size()) fail("text follows the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    throw JsonError(reason + " at character " + std::to_string(at_));
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    while (at_ < text_.size() && (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r')) ++at_;
  }

  void expect(char wanted) {
    skip_space();
    if (peek() != wanted) fail(std::string("expected '") + wanted + "'");
    ++at_;
  }

  bool accept(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json read(int depth) {
    if (depth > most_nested) fail("it is nested too deeply");
    skip_space();
    Json value;
    switch (peek()) {
      case '{': read_object(value, depth); break;
      case '[': read_array(value, depth); break;
      case '"':
        value.kind_ = Json::Kind::string;
        value.string_ = read_string();
        break;
      default: read_word(value);
    }
    return value;
  }

  void read_object(Json& value, int depth) {
    value.kind_ = Json::Kind::object;
    expect('{');
    skip_space();
    if (accept("}")) return;
    do {
      skip_space();
      std::string name = read_string();
      expect(':');
      value.members_.emplace_back(std::move(name), read(depth + 1));
      skip_space();
    } while (accept(","));
    expect('}');
  }

  void read_array(Json& value, int depth) {
    value.kind_ = Json::Kind::array;
    expect('[');
    skip_space();
    if (accept("]")) return;
    do {
      value.items_.push_back(read(depth + 1));
      skip_space();
    } while (accept(","));
    expect(']');
  }

  void read_word(Json& value) {
    if (accept("null")) return;
    value.kind_ = Json::Kind::boolean;
    if (accept("true")) {
      value.integer_ = 1;
    } else if (!accept("false")) {
      read_number(value);
    }
  }

  // Python writes numbers that are not finite as words.
  bool accept_infinite(Json& value) {
    const double infinity = std::numeric_limits<double>::infinity();
    if (accept("NaN")) {
      value.real_ = std::numeric_limits<double>::quiet_NaN();
    } else if (accept("Infinity")) {
      value.real_ = infinity;
    } else if (accept("-Infinity")) {
      value.real_ = -infinity;
    } else {
      return false;
    }
    value.kind_ = Json::Kind::real;
    return true;
  }

  void read_number(Json& value) {
    if (accept_infinite(value)) return;
    const size_t start = at_;
    while (at_ < text_.size() && std::string_view("+-.0123456789eE").find(peek()) != std::string_view::npos) ++at_;
    const std::string number(text_.substr(start, at_ - start));
    if (number.empty()) fail("expected a value");
    char* end = nullptr;
    errno = 0;
    value.kind_ = Json::Kind::integer;
    value.integer_ = std::strtoll(number.c_str(), &end, 10);
    if (*end == '\0' && errno == 0) return;
    value.kind_ = Json::Kind::real;
    value.real_ = std::strtod(number.c_str(), &end);
    if (*end != '\0') fail("'" + number + "' is no number");
  }

  uint32_t read_hex() {
    const std::string digits(text_.substr(at_, 4));
    char* end = nullptr;
    const uint32_t code = uint32_t(std::strtoul(digits.c_str(), &end, 16));
    if (digits.size() != 4 || *end != '\0') fail("expected four hexadecimal digits");
    at_ += 4;
    return code;
  }

  void read_escape(std::string& result) {
    static constexpr std::string_view names = "\"\\/bfnrt", characters = "\"\\/\b\f\n\r\t";
    const char letter = peek();
    ++at_;
    if (letter != 'u') {
      const size_t position = names.find(letter);
      if (position == std::string_view::npos) fail("unknown escape");
      result += characters[position];
      return;
    }
    uint32_t code = read_hex();
    if (code >= 0xD800 && code < 0xDC00 && accept("\\u")) code = 0x10000 + ((code - 0xD800) << 10) + (read_hex() - 0xDC00);
    append_utf8(result, code);
  }

  std::string read_string() {
    if (peek() != '"') fail("expected a string");
    ++at_;
    std::string result;
    while (peek() != '"') {
      if (at_ >= text_.size()) fail("a string does not end");
      if (accept("\\")) {
        read_escape(result);
      } else {
        result += text_[at_++];
      }
    }
    ++at_;
    return result;
  }

  std::string_view text_;
  size_t at_ = 0;
};

Json Json::parse(std::string_view text) { return JsonParser(text).whole(); }

void Json::expect(Kind kind) const {
  if (kind_ != kind) throw JsonError(std::string("expected ") + kind_name(kind) + ", got " + kind_name(kind_));
}

bool Json::boolean() const { return expect(Kind::boolean), integer_ != 0; }
int64_t Json::integer() const { return expect(Kind::integer), integer_; }
double Json::real() const { return is(Kind::integer) ? double(integer_) : (expect(Kind::real), real_); }
const std::string& Json::string() const { return expect(Kind::string), string_; }
const std::vector<Json>& Json::items() const { return expect(Kind::array), items_; }
const std::vector<std::pair<std::string, Json>>& Json::members() const { return expect(Kind::object), members_; }

const Json* Json::find(std::string_view name) const {
  for (const auto& [member, value] : members()) {
    if (member == name) return &value;
  }
  return nullptr;
}

const Json& Json::at(std::string_view name) const {
  const Json* value = find(name);
  if (value == nullptr) throw JsonError("there is no '" + std::string(name) + "'");
  return *value;
}

}  // namespace fxwrap::host
