"""The text of an emitted Python module: names, literals, calls and functions."""

from __future__ import annotations

import keyword
import math
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence

import sympy
import torch

from fxwrap.converters.torch_calls import ArgumentKind, kind_of, kind_of_elements, torch_call
from fxwrap.devices import language_traits
from fxwrap.devices.kernel_names import DEPENDENT
from fxwrap.lines import CallFunction
from fxwrap.lines.operands import block_device, communicating_groups
from fxwrap.names import NameAllocator
from fxwrap.symbolic import PYTHON_IMPORTS, PythonPrinter, expression_kind
from fxwrap.wrapper_ir import Block, KernelDefinition, Operand, TensorType, Value, captured_symbols

_RUNTIME_MODULES = {
    **dict.fromkeys(
        ("checks", "control", "devices", "kernels", "library", "ranges", "symmetric_memory", "tensors"),
        "fxwrap.runtime",
    ),
    "replay": "fxwrap.runtime.graph_capture",
}
"""The runtime modules that emitted Python may import, with their packages."""

_BUILTINS = ("bool", "float", "int", "max", "min", "round", "len")
_RESERVED = frozenset(
    {"torch", "math", "operator", "arguments", "_", "load_constants", *keyword.kwlist, *_BUILTINS, *_RUNTIME_MODULES}
)
_RESERVED_PREFIXES = ("aten_", "op_", "kernel_", "device_", "range_", "allocate_", "on_", "replay_")
INDENT = "    "
_WIDTH = 100


class PythonModule:
    """Collects the imports, global definitions and nested functions of an emitted module."""

    def __init__(self, functions: Mapping[str, Block], names: Collection[str]) -> None:
        """`functions` are those of the program, by name; `names` those that no nested one may have."""
        self.printer = PythonPrinter()
        self._program_functions = functions
        self._names = NameAllocator(set(names))
        self.imports: set[str] = set()
        self.external_imports: set[str] = set()
        self.definitions: dict[str, str] = {}
        self.functions: list[str] = []
        self._function_of: dict[int, tuple[str, Block]] = {}
        self._locals: dict[str, str] = {}

    def local(self, name: str) -> str:
        """Returns the variable for a value's name."""
        if name not in self._locals:
            reserved = name in _RESERVED or name.startswith(_RESERVED_PREFIXES) or not name.isidentifier()
            self._locals[name] = "v_" + name.replace(".", "_") if reserved else name
        return self._locals[name]

    def runtime(self, module: str, function: str) -> str:
        """Imports a module of `fxwrap.runtime` and returns the text of one of its functions."""
        self.imports.add(module)
        return f"{module}.{function}"

    def define_global(self, name: str, text: str) -> str:
        """Defines a global variable, which is evaluated when the module is loaded, and returns its name."""
        self.definitions[name] = text
        return name

    def operator(self, target: str) -> str:
        """Returns the global variable of the operator "namespace.name.overload"."""
        namespace, _, rest = target.partition(".")
        short = rest.removesuffix(".default").replace(".", "_")
        name = f"aten_{short}" if namespace == "aten" else f"op_{namespace}_{short}"
        if namespace == "fxwrap":  # without the dispatcher, which takes longer to call Python
            return self.define_global(name, f"{self.runtime('library', 'implementation')}(torch.ops.{target})")
        return self.define_global(name, f"torch.ops.{target}")

    def kernel(self, kernel: KernelDefinition, *, gridless: bool, dependent: bool = False) -> str:
        """Returns the global variable of a kernel's launcher; it takes a grid unless `gridless`, and arguments."""
        options = (*kernel.options, *([(DEPENDENT, True)] if dependent else []))
        identity = f"{_source_literal(kernel.source)}, {kernel.signature!r}, {options!r}"
        if gridless and language_traits(kernel.language).links_into_cpp:
            text = f"{self.runtime('kernels', 'load_cpp_kernel')}({identity})"
        else:
            load = self.runtime("kernels", "load_gridless_kernel" if gridless else "load_kernel")
            text = f"{load}({kernel.language!r}, {identity})"
        return self.define_global(f"kernel_{kernel.name}{'_dependent' if dependent else ''}", text)

    def import_function(self, module: str, function: str) -> str:
        """Imports a function of a module outside fxwrap, for extension lines, and returns its name."""
        name = f"op_{module.replace('.', '_')}_{function}"
        self.external_imports.add(f"from {module} import {function} as {name}")
        return name

    def allocator(self, device: torch.device) -> str:
        """Returns the global variable of the allocation function of a device."""
        name = "allocate_" + str(device).replace(":", "_")
        return self.define_global(name, f"{self.runtime('tensors', 'allocator')}({str(device)!r})")

    def guard(self, device: str, stream: int) -> str:
        """Returns the global variable of the context manager that makes a device and a stream current."""
        name = "on_" + device.replace(":", "_") + (f"_stream_{stream}" if stream else "")
        arguments = f"{device!r}, {stream}" if stream else repr(device)
        return self.define_global(name, f"{self.runtime('devices', 'device_context')}({arguments})")

    def function(self, label: str, block: Block, write: Callable[[Block], list[str]]) -> str:
        """Returns the name of the function of a nested block, which is written at the first call for the block."""
        if id(block) in self._function_of:
            return self._function_of[id(block)][0]
        name = self._names.create_from_legal(f"{label}_{len(self._function_of)}")
        self._function_of[id(block)] = (name, block)
        statements = write(block)
        signature = f"{name}(arguments{self.captured_symbols(block)})"
        self.functions.append(function_text(signature, block.arguments, statements, self))
        return name

    def replay_wrapper(self, function: str, line: CallFunction, block: Block) -> str:
        """Returns the name of the `GraphedFunction` that captures and replays a function for one call of it."""
        device, replay_wrapper = str(block_device(block)), self.runtime("replay", "GraphedFunction")
        name = "replay_memory_" + device.replace(":", "_")
        memory = self.define_global(name, f"{self.runtime('replay', 'GraphManager')}({device!r})")
        texts = [function, memory, repr(line.function), str(line.max_captures)]
        settings = {
            "static_operands": line.operand_positions(line.static_operands),
            "mutated_operands": line.operand_positions(line.writes),
            "groups": communicating_groups(block, self._program_functions),
        }
        texts += [f"{field}={items!r}" for field, items in settings.items() if items]
        wrapper = f"replay_{function}_{len(self.functions)}"
        self.functions.append(f"{wrapper} = {replay_wrapper}({', '.join(texts)})")
        return wrapper

    def captured_symbols(self, block: Block) -> str:
        """Returns the last arguments of a call of a block's function: the symbols that it captures."""
        symbols = captured_symbols(block, argument_types=True, functions=self._program_functions)
        return "".join([f", {symbol}" for symbol in symbols])

    def text(self, title: str, function: str) -> str:
        """Returns the module's text."""
        lines = [f'"""{title}"""', ""]
        body = "\n\n\n".join([*self.functions, function])
        lines += [line for line in PYTHON_IMPORTS if f"{line.split()[-1]}." in body]
        lines += ["import torch"]
        if self.imports:
            packages = sorted({_RUNTIME_MODULES[module] for module in self.imports})
            for package in packages:
                modules = sorted(module for module in self.imports if _RUNTIME_MODULES[module] == package)
                lines.append(f"from {package} import {', '.join(modules)}")
        lines += sorted(self.external_imports)
        if self.definitions:
            lines += ["", *[f"{name} = {text}" for name, text in sorted(self.definitions.items())]]
        return "\n".join(lines) + "\n\n\n" + body + "\n"


