"""fxwrap: a compiler for PyTorch graphs with a typed Wrapper IR.

`torch.compile(model, backend="fxwrap")`, or directly: `compile_graph`, and its steps `lower`, `verify`, `run`,
`to_python`, `to_cpp`, `to_fx`, `from_fx`, `parse`.

`import fxwrap` imports the runtime, which loaded programs need; each name imports its part of the compiler when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fxwrap import devices as devices
from fxwrap.builtin_devices import register_builtin_devices
from fxwrap.runtime import library as _library  # noqa: F401  registers the operators of exported programs

if TYPE_CHECKING:
    from fxwrap import fx as fx
    from fxwrap import rewrite as rewrite
    from fxwrap.artifact import LoadedProgram, load, parse
    from fxwrap.artifact.environment import environment_key
    from fxwrap.artifact.signing import sign
    from fxwrap.comparison import Bisection, Minified, bisect, compare, minify, save_repro
    from fxwrap.compile import Compiled, CompileRecord, GraphInfo, Stage, compile_graph, compiles, inspect
    from fxwrap.compile.saving import save
    from fxwrap.compile_cache import CompileCounts, compile_counts
    from fxwrap.converters.cpp import to_cpp
    from fxwrap.converters.emitted_program import EmittedProgram
    from fxwrap.converters.from_fx import from_fx
    from fxwrap.converters.fx import to_fx
    from fxwrap.converters.interpreter import run
    from fxwrap.converters.python import to_python
    from fxwrap.fx_passes import default_decompositions
    from fxwrap.lowering import lower
    from fxwrap.options import Options, Pass, register_pass
    from fxwrap.profiling import Profile, profile
    from fxwrap.training import CompiledStep, compile_step, load_step
    from fxwrap.wrapper_ir import Program, verify

__version__ = "0.1.0"

register_builtin_devices()

__all__ = [
    "Bisection", "CompileCounts", "CompileRecord", "Compiled", "CompiledStep", "EmittedProgram", "GraphInfo",
    "LoadedProgram", "Minified", "Options", "Pass", "Profile", "Program", "Stage", "bisect", "compare",
    "compile_counts", "compile_graph", "compile_step", "compiles", "default_decompositions", "devices",
    "environment_key", "from_fx", "fx", "inspect", "load", "load_step", "lower", "minify", "parse", "profile",
    "register_pass", "rewrite", "run", "save", "save_repro", "sign", "to_cpp", "to_fx", "to_python", "verify",
]  # fmt: skip

_PACKAGES = frozenset({"fx", "rewrite"})

_MODULES = {
    "Bisection": "fxwrap.comparison",
    "CompileCounts": "fxwrap.compile_cache",
    "CompileRecord": "fxwrap.compile",
    "Compiled": "fxwrap.compile",
    "CompiledStep": "fxwrap.training",
    "EmittedProgram": "fxwrap.converters.emitted_program",
    "GraphInfo": "fxwrap.compile",
    "LoadedProgram": "fxwrap.artifact",
    "Minified": "fxwrap.comparison",
    "Options": "fxwrap.options",
    "Pass": "fxwrap.options",
    "Profile": "fxwrap.profiling",
    "Program": "fxwrap.wrapper_ir",
    "Stage": "fxwrap.compile",
    "bisect": "fxwrap.comparison",
    "compare": "fxwrap.comparison",
    "compile_counts": "fxwrap.compile_cache",
    "compile_graph": "fxwrap.compile",
    "compile_step": "fxwrap.training",
    "compiles": "fxwrap.compile",
    "default_decompositions": "fxwrap.fx_passes",
    "environment_key": "fxwrap.artifact.environment",
    "from_fx": "fxwrap.converters.from_fx",
    "inspect": "fxwrap.compile",
    "load": "fxwrap.artifact",
    "load_step": "fxwrap.training",
    "lower": "fxwrap.lowering",
    "minify": "fxwrap.comparison",
    "parse": "fxwrap.artifact",
    "profile": "fxwrap.profiling",
    "register_pass": "fxwrap.options",
    "run": "fxwrap.converters.interpreter",
    "save": "fxwrap.compile.saving",
    "save_repro": "fxwrap.comparison",
    "sign": "fxwrap.artifact.signing",
    "to_cpp": "fxwrap.converters.cpp",
    "to_fx": "fxwrap.converters.fx",
    "to_python": "fxwrap.converters.python",
    "verify": "fxwrap.wrapper_ir",
}
"""The module of each name that is imported on first use."""


def __getattr__(name: str) -> object:
    """Imports a name's module on its first use. Raises AttributeError for an unknown name."""
    if name in _PACKAGES:
        return importlib.import_module(f"fxwrap.{name}")
    if name == "cmake_prefix_path":  # builds the runtime on first use
        return importlib.import_module("fxwrap.runtime.native").cmake_prefix_path()
    if name not in _MODULES:
        raise AttributeError(f"module 'fxwrap' has no attribute '{name}'")
    item: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = item
    return item


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
