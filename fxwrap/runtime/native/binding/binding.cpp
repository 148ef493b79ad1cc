// The Python type `Program`: an emitted library as a callable, without a Python-level layer in between.
#include <Python.h>
#include <structmember.h>

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <exception>
#include <unordered_set>
#include <variant>
#include <vector>

#include "binding/binding.h"
#include "bridge/frame.h"
#include "engine/failure.h"

// From libtorch_python, as in binding.h.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);
namespace pybind11 {
class handle {
 public:
  PyObject* pointer;
};
class object : public handle {  // the destructor makes it a class that functions return in memory of the caller
 public:
  ~object() {}
};
}  // namespace pybind11
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
namespace jit {
c10::IValue toIValue(pybind11::handle object, const c10::TypePtr& type, std::optional<int32_t> length);
pybind11::object toPyObject(c10::IValue value);
}  // namespace jit
}  // namespace torch

namespace {

using fxwrap::Arg;
using fxwrap::Execution;
using fxwrap::Input;
using fxwrap::binding::is_plain_tensor;
using fxwrap::binding::set_python_error;
using fxwrap::binding::unpack;

PyObject* error_classes = nullptr;        // the dictionary of fxwrap.errors
PyObject* input_error = nullptr;          // fxwrap.errors.InputError
PyObject* script_object_class = nullptr;  // torch.ScriptObject

bool check_tensor_layout() {
  const at::Tensor probe = at::empty({0});
  PyObject* object = THPVariable_Wrap(probe);
  if (object == nullptr) return false;
  const bool same = unpack(object).unsafeGetTensorImpl() == probe.unsafeGetTensorImpl();
  Py_DECREF(object);
  if (!same) {
    PyErr_SetString(PyExc_ImportError,
                    "this version of torch lays out its Tensor objects in a way fxwrap does not know; "
                    "use the Python emitter, or a version of fxwrap made for this torch");
  }
  return same;
}

// Collects the warnings of operators while the GIL is released; `raise` issues them in Python.
class Warnings final : public c10::WarningHandler {
 public:
  Warnings() : previous_(c10::WarningUtils::get_warning_handler()) { c10::WarningUtils::set_warning_handler(this); }
  ~Warnings() override { c10::WarningUtils::set_warning_handler(previous_); }
  void process(const c10::Warning& warning) override { collected_.push_back(warning); }

  // Returns false when a warning became an exception.
  bool raise() const {
    for (const c10::Warning& warning : collected_) {
      PyObject* category = std::holds_alternative<c10::DeprecationWarning>(warning.type()) ? PyExc_DeprecationWarning
                                                                                          : PyExc_UserWarning;
      std::string text = warning.msg();
      const auto& where = warning.source_location();
      if (where.file != nullptr && !warning.verbatim()) {
        text += " (Triggered internally at " + std::string(where.file) + ":" + std::to_string(where.line) + ".)";
      }
      if (PyErr_WarnEx(category, text.c_str(), 1) != 0) return false;
    }
    return true;
  }

 private:
  c10::WarningHandler* previous_;
  std::vector<c10::Warning> collected_;
};

struct ProgramObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  const fxwrap::Program* program;
  PyObject* path;
  PyObject* constants;  // a tuple
  // For each output: whether its tensor may be moved out of the frame, as no later output needs it and it is not borrowed.
  std::vector<bool>* movable;
};

std::vector<bool>* find_movable(const fxwrap::Program& program) {
  std::unordered_set<int64_t> retained;
  for (int64_t i = 0; i < program.inputs.size; ++i) {
    if (program.inputs.data[i].value.kind == Arg::Tensor) retained.insert(program.inputs.data[i].value.integer);
  }
  for (int64_t i = 0; i < program.constants.size; ++i) {
    retained.insert(program.constants.data[i].integer);
  }
  auto* movable = new std::vector<bool>(program.outputs.size);
  for (int64_t i = program.outputs.size - 1; i >= 0; --i) {
    const Arg& output = program.outputs.data[i];
    (*movable)[i] = output.kind == Arg::Tensor && retained.insert(output.integer).second;
  }
  return movable;
}

bool wrong_kind(const char* name, const char* expected, PyObject* got) {
  PyErr_Format(input_error, "input '%s': expected %s, got %.200s", name, expected, Py_TYPE(got)->tp_name);
  return false;
}

