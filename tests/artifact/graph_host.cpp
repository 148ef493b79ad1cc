// A host that runs a saved program on the CPU with a graph capturer of its own: graph_host MODEL.fxw OUT WORD...
//
// Words: `call ROWS SEED` runs the program on x[i] = i * SEED of ROWS x 4 and a state of four SEEDs, and writes its results to
// OUT.0, OUT.1... and the state behind them; `hold` preserves the results of the next call, which are written to OUT.held.* at
// the end; `share` goes on with another instance; `swap NUMBER` sets the constants; `fail` makes captures fail. After each
// call, the numbers of captures and replays are printed.
//
// As on a GPU, captures compute nothing that calls see, and a replay overwrites the results of later captures in its pool.
#include <ATen/EmptyTensor.h>  // the headers of operators that make tensors take seconds to compile
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <fxwrap/fxwrap.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <stdexcept>

#include "graph_capture/capturer.h"

namespace {

int captured = 0, replayed = 0;
bool fails = false;

at::Tensor full(at::IntArrayRef sizes, double value) {
  return at::Tensor(at::detail::empty_cpu(sizes, at::kFloat)).fill_(value);
}

// A tensor at an operand's address, as a graph has it: it does not keep the memory alive.
at::Tensor at_address(const at::Tensor& operand) {
  return at::from_blob(operand.data_ptr(), operand.sizes(), operand.strides(), operand.options());
}

class CpuGraphCapturer final : public fxwrap::GraphCapturer {
 public:
  fxwrap::MemoryPool make_pool() override { return {++pools_, 0}; }

  fxwrap::CapturedWork capture(const fxwrap::FunctionBody& body, const fxwrap::Tensors& operands,
                               fxwrap::MemoryPool pool) override {
    if (fails) throw std::runtime_error("this device cannot");
    ++captured;
    fxwrap::Tensors places, results;
    for (const at::Tensor& operand : operands) places.push_back(at_address(operand));
    for (const at::Tensor& value : body(places)) results.push_back(value.clone().fill_(NAN));
    fxwrap::Tensors& in_pool = results_[pool];
    in_pool.insert(in_pool.end(), results.begin(), results.end());
    const size_t position = in_pool.size();
    return {[this, body, places, pool, results, position] {
              ++replayed;
              const fxwrap::Tensors& others = results_[pool];
              for (size_t i = position; i < others.size(); ++i) others[i].fill_(NAN);
              const fxwrap::Tensors values = body(places);
              for (size_t i = 0; i < results.size(); ++i) results[i].copy_(values[i]);
            },
            results};
  }

  bool can_capture() override { return true; }
  c10::Stream stream() override { return c10::Stream(c10::Stream::DEFAULT, c10::Device("cpu")); }
  void wait_for_stream(const c10::Stream&) override {}
  void synchronize() override {}

 private:
  uint64_t pools_ = 0;
  std::map<fxwrap::MemoryPool, fxwrap::Tensors> results_;
};

void append(const at::Tensor& tensor, std::ofstream& file) {
  const at::Tensor whole = tensor.contiguous();
  file.write(static_cast<const char*>(whole.data_ptr()), std::streamsize(whole.nbytes()));
}

void write(const std::vector<fxwrap::Value>& results, const at::Tensor& state, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (const fxwrap::Value& value : results) append(value.tensor(), file);
  append(state, file);
}

}  // namespace

int main(int count, char** words) {
  fxwrap::register_graph_capturer(c10::DeviceType::CPU, [](c10::Device) {
    return std::unique_ptr<fxwrap::GraphCapturer>(std::make_unique<CpuGraphCapturer>());
  });
  try {
    const std::string out = words[2];
    std::vector<fxwrap::Model> models;
    models.emplace_back(words[1]);
    std::vector<std::pair<std::vector<fxwrap::Value>, at::Tensor>> held;
    bool holds = false;
    int calls = 0;
    for (int i = 3; i < count; ++i) {
      const std::string word = words[i];
      if (word == "hold") holds = true;
      if (word == "fail") fails = true;
      if (word == "share") models.push_back(models.front().share());
      if (word == "swap") {
        const double factor = std::atof(words[++i]);
        for (const FxwrapLeaf& leaf : models.back().constants()) {
          std::vector<std::pair<std::string, fxwrap::Value>> constants;
          constants.emplace_back(leaf.name, full({4, 4}, factor));
          models.back().load_constants(std::move(constants));
        }
      }
      if (word != "call") continue;
      const int64_t rows = std::atoll(words[++i]);
      const double seed = std::atof(words[++i]);
      const at::Tensor x = full({rows, 4}, 0), state = full({4}, seed);
      for (int64_t element = 0; element < rows * 4; ++element) x.data_ptr<float>()[element] = float(element) * seed;
      std::vector<fxwrap::Value> inputs;
      inputs.emplace_back(x);
      inputs.emplace_back(state);
      std::vector<fxwrap::Value> results = models.back().run(std::move(inputs));
      write(results, state, out + "." + std::to_string(calls++));
      if (holds) held.emplace_back(std::move(results), state);
      holds = false;
      std::printf("%d %d\n", captured, replayed);
    }
    for (size_t i = 0; i < held.size(); ++i) write(held[i].first, held[i].second, out + ".held." + std::to_string(i));
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 3;
  }
}
