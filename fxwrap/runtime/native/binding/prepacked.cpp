// The operators for frozen weights as Python functions: torch's dispatcher takes as long as a small convolution to convert a
// call's arguments.
#include <Python.h>

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include <exception>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/binding.h"
#include "libraries/operators.h"
#include "libraries/prepacked.h"

// From libtorch_python, as in binding.h.
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);

namespace {

using at::Tensor;
using std::optional;

// Whether an object is a tensor for which the operator runs the bridge's function, and nothing else.
bool is_plain_operand(PyObject* object) {
  if (!fxwrap::binding::is_plain_tensor(object)) return false;
  const Tensor& tensor = fxwrap::binding::unpack(object);
  return fxwrap::binding::has_plain_keys(tensor) && !(tensor.requires_grad() && c10::GradMode::is_enabled());
}

// Reader<T>: the argument of a parameter of type T. `read` returns false for other objects, without an error.
template <class T>
struct Reader;

template <>
struct Reader<const Tensor&> {
  const Tensor* value = nullptr;
  bool read(PyObject* object) {
    if (!is_plain_operand(object)) return false;
    value = &fxwrap::binding::unpack(object);
    return true;
  }
  const Tensor& get() const { return *value; }
};

template <>
struct Reader<Tensor&> {
  Tensor value;
  bool read(PyObject* object) {
    if (!is_plain_operand(object)) return false;
    value = fxwrap::binding::unpack(object);
    return true;
  }
  Tensor& get() { return value; }
};

template <>
struct Reader<const optional<Tensor>&> {
  optional<Tensor> value;
  bool read(PyObject* object) {
    if (object == Py_None) return true;
    if (!is_plain_operand(object)) return false;
    value = fxwrap::binding::unpack(object);
    return true;
  }
  const optional<Tensor>& get() const { return value; }
};

template <class T>
struct ValueReader {
  T value{};
  T get() const { return value; }
};

template <>
struct Reader<bool> : ValueReader<bool> {
  bool read(PyObject* object) {
    value = object == Py_True;
    return PyBool_Check(object);
  }
};

template <>
struct Reader<int64_t> : ValueReader<int64_t> {
  bool read(PyObject* object) {
    int overflow = 0;
    if (!PyLong_CheckExact(object)) return false;
    value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
  }
};

template <>
struct Reader<optional<int64_t>> : ValueReader<optional<int64_t>> {
  bool read(PyObject* object) {
    Reader<int64_t> reader;
    if (object == Py_None) return true;
    const bool is_int = reader.read(object);
    value = reader.get();
    return is_int;
  }
};

template <>
struct Reader<double> : ValueReader<double> {
  bool read(PyObject* object) {
    if (!PyFloat_CheckExact(object)) return false;
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
};

template <>
struct Reader<std::string_view> : ValueReader<std::string_view> {
  bool read(PyObject* object) {
    Py_ssize_t size = 0;
    if (!PyUnicode_CheckExact(object)) return false;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) PyErr_Clear();
    value = {text, size_t(text == nullptr ? 0 : size)};
    return text != nullptr;
  }
};

// Reads the items of a list or tuple by `read(item)`.
template <class Read>
bool read_items(PyObject* object, Read read) {
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    if (!read(PySequence_Fast_GET_ITEM(object, i))) return false;
  }
  return true;
}

template <>
struct Reader<at::IntArrayRef> {
  c10::SmallVector<int64_t, 5> values;
  bool read(PyObject* object) {
    return read_items(object, [&](PyObject* item) {
      Reader<int64_t> reader;
      const bool is_int = reader.read(item);
      values.push_back(reader.get());
      return is_int;
    });
  }
  at::IntArrayRef get() const { return values; }
};

template <>
struct Reader<std::vector<Tensor>> {
  std::vector<Tensor> values;
  bool read(PyObject* object) {
    return read_items(object, [&](PyObject* item) {
      if (!is_plain_operand(item)) return false;
      values.push_back(fxwrap::binding::unpack(item));
      return true;
    });
  }
  std::vector<Tensor>& get() { return values; }
};

// Calls torch's operator, for arguments of other types and where a mode must see the call.
PyObject* call_operator(const char* name, PyObject* const* values, Py_ssize_t count) {
  PyObject* value = PyImport_ImportModule("torch");
  for (const char* attribute : {"ops", fxwrap::native_namespace, name, "default"}) {
    PyObject* next = value == nullptr ? nullptr : PyObject_GetAttrString(value, attribute);
    Py_XDECREF(value);
    value = next;
  }
  PyObject* result = value == nullptr ? nullptr : PyObject_Vectorcall(value, values, size_t(count), nullptr);
  Py_XDECREF(value);
  return result;
}

// Runs without the GIL.
template <class Function>
PyObject* run_released(Function function) {
  using Result = decltype(function());
  std::exception_ptr error;
  std::conditional_t<std::is_void_v<Result>, bool, Tensor> result{};
  PyThreadState* state = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<Result>) {
      function();
    } else {
      result = function();
    }
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (error) {
    fxwrap::binding::set_python_error(error);
    return nullptr;
  }
  if constexpr (std::is_void_v<Result>) {
    Py_RETURN_NONE;
  } else {
    return THPVariable_Wrap(std::move(result));
  }
}

template <class Result, class... Parameters>
PyObject* call_function(Result (*function)(Parameters...), const char* name, PyObject* const* values, Py_ssize_t count) {
  return [&]<size_t... index>(std::index_sequence<index...>) {
    std::tuple<Reader<Parameters>...> readers;
    const bool is_plain_call = count == Py_ssize_t(sizeof...(Parameters)) && fxwrap::binding::runs_plain_kernels();
    if (!is_plain_call || !(std::get<index>(readers).read(values[index]) && ...)) return call_operator(name, values, count);
    return run_released([&]() -> Result {
      RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>{});
      return function(std::get<index>(readers).get()...);
    });
  }(std::index_sequence_for<Parameters...>());
}

template <auto member>
PyObject* call_member(const char* name, PyObject* const* values, Py_ssize_t count) {
  return call_function(fxwrap::prepacked_operators().*member, name, values, count);
}

#define FXWRAP_FUNCTION(name)                                                                                       \
  {#name,                                                                                                           \
   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(                                                      \
       +[](PyObject*, PyObject* const* values, Py_ssize_t count) -> PyObject* {                                     \
         return call_member<&fxwrap::PrepackedOperators::name>(#name, values, count);                               \
       })),                                                                                                         \
   METH_FASTCALL, "The operator of this name, with positional arguments."}

PyMethodDef weight_functions[] = {
    FXWRAP_FUNCTION(prepacked_linear),   FXWRAP_FUNCTION(prepacked_int8_linear), FXWRAP_FUNCTION(biased_linear),
    FXWRAP_FUNCTION(frozen_grouped_mm),  FXWRAP_FUNCTION(frozen_convolution),    FXWRAP_FUNCTION(frozen_convolution_),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

namespace fxwrap::binding {

bool add_prepacked(PyObject* module) {
  register_prepacked_operators();
  return PyModule_AddFunctions(module, weight_functions) == 0;
}

}  // namespace fxwrap::binding
