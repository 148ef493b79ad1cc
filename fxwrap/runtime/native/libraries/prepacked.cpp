// The operators of matmuls by oneDNN and MKL: twins of those of fxwrap/runtime/prepacked_weights.py, with the library's calls of
// fxwrap/torch_compat/prepacked.py. A weight is converted at its first call, and again when one of the tensors that it was
// computed from is written.
#include "libraries/prepacked.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_int_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <string>

#include "libraries/frozen_convolutions.h"
#include "libraries/operators.h"
#include "libraries/packed_weights.h"

namespace fxwrap {

using at::Tensor;
using c10::IValue;
using std::optional;

namespace {

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

}  // namespace

Tensor prepack_linear_weight(const Tensor& weight, optional<int64_t> rows) {
  if (rows.has_value()) return LibraryOperator("mkl::_mkl_reorder_linear_weight")(weight.contiguous(), *rows).toTensor();
  const bool has_library = weight.scalar_type() == at::kBFloat16 ? has_bfloat16()
                                                                 : weight.scalar_type() == at::kFloat && at::hasMKLDNN();
  if (!has_library) return {};
  return LibraryOperator("mkldnn::_reorder_linear_weight")(weight.contiguous(), IValue()).toTensor();
}

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

Tensor onednn_linear(const Tensor& rows, const Tensor& packed, const Tensor& shift, std::string_view activation) {
  static const LibraryOperator linear("mkldnn::_linear_pointwise");
  return linear(rows, packed, optional_tensor(shift), activation_name(activation), activation_numbers(activation), "").toTensor();
}

namespace {

Tensor prepacked_linear(const Tensor& left, const Tensor& weight, const optional<Tensor>& bias, bool transposed,
                        optional<int64_t> rows) {
  const BelowAutograd below;
  const Tensor shift = bias.value_or(Tensor());
  const auto columns = [&] { return transposed ? weight : weight.t(); };
  if (!packs_for_rows(weight)) rows.reset();
  const auto convert = [&] { return PackedForm{prepack_linear_weight(columns(), rows), {}, {}}; };
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
    return PackedForm{packed, at::ones({columns.size(0)}), at::zeros({columns.size(0)}, at::kInt)};
  };
  const PackedForm form = find_form(weight, {-2, transposed}, convert);
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
  const FormKey key{int64_t(matrices.size())};
  const Tensor stack = find_form(matrices, key, [&] { return PackedForm{at::stack(matrices), {}, {}}; }).packed;
  return at::_grouped_mm(rows, transposed ? stack.mT() : stack, ends);
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
