#include "libraries/plans.h"

#include <ATen/ops/empty.h>
#include <c10/util/env.h>

#include <algorithm>
#include <deque>

#include "cuda/driver.h"

namespace fxwrap {
namespace {

struct CachedWorkspace {
  int device;
  void* stream;
  at::Tensor memory;
};

constexpr size_t max_streams = 16;
std::mutex workspaces_mutex;
auto& workspaces = *new std::deque<CachedWorkspace>;  // never destroyed: the allocator is destroyed before this library

at::Tensor allocate(size_t bytes, const at::Tensor& like) {
  return at::empty({int64_t(bytes)}, like.options().dtype(at::kByte));
}

}  // namespace

Workspace::Workspace(size_t bytes, const at::Tensor& like) {
  if (bytes == 0) return;
  const int device = like.device().index();
  void* const stream = driver::current_stream(device);
  if (bytes > max_cached_bytes || driver::is_capturing(stream)) {
    memory_ = allocate(bytes, like);
    return;
  }
  std::lock_guard<std::mutex> lock(workspaces_mutex);
  auto workspace = std::find_if(workspaces.begin(), workspaces.end(),
                            [&](const CachedWorkspace& item) { return item.device == device && item.stream == stream; });
  if (workspace == workspaces.end()) {
    if (workspaces.size() == max_streams) workspaces.pop_front();
    workspace = workspaces.insert(workspaces.end(), {device, stream, {}});
  }
  if (!workspace->memory.defined() || size_t(workspace->memory.numel()) < bytes) workspace->memory = allocate(bytes, like);
  memory_ = workspace->memory;
}

const at::Tensor& PlannedCall::argument(const Frame& f, int index) const {
  static const at::Tensor none;
  return index < 0 ? none : read_tensor(f, arguments_[index]);
}

void PlannedCall::store(Frame& f, at::Tensor&& result, bool is_out_variant) const {
  if (is_out_variant && !result.is_inference()) result.unsafeGetTensorImpl()->bump_version();
  if (results_[0].kind == Arg::Tensor) tensor_at(f, results_[0].index) = std::move(result);
}

bool uses_library_plans() {
  static const bool is_enabled = c10::utils::check_env("FXWRAP_LIBRARY_PLANS").value_or(true);
  return is_enabled;
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

std::unique_ptr<PreparedCall> make_planned_call(const c10::FunctionSchema& schema, const std::vector<Value>& arguments,
                                         const std::vector<Result>& results,
                                         std::unique_ptr<PreparedCall> fallback) {
  if (!uses_library_plans()) return fallback;
  std::unique_ptr<PreparedCall> call = std::move(fallback);
  for (auto make : {matmul_call, convolution_call, attention_call, cpu_addmm_call}) {
    std::unique_ptr<PlannedCall> planned = make(schema, arguments, results);
    if (planned == nullptr) continue;
    planned->set_fallback(std::move(call));
    call = std::move(planned);
  }
  return call;
}

}  // namespace fxwrap
