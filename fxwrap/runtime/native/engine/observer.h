// Telling the caller of a run which lines begin and end.
#pragma once

#include "../../../include/fxwrap/runtime.h"
#include "bridge/bridge.h"

namespace fxwrap {

// Reports the beginning and the end of a line.
class ObservedLine {
 public:
  ObservedLine(const Frame& f, const char* name) : observer_(f.observer), name_(name) {
    if (observer_ != nullptr) observer_->on_line(observer_->context, name_, 1);
  }
  ~ObservedLine() {
    if (observer_ != nullptr) observer_->on_line(observer_->context, name_, 0);
  }
  ObservedLine(const ObservedLine&) = delete;
  ObservedLine& operator=(const ObservedLine&) = delete;

 private:
  const Observer* observer_;
  const char* name_;
};

// Destruction ends the kernel that failed in the run of a program, before the line that runs the program.
class FailedKernelGuard {
 public:
  explicit FailedKernelGuard(Observer* observer) : observer_(observer) {}
  ~FailedKernelGuard() {
    if (observer_ != nullptr && observer_->kernel != nullptr) end_kernel(*observer_);
  }
  FailedKernelGuard(const FailedKernelGuard&) = delete;
  FailedKernelGuard& operator=(const FailedKernelGuard&) = delete;

 private:
  Observer* observer_;
};

// The observer of a frame for a run with these options.
class RunObserver {
 public:
  RunObserver(Frame& f, const FxwrapRunOptions* options) : failed_kernel_(&observer_) {
    if (options == nullptr || options->on_line == nullptr) return;
    observer_ = {options->on_line, options->context};
    f.observer = &observer_;
  }
  RunObserver(const RunObserver&) = delete;
  RunObserver& operator=(const RunObserver&) = delete;

 private:
  Observer observer_;
  const FailedKernelGuard failed_kernel_;
};

}  // namespace fxwrap
