// The Python type `Launcher`: a GPU kernel as a callable with little work per call.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstring>
#include <exception>

#include "binding/binding.h"
#include "libraries/cublas.h"
#include "libraries/cudnn.h"
#include "cuda/launch.h"

namespace {

using fxwrap::Arguments;
using fxwrap::Grid;
using fxwrap::KernelVariantCache;
using fxwrap::Parameter;
using fxwrap::Variant;
using fxwrap::binding::set_python_error;

struct LauncherObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  KernelVariantCache* kernel;
  PyObject* fallback;
  bool dependent;  // launches may start before the ones before them have ended
};

bool read_int(int64_t& place, PyObject* object) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  place = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool read_grid(Grid& grid, PyObject* object) {
  return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 3 && read_int(grid.x, PyTuple_GET_ITEM(object, 0)) &&
         read_int(grid.y, PyTuple_GET_ITEM(object, 1)) && read_int(grid.z, PyTuple_GET_ITEM(object, 2));
}

bool read_real(double& place, PyObject* object) {
  if (PyFloat_CheckExact(object)) {
    place = PyFloat_AS_DOUBLE(object);
    return true;
  }
  int64_t integer = 0;
  if (!read_int(integer, object)) return false;
  place = double(integer);
  return true;
}

// Returns false for an argument that only Triton can handle; may throw torch's errors.
bool read_argument(Arguments& arguments, Parameter parameter, PyObject* object) {
  switch (parameter) {
    case Parameter::pointer:
      return fxwrap::binding::is_plain_tensor(object) && arguments.add_tensor(fxwrap::binding::unpack(object));
    case Parameter::integer: {
      int64_t value = 0;
      if (!read_int(value, object)) return false;
      arguments.add_integer(value);
      return true;
    }
    case Parameter::real: {
      double value = 0;
      if (!read_real(value, object)) return false;
      arguments.add_float(value);
      return true;
    }
    case Parameter::boolean:
      if (!PyBool_Check(object)) return false;
      arguments.add_bool(object == Py_True);
      return true;
  }
  return false;
}

bool read_call(Grid& grid, Arguments& arguments, const KernelVariantCache& kernel, PyObject* const* values, Py_ssize_t count) {
  const auto& parameters = kernel.parameters();
  if (count != Py_ssize_t(parameters.size()) + 1 || count > Arguments::most || !read_grid(grid, values[0])) return false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!read_argument(arguments, parameters[i], values[i + 1])) return false;
  }
  return arguments.device() >= 0;
}

// Launches without the GIL, since a full queue makes the driver wait. Returns false if no variant matches.
bool launch_released(const KernelVariantCache& kernel, const Grid& grid, Arguments& arguments) {
  std::exception_ptr error;
  bool launched = false;
  PyThreadState* state = PyEval_SaveThread();
  try {
    launched = kernel.launch(grid, arguments);
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (error) std::rethrow_exception(error);
  return launched;
}

// launcher(grid, *tensors, *numbers)
PyObject* call(PyObject* object, PyObject* const* values, size_t flags, PyObject* keywords) {
  auto* self = reinterpret_cast<LauncherObject*>(object);
  try {
    Grid grid{.dependent = self->dependent};
    Arguments arguments;
    if (keywords == nullptr && read_call(grid, arguments, *self->kernel, values, PyVectorcall_NARGS(flags))) {
      const bool nothing = grid.x <= 0 || grid.y <= 0 || grid.z <= 0;
      if (nothing || launch_released(*self->kernel, grid, arguments)) Py_RETURN_NONE;
    }
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  return PyObject_Vectorcall(self->fallback, values, flags, keywords);
}

uint8_t* copied(const char* data, Py_ssize_t size) {
  auto* copy = new uint8_t[size + 1];
  std::memcpy(copy, data, size);
  copy[size] = 0;
  return copy;
}

// Sets an error and returns false if a variant is for another number of parameters.
bool are_for(const KernelVariantCache& kernel, Py_ssize_t class_count, Py_ssize_t passed_count) {
  const auto count = Py_ssize_t(kernel.parameters().size());
  if (class_count == count && passed_count == count) return true;
  PyErr_Format(PyExc_ValueError, "a kernel of %zd parameters has classes for %zd and ways to pass %zd", count,
               class_count, passed_count);
  return false;
}

// add_variant(name, threads, shared, scratch, classes, parameter_passing, device, function, owner): the variant is never freed.
PyObject* add_variant(PyObject* object, PyObject* values) {
  auto* self = reinterpret_cast<LauncherObject*>(object);
  const char *name = nullptr, *classes = nullptr, *parameter_passing = nullptr;
  int threads = 0, shared = 0, scratch = 0, device = 0;
  Py_ssize_t class_count = 0, passed_count = 0;
  unsigned long long function = 0;
  PyObject* owner = nullptr;
  if (!PyArg_ParseTuple(values, "siiiy#y#iKO", &name, &threads, &shared, &scratch, &classes, &class_count, &parameter_passing,
                        &passed_count, &device, &function, &owner)) {
    return nullptr;
  }
  if (!are_for(*self->kernel, class_count, passed_count)) return nullptr;
  try {
    if (!self->kernel->holds(reinterpret_cast<const uint8_t*>(classes), device)) {
      const Variant variant{reinterpret_cast<char*>(copied(name, Py_ssize_t(std::strlen(name)))), nullptr, nullptr, 0,
                            false, threads, shared, scratch, copied(classes, class_count),
                            copied(parameter_passing, passed_count)};
      self->kernel->add_loaded_variant(variant, device, reinterpret_cast<void*>(function));
      Py_INCREF(owner);
    }
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// add_variant_image(name, cubin, ptx, capability, threads, shared, scratch, classes, parameter_passing): the variant is never freed.
PyObject* add_variant_image(PyObject* object, PyObject* values) {
  auto* self = reinterpret_cast<LauncherObject*>(object);
  const char *name = nullptr, *cubin = nullptr, *ptx = nullptr, *classes = nullptr, *parameter_passing = nullptr;
  int capability = 0, threads = 0, shared = 0, scratch = 0;
  Py_ssize_t cubin_size = 0, ptx_size = 0, class_count = 0, passed_count = 0;
  if (!PyArg_ParseTuple(values, "sy#y#iiiiy#y#", &name, &cubin, &cubin_size, &ptx, &ptx_size, &capability, &threads,
                        &shared, &scratch, &classes, &class_count, &parameter_passing, &passed_count) ||
      !are_for(*self->kernel, class_count, passed_count)) {
    return nullptr;
  }
  const bool arch_specific = ptx_size == 0;
  const auto* text = arch_specific ? nullptr : reinterpret_cast<char*>(copied(ptx, ptx_size));
  self->kernel->add_variant(Variant{reinterpret_cast<char*>(copied(name, Py_ssize_t(std::strlen(name)))),
                             copied(cubin, cubin_size), text, capability, arch_specific, threads, shared, scratch,
                             copied(classes, class_count), copied(parameter_passing, passed_count)});
  Py_RETURN_NONE;
}

PyObject* launcher_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"symbol", "signature", "fallback", "dependent", nullptr};
  const char *symbol = nullptr, *signature = nullptr;
  PyObject* fallback = nullptr;
  int dependent = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "ssO|p", const_cast<char**>(names), &symbol, &signature, &fallback,
                                   &dependent)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<LauncherObject*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = call;
  self->kernel = &KernelVariantCache::named(symbol, signature);
  self->fallback = Py_NewRef(fallback);
  self->dependent = dependent != 0;
  return reinterpret_cast<PyObject*>(self);
}

int launcher_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<LauncherObject*>(object)->fallback);
  return 0;
}

