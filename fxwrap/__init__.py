"""fxwrap: a compiler for PyTorch graphs with a typed Wrapper IR.

`torch.compile(model, backend="fxwrap")`, or directly: `compile_graph`, and its steps `lower`, `verify`, `run`,
`to_python`, `to_cpp`, `to_fx`, `from_fx`, `parse`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxwrap import devices as devices
from fxwrap import fx as fx
from fxwrap import rewrite as rewrite
from fxwrap.artifact import LoadedProgram, load
from fxwrap.artifact.environment import environment_key
from fxwrap.compare import compare
from fxwrap.compile import Compiled, GraphInfo, Stage, compile_graph
from fxwrap.compile.builtin_devices import register_builtin_devices
from fxwrap.compile.saving import save
from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.converters.from_fx import from_fx
from fxwrap.converters.fx import to_fx
from fxwrap.converters.interpreter import run
from fxwrap.converters.python import to_python
from fxwrap.devices import registered_lines
from fxwrap.fx_passes import default_decompositions
from fxwrap.lines import CORE_LINES, ExtensionLine
from fxwrap.lowering import lower
from fxwrap.options import Options, Pass, register_pass
from fxwrap.wrapper_ir import Program, parse_program, verify

__version__ = "0.1.0"

register_builtin_devices()

__all__ = [
    "Compiled", "EmittedProgram", "GraphInfo", "LoadedProgram", "Options", "Pass", "Program", "Stage", "compare",
    "compile_graph", "default_decompositions", "devices", "environment_key", "from_fx", "fx", "load", "lower",
    "parse", "register_pass", "rewrite", "run", "save", "to_cpp", "to_fx", "to_python", "verify",
]  # fmt: skip


def parse(text: str, extensions: Iterable[type[ExtensionLine]] = ()) -> Program:
    """Parses the text of a program; `extensions` are vendors' line classes besides registered ones.

    Raises ParseError, with line and column, for invalid text. The program is not verified.
    """
    return parse_program(text, (*CORE_LINES, *registered_lines(), *extensions))
