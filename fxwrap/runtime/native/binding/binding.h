// Shared declarations of the Python binding.
#pragma once

#include <Python.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

// From libtorch_python, declared here because its headers include pybind11, which is slow to compile.
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
extern PyObject* THPGeneratorClass;
at::Generator THPGenerator_Unwrap(PyObject* object);

namespace fxwrap::binding {

// The beginning of torch's Tensor object. The binding verifies it at import.
struct TensorObject {
  PyObject_HEAD
  at::Tensor tensor;
};

inline const at::Tensor& unpack(PyObject* object) { return reinterpret_cast<TensorObject*>(object)->tensor; }

// Whether tensors of a subclass are ordinary ones: see is_plain_class in fxwrap/runtime/plain_inputs.py.
bool is_plain_subclass(PyTypeObject* type);

// Whether an object is an ordinary tensor: of no subclass that defines how operators act on it.
inline bool is_plain_tensor(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  return type == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         type == reinterpret_cast<PyTypeObject*>(ParameterClass) || is_plain_subclass(type);
}

// Sets the Python error that corresponds to a C++ exception.
void set_python_error(const std::exception_ptr& error);

// Adds the type `Launcher` and the function `override_driver_library` to the binding's module; returns false with an error set.
bool add_launcher(PyObject* module);

// Adds the function `are_plain_inputs` to the binding's module; returns false with an error set.
bool add_plain_inputs(PyObject* module);

// Adds the operators for frozen weights to the binding's module, and registers them; returns false with an error set.
bool add_prepacked(PyObject* module);

// Whether operators run the kernels of ordinary tensors on a tensor, besides autograd.
bool has_plain_keys(const at::Tensor& tensor);

// Whether certainly no mode, functorch level or tracer is active.
bool runs_plain_kernels();

}  // namespace fxwrap::binding
