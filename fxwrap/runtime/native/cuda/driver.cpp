// The driver's functions by their names in libcuda, declared here as in its documentation.
#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

namespace fxwrap::driver {

namespace {

using Status = int;       // CUresult
using Device = int;       // CUdevice
using Context = void*;    // CUcontext
using Module = void*;     // CUmodule
using Stream = void*;     // CUstream
using CaptureMode = int;  // CUstreamCaptureMode

constexpr const char* library_name = "libcuda.so.1";
constexpr const char* torch_library = "libtorch_cuda.so";
constexpr const char* stream_name = "aoti_torch_get_current_cuda_stream";

// Values of the driver's enums.
constexpr int chip_major = 75, chip_minor = 76;     // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
constexpr int most_shared_attribute = 97;           // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int static_shared_attribute = 1;          // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int dynamic_shared_attribute = 8;         // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int prefer_shared = 1;                    // CU_FUNC_CACHE_PREFER_SHARED
constexpr CaptureMode relaxed_capture = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int32_t shared_without_asking = 48 * 1024;
constexpr int serialization_attribute = 6;          // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

// CUlaunchAttribute: its value is a union of 64 bytes.
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int allowed;  // of the programmatic stream serialization
  } value;
};

// CUlaunchConfig
struct LaunchConfiguration {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Functions {
  Status (*init)(unsigned);
  Status (*error_string)(Status, const char**);
  Status (*device_get)(Device*, int);
  Status (*device_attribute)(int*, int, Device);
  Status (*retain_primary)(Context*, Device);
  Status (*current_context)(Context*);
  Status (*push_context)(Context);
  Status (*pop_context)(Context*);
  Status (*exchange_capture_mode)(CaptureMode*);
  Status (*is_capturing)(Stream, int*);
  Status (*load_module)(Module*, const void*);
  Status (*get_function)(Function*, Module, const char*);
  Status (*get_function_attribute)(int*, int, Function);
  Status (*set_function_attribute)(Function, int, int);
  Status (*set_cache)(Function, int);
  Status (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                   void**);
  Status (*launch_with_attributes)(const LaunchConfiguration*, Function, void**, void**);  // null before CUDA 11.8
  int32_t (*current_stream)(int32_t, Stream*);  // of torch's C shim
};

// A device in use.
struct DeviceState {
  Context context = nullptr;
  int capability = 0;
  int most_shared = 0;
};

std::mutex mutex;
std::atomic<const Functions*> loaded{nullptr};
std::atomic<const DeviceState*> devices[max_devices];

std::string opening_error(const char* name) {
  const char* reason = dlerror();
  return "cannot open " + std::string(name) + ": " + (reason == nullptr ? "it is not there" : reason);
}

template <typename F>
void find(F& function, void* library, const char* path, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string(path) + " has no function " + name);
}

void* open(const char* path, int flags) {
  void* library = dlopen(path, flags);
  if (library == nullptr) throw std::runtime_error(opening_error(path));
  return library;
}

