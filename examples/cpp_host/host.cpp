// Runs a saved program: host model.fxw
#include <fxwrap/dlpack.h>
#include <fxwrap/fxwrap.hpp>

#include <cstdio>

int main(int count, char** arguments) {
  if (count != 2) {
    std::puts("usage: host model.fxw");
    return 1;
  }
  try {
    const fxwrap::Model model(arguments[1]);
    for (const FxwrapLeaf& leaf : model.inputs()) {
      std::printf("input %s: %s of rank %d on %s\n", leaf.name, leaf.dtype, leaf.rank, leaf.device);
    }
    float numbers[2][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {7, 6, 5, 4, 3, 2, 1, 0}};
    int64_t sizes[2] = {2, 8};
    DLManagedTensorVersioned batch{};  // memory of this function, so it has no deleter
    batch.version = {1, 0};
    batch.dl_tensor = {numbers, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, sizes, nullptr, 0};
    std::vector<fxwrap::Value> inputs;
    inputs.emplace_back(&batch);
    const std::vector<fxwrap::Value> results = model.run(std::move(inputs));
    const auto* classes = static_cast<const float*>(results[0].dlpack()->dl_tensor.data);
    for (int row = 0; row < 2; ++row) {
      std::printf("%.6f %.6f %.6f\n", classes[3 * row], classes[3 * row + 1], classes[3 * row + 2]);
    }
  } catch (const fxwrap::Error& error) {
    std::printf("%s: %s\n", error.kind().c_str(), error.what());
    return 1;
  }
}
