// Convolutions and attention by cuDNN, found at run time where torch has loaded it. No CUDA header or toolkit takes part.
//
// torch looks up how by all that describes a call each time, after three operators have looked at the arguments. Here a call
// site keeps that for as long as sizes, layouts and alignments stay what they were.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "bridge.h"

namespace fxwrap::cudnn {

struct Functions;  // the library's
struct Handle;     // of the library for a device

// How the library does something, of which all call sites with one problem have the same: to make one may take it a tenth
// of a second, since it compiles.
class Engine {
 public:
  virtual ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

 protected:
  using Descriptor = void*;  // null where the library refuses; what takes a null one is refused

  // What a tensor is, in the order of dimensions and strides that the library reads.
  struct Tensor {
    std::vector<int64_t> sizes, strides;
    int32_t dtype;
    uint32_t alignment = 16;
    bool is_inside = false;  // of the engine: it has no memory
    bool is_number = false;  // on the host
  };

  explicit Engine(int device);
  // Asks the library how to do operations, and takes the first of the ways that it then can go, as torch does. Of the
  // tensors that were made, those that have memory are given it in the order in which they were made.
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
  std::vector<int64_t> names_;    // of the tensors that have memory
  std::vector<Descriptor> made_;  // in the order in which they were made
  Descriptor plan_ = nullptr;
};

// An engine with the addresses of a call site's last call. Used by one thread at a time.
class Plan {
 public:
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Whether the library can do it; what follows is only then defined.
  bool usable() const { return usable_; }
  size_t workspace() const { return size_t(engine_->workspace_); }

  // Starts it on torch's current stream of the device, with the memory of its tensors in the order of the plan's kind.
  // Returns false, and is not usable any more, where the library refuses.
  bool run(const std::vector<const void*>& memory, void* workspace);

 protected:
  explicit Plan(std::shared_ptr<const Engine> engine);

 private:
  bool pack(const std::vector<const void*>& memory, void* workspace);

  const std::shared_ptr<const Engine> engine_;
  bool usable_;
  void* pack_ = nullptr;  // the library's, of the addresses that follow
  std::vector<const void*> packed_;
  void* packed_workspace_ = nullptr;
};

// Images and volumes: those of a batch, of a channel, and two or three of space.
constexpr int most_dimensions = 5, most_spatial = 3;

using Sizes = std::array<int64_t, most_dimensions>;
using Spatial = std::array<int64_t, most_spatial>;

// A convolution of one group, of numbers of 16 bits that are added up in float32. All three tensors are dense, and lie in
// the same order.
struct Convolution {
  int device = 0;
  bool bfloat = false;  // bfloat16, else float16
  bool channels_last = false;
  int dimensions = 4;
  Sizes input{}, weight{};
  Spatial stride{}, padding{}, dilation{};
  uint32_t input_alignment = 0, weight_alignment = 0, result_alignment = 0;
  bool operator==(const Convolution&) const = default;

  // The result's sizes; one is not positive where the weight is larger than the padded input.
  Sizes result() const;
};

// Takes the memory of input, weight and result.
class ConvolutionPlan : public Plan {
 public:
  explicit ConvolutionPlan(const Convolution& problem);
  const Convolution& problem() const { return problem_; }

 private:
  const Convolution problem_;
};

using Four = std::array<int64_t, 4>;

// softmax(query key^T scale + bias) value for each head of each batch, of numbers of 16 bits that are added up in float32;
// where it is causal, a row sees the columns up to its own alone.
// Sizes are batch, heads, length, numbers of a head; the result has the query's. All addresses are multiples of 16 bytes.
struct Attention {
  int device = 0;
  bool bfloat = false;
  bool has_bias = false;
  bool is_causal = false;
  float scale = 1;
  Four query{}, key{}, value{}, bias{};
  Four query_strides{}, key_strides{}, value_strides{}, bias_strides{}, result_strides{};
  bool operator==(const Attention&) const = default;
};

// Takes the memory of query, key, the scale on the host, the bias if there is one, what unseen columns get, on the host, if
// it is causal, value and result.
class AttentionPlan : public Plan {
 public:
  explicit AttentionPlan(const Attention& problem);
  const Attention& problem() const { return problem_; }
  const float* scale() const { return &problem_.scale; }
  const float* unseen() const { return &lowest_; }

 private:
  const Attention problem_;
  const float lowest_ = std::numeric_limits<float>::lowest();
};

// Takes the library's functions from this file from now on, if it has them, and forgets all engines: for tests.
FXWRAP_API void use(const char* path);

}  // namespace fxwrap::cudnn
