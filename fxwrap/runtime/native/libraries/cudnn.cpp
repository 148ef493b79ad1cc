// The library's functions by their names in libcudnn, declared here as in its documentation.
#include "libraries/cudnn.h"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>

#include "cuda/driver.h"
#include "libraries/library.h"

namespace fxwrap::cudnn {

using Status = int;  // cudnnStatus_t
using Pointer = void*;

struct Functions {
  Status (*create)(Pointer*);
  Status (*set_stream)(Pointer, Pointer);
  Status (*create_descriptor)(int32_t, Pointer*);
  Status (*destroy_descriptor)(Pointer);
  Status (*set_attribute)(Pointer, int32_t, int32_t, int64_t, const void*);
  Status (*get_attribute)(Pointer, int32_t, int32_t, int64_t, int64_t*, void*);
  Status (*finalize)(Pointer);
  Status (*execute)(Pointer, Pointer, Pointer);

  explicit Functions(SymbolResolver& symbols) {
    symbols.resolve(create, "cudnnCreate");
    symbols.resolve(set_stream, "cudnnSetStream");
    symbols.resolve(create_descriptor, "cudnnBackendCreateDescriptor");
    symbols.resolve(destroy_descriptor, "cudnnBackendDestroyDescriptor");
    symbols.resolve(set_attribute, "cudnnBackendSetAttribute");
    symbols.resolve(get_attribute, "cudnnBackendGetAttribute");
    symbols.resolve(finalize, "cudnnBackendFinalize");
    symbols.resolve(execute, "cudnnBackendExecute");
  }
};

// The library's handle has a stream, so its users hold the mutex.
struct Handle {
  std::mutex mutex;
  Pointer handle = nullptr;
  Pointer stream = nullptr;
};

namespace {

// Values of the library's enums: cudnnBackendDescriptorType_t,
constexpr int32_t pointwise_descriptor = 0, convolution_descriptor = 1, engine_config_descriptor = 3, heuristic_descriptor = 4;
constexpr int32_t plan_descriptor = 5, convolution_forward_descriptor = 10, pointwise_operation_descriptor = 13, operation_graph_descriptor = 15;
constexpr int32_t variant_pack_descriptor = 16, tensor_descriptor = 17, matmul_descriptor = 18, matmul_operation_descriptor = 19;
constexpr int32_t reduction_descriptor = 21, reduction_operation_descriptor = 22;
// cudnnBackendAttributeType_t,
constexpr int32_t of_handle = 0, of_dtype = 1, of_bool = 2, of_int64 = 3, of_float = 4, of_pointer = 6;
constexpr int32_t of_convolution_mode = 7, of_heuristic_mode = 8, of_pointwise_mode = 14, of_descriptor = 15;
constexpr int32_t of_reduction_mode = 18;
// cudnnDataType_t, cudnnConvolutionMode_t, cudnnBackendHeurMode_t,
constexpr int32_t float32 = 0, float16 = 2, bfloat16 = 9, boolean = 11, cross_correlation = 1, heuristic_instant = 0;
constexpr int32_t by_trees = 3;
// cudnnPointwiseMode_t, cudnnReduceTensorOp_t,
constexpr int32_t add = 0, times = 1, divide = 6, subtract = 9, exponential = 13, logarithm = 15;
constexpr int32_t is_no_less = 303, own_index = 501, select_either = 601;
constexpr int32_t sum = 0, maximum = 3;
// and cudnnBackendAttributeName_t.
constexpr int32_t pointwise_mode = 0, pointwise_dtype = 1, pointwise_axis = 9;
constexpr int32_t convolution_dtype = 100, convolution_mode = 101, dilations = 102, strides_of_filter = 103;
constexpr int32_t paddings_after = 104, paddings_before = 105, spatial_dimensions = 106;
constexpr int32_t heuristic_mode = 200, heuristic_graph = 201, heuristic_results = 202;
constexpr int32_t plan_handle = 400, plan_choice = 401, plan_workspace = 402;
constexpr int32_t forward_alpha = 700, forward_beta = 701, forward_convolution = 702, forward_weight = 703;
constexpr int32_t forward_input = 704, forward_result = 705;
constexpr int32_t apply_what = 750, apply_operands[] = {751, 752, 758}, apply_result = 753;
constexpr int32_t graph_handle = 800, graph_operations = 801;
constexpr int32_t tensor_alignment = 900, tensor_dtype = 901, tensor_sizes = 902, tensor_strides = 903, tensor_name = 906;
constexpr int32_t tensor_is_virtual = 907, tensor_is_by_value = 908;
constexpr int32_t pack_names = 1000, pack_addresses = 1001, pack_workspace = 1003;
constexpr int32_t matmul_compute_dtype = 1500, matmul_a = 1520, matmul_b = 1521, matmul_c = 1522;
constexpr int32_t matmul_operation = 1523;
constexpr int32_t reduction_mode = 1600, reduction_dtype = 1601, reduce_x = 1610, reduce_result = 1611, reduction_operation = 1612;

constexpr int max_engine_configs = 8;

Library<Functions> library({"libcudnn.so.9"});
std::mutex handles_mutex;
Handle* handles[driver::max_devices];  // created on first use, never freed

// The handle for a device, which must be current; null on failure.
Handle* handle_of(const Functions& functions, int device) {
  std::lock_guard<std::mutex> lock(handles_mutex);
  Handle*& handle = handles[device];
  if (handle == nullptr) {
    auto created = std::make_unique<Handle>();
    if (functions.create(&created->handle) == 0 && created->handle != nullptr) handle = created.release();
  }
  return handle;
}

// The engines of this process by their problems, the newest last.
template <class Problem>
struct Engines {
  static constexpr size_t most = 1024;
  std::mutex mutex;
  std::deque<std::pair<Problem, std::shared_ptr<const Engine>>> known;

