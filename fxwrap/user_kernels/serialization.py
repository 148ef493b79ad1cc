"""Serialization of a user-defined Triton kernel as self-contained source.

A `@triton.jit` function has its own source, without decorators. The names that it refers to are written above it:
modules as imports, helper functions as their sources, numbers, dtypes and constants as literals. The user's modules
become empty modules with the attributes in use, so that the source needs only Triton and torch.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import math
import symtable
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import sympy
import torch

from fxwrap.symbolic import NumberOrExpression
from fxwrap.wrapper_ir import TensorType, Value

_PACKAGES = ("triton", "torch", "math")
"""The packages that the source may import."""

_JIT_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")

_TUNING_FUNCTIONS = ("perf_model", "early_config_prune", "user_defined_pre_hook", "user_defined_post_hook", "_do_bench")


class KernelNotSerializable(Exception):
    """A kernel that no source can represent; the message is the reason."""


def serialize_kernel(
    kernel: TritonKernel, constants: Mapping[str, object], descriptors: Mapping[str, object], restored: Sequence[str]
) -> str:
    """Returns source that defines `kernel`, and `CONSTANTS` and `DESCRIPTORS` if there are any.

    Args:
        kernel: a `@triton.jit` function, or one under `@triton.autotune`.
        constants: arguments of every launch by name: constexprs, None, launch options.
        descriptors: the block shapes of parameters that are tensor descriptors.
        restored: names of tensors that autotuning must restore, because the kernel writes and may read them.

    Raises KernelNotSerializable for a kernel that source cannot represent.
    """
    writer = _SourceWriter()
    function = base_function(kernel)
    name = writer.function(function)
    if function is not kernel:
        name = f"{_autotune_decorator(writer, kernel, restored)}({name})"
    if name != "kernel":
        writer.bind_name("kernel", kernel, f"kernel = {name}")
    if constants:
        items = [f"    {key!r}: {writer.value(item)},\n" for key, item in constants.items()]
        writer.parts.append(f"CONSTANTS = {{\n{''.join(items)}}}\n")
    if descriptors:
        writer.parts.append(f"DESCRIPTORS = {writer.value(dict(descriptors))}\n")
    return writer.text()


def base_function(kernel: TritonKernel) -> TritonKernel:
    """Returns the `@triton.jit` function of a kernel. Raises KernelNotSerializable for other wrappers than autotune."""
    runtime = importlib.import_module("triton.runtime")
    function = kernel.fn if isinstance(kernel, runtime.Autotuner) else kernel
    if type(function) is not runtime.JITFunction:
        raise KernelNotSerializable(
            f"it is a {type(function).__name__}, not a function of @triton.jit or @triton.autotune"
        )
    return function


class _SourceWriter:
    """The parts of the source, and the objects of its names."""

    def __init__(self) -> None:
        self.triton = importlib.import_module("triton")
        self.imports: dict[str, None] = {"import triton": None}
        self.parts: list[str] = []
        self.names: dict[str, object] = {"triton": self.triton}
        self._attributes: dict[str, dict[str, None]] = {}
        self._functions: dict[int, str] = {}

    def text(self) -> str:
        """Returns the source."""
        return "\n".join(sorted(self.imports)) + "\n\n\n" + "\n\n".join(self.parts)

    def bind_name(self, name: str, item: object, part: str = "") -> bool:
        """Binds a name to an object by a part of the source. Returns whether the name is new."""
        if name in self.names:
            if self.names[name] is not item and not _equal(self.names[name], item):
                raise KernelNotSerializable(f"two things that it uses are called '{name}'")
            return False
        self.names[name] = item
        if part:
            self.parts.append(part + "\n")
        return True

    def function(self, function: TritonKernel) -> str:
        """Writes a Triton function, after the names that it refers to, and returns its name."""
        known = self._functions.get(id(function))
        if known is not None:
            return known
        for attribute in ("_repr", "launch_metadata", "pre_run_hooks"):
            if getattr(function, attribute, None):
                raise KernelNotSerializable(f"its '{attribute.strip('_')}' is a function that only this process has")
        source = _single_quoted_docstring(function.src)
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.FunctionDef)
        name = definition.name
        self._functions[id(function)] = name
        scope = _scope(function.fn)
        for needed in _outer_names(source):
            if needed in scope:
                if scope[needed] is not function:
                    self._bind(needed, scope[needed], source)
            elif not hasattr(builtins, needed) and needed != name:
                raise KernelNotSerializable(f"it uses '{needed}', which is defined nowhere")
        _check_defaults(function, scope)
        self.bind_name(name, function, self._decorated(function, source))
        return name

    def _decorated(self, function: TritonKernel, source: str) -> str:
        if not isinstance(function, self.triton.JITFunction):
            return f"@triton.constexpr_function\n{source.rstrip()}"
        options = [(name, getattr(function, name, None)) for name in _JIT_OPTIONS]
        text = ", ".join([f"{name}={self.value(option)}" for name, option in options if option])
        return f"@triton.jit{f'({text})' if text else ''}\n{source.rstrip()}"

    def _bind(self, name: str, item: TritonKernel, source: str) -> None:
        """Binds a name that a function refers to."""
        if isinstance(item, ModuleType):
            self._module(name, item, source)
        elif _is_importable(item):
            if self.bind_name(name, item):
                own = item.__name__
                self.imports[f"from {item.__module__} import {own}{'' if own == name else f' as {name}'}"] = None
        else:
            text = self.value(item)
            self.bind_name(name, item, "" if text == name else f"{name} = {text}")

    def _module(self, name: str, module: ModuleType, source: str) -> None:
        path = module.__name__
        if path.partition(".")[0] in _PACKAGES:
            self.bind_name(name, module)
            self.imports[f"import {path}" if name == path else f"import {path} as {name}"] = None
            return
        self.imports["import types"] = None
        self.bind_name(name, module, f"{name} = types.ModuleType({name!r})")
        known = self._attributes.setdefault(name, {})
        for attribute in _attributes_of(name, source):
            if attribute not in known:
                known[attribute] = None
                self.parts.append(f"{name}.{attribute} = {self.value(getattr(module, attribute))}\n")

    def value(self, item: TritonKernel) -> str:
        """Returns an expression of an object. Raises KernelNotSerializable if there is none."""
        language = self.triton.language
        kind = type(item)
        if item is None or kind in (bool, int, str, bytes):
            return repr(item)
        if kind is float:
            return repr(item) if math.isfinite(item) else f"float({str(item)!r})"
        if kind is tuple:
            return f"({', '.join([self.value(part) for part in item])}{',' if len(item) == 1 else ''})"
        if kind is list:
            return f"[{', '.join([self.value(part) for part in item])}]"
        if kind is dict:
            return f"{{{', '.join([f'{self.value(key)}: {self.value(part)}' for key, part in item.items()])}}}"
        if kind is language.constexpr:
            return f"triton.language.constexpr({self.value(item.value)})"
        if kind is language.dtype:
            return f"triton.language.dtype({item.name!r})"
        if kind is torch.dtype:
            self.imports["import torch"] = None
            return str(item)
        if _is_importable(item):
            self.imports[f"import {item.__module__}"] = None
            return f"{item.__module__}.{item.__name__}"
        if isinstance(item, self.triton.JITFunction) or kind.__name__ == "ConstexprFunction":
            return self.function(item)
        raise KernelNotSerializable(f"it uses an object of the class {kind.__name__}, which has no text")


def _single_quoted_docstring(source: str) -> str:
    """Returns a function's source with its docstring in single quotes, which need no escapes in double quotes."""
    changed = source.replace('"""', "'''")
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return source
    return changed if same else source


