// A host that passes at::Tensor values and receives them, or DLPack tensors: tensor_host MODEL.fxw
#include <ATen/EmptyTensor.h>  // the headers of operators that make tensors take seconds to compile
#include <ATen/core/Tensor.h>
#include <fxwrap/dlpack.h>
#include <fxwrap/fxwrap.hpp>

#include <cstdio>

static at::Tensor full(at::IntArrayRef sizes, double value) {
  return at::Tensor(at::detail::empty_cpu(sizes, at::kFloat)).fill_(value);
}

int main(int, char** arguments) {
  fxwrap::Model model(arguments[1]);
  const at::Tensor x = full({4, 16}, 0.5);
  const at::Tensor y = model({x})[0];
  std::printf("tensor %lld %lld %.9g uses %zu\n", (long long)y.size(0), (long long)y.size(1), y.const_data_ptr<float>()[0],
              x.use_count());

  std::vector<fxwrap::Value> inputs;
  inputs.emplace_back(x);
  FxwrapRunOptions options{};
  options.size = sizeof options;
  const std::vector<fxwrap::Value> results = model.run(std::move(inputs), options);
  const DLManagedTensorVersioned* dlpack = results[0].dlpack();
  std::printf("dlpack %u %.9g\n", dlpack->version.major, static_cast<float*>(dlpack->dl_tensor.data)[0]);

  std::vector<std::pair<std::string, fxwrap::Value>> constants;
  constants.emplace_back("bias", fxwrap::Value(full({16}, 0)));
  model.load_constants(std::move(constants));
  std::printf("replaced %.9g\n", model({x})[0].const_data_ptr<float>()[0]);
  try {
    model({full({4, 17}, 0)});
  } catch (const fxwrap::Error& error) {
    std::printf("%s: %s\n", error.kind().c_str(), error.what());
  }
  try {
    results[0].tensor();
  } catch (const fxwrap::Error& error) {
    std::printf("%s: %s\n", error.kind().c_str(), error.what());
  }
}