  template <class EngineType>
  std::shared_ptr<const Engine> find(const Problem& problem) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto entry = std::find_if(known.rbegin(), known.rend(), [&](const auto& item) { return item.first == problem; });
    if (entry != known.rend()) return entry->second;
    if (known.size() == most) known.pop_front();
    return known.emplace_back(problem, std::make_shared<const EngineType>(problem)).second;
  }
  void forget() {
    std::lock_guard<std::mutex> lock(mutex);
    known.clear();
  }
};

// Never destroyed: the library may be gone before this one.
auto& convolutions = *new Engines<Convolution>;
auto& attentions = *new Engines<Attention>;

int32_t half(bool is_bfloat) { return is_bfloat ? bfloat16 : float16; }

}  // namespace

// --- engines and plans ------------------------------------------------------------------------------------------------

Engine::Engine(int device) : device_(device), library_(library.functions()) {
  if (library_ == nullptr || device < 0 || device >= driver::max_devices) return;
  const driver::ContextGuard there(device);
  const driver::RelaxedCaptureGuard anyway;
  handle_ = handle_of(*library_, device);
}

Engine::~Engine() {
  for (auto descriptor = descriptors_.rbegin(); descriptor != descriptors_.rend(); ++descriptor) {
    library_->destroy_descriptor(*descriptor);
  }
}

Engine::Descriptor Engine::make(int32_t kind) {
  Descriptor descriptor = nullptr;
  if (handle_ == nullptr || library_->create_descriptor(kind, &descriptor) != 0) return nullptr;
  descriptors_.push_back(descriptor);
  return descriptor;
}

bool Engine::set(Descriptor to, int32_t attribute, int32_t type, const void* values, int64_t count) const {
  return to != nullptr && library_->set_attribute(to, attribute, type, count, values) == 0;
}

bool Engine::set(Descriptor to, int32_t attribute, Descriptor value) const {
  return value != nullptr && set(to, attribute, of_descriptor, &value);
}

bool Engine::finish(Descriptor descriptor) const { return library_->finalize(descriptor) == 0; }

Engine::Descriptor Engine::tensor(const Tensor& what) {
  const int64_t name = ++tensors_, bytes = what.alignment, dimensions = int64_t(what.sizes.size());
  const Descriptor descriptor = make(tensor_descriptor);
  const bool is_complete = set(descriptor, tensor_dtype, of_dtype, &what.dtype) &&
                           set(descriptor, tensor_name, of_int64, &name) &&
                           set(descriptor, tensor_alignment, of_int64, &bytes) &&
                           set(descriptor, tensor_sizes, of_int64, what.sizes.data(), dimensions) &&
                           set(descriptor, tensor_strides, of_int64, what.strides.data(), dimensions) &&
                           (!what.is_virtual || set(descriptor, tensor_is_virtual, of_bool, &what.is_virtual)) &&
                           (!what.is_by_value || set(descriptor, tensor_is_by_value, of_bool, &what.is_by_value));
  if (!is_complete || !finish(descriptor)) return nullptr;
  if (!what.is_virtual) uids_.push_back(name);
  return descriptor;
}

