// The operators of matmuls and convolutions by oneDNN and MKL: twins of those of fxwrap/runtime/prepacked_weights.py, with the
// library's calls of fxwrap/torch_compat/prepacked.py. A weight is converted at its first call, and again when one of the
// tensors that it was computed from is written.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
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
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/mkldnn_reorder_conv2d_weight.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <bit>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libraries/operators.h"
#include "libraries/prepacked.h"
#include "libraries/vector_kernels.h"

namespace fxwrap {
namespace {

using at::Tensor;
using c10::IValue;
using std::optional;

// The converted forms of a weight, such as those for several numbers of rows, that are cached at a time.
constexpr size_t most_forms = 4;

// Convolutions of single pixels of at most so many products are loops of our own: they take less time than oneDNN's call.
constexpr int64_t most_products = 1 << 24;

// A thread of a parallel loop computes at least so many products.
constexpr int64_t least_products = 1 << 17;

// oneDNN's layout of a convolution's weight is one for images of so many pixels, and may be another for smaller ones. It
// rearranges a weight in another layout in each call.
constexpr int64_t few_pixels = 64;

using Content = c10::SmallVector<std::pair<const void*, uint32_t>, 6>;  // memory and version of each source
using Variant = c10::SmallVector<int64_t, 24>;

// How a convolution is computed: by its device's library, as a matmul for oneDNN, or by loops of our own.
enum class Method : int64_t { library, library_matmul, pixels, channels };

// What a weight is converted to: `packed` for a library or for our loops, or `weight`, undefined if it is the weight itself,
// which its forms must not own.
struct Form {
  Tensor packed, weight, bias;
};

// The converted forms of a weight. They live in its tensor, and end with it; tensors that share its memory have their own.
class PackedForms final : public c10::BackendMeta {
 public:
  static c10::intrusive_ptr<PackedForms> of(const Tensor& weight) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    c10::TensorImpl* tensor = weight.unsafeGetTensorImpl();
    if (auto* forms = dynamic_cast<PackedForms*>(tensor->get_backend_meta())) {
      return c10::intrusive_ptr<PackedForms>::reclaim_copy(forms);
    }
    auto forms = c10::make_intrusive<PackedForms>();
    if (tensor->get_backend_meta() == nullptr) tensor->set_backend_meta(forms);
    return forms;
  }

  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override { return {}; }

  // Returns a converted form of a weight; it is cached while none of the tensors that it is computed from is written.
  template <class Convert>
  Form find(at::TensorList sources, const Variant& variant, const Convert& convert) {
    Content content;
    for (const Tensor& item : sources) content.emplace_back(item.const_data_ptr(), item.is_inference() ? 0 : item._version());
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (entry->variant != variant) continue;
      if (entry->content == content) return entry->form;
      entries_.erase(entry);
      break;
    }
    if (entries_.size() == most_forms) entries_.pop_front();
    return entries_.emplace_back(Entry{variant, content, convert()}).form;
  }

 private:
  struct Entry {
    Variant variant;
    Content content;
    Form form;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
};

// Returns the converted form of a weight, the first of `sources`.
template <class Convert>
Form find_form(at::TensorList sources, const Variant& variant, const Convert& convert) {
  return PackedForms::of(sources[0])->find(sources, variant, convert);
}

// The operators' calls neither write nor return views of their arguments: they need neither autograd nor version counters.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// An operator that ATen has no function for.
class LibraryOperator {
 public:
  explicit LibraryOperator(const char* name, const char* overload = "")
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)) {}
  template <class... T>
  IValue operator()(T&&... arguments) const {
    std::vector<IValue> stack;
    stack.reserve(sizeof...(arguments));
    (stack.emplace_back(std::forward<T>(arguments)), ...);
    handle_.callBoxed(stack);
    return std::move(stack.at(0));
  }

 private:
  const c10::OperatorHandle handle_;
};

IValue optional_tensor(const Tensor& tensor) { return tensor.defined() ? IValue(tensor) : IValue(); }

bool has_bfloat16() {
  static const bool has = at::hasMKLDNN() && LibraryOperator("mkldnn::_is_mkldnn_bf16_supported")().toBool();
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
  if (rows.has_value()) return LibraryOperator("mkl::_mkl_reorder_linear_weight")(weight.contiguous(), *rows).toTensor();
  const bool has_library = weight.scalar_type() == at::kBFloat16 ? has_bfloat16()
                                                                 : weight.scalar_type() == at::kFloat && at::hasMKLDNN();
  if (!has_library) return {};
  return LibraryOperator("mkldnn::_reorder_linear_weight")(weight.contiguous(), IValue()).toTensor();
}

