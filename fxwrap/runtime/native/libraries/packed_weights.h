// The weights of the operators of prepacked.cpp and frozen_convolutions.cpp in the layouts of libraries, and what both call.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <list>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace fxwrap {

// The converted forms of a weight, such as those for several numbers of rows, that are cached at a time.
inline constexpr size_t most_forms = 4;

using FormContent = c10::SmallVector<std::pair<const void*, uint32_t>, 6>;  // memory and version of each source
using FormKey = c10::SmallVector<int64_t, 24>;

// What a weight is converted to: `packed` for a library or for our loops, or `weight`, undefined if it is the weight itself,
// which its forms must not own.
struct PackedForm {
  at::Tensor packed, weight, bias;
};

// The converted forms of a weight. They live in its tensor, and end with it; tensors that share its memory have their own.
class PackedForms final : public c10::BackendMeta {
 public:
  static c10::intrusive_ptr<PackedForms> of(const at::Tensor& weight) {
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
  PackedForm find(at::TensorList sources, const FormKey& key, const Convert& convert) {
    FormContent content;
    for (const at::Tensor& item : sources) content.emplace_back(item.const_data_ptr(), item.is_inference() ? 0 : item._version());
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (entry->key != key) continue;
      if (entry->content == content) return entry->form;
      entries_.erase(entry);
      break;
    }
    if (entries_.size() == most_forms) entries_.pop_front();
    return entries_.emplace_back(Entry{key, content, convert()}).form;
  }

 private:
  struct Entry {
    FormKey key;
    FormContent content;
    PackedForm form;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
};

// Returns the converted form of a weight, the first of `sources`.
template <class Convert>
PackedForm find_form(at::TensorList sources, const FormKey& key, const Convert& convert) {
  return PackedForms::of(sources[0])->find(sources, key, convert);
}

// The operators' calls neither write nor return views of their arguments: they need neither autograd nor version counters.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// An operator that ATen has no function for.
class LibraryOperator {
 public:
  explicit LibraryOperator(const char* name, const char* overload = "")
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)) {}
  template <class... T>
  c10::IValue operator()(T&&... arguments) const {
    std::vector<c10::IValue> stack;
    stack.reserve(sizeof...(arguments));
    (stack.emplace_back(std::forward<T>(arguments)), ...);
    handle_.callBoxed(stack);
    return std::move(stack.at(0));
  }

 private:
  const c10::OperatorHandle handle_;
};

inline c10::IValue optional_tensor(const at::Tensor& tensor) { return tensor.defined() ? c10::IValue(tensor) : c10::IValue(); }

inline bool has_bfloat16() {
  static const bool has = at::hasMKLDNN() && LibraryOperator("mkldnn::_is_mkldnn_bf16_supported")().toBool();
  return has;
}

// A weight of shape (columns, terms) in the layout of MKL for so many rows, or of oneDNN for any number; undefined without them.
at::Tensor prepack_linear_weight(const at::Tensor& weight, std::optional<int64_t> rows);

// oneDNN's name of an activation that it computes of its accumulators, and its numbers.
std::string_view activation_name(std::string_view activation);
c10::List<std::optional<at::Scalar>> activation_numbers(std::string_view activation);

// rows times a packed matrix, by oneDNN, which adds the shift to its accumulators.
at::Tensor onednn_linear(const at::Tensor& rows, const at::Tensor& packed, const at::Tensor& shift, std::string_view activation);

}  // namespace fxwrap
