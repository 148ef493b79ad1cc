// The functions of a program that are captured and replayed, as the program reaches them, and copies of their operands.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "bridge/frame.h"
#include "bridge/functions.h"
#include "engine/observer.h"
#include "graph_capture/copies.h"
#include "graph_capture/replay.h"

namespace fxwrap {
namespace {

// Whether elements may overlap: a stride is within the extent of the smaller ones.
bool overlaps(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return false;
    if (sizes[i] != 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

// Calls the functions of a program that Python loaded.
Tensors replay_by_operator(const at::Tensor& program, int64_t index, const Tensors& tensors,
                           const std::vector<Number>& numbers) {
  const auto replay_operator = c10::Dispatcher::singleton().findSchema({"fxwrap_runtime::replay", ""});
  TORCH_CHECK(replay_operator.has_value(), "the captured functions of the program are Python's, which is not there");
  c10::List<at::Scalar> scalars;
  for (const Number& number : numbers) {
    if (number.is_real) {
      scalars.push_back(number.real);
    } else if (number.is_bool) {
      scalars.push_back(number.integer != 0);
    } else {
      scalars.push_back(number.integer);
    }
  }
  std::vector<c10::IValue> stack{program, index, c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(tensors)),
                                 std::move(scalars)};
  replay_operator->callBoxed(&stack);
  return stack.at(0).toTensorVector();
}

void delete_functions(void* memory) { delete static_cast<GraphedFunctions*>(memory); }

}  // namespace

at::Tensor tensor_on(const at::Tensor& memory, at::IntArrayRef sizes, at::IntArrayRef strides) {
  c10::TensorImpl* impl = memory.unsafeGetTensorImpl();
  auto result = c10::make_intrusive<c10::TensorImpl>(c10::Storage(impl->storage()), impl->key_set(), impl->dtype());
  result->set_sizes_and_strides(sizes, strides, memory.storage_offset());
  return at::Tensor(std::move(result));
}

std::pair<at::Tensor, at::Tensor> allocate_static_copy(const at::Tensor& item) {
  if (!overlaps(item.sizes(), item.strides())) {
    at::Tensor copy = at::empty_strided(item.sizes(), item.strides(), item.options());
    return {copy, copy};
  }
  int64_t length = 1;
  for (int64_t i = 0; i < item.dim(); ++i) length += (item.size(i) - 1) * item.stride(i);
  at::Tensor copy = at::empty({length}, item.options());
  return {copy, tensor_on(copy, item.sizes(), item.strides())};
}

at::Tensor copy_source(const at::Tensor& item, const at::Tensor& destination) {
  if (item.sizes() == destination.sizes()) return item;
  return tensor_on(item, destination.sizes(), {1});
}

GraphedFunctions::GraphedFunctions(const std::vector<ReplayedFunction>& described) {
  for (const ReplayedFunction& item : described) {
    std::unique_ptr<GraphManager>& manager = managers_[item.device];
    if (manager == nullptr) manager = std::make_unique<GraphManager>(item.device);
    at::Tensor nested = item.functions.empty() ? at::Tensor() : handle(item.functions);
    functions_.push_back(std::make_unique<GraphedFunction>(item, *manager, std::move(nested)));
  }
}

GraphedFunctions::~GraphedFunctions() {
  for (const auto& [_, manager] : managers_) manager->synchronize();
}

at::Tensor GraphedFunctions::handle(const std::vector<ReplayedFunction>& described) {
  const c10::InferenceMode ordinary(false);
  auto functions = std::make_unique<GraphedFunctions>(described);
  at::Tensor tensor = at::from_blob(functions.get(), {0}, delete_functions, at::TensorOptions(at::kLong));
  functions.release();
  return tensor;
}

GraphedFunctions* GraphedFunctions::of_handle(const at::Tensor& handle) {
  const c10::DataPtr& memory = handle.storage().data_ptr();
  return handle.numel() == 0 ? static_cast<GraphedFunctions*>(memory.get()) : nullptr;
}

void bridge::replay(Frame& f, Slot functions, int64_t index, Slots tensors, Numbers numbers, Slots outs) {
  Tensors arguments;
  for (Slot slot : tensors) arguments.push_back(tensor_at(f, slot));
  const at::Tensor& handle = tensor_at(f, functions);
  GraphedFunctions* graphed = GraphedFunctions::of_handle(handle);
  const ObservedLine observed(f, graphed == nullptr ? "replay" : graphed->at(index).name());
  Tensors results = graphed == nullptr ? replay_by_operator(handle, index, arguments, numbers)
                                       : graphed->at(index).call(std::move(arguments), numbers, f.observer);
  auto result = results.begin();
  for (Slot slot : outs) tensor_at(f, slot) = std::move(*result++);
}

}  // namespace fxwrap
