// Profiler ranges: RecordFunction of user scope, which torch's profiler and `emit_nvtx` observe.
#include <ATen/record_function.h>

#include <memory>
#include <vector>

#include "bridge/frame.h"
#include "bridge/functions.h"

namespace fxwrap {
namespace {

// The open ranges of this thread; null for those that no profiler observed when they were entered.
thread_local std::vector<std::unique_ptr<at::RecordFunction>> open_ranges;

}  // namespace

namespace bridge {

void enter_range(Frame&, const char* name) {
  open_ranges.emplace_back();
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (C10_LIKELY(!callbacks.has_value())) return;
  open_ranges.back() = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  open_ranges.back()->before(name);
}

void exit_range(Frame&) { open_ranges.pop_back(); }

}  // namespace bridge

RangeStackGuard::RangeStackGuard() : depth_(open_ranges.size()) {}

RangeStackGuard::~RangeStackGuard() {
  while (open_ranges.size() > depth_) open_ranges.pop_back();
}

}  // namespace fxwrap