bool set_int(int64_t& place, const char* name, PyObject* object) {
  if (!PyLong_Check(object)) return wrong_kind(name, "an int", object);
  int overflow = 0;
  place = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) {
    PyErr_Format(input_error, "input '%s': %S does not fit in 64 bits", name, object);
    return false;
  }
  return true;
}

// The type of a list's elements, which are all of one kind; some tensors may be None.
c10::TypePtr element_type(PyObject* list) {
  const Py_ssize_t count = PyList_GET_SIZE(list);
  PyObject* first = count == 0 ? Py_None : PyList_GET_ITEM(list, 0);
  if (PyBool_Check(first)) return c10::BoolType::get();
  if (PyLong_Check(first)) return c10::IntType::get();
  if (PyFloat_Check(first)) return c10::FloatType::get();
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyList_GET_ITEM(list, i) == Py_None) return c10::OptionalType::create(c10::TensorType::get());
  }
  return c10::TensorType::get();
}

// Returns false with a Python error set.
bool set_object(c10::IValue& place, PyObject* object) {
  const int is_script_object = PyObject_IsInstance(object, script_object_class);
  if (is_script_object < 0) return false;
  try {
    c10::TypePtr type = is_script_object ? c10::TypePtr(c10::AnyType::get()) : c10::PyObjectType::get();
    if (PyList_Check(object)) type = c10::ListType::create(element_type(object));
    place = torch::jit::toIValue({object}, type, std::nullopt);
    return true;
  } catch (...) {
    set_python_error(std::current_exception());
    return false;
  }
}

bool set_input(Execution& execution, const char* name, const Arg& place, PyObject* object) {
  fxwrap::Frame& f = execution.frame();
  switch (place.kind) {
    case Arg::Tensor:
    case Arg::OwnedTensor:
      if (object == Py_None) return true;
      if (!is_plain_tensor(object)) return wrong_kind(name, "a torch.Tensor", object);
      if (place.kind == Arg::Tensor) {
        execution.borrow(place.integer, unpack(object));
      } else {
        execution.own(place.integer, unpack(object));
      }
      return true;
    case Arg::IntSymbolIndex:
      return set_int(f.ints[place.integer], name, object);
    case Arg::BoolSymbolIndex:
      if (!PyBool_Check(object)) return wrong_kind(name, "a bool", object);
      f.ints[place.integer] = object == Py_True;
      return true;
    case Arg::FloatSymbolIndex:
      if (!PyFloat_Check(object) && !PyLong_Check(object)) return wrong_kind(name, "a float", object);
      f.floats[place.integer] = PyFloat_AsDouble(object);
      return !PyErr_Occurred();
    case Arg::DynamicList: {
      const int is_generator = PyObject_IsInstance(object, THPGeneratorClass);
      if (is_generator <= 0) return is_generator == 0 && wrong_kind(name, "a torch.Generator", object);
      list_at(f, place.integer) = THPGenerator_Unwrap(object);
      return true;
    }
    case Arg::Object:
      return set_object(list_at(f, place.integer), object);
    default:
      return true;
  }
}

// Whether an input has a negative or conjugate bit, which kernels would ignore.
bool has_lazy_bit(const fxwrap::Program& program, const fxwrap::Frame& f) {
  for (int64_t i = 0; i < program.inputs.size; ++i) {
    const Arg& place = program.inputs.data[i].value;
    if (place.kind != Arg::Tensor && place.kind != Arg::OwnedTensor) continue;
    const at::Tensor& tensor = tensor_at(f, place.integer);
    if (tensor.defined() && (tensor.is_neg() || tensor.is_conj())) return true;
  }
  return false;
}

// Runs the program on copies of inputs with such a bit; see fxwrap/runtime/plain_inputs.py.
PyObject* call_on_plain_inputs(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  PyObject* module = PyImport_ImportModule("fxwrap.runtime.plain_inputs");
  PyObject* entry = PyObject_GetAttrString(self, "boxed");
  PyObject* items = PyList_New(count);
  for (Py_ssize_t i = 0; items != nullptr && i < count; ++i) {
    PyList_SET_ITEM(items, i, Py_NewRef(values[i]));
  }
  PyObject* result = nullptr;
  if (module != nullptr && entry != nullptr && items != nullptr) {
    result = PyObject_CallMethod(module, "run_on_plain_inputs", "OO", entry, items);
  }
  Py_XDECREF(items);
  Py_XDECREF(entry);
  Py_XDECREF(module);
  return result;
}

