// The functions that emitted code calls: operators, memory, tensor properties and checks.
#include "bridge/bridge.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <string>

#include "bridge/calls.h"
#include "bridge/frame.h"
#include "bridge/checks.h"
#include "bridge/functions.h"
#include "engine/checks.h"
#include "engine/observer.h"
#include "cuda/launch.h"
#include "libraries/operators.h"

namespace fxwrap {

static_assert(int(DType::bfloat16) == int(at::kBFloat16) && int(DType::uint64) == int(at::kUInt64) &&
                  int(DType::float8_e4m3fnuz) == int(at::kFloat8_e4m3fnuz) &&
                  int(DType::float4_e2m1fn_x2) == int(at::ScalarType::Float4_e2m1fn_x2),
              "bridge.h spells c10::ScalarType with other values");
static_assert(int(Layout::jagged) == int(at::kJagged), "bridge.h spells c10::Layout with other values");

namespace {

class BoxedCall final : public PreparedCall {
 public:
  BoxedCall(const c10::OperatorHandle& handle, std::vector<Value> arguments, std::vector<Result> results)
      : PreparedCall(std::move(arguments), std::move(results)), handle_(handle) {}

  void run(Frame& f) const override {
    std::vector<c10::IValue> stack;
    stack.reserve(arguments_.size());
    for (const Value& value : arguments_) {
      stack.push_back(read_value(f, value));
    }
    handle_.callBoxed(&stack);
    for (size_t i = 0; i < stack.size(); ++i) {
      store_result(f, results_[i], std::move(stack[i]));
    }
  }

 private:
  c10::OperatorHandle handle_;
};

at::IntArrayRef ref(Ints values) { return {values.begin(), values.size()}; }

// A tensor that begins `distance` bytes after the first element of `memory`.
at::Tensor tensor_on(const at::Tensor& memory, int64_t distance, at::IntArrayRef sizes, at::IntArrayRef strides,
                     DType dtype) {
  const auto meta = c10::scalarTypeToTypeMeta(at::ScalarType(dtype));
  const int64_t item = int64_t(meta.itemsize());
  const int64_t offset = memory.storage_offset() * int64_t(memory.itemsize()) + distance;
  const size_t needed = at::detail::computeStorageNbytes(sizes, strides, meta.itemsize()) + size_t(offset);
  TORCH_CHECK(offset >= 0 && offset % item == 0, "byte ", offset, " cannot hold elements of ", item, " bytes");
  TORCH_CHECK(needed <= memory.storage().nbytes(), "a tensor that ends at byte ", needed, " does not fit memory of ",
              memory.storage().nbytes());
  c10::TensorImpl* impl = memory.unsafeGetTensorImpl();
  auto result = c10::make_intrusive<c10::TensorImpl>(c10::Storage(impl->storage()), impl->key_set(), meta);
  result->set_sizes_and_strides(sizes, strides, offset / item);
  return at::Tensor(std::move(result));
}

c10::List<at::Tensor> tensor_list(Frame& f, Slots slots) {
  c10::List<at::Tensor> list;
  for (Slot slot : slots) list.push_back(tensor_at(f, slot));
  return list;
}

const c10::IValue& element_at(const Frame& f, ListSlot list, Ints path) {
  const c10::IValue* item = &list_at(f, list);
  for (int64_t index : path) {
    const auto items = item->toListRef();
    const int64_t count = int64_t(items.size());
    TORCH_CHECK_INDEX(-count <= index && index < count, "list index out of range");
    item = &items[index < 0 ? index + count : index];
  }
  return *item;
}

at::Scalar scalar_for(const Number& number, Parameter parameter) {
  if (number.is_real) return number.real;
  if (parameter == Parameter::boolean) return number.integer != 0;
  return number.integer;
}

void share_version_counter(const at::Tensor& base, at::Tensor& view) {
  if (base.is_inference() || view.is_inference()) return;
  view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
}

// Whether an operator of torch neither writes its arguments nor returns views of them.
bool is_functional(const c10::FunctionSchema& schema) {
  const auto has_alias = [](const c10::Argument& argument) { return argument.alias_info() != nullptr; };
  return schema.name().rfind("aten::", 0) == 0 &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), has_alias) &&
         std::none_of(schema.returns().begin(), schema.returns().end(), has_alias);
}