// oneDNN's name of an activation that it computes of its accumulators.
std::string_view activation_name(std::string_view activation) {
  constexpr std::pair<std::string_view, std::string_view> names[] = {
      {"none", "none"}, {"relu", "relu"}, {"relu6", "hardtanh"}, {"hardswish", "hardswish"}, {"silu", "swish"},
      {"sigmoid", "sigmoid"}};
  for (const auto& [name, library_name] : names) {
    if (name == activation) return library_name;
  }
  TORCH_CHECK_VALUE(false, "fxwrap::frozen_convolution has no activation '", activation, "'");
}

c10::List<optional<at::Scalar>> activation_numbers(std::string_view activation) {
  c10::List<optional<at::Scalar>> numbers;
  if (activation != "relu6") return numbers;
  numbers.push_back(at::Scalar(0.0));
  numbers.push_back(at::Scalar(6.0));
  return numbers;
}

// The activation of a tensor of one's own, perhaps in its memory.
Tensor activated(Tensor value, std::string_view activation) {
  if (activation == "relu") return value.relu_();
  if (activation == "relu6") return at::hardtanh_(value, 0, 6);
  if (activation == "hardswish") return at::hardswish_(value);
  if (activation == "silu") return at::silu_(value);
  if (activation == "sigmoid") return value.sigmoid_();
  return value;
}

// rows times a packed matrix, by oneDNN, which adds the shift to its accumulators.
Tensor onednn_linear(const Tensor& rows, const Tensor& packed, const Tensor& shift, std::string_view activation) {
  static const LibraryOperator linear("mkldnn::_linear_pointwise");
  return linear(rows, packed, optional_tensor(shift), activation_name(activation), activation_numbers(activation), "").toTensor();
}

Tensor prepacked_linear(const Tensor& left, const Tensor& weight, const optional<Tensor>& bias, bool transposed,
                        optional<int64_t> rows) {
  const BelowAutograd below;
  const Tensor shift = bias.value_or(Tensor());
  const auto columns = [&] { return transposed ? weight : weight.t(); };
  if (!packs_for_rows(weight)) rows.reset();
  const auto convert = [&] { return Form{prepack_linear_weight(columns(), rows), {}, {}}; };
  const Tensor packed = find_form(weight, {rows.value_or(-1), transposed}, convert).packed;
  if (!packed.defined()) return shift.defined() ? at::addmm(shift, left, columns().t()) : at::mm(left, columns().t());
  if (!rows.has_value()) return onednn_linear(left, packed, shift, "none");
  static const LibraryOperator linear("mkl::_mkl_linear");
  return linear(left, packed, columns(), optional_tensor(shift), *rows).toTensor();
}

// (rows - 128) times an int8 weight: oneDNN keeps the sums of the weights, with scales of 1 and zeros of 0.
Tensor prepacked_int8_linear(const Tensor& rows, const Tensor& weight, bool transposed) {
  const BelowAutograd below;
  const Tensor columns = transposed ? weight : weight.t();
  if (!multiplies_bytes_exactly()) {
    const Tensor sign = at::full({}, 128, rows.options());
    return at::_int_mm(at::bitwise_xor(rows, sign).view(at::kChar), columns.t()).to(at::kFloat);
  }
  const auto convert = [&] {
    const Tensor packed = LibraryOperator("onednn::qlinear_prepack")(columns.contiguous(), IValue()).toTensor();
    return Form{packed, at::ones({columns.size(0)}), at::zeros({columns.size(0)}, at::kInt)};
  };
  const Form form = find_form(weight, {-2, transposed}, convert);
  static const LibraryOperator linear("onednn::qlinear_pointwise");
  const c10::List<optional<at::Scalar>> scalars;
  return linear(rows, 1.0, 128, form.packed, form.weight, form.bias, IValue(), 1.0, 0, at::kFloat, "none", scalars, "").toTensor();
}

Tensor biased_linear(const Tensor& left, const Tensor& weight, const Tensor& bias, bool transposed) {
  const BelowAutograd below;
  const Tensor columns = transposed ? weight : weight.t();
  if (left.scalar_type() != at::kBFloat16 || !has_bfloat16()) return at::addmm(bias, left, columns.t());
  return onednn_linear(left, columns, bias, "none");
}

Tensor frozen_grouped_mm(const Tensor& rows, std::vector<Tensor> matrices, bool transposed, const Tensor& ends) {
  const BelowAutograd below;
  const Variant variant{int64_t(matrices.size())};
  const Tensor stack = find_form(matrices, variant, [&] { return Form{at::stack(matrices), {}, {}}; }).packed;
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
  return at::mkldnn_reorder_conv2d_weight(weight.to_mkldnn(), geometry.padding, geometry.stride, geometry.dilation,
                                          geometry.groups, image_sizes);
}

