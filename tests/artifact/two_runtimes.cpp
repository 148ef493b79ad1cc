// Two runtimes in one process: two_runtimes FIRST.so MODEL.fxw SECOND.so MODEL.fxw calls both in turn and prints whether
// they agree.
#include <dlfcn.h>
#include <fxwrap/dlpack.h>
#include <fxwrap/runtime.h>

#include <cstdio>
#include <cstring>
#include <vector>

struct Runtime {
  decltype(&fxwrap_open) open;
  decltype(&fxwrap_run) run;
  decltype(&fxwrap_value_delete) value_delete;
  decltype(&fxwrap_close) close;
  decltype(&fxwrap_error_message) error_message;
  FxwrapModel* model = nullptr;

  bool load(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return std::printf("%s\n", dlerror()), false;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    find(open, "fxwrap_open"), find(run, "fxwrap_run"), find(value_delete, "fxwrap_value_delete");
    find(close, "fxwrap_close"), find(error_message, "fxwrap_error_message");
    return true;
  }

  bool check(FxwrapError* error) {
    if (error != nullptr) std::printf("%s\n", error_message(error));
    return error == nullptr;
  }

  std::vector<char> call() {
    static float numbers[4][16];
    static int64_t sizes[2] = {4, 16};
    for (int i = 0; i < 64; ++i) numbers[i / 16][i % 16] = float(i) / 8;
    DLManagedTensorVersioned batch{};
    batch.version = {1, 0};
    batch.dl_tensor = {numbers, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, sizes, nullptr, 0};
    FxwrapValue input{}, output{};
    input.kind = FXWRAP_DLPACK, input.as.dlpack = &batch;
    if (!check(run(model, nullptr, &input, 1, &output, 1))) return {};
    std::vector<char> bytes(sizeof numbers);
    std::memcpy(bytes.data(), output.as.dlpack->dl_tensor.data, bytes.size());
    value_delete(&output);
    return bytes;
  }
};

int main(int, char** arguments) {
  Runtime runtimes[2];
  for (int i = 0; i < 2; ++i) {
    if (!runtimes[i].load(arguments[2 * i + 1])) return 1;
    if (!runtimes[i].check(runtimes[i].open(arguments[2 * i + 2], nullptr, &runtimes[i].model))) return 2;
  }
  bool same = runtimes[0].open != runtimes[1].open;
  const std::vector<char> expected = runtimes[0].call();
  for (int i = 0; i < 10; ++i) same = same && !expected.empty() && runtimes[i % 2].call() == expected;
  runtimes[0].close(runtimes[0].model);
  same = same && runtimes[1].call() == expected;
  runtimes[1].close(runtimes[1].model);
  std::printf("%s\n", same ? "equal" : "different");
}