std::atomic<uint64_t> deregistrations{0};

class DeregistrationCounter final : public c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override { deregistrations.fetch_add(1); }
};

// Never destroyed: libraries are deregistered until the process ends. In memory, so that leak checkers find its owner.
[[gnu::used]] const auto* const deregistration_counter = new c10::RegistrationHandleRAII(
    c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<DeregistrationCounter>()));

// Returns the site's call if it was prepared after the last deregistration of an operator, which may have been its own.
PreparedCall* prepared_call(const CallSite& site) {
  auto* prepared = static_cast<PreparedCall*>(__atomic_load_n(&site.prepared, __ATOMIC_ACQUIRE));
  const bool is_current = prepared != nullptr && prepared->generation() == deregistrations.load(std::memory_order_relaxed);
  return is_current ? prepared : nullptr;
}

PreparedCall& resolve_call(CallSite& site) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (PreparedCall* prepared = prepared_call(site)) return *prepared;
  PreparedCall* prepared = prepare_call(site).release();
  __atomic_store_n(&site.prepared, prepared, __ATOMIC_RELEASE);
  return *prepared;
}

// Returns an operator, or the bridge's own where Python computes it, too.
c10::OperatorHandle find_operator(const std::string& name, const char* overload) {
  constexpr std::string_view python_namespace = "fxwrap::";
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  if (name.starts_with(python_namespace)) {
    const std::string native = std::string(native_namespace) + "::" + name.substr(python_namespace.size());
    if (const auto handle = dispatcher.findSchema({native, overload})) return *handle;
  }
  return dispatcher.findSchemaOrThrow(name.c_str(), overload);
}

}  // namespace

std::unique_ptr<PreparedCall> prepare_call(const CallSite& site) {
  // Constants created here are ordinary tensors, even if the first caller is in inference mode.
  c10::InferenceMode ordinary(false);
  const uint64_t generation = deregistrations.load();
  const c10::OperatorHandle handle = find_operator(site.operator_->name, site.operator_->overload);
  // The first item of each list is the marker inserted by CALL.
  const auto arguments = prepare_arguments(handle.schema(), site.arguments.data + 1, site.arguments.size - 1);
  const auto results = prepare_results(handle.schema(), site.results.data + 1, site.results.size - 1);
  // Lists of any length are passed unchanged, which typed calls do not support.
  const bool has_lists = std::any_of(arguments.begin(), arguments.end(),
                                     [](const Value& value) { return value.source == Value::Source::DynamicList; });
  auto by_operator = has_lists ? nullptr : make_typed_call(handle, arguments, results);
  if (by_operator == nullptr) by_operator = std::make_unique<BoxedCall>(handle, arguments, results);
  auto prepared = make_planned_call(handle.schema(), arguments, results, std::move(by_operator));
  if (is_functional(handle.schema())) prepared->set_functional();
  prepared->set_generation(generation);
  return prepared;
}

// The architectures that a kernel has code for: "sm_80, sm_90".
static std::string architectures_of(const Kernel& kernel) {
  std::set<int32_t> capabilities;
  for (int64_t i = 0; kernel.compiled != nullptr && i < kernel.compiled->size; ++i) {
    capabilities.insert(kernel.compiled->data[i].capability);
  }
  std::string text;
  for (int32_t capability : capabilities) text += (text.empty() ? "sm_" : ", sm_") + std::to_string(capability);
  return text.empty() ? "none" : text;
}

