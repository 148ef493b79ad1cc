// The library's functions by their names in libcudnn, declared here as its documentation gives them.
#include "cudnn.h"

#include <algorithm>
#include <iterator>
#include <mutex>

#include "driver.h"
#include "library.h"

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

  explicit Functions(Symbols& symbols) {
    symbols.take(create, "cudnnCreate");
    symbols.take(set_stream, "cudnnSetStream");
    symbols.take(create_descriptor, "cudnnBackendCreateDescriptor");
    symbols.take(destroy_descriptor, "cudnnBackendDestroyDescriptor");
    symbols.take(set_attribute, "cudnnBackendSetAttribute");
    symbols.take(get_attribute, "cudnnBackendGetAttribute");
    symbols.take(finalize, "cudnnBackendFinalize");
    symbols.take(execute, "cudnnBackendExecute");
  }
};

// The library's handle has a stream, so that whoever uses it holds the mutex.
struct Handle {
  std::mutex mutex;
  Pointer handle = nullptr;
  Pointer stream = nullptr;
};

namespace {

// Values of the library's enums: cudnnBackendDescriptorType_t,
constexpr int32_t convolution_descriptor = 1, choice_descriptor = 3, heuristic_descriptor = 4, plan_descriptor = 5;
constexpr int32_t forward_descriptor = 10, graph_descriptor = 15, pack_descriptor = 16, tensor_descriptor = 17;
// cudnnBackendAttributeType_t,
constexpr int32_t of_handle = 0, of_dtype = 1, of_int64 = 3, of_float = 4, of_pointer = 6, of_convolution_mode = 7;
constexpr int32_t of_heuristic_mode = 8, of_descriptor = 15;
// cudnnDataType_t, cudnnConvolutionMode_t, cudnnBackendHeurMode_t,
constexpr int32_t float32 = 0, float16 = 2, bfloat16 = 9, cross_correlation = 1, instantly = 0;
// and cudnnBackendAttributeName_t.
constexpr int32_t computes_in = 100, convolution_mode = 101, dilations = 102, strides_of_filter = 103;
constexpr int32_t paddings_after = 104, paddings_before = 105, spatial_dimensions = 106;
constexpr int32_t heuristic_mode = 200, heuristic_graph = 201, heuristic_results = 202;
constexpr int32_t plan_handle = 400, plan_choice = 401, plan_workspace = 402;
constexpr int32_t forward_alpha = 700, forward_beta = 701, forward_convolution = 702, forward_weight = 703;
constexpr int32_t forward_input = 704, forward_result = 705, graph_handle = 800, graph_operations = 801;
constexpr int32_t tensor_alignment = 900, tensor_dtype = 901, tensor_sizes = 902, tensor_strides = 903, tensor_name = 906;
constexpr int32_t pack_names = 1000, pack_addresses = 1001, pack_workspace = 1003;

constexpr int64_t names[] = {'x', 'w', 'y'};  // of tensors, as we please
constexpr int most_choices = 8;

Library<Functions> library({"libcudnn.so.9"});
Handle handles[driver::most_devices];

// The handle for a device, which must be current; null where there is none to be had.
Handle* handle_of(const Functions& functions, int device) {
  Handle& found = handles[device];
  std::lock_guard<std::mutex> lock(found.mutex);
  if (found.handle == nullptr && functions.create(&found.handle) != 0) found.handle = nullptr;
  return found.handle == nullptr ? nullptr : &found;
}

}  // namespace

Sizes Problem::result() const {
  Sizes sizes{input[0], weight[0]};
  for (int i = 0; i < dimensions - 2; ++i) {
    const int64_t reach = dilation[i] * (weight[i + 2] - 1);
    const int64_t room = input[i + 2] + 2 * padding[i] - reach - 1;
    sizes[i + 2] = room < 0 ? 0 : room / stride[i] + 1;
  }
  return sizes;
}

Plan::Plan(const Problem& problem) : problem_(problem), library_(library.functions()) {
  if (library_ == nullptr || problem.device < 0 || problem.device >= driver::most_devices) return;
  const driver::On there(problem.device);
  const driver::WhileCapturing anyway;
  handle_ = handle_of(*library_, problem.device);
  usable_ = handle_ != nullptr && choose(graph());
}

Plan::~Plan() {
  if (pack_ != nullptr) library_->destroy_descriptor(pack_);
  for (auto descriptor = made_.rbegin(); descriptor != made_.rend(); ++descriptor) {
    library_->destroy_descriptor(*descriptor);
  }
}

// What follows makes descriptors, null where the library refuses. A null descriptor is refused by what takes it.

Plan::Descriptor Plan::create(int32_t kind) {
  Descriptor made = nullptr;
  if (library_->create_descriptor(kind, &made) != 0) return nullptr;
  made_.push_back(made);
  return made;
}

bool Plan::set(Descriptor to, int32_t attribute, int32_t type, int64_t count, const void* values) const {
  return to != nullptr && library_->set_attribute(to, attribute, type, count, values) == 0;
}

bool Plan::finish(Descriptor descriptor) const { return library_->finalize(descriptor) == 0; }

