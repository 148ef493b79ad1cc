// Capture and replay of work on one device: the twin of fxwrap/runtime/graph_capture/replay.py's GraphCapturer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <vector>

#include "bridge/bridge.h"

namespace fxwrap {

using MemoryPool = c10::MempoolId_t;
using Tensors = std::vector<at::Tensor>;
using FunctionBody = std::function<Tensors(const Tensors&)>;

// Captured work: it is executed by `replay`, which writes `results`.
struct CapturedWork {
  std::function<void()> replay;
  Tensors results;
};

class GraphCapturer {
 public:
  virtual ~GraphCapturer() = default;

  // A new memory pool, which captured graphs may share.
  virtual MemoryPool make_pool() = 0;
  // Captures the work that a function launches for these operands without executing it. It allocates in the pool: later
  // captures reuse memory that is freed. Throws what the function throws, and std::exception if the capture fails.
  virtual CapturedWork capture(const FunctionBody& body, const Tensors& operands, MemoryPool pool) = 0;
  // Whether work may be captured or replayed now: no capture is in progress.
  virtual bool can_capture() = 0;
  virtual c10::Stream stream() = 0;                         // the current one
  virtual void wait_for_stream(const c10::Stream& other) = 0;  // the current one waits for its present work
  virtual void synchronize() = 0;
};

// Captures CUDA graphs through torch's classes, which are looked up in libtorch_cuda. Throws std::runtime_error.
std::unique_ptr<GraphCapturer> make_cuda_graph_capturer(c10::Device device);

// The capturer of a device; null for one without graph capture.
std::unique_ptr<GraphCapturer> make_graph_capturer(c10::Device device);

// Gives a type of device graph capture, or replaces its capturer.
FXWRAP_API void register_graph_capturer(c10::DeviceType type, std::unique_ptr<GraphCapturer> (*make)(c10::Device));

}  // namespace fxwrap
