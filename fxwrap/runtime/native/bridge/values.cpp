#include "bridge/values.h"

#include <ATen/ScalarOps.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace fxwrap {
namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

constexpr const char* kind_names[] = {
    "None",      "a tensor", "a tensor",        "an int",   "a float",       "a bool",         "a complex",     "a string",
    "a dtype",   "a layout", "a memory format", "a device", "an int symbol", "a float symbol", "a bool symbol", "a list",
    "a name",    "a list of any length, a generator or an object", "an object", "an input"};

// Walks the flat arguments of one call site.
class Reader {
 public:
  Reader(const c10::FunctionSchema& schema, const Arg* data, int64_t size)
      : schema_(schema), next_(data), end_(data + size) {}

  bool done() const { return next_ == end_; }
  const Arg& peek() const { return *next_; }
  const Arg& take() {
    TORCH_CHECK(next_ != end_, schema_.operator_name(), ": a list at this call site lacks items");
    return *next_++;
  }

  Value read(const TypePtr& declared, std::optional<int32_t> length, const std::string& name) {
    TypePtr type = declared;
    bool optional = false;
    if (auto inner = type->cast<c10::OptionalType>()) {
      type = inner->getElementType();
      optional = true;
    }
    const Arg& argument = take();
    if (argument.kind == Arg::DynamicList && is_passed_whole(type->kind())) {
      Value result;
      result.source = Value::Source::DynamicList;
      result.index = int32_t(argument.integer);
      result.type = type;
      return result;
    }
    if (argument.kind == Arg::None && (optional || type->kind() == TypeKind::NoneType)) {
      return constant(IValue(), type);
    }
    if (auto list = type->cast<c10::ListType>()) {
      return read_list(argument, list->getElementType(), length, name);
    }
    return read_leaf(argument, type, name);
  }

  static Value constant(IValue value, const TypePtr& type) {
    Value result;
    result.type = type;
    if (value.isTensor()) {
      result.tensor = value.toTensor();
    } else if (value.isScalar()) {
      result.scalar = value.toScalar();
    } else if (value.isIntList()) {
      result.integers = value.toIntVector();
    }
    result.constant = std::move(value);
    return result;
  }

 private:
  // Lists, generators and opaque objects are passed as the frame holds them.
  static bool is_passed_whole(TypeKind kind) {
    return kind == TypeKind::ListType || kind == TypeKind::GeneratorType || kind == TypeKind::PyObjectType ||
           kind == TypeKind::ClassType || kind == TypeKind::AnyType;
  }

  Value read_list(const Arg& argument, const TypePtr& element, std::optional<int32_t> length,
                  const std::string& name) {
    Value result;
    result.source = Value::Source::List;
    result.type = element;
    if (argument.kind == Arg::List) {
      for (int64_t i = 0; i < argument.integer; ++i) {
        result.items.push_back(read(element, std::nullopt, name));
      }
    } else {
      TORCH_CHECK(length, schema_.operator_name(), ": argument '", name, "' takes a list, the program passes ",
                  kind_names[argument.kind]);
      // A schema's int[2] takes a single int for all of its elements.
      result.items.assign(*length, read_leaf(argument, element, name));
    }
    for (const Value& item : result.items) {
      if (item.source != Value::Source::Constant) {
        return result;
      }
    }
    return constant(read_value(Frame{}, result), element);
  }

  Value read_leaf(const Arg& argument, const TypePtr& type, const std::string& name) {
    if (auto source = dynamic_source(argument, type)) {
      Value result;
      result.source = *source;
      result.index = int32_t(argument.integer);
      result.type = type;
      return result;
    }
    std::optional<IValue> value = leaf_constant(argument, type);
    TORCH_CHECK(value, schema_.operator_name(), ": argument '", name, "' of type ", type->repr_str(),
                " cannot be ", kind_names[argument.kind]);
    return constant(std::move(*value), type);
  }

