"""The parts of an emitted Python module: names, literals, calls, functions, and the whole text."""

from __future__ import annotations

import keyword
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sympy
import torch

from fxwrap.converters.torch_calls import Kind, kind_of, torch_call
from fxwrap.device_registry import language_facts
from fxwrap.lines import CallFunction
from fxwrap.lines.blocks import device_of
from fxwrap.symbolic import PYTHON_IMPORTS, PythonPrinter, expression_kind
from fxwrap.wrapper_ir import Block, KernelDefinition, TensorType, Value, outer_symbols

_RUNTIME_MODULES = ("checks", "control", "devices", "kernels", "replay", "tensors")
_BUILTINS = ("bool", "float", "int", "max", "min", "round", "len")
_RESERVED = frozenset(
    {"torch", "math", "operator", "arguments", "_", "load_constants", *keyword.kwlist, *_BUILTINS, *_RUNTIME_MODULES}
)
_RESERVED_PREFIXES = ("aten_", "op_", "kernel_", "device_", "range_", "allocate_", "on_", "replay_")
INDENT = "    "
_WIDTH = 100


class BlockWriter(Protocol):
    """Writes the statements of a block."""

    def block(self, block: Block) -> list[str]:
        """Returns the statements, without indentation."""
        ...


class PythonModule:
    """Collects what stands above the program's function: imports, operators, kernels, constants, nested functions."""

    def __init__(self, functions: Mapping[str, Block]) -> None:
        """`functions` are those of the program, by name."""
        self.printer = PythonPrinter()
        self._shared = functions
        self.imports: set[str] = set()
        self.outside: set[str] = set()
        self.definitions: dict[str, str] = {}
        self.functions: list[str] = []
        self._function_of: dict[int, tuple[str, Block]] = {}
        self._locals: dict[str, str] = {}

    def local(self, name: str) -> str:
        """Returns the variable for a value's name."""
        found = self._locals.get(name)
        if found is None:
            taken = name in _RESERVED or name.startswith(_RESERVED_PREFIXES) or not name.isidentifier()
            found = "v_" + name.replace(".", "_") if taken else name
            self._locals[name] = found
        return found

    def runtime(self, module: str, function: str) -> str:
        """Returns the text of a function of a module of `fxwrap.runtime`, which is imported."""
        self.imports.add(module)
        return f"{module}.{function}"

    def defined(self, name: str, text: str) -> str:
        """Returns the name, which stands for the text, worked out once when the module is loaded."""
        self.definitions[name] = text
        return name

    def operator(self, target: str) -> str:
        """Returns a module-level name for the operator "namespace.name.overload"."""
        namespace, _, rest = target.partition(".")
        short = rest.removesuffix(".default").replace(".", "_")
        name = f"aten_{short}" if namespace == "aten" else f"op_{namespace}_{short}"
        return self.defined(name, f"torch.ops.{target}")

    def kernel(self, kernel: KernelDefinition) -> str:
        """Returns a module-level name for a kernel's launcher."""
        load = self.runtime("kernels", "load_kernel")
        text = f"{load}({kernel.language!r}, {_raw(kernel.source)}, {kernel.signature!r}, {kernel.options!r})"
        return self.defined(f"kernel_{kernel.name}", text)

    def kernel_function(self, kernel: KernelDefinition) -> str:
        """Returns a module-level name for a kernel that is called once, which takes its arguments and no grid."""
        if language_facts(kernel.language).linked:
            load = f"{self.runtime('kernels', 'load_cpp_kernel')}("
        else:
            load = f"{self.runtime('kernels', 'load_function')}({kernel.language!r}, "
        text = f"{load}{_raw(kernel.source)}, {kernel.signature!r}, {kernel.options!r})"
        return self.defined(f"kernel_{kernel.name}", text)

    def imported(self, module: str, function: str) -> str:
        """Returns the text of a function of a module that is not fxwrap's, for vendors' lines; it is imported."""
        name = f"op_{module.replace('.', '_')}_{function}"
        self.outside.add(f"from {module} import {function} as {name}")
        return name

    def allocator(self, device: torch.device) -> str:
        """Returns a module-level name for the function that allocates on a device."""
        name = "allocate_" + str(device).replace(":", "_")
        return self.defined(name, f"{self.runtime('tensors', 'allocator')}({str(device)!r})")

    def guard(self, device: str, stream: int) -> str:
        """Returns a module-level name for what makes a device current, and a stream of it, in a `with` block."""
        name = "on_" + device.replace(":", "_") + (f"_stream_{stream}" if stream else "")
        return self.defined(name, f"{self.runtime('devices', 'on')}({device!r}{f', {stream}' if stream else ''})")

    def function(self, label: str, block: Block, writer: Callable[[], BlockWriter]) -> str:
        """Returns the name of the function a nested block becomes; the same block becomes one function."""
        known = self._function_of.get(id(block))
        if known is not None:
            return known[0]
        name = f"{label}_{len(self._function_of)}"
        self._function_of[id(block)] = (name, block)
        statements = writer().block(block)
        signature = f"{name}(arguments{self.captured(block)})"
        self.functions.append(function_text(signature, block.arguments, statements, self))
        return name

    def replayed(self, function: str, line: CallFunction, block: Block) -> str:
        """Returns the name of what records and replays a function for one line that calls it."""
        device, replayed = str(device_of(block)), self.runtime("replay", "Replayed")
        name = "replay_memory_" + device.replace(":", "_")
        memory = self.defined(name, f"{self.runtime('replay', 'Memory')}({device!r})")
        texts = [function, memory, repr(line.function), str(line.replay)]
        places = {"fixed": line.places(line.fixed), "written": line.places(line.writes)}
        texts += [f"{field}={positions!r}" for field, positions in places.items() if positions]
        made = f"replay_{function}_{len(self.functions)}"
        self.functions.append(f"{made} = {replayed}({', '.join(texts)})")
        return made

    def captured(self, block: Block) -> str:
        """Returns the arguments that a call of a block's function ends with: the symbols it uses from outside."""
        symbols = outer_symbols(block, argument_types=True, functions=self._shared)
        return "".join([f", {symbol}" for symbol in symbols])

    def text(self, title: str, function: str) -> str:
        """Returns the module's text."""
        lines = [f'"""{title}"""', ""]
        body = "\n\n\n".join([*self.functions, function])
        lines += [line for line in PYTHON_IMPORTS if f"{line.split()[-1]}." in body]
        lines += ["import torch"]
        if self.imports:
            lines.append(f"from fxwrap.runtime import {', '.join(sorted(self.imports))}")
        lines += sorted(self.outside)
        if self.definitions:
            lines += ["", *[f"{name} = {text}" for name, text in sorted(self.definitions.items())]]
        return "\n".join(lines) + "\n\n\n" + body + "\n"


