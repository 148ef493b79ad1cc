// Matmuls by cuBLASLt, resolved at run time if torch has loaded it. It needs no CUDA header or toolkit.
//
// torch asks the library at each call for descriptors and for the algorithm that suits them, which takes the host longer
// than the launch. Here both are reused while sizes, strides and alignments do not change.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bridge/bridge.h"

namespace fxwrap::cublas {

// The fused epilogue of a matmul; the library's numbers. Some store the input of GELU, too.
enum class Epilogue : int32_t {
  none = 1,
  bias = 4,
  relu_bias = 6,
  gelu_bias = 36,
  gelu_and_input = 160,
  gelu_bias_and_input = 164,
};

inline bool stores_input(Epilogue epilogue) {
  return epilogue == Epilogue::gelu_and_input || epilogue == Epilogue::gelu_bias_and_input;
}

// A matrix in memory: rows one after another, `leading_dimension` elements apart, or columns where `transposed`.
struct Layout {
  bool transposed = false;
  int64_t leading_dimension = 0;
  uint32_t alignment = 0;  // in bytes, at most 256
  bool operator==(const Layout&) const = default;
};

// left (rows x inner) times right (inner x columns), all 16-bit floats, accumulated in float32. The result is
// row-major, and so is the input of GELU, whose rows are contiguous; a bias has one element per column.
struct Problem {
  int device = 0;
  bool is_bfloat16 = false;  // bfloat16, else float16
  Epilogue epilogue = Epilogue::none;
  int64_t rows = 0, inner = 0, columns = 0;
  Layout left, right, result;
  uint32_t bias_alignment = 0;
  bool operator==(const Problem&) const = default;
};

struct Operands {
  const void* left;
  const void* right;
  const void* bias;
  void* result;
  void* input;  // of GELU
  void* workspace;
};

struct Functions;  // the library's

// A problem with its descriptors and algorithm. Used by one thread at a time.
class Plan {
 public:
  explicit Plan(const Problem& problem);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Problem& problem() const { return problem_; }
  // Whether the library supports it; the other methods require this.
  bool usable() const { return usable_; }
  size_t workspace() const { return workspace_; }

  // Starts the matmul on torch's current stream of the device. If the library fails, returns false and is not usable any
  // more.
  bool run(const Operands& operands);

 private:
  bool describe();
  bool find_algorithm(void* preference);

  const Problem problem_;
  const Functions* const library_;
  bool usable_ = false;
  size_t workspace_ = 0;
  void* handle_ = nullptr;
  void* operation_ = nullptr;
  void* layouts_[3] = {};  // right, left, result: the library's matrices are column-major
  uint64_t algorithm_[8] = {};
};

// Uses the library's functions of this file from now on, if it has all of them: for tests.
FXWRAP_API void override_library(const char* path);

}  // namespace fxwrap::cublas