bool set_inputs(const ProgramObject* self, Execution& execution, PyObject* const* values, Py_ssize_t count) {
  const fxwrap::Program& program = *self->program;
  if (count != program.inputs.size) {
    PyErr_Format(input_error, "program '%s' takes %zd inputs, got %zd", program.name, Py_ssize_t(program.inputs.size),
                 count);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Input& input = program.inputs.data[i];
    if (!set_input(execution, input.name, input.value, values[i])) return false;
  }
  for (int64_t i = 0; i < program.constants.size; ++i) {
    PyObject* constant = PyTuple_GET_ITEM(self->constants, i);
    const Arg& place = program.constants.data[i];
    if (place.kind == Arg::Tensor) {
      execution.borrow(place.integer, unpack(constant));
    } else if (!set_input(execution, "a constant", place, constant)) {
      return false;
    }
  }
  return true;
}

PyObject* get_object(const c10::IValue& value) {
  try {
    return torch::jit::toPyObject(value).pointer;
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

// `inputs` are the caller's, some of which are outputs too.
PyObject* get_output(const fxwrap::Frame& f, const Arg& place, bool movable, PyObject* const* inputs) {
  switch (place.kind) {
    case Arg::InputIndex: return Py_NewRef(inputs[place.integer]);
    case Arg::DynamicList: return get_object(list_at(f, place.integer));
    case Arg::Tensor:
    case Arg::OwnedTensor: {
      at::Tensor& tensor = tensor_at(f, place.integer);
      if (!tensor.defined()) Py_RETURN_NONE;
      return movable ? THPVariable_Wrap(std::move(tensor)) : THPVariable_Wrap(tensor);
    }
    case Arg::Int: return PyLong_FromLongLong(place.integer);
    case Arg::Bool: return PyBool_FromLong(place.integer != 0);
    case Arg::Float: return PyFloat_FromDouble(place.real);
    case Arg::IntSymbolIndex: return PyLong_FromLongLong(f.ints[place.integer]);
    case Arg::BoolSymbolIndex: return PyBool_FromLong(f.ints[place.integer] != 0);
    case Arg::FloatSymbolIndex: return PyFloat_FromDouble(f.floats[place.integer]);
    default: Py_RETURN_NONE;
  }
}

PyObject* get_outputs(const ProgramObject* self, const fxwrap::Frame& f, PyObject* const* inputs) {
  const fxwrap::Program& program = *self->program;
  PyObject* result = PyTuple_New(program.outputs.size);
  for (int64_t i = 0; result != nullptr && i < program.outputs.size; ++i) {
    PyObject* item = get_output(f, program.outputs.data[i], (*self->movable)[i], inputs);
    if (item == nullptr) {
      Py_CLEAR(result);
      break;
    }
    PyTuple_SET_ITEM(result, i, item);
  }
  return result;
}

// Runs with the GIL released; returns false with a Python error set.
bool run_released(Execution& execution) {
  Warnings warnings;
  std::exception_ptr error;
  PyThreadState* state = PyEval_SaveThread();
  try {
    execution.run();
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (error) {
    set_python_error(error);
    return false;
  }
  return warnings.raise();
}

// program(*inputs): the caller's references keep every input alive.
PyObject* call_flat(PyObject* object, PyObject* const* values, size_t flags, PyObject* keywords) {
  auto* self = reinterpret_cast<ProgramObject*>(object);
  if (keywords != nullptr && PyTuple_GET_SIZE(keywords) != 0) {
    PyErr_SetString(PyExc_TypeError, "a program takes no keyword arguments");
    return nullptr;
  }
  Execution execution(*self->program);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (!set_inputs(self, execution, values, count)) return nullptr;
  if (has_lazy_bit(*self->program, execution.frame())) return call_on_plain_inputs(object, values, count);
  if (!run_released(execution)) return nullptr;
  return get_outputs(self, execution.frame(), values);
}

// Moves the items out of a list; releases them when destroyed.
class OwnedItems {
 public:
  explicit OwnedItems(PyObject* list) : list_(PyList_GetSlice(list, 0, PyList_GET_SIZE(list))) {
    if (list_ != nullptr && PyList_SetSlice(list, 0, PyList_GET_SIZE(list), nullptr) != 0) Py_CLEAR(list_);
  }
  ~OwnedItems() { Py_XDECREF(list_); }
  OwnedItems(const OwnedItems&) = delete;
  OwnedItems& operator=(const OwnedItems&) = delete;

  bool valid() const { return list_ != nullptr; }
  Py_ssize_t size() const { return PyList_GET_SIZE(list_); }
  PyObject* const* data() const { return reinterpret_cast<PyListObject*>(list_)->ob_item; }
  // The frame holds the tensor from now on; its Python object may go.
  void release(Py_ssize_t index) { PyList_SetItem(list_, index, Py_NewRef(Py_None)); }

 private:
  PyObject* list_;
};

// program.boxed(list): empties the list first, so that owned inputs are freed where the program drops them.
PyObject* call_boxed(PyObject* object, PyObject* list) {
  auto* self = reinterpret_cast<ProgramObject*>(object);
  if (!PyList_CheckExact(list)) {
    PyErr_Format(PyExc_TypeError, "boxed() takes a list of inputs, got %.200s", Py_TYPE(list)->tp_name);
    return nullptr;
  }
  OwnedItems items(list);
  if (!items.valid()) return nullptr;
  Execution execution(*self->program);
  if (!set_inputs(self, execution, items.data(), items.size())) return nullptr;
  if (has_lazy_bit(*self->program, execution.frame())) return call_on_plain_inputs(object, items.data(), items.size());
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    if (self->program->inputs.data[i].value.kind == Arg::OwnedTensor) items.release(i);
  }
  if (!run_released(execution)) return nullptr;
  return get_outputs(self, execution.frame(), items.data());
}

const fxwrap::Program* load_library(const char* path, const char* symbol) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    PyErr_Format(PyExc_ImportError, "cannot load the program '%s': %s", path, dlerror());
    return nullptr;
  }
  auto* program = static_cast<const fxwrap::Program*>(dlsym(library, symbol));
  if (program == nullptr || program->abi != fxwrap::abi_version) {
    PyErr_Format(PyExc_ImportError, "'%s' is not a program of this version of fxwrap; compile it again", path);
    return nullptr;
  }
  return program;
}