void launch_by_operator(Frame& f, const Kernel& kernel, const Grid& grid, Slots tensors, Slots outs, Numbers numbers) {
  const auto launch_operator = c10::Dispatcher::singleton().findSchema({"fxwrap_runtime::launch", ""});
  TORCH_CHECK(launch_operator.has_value(), "kernel '", kernel.name, "' has no compiled form for these arguments on this ",
              "device (it has code for ", architectures_of(kernel), "), and only Python compiles another: save the file with ",
              "the GPU's architecture, after a call with such arguments, or import fxwrap");
  c10::List<std::string> signature;
  c10::List<at::Scalar> scalars;
  auto entries = signature_entries(kernel.signature);
  auto entry = entries.begin() + std::min(entries.size(), tensors.size() + outs.size());
  for (const Number& number : numbers) {
    scalars.push_back(scalar_for(number, entry == entries.end() ? Parameter::integer : parameter_of(*entry++)));
  }
  for (std::string& item : entries) signature.push_back(std::move(item));
  std::vector<c10::IValue> stack{
      std::string(kernel.language), std::string(kernel.source), std::move(signature), std::string(kernel.options),
      c10::List<int64_t>({grid.x, grid.y, grid.z}), tensor_list(f, tensors), tensor_list(f, outs), std::move(scalars)};
  launch_operator->callBoxed(&stack);
}

