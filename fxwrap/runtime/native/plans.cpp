#include "plans.h"

#include <ATen/ops/empty.h>
#include <c10/util/env.h>

#include <algorithm>
#include <deque>

#include "driver.h"

namespace fxwrap {
namespace {

struct Kept {
  int device;
  void* stream;
  at::Tensor memory;
};

constexpr size_t most_streams = 16;
std::mutex kept_mutex;
auto& kept = *new std::deque<Kept>;  // never destroyed: the allocator is gone before this library

at::Tensor allocate(size_t bytes, const at::Tensor& like) {
  return at::empty({int64_t(bytes)}, like.options().dtype(at::kByte));
}

}  // namespace

Workspace::Workspace(size_t bytes, const at::Tensor& like) {
  if (bytes == 0) return;
  const int device = like.device().index();
  void* const stream = driver::current_stream(device);
  if (bytes > most_kept || driver::is_capturing(stream)) {
    memory_ = allocate(bytes, like);
    return;
  }
  std::lock_guard<std::mutex> lock(kept_mutex);
  auto found = std::find_if(kept.begin(), kept.end(),
                            [&](const Kept& item) { return item.device == device && item.stream == stream; });
  if (found == kept.end()) {
    if (kept.size() == most_streams) kept.pop_front();
    found = kept.insert(kept.end(), {device, stream, {}});
  }
  if (!found->memory.defined() || size_t(found->memory.numel()) < bytes) found->memory = allocate(bytes, like);
  memory_ = found->memory;
}

const at::Tensor& PlannedCall::argument(const Frame& f, int index) const {
  static const at::Tensor none;
  return index < 0 ? none : read_tensor(f, arguments_[index]);
}

void PlannedCall::store(Frame& f, at::Tensor&& result, bool given) const {
  if (given && !result.is_inference()) result.unsafeGetTensorImpl()->bump_version();
  if (results_[0].kind == Arg::Tensor) tensor_at(f, results_[0].index) = std::move(result);
}

bool is_plain(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided &&
         tensor.scalar_type() == like.scalar_type() && tensor.device() == like.device() && !tensor.is_neg() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

bool is_plain_half(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf) &&
         is_plain(tensor, tensor);
}

std::unique_ptr<PreparedCall> with_plans(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                         const std::vector<Result>& results,
                                         std::unique_ptr<PreparedCall> by_operator) {
  static const bool kept = c10::utils::check_env("FXWRAP_LIBRARY_PLANS").value_or(true);
  if (!kept) return by_operator;
  std::unique_ptr<PlannedCall> planned = product_call(schema, arguments, results);
  if (planned == nullptr) planned = convolution_call(schema, arguments, results);
  if (planned == nullptr) planned = attention_call(schema, arguments, results);
  if (planned == nullptr) return by_operator;
  planned->set_operator(std::move(by_operator));
  return planned;
}

}  // namespace fxwrap