Plan::Descriptor Plan::tensor(int64_t name, const Sizes& sizes, uint32_t alignment) {
  Sizes strides{};
  int64_t step = 1;
  const auto add = [&](int dimension) {
    strides[dimension] = step;
    step *= sizes[dimension];
  };
  if (problem_.channels_last) add(1);
  for (int dimension = problem_.dimensions - 1; dimension > 1; --dimension) add(dimension);
  if (!problem_.channels_last) add(1);
  add(0);
  const int32_t dtype = problem_.bfloat ? bfloat16 : float16;
  const int64_t bytes = alignment;
  Descriptor made = create(tensor_descriptor);
  const bool is_complete = set(made, tensor_dtype, of_dtype, 1, &dtype) && set(made, tensor_name, of_int64, 1, &name) &&
                           set(made, tensor_alignment, of_int64, 1, &bytes) &&
                           set(made, tensor_sizes, of_int64, problem_.dimensions, sizes.data()) &&
                           set(made, tensor_strides, of_int64, problem_.dimensions, strides.data());
  return is_complete && finish(made) ? made : nullptr;
}

// A graph of one operation.
Plan::Descriptor Plan::graph() {
  const Descriptor input = tensor(names[0], problem_.input, problem_.input_alignment);
  const Descriptor weight = tensor(names[1], problem_.weight, problem_.weight_alignment);
  const Descriptor result = tensor(names[2], problem_.result(), problem_.result_alignment);
  if (input == nullptr || weight == nullptr || result == nullptr) return nullptr;
  const int64_t spatial = problem_.dimensions - 2;
  const Descriptor convolution = create(convolution_descriptor);
  if (!set(convolution, computes_in, of_dtype, 1, &float32) ||
      !set(convolution, convolution_mode, of_convolution_mode, 1, &cross_correlation) ||
      !set(convolution, spatial_dimensions, of_int64, 1, &spatial) ||
      !set(convolution, dilations, of_int64, spatial, problem_.dilation.data()) ||
      !set(convolution, strides_of_filter, of_int64, spatial, problem_.stride.data()) ||
      !set(convolution, paddings_before, of_int64, spatial, problem_.padding.data()) ||
      !set(convolution, paddings_after, of_int64, spatial, problem_.padding.data()) || !finish(convolution)) {
    return nullptr;
  }
  const float one = 1, zero = 0;
  const Descriptor forward = create(forward_descriptor);
  if (!set(forward, forward_convolution, of_descriptor, 1, &convolution) ||
      !set(forward, forward_input, of_descriptor, 1, &input) || !set(forward, forward_weight, of_descriptor, 1, &weight) ||
      !set(forward, forward_result, of_descriptor, 1, &result) || !set(forward, forward_alpha, of_float, 1, &one) ||
      !set(forward, forward_beta, of_float, 1, &zero) || !finish(forward)) {
    return nullptr;
  }
  const Descriptor made = create(graph_descriptor);
  const bool is_complete = set(made, graph_handle, of_handle, 1, &handle_->handle) &&
                           set(made, graph_operations, of_descriptor, 1, &forward);
  return is_complete && finish(made) ? made : nullptr;
}

// Takes the first of the ways that the library proposes which it then can go, as torch does.
bool Plan::choose(Descriptor graph) {
  const Descriptor heuristic = create(heuristic_descriptor);
  if (graph == nullptr || !set(heuristic, heuristic_graph, of_descriptor, 1, &graph) ||
      !set(heuristic, heuristic_mode, of_heuristic_mode, 1, &instantly) || !finish(heuristic)) {
    return false;
  }
  Descriptor choices[most_choices];
  std::generate(std::begin(choices), std::end(choices), [&] { return create(choice_descriptor); });
  int64_t count = 0;
  if (std::count(std::begin(choices), std::end(choices), nullptr) > 0 ||
      library_->get_attribute(heuristic, heuristic_results, of_descriptor, most_choices, &count, choices) != 0) {
    return false;
  }
  for (int64_t i = 0; i < std::min<int64_t>(count, most_choices); ++i) {
    const Descriptor plan = create(plan_descriptor);
    int64_t values = 0;
    if (set(plan, plan_handle, of_handle, 1, &handle_->handle) && set(plan, plan_choice, of_descriptor, 1, &choices[i]) &&
        finish(plan) && library_->get_attribute(plan, plan_workspace, of_int64, 1, &values, &workspace_) == 0) {
      plan_ = plan;
      return true;
    }
  }
  return false;
}

// Puts addresses where the library reads them, if they are not there already.
bool Plan::pack(const Operands& operands) {
  if (pack_ != nullptr && packed_ == operands) return true;
  if (pack_ != nullptr) library_->destroy_descriptor(pack_);
  pack_ = nullptr;
  if (library_->create_descriptor(pack_descriptor, &pack_) != 0) return false;
  packed_ = operands;
  const void* addresses[] = {operands.input, operands.weight, operands.result};
  return set(pack_, pack_addresses, of_pointer, std::size(names), addresses) &&
         set(pack_, pack_names, of_int64, std::size(names), names) &&
         set(pack_, pack_workspace, of_pointer, 1, &operands.workspace) && finish(pack_);
}

bool Plan::run(const Operands& operands) {
  const driver::On there(problem_.device);
  Pointer stream = driver::current_stream(problem_.device);
  std::lock_guard<std::mutex> lock(handle_->mutex);
  usable_ = pack(operands);
  if (usable_ && handle_->stream != stream) {
    usable_ = library_->set_stream(handle_->handle, stream) == 0;
    if (usable_) handle_->stream = stream;
  }
  usable_ = usable_ && library_->execute(handle_->handle, plan_, pack_) == 0;
  return usable_;
}

void use(const char* path) {
  for (Handle& handle : handles) {
    std::lock_guard<std::mutex> lock(handle.mutex);
    handle.handle = handle.stream = nullptr;
  }
  library.use(path);
}

}  // namespace fxwrap::cudnn