void Engine::choose(const std::vector<Descriptor>& operations, int32_t mode) {
  if (std::count(operations.begin(), operations.end(), nullptr) > 0) return;
  const driver::ContextGuard there(device_);
  const driver::RelaxedCaptureGuard anyway;
  std::lock_guard<std::mutex> lock(handle_->mutex);
  const Descriptor graph = make(operation_graph_descriptor), heuristic = make(heuristic_descriptor);
  usable_ = set(graph, graph_handle, of_handle, &handle_->handle) &&
            set(graph, graph_operations, of_descriptor, operations.data(), int64_t(operations.size())) &&
            finish(graph) && set(heuristic, heuristic_graph, graph) &&
            set(heuristic, heuristic_mode, of_heuristic_mode, &mode) && finish(heuristic) && find_plan(heuristic);
}

bool Engine::find_plan(Descriptor heuristic) {
  Descriptor choices[max_engine_configs];
  std::generate(std::begin(choices), std::end(choices), [&] { return make(engine_config_descriptor); });
  int64_t count = 0;
  if (std::count(std::begin(choices), std::end(choices), nullptr) > 0 ||
      library_->get_attribute(heuristic, heuristic_results, of_descriptor, max_engine_configs, &count, choices) != 0) {
    return false;
  }
  for (int64_t i = 0; i < std::min<int64_t>(count, max_engine_configs); ++i) {
    int64_t values = 0;
    plan_ = make(plan_descriptor);
    if (set(plan_, plan_handle, of_handle, &handle_->handle) && set(plan_, plan_choice, choices[i]) && finish(plan_) &&
        library_->get_attribute(plan_, plan_workspace, of_int64, 1, &values, &workspace_) == 0) {
      return true;
    }
  }
  return false;
}

Plan::Plan(std::shared_ptr<const Engine> engine) : engine_(std::move(engine)), usable_(engine_->usable_) {}

Plan::~Plan() {
  if (pack_ != nullptr) engine_->library_->destroy_descriptor(pack_);
}

// Passes the addresses to the library if they changed.
bool Plan::pack(const std::vector<const void*>& memory, void* workspace) {
  if (pack_ != nullptr && packed_ == memory && packed_workspace_ == workspace) return true;
  const Functions& library = *engine_->library_;
  if (pack_ != nullptr) library.destroy_descriptor(pack_);
  pack_ = nullptr;
  const std::vector<int64_t>& names = engine_->uids_;
  if (memory.size() != names.size() || library.create_descriptor(variant_pack_descriptor, &pack_) != 0) return false;
  packed_ = memory;
  packed_workspace_ = workspace;
  const int64_t count = int64_t(names.size());
  return engine_->set(pack_, pack_addresses, of_pointer, packed_.data(), count) &&
         engine_->set(pack_, pack_names, of_int64, names.data(), count) &&
         engine_->set(pack_, pack_workspace, of_pointer, &workspace) && engine_->finish(pack_);
}

bool Plan::run(const std::vector<const void*>& memory, void* workspace) {
  Handle& handle = *engine_->handle_;
  const driver::ContextGuard there(engine_->device_);
  Pointer stream = driver::current_stream(engine_->device_);
  std::lock_guard<std::mutex> lock(handle.mutex);
  usable_ = pack(memory, workspace);
  if (usable_ && handle.stream != stream) {
    usable_ = engine_->library_->set_stream(handle.handle, stream) == 0;
    if (usable_) handle.stream = stream;
  }
  usable_ = usable_ && engine_->library_->execute(handle.handle, engine_->plan_, pack_) == 0;
  return usable_;
}

// --- convolutions -----------------------------------------------------------------------------------------------------

Sizes Convolution::result() const {
  Sizes sizes{input[0], weight[0]};
  for (int i = 0; i < dimensions - 2; ++i) {
    const int64_t reach = dilation[i] * (weight[i + 2] - 1);
    const int64_t room = input[i + 2] + 2 * padding[i] - reach - 1;
    sizes[i + 2] = room < 0 ? 0 : room / stride[i] + 1;
  }
  return sizes;
}

