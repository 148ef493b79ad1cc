// Frozen convolutions: twins of those of fxwrap/runtime/prepacked_weights.py, by oneDNN, cuDNN, or loops over vectors.
#include "libraries/frozen_convolutions.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/cudnn_convolution_add_relu.h>
#include <ATen/ops/cudnn_convolution_relu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/mkldnn_reorder_conv2d_weight.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "libraries/packed_weights.h"
#include "libraries/vector_kernels.h"

namespace fxwrap {

using at::Tensor;
using c10::IValue;
using std::optional;

namespace {

// oneDNN's layout of a convolution's weight is one for images of so many pixels, and may be another for smaller ones. It
// rearranges a weight in another layout in each call.
constexpr int64_t few_pixels = 64;

// Small convolutions are loops of our own, which take less time than oneDNN's call: of single pixels, of at most so many
// products, and all of at most so many elements of the image and the result together.
struct Limits {
  int64_t products, elements;
};

Limits limits_of_loops(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return {1 << 20, 1 << 15};  // both are converted
  if (dtype != at::kFloat) return {0, 0};
  const bool has_wide_vectors = vector_columns() >= 32;  // of AVX-512: as fast as oneDNN's also for large images
  return has_wide_vectors ? Limits{1 << 24, std::numeric_limits<int64_t>::max()} : Limits{1 << 21, 1 << 18};
}

// A thread of a parallel loop computes at least so many products.
constexpr int64_t least_products = 1 << 17;

// How a convolution is computed: by its device's library, as a matmul for oneDNN, or by loops of our own.
enum class Method : int64_t { library, library_matmul, pixels, channels };

// The activation of a tensor of one's own, perhaps in its memory.
Tensor activated(Tensor value, std::string_view activation) {
  if (activation == "relu") return value.relu_();
  if (activation == "relu6") return at::hardtanh_(value, 0, 6);
  if (activation == "hardswish") return at::hardswish_(value);
  if (activation == "silu") return at::silu_(value);
  if (activation == "sigmoid") return value.sigmoid_();
  return value;
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
  return at::mkldnn_reorder_conv2d_weight(weight.to_mkldnn(), geometry.padding, geometry.stride, geometry.dilation,
                                          geometry.groups, image_sizes);
}

// A convolution, plus `other`, by oneDNN; in the memory of `other` if `in_place`.
Tensor onednn_convolution(const Tensor& image, const PackedForm& form, const Geometry& geometry, const Tensor& other,
                          std::string_view activation, bool in_place) {
  const auto [stride, padding, dilation, groups] = geometry;
  const IValue shift = optional_tensor(form.bias);
  if (!other.defined()) {
    static const LibraryOperator convolution("mkldnn::_convolution_pointwise");
    const auto numbers = activation_numbers(activation);
    return convolution(image, form.packed, shift, padding, stride, dilation, groups, activation_name(activation), numbers, "")
        .toTensor();
  }
  static const LibraryOperator adding("mkldnn::_convolution_pointwise", "binary");
  static const LibraryOperator accumulating("mkldnn::_convolution_pointwise_", "binary");
  const c10::List<optional<at::Scalar>> scalars;
  const IValue unary = activation == "relu" ? IValue("relu") : IValue();
  const Tensor result =
      in_place ? accumulating(other, image, form.packed, shift, padding, stride, dilation, groups, "add", 1.0, unary, scalars,
                              IValue()).toTensor()
               : adding(image, other, form.packed, shift, padding, stride, dilation, groups, "add", 1.0, unary, scalars,
                        IValue()).toTensor();
  return activation == "relu" ? result : activated(result, activation);
}

// A convolution of single pixels of channels-last images: a matrix has their channels as rows.
Tensor convolution_as_matmul(const Tensor& image, const PackedForm& form, int64_t channels, std::string_view activation) {
  const int64_t images = image.size(0), height = image.size(2), width = image.size(3), rows = images * height * width;
  const Tensor pixels = image.as_strided({rows, image.size(1)}, {image.size(1), 1});
  const Tensor result = onednn_linear(pixels, form.packed, form.bias, activation);
  const int64_t row = width * channels;
  return result.as_strided({images, channels, height, width}, {height * row, 1, row, channels});
}

Activation vector_activation(std::string_view activation) {
  constexpr std::string_view names[] = {"none", "relu", "relu6", "hardswish", "silu", "sigmoid"};
  const auto* name = std::find(std::begin(names), std::end(names), activation);
  TORCH_CHECK_VALUE(name != std::end(names), "fxwrap::frozen_convolution has no activation '", activation, "'");
  return Activation(name - std::begin(names));
}

// A matrix of shape (columns, terms) as `convolve_pixels` reads it.
Tensor pack_columns(const Tensor& weight) {
  const int64_t block = vector_columns(), columns = weight.size(0), blocks = (columns + block - 1) / block;
  Tensor padded = at::zeros({blocks * block, weight.size(1)}, weight.options());
  padded.narrow(0, 0, columns).copy_(weight);
  return padded.view({blocks, block, weight.size(1)}).transpose(1, 2).contiguous();
}

// Calls a function for ranges of rows, each but the last of a multiple of `step`, in parallel if they have enough products.
template <class Range>
void for_ranges(int64_t rows, int64_t step, int64_t products_of_row, const Range& range) {
  const int64_t least = std::max<int64_t>(1, least_products / std::max<int64_t>(1, step * products_of_row));
  at::parallel_for(0, (rows + step - 1) / step, least,
                   [&](int64_t first, int64_t last) { range(first * step, std::min(last * step, rows)); });
}

// A weight and a bias or zeros as the loops of a method read them.
PackedForm pack_for_loops(Method method, const Tensor& stored, const Tensor& bias) {
  const Tensor weight = stored.to(at::kFloat);
  const Tensor shift = bias.defined() ? bias.to(at::kFloat).contiguous() : at::zeros({weight.size(0)}, weight.options());
  if (method == Method::pixels) return PackedForm{pack_columns(weight.flatten(1)), {}, shift};
  return PackedForm{weight.permute({2, 3, 0, 1}).contiguous(), {}, shift};
}

// A convolution of channels-last images by our loops, plus `other`; in the memory of `other` if `in_place`.
Tensor vector_convolution(Method method, const Tensor& image, const Tensor& weight, const PackedForm& form,
                          const Geometry& geometry, const Tensor& other, std::string_view activation, bool in_place) {
  if (image.scalar_type() != at::kFloat) {
    const Tensor sum = other.defined() ? other.to(at::kFloat) : other;
    const Tensor pixels = image.to(at::kFloat);
    const Tensor total = vector_convolution(method, pixels, weight, form, geometry, sum, activation, sum.defined());
    return in_place ? other.copy_(total) : total.to(image.scalar_type());
  }
  if (in_place && image.const_data_ptr() == other.const_data_ptr()) {
    return vector_convolution(method, image.clone(), weight, form, geometry, other, activation, in_place);
  }
  const auto& [stride, padding, dilation, groups] = geometry;
  const auto length = [&](int64_t i) {
    const int64_t reach = dilation[i] * (weight.size(i + 2) - 1) + 1;
    return (image.size(i + 2) + 2 * padding[i] - reach) / stride[i] + 1;
  };
  const int64_t height = length(0), width = length(1), rows = image.size(0) * height, outputs = weight.size(0);
  const Tensor result =
      in_place ? other : at::empty({image.size(0), outputs, height, width}, image.options(), at::MemoryFormat::ChannelsLast);
  const float* residual = other.defined() ? other.const_data_ptr<float>() : nullptr;
  const float *source = image.const_data_ptr<float>(), *packed = form.packed.const_data_ptr<float>();
  const float* bias = form.bias.const_data_ptr<float>();
  float* out = result.mutable_data_ptr<float>();
  if (method == Method::pixels) {
    const PointwiseConvolution convolution{source, packed, bias, residual, out, rows * width, weight.size(1), outputs,
                                           vector_activation(activation)};
    for_ranges(rows * width, pixel_rows, weight.size(1) * outputs,
               [&](int64_t row, int64_t end) { convolve_pixels(convolution, row, end); });
  } else {
    const DepthwiseConvolution convolution{
        source, packed, bias, residual, out, outputs, image.size(2), image.size(3), height, width, weight.size(2),
        weight.size(3), stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1], vector_activation(activation)};
    for_ranges(rows, 1, weight.numel() * width, [&](int64_t row, int64_t end) { convolve_channels(convolution, row, end); });
  }
  return result;
}

// How a convolution is computed on its device.
Method method_of(const Tensor& image, const Tensor& weight, const Geometry& geometry, const Tensor& other) {
  const auto& [stride, padding, dilation, groups] = geometry;
  const auto all = [](at::IntArrayRef numbers, int64_t value) {
    return std::all_of(numbers.begin(), numbers.end(), [&](int64_t number) { return number == value; });
  };
  const auto is_channels_last = [](const Tensor& tensor) { return tensor.is_contiguous(at::MemoryFormat::ChannelsLast); };
  if (!image.is_cpu() || !is_channels_last(image) || image.numel() == 0) return Method::library;
  const bool is_pixels = groups == 1 && all(weight.sizes().slice(2), 1) && all(stride, 1) && all(padding, 0);
  const bool has_loops = vector_columns() != 0 && (!other.defined() || is_channels_last(other));
  const Limits limits = limits_of_loops(image.scalar_type());
  const int64_t products = image.numel() * weight.size(0), elements = image.numel() + products / image.size(1);
  const bool is_channels = groups == image.size(1) && groups == weight.size(0) && groups > 1;
  if (has_loops && elements <= limits.elements) {
    if (is_pixels && products <= limits.products) return Method::pixels;
    if (is_channels) return Method::channels;
  }
  return is_pixels && !other.defined() && at::hasMKLDNN() ? Method::library_matmul : Method::library;
}

// A convolution with what follows it, in one call of cuDNN where it is there.
Tensor plain_convolution(const Tensor& image, const Tensor& weight, const Tensor& shift, const Geometry& geometry,
                         const Tensor& other, std::string_view activation) {
  const auto bias = shift.defined() ? optional<Tensor>(shift) : std::nullopt;
  const auto [stride, padding, dilation, groups] = geometry;
  if (activation == "relu" && image.is_cuda() && at::globalContext().hasCuDNN() && !at::globalContext().hasROCM()) {
    if (!other.defined()) return at::cudnn_convolution_relu(image, weight, bias, stride, padding, dilation, groups);
    return at::cudnn_convolution_add_relu(image, weight, other, 1.0, bias, stride, padding, dilation, groups);
  }
  Tensor result = at::conv2d(image, weight, bias, stride, padding, dilation, groups);
  if (other.defined()) result.add_(other);
  return activated(result, activation);
}

// A tensor with these strides: itself, or a copy if the library chose another layout.
Tensor with_strides(const Tensor& result, at::IntArrayRef strides) {
  if (result.strides() == strides) return result;
  bool equal = true;
  for (int64_t i = 0; i < result.dim(); ++i) equal = equal && (result.stride(i) == strides[i] || result.size(i) == 1);
  if (equal) return result.as_strided(result.sizes(), strides);
  return at::empty_strided(result.sizes(), strides, result.options()).copy_(result);
}

// A convolution whose weight and bias have the batch norm `norm` folded in, plus `other`, in any layout.
Tensor convolution(const Tensor& image, const Tensor& weight, const Tensor& shift, const std::vector<Tensor>& norm,
                   double epsilon, const Geometry& geometry, const Tensor& other, std::string_view activation, bool in_place) {
  const auto [stride, padding, dilation, groups] = geometry;
  const bool channels_last = image.is_contiguous(at::MemoryFormat::ChannelsLast);
  const Method method = method_of(image, weight, geometry, other);
  c10::SmallVector<Tensor, 6> sources{weight};
  if (shift.defined()) sources.push_back(shift);
  sources.append(norm.begin(), norm.end());
  FormKey key{groups, channels_last, int64_t(method), std::bit_cast<int64_t>(epsilon), shift.defined(), int64_t(norm.size()),
                  other.defined(), image.size(2) * image.size(3) < few_pixels};
  for (at::IntArrayRef numbers : {stride, padding, dilation}) key.append(numbers.begin(), numbers.end());
  const PackedForm form = find_form(sources, key, [&] {
    auto [folded, folded_shift] = folded_batch_norm(weight, shift, norm, epsilon);
    const bool has_library = weight.is_cpu() && at::hasMKLDNN() && (weight.scalar_type() != at::kBFloat16 || has_bfloat16());
    if (method == Method::pixels || method == Method::channels) return pack_for_loops(method, folded, folded_shift);
    folded = folded.contiguous(channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
    PackedForm form{{}, {}, folded_shift};
    if (has_library && method == Method::library_matmul) {
      form.packed = prepack_linear_weight(folded.flatten(1), std::nullopt);
    } else if (has_library) {
      std::vector<int64_t> sizes = image.sizes().vec();
      sizes[0] = std::max<int64_t>(1, sizes[0]);
      form.packed = prepack_convolution_weight(folded, geometry, sizes);
    }
    if (!form.packed.defined() && !folded.is_same(weight)) form.weight = folded;
    // Only oneDNN's calls without a residual add a bias of float32 to images of bfloat16.
    const bool rounds_shift = folded_shift.defined() && (!form.packed.defined() || other.defined());
    if (rounds_shift) form.bias = folded_shift.to(weight.scalar_type());
    return form;
  });
  if (method == Method::pixels || method == Method::channels) {
    return vector_convolution(method, image, weight, form, geometry, other, activation, in_place);
  }
  if (form.packed.defined() && method == Method::library_matmul) {
    return convolution_as_matmul(image, form, weight.size(0), activation);
  }
  if (form.packed.defined()) return onednn_convolution(image, form, geometry, other, activation, in_place);
  return plain_convolution(image, form.weight.defined() ? form.weight : weight, form.bias, geometry, other, activation);
}

}  // namespace

Tensor frozen_convolution(const Tensor& image, const Tensor& weight, const optional<Tensor>& bias, std::vector<Tensor> norm,
                          double epsilon, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                          int64_t groups, const optional<Tensor>& residual, std::string_view activation,
                          at::IntArrayRef strides) {
  const BelowAutograd below;
  const Tensor shift = bias.value_or(Tensor()), other = residual.value_or(Tensor());
  return with_strides(
      convolution(image, weight, shift, norm, epsilon, {stride, padding, dilation, groups}, other, activation, false), strides);
}

void frozen_convolution_(Tensor& residual, const Tensor& image, const Tensor& weight, const optional<Tensor>& bias,
                         std::vector<Tensor> norm, double epsilon, at::IntArrayRef stride, at::IntArrayRef padding,
                         at::IntArrayRef dilation, int64_t groups, std::string_view activation) {
  const at::NoGradGuard no_grad;
  const Geometry geometry{stride, padding, dilation, groups};
  const Tensor result = convolution(image, weight, bias.value_or(Tensor()), norm, epsilon, geometry, residual, activation, true);
  if (!result.is_same(residual)) residual.copy_(result);
}

}  // namespace fxwrap
