// The library's functions by their names in libcublasLt, declared here as in its documentation.
#include "libraries/cublas.h"

#include <algorithm>
#include <iterator>
#include <mutex>

#include "cuda/driver.h"
#include "libraries/library.h"

namespace fxwrap::cublas {

using Status = int;  // cublasStatus_t
using Pointer = void*;

// cublasLtMatmulHeuristicResult_t
struct HeuristicResult {
  uint64_t algorithm[8];
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

struct Functions {
  Status (*create)(Pointer*);
  Status (*create_operation)(Pointer*, int32_t, int32_t);
  Status (*destroy_operation)(Pointer);
  Status (*set_operation)(Pointer, int32_t, const void*, size_t);
  Status (*create_layout)(Pointer*, int32_t, uint64_t, uint64_t, int64_t);
  Status (*destroy_layout)(Pointer);
  Status (*create_preference)(Pointer*);
  Status (*destroy_preference)(Pointer);
  Status (*set_preference)(Pointer, int32_t, const void*, size_t);
  Status (*find_algorithms)(Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, int, HeuristicResult*, int*);
  Status (*multiply)(Pointer, Pointer, const void*, const void*, Pointer, const void*, Pointer, const void*,
                     const void*, Pointer, void*, Pointer, const void*, void*, size_t, Pointer);

