// The library's functions by their names in libcublasLt, declared here as its documentation gives them.
#include "cublas.h"

#include <algorithm>
#include <iterator>
#include <mutex>

#include "driver.h"
#include "library.h"

namespace fxwrap::cublas {

using Status = int;  // cublasStatus_t
using Pointer = void*;

// cublasLtMatmulHeuristicResult_t
struct Found {
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
  Status (*find_algorithms)(Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, int, Found*, int*);
  Status (*multiply)(Pointer, Pointer, const void*, const void*, Pointer, const void*, Pointer, const void*,
                     const void*, Pointer, void*, Pointer, const void*, void*, size_t, Pointer);

  explicit Functions(Symbols& symbols) {
    symbols.take(create, "cublasLtCreate");
    symbols.take(create_operation, "cublasLtMatmulDescCreate");
    symbols.take(destroy_operation, "cublasLtMatmulDescDestroy");
    symbols.take(set_operation, "cublasLtMatmulDescSetAttribute");
    symbols.take(create_layout, "cublasLtMatrixLayoutCreate");
    symbols.take(destroy_layout, "cublasLtMatrixLayoutDestroy");
    symbols.take(create_preference, "cublasLtMatmulPreferenceCreate");
    symbols.take(destroy_preference, "cublasLtMatmulPreferenceDestroy");
    symbols.take(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    symbols.take(find_algorithms, "cublasLtMatmulAlgoGetHeuristic");
    symbols.take(multiply, "cublasLtMatmul");
  }
};

namespace {

// Values of the library's enums.
constexpr int32_t in_float32 = 68;                          // CUBLAS_COMPUTE_32F
constexpr int32_t float32 = 0, float16 = 2, bfloat16 = 14;  // cudaDataType_t
constexpr int32_t turned = 1;                               // CUBLAS_OP_T
constexpr int32_t first_turned = 3, second_turned = 4, epilogue = 7, bias_pointer = 8;  // CUBLASLT_MATMUL_DESC_*
constexpr int32_t most_workspace = 1, first_alignment = 5;  // CUBLASLT_MATMUL_PREF_*; the other alignments follow

constexpr uint64_t largest_workspace = 32 << 20;  // what torch gives the library on newer chips

Library<Functions> library({"libcublasLt.so.13", "libcublasLt.so.12"});
std::mutex mutex;  // of the handles
Pointer handles[driver::most_devices];

// The library's handle for a device, which must be current; null where there is none to be had.
Pointer handle_of(const Functions& functions, int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (handles[device] == nullptr && functions.create(&handles[device]) != 0) handles[device] = nullptr;
  return handles[device];
}

}  // namespace

Plan::Plan(const Problem& problem) : problem_(problem), library_(library.functions()) {
  if (library_ == nullptr || problem.device < 0 || problem.device >= driver::most_devices) return;
  const driver::On there(problem.device);
  const driver::WhileCapturing anyway;
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

// Makes the descriptors.
bool Plan::describe() {
  if (library_->create_operation(&operation_, in_float32, float32) != 0) return false;
  const auto set = [&](int32_t attribute, const auto& value) {
    return library_->set_operation(operation_, attribute, &value, sizeof(value)) == 0;
  };
  const auto add = [&](Pointer& layout, int64_t rows, int64_t columns, const Layout& given) {
    const int32_t type = problem_.bfloat ? bfloat16 : float16;
    if (!given.turned) std::swap(rows, columns);  // what lies by rows is another matrix by columns
    return library_->create_layout(&layout, type, uint64_t(rows), uint64_t(columns), given.step) == 0;
  };
  // Only the alignment of the bias is looked at, until there is one.
  const void* bias = reinterpret_cast<const void*>(uintptr_t(problem_.bias_alignment));
  return (!problem_.right.turned || set(first_turned, turned)) && (!problem_.left.turned || set(second_turned, turned)) &&
         set(epilogue, problem_.epilogue) && (problem_.epilogue == Epilogue::none || set(bias_pointer, bias)) &&
         add(layouts_[0], problem_.terms, problem_.columns, problem_.right) &&
         add(layouts_[1], problem_.rows, problem_.terms, problem_.left) &&
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
  Found found{};
  int count = 0;
  const auto [right, left, given] = layouts_;
  const Status status =
      library_->find_algorithms(handle_, operation_, right, left, given, given, preference, 1, &found, &count);
  if (status != 0 || count == 0 || found.state != 0) return false;
  std::copy(std::begin(found.algorithm), std::end(found.algorithm), algorithm_);
  workspace_ = found.workspace;
  return true;
}

bool Plan::run(const Operands& operands) {
  const float one = 1, zero = 0;
  const driver::On there(problem_.device);
  Pointer stream = driver::current_stream(problem_.device);
  usable_ = (operands.bias == nullptr ||
             library_->set_operation(operation_, bias_pointer, &operands.bias, sizeof(operands.bias)) == 0) &&
            library_->multiply(handle_, operation_, &one, operands.right, layouts_[0], operands.left, layouts_[1], &zero,
                               operands.result, layouts_[2], operands.result, layouts_[2], algorithm_,
                               operands.workspace, workspace_, stream) == 0;
  return usable_;
}

void use(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  std::fill(std::begin(handles), std::end(handles), nullptr);
  library.use(path);
}

}  // namespace fxwrap::cublas
