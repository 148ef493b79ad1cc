// Products of matrices by cuBLASLt, found at run time where torch has loaded it. No CUDA header or toolkit takes part.
//
// torch asks the library at each call for descriptors and for the algorithm that suits them, which takes the host longer
// than the launch. Here both are kept for as long as sizes, strides and alignments stay what they were.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bridge.h"

namespace fxwrap::cublas {

// What is done to a product before it is stored; the library's own numbers.
enum class Epilogue : int32_t { none = 1, bias = 4, relu_of_bias = 6, gelu_of_bias = 36 };

// A matrix in memory: rows one after another, `step` elements apart, or columns where `turned`.
struct Layout {
  bool turned = false;
  int64_t step = 0;
  uint32_t alignment = 0;  // in bytes, at most 256
  bool operator==(const Layout&) const = default;
};

// left (rows x terms) times right (terms x columns), all of 16 bits a number, added up in float32. The result's rows lie
// together; a bias has a number for each column.
struct Problem {
  int device = 0;
  bool bfloat = false;  // bfloat16, else float16
  Epilogue epilogue = Epilogue::none;
  int64_t rows = 0, terms = 0, columns = 0;
  Layout left, right, result;
  uint32_t bias_alignment = 0;
  bool operator==(const Problem&) const = default;
};

struct Operands {
  const void* left;
  const void* right;
  const void* bias;
  void* result;
  void* workspace;
};

struct Functions;  // the library's

// A problem with what the library wants to know of it. Used by one thread at a time.
class Plan {
 public:
  explicit Plan(const Problem& problem);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Problem& problem() const { return problem_; }
  // Whether the library can do it; what follows is only then defined.
  bool usable() const { return usable_; }
  size_t workspace() const { return workspace_; }

  // Starts the product on torch's current stream of the device. Returns false, and is not usable any more, where the
  // library refuses.
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
  void* layouts_[3] = {};  // in the library's order: right, left, result, since its matrices lie by columns
  uint64_t algorithm_[8] = {};
};

// Takes the library's functions from this file from now on, if it has them: for tests.
FXWRAP_API void use(const char* path);

}  // namespace fxwrap::cublas