  explicit Functions(SymbolResolver& symbols) {
    symbols.resolve(create, "cublasLtCreate");
    symbols.resolve(create_operation, "cublasLtMatmulDescCreate");
    symbols.resolve(destroy_operation, "cublasLtMatmulDescDestroy");
    symbols.resolve(set_operation, "cublasLtMatmulDescSetAttribute");
    symbols.resolve(create_layout, "cublasLtMatrixLayoutCreate");
    symbols.resolve(destroy_layout, "cublasLtMatrixLayoutDestroy");
    symbols.resolve(create_preference, "cublasLtMatmulPreferenceCreate");
    symbols.resolve(destroy_preference, "cublasLtMatmulPreferenceDestroy");
    symbols.resolve(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    symbols.resolve(find_algorithms, "cublasLtMatmulAlgoGetHeuristic");
    symbols.resolve(multiply, "cublasLtMatmul");
  }
};

namespace {

// Values of the library's enums.
constexpr int32_t compute_float32 = 68;                          // CUBLAS_COMPUTE_32F
constexpr int32_t float32 = 0, float16 = 2, bfloat16 = 14;  // cudaDataType_t
constexpr int32_t transposed = 1;                               // CUBLAS_OP_T
constexpr int32_t transpose_a = 3, transpose_b = 4, epilogue = 7, bias_pointer = 8,
                  input_pointer = 11, input_leading_dimension = 12;  // CUBLASLT_MATMUL_DESC_*
constexpr int32_t most_workspace = 1, reduction_schemes = 3,
                  first_alignment = 5;  // CUBLASLT_MATMUL_PREF_*; the other alignments follow
constexpr uint32_t reduces_in_float32 = 2;  // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE

constexpr uint64_t largest_workspace = 32 << 20;  // as in torch on newer architectures

Library<Functions> library({"libcublasLt.so.13", "libcublasLt.so.12"});
std::mutex mutex;  // of the handles
Pointer handles[driver::max_devices];

// The library's handle for a device, which must be current; null on failure.
Pointer handle_of(const Functions& functions, int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (handles[device] == nullptr && functions.create(&handles[device]) != 0) handles[device] = nullptr;
  return handles[device];
}

}  // namespace

Plan::Plan(const Problem& problem) : problem_(problem), library_(library.functions()) {
  if (library_ == nullptr || problem.device < 0 || problem.device >= driver::max_devices) return;
  const driver::ContextGuard there(problem.device);
  const driver::RelaxedCaptureGuard anyway;
  handle_ = handle_of(*library_, problem.device);
  Pointer preference = nullptr;
  usable_ = handle_ != nullptr && describe() && library_->create_preference(&preference) == 0 &&
            find_algorithm(preference);
  if (preference != nullptr) library_->destroy_preference(preference);
}

Plan::~Plan() {
  for (Pointer layout : layouts_) {
    if (layout != nullptr) library_->destroy_layout(layout);
  }
  if (operation_ != nullptr) library_->destroy_operation(operation_);
}

// Creates the descriptors.
bool Plan::describe() {
  if (library_->create_operation(&operation_, compute_float32, float32) != 0) return false;
  const auto set = [&](int32_t attribute, const auto& value) {
    return library_->set_operation(operation_, attribute, &value, sizeof(value)) == 0;
  };
  const auto add = [&](Pointer& layout, int64_t rows, int64_t columns, const Layout& matrix) {
    const int32_t type = problem_.is_bfloat16 ? bfloat16 : float16;
    if (!matrix.transposed) std::swap(rows, columns);  // a row-major matrix is its column-major transpose
    return library_->create_layout(&layout, type, uint64_t(rows), uint64_t(columns), matrix.leading_dimension) == 0;
  };
  // Until there are operands, only the alignments of their addresses matter.
  const void* bias = reinterpret_cast<const void*>(uintptr_t(problem_.bias_alignment));
  const void* input = reinterpret_cast<const void*>(uintptr_t(256));
  return (!problem_.right.transposed || set(transpose_a, transposed)) && (!problem_.left.transposed || set(transpose_b, transposed)) &&
         set(epilogue, problem_.epilogue) && (problem_.bias_alignment == 0 || set(bias_pointer, bias)) &&
         (!stores_input(problem_.epilogue) || (set(input_pointer, input) && set(input_leading_dimension, problem_.columns))) &&
         add(layouts_[0], problem_.inner, problem_.columns, problem_.right) &&
         add(layouts_[1], problem_.rows, problem_.inner, problem_.left) &&
         add(layouts_[2], problem_.rows, problem_.columns, problem_.result);
}

bool Plan::find_algorithm(Pointer preference) {
  const auto wish = [&](int32_t which, const auto& value) {
    return library_->set_preference(preference, which, &value, sizeof(value)) == 0;
  };
  const uint32_t result = problem_.result.alignment;
  if (!wish(most_workspace, largest_workspace) || !wish(first_alignment, problem_.right.alignment) ||
      !wish(first_alignment + 1, problem_.left.alignment) || !wish(first_alignment + 2, result) ||
      !wish(first_alignment + 3, result)) {
    return false;
  }
  // Partial sums of half precision would make results less exact than those of separate operators.
  if (stores_input(problem_.epilogue) && !wish(reduction_schemes, reduces_in_float32)) return false;
  HeuristicResult heuristic{};
  int count = 0;
  const auto [right, left, output] = layouts_;
  const Status status =
      library_->find_algorithms(handle_, operation_, right, left, output, output, preference, 1, &heuristic, &count);
  if (status != 0 || count == 0 || heuristic.state != 0) return false;
  std::copy(std::begin(heuristic.algorithm), std::end(heuristic.algorithm), algorithm_);
  workspace_ = heuristic.workspace;
  return true;
}

bool Plan::run(const Operands& operands) {
  const float one = 1, zero = 0;
  const driver::ContextGuard there(problem_.device);
  Pointer stream = driver::current_stream(problem_.device);
  const auto set = [&](int32_t attribute, const void* address) {
    return library_->set_operation(operation_, attribute, &address, sizeof(address)) == 0;
  };
  usable_ = (operands.bias == nullptr || set(bias_pointer, operands.bias)) &&
            (operands.input == nullptr || set(input_pointer, operands.input)) &&
            library_->multiply(handle_, operation_, &one, operands.right, layouts_[0], operands.left, layouts_[1], &zero,
                               operands.result, layouts_[2], operands.result, layouts_[2], algorithm_,
                               operands.workspace, workspace_, stream) == 0;
  return usable_;
}

void override_library(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  std::fill(std::begin(handles), std::end(handles), nullptr);
  library.override_library(path);
}

}  // namespace fxwrap::cublas
