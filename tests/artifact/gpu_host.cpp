// A host with libtorch that runs a saved program on a GPU: gpu_host MODEL.fxw CALLS STREAM OUT [DTYPE SIZES FILE]...
//
// Inputs are raw files, copied to the GPU for each call; STREAM is 0 for the current stream, else a new one. Results of the last
// call are written to OUT.0, OUT.1... Prints the calls whose first result differs from that of the first call, and the number
// of operators that the last call called.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fxwrap/fxwrap.hpp>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>

namespace {

at::ScalarType dtype_of(const std::string& name) {
  if (name == "f32") return at::kFloat;
  if (name == "f16") return at::kHalf;
  if (name == "bf16") return at::kBFloat16;
  return name == "i64" ? at::kLong : at::kInt;
}

at::Tensor read_input(char** words) {
  std::vector<int64_t> sizes;
  std::istringstream stream(words[1]);
  for (std::string part; std::getline(stream, part, ',');) sizes.push_back(std::atoll(part.c_str()));
  std::ifstream file(words[2], std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  return at::from_blob(bytes.data(), sizes, at::TensorOptions().dtype(dtype_of(words[0]))).clone();
}

void write_result(const at::Tensor& tensor, const std::string& path) {
  const at::Tensor copy = tensor.cpu().contiguous();
  std::ofstream(path, std::ios::binary).write(static_cast<const char*>(copy.data_ptr()), std::streamsize(copy.nbytes()));
}

}  // namespace

int main(int count, char** words) {
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) return std::printf("%s\n", dlerror()), 2;
  try {
    const fxwrap::Model model(words[1]);
    std::vector<at::Tensor> inputs;
    for (int i = 5; i + 2 < count; i += 3) inputs.push_back(read_input(words + i));
    const at::Device device(at::kCUDA, 0);
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    const c10::Stream own = guard.getStreamFromGlobalPool(device);
    const fxwrap::Stream stream{"cuda:0", guard.getStreamNativeHandle(own)};
    const bool on_own = std::atoi(words[3]) != 0;
    int operators = 0;
    FxwrapRunOptions options{};
    options.size = sizeof options;
    options.outputs_as_tensors = 1;
    options.on_line = [](void* context, const char* name, int32_t begins) {
      if (std::string_view(name).find("::") != std::string_view::npos) *static_cast<int*>(context) += begins;
    };
    options.context = &operators;
    if (on_own) options.has_stream = 1, options.device = stream.device, options.stream = stream.handle;
    at::Tensor first;
    std::vector<fxwrap::Value> results;
    for (int call = 0; call < std::atoi(words[2]); ++call) {
      std::vector<fxwrap::Value> values;
      for (const at::Tensor& input : inputs) values.emplace_back(input.to(device));
      guard.synchronizeStream(guard.getStream(device));
      operators = 0;
      results = model.run(std::move(values), options);
      guard.synchronizeStream(on_own ? own : guard.getStream(device));
      const at::Tensor result = results[0].tensor().cpu();
      if (!first.defined()) first = result;
      if (!at::equal(first, result)) std::printf("call %d differs\n", call);
    }
    std::printf("%d operators\n", operators);
    for (size_t i = 0; i < results.size(); ++i) write_result(results[i].tensor(), std::string(words[4]) + "." + std::to_string(i));
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 3;
  }
}