bool check_constants(const fxwrap::Program& program, PyObject* constants) {
  if (PyTuple_GET_SIZE(constants) != program.constants.size) {
    PyErr_Format(input_error, "program '%s' takes %zd constants, got %zd", program.name,
                 Py_ssize_t(program.constants.size), PyTuple_GET_SIZE(constants));
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(constants); ++i) {
    PyObject* constant = PyTuple_GET_ITEM(constants, i);
    if (program.constants.data[i].kind == Arg::Tensor && !is_plain_tensor(constant)) {
      PyErr_Format(input_error, "constant %zd: expected a torch.Tensor, got %.200s", i, Py_TYPE(constant)->tp_name);
      return false;
    }
  }
  return true;
}

PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"path", "constants", "symbol", nullptr};
  const char* symbol = "fxwrap_program";
  const char* path = nullptr;
  PyObject* constant_items = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "y|Os", const_cast<char**>(names), &path, &constant_items,
                                   &symbol)) {
    return nullptr;
  }
  const fxwrap::Program* program = load_library(path, symbol);
  if (program == nullptr) return nullptr;
  PyObject* constants = constant_items == nullptr ? PyTuple_New(0) : PySequence_Tuple(constant_items);
  if (constants == nullptr) return nullptr;
  auto* self = check_constants(*program, constants) ? reinterpret_cast<ProgramObject*>(type->tp_alloc(type, 0))
                                                     : nullptr;
  if (self == nullptr) {
    Py_DECREF(constants);
    return nullptr;
  }
  self->vectorcall = call_flat;
  self->program = program;
  self->path = PyUnicode_DecodeFSDefault(path);
  self->constants = constants;
  self->movable = find_movable(*program);
  return reinterpret_cast<PyObject*>(self);
}

int program_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<ProgramObject*>(object)->constants);
  return 0;
}

int program_clear(PyObject* object) {
  Py_CLEAR(reinterpret_cast<ProgramObject*>(object)->constants);
  return 0;
}

void program_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  auto* self = reinterpret_cast<ProgramObject*>(object);
  Py_CLEAR(self->constants);
  Py_CLEAR(self->path);
  delete self->movable;
  Py_TYPE(object)->tp_free(object);
}

PyObject* program_repr(PyObject* object) {
  auto* self = reinterpret_cast<ProgramObject*>(object);
  return PyUnicode_FromFormat("<fxwrap native program '%s': %zd inputs, %zd outputs>", self->program->name,
                              Py_ssize_t(self->program->inputs.size), Py_ssize_t(self->program->outputs.size));
}

