// Calls that skip the boxed stack. A schema's types are spelled as a string of codes, the C++ signatures below spell
// themselves the same way, and the dispatcher itself checks that a chosen signature is the registered one.
#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <tuple>
#include <unordered_map>

#include "bridge/calls.h"

namespace fxwrap {
namespace {

using at::Scalar;
using at::Tensor;
using c10::TypeKind;
using std::optional;

int64_t read_int(const Frame& f, const Value& value) {
  if (value.source != Value::Source::Constant) return f.ints[value.index];
  return value.constant.toInt();
}

// ArgumentHolder<T>: owns the object that a parameter of type T refers to during the call; `code` spells T.
template <class T>
struct ArgumentHolder;

template <>
struct ArgumentHolder<const Tensor&> {
  static constexpr const char* code = "T";
  const Tensor* value;
  Tensor storage;
  ArgumentHolder(const Frame& f, const Value& v) : value(&read_tensor(f, v)) {
    const bool symbol = v.source != Value::Source::Tensor && v.source != Value::Source::Constant;
    if (symbol) {
      storage = number_tensor(read_scalar(f, v));
      value = &storage;
    }
  }
  const Tensor& get() const { return *value; }
};

template <>
struct ArgumentHolder<Tensor&> {
  static constexpr const char* code = "M";
  Tensor& value;
  ArgumentHolder(const Frame& f, const Value& v) : value(tensor_at(f, v.index)) {}
  Tensor& get() const { return value; }
};

template <>
struct ArgumentHolder<const optional<Tensor>&> {
  static constexpr const char* code = "T?";
  optional<Tensor> value;
  ArgumentHolder(const Frame& f, const Value& v) {
    const Tensor& tensor = read_tensor(f, v);
    if (tensor.defined()) value = tensor;
  }
  const optional<Tensor>& get() const { return value; }
};

template <>
struct ArgumentHolder<const Scalar&> {
  static constexpr const char* code = "S";
  Scalar storage;
  const Scalar* value;
  ArgumentHolder(const Frame& f, const Value& v) : value(&v.scalar) {
    if (v.source != Value::Source::Constant) {
      storage = read_scalar(f, v);
      value = &storage;
    }
  }
  const Scalar& get() const { return *value; }
};

template <>
struct ArgumentHolder<const optional<Scalar>&> {
  static constexpr const char* code = "S?";
  optional<Scalar> value;
  ArgumentHolder(const Frame& f, const Value& v) {
    if (!v.is_none()) value = read_scalar(f, v);
  }
  const optional<Scalar>& get() const { return value; }
};

// Plain values, converted at each call.
template <class T>
struct ValueHolder {
  T value;
  T get() const { return value; }
};

template <>
struct ArgumentHolder<int64_t> : ValueHolder<int64_t> {
  static constexpr const char* code = "i";
  ArgumentHolder(const Frame& f, const Value& v) : ValueHolder{read_int(f, v)} {}
};

template <>
struct ArgumentHolder<c10::SymInt> : ValueHolder<c10::SymInt> {
  static constexpr const char* code = "I";
  ArgumentHolder(const Frame& f, const Value& v) : ValueHolder{c10::SymInt(read_int(f, v))} {}
};

template <>
struct ArgumentHolder<optional<int64_t>> : ValueHolder<optional<int64_t>> {
  static constexpr const char* code = "i?";
  ArgumentHolder(const Frame& f, const Value& v) {
    if (!v.is_none()) value = read_int(f, v);
  }
};

template <>
struct ArgumentHolder<optional<c10::SymInt>> : ValueHolder<optional<c10::SymInt>> {
  static constexpr const char* code = "I?";
  ArgumentHolder(const Frame& f, const Value& v) {
    if (!v.is_none()) value = c10::SymInt(read_int(f, v));
  }
};

template <>
struct ArgumentHolder<double> : ValueHolder<double> {
  static constexpr const char* code = "d";
  ArgumentHolder(const Frame& f, const Value& v) : ValueHolder{read_scalar(f, v).toDouble()} {}
};

template <>
struct ArgumentHolder<optional<double>> : ValueHolder<optional<double>> {
  static constexpr const char* code = "d?";
  ArgumentHolder(const Frame& f, const Value& v) {
    if (!v.is_none()) value = read_scalar(f, v).toDouble();
  }
};

template <>
struct ArgumentHolder<bool> : ValueHolder<bool> {
  static constexpr const char* code = "b";
  ArgumentHolder(const Frame& f, const Value& v) : ValueHolder{read_scalar(f, v).toBool()} {}
};

template <class Code>
struct CodeHolder : ValueHolder<optional<Code>> {
  CodeHolder(const Frame&, const Value& v) {
    if (!v.is_none()) this->value = Code(v.constant.toInt());
  }
};

template <>
struct ArgumentHolder<optional<at::ScalarType>> : CodeHolder<at::ScalarType> {
  static constexpr const char* code = "dtype?";
  using CodeHolder::CodeHolder;
};

template <>
struct ArgumentHolder<at::ScalarType> : ValueHolder<at::ScalarType> {
  static constexpr const char* code = "dtype";
  ArgumentHolder(const Frame&, const Value& v) : ValueHolder{at::ScalarType(v.constant.toInt())} {}
};

template <>
struct ArgumentHolder<optional<at::Layout>> : CodeHolder<at::Layout> {
  static constexpr const char* code = "layout?";
  using CodeHolder::CodeHolder;
};

template <>
struct ArgumentHolder<optional<at::MemoryFormat>> : CodeHolder<at::MemoryFormat> {
  static constexpr const char* code = "format?";
  using CodeHolder::CodeHolder;
};

template <>
struct ArgumentHolder<optional<at::Device>> : ValueHolder<optional<at::Device>> {
  static constexpr const char* code = "device?";
  ArgumentHolder(const Frame&, const Value& v) {
    if (!v.is_none()) value = v.constant.toDevice();
  }
};

template <>
struct ArgumentHolder<optional<bool>> : ValueHolder<optional<bool>> {
  static constexpr const char* code = "b?";
  ArgumentHolder(const Frame& f, const Value& v) {
    if (!v.is_none()) value = read_scalar(f, v).toBool();
  }
};

template <>
struct ArgumentHolder<std::string_view> : ValueHolder<std::string_view> {
  static constexpr const char* code = "s";
  ArgumentHolder(const Frame&, const Value& v) : ValueHolder{v.constant.toStringView()} {}
};

template <>
struct ArgumentHolder<at::IntArrayRef> {
  static constexpr const char* code = "i[]";
  c10::SmallVector<int64_t, 6> storage;
  at::IntArrayRef value;
  ArgumentHolder(const Frame& f, const Value& v) : value(v.integers) {
    if (v.source == Value::Source::Constant) return;
    for (const Value& item : v.items) {
      storage.push_back(read_int(f, item));
    }
    value = storage;
  }
  at::IntArrayRef get() const { return value; }
};

template <>
struct ArgumentHolder<c10::SymIntArrayRef> : ArgumentHolder<at::IntArrayRef> {
  static constexpr const char* code = "I[]";
  using ArgumentHolder<at::IntArrayRef>::ArgumentHolder;
  c10::SymIntArrayRef get() const { return c10::fromIntArrayRefSlow(value); }
};

template <>
struct ArgumentHolder<at::OptionalIntArrayRef> : ArgumentHolder<at::IntArrayRef> {
  static constexpr const char* code = "i[]?";
  bool none;
  ArgumentHolder(const Frame& f, const Value& v) : ArgumentHolder<at::IntArrayRef>(f, v), none(v.is_none()) {}
  at::OptionalIntArrayRef get() const { return none ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(value); }
};

template <>
struct ArgumentHolder<at::TensorList> {
  static constexpr const char* code = "T[]";
  c10::SmallVector<Tensor, 8> storage;
  ArgumentHolder(const Frame& f, const Value& v) {
    if (v.source == Value::Source::Constant) {
      for (const Tensor& tensor : v.constant.toTensorVector()) storage.push_back(tensor);
      return;
    }
    for (const Value& item : v.items) {
      storage.push_back(read_tensor(f, item));
    }
  }
  at::TensorList get() const { return storage; }
};

template <>
struct ArgumentHolder<const at::ITensorListRef&> : ArgumentHolder<at::TensorList> {
  at::ITensorListRef list;
  ArgumentHolder(const Frame& f, const Value& v) : ArgumentHolder<at::TensorList>(f, v), list(at::TensorList(storage)) {}
  const at::ITensorListRef& get() const { return list; }
};

template <>
struct ArgumentHolder<const c10::List<optional<Tensor>>&> {
  static constexpr const char* code = "T?[]";
  c10::List<optional<Tensor>> storage;
  ArgumentHolder(const Frame& f, const Value& v) {
    if (v.source == Value::Source::Constant) {
      storage = v.constant.toOptionalTensorList();
      return;
    }
    storage.reserve(v.items.size());
    for (const Value& item : v.items) {
      const Tensor& tensor = read_tensor(f, item);
      storage.push_back(tensor.defined() ? optional<Tensor>(tensor) : std::nullopt);
    }
  }
  const c10::List<optional<Tensor>>& get() const { return storage; }
};

// Results: tensors, as a schema of the same codes ("T", "M", "TT", "T[]").
template <class T>
struct ResultWriter;

template <>
struct ResultWriter<Tensor> {
  static constexpr std::array<const char*, 1> codes = {"T"};
  static void store(Frame& f, const std::vector<Result>& results, Tensor&& value) {
    if (results[0].kind == Arg::Tensor) tensor_at(f, results[0].index) = std::move(value);
  }
};

template <>
struct ResultWriter<Tensor&> {
  static constexpr std::array<const char*, 1> codes = {"M"};
  static void store(Frame& f, const std::vector<Result>& results, Tensor& value) {
    if (results[0].kind == Arg::Tensor) tensor_at(f, results[0].index) = value;
  }
};

template <class... T>
struct ResultWriter<std::tuple<T...>> {
  static constexpr std::array<const char*, sizeof...(T)> codes = {ResultWriter<T>::codes[0]...};
  static void store(Frame& f, const std::vector<Result>& results, std::tuple<T...>&& value) {
    size_t index = 0;
    std::apply(
        [&](auto&... tensor) {
          ((results[index].kind == Arg::Tensor ? void(tensor_at(f, results[index].index) = std::move(tensor))
                                               : void(),
            ++index),
           ...);
        },
        value);
  }
};

template <>
struct ResultWriter<std::vector<Tensor>> {
  static constexpr std::array<const char*, 1> codes = {"T[]"};
  static void store(Frame& f, const std::vector<Result>& results, std::vector<Tensor>&& value) {
    if (results[0].kind == Arg::None) return;
    store_result(f, results[0], c10::IValue(std::move(value)));
  }
};

// The codes of a signature's results and parameters.
struct Spelling {
  c10::ArrayRef<const char*> results, parameters;
};

// Copies the arguments outside of the constructors of each signature.
class OwnedCall : public PreparedCall {
 public:
  [[gnu::noinline]] OwnedCall(const std::vector<Value>& arguments, const std::vector<Result>& results)
      : PreparedCall(arguments, results) {}
  [[gnu::noinline]] ~OwnedCall() override {}
};

template <class Signature>
class TypedCall;

template <class Return, class... Parameters>
class TypedCall<Return(Parameters...)> final : public OwnedCall {
 public:
  using Handle = c10::TypedOperatorHandle<Return(Parameters...)>;
  TypedCall(const Handle& handle, const std::vector<Value>& arguments, const std::vector<Result>& results)
      : OwnedCall(arguments, results), handle_(handle) {}
  void run(Frame& f) const override { run(f, std::index_sequence_for<Parameters...>()); }
  static constexpr std::array<const char*, sizeof...(Parameters)> codes = {ArgumentHolder<Parameters>::code...};
  static constexpr Spelling spelling() { return {ResultWriter<Return>::codes, codes}; }

