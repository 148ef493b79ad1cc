// Convolutions and attention by cuDNN, resolved at run time if torch has loaded it. It needs no CUDA header or toolkit.
//
// torch looks up the plan at each call by all properties of the call, after three operators have examined the arguments.
// Here a call site reuses its plan while sizes, layouts and alignments do not change.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "bridge/bridge.h"

namespace fxwrap::cudnn {

struct Functions;  // the library's
struct Handle;     // of the library for a device

// The library's implementation of a problem, shared by all call sites with that problem, because it may have to be
// compiled.
class Engine {
 public:
  virtual ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

 protected:
  using Descriptor = void*;  // null on failure; operations with a null descriptor fail

  // The properties of a tensor, with dimensions and strides in the library's order.
  struct Tensor {
    std::vector<int64_t> sizes, strides;
    int32_t dtype;
    uint32_t alignment = 16;
    bool is_virtual = false;  // internal to the engine, without memory
    bool is_by_value = false;  // on the host
  };

  explicit Engine(int device);
  // Chooses the first of the library's engine configurations that it can build, as torch does. A plan's tensors with
  // memory are passed in the order of their creation.
  void choose(const std::vector<Descriptor>& operations, int32_t mode);

  Descriptor tensor(const Tensor& what);
  Descriptor make(int32_t kind);
  bool set(Descriptor to, int32_t attribute, int32_t type, const void* values, int64_t count = 1) const;
  bool set(Descriptor to, int32_t attribute, Descriptor value) const;
  bool finish(Descriptor descriptor) const;

 private:
  friend class Plan;
  bool find_plan(Descriptor heuristic);

  const int device_;
  const Functions* const library_;
  Handle* handle_ = nullptr;
  bool usable_ = false;
  int64_t workspace_ = 0;
  int64_t tensors_ = 0;
  std::vector<int64_t> uids_;    // of the tensors with memory
  std::vector<Descriptor> descriptors_;  // in the order of their creation
  Descriptor plan_ = nullptr;
};

// An engine with the addresses of a call site's last call. Used by one thread at a time.
class Plan {
 public:
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Whether the library supports it; the other methods require this.
  bool usable() const { return usable_; }
  size_t workspace() const { return size_t(engine_->workspace_); }

  // Starts it on torch's current stream of the device, with the memory of its tensors in the order of the plan's class.
  // If the library fails, returns false and is not usable any more.
  bool run(const std::vector<const void*>& memory, void* workspace);

 protected:
  explicit Plan(std::shared_ptr<const Engine> engine);

 private:
  bool pack(const std::vector<const void*>& memory, void* workspace);

  const std::shared_ptr<const Engine> engine_;
  bool usable_;
  void* pack_ = nullptr;  // the library's variant pack of the following addresses
  std::vector<const void*> packed_;
  void* packed_workspace_ = nullptr;
};

// Images and volumes: batch, channel, and two or three spatial dimensions.
constexpr int most_dimensions = 5, most_spatial = 3;

using Sizes = std::array<int64_t, most_dimensions>;
using Spatial = std::array<int64_t, most_spatial>;

// A convolution with one group, of 16-bit floats accumulated in float32. All three tensors are dense and have the same
// memory format.
struct Convolution {
  int device = 0;
  bool is_bfloat16 = false;  // bfloat16, else float16
  bool channels_last = false;
  int dimensions = 4;
  Sizes input{}, weight{};
  Spatial stride{}, padding{}, dilation{};
  uint32_t input_alignment = 0, weight_alignment = 0, result_alignment = 0;
  bool operator==(const Convolution&) const = default;

  // The result's sizes; one is not positive where the weight is larger than the padded input.
  Sizes result() const;
};

// Its tensors are input, weight and result.
class ConvolutionPlan : public Plan {
 public:
  explicit ConvolutionPlan(const Convolution& problem);
  const Convolution& problem() const { return problem_; }

 private:
  const Convolution problem_;
};

using Sizes4 = std::array<int64_t, 4>;

// softmax(query key^T scale + bias) value for each head of each batch, of 16-bit floats accumulated in float32;
// if it is causal, a row only attends to the columns up to its own.
// Sizes are batch, heads, length, head dimension; the result has the query's. All addresses are multiples of 16 bytes.
struct Attention {
  int device = 0;
  bool is_bfloat16 = false;
  bool has_bias = false;
  bool is_causal = false;
  float scale = 1;
  Sizes4 query{}, key{}, value{}, bias{};
  Sizes4 query_strides{}, key_strides{}, value_strides{}, bias_strides{}, result_strides{};
  bool operator==(const Attention&) const = default;
};

// Its tensors are query, key, the scale (on the host), the bias if there is one, the score of masked columns (on the host)
// if it is causal, value and result.
class AttentionPlan : public Plan {
 public:
  explicit AttentionPlan(const Attention& problem);
  const Attention& problem() const { return problem_; }
  const float* scale() const { return &problem_.scale; }
  const float* masked_score() const { return &lowest_; }

 private:
  const Attention problem_;
  const float lowest_ = std::numeric_limits<float>::lowest();
};

// Uses the library's functions of this file from now on, if it has all of them, and drops all engines: for tests.
FXWRAP_API void override_library(const char* path);

}  // namespace fxwrap::cudnn