def _source_literal(source: str) -> str:
    return repr(source) if '"""' in source or "\\" in source or source.endswith('"') else f'"""{source}"""'


def function_text(signature: str, arguments: Sequence[Value], statements: Sequence[str], module: PythonModule) -> str:
    """Returns a function that unpacks and clears its boxed arguments, then runs the statements."""
    body = [*unpack_text([module.local(item.name) for item in arguments]), *statements]
    return "\n".join([f"def {signature}:", *[INDENT + statement for statement in body]])


def unpack_text(names: Sequence[str]) -> list[str]:
    """Returns the statements that assign the boxed arguments to these names and clear the box."""
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


def literal_text(module: PythonModule, item: Operand) -> str:
    """Returns the Python text of an operand."""
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
            return module.define_global(name, f"torch.device({str(item)!r})")
        case _:
            return str(item)  # dtypes, layouts and memory formats print as torch.<name>


def _kind(item: Operand) -> ArgumentKind:
    if isinstance(item, Value):
        return ArgumentKind.TENSOR if isinstance(item.type, TensorType) else ArgumentKind.OTHER
    if isinstance(item, sympy.Basic):
        return {"int": ArgumentKind.INT, "float": ArgumentKind.FLOAT, "bool": ArgumentKind.BOOL}[expression_kind(item)]
    return kind_of_elements(map(_kind, item)) if isinstance(item, tuple) else kind_of(item)


def call_text(module: PythonModule, target: str, arguments: Sequence[Operand], keywords: Mapping[str, Operand]) -> str:
    """Returns a call of an operator, by the public function or method of torch if `torch_call` has one."""
    texts = [literal_text(module, item) for item in arguments]
    keyword_texts = {name: literal_text(module, item) for name, item in keywords.items()}
    namespace, _, rest = target.partition(".")
    if namespace == "aten":
        name, _, overload = rest.rpartition(".")
        kinds = {name: _kind(item) for name, item in keywords.items()}
        spelling = torch_call(name, overload, [_kind(item) for item in arguments], kinds)
        if spelling is not None:
            return spelling.write(texts, keyword_texts)
    texts += [f"{name}={text}" for name, text in keyword_texts.items()]
    return f"{module.operator(target)}({', '.join(texts)})"
