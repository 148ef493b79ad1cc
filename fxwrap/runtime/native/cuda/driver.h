// The CUDA driver: modules, functions and launches, resolved in libcuda on first use. It needs no CUDA header or
// toolkit, so it can be compiled and loaded without a GPU.
#pragma once

#include <cstdint>

#include "bridge/bridge.h"

namespace fxwrap::driver {

using Function = void*;  // CUfunction

// The number of supported device indices.
constexpr int max_devices = 64;

// The least compute capability with programmatic dependent launch: kernels for older ones neither signal nor wait.
constexpr int first_dependent_capability = 90;

// Compiled code and the architectures that it runs on.
struct Image {
  const void* cubin;
  const char* ptx;     // for architectures that the cubin does not run on, null-terminated; null for none
  int32_t capability;  // 80 for 8.0: the architecture that it was compiled for
  bool arch_specific;       // it uses features of that architecture alone (sm_90a): newer ones cannot run its PTX
};

// Whether an image runs on a device. Throws std::runtime_error if the driver is missing or fails.
bool runs_on(const Image& image, int device);

// Loads an image into a device's primary context and returns its function, which may take `shared` bytes of dynamic
// shared memory. It stays loaded. Also while a stream is captured. Throws std::runtime_error.
Function load(const Image& image, const char* name, int32_t shared, int device);

// Starts a function on torch's current stream of a device, whatever device is current. `parameters` point to the
// values, in the order of the function's parameters. A dependent function may start before the one launched before it on
// the stream has ended (programmatic dependent launch), where the device and its driver can do that. Throws
// std::runtime_error with the driver's message.
void launch(Function function, const char* name, int device, const Grid& grid, int32_t threads, int32_t shared,
            void** parameters, bool dependent);

// Makes a device's primary context the thread's current one until the end of the scope. Contexts are current for one
// thread: an autograd thread, or one that has not used CUDA yet, has another or none. Throws std::runtime_error.
class ContextGuard {
 public:
  explicit ContextGuard(int device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_;
};

// Lets the thread load modules and create persistent objects, which are not part of the graph, while it captures a stream.
class RelaxedCaptureGuard {
 public:
  RelaxedCaptureGuard();
  ~RelaxedCaptureGuard();
  RelaxedCaptureGuard(const RelaxedCaptureGuard&) = delete;
  RelaxedCaptureGuard& operator=(const RelaxedCaptureGuard&) = delete;

 private:
  int mode_;  // CUstreamCaptureMode
};

// torch's current stream of a device. Throws std::runtime_error.
void* current_stream(int device);

// Whether a stream is being captured; also true if the driver does not tell, as for the default stream while another is
// captured.
bool is_capturing(void* stream);

// Replaces the driver's functions, and torch's function for the current stream, by those of this library: for tests.
// Functions loaded before must not be launched any more. Throws std::runtime_error on failure.
FXWRAP_API void override_library(const char* path);

}  // namespace fxwrap::driver