def _equal(one: TritonKernel, other: TritonKernel) -> bool:
    if type(one) is not type(other) or not isinstance(one, bool | int | float | str | tuple | None):
        return type(one) is type(other) and type(one).__name__ == "constexpr" and _equal(one.value, other.value)
    return bool(one == other)


def _scope(function: TritonKernel) -> dict[str, object]:
    """Returns the globals and closure variables of a Python function."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}}


def _outer_names(source: str) -> list[str]:
    """Returns the names that a function's source uses without defining them, sorted."""
    names: set[str] = set()

    def walk(table: symtable.SymbolTable, is_module: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (is_module and not symbol.is_assigned())):
                names.add(symbol.get_name())
        for child in table.get_children():
            walk(child, False)

    walk(symtable.symtable(source, "<kernel>", "exec"), True)
    return sorted(names)


def _attributes_of(name: str, source: str) -> list[str]:
    """Returns the attributes of a name that a source uses, in order."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return list(dict.fromkeys([
        node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == name
    ]))  # fmt: skip


def _is_importable(item: TritonKernel) -> bool:
    """Whether an object is a function or class that can be imported from Triton or torch by its name."""
    path = getattr(item, "__module__", None)
    if not isinstance(path, str) or path.partition(".")[0] not in _PACKAGES:
        return False
    return getattr(sys.modules.get(path), getattr(item, "__name__", ""), None) is item


def _check_defaults(function: TritonKernel, scope: Mapping[str, object]) -> None:
    """Raises KernelNotSerializable where a parameter's default differs from the value of its source."""
    arguments = ast.parse(function.src).body[0].args
    positional = [*arguments.posonlyargs, *arguments.args]
    texts = dict(zip([argument.arg for argument in positional[::-1]], arguments.defaults[::-1], strict=False))
    for name, parameter in inspect.signature(function.fn).parameters.items():
        if name not in texts:
            continue
        text = ast.unparse(texts[name])
        try:
            now = eval(text, dict(scope))  # the text is the user's own
        except Exception:  # noqa: BLE001 - any error means that the default changed
            now = inspect.Parameter.empty
        if now is not parameter.default and not _equal(now, parameter.default):
            raise KernelNotSerializable(f"the default of its parameter '{name}' is no longer the value of '{text}'")


