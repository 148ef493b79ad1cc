"""Emission of a program as a Python module, and the program that the module is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.converters.base import Handlers
from fxwrap.converters.emitted_program import (
    BoxedCallable,
    EmittedProgram,
    checks_inputs,
    has_complex_inputs,
    kernel_texts,
)
from fxwrap.converters.python.converter import PythonConverter
from fxwrap.converters.python.text import PythonModule, unpack_text
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.graph_capture.replay import GraphManager, bind_graph_lifetime
from fxwrap.runtime.kernels import prepare_kernels
from fxwrap.runtime.modules import load_module
from fxwrap.runtime.plain_inputs import with_plain_inputs
from fxwrap.symbolic import symbol_kind


@dataclass(frozen=True)
class PythonModuleText:
    """An emitted module.

    Fields: `name` is the program's, `function` that of its boxed entry; `checks_inputs` is whether the program checks
    its inputs, `has_complex_inputs` whether one is complex.
    """

    source: str
    name: str
    function: str
    checks_inputs: bool
    has_complex_inputs: bool


class EmittedPython(EmittedProgram):
    """A program as a Python module."""

    def __init__(
        self,
        text: PythonModuleText,
        kernels: tuple[KernelText, ...],
        constants: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """`kernels` are all that the module launches, `constants` returns the program's by name."""
        super().__init__(text.source, lambda: _build(text, kernels, constants()))
        self.text = text


def to_python(program: ir.Program, handlers: Handlers | None = None) -> EmittedPython:
    """Returns the program as a Python module, which is written to the cache folder at the first call.

    `handlers` emit extension lines; the default are the handlers of the registered devices. Raises UnsupportedError for
    a line that Python cannot express, and ArgumentError for another object than a program.
    """
    ir.check_program("fxwrap.to_python", program)
    module = PythonModule(dict(program.functions), {program.name, *ir.value_names(program)})
    writer = PythonConverter(program, module, handlers)
    constants = [constant.value for constant in program.constants]
    for value in ir.program_arguments(program):
        writer.track_value(value.name)
    count, check = len(program.inputs), module.runtime("checks", "check_input_count")
    statements = [f"if len(arguments) != {count}:", f"    {check}({program.name!r}, {count}, len(arguments))"]
    statements += unpack_text([module.local(item.name) for item in program.inputs])
    for symbol in [item.name for item in program.inputs if not isinstance(item.value, ir.Value)]:
        kind, check = symbol_kind(symbol), module.runtime("checks", "check_number")
        statements += [f"if type({symbol}) is not {kind}:", f"    {check}({symbol}, {symbol!r}, {kind!r})"]
    statements += writer.block(program.body)
    function = "\n    ".join([f"def {module.local(program.name)}(arguments):", *statements])
    names = [module.local(value.name) for value in constants]
    source = module.text(_title(program), _constants_text(names, constants) + function)
    checks, has_complex = checks_inputs(program), has_complex_inputs(program)
    text = PythonModuleText(source, program.name, module.local(program.name), checks, has_complex)
    return EmittedPython(text, kernel_texts(program), program.constant_operands)


def _title(program: ir.Program) -> str:
    header = "".join(f"\n{key}: {text}" for key, text in program.header)
    return f"Program {program.name}, emitted by fxwrap.{header}"


def _constants_text(names: list[str], constants: list[ir.Value]) -> str:
    if not names:
        return ""
    assignments = [f"    {name} = constants[{value.name!r}]\n" for name, value in zip(names, constants, strict=True)]
    return f"def load_constants(constants):\n    global {', '.join(names)}\n{''.join(assignments)}\n\n"


def _build(
    text: PythonModuleText, kernels: tuple[KernelText, ...], constants: Mapping[str, torch.Tensor]
) -> BoxedCallable:
    prepare_kernels(kernels)
    module = load_module(text.source, text.name)
    if constants:
        module.load_constants(constants)
    built: BoxedCallable = getattr(module, text.function)
    if text.checks_inputs:
        built = with_plain_inputs(built, has_complex=text.has_complex_inputs)
    return bind_graph_lifetime(built, [item for item in vars(module).values() if isinstance(item, GraphManager)])