// A convolution, plus `other`, by oneDNN; in the memory of `other` if `in_place`.
Tensor onednn_convolution(const Tensor& image, const Form& form, const Geometry& geometry, const Tensor& other,
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
Tensor convolution_as_matmul(const Tensor& image, const Form& form, int64_t channels, std::string_view activation) {
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

// A weight, and a bias or zeros, as the loops of a method read them.
Form pack_for_loops(Method method, const Tensor& weight, const Tensor& bias) {
  const int64_t outputs = weight.size(0), block = method == Method::pixels ? vector_columns() : 1;
  const int64_t columns = (outputs + block - 1) / block * block;
  Tensor shift = at::zeros({columns}, weight.options());
  if (bias.defined()) shift.narrow(0, 0, outputs).copy_(bias);
  if (method == Method::channels) return Form{weight.permute({2, 3, 0, 1}).contiguous(), {}, shift};
  Tensor padded = at::zeros({columns, weight.size(1)}, weight.options());
  padded.narrow(0, 0, outputs).copy_(weight.flatten(1));
  return Form{padded.view({columns / block, block, weight.size(1)}).transpose(1, 2).contiguous(), {}, shift};
}

// Calls the loops for ranges of `rows`, each a multiple of `step`, in parallel where they have enough products.
template <class Range>
void for_ranges(int64_t rows, int64_t step, int64_t products_of_row, const Range& range) {
  const int64_t least = std::max<int64_t>(1, least_products / std::max<int64_t>(1, step * products_of_row));
  at::parallel_for(0, (rows + step - 1) / step, least,
                   [&](int64_t first, int64_t last) { range(first * step, std::min(last * step, rows)); });
}

// A convolution of channels-last images by our loops, plus `other`; in the memory of `other` if `in_place`.
Tensor vector_convolution(Method method, const Tensor& image, const Tensor& weight, const Form& form, const Geometry& geometry,
                          const Tensor& other, std::string_view activation, bool in_place) {
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
  const bool has_loops = image.scalar_type() == at::kFloat && vector_columns() != 0 &&
                         (!other.defined() || is_channels_last(other));
  if (has_loops && is_pixels && image.numel() * weight.size(0) <= most_products) return Method::pixels;
  if (has_loops && groups == image.size(1) && groups == weight.size(0) && groups > 1) return Method::channels;
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
  Variant variant{groups, channels_last, int64_t(method), std::bit_cast<int64_t>(epsilon), shift.defined(), int64_t(norm.size()),
                  other.defined(), image.size(2) * image.size(3) < few_pixels};
  for (at::IntArrayRef numbers : {stride, padding, dilation}) variant.append(numbers.begin(), numbers.end());
  const Form form = find_form(sources, variant, [&] {
    auto [folded, folded_shift] = folded_batch_norm(weight, shift, norm, epsilon);
    const bool has_library = weight.is_cpu() && at::hasMKLDNN() && (weight.scalar_type() != at::kBFloat16 || has_bfloat16());
    if (method == Method::pixels || method == Method::channels) return pack_for_loops(method, folded, folded_shift);
    folded = folded.contiguous(channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
    Form form{{}, {}, folded_shift};
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

}  // namespace

const PrepackedOperators& prepacked_operators() {
  static constexpr PrepackedOperators operators{&prepacked_linear,   &prepacked_int8_linear, &biased_linear,
                                                &frozen_grouped_mm, &frozen_convolution,    &frozen_convolution_};
  return operators;
}

void register_prepacked_operators() {
  define_operators("fxwrap::prepacked_linear", [](const auto& add) {
    add("prepacked_linear(Tensor left, Tensor weight, Tensor? bias, bool transposed, int? rows=None) -> Tensor",
        "prepacked_linear", &prepacked_linear);
    add("prepacked_int8_linear(Tensor rows, Tensor weight, bool transposed) -> Tensor", "prepacked_int8_linear",
        &prepacked_int8_linear);
    add("biased_linear(Tensor left, Tensor weight, Tensor bias, bool transposed) -> Tensor", "biased_linear", &biased_linear);
    add("frozen_grouped_mm(Tensor rows, Tensor[] matrices, bool transposed, Tensor ends) -> Tensor", "frozen_grouped_mm",
        &frozen_grouped_mm);
    const std::string geometry = "int[] stride, int[] padding, int[] dilation, int groups, ";
    const std::string weight = "Tensor image, Tensor weight, Tensor? bias, Tensor[] norm, float epsilon, " + geometry;
    add("frozen_convolution(" + weight + "Tensor? residual, str activation, SymInt[] strides) -> Tensor", "frozen_convolution",
        &frozen_convolution);
    add("frozen_convolution_(Tensor(a!) residual, " + weight + "str activation) -> ()", "frozen_convolution_",
        &frozen_convolution_);
  }, /*beside_python=*/true);
}

}  // namespace fxwrap
