// The operators of matmuls and convolutions by oneDNN and MKL, for processes that have not imported fxwrap: twins of those of
// fxwrap/runtime/prepacked_weights.py, with the library's calls of fxwrap/torch_compat/prepacked.py. A weight is converted at
// its first call, and again when one of the tensors that it was computed from is written.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_int_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/cudnn_convolution_add_relu.h>
#include <ATen/ops/cudnn_convolution_relu.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mkldnn_reorder_conv2d_weight.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libraries/operators.h"
#include "libraries/prepacked.h"

namespace fxwrap {
namespace {

using at::Tensor;
using c10::IValue;
using std::optional;

// The converted forms of a weight, such as those for several numbers of rows, that are cached at a time.
constexpr size_t most_forms = 4;

using Content = std::vector<std::pair<const void*, uint32_t>>;  // memory and version of each source
using Variant = std::vector<int64_t>;

// What a weight is converted to: `packed` for the library, or `weight`, undefined if it is the weight itself, which the cache
// must not own.
struct Form {
  Tensor packed, weight, bias;
};

class FormCache {
 public:
  // Returns the converted form of a weight, the first of `sources`; it is cached while none of them is written.
  Form find(const std::vector<Tensor>& sources, const Variant& variant, const std::function<Form()>& convert) {
    Content content;
    for (const Tensor& item : sources) content.emplace_back(item.const_data_ptr(), item.is_inference() ? 0 : item._version());
    const std::lock_guard<std::mutex> lock(mutex_);
    auto weight = weights_.find(sources[0].unsafeGetTensorImpl());
    if (weight == weights_.end()) {
      std::erase_if(weights_, [](const auto& entry) { return entry.second.weight.expired(); });
      weight = weights_.emplace(sources[0].unsafeGetTensorImpl(), Weight(sources[0])).first;
    }
    auto& cached = weight->second.forms;
    for (auto entry = cached.begin(); entry != cached.end(); ++entry) {
      if (entry->variant != variant) continue;
      if (entry->content == content) return entry->form;
      cached.erase(entry);
      break;
    }
    if (cached.size() == most_forms) cached.pop_front();
    return cached.emplace_back(Entry{variant, content, convert()}).form;
  }

