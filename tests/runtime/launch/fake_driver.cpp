// A CUDA driver that writes down what it is asked, with two devices of 9.0 and tensors on them that are host memory.
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "fake_driver.h"

namespace {

std::mutex mutex;
std::string log_text;
std::map<std::string, int64_t> settings{{"chip 0", 90}, {"chip 1", 90}, {"shared", 232448}, {"stream", 7}};
std::string sizes = "";            // of the parameters of the functions that are launched
thread_local int64_t context = 0;  // of device n it is 100 + n
thread_local int capture_mode = 0;

int64_t setting(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = settings.find(name);
  return found == settings.end() ? 0 : found->second;
}

}  // namespace

void note(const std::string& line) {
  std::lock_guard<std::mutex> lock(mutex);
  log_text += line + "\n";
}
int status(const char* name) { return int(setting(name)); }
int fake_capture_mode() { return capture_mode; }

extern "C" {

// --- for tests --------------------------------------------------------------------------------------------------------

const char* fake_log() { return log_text.c_str(); }
void fake_set(const char* name, int64_t value) {
  std::lock_guard<std::mutex> lock(mutex);
  settings[name] = value;
}
void fake_expect(const char* text) { sizes = text; }
void fake_clear() {
  log_text.clear();
  context = 0;
}
void fake_enter(int64_t device) { context = 100 + device; }
int64_t fake_context() { return context; }

// A new at::Tensor of elements one after another on a device.
void* fake_tensor(void* data, int64_t count, int dtype, int device) {
  const c10::Device where(c10::kCUDA, c10::DeviceIndex(device));
  const auto meta = c10::scalarTypeToTypeMeta(c10::ScalarType(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), count * int64_t(meta.itemsize()), c10::DataPtr(data, where),
                       nullptr, false);
  auto made = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), meta);
  made->set_sizes_contiguous({&count, 1});
  return new c10::intrusive_ptr<c10::TensorImpl>(std::move(made));
}

// --- the driver -------------------------------------------------------------------------------------------------------

int cuInit(unsigned) { return status("cuInit"); }
int cuGetErrorString(int code, const char** text) {
  *text = code == 700 ? "an illegal memory access was encountered" : nullptr;
  return *text == nullptr;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return index < 2 ? 0 : 101;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int chip = int(setting("chip " + std::to_string(device)));
  *value = attribute == 75 ? chip / 10 : attribute == 76 ? chip % 10 : int(setting("shared"));
  return 0;
}
int cuDevicePrimaryCtxRetain(int64_t* found, int device) {
  *found = 100 + device;
  return 0;
}
int cuCtxGetCurrent(int64_t* found) {
  *found = context;
  return 0;
}
int cuCtxPushCurrent_v2(int64_t pushed) {
  note("push " + std::to_string(pushed));
  context = pushed;
  return 0;
}
int cuCtxPopCurrent_v2(int64_t* popped) {
  *popped = context;
  context = 0;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
int cuStreamIsCapturing(void*, int* status_of) {
  *status_of = 0;
  return 0;
}
int cuModuleLoadData(int64_t* module, const char* image) {
  note("load " + std::string(image[1] == 'E' ? "cubin" : "ptx") + " in " + std::to_string(context) + " mode " +
       std::to_string(capture_mode));
  *module = 1;
  return status("cuModuleLoadData");
}
int cuModuleGetFunction(int64_t* function, int64_t, const char* name) {
  note("function " + std::string(name));
  *function = 1000 + context;
  return 0;
}
int cuFuncGetAttribute(int* value, int, int64_t) {
  *value = 1024;
  return 0;
}
int cuFuncSetAttribute(int64_t function, int attribute, int value) {
  note("attribute " + std::to_string(attribute) + " of " + std::to_string(function) + " is " + std::to_string(value));
  return 0;
}
int cuFuncSetCacheConfig(int64_t, int) { return 0; }

int cuLaunchKernel(int64_t function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, int64_t stream, void** parameters, void** extra) {
  std::ostringstream line;
  line << "launch " << function << " grid " << x << "," << y << "," << z << " block " << bx << "," << by << "," << bz
       << " shared " << shared << " stream " << stream << " context " << context << " with";
  std::istringstream wanted(sizes);
  for (char kind; wanted >> kind;) {
    void* value = *parameters++;
    switch (kind) {
      case 'p': line << " " << std::hex << *static_cast<uint64_t*>(value) << std::dec; break;
      case 'i': line << " " << *static_cast<int32_t*>(value); break;
      case 'l': line << " " << *static_cast<int64_t*>(value); break;
      case 'b': line << " " << int(*static_cast<int8_t*>(value)); break;
      case 'f': line << " " << *static_cast<float*>(value); break;
      case 'd': line << " " << *static_cast<double*>(value); break;
    }
  }
  note(line.str() + (extra == nullptr ? "" : " and more"));
  return status("cuLaunchKernel");
}

// CUlaunchConfig and CUlaunchAttribute, as in the driver's documentation.
struct Attribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int serialization;
  } value;
};
struct Configuration {
  unsigned x, y, z, bx, by, bz, shared;
  int64_t stream;
  Attribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Configuration) == 56);

int cuLaunchKernelEx(const Configuration* asked, int64_t function, void** parameters, void** extra) {
  for (unsigned i = 0; i < asked->attribute_count; ++i) {
    const Attribute& attribute = asked->attributes[i];
    note("launch attribute " + std::to_string(attribute.id) + " is " + std::to_string(attribute.value.serialization));
  }
  return cuLaunchKernel(function, asked->x, asked->y, asked->z, asked->bx, asked->by, asked->bz, asked->shared,
                        asked->stream, parameters, extra);
}

int aoti_torch_get_current_cuda_stream(int device, void** stream) {
  *stream = reinterpret_cast<void*>(setting("stream") + device);
  return 0;
}

}  // extern "C"
