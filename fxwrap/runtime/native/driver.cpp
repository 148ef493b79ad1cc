// The driver's functions by their names in libcuda, declared here as its documentation gives them.
#include "driver.h"

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
  int32_t (*current_stream)(int32_t, Stream*);  // of torch's C shim
};

// A device that something was loaded for.
struct DeviceState {
  Context context = nullptr;
  int capability = 0;
  int most_shared = 0;
};

std::mutex mutex;
std::atomic<const Functions*> loaded{nullptr};
std::atomic<const DeviceState*> devices[most_devices];

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
  auto found = new Functions;  // for the life of the process
  const auto take = [&](auto& function, const char* name) { find(function, library, path, name); };
  take(found->init, "cuInit");
  take(found->error_string, "cuGetErrorString");
  take(found->device_get, "cuDeviceGet");
  take(found->device_attribute, "cuDeviceGetAttribute");
  take(found->retain_primary, "cuDevicePrimaryCtxRetain");
  take(found->current_context, "cuCtxGetCurrent");
  take(found->push_context, "cuCtxPushCurrent_v2");
  take(found->pop_context, "cuCtxPopCurrent_v2");
  take(found->exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  take(found->is_capturing, "cuStreamIsCapturing");
  take(found->load_module, "cuModuleLoadData");
  take(found->get_function, "cuModuleGetFunction");
  take(found->get_function_attribute, "cuFuncGetAttribute");
  take(found->set_function_attribute, "cuFuncSetAttribute");
  take(found->set_cache, "cuFuncSetCacheConfig");
  take(found->launch, "cuLaunchKernel");
  find(found->current_stream, open(torch_path, torch_flags), torch_path, stream_name);
  return found;
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
  if (const Functions* found = loaded.load(std::memory_order_acquire)) return *found;
  std::lock_guard<std::mutex> lock(mutex);
  if (const Functions* found = loaded.load(std::memory_order_acquire)) return *found;
  // torch has loaded its library for CUDA, if it has one: a second copy would know other streams.
  const Functions* found = find_all(library_name, torch_library, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  check(*found, found->init(0), "cuInit");
  loaded.store(found, std::memory_order_release);
  return *found;
}

const DeviceState& state_of(const Functions& driver, int index) {
  if (index < 0 || index >= most_devices) throw std::runtime_error("there is no GPU " + std::to_string(index));
  if (const DeviceState* found = devices[index].load(std::memory_order_acquire)) return *found;
  std::lock_guard<std::mutex> lock(mutex);
  if (const DeviceState* found = devices[index].load(std::memory_order_acquire)) return *found;
  Device device = 0;
  DeviceState state;
  int major = 0, minor = 0;
  check(driver, driver.device_get(&device, index), "cuDeviceGet");
  check(driver, driver.device_attribute(&major, chip_major, device), "cuDeviceGetAttribute");
  check(driver, driver.device_attribute(&minor, chip_minor, device), "cuDeviceGetAttribute");
  check(driver, driver.device_attribute(&state.most_shared, most_shared_attribute, device), "cuDeviceGetAttribute");
  check(driver, driver.retain_primary(&state.context, device), "cuDevicePrimaryCtxRetain");
  state.capability = 10 * major + minor;
  const auto* kept = new DeviceState(state);  // for the life of the process
  devices[index].store(kept, std::memory_order_release);
  return *kept;
}

bool cubin_runs_on(const Image& image, int capability) {
  if (image.one_chip) return capability == image.capability;
  return capability / 10 == image.capability / 10 && capability >= image.capability;
}

bool ptx_runs_on(const Image& image, int capability) {
  return image.ptx != nullptr && !image.one_chip && capability >= image.capability;
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

On::On(int device) {
  const Functions& driver = functions();
  const Context wanted = state_of(driver, device).context;
  Context current = nullptr;
  check(driver, driver.current_context(&current), "cuCtxGetCurrent");
  pushed_ = current != wanted;
  if (pushed_) check(driver, driver.push_context(wanted), "cuCtxPushCurrent");
}

On::~On() {
  Context popped = nullptr;
  if (pushed_) functions().pop_context(&popped);
}

WhileCapturing::WhileCapturing() : mode_(relaxed_capture) { functions().exchange_capture_mode(&mode_); }
WhileCapturing::~WhileCapturing() { functions().exchange_capture_mode(&mode_); }

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
  const On there(device);
  const WhileCapturing anyway;
  Module module = nullptr;
  Function function = nullptr;
  const void* code = cubin_runs_on(image, state.capability) ? image.cubin : image.ptx;
  check(driver, driver.load_module(&module, code), "cuModuleLoadData");
  check(driver, driver.get_function(&function, module, name), "cuModuleGetFunction");
  allow_shared(driver, state, function, name, shared);
  return function;
}

void launch(Function function, const char* name, int device, const Grid& grid, int32_t threads, int32_t shared,
            void** parameters) {
  const Functions& driver = functions();
  Stream stream = current_stream(device);
  const unsigned x = extent(grid.x, name), y = extent(grid.y, name), z = extent(grid.z, name);
  const On there(device);
  const Status status =
      driver.launch(function, x, y, z, unsigned(threads), 1, 1, unsigned(shared), stream, parameters, nullptr);
  if (status != 0) {
    fail(driver, status, "the launch of kernel '" + std::string(name) + "' over the grid (" + std::to_string(x) + ", " +
                             std::to_string(y) + ", " + std::to_string(z) + ")");
  }
}

void use(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  const Functions* found = find_all(path, path, RTLD_NOW | RTLD_LOCAL);
  check(*found, found->init(0), "cuInit");
  for (auto& device : devices) device.store(nullptr, std::memory_order_release);
  loaded.store(found, std::memory_order_release);
}

}  // namespace fxwrap::driver