 private:
  template <size_t... index>
  void run(Frame& f, std::index_sequence<index...>) const {
    const Value* values = arguments_.data();
    ResultWriter<Return>::store(f, results_, handle_.call(ArgumentHolder<Parameters>(f, values[index]).get()...));
  }
  Handle handle_;
};

using T = const Tensor&;
using TO = const optional<Tensor>&;
using S = const Scalar&;
using SO = const optional<Scalar>&;
using I = c10::SymInt;
using Is = c10::SymIntArrayRef;
using Dtype = optional<at::ScalarType>;
using LayoutO = optional<at::Layout>;
using DeviceO = optional<at::Device>;
using BoolO = optional<bool>;
using Format = optional<at::MemoryFormat>;
using T2 = std::tuple<Tensor, Tensor>;
using T3 = std::tuple<Tensor, Tensor, Tensor>;

template <class... Signatures>
struct SignatureList {};

using Signatures = SignatureList<
    Tensor(T),                            // relu, exp, neg, t, alias
    Tensor(T, T),                         // mul, mm, bmm, eq
    Tensor(T, T, S),                      // add, sub
    Tensor(T, S),                         // mul.Scalar, eq.Scalar
    Tensor(T, S, S),                      // add.Scalar, threshold_backward
    Tensor(T, T, T),                      // where, addcmul
    Tensor(T, T, T, S),                   // addcmul, addcdiv
    Tensor(T, T, T, S, S),                // addmm, baddbmm
    Tensor(T, SO, SO),                    // clamp
    Tensor(T, TO, TO),                    // clamp.Tensor
    Tensor(T, std::string_view),          // gelu
    Tensor(T, T, std::string_view),       // gelu_backward
    Tensor(T, int64_t, bool),             // _softmax, cumsum-like
    Tensor(T, T, int64_t, at::ScalarType),  // _softmax_backward_data
    Tensor(T, at::OptionalIntArrayRef, bool, Dtype),  // sum, mean
    Tensor(T, at::IntArrayRef, bool),     // amax
    Tensor(T, at::IntArrayRef),           // permute
    Tensor(T, int64_t),                   // unsqueeze, squeeze
    Tensor(T, int64_t, int64_t),          // transpose
    Tensor(T, int64_t, I),                // select
    Tensor(T, int64_t, optional<I>, optional<I>, I),  // slice
    Tensor(T, int64_t, T),                // index_select
    Tensor(T, int64_t, T, bool),          // gather
    Tensor(T, Is),                        // view, reshape
    Tensor(T, Is, bool),                  // expand
    Tensor(T, T, I, bool, bool),          // embedding
    Tensor(T, T, I, I, bool),             // embedding_dense_backward
    Tensor(T, Is, Is, optional<I>),       // as_strided
    Tensor(T, Format),                    // clone
    Tensor(T, Dtype, LayoutO, DeviceO, BoolO, bool, Format),  // _to_copy
    Tensor(T, S, Dtype, LayoutO, DeviceO, BoolO, Format),     // full_like
    Tensor(T, Dtype, LayoutO, DeviceO, BoolO, Format),        // zeros_like
    Tensor(Is, S, Dtype, LayoutO, DeviceO, BoolO),            // full
    Tensor(Is, Dtype, LayoutO, DeviceO, BoolO, Format),       // empty
    Tensor(S, S, S, Dtype, LayoutO, DeviceO, BoolO),          // arange
    Tensor(at::TensorList, int64_t),                          // stack
    Tensor(const at::ITensorListRef&, int64_t),               // cat
    Tensor(T, const c10::List<optional<Tensor>>&),            // index
    Tensor(T, const c10::List<optional<Tensor>>&, T, bool),   // index_put
    T2(T, int64_t, bool),                                     // max.dim
    T2(T, I, int64_t, bool, bool),                            // topk
    T2(T, double, optional<bool>),                            // native_dropout
    T2(T, T, T, double, bool, TO, optional<double>),          // _scaled_dot_product_flash_attention_for_cpu
    T3(T, Is, TO, TO, double),                                // native_layer_norm
    T3(T, TO, TO, TO, TO, bool, double, double),              // native_batch_norm
    Tensor&(Tensor&, T),                  // mul_
    Tensor&(Tensor&, T, S),               // add_
    Tensor&(Tensor&, T, bool),            // copy_
    Tensor&(Tensor&, S),                  // fill_, mul_.Scalar
    Tensor&(T, Tensor&),                  // relu.out
    Tensor&(T, T, Tensor&),               // mm.out, mul.out
    Tensor&(T, T, S, Tensor&),            // add.out
    Tensor&(T, T, T, S, S, Tensor&)>;     // addmm.out

using CallFactory = std::unique_ptr<PreparedCall> (*)(const c10::OperatorHandle&, const std::vector<Value>&,
                                                const std::vector<Result>&);

template <class Signature>
std::unique_ptr<PreparedCall> make(const c10::OperatorHandle& handle, const std::vector<Value>& arguments,
                                   const std::vector<Result>& results) {
  // typed() throws if the registered C++ signature differs.
  auto typed = handle.typed<Signature>();
  return std::make_unique<TypedCall<Signature>>(typed, arguments, results);
}

struct Factory {
  Spelling spelling;
  CallFactory make;
};

std::unordered_multimap<std::string, CallFactory> by_spelling(c10::ArrayRef<Factory> factories) {
  std::unordered_multimap<std::string, CallFactory> result;
  for (const Factory& factory : factories) {
    std::string text;
    for (const char* code : factory.spelling.results) text += code;
    text += "(";
    for (const char* code : factory.spelling.parameters) text.append(code).append(" ");
    result.emplace(std::move(text), factory.make);
  }
  return result;
}

template <class... S>
std::unordered_multimap<std::string, CallFactory> spell(SignatureList<S...>) {
  static constexpr Factory factories[] = {{TypedCall<S>::spelling(), &make<S>}...};
  return by_spelling(factories);
}

std::string spell_type(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) return spell_type(optional->getElementType()) + "?";
  if (auto list = type->cast<c10::ListType>()) return spell_type(list->getElementType()) + "[]";
  switch (type->kind()) {
    case TypeKind::TensorType: return "T";
    case TypeKind::NumberType: return "S";
    case TypeKind::IntType: return "i";
    case TypeKind::SymIntType: return "I";
    case TypeKind::FloatType: return "d";
    case TypeKind::BoolType: return "b";
    case TypeKind::StringType: return "s";
    case TypeKind::ScalarTypeType: return "dtype";
    case TypeKind::LayoutType: return "layout";
    case TypeKind::DeviceObjType: return "device";
    case TypeKind::MemoryFormatType: return "format";
    default: return "unknown";
  }
}

std::string spell_argument(const c10::Argument& argument) {
  const c10::AliasInfo* alias = argument.alias_info();
  const bool written_tensor = alias && alias->isWrite() && argument.type()->kind() == TypeKind::TensorType;
  return written_tensor ? "M" : spell_type(argument.real_type());
}

std::string spell_schema(const c10::FunctionSchema& schema) {
  std::string code;
  for (const c10::Argument& result : schema.returns()) {
    code += spell_argument(result);
  }
  code += "(";
  for (const c10::Argument& argument : schema.arguments()) {
    code += spell_argument(argument) + " ";
  }
  return code;
}

}  // namespace

std::unique_ptr<PreparedCall> make_typed_call(const c10::OperatorHandle& handle, const std::vector<Value>& arguments,
                                              const std::vector<Result>& results) {
  static const std::unordered_multimap<std::string, CallFactory> factories = spell(Signatures{});
  const auto candidates = factories.equal_range(spell_schema(handle.schema()));
  for (auto candidate = candidates.first; candidate != candidates.second; ++candidate) {
    try {
      return candidate->second(handle, arguments, results);
    } catch (const c10::Error&) {
      continue;  // the C++ type of the schema differs (TensorList, ITensorListRef); the boxed call supports it
    }
  }
  return nullptr;
}

}  // namespace fxwrap