  static std::optional<Value::Source> dynamic_source(const Arg& argument, const TypePtr& type) {
    const TypeKind kind = type->kind();
    const bool number = kind == TypeKind::NumberType || kind == TypeKind::TensorType || kind == TypeKind::AnyType;
    switch (argument.kind) {
      case Arg::Tensor:
      case Arg::OwnedTensor:
        if (kind == TypeKind::TensorType || kind == TypeKind::AnyType) return Value::Source::Tensor;
        break;
      case Arg::IntSymbolIndex:
        if (number || kind == TypeKind::IntType || kind == TypeKind::SymIntType || kind == TypeKind::FloatType ||
            kind == TypeKind::SymFloatType) {
          return Value::Source::Int;
        }
        break;
      case Arg::FloatSymbolIndex:
        if (number || kind == TypeKind::FloatType || kind == TypeKind::SymFloatType) return Value::Source::Float;
        break;
      case Arg::BoolSymbolIndex:
        if (number || kind == TypeKind::BoolType || kind == TypeKind::SymBoolType) return Value::Source::Bool;
        break;
      default:
        break;
    }
    return std::nullopt;
  }

  static std::optional<IValue> number_constant(const Arg& argument) {
    switch (argument.kind) {
      case Arg::Int: return IValue(argument.integer);
      case Arg::Float: return IValue(argument.real);
      case Arg::Bool: return IValue(argument.integer != 0);
      case Arg::Complex: return IValue(c10::complex<double>(argument.real, argument.imaginary));
      default: return std::nullopt;
    }
  }

  static std::optional<IValue> leaf_constant(const Arg& argument, const TypePtr& type) {
    switch (type->kind()) {
      case TypeKind::NumberType:
        return number_constant(argument);
      case TypeKind::TensorType:
        if (argument.kind == Arg::None) return IValue(at::Tensor());
        if (auto number = number_constant(argument)) return IValue(number_tensor(number->toScalar()));
        break;
      case TypeKind::IntType:
      case TypeKind::SymIntType:
      case TypeKind::ScalarTypeType:
      case TypeKind::LayoutType:
      case TypeKind::MemoryFormatType:
        if (argument.kind == Arg::Int || argument.kind == Arg::Bool || argument.kind == Arg::DTypeCode ||
            argument.kind == Arg::LayoutCode || argument.kind == Arg::MemoryFormatCode) {
          return IValue(argument.integer);
        }
        break;
      case TypeKind::FloatType:
      case TypeKind::SymFloatType:
        if (argument.kind == Arg::Float) return IValue(argument.real);
        if (argument.kind == Arg::Int || argument.kind == Arg::Bool) return IValue(double(argument.integer));
        break;
      case TypeKind::BoolType:
      case TypeKind::SymBoolType:
        if (argument.kind == Arg::Bool) return IValue(argument.integer != 0);
        break;
      case TypeKind::ComplexType:
        if (auto number = number_constant(argument)) return IValue(number->toScalar().toComplexDouble());
        break;
      case TypeKind::StringType:
        if (argument.kind == Arg::String) return IValue(std::string(argument.text));
        break;
      case TypeKind::DeviceObjType:
        if (argument.kind == Arg::DeviceName) return IValue(c10::Device(argument.device->name));
        if (argument.kind == Arg::String) return IValue(c10::Device(argument.text));
        break;
      case TypeKind::AnyType:
        if (argument.kind == Arg::None) return IValue();
        if (argument.kind == Arg::String) return IValue(std::string(argument.text));
        return number_constant(argument);
      default:
        break;
    }
    return std::nullopt;
  }

  const c10::FunctionSchema& schema_;
  const Arg* next_;
  const Arg* end_;
};

IValue read_list(const Frame& f, const Value& value) {
  switch (value.type->kind()) {
    case TypeKind::TensorType: {
      c10::List<at::Tensor> list;
      list.reserve(value.items.size());
      for (const Value& item : value.items) {
        list.push_back(read_value(f, item).toTensor());
      }
      return list;
    }
    case TypeKind::IntType:
    case TypeKind::SymIntType: {
      c10::List<int64_t> list;
      for (const Value& item : value.items) {
        list.push_back(read_value(f, item).toInt());
      }
      return list;
    }
    case TypeKind::FloatType: {
      c10::List<double> list;
      for (const Value& item : value.items) {
        list.push_back(read_value(f, item).toDouble());
      }
      return list;
    }
    case TypeKind::BoolType: {
      c10::List<bool> list;
      for (const Value& item : value.items) {
        list.push_back(read_value(f, item).toBool());
      }
      return list;
    }
    default: {
      c10::impl::GenericList list(value.type);
      for (const Value& item : value.items) {
        list.push_back(read_value(f, item));
      }
      return list;
    }
  }
}

