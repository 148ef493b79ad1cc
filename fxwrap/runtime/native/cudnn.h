// Convolutions by cuDNN, found at run time where torch has loaded it. No CUDA header or toolkit takes part.
//
// torch looks its plan up by all that describes a convolution at each call, after three operators have looked at the
// arguments. Here a plan is kept for as long as sizes, layouts and alignments stay what they were.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bridge.h"

namespace fxwrap::cudnn {

// Images and volumes: those of a batch, of a channel, and two or three of space.
constexpr int most_dimensions = 5, most_spatial = 3;

using Sizes = std::array<int64_t, most_dimensions>;
using Spatial = std::array<int64_t, most_spatial>;

// A convolution of one group, of numbers of 16 bits that are added up in float32. All three tensors are dense, and lie in
// the same order.
struct Problem {
  int device = 0;
  bool bfloat = false;  // bfloat16, else float16
  bool channels_last = false;
  int dimensions = 4;
  Sizes input{}, weight{};
  Spatial stride{}, padding{}, dilation{};
  uint32_t input_alignment = 0, weight_alignment = 0, result_alignment = 0;
  bool operator==(const Problem&) const = default;

  // The result's sizes; one is not positive where the weight is larger than the padded input.
  Sizes result() const;
};

struct Operands {
  const void* input;
  const void* weight;
  void* result;
  void* workspace;
  bool operator==(const Operands&) const = default;
};

struct Functions;  // the library's
struct Handle;     // of the library for a device

// A problem with how the library does it. Used by one thread at a time.
class Plan {
 public:
  explicit Plan(const Problem& problem);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Problem& problem() const { return problem_; }
  // Whether the library can do it; what follows is only then defined.
  bool usable() const { return usable_; }
  size_t workspace() const { return size_t(workspace_); }

  // Starts the convolution on torch's current stream of the device. Returns false, and is not usable any more, where the
  // library refuses.
  bool run(const Operands& operands);

 private:
  using Descriptor = void*;
  Descriptor create(int32_t kind);
  bool set(Descriptor to, int32_t attribute, int32_t type, int64_t count, const void* values) const;
  bool finish(Descriptor descriptor) const;
  Descriptor tensor(int64_t name, const Sizes& sizes, uint32_t alignment);
  Descriptor graph();
  bool choose(Descriptor graph);
  bool pack(const Operands& operands);

  const Problem problem_;
  const Functions* const library_;
  Handle* handle_ = nullptr;
  bool usable_ = false;
  int64_t workspace_ = 0;
  std::vector<Descriptor> made_;  // all but the pack, in the order in which they were made
  Descriptor plan_ = nullptr;
  Descriptor pack_ = nullptr;  // the addresses of the last call
  Operands packed_{};
};

// Takes the library's functions from this file from now on, if it has them: for tests.
FXWRAP_API void use(const char* path);

}  // namespace fxwrap::cudnn