namespace bridge {
namespace {

void call(Frame& f, CallSite& site) {
  const PreparedCall* prepared = prepared_call(site);
  const PreparedCall& ready = prepared != nullptr ? *prepared : resolve_call(site);
  const ObservedLine observed(f, site.operator_->name);
  if (ready.is_functional()) {
    const at::AutoDispatchBelowADInplaceOrView functional;
    ready.run(f);
  } else {
    ready.run(f);
  }
}

void empty_strided(Frame& f, Slot out, Ints sizes, Ints strides, DType dtype, Device& device) {
  const c10::Device where = resolve_device(device);
  const auto scalar_type = at::ScalarType(dtype);
  if (where.is_cpu() && only_plain_tensors() && !at::globalContext().deterministicAlgorithms()) {
    tensor_at(f, out) = at::Tensor(at::detail::empty_strided_cpu(ref(sizes), ref(strides), scalar_type));
    return;
  }
  tensor_at(f, out) = at::empty_strided(ref(sizes), ref(strides), at::TensorOptions(where).dtype(scalar_type));
}

void view(Frame& f, Slot out, Slot base, Ints sizes, Ints strides, int64_t offset) {
  const at::Tensor& from = tensor_at(f, base);
  c10::TensorImpl* impl = from.unsafeGetTensorImpl();
  const int64_t start = from.storage_offset() + offset;
  const bool plain = from.layout() == at::kStrided && !impl->is_python_dispatch() && !from.is_nested();
  if (!plain || !only_plain_tensors()) {
    c10::impl::ExcludeDispatchKeyGuard no_base(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    tensor_at(f, out) = at::as_strided(from, ref(sizes), ref(strides), start);
    share_version_counter(from, tensor_at(f, out));
    return;
  }
  auto window = impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true);
  window->set_sizes_and_strides(ref(sizes), ref(strides), start);
  tensor_at(f, out) = at::Tensor(std::move(window));
}

void reuse(Frame& f, Slot out, Slot from, Ints sizes, Ints strides, DType dtype) {
  const at::Tensor tensor = std::move(tensor_at(f, from));
  tensor_at(f, out) = tensor_on(tensor, 0, ref(sizes), ref(strides), dtype);
}

void pool_slice(Frame& f, Slot out, Slot pool, int64_t offset, Ints sizes, Ints strides, DType dtype) {
  const at::Tensor& memory = tensor_at(f, pool);
  at::Tensor slice = tensor_on(memory, offset, ref(sizes), ref(strides), dtype);
  share_version_counter(memory, slice);
  tensor_at(f, out) = std::move(slice);
}

void copy(Frame& f, Slot to, Slot from) {
  const ObservedLine observed(f, "aten::copy_");
  tensor_at(f, to).copy_(tensor_at(f, from));
}

void alias(Frame& f, Slot out, Slot from) { tensor_at(f, out) = tensor_at(f, from); }
void move(Frame& f, Slot out, Slot from) {
  at::Tensor tensor = std::move(tensor_at(f, from));
  tensor_at(f, out) = std::move(tensor);
}
void drop(Frame& f, Slot slot) { tensor_at(f, slot).reset(); }

void alias_list(Frame& f, ListSlot out, ListSlot from) { list_at(f, out) = list_at(f, from); }
void move_list(Frame& f, ListSlot out, ListSlot from) {
  c10::IValue value = std::move(list_at(f, from));
  list_at(f, out) = std::move(value);
}
void drop_list(Frame& f, ListSlot slot) { list_at(f, slot) = c10::IValue(); }

void element(Frame& f, Slot out, ListSlot list, Ints path) {
  const c10::IValue& item = element_at(f, list, path);
  tensor_at(f, out) = item.isNone() ? at::Tensor() : item.toTensor();
}
int64_t element_int(Frame& f, ListSlot list, Ints path) { return element_at(f, list, path).toScalar().toLong(); }
double element_float(Frame& f, ListSlot list, Ints path) { return element_at(f, list, path).toScalar().toDouble(); }
bool element_bool(Frame& f, ListSlot list, Ints path) { return element_at(f, list, path).toScalar().toBool(); }

bool defined(Frame& f, Slot slot) { return tensor_at(f, slot).defined(); }
int64_t size(Frame& f, Slot slot, int64_t dim) { return tensor_at(f, slot).size(dim); }
int64_t stride(Frame& f, Slot slot, int64_t dim) { return tensor_at(f, slot).stride(dim); }
int64_t storage_offset(Frame& f, Slot slot) { return tensor_at(f, slot).storage_offset(); }
int64_t item_int(Frame& f, Slot slot) { return tensor_at(f, slot).item().toLong(); }
double item_float(Frame& f, Slot slot) { return tensor_at(f, slot).item().toDouble(); }
bool item_bool(Frame& f, Slot slot) { return tensor_at(f, slot).item().toBool(); }
void* data_ptr(Frame& f, Slot slot) { return tensor_at(f, slot).data_ptr(); }
void bump_version(Frame& f, Slot slot) { tensor_at(f, slot).unsafeGetTensorImpl()->bump_version(); }

void save_random_state(Frame& f, Slot out, Device& device) {
  at::Generator generator = at::globalContext().defaultGenerator(resolve_device(device));
  std::lock_guard<std::mutex> lock(generator.mutex());
  tensor_at(f, out) = generator.get_state();
}

void restore_random_state(Frame& f, Slot state, Device& device) {
  at::Generator generator = at::globalContext().defaultGenerator(resolve_device(device));
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(tensor_at(f, state));
}

void exchange_random_state(Frame& f, ListSlot generator, Device& device) {
  at::Generator own = at::globalContext().defaultGenerator(resolve_device(device));
  at::Generator other = list_at(f, generator).toGenerator();
  if (own == other) return;
  std::scoped_lock lock(own.mutex(), other.mutex());
  const at::Tensor state = own.get_state();
  own.set_state(other.get_state());
  other.set_state(state);
}

void fail_assert(Frame&, const char* message, const char* error, const int64_t* shown) {
  checks::fail_assert(message, error, shown);
}

}  // namespace

const Functions functions = {
    .call = call,
    .empty_strided = empty_strided,
    .view = view,
    .reuse = reuse,
    .pool_slice = pool_slice,
    .copy = copy,
    .alias = alias,
    .move = move,
    .drop = drop,
    .alias_list = alias_list,
    .move_list = move_list,
    .drop_list = drop_list,
    .element = element,
    .element_int = element_int,
    .element_float = element_float,
    .element_bool = element_bool,
    .defined = defined,
    .size = size,
    .stride = stride,
    .storage_offset = storage_offset,
    .item_int = item_int,
    .item_float = item_float,
    .item_bool = item_bool,
    .data_ptr = data_ptr,
    .bump_version = bump_version,
    .launch = launch,
    .replay = replay,
    .save_random_state = save_random_state,
    .restore_random_state = restore_random_state,
    .exchange_random_state = exchange_random_state,
    .enter_device = enter_device,
    .enter_stream = enter_stream,
    .exit_device = exit_device,
    .enter_range = enter_range,
    .exit_range = exit_range,
    .check_layout = check_layout,
    .check_rank = check_rank,
    .check_alignment = check_alignment,
    .fail_assert = fail_assert,
};

}  // namespace bridge
}  // namespace fxwrap