 private:
  struct Entry {
    Variant variant;
    Content content;
    Form form;
  };
  // The weak pointer keeps the address of a freed weight from another one.
  struct Weight {
    explicit Weight(const Tensor& tensor) : weight(tensor.getIntrusivePtr()) {}
    c10::weak_intrusive_ptr<c10::TensorImpl> weight;
    std::list<Entry> forms;
  };
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Weight> weights_;
};

FormCache& forms() {
  static auto* cache = new FormCache;
  return *cache;
}

// Calls an operator that ATen has no function for.
IValue call(const char* name, const char* overload, std::vector<IValue> arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).callBoxed(arguments);
  return arguments.at(0);
}

IValue optional_tensor(const Tensor& tensor) { return tensor.defined() ? IValue(tensor) : IValue(); }

bool has_bfloat16() {
  static const bool has = at::hasMKLDNN() && call("mkldnn::_is_mkldnn_bf16_supported", "", {}).toBool();
  return has;
}

// Whether oneDNN sums products of unsigned and signed bytes in 32 bits: without VNNI, two of them saturate in 16.
bool multiplies_bytes_exactly() {
#if defined(__x86_64__)
  return at::hasMKLDNN() && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// Whether the fastest packed weight is for one number of rows: MKL's, which is slow on processors of others than Intel.
bool packs_for_rows(const Tensor& weight) {
#if defined(__x86_64__)
  return weight.scalar_type() == at::kFloat && at::hasMKL() && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// A weight in the layout of MKL for so many rows, or of oneDNN for any number.
Tensor prepack_linear_weight(const Tensor& weight, optional<int64_t> rows) {
  if (rows.has_value()) return call("mkl::_mkl_reorder_linear_weight", "", {weight.contiguous(), *rows}).toTensor();
  const bool has_library = weight.scalar_type() == at::kBFloat16 ? has_bfloat16()
                                                                 : weight.scalar_type() == at::kFloat && at::hasMKLDNN();
  if (!has_library) return {};
  return call("mkldnn::_reorder_linear_weight", "", {weight.contiguous(), IValue()}).toTensor();
}

Tensor prepacked_linear(const Tensor& left, const Tensor& weight, const optional<Tensor>& bias, bool transposed,
                        optional<int64_t> rows) {
  const at::NoGradGuard no_grad;
  const Tensor columns = transposed ? weight : weight.t(), shift = bias.value_or(Tensor());
  if (!packs_for_rows(weight)) rows.reset();
  const auto convert = [&] { return Form{prepack_linear_weight(columns, rows), {}, {}}; };
  const Tensor packed = forms().find({weight}, {rows.value_or(-1), transposed}, convert).packed;
  if (!packed.defined()) return shift.defined() ? at::addmm(shift, left, columns.t()) : at::mm(left, columns.t());
  if (rows.has_value()) {
    return call("mkl::_mkl_linear", "", {left, packed, columns, optional_tensor(shift), *rows}).toTensor();
  }
  const c10::List<optional<at::Scalar>> scalars;
  return call("mkldnn::_linear_pointwise", "", {left, packed, optional_tensor(shift), "none", scalars, ""}).toTensor();
}

// (rows - 128) times an int8 weight: oneDNN keeps the sums of the weights, with scales of 1 and zeros of 0.
Tensor prepacked_int8_linear(const Tensor& rows, const Tensor& weight, bool transposed) {
  const at::NoGradGuard no_grad;
  const Tensor columns = transposed ? weight : weight.t();
  if (!multiplies_bytes_exactly()) {
    const Tensor sign = at::full({}, 128, rows.options());
    return at::_int_mm(at::bitwise_xor(rows, sign).view(at::kChar), columns.t()).to(at::kFloat);
  }
  const auto convert = [&] {
    const Tensor packed = call("onednn::qlinear_prepack", "", {columns.contiguous(), IValue()}).toTensor();
    return Form{packed, at::ones({columns.size(0)}), at::zeros({columns.size(0)}, at::kInt)};
  };
  const Form form = forms().find({weight}, {-2, transposed}, convert);
  const c10::List<optional<at::Scalar>> scalars;
  return call("onednn::qlinear_pointwise", "",
              {rows, 1.0, 128, form.packed, form.weight, form.bias, IValue(), 1.0, 0, at::kFloat, "none", scalars, ""})
      .toTensor();
}

Tensor biased_linear(const Tensor& left, const Tensor& weight, const Tensor& bias, bool transposed) {
  const at::NoGradGuard no_grad;
  const Tensor columns = transposed ? weight : weight.t();
  if (left.scalar_type() != at::kBFloat16 || !has_bfloat16()) return at::addmm(bias, left, columns.t());
  return call("mkldnn::_linear_pointwise", "", {left, columns, bias, "none", c10::List<optional<at::Scalar>>(), ""}).toTensor();
}

Tensor frozen_grouped_mm(const Tensor& rows, std::vector<Tensor> matrices, bool transposed, const Tensor& ends) {
  const at::NoGradGuard no_grad;
  const Variant variant{int64_t(matrices.size())};
  const Tensor stack = forms().find(matrices, variant, [&] { return Form{at::stack(matrices), {}, {}}; }).packed;
  return at::_grouped_mm(rows, transposed ? stack.mT() : stack, ends);
}

struct Geometry {
  at::IntArrayRef stride, padding, dilation;
  int64_t groups;
};

// Weight and bias of the convolution that computes a convolution and the batch norm after it. A norm's bias is at least of
// float32.
std::pair<Tensor, Tensor> folded_batch_norm(const Tensor& weight, const Tensor& bias, const std::vector<Tensor>& norm,
                                            double epsilon) {
  if (norm.empty()) return {weight, bias};
  std::vector<Tensor> exact;
  for (const Tensor& item : norm) exact.push_back(item.to(at::kDouble));
  const Tensor &scale = exact[0], &offset = exact[1], &mean = exact[2], &variance = exact[3];
  const Tensor factor = scale * (variance + epsilon).rsqrt();
  const Tensor shift = bias.defined() ? offset + (bias.to(at::kDouble) - mean) * factor : offset - mean * factor;
  const Tensor folded = weight.to(at::kDouble) * factor.reshape({-1, 1, 1, 1});
  return {folded.to(weight.scalar_type()), shift.to(c10::promoteTypes(weight.scalar_type(), at::kFloat))};
}

Tensor prepack_convolution_weight(const Tensor& weight, const Geometry& geometry, at::IntArrayRef image_sizes) {
  if (!weight.is_cpu() || !at::hasMKLDNN() || (weight.scalar_type() == at::kBFloat16 && !has_bfloat16())) return {};
  return at::mkldnn_reorder_conv2d_weight(weight.to_mkldnn(), geometry.padding, geometry.stride, geometry.dilation,
                                          geometry.groups, image_sizes);
}

Tensor prepacked_convolution(const Tensor& image, const Form& form, const Geometry& geometry, const Tensor& residual, bool relu) {
  std::vector<IValue> arguments{image};
  if (residual.defined()) arguments.push_back(residual);
  for (const IValue& item : {IValue(form.packed), optional_tensor(form.bias), IValue(geometry.padding), IValue(geometry.stride),
                             IValue(geometry.dilation), IValue(geometry.groups)}) {
    arguments.push_back(item);
  }
  const c10::List<optional<at::Scalar>> scalars;
  if (!residual.defined()) {
    for (const IValue& item : {IValue(relu ? "relu" : "none"), IValue(scalars), IValue("")}) arguments.push_back(item);
    return call("mkldnn::_convolution_pointwise", "", std::move(arguments)).toTensor();
  }
  const IValue activation = relu ? IValue("relu") : IValue();
  for (const IValue& item : {IValue("add"), IValue(1.0), activation, IValue(scalars), IValue()}) arguments.push_back(item);
  return call("mkldnn::_convolution_pointwise", "binary", std::move(arguments)).toTensor();
}

// A convolution with what follows it, in one call of cuDNN where it is there.
Tensor plain_convolution(const Tensor& image, const Tensor& weight, const Tensor& shift, const Geometry& geometry,
                         const Tensor& residual, bool relu) {
  const auto bias = shift.defined() ? optional<Tensor>(shift) : std::nullopt;
  const auto [stride, padding, dilation, groups] = geometry;
  if (relu && image.is_cuda() && at::globalContext().hasCuDNN() && !at::globalContext().hasROCM()) {
    if (!residual.defined()) return at::cudnn_convolution_relu(image, weight, bias, stride, padding, dilation, groups);
    return at::cudnn_convolution_add_relu(image, weight, residual, 1.0, bias, stride, padding, dilation, groups);
  }
  Tensor result = at::conv2d(image, weight, bias, stride, padding, dilation, groups);
  if (residual.defined()) result.add_(residual);
  return relu ? result.relu_() : result;
}

// A tensor with these strides: itself, or a copy if the library chose another layout.
Tensor with_strides(const Tensor& result, at::IntArrayRef strides) {
  if (result.strides() == strides) return result;
  bool equal = true;
  for (int64_t i = 0; i < result.dim(); ++i) equal = equal && (result.stride(i) == strides[i] || result.size(i) == 1);
  if (equal) return result.as_strided(result.sizes(), strides);
  return at::empty_strided(result.sizes(), strides, result.options()).copy_(result);
}

Tensor frozen_convolution(const Tensor& image, const Tensor& weight, const optional<Tensor>& bias, std::vector<Tensor> norm,
                          double epsilon, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                          int64_t groups, const optional<Tensor>& residual, bool relu, at::IntArrayRef strides) {
  const at::NoGradGuard no_grad;
  const Geometry geometry{stride, padding, dilation, groups};
  const bool channels_last = image.is_contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor shift = bias.value_or(Tensor()), other = residual.value_or(Tensor());
  std::vector<Tensor> sources{weight};
  if (shift.defined()) sources.push_back(shift);
  sources.insert(sources.end(), norm.begin(), norm.end());
  Variant variant{groups, channels_last, std::bit_cast<int64_t>(epsilon), shift.defined(), int64_t(norm.size()),
                  other.defined()};
  for (at::IntArrayRef numbers : {image.sizes().slice(1), stride, padding, dilation}) {
    variant.insert(variant.end(), numbers.begin(), numbers.end());
  }
  const Form form = forms().find(sources, variant, [&] {
    auto [folded, folded_shift] = folded_batch_norm(weight, shift, norm, epsilon);
    folded = folded.contiguous(channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
    std::vector<int64_t> sizes = image.sizes().vec();
    sizes[0] = std::max<int64_t>(1, sizes[0]);
    const Tensor packed = prepack_convolution_weight(folded, geometry, sizes);
    const bool needs_folded = !packed.defined() && !folded.is_same(weight);
    // Only oneDNN's convolution without a residual adds a bias of float32 to images of bfloat16.
    const bool rounds_shift = folded_shift.defined() && (!packed.defined() || other.defined());
    if (rounds_shift) folded_shift = folded_shift.to(weight.scalar_type());
    return Form{packed, needs_folded ? folded : Tensor(), folded_shift};
  });
  const Tensor& folded = form.weight.defined() ? form.weight : weight;
  const Tensor result = form.packed.defined() ? prepacked_convolution(image, form, geometry, other, relu)
                                              : plain_convolution(image, folded, form.bias, geometry, other, relu);
  return with_strides(result, strides);
}

}  // namespace

void register_prepacked_operators() {
  define_operators("fxwrap::prepacked_linear", [](const auto& add) {
    add("prepacked_linear(Tensor left, Tensor weight, Tensor? bias, bool transposed, int? rows=None) -> Tensor",
        "prepacked_linear", &prepacked_linear);
    add("prepacked_int8_linear(Tensor rows, Tensor weight, bool transposed) -> Tensor", "prepacked_int8_linear",
        &prepacked_int8_linear);
    add("biased_linear(Tensor left, Tensor weight, Tensor bias, bool transposed) -> Tensor", "biased_linear", &biased_linear);
    add("frozen_grouped_mm(Tensor rows, Tensor[] matrices, bool transposed, Tensor ends) -> Tensor", "frozen_grouped_mm",
        &frozen_grouped_mm);
    add("frozen_convolution(Tensor image, Tensor weight, Tensor? bias, Tensor[] norm, float epsilon, int[] stride, "
        "int[] padding, int[] dilation, int groups, Tensor? residual, bool relu, int[] strides) -> Tensor",
        "frozen_convolution", &frozen_convolution);
  });
}

}  // namespace fxwrap