class ConvolutionEngine final : public Engine {
 public:
  explicit ConvolutionEngine(const Convolution& problem) : Engine(problem.device) {
    choose({operation(problem)}, heuristic_instant);
  }

 private:
  Descriptor operation(const Convolution& problem);
};

ConvolutionPlan::ConvolutionPlan(const Convolution& problem)
    : Plan(convolutions.find<ConvolutionEngine>(problem)), problem_(problem) {}

Engine::Descriptor ConvolutionEngine::operation(const Convolution& problem) {
  const auto dense = [&](const Sizes& sizes, uint32_t alignment) {
    Tensor what{{sizes.begin(), sizes.begin() + problem.dimensions}, {}, half(problem.is_bfloat16), alignment};
    what.strides.resize(what.sizes.size());
    int64_t step = 1;
    const auto follow = [&](int dimension) {
      what.strides[dimension] = step;
      step *= sizes[dimension];
    };
    if (problem.channels_last) follow(1);
    for (int dimension = problem.dimensions - 1; dimension > 1; --dimension) follow(dimension);
    if (!problem.channels_last) follow(1);
    follow(0);
    return tensor(what);
  };
  const Descriptor input = dense(problem.input, problem.input_alignment);
  const Descriptor weight = dense(problem.weight, problem.weight_alignment);
  const Descriptor result = dense(problem.result(), problem.result_alignment);
  const int64_t spatial = problem.dimensions - 2;
  const Descriptor how = make(convolution_descriptor);
  const bool is_known = set(how, convolution_dtype, of_dtype, &float32) &&
                        set(how, convolution_mode, of_convolution_mode, &cross_correlation) &&
                        set(how, spatial_dimensions, of_int64, &spatial) &&
                        set(how, dilations, of_int64, problem.dilation.data(), spatial) &&
                        set(how, strides_of_filter, of_int64, problem.stride.data(), spatial) &&
                        set(how, paddings_before, of_int64, problem.padding.data(), spatial) &&
                        set(how, paddings_after, of_int64, problem.padding.data(), spatial) && finish(how);
  const float one = 1, zero = 0;
  const Descriptor forward = make(convolution_forward_descriptor);
  const bool is_complete = is_known && set(forward, forward_convolution, how) && set(forward, forward_input, input) &&
                           set(forward, forward_weight, weight) && set(forward, forward_result, result) &&
                           set(forward, forward_alpha, of_float, &one) && set(forward, forward_beta, of_float, &zero);
  return is_complete && finish(forward) ? forward : nullptr;
}

// --- attention --------------------------------------------------------------------------------------------------------

// The library recognises attention by its operations in the order of the documentation; these include the logarithms of
// the sums, which only a backward reads.
class AttentionEngine final : public Engine {
 public:
  explicit AttentionEngine(const Attention& problem);

 private:
  // Each returns a new operation. Applied ones compute in float32 or bool, and may have an axis.
  Descriptor multiply(Descriptor left, Descriptor right, Descriptor result);
  Descriptor apply(int32_t mode, std::initializer_list<Descriptor> operands, Descriptor result, int32_t dtype = float32,
                   std::optional<int64_t> axis = std::nullopt);
  Descriptor reduce(int32_t mode, Descriptor x, Descriptor result);
};

AttentionPlan::AttentionPlan(const Attention& problem)
    : Plan(attentions.find<AttentionEngine>(problem)), problem_(problem) {}