PyObject* program_name(PyObject* object, void*) {
  return PyUnicode_FromString(reinterpret_cast<ProgramObject*>(object)->program->name);
}

PyObject* program_path(PyObject* object, void*) { return Py_NewRef(reinterpret_cast<ProgramObject*>(object)->path); }

PyObject* program_constants(PyObject* object, void*) {
  return Py_NewRef(reinterpret_cast<ProgramObject*>(object)->constants);
}

PyMethodDef methods[] = {
    {"boxed", call_boxed, METH_O,
     "boxed(inputs: list) -> tuple\n\nRuns the program and empties `inputs` first, so that inputs it owns are freed "
     "where it drops them."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef attributes[] = {
    {"name", program_name, nullptr, "The program's name.", nullptr},
    {"path", program_path, nullptr, "The library's path.", nullptr},
    {"constants", program_constants, nullptr, "The tensors bound at loading.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject program_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool ready_program_type() {
  program_type.tp_name = "fxwrap.runtime.native.Program";
  program_type.tp_doc =
      "Program(path, constants=())\n\nAn emitted C++ program, loaded: program(*inputs) -> tuple of outputs. Inputs are "
      "tensors, ints, floats, bools and None. Raises InputError for wrong inputs and what eager raises for the rest.";
  program_type.tp_basicsize = sizeof(ProgramObject);
  program_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
  program_type.tp_new = program_new;
  program_type.tp_dealloc = program_dealloc;
  program_type.tp_traverse = program_traverse;
  program_type.tp_clear = program_clear;
  program_type.tp_repr = program_repr;
  program_type.tp_call = PyVectorcall_Call;
  program_type.tp_vectorcall_offset = offsetof(ProgramObject, vectorcall);
  program_type.tp_methods = methods;
  program_type.tp_getset = attributes;
  return PyType_Ready(&program_type) == 0;
}

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fxwrap_binding", "Emitted C++ programs as Python callables.", -1,
                      nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

namespace fxwrap::binding {

bool is_plain_subclass(PyTypeObject* type) {
  if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass)) == 0) return false;
  PyObject* bases = type->tp_mro;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); ++i) {
    PyObject* base = PyTuple_GET_ITEM(bases, i);
    if (base == THPVariableClass || base == ParameterClass) return true;
    PyObject* names = PyObject_GetAttrString(base, "__dict__");
    const bool defines = names == nullptr || PyMapping_HasKeyString(names, "__torch_function__") != 0 ||
                         PyMapping_HasKeyString(names, "__torch_dispatch__") != 0;
    Py_XDECREF(names);
    if (defines) break;
  }
  PyErr_Clear();
  return false;
}

void set_python_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const fxwrap::Failure& failure) {
    const char* kind = failure.kind().c_str();
    PyObject* error = PyDict_GetItemString(error_classes, kind);
    if (error == nullptr) error = PyDict_GetItemString(PyEval_GetBuiltins(), kind);
    PyErr_SetString(error == nullptr ? PyExc_RuntimeError : error, failure.what());
  } catch (...) {
    torch::translate_exception_to_python(error);
  }
}

}  // namespace fxwrap::binding

PyMODINIT_FUNC PyInit__fxwrap_binding() {
  PyObject* errors = PyImport_ImportModule("fxwrap.errors");
  if (errors == nullptr) return nullptr;
  error_classes = PyObject_GetAttrString(errors, "__dict__");
  Py_DECREF(errors);
  input_error = error_classes == nullptr ? nullptr : PyDict_GetItemString(error_classes, "InputError");
  PyObject* torch_module = input_error == nullptr ? nullptr : PyImport_ImportModule("torch");
  if (torch_module == nullptr) return nullptr;
  script_object_class = PyObject_GetAttrString(torch_module, "ScriptObject");
  Py_DECREF(torch_module);
  if (script_object_class == nullptr || !check_tensor_layout() || !ready_program_type()) return nullptr;
  PyObject* result = PyModule_Create(&module);
  if (result != nullptr && PyModule_AddObjectRef(result, "Program", reinterpret_cast<PyObject*>(&program_type)) != 0) {
    Py_CLEAR(result);
  }
  if (result != nullptr && !(fxwrap::binding::add_launcher(result) && fxwrap::binding::add_plain_inputs(result) &&
                             fxwrap::binding::add_prepacked(result))) {
    Py_CLEAR(result);
  }
  return result;
}