int launcher_clear(PyObject* object) {
  Py_CLEAR(reinterpret_cast<LauncherObject*>(object)->fallback);
  return 0;
}

void launcher_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  launcher_clear(object);
  Py_TYPE(object)->tp_free(object);
}

PyObject* launcher_variant_count(PyObject* object, void*) {
  return PyLong_FromLongLong(reinterpret_cast<LauncherObject*>(object)->kernel->variant_count());
}

PyMethodDef methods[] = {
    {"add_variant", add_variant, METH_VARARGS,
     "add_variant(name, threads, shared, scratch, classes, parameter_passing, device, function, owner)\n\nAdds a loaded function "
     "of the driver for arguments of these classes on this device. Its owner is kept alive."},
    {"add_variant_image", add_variant_image, METH_VARARGS,
     "add_variant_image(name, cubin, ptx, capability, threads, shared, scratch, classes, parameter_passing)\n\nAdds machine code for "
     "arguments of these classes, loaded by the first launch on a GPU that can run it. Code without PTX is for one "
     "architecture only."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef attributes[] = {
    {"variant_count", launcher_variant_count, nullptr, "The number of compiled variants of the kernel in this process.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject launcher_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool ready_launcher_type() {
  launcher_type.tp_name = "fxwrap.runtime.native.Launcher";
  launcher_type.tp_doc =
      "Launcher(symbol, signature, fallback, dependent=False)\n\nA GPU kernel: launcher(grid, *tensors, *numbers) launches "
      "it on the tensors' GPU and torch's current stream there. Calls without a matching variant go to `fallback`. Those "
      "of a dependent launcher may start before the launch before them has ended.";
  launcher_type.tp_basicsize = sizeof(LauncherObject);
  launcher_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
  launcher_type.tp_new = launcher_new;
  launcher_type.tp_dealloc = launcher_dealloc;
  launcher_type.tp_traverse = launcher_traverse;
  launcher_type.tp_clear = launcher_clear;
  launcher_type.tp_call = PyVectorcall_Call;
  launcher_type.tp_vectorcall_offset = offsetof(LauncherObject, vectorcall);
  launcher_type.tp_methods = methods;
  launcher_type.tp_getset = attributes;
  return PyType_Ready(&launcher_type) == 0;
}

PyObject* override_driver_library(PyObject*, PyObject* path) {
  const char* text = PyUnicode_AsUTF8(path);
  if (text == nullptr) return nullptr;
  try {
    fxwrap::driver::override_library(text);
    fxwrap::cublas::override_library(text);
    fxwrap::cudnn::override_library(text);
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"override_driver_library", override_driver_library, METH_O,
     "override_driver_library(path)\n\nTakes the functions of the CUDA driver, cuBLASLt and cuDNN from this library: for tests."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

namespace fxwrap::binding {

bool add_launcher(PyObject* module) {
  return ready_launcher_type() && PyModule_AddFunctions(module, functions) == 0 &&
         PyModule_AddObjectRef(module, "Launcher", reinterpret_cast<PyObject*>(&launcher_type)) == 0;
}

}  // namespace fxwrap::binding
