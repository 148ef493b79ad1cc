// Operators of fxwrap's that the bridge computes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <string>

namespace fxwrap {

// The namespace of operators that the bridge computes although fxwrap's Python package defines and computes them, too.
inline constexpr const char* native_namespace = "fxwrap_native";

// Calls `define`, once, with a function that defines an operator by its schema. Where Python has defined `first`, one of them,
// they are defined in `native_namespace` if they run `beside_python`, else not at all.
template <class Define>
void define_operators(const char* first, Define define, bool beside_python = false) {
  static std::once_flag once;
  std::call_once(once, [&] {
    const bool has_python = c10::Dispatcher::singleton().findSchema({first, ""}).has_value();
    if (has_python && !beside_python) return;
    const char* space = has_python ? native_namespace : "fxwrap";
    static auto* library = new torch::Library(torch::Library::FRAGMENT, space, std::nullopt, __FILE__, __LINE__);
    define([](const std::string& schema, const char* name, auto function) {
      library->def(schema.c_str());
      library->impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
    });
  });
}

}  // namespace fxwrap