def _autotune_decorator(writer: _SourceWriter, tuner: TritonKernel, restored: Sequence[str]) -> str:
    """Returns the autotune decorator of a kernel."""
    for attribute in _TUNING_FUNCTIONS:
        if getattr(tuner, attribute, None):
            raise KernelNotSerializable(f"its tuning has a '{attribute.strip('_')}', which only this process has")
    configs = "".join([f"        {_config(writer, config)},\n" for config in tuner.configs])
    reset = list(tuner.reset_to_zero)
    back = list(dict.fromkeys([*tuner.restore_value, *[name for name in restored if name not in reset]]))
    rest = [(name, names) for name, names in (("reset_to_zero", reset), ("restore_value", back)) if names]
    options = "".join([f"    {name}={names!r},\n" for name, names in rest if len(tuner.configs) > 1])
    return f"triton.autotune(\n    configs=[\n{configs}    ],\n    key={list(tuner.keys)!r},\n{options})"


def _config(writer: _SourceWriter, config: TritonKernel) -> str:
    if config.pre_hook is not None:
        raise KernelNotSerializable("one of its configurations has a pre_hook, which only this process has")
    parameters = inspect.signature(type(config).__init__).parameters
    texts = [writer.value(dict(config.kwargs))]
    for name, parameter in parameters.items():
        if name not in ("self", "kwargs", "pre_hook") and getattr(config, name, parameter.default) != parameter.default:
            texts.append(f"{name}={writer.value(getattr(config, name))}")
    return f"triton.Config({', '.join(texts)})"


TritonKernel: TypeAlias = Any
"""A kernel object of Triton, which is optional and has no type stubs."""


class KernelCallError(Exception):
    """An unsupported call; callers add the node."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}. {remedy}")


@dataclass
class ClassifiedArguments:
    """A call's arguments by name: tensors, numbers of each launch, and constants of the kernel.

    `descriptors` are the block shapes of tensors that the kernel receives as tensor descriptors.
    """

    tensors: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, NumberOrExpression] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    descriptors: dict[str, list[int]] = field(default_factory=dict)


def classify_arguments(
    kernel: TritonKernel,
    arguments: Mapping[str, object],
    read: Callable[[object], object],
    descriptors: Mapping[str, tuple[str, Sequence[object]]] | None,
) -> ClassifiedArguments:
    """Classifies the arguments of a call, in the order of the kernel's parameters.

    Args:
        kernel: a kernel of torch's table: a `@triton.jit` function, possibly wrapped.
        arguments: the arguments in the graph by name, constants included.
        read: returns an argument in the program: a value, a number or expression, or the argument itself.
        descriptors: the operator's metadata of tensor descriptors.

    Raises KernelCallError for a kernel without parameters, a constant argument that is known only at run time, and a
    descriptor without a constant block shape.
    """
    result = ClassifiedArguments()
    parameters: dict[str, bool] = {item.name: item.is_constexpr for item in jit_function(kernel).params}
    order = {name: position for position, name in enumerate(parameters)}
    for name in sorted(arguments, key=lambda name: order.get(name, len(order))):
        item = read(arguments[name])
        is_constant = parameters.get(name, True)
        if isinstance(item, Value) and isinstance(item.type, TensorType):
            result.tensors[name] = item
        elif isinstance(item, sympy.Basic) and is_constant:
            raise KernelCallError(
                f"the constant argument '{name}' of its kernel is {item}, which is known only at run time",
                "Pass a number, or declare the parameter without tl.constexpr",
            )
        elif isinstance(item, sympy.Basic) or (not is_constant and type(item) in (int, float, bool)):
            result.numbers[name] = item
        else:
            result.constants[name] = item
    for name, metadata in (descriptors or {}).items():
        result.descriptors[name] = _block_shape(name, metadata)
    return result


def jit_function(kernel: TritonKernel) -> TritonKernel:
    """Returns the `@triton.jit` function of a possibly wrapped kernel."""
    function = kernel
    while not hasattr(function, "params"):
        if not hasattr(function, "fn"):
            raise KernelCallError(
                f"its kernel is a {type(kernel).__name__}, not a function of @triton.jit",
                "Decorate the kernel with @triton.jit, or with @triton.autotune above it",
            )
        function = function.fn
    return function


def _block_shape(name: str, metadata: tuple[str, Sequence[Any]]) -> list[int]:
    kind, rest = metadata
    sizes = list(rest[0]) if kind == "stable" else [None]
    shape = [size for size in sizes if type(size) is int]
    if len(shape) < len(sizes):
        raise KernelCallError(
            f"the tensor descriptor '{name}' of its kernel has no constant block shape",
            "Create it by TensorDescriptor.from_tensor with a constant block shape",
        )
    return shape
