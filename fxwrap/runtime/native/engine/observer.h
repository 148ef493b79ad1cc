// Telling the caller of a run which lines begin and end.
#pragma once

#include "../../../include/fxwrap/runtime.h"
#include "bridge/bridge.h"

namespace fxwrap {

// Reports the beginning and the end of a line, and before that the end of a kernel in it that failed.
class ObservedLine {
 public:
  ObservedLine(const Frame& f, const char* name) : observer_(f.observer), name_(name) {
    if (observer_ != nullptr) observer_->on_line(observer_->context, name_, 1);
  }
  ~ObservedLine() {
    if (observer_ == nullptr) return;
    observer_->end_kernel();
    observer_->on_line(observer_->context, name_, 0);
  }
  ObservedLine(const ObservedLine&) = delete;
  ObservedLine& operator=(const ObservedLine&) = delete;

 private:
  Observer* observer_;
  const char* name_;
};

// The observer of a frame for a run with these options. Destruction ends the kernel that failed.
class RunObserver {
 public:
  RunObserver(Frame& f, const FxwrapRunOptions* options) {
    if (options == nullptr || options->on_line == nullptr) return;
    observer_ = {options->on_line, options->context};
    f.observer = &observer_;
  }
  ~RunObserver() {
    observer_.end_kernel();
  }
  RunObserver(const RunObserver&) = delete;
  RunObserver& operator=(const RunObserver&) = delete;

 private:
  Observer observer_;
};

}  // namespace fxwrap
