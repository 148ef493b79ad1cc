// What the parts of the Python binding share.
#pragma once

#include <Python.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

// Of libtorch_python, declared here because its own headers bring in pybind11 (15 s of compile time).
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
extern PyObject* THPGeneratorClass;
at::Generator THPGenerator_Unwrap(PyObject* object);

namespace fxwrap::binding {

// The head of torch's Tensor object. The binding proves it at import.
struct TensorObject {
  PyObject_HEAD
  at::Tensor tensor;
};

inline const at::Tensor& unpack(PyObject* object) { return reinterpret_cast<TensorObject*>(object)->tensor; }

// Says whether an object is a tensor of no subclass but Parameter.
inline bool is_plain_tensor(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  return type == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         type == reinterpret_cast<PyTypeObject*>(ParameterClass);
}

// Sets the Python error that stands for what is being handled.
void set_python_error(const std::exception_ptr& error);

// Adds the type `Launcher` and the function `use_driver` to the binding's module; returns false with an error set.
bool add_launcher(PyObject* module);

}  // namespace fxwrap::binding
