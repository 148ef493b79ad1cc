// The CUDA driver: modules, functions and launches, found in libcuda when they are first needed. No CUDA header or
// toolkit takes part, so this compiles, and is loaded, where there is no GPU.
#pragma once

#include <cstdint>

#include "bridge.h"

namespace fxwrap::driver {

using Function = void*;  // CUfunction

// The highest device index, and one more.
constexpr int most_devices = 64;

// Compiled code, and the chips it runs on.
struct Image {
  const void* cubin;
  const char* ptx;     // for chips that the cubin does not run on, ended by 0; null where there is none
  int32_t capability;  // 80 for 8.0: of the chip that it was compiled for
  bool one_chip;       // it uses what only that chip has (sm_90a): its PTX is of no use to newer ones
};

// Says whether an image runs on a device. Throws std::runtime_error where the driver is missing or fails.
bool runs_on(const Image& image, int device);

// Loads an image into a device's primary context and returns its function, which may take `shared` bytes of dynamic
// shared memory. It stays loaded. Also while a stream is captured. Throws std::runtime_error.
Function load(const Image& image, const char* name, int32_t shared, int device);

// Starts a function on torch's current stream of a device, whatever device is current. `parameters` point to the
// values, in the order of the function's parameters. Throws std::runtime_error with the driver's own words.
void launch(Function function, const char* name, int device, const Grid& grid, int32_t threads, int32_t shared,
            void** parameters);

// Makes a device's primary context the thread's current one until the end of the scope. Contexts are current for one
// thread: a thread of autograd's, or one that has not used CUDA yet, has another or none. Throws std::runtime_error.
class On {
 public:
  explicit On(int device);
  ~On();
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  bool pushed_;
};

// Lets the thread load and make what lasts although it captures a stream: it is not part of the graph.
class WhileCapturing {
 public:
  WhileCapturing();
  ~WhileCapturing();
  WhileCapturing(const WhileCapturing&) = delete;
  WhileCapturing& operator=(const WhileCapturing&) = delete;

 private:
  int mode_;  // CUstreamCaptureMode
};

// torch's current stream of a device. Throws std::runtime_error.
void* current_stream(int device);

// Whether what a stream is given is recorded instead of run; true too where the driver does not tell, as of the default
// stream while another is captured.
bool is_capturing(void* stream);

// Takes the driver's functions, and that of torch which gives the current stream, from this library from now on: for
// tests. What was loaded before must not be launched any more. Throws std::runtime_error where it cannot.
FXWRAP_API void use(const char* path);

}  // namespace fxwrap::driver
