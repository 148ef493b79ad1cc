// Operators of fxwrap's in processes that have not imported fxwrap, whose Python package defines them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

namespace fxwrap {

// Calls `define`, once, with a function that defines an operator by its schema, unless Python has defined `first`, one of them.
template <class Define>
void define_operators(const char* first, Define define) {
  static std::once_flag once;
  std::call_once(once, [&] {
    if (c10::Dispatcher::singleton().findSchema({first, ""}).has_value()) return;
    static auto* library = new torch::Library(torch::Library::FRAGMENT, "fxwrap", std::nullopt, __FILE__, __LINE__);
    define([](const char* schema, const char* name, auto function) {
      library->def(schema);
      library->impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
    });
  });
}

}  // namespace fxwrap