AttentionEngine::AttentionEngine(const Attention& problem) : Engine(problem.device) {
  const int64_t batch = problem.query[0], heads = problem.query[1], rows = problem.query[2], columns = problem.key[2];
  const int32_t dtype = half(problem.is_bfloat16);
  const auto stored_tensor = [&](const Sizes4& sizes, const Sizes4& strides) {
    return tensor({{sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, dtype});
  };
  // Tensors inside the engine: one element per row and column, or per row.
  const auto scores = [&](int32_t of) {
    return tensor({{batch, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}, of, 16, true});
  };
  const auto one_a_row = [&] { return tensor({{batch, heads, rows, 1}, {heads * rows, rows, 1, 1}, float32, 16, true}); };
  const auto transposed = [](Sizes4 numbers) {
    std::swap(numbers[2], numbers[3]);
    return numbers;
  };
  std::vector<Descriptor> operations;
  const Descriptor query = stored_tensor(problem.query, problem.query_strides);
  const Descriptor key = stored_tensor(transposed(problem.key), transposed(problem.key_strides));
  const auto one_number = [&] { return tensor({{1, 1, 1, 1}, {1, 1, 1, 1}, float32, 16, false, true}); };
  const Descriptor raw_scores = scores(float32), number = one_number();
  Descriptor scaled = scores(float32);
  operations.push_back(multiply(query, key, raw_scores));
  operations.push_back(apply(times, {raw_scores, number}, scaled));
  if (problem.has_bias) {
    const Descriptor bias = stored_tensor(problem.bias, problem.bias_strides), biased = scores(float32);
    operations.push_back(apply(add, {scaled, bias}, biased));
    scaled = biased;
  }
  if (problem.is_causal) {
    const Descriptor row = scores(float32), column = scores(float32), is_seen = scores(boolean);
    const Descriptor lowest = one_number(), masked = scores(float32);
    operations.push_back(apply(own_index, {scaled}, row, float32, 2));
    operations.push_back(apply(own_index, {scaled}, column, float32, 3));
    operations.push_back(apply(is_no_less, {row, column}, is_seen, boolean));
    operations.push_back(apply(select_either, {scaled, lowest, is_seen}, masked));
    scaled = masked;
  }
  const Descriptor largest = one_a_row(), shifted = scores(float32), exponentials = scores(float32);
  const Descriptor sums = one_a_row(), logarithms = one_a_row(), stored = one_a_row();
  const Descriptor shares = scores(dtype), value = stored_tensor(problem.value, problem.value_strides);
  const Descriptor result = stored_tensor(problem.query, problem.result_strides);
  operations.push_back(reduce(maximum, scaled, largest));
  operations.push_back(apply(subtract, {scaled, largest}, shifted));
  operations.push_back(apply(exponential, {shifted}, exponentials));
  operations.push_back(reduce(sum, exponentials, sums));
  operations.push_back(apply(logarithm, {sums}, logarithms));
  operations.push_back(apply(add, {largest, logarithms}, stored));
  operations.push_back(apply(divide, {exponentials, sums}, shares));
  operations.push_back(multiply(shares, value, result));
  choose(operations, by_trees);
}

Engine::Descriptor AttentionEngine::multiply(Descriptor left, Descriptor right, Descriptor result) {
  const Descriptor how = make(matmul_descriptor), operation = make(matmul_operation_descriptor);
  const bool is_complete = set(how, matmul_compute_dtype, of_dtype, &float32) && finish(how) &&
                           set(operation, matmul_operation, how) && set(operation, matmul_a, left) &&
                           set(operation, matmul_b, right) && set(operation, matmul_c, result);
  return is_complete && finish(operation) ? operation : nullptr;
}

Engine::Descriptor AttentionEngine::apply(int32_t mode, std::initializer_list<Descriptor> operands, Descriptor result,
                                          int32_t dtype, std::optional<int64_t> axis) {
  const Descriptor how = make(pointwise_descriptor), operation = make(pointwise_operation_descriptor);
  bool is_complete = set(how, pointwise_mode, of_pointwise_mode, &mode) && set(how, pointwise_dtype, of_dtype, &dtype) &&
                     (!axis || set(how, pointwise_axis, of_int64, &*axis)) && finish(how) &&
                     set(operation, apply_what, how) && set(operation, apply_result, result);
  const int32_t* place = apply_operands;
  for (const Descriptor operand : operands) is_complete = is_complete && set(operation, *place++, operand);
  return is_complete && finish(operation) ? operation : nullptr;
}

Engine::Descriptor AttentionEngine::reduce(int32_t mode, Descriptor x, Descriptor result) {
  const Descriptor how = make(reduction_descriptor), operation = make(reduction_operation_descriptor);
  const bool is_complete = set(how, reduction_mode, of_reduction_mode, &mode) &&
                           set(how, reduction_dtype, of_dtype, &float32) && finish(how) &&
                           set(operation, reduction_operation, how) && set(operation, reduce_x, x) &&
                           set(operation, reduce_result, result);
  return is_complete && finish(operation) ? operation : nullptr;
}

void override_library(const char* path) {
  {
    std::lock_guard<std::mutex> lock(handles_mutex);
    for (Handle*& handle : handles) handle = nullptr;  // existing plans keep their handles
  }
  convolutions.forget();
  attentions.forget();
  library.override_library(path);
}

}  // namespace fxwrap::cudnn
