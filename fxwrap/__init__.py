"""fxwrap: a compiler for PyTorch graphs whose middle, the Wrapper IR, is plain data.

`torch.compile(model, backend="fxwrap")`, or by hand: `compile_graph`, and its steps `lower`, `verify`, `run`,
`to_python`, `to_cpp`, `to_fx`, `from_fx`, `parse`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxwrap import devices as devices
from fxwrap import fx as fx
from fxwrap import rewrite as rewrite
from fxwrap.artifact import Loaded
from fxwrap.backend import GraphInfo
from fxwrap.compare import compare
from fxwrap.compiler import Compiled, Stage, compile_graph
from fxwrap.converters.cpp import to_cpp
from fxwrap.converters.emitted import Emitted
from fxwrap.converters.from_fx import from_fx
from fxwrap.converters.fx import to_fx
from fxwrap.converters.interpreter import run
from fxwrap.converters.python import to_python
from fxwrap.device_registry import registered_lines
from fxwrap.environment import environment_key
from fxwrap.lines import CORE_LINES, ExtensionLine
from fxwrap.lowering import default_decompositions, lower
from fxwrap.options import Options
from fxwrap.pass_spec import Pass, register_pass
from fxwrap.saving import load, save
from fxwrap.wrapper_ir import Program, parse_program, verify

__version__ = "0.1.0"

__all__ = [
    "Compiled",
    "Emitted",
    "GraphInfo",
    "Loaded",
    "Options",
    "Pass",
    "Program",
    "Stage",
    "compare",
    "compile_graph",
    "default_decompositions",
    "devices",
    "environment_key",
    "from_fx",
    "fx",
    "load",
    "lower",
    "parse",
    "register_pass",
    "rewrite",
    "run",
    "save",
    "to_cpp",
    "to_fx",
    "to_python",
    "verify",
]


def parse(text: str, extensions: Iterable[type[ExtensionLine]] = ()) -> Program:
    """Reads a program from its text; `extensions` are vendors' line classes that it may use beside registered ones.

    Raises ParseError, with line and column, for text that is no program. The program is not verified.
    """
    return parse_program(text, (*CORE_LINES, *registered_lines(), *extensions))
