// A check of whether operators on the inputs of a call would run the kernels of ordinary tensors.
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "binding/binding.h"

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using fxwrap::binding::unpack;

constexpr DispatchKeySet passive_keys({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
constexpr DispatchKeySet plain_keys =
    DispatchKeySet(DispatchKeySet::RAW, c10::full_backend_mask) | DispatchKeySet(DispatchKey::Dense) |
    DispatchKeySet(DispatchKey::ADInplaceOrView) | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;

bool has_only(DispatchKeySet keys, DispatchKeySet allowed) { return (keys.raw_repr() & ~allowed.raw_repr()) == 0; }

bool is_plain(PyObject* item, bool records_gradients) {
  PyTypeObject* type = Py_TYPE(item);
  if (type == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
      type == reinterpret_cast<PyTypeObject*>(ParameterClass)) {
    const at::Tensor& tensor = unpack(item);
    return fxwrap::binding::has_plain_keys(tensor) && !(records_gradients && tensor.requires_grad());
  }
  return PyLong_CheckExact(item) || PyFloat_CheckExact(item) || PyBool_Check(item) || item == Py_None;
}

// are_plain_inputs(tuple): False where it is not certain.
PyObject* are_plain_inputs(PyObject*, PyObject* inputs) {
  if (!PyTuple_CheckExact(inputs)) {
    PyErr_Format(PyExc_TypeError, "are_plain_inputs() takes a tuple, got %.200s", Py_TYPE(inputs)->tp_name);
    return nullptr;
  }
  if (!fxwrap::binding::runs_plain_kernels()) Py_RETURN_FALSE;
  const bool records_gradients = c10::GradMode::is_enabled();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
    if (!is_plain(PyTuple_GET_ITEM(inputs, i), records_gradients)) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyMethodDef input_functions[] = {
    {"are_plain_inputs", are_plain_inputs, METH_O,
     "are_plain_inputs(inputs: tuple) -> bool\n\nWhether certainly no mode, functorch level or tracer is active, and all "
     "inputs are numbers, None, or tensors whose elements are in their memory and for which no gradients are recorded."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

namespace fxwrap::binding {

bool has_plain_keys(const at::Tensor& tensor) {
  return tensor.defined() && has_only(tensor.key_set(), plain_keys) && !tensor.is_meta();
}

bool runs_plain_kernels() {
  return has_only(c10::impl::tls_local_dispatch_key_set().included_, passive_keys) &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0;
}

bool add_plain_inputs(PyObject* module) { return PyModule_AddFunctions(module, input_functions) == 0; }

}  // namespace fxwrap::binding