Result read_result(const Arg*& next, const Arg* end) {
  Result result;
  const Arg& argument = *next++;
  result.kind = argument.kind;
  result.index = int32_t(argument.integer);
  if (argument.kind == Arg::List) {
    for (int64_t i = 0; i < argument.integer && next != end; ++i) {
      result.items.push_back(read_result(next, end));
    }
  }
  return result;
}

}  // namespace

at::Tensor number_tensor(const at::Scalar& scalar) {
  at::Tensor tensor = at::scalar_to_tensor(scalar);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

at::Scalar read_scalar(const Frame& f, const Value& value) {
  switch (value.source) {
    case Value::Source::Int: return f.ints[value.index];
    case Value::Source::Float: return f.floats[value.index];
    case Value::Source::Bool: return f.ints[value.index] != 0;
    default: return value.scalar;
  }
}

IValue read_value(const Frame& f, const Value& value) {
  switch (value.source) {
    case Value::Source::Constant:
      return value.constant;
    case Value::Source::Tensor:
      return tensor_at(f, value.index);
    case Value::Source::List:
      return read_list(f, value);
    case Value::Source::DynamicList:
      return list_at(f, value.index);
    default:
      break;
  }
  at::Scalar scalar = read_scalar(f, value);
  switch (value.type->kind()) {
    case TypeKind::TensorType: return number_tensor(scalar);
    case TypeKind::FloatType:
    case TypeKind::SymFloatType: return scalar.toDouble();
    default: return scalar;
  }
}

std::vector<Value> prepare_arguments(const c10::FunctionSchema& schema, const Arg* data, int64_t size) {
  Reader reader(schema, data, size);
  const auto& declared = schema.arguments();
  std::vector<std::optional<Value>> provided(declared.size());
  size_t position = 0;
  while (!reader.done()) {
    size_t index = position++;
    if (reader.peek().kind == Arg::Name) {
      const std::string name = reader.take().text;
      std::optional<int> named_index = schema.argumentIndexWithName(name);
      TORCH_CHECK(named_index, schema.operator_name(), " has no argument '", name, "'");
      index = size_t(*named_index);
    }
    TORCH_CHECK(index < declared.size(), schema.operator_name(), " takes at most ", declared.size(), " arguments");
    const c10::Argument& argument = declared[index];
    provided[index] = reader.read(argument.real_type(), argument.N(), argument.name());
  }
  std::vector<Value> values;
  for (size_t i = 0; i < declared.size(); ++i) {
    if (provided[i]) {
      values.push_back(std::move(*provided[i]));
      continue;
    }
    TORCH_CHECK(declared[i].default_value(), schema.operator_name(), " is called without its argument '",
                declared[i].name(), "'");
    values.push_back(Reader::constant(*declared[i].default_value(), declared[i].real_type()));
  }
  return values;
}

std::vector<Result> prepare_results(const c10::FunctionSchema& schema, const Arg* data, int64_t size) {
  std::vector<Result> results;
  for (const Arg* next = data; next != data + size;) {
    results.push_back(read_result(next, data + size));
  }
  const size_t returned = schema.returns().size();
  TORCH_CHECK(results.size() <= returned, schema.operator_name(), " has ", returned,
              " results, the program stores ", results.size());
  results.resize(returned);
  return results;
}

void store_result(Frame& f, const Result& result, IValue value) {
  switch (result.kind) {
    case Arg::Tensor:
      tensor_at(f, result.index) = value.isNone() ? at::Tensor() : std::move(value).toTensor();
      return;
    case Arg::IntSymbolIndex:
      f.ints[result.index] = value.toScalar().toLong();
      return;
    case Arg::FloatSymbolIndex:
      f.floats[result.index] = value.toScalar().toDouble();
      return;
    case Arg::BoolSymbolIndex:
      f.ints[result.index] = value.toScalar().toBool();
      return;
    case Arg::DynamicList:
      list_at(f, result.index) = std::move(value);
      return;
    case Arg::List: {
      const auto list = value.toListRef();
      TORCH_CHECK(list.size() == result.items.size(), "an operator returned a list of ", list.size(),
                  " where the program expects ", result.items.size());
      for (size_t i = 0; i < list.size(); ++i) {
        store_result(f, result.items[i], list[i]);
      }
      return;
    }
    default:
      return;
  }
}

}  // namespace fxwrap