def _raw(source: str) -> str:
    return repr(source) if '"""' in source or "\\" in source or source.endswith('"') else f'"""{source}"""'


def function_text(signature: str, arguments: Sequence[Any], statements: Sequence[str], module: PythonModule) -> str:
    """Returns a function that unpacks its boxed arguments, empties the box, and runs the statements."""
    body = [*unpack_text([module.local(item.name) for item in arguments]), *statements]
    return "\n".join([f"def {signature}:", *[INDENT + statement for statement in body]])


def unpack_text(names: Sequence[str]) -> list[str]:
    """Returns the statements that take these names out of the boxed arguments and empty the box."""
    if not names:
        return []
    target = ", ".join(names) + ("," if len(names) == 1 else "")
    if len(target) <= _WIDTH:
        return [f"{target} = arguments", "arguments.clear()"]
    rows = textwrap.wrap(target, _WIDTH, break_on_hyphens=False, break_long_words=False)
    return ["(", *[INDENT + row for row in rows], ") = arguments", "arguments.clear()"]


def tuple_text(items: Sequence[str]) -> str:
    """Returns a tuple of these texts."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def literal_text(module: PythonModule, item: Any) -> str:
    """Returns the Python text of an argument of the IR."""
    match item:
        case Value():
            return module.local(item.name)
        case bool() | None | str():
            return repr(item)
        case int():
            return str(item)
        case float():
            if math.isfinite(item):
                return repr(item)
            return "math.nan" if math.isnan(item) else "math.inf" if item > 0 else "-math.inf"
        case tuple():
            tensors = any(isinstance(part, Value) and isinstance(part.type, TensorType) for part in item)
            texts = [literal_text(module, part) for part in item]
            return f"[{', '.join(texts)}]" if tensors else tuple_text(texts)
        case sympy.Basic():
            return module.printer.print(item)
        case complex():
            return f"complex({literal_text(module, item.real)}, {literal_text(module, item.imag)})"
        case torch.device():
            name = "device_" + str(item).replace(":", "_")
            return module.defined(name, f"torch.device({str(item)!r})")
        case _:
            return str(item)  # dtypes, layouts and memory formats print as torch.<name>


def _kind(item: Any) -> Kind:
    if isinstance(item, Value):
        return Kind.TENSOR if isinstance(item.type, TensorType) else Kind.OTHER
    if isinstance(item, sympy.Basic):
        return {"int": Kind.INT, "float": Kind.FLOAT, "bool": Kind.BOOL}[expression_kind(item)]
    if isinstance(item, tuple):
        return _sequence_kind(item)
    return kind_of(item)


def _sequence_kind(items: tuple[Any, ...]) -> Kind:
    kinds = {_kind(item) for item in items}
    if kinds == {Kind.TENSOR}:
        return Kind.TENSORS
    if kinds == {Kind.TENSOR, Kind.NONE}:
        return Kind.OPTIONAL_TENSORS
    if kinds == {Kind.INT}:
        return Kind.INTS
    return kind_of(items) if not any(isinstance(item, Value | sympy.Basic) for item in items) else Kind.OTHER


def call_text(
    module: PythonModule,
    target: str,
    arguments: Sequence[Any],
    keywords: Sequence[tuple[str, Any]],
    outs: Sequence[Value],
    out_names: Sequence[str] = (),
) -> str:
    """Returns a call of an operator: torch's own function or method where the checked table knows one."""
    texts = [literal_text(module, item) for item in arguments]
    named: Mapping[str, Any] = dict(keywords) | dict(zip(out_names, outs, strict=True))
    named_texts = {name: literal_text(module, item) for name, item in named.items()}
    namespace, _, rest = target.partition(".")
    if namespace == "aten":
        name, _, overload = rest.rpartition(".")
        kinds = {name: _kind(item) for name, item in named.items()}
        spelling = torch_call(name, overload, [_kind(item) for item in arguments], kinds)
        if spelling is not None:
            return spelling.write(texts, named_texts)
    texts += [f"{name}={text}" for name, text in named_texts.items()]
    return f"{module.operator(target)}({', '.join(texts)})"