const Functions* find_all(const char* path, const char* torch_path, int torch_flags) {
  void* library = nullptr;
  try {
    library = open(path, RTLD_NOW | RTLD_LOCAL);
  } catch (const std::runtime_error& missing) {
    throw std::runtime_error(std::string("a kernel cannot be launched on a GPU without NVIDIA's driver: ") +
                             missing.what());
  }
  auto driver = new Functions;  // for the life of the process
  const auto resolve = [&](auto& function, const char* name) { find(function, library, path, name); };
  resolve(driver->init, "cuInit");
  resolve(driver->error_string, "cuGetErrorString");
  resolve(driver->device_get, "cuDeviceGet");
  resolve(driver->device_attribute, "cuDeviceGetAttribute");
  resolve(driver->retain_primary, "cuDevicePrimaryCtxRetain");
  resolve(driver->current_context, "cuCtxGetCurrent");
  resolve(driver->push_context, "cuCtxPushCurrent_v2");
  resolve(driver->pop_context, "cuCtxPopCurrent_v2");
  resolve(driver->exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  resolve(driver->is_capturing, "cuStreamIsCapturing");
  resolve(driver->load_module, "cuModuleLoadData");
  resolve(driver->get_function, "cuModuleGetFunction");
  resolve(driver->get_function_attribute, "cuFuncGetAttribute");
  resolve(driver->set_function_attribute, "cuFuncSetAttribute");
  resolve(driver->set_cache, "cuFuncSetCacheConfig");
  resolve(driver->launch, "cuLaunchKernel");
  driver->launch_with_attributes =
      reinterpret_cast<decltype(driver->launch_with_attributes)>(dlsym(library, "cuLaunchKernelEx"));
  find(driver->current_stream, open(torch_path, torch_flags), torch_path, stream_name);
  return driver;
}

[[noreturn]] void fail(const Functions& driver, Status status, const std::string& what) {
  const char* words = nullptr;
  driver.error_string(status, &words);
  throw std::runtime_error("CUDA: " + what + " failed: " + (words == nullptr ? "unknown error" : words) + " (" +
                           std::to_string(status) + ")");
}

void check(const Functions& driver, Status status, const char* what) {
  if (status != 0) fail(driver, status, what);
}

const Functions& functions() {
  if (const Functions* driver = loaded.load(std::memory_order_acquire)) return *driver;
  std::lock_guard<std::mutex> lock(mutex);
  if (const Functions* driver = loaded.load(std::memory_order_acquire)) return *driver;
  // torch has loaded its CUDA library, if it has one: a second copy would have other streams.
  const Functions* driver = find_all(library_name, torch_library, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  check(*driver, driver->init(0), "cuInit");
  loaded.store(driver, std::memory_order_release);
  return *driver;
}

const DeviceState& state_of(const Functions& driver, int index) {
  if (index < 0 || index >= max_devices) throw std::runtime_error("there is no GPU " + std::to_string(index));
  if (const DeviceState* cached = devices[index].load(std::memory_order_acquire)) return *cached;
  std::lock_guard<std::mutex> lock(mutex);
  if (const DeviceState* cached = devices[index].load(std::memory_order_acquire)) return *cached;
  Device device = 0;
  DeviceState state;
  int major = 0, minor = 0;
  check(driver, driver.device_get(&device, index), "cuDeviceGet");
  check(driver, driver.device_attribute(&major, chip_major, device), "cuDeviceGetAttribute");
  check(driver, driver.device_attribute(&minor, chip_minor, device), "cuDeviceGetAttribute");
  check(driver, driver.device_attribute(&state.most_shared, most_shared_attribute, device), "cuDeviceGetAttribute");
  check(driver, driver.retain_primary(&state.context, device), "cuDevicePrimaryCtxRetain");
  state.capability = 10 * major + minor;
  const auto* stored = new DeviceState(state);  // for the life of the process
  devices[index].store(stored, std::memory_order_release);
  return *stored;
}

bool cubin_runs_on(const Image& image, int capability) {
  if (image.arch_specific) return capability == image.capability;
  return capability / 10 == image.capability / 10 && capability >= image.capability;
}

bool ptx_runs_on(const Image& image, int capability) {
  return image.ptx != nullptr && !image.arch_specific && capability >= image.capability;
}

void allow_shared(const Functions& driver, const DeviceState& state, Function function, const char* name,
                  int32_t shared) {
  if (shared > state.most_shared) {
    throw std::runtime_error("kernel '" + std::string(name) + "' needs " + std::to_string(shared) +
                             " bytes of shared memory, and the GPU has " + std::to_string(state.most_shared));
  }
  if (shared <= shared_without_asking) return;
  int fixed = 0;
  check(driver, driver.set_cache(function, prefer_shared), "cuFuncSetCacheConfig");
  check(driver, driver.get_function_attribute(&fixed, static_shared_attribute, function), "cuFuncGetAttribute");
  check(driver, driver.set_function_attribute(function, dynamic_shared_attribute, state.most_shared - fixed),
        "cuFuncSetAttribute");
}

unsigned extent(int64_t size, const char* name) {
  if (size > INT32_MAX) {
    throw std::runtime_error("kernel '" + std::string(name) + "' cannot be launched over a grid of " +
                             std::to_string(size) + " along one axis");
  }
  return unsigned(size);
}

}  // namespace

ContextGuard::ContextGuard(int device) {
  const Functions& driver = functions();
  const Context context = state_of(driver, device).context;
  Context current = nullptr;
  check(driver, driver.current_context(&current), "cuCtxGetCurrent");
  pushed_ = current != context;
  if (pushed_) check(driver, driver.push_context(context), "cuCtxPushCurrent");
}

ContextGuard::~ContextGuard() {
  Context popped = nullptr;
  if (pushed_) functions().pop_context(&popped);
}

RelaxedCaptureGuard::RelaxedCaptureGuard() : mode_(relaxed_capture) { functions().exchange_capture_mode(&mode_); }
RelaxedCaptureGuard::~RelaxedCaptureGuard() { functions().exchange_capture_mode(&mode_); }

Stream current_stream(int device) {
  Stream stream = nullptr;
  if (functions().current_stream(device, &stream) != 0) {
    throw std::runtime_error("torch has no current stream for the GPU");
  }
  return stream;
}

bool is_capturing(Stream stream) {
  int status = 0;  // CUstreamCaptureStatus
  return functions().is_capturing(stream, &status) != 0 || status != 0;
}

bool runs_on(const Image& image, int device) {
  const int capability = state_of(functions(), device).capability;
  return cubin_runs_on(image, capability) || ptx_runs_on(image, capability);
}

Function load(const Image& image, const char* name, int32_t shared, int device) {
  const Functions& driver = functions();
  const DeviceState& state = state_of(driver, device);
  const ContextGuard there(device);
  const RelaxedCaptureGuard anyway;
  Module module = nullptr;
  Function function = nullptr;
  const void* code = cubin_runs_on(image, state.capability) ? image.cubin : image.ptx;
  check(driver, driver.load_module(&module, code), "cuModuleLoadData");
  check(driver, driver.get_function(&function, module, name), "cuModuleGetFunction");
  allow_shared(driver, state, function, name, shared);
  return function;
}

void launch(Function function, const char* name, int device, const Grid& grid, int32_t threads, int32_t shared,
            void** parameters, bool dependent) {
  const Functions& driver = functions();
  Stream stream = current_stream(device);
  const unsigned x = extent(grid.x, name), y = extent(grid.y, name), z = extent(grid.z, name);
  const ContextGuard there(device);
  Status status = 0;
  if (dependent && driver.launch_with_attributes != nullptr &&
      state_of(driver, device).capability >= first_dependent_capability) {
    LaunchAttribute attribute{serialization_attribute, {}, {{}}};
    attribute.value.allowed = 1;
    const LaunchConfiguration configuration{{x, y, z}, {unsigned(threads), 1, 1}, unsigned(shared), stream, &attribute, 1};
    status = driver.launch_with_attributes(&configuration, function, parameters, nullptr);
  } else {
    status = driver.launch(function, x, y, z, unsigned(threads), 1, 1, unsigned(shared), stream, parameters, nullptr);
  }
  if (status != 0) {
    fail(driver, status, "the launch of kernel '" + std::string(name) + "' over the grid (" + std::to_string(x) + ", " +
                             std::to_string(y) + ", " + std::to_string(z) + ")");
  }
}

void override_library(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  const Functions* driver = find_all(path, path, RTLD_NOW | RTLD_LOCAL);
  check(*driver, driver->init(0), "cuInit");
  for (auto& device : devices) device.store(nullptr, std::memory_order_release);
  loaded.store(driver, std::memory_order_release);
}

}  // namespace fxwrap::driver
