// Times calls of one model from C++: fxwrap's runtime and AOTInductor's, in interleaved rounds. See native_calls.py.
//
//   native_calls model.fxw model.pt2 BATCH LENGTH ROUNDS CALLS
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/max.h>
#include <fxwrap/fxwrap.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

template <class Call> double microseconds(int calls, const Call& call) {
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  return seconds_since(start) / calls * 1e6;
}

}  // namespace

int main(int, char** arguments) {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  const int64_t batch = std::atoi(arguments[3]), length = std::atoi(arguments[4]);
  const int rounds = std::atoi(arguments[5]), calls = std::atoi(arguments[6]);
  const at::Tensor ids = at::arange(batch * length, at::kLong).remainder(50).reshape({batch, length});

  auto start = Clock::now();
  const fxwrap::Model model(arguments[1]);
  const double opened = seconds_since(start);
  const at::Tensor first = model({ids})[0];
  std::printf("fxwrap: open %.4f s, first result %.4f s\n", opened, seconds_since(start));

  start = Clock::now();
  torch::inductor::AOTIModelPackageLoader other(arguments[2]);
  const at::Tensor second = other.run({ids})[0];
  std::printf("AOTInductor: first result %.4f s\n", seconds_since(start));
  const double difference = (first - second).abs().max().item().toDouble();
  std::printf("largest difference %g\n", difference);

  for (int round = 0; round < rounds; ++round) {
    const double ours = microseconds(calls, [&] { model({ids}); });
    const double theirs = microseconds(calls, [&] { other.run({ids}); });
    std::printf("round %.3f %.3f\n", ours, theirs);
  }
}
