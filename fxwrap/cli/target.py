"""The target of a command: a function, module or exported program by name, and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import ismodule
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram

from fxwrap.cli.flags import check_input_file
from fxwrap.comparison import Arguments
from fxwrap.errors import CommandError, ParseError
from fxwrap.lines import CORE_LINES
from fxwrap.wrapper_ir import Input, ScalarType, TensorType, parse_program

RANDOM_INTEGERS = 8
"""The exclusive bound of random integers: small enough to index an embedding table."""


EXPORTED_SUFFIX = ".pt2"
"""The suffix of exported programs."""


@dataclass(frozen=True)
class Target:
    """A function to compile, and its inputs, as `compare` takes them, or None if they are unknown."""

    function: object
    inputs: Any = None


def load_target(text: str, inputs: str | None, seed: int) -> Target:
    """Returns the target `MODULE:NAME`, `FILE.py:NAME` or `FILE.pt2`, with inputs.

    `inputs` are types in the IR's notation ("f32[4, 8], mask=bool[2]") for random tensors; by default the target's own
    inputs. Raises CommandError for an unknown target and for one without inputs.
    """
    target = _load_exported(Path(text)) if text.endswith(EXPORTED_SUFFIX) else _load_named(text)
    if inputs is not None:
        target = Target(target.function, random_inputs(inputs, seed))
    if target.inputs is None:
        raise CommandError(
            f"'{text}' has no example inputs; pass --inputs \"f32[4, 8], i64[2]\", or set its attribute "
            "example_inputs, or name a function without arguments that returns (function, inputs) or "
            "(function, args, kwargs)"
        )
    return target


def _load_exported(path: Path) -> Target:
    check_input_file(path)
    try:
        exported = torch.export.load(path)
    except Exception as error:
        raise CommandError(f"'{path}' is not an exported program that this torch can load: {error}") from error
    return _exported_target(exported)


def _exported_target(exported: ExportedProgram) -> Target:
    positional, keywords = exported.example_inputs or ((), {})
    return Target(exported, (*positional, *keywords.values()))


def _load_named(text: str) -> Target:
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        if text.endswith(".fxw"):
            raise CommandError(f"'{text}' is a saved program; only show, inspect, run, sign and export-cmake take one")
        raise CommandError(f"'{text}' is not MODULE:NAME, FILE.py:NAME or FILE.pt2")
    module = _import(module_name)
    named: Any = module
    for part in name.split("."):
        if not hasattr(named, part):
            names = [key for key, value in vars(module).items() if not key.startswith("_") and not ismodule(value)]
            public = ", ".join(names) or "nothing"
            raise CommandError(f"'{module_name}' has no '{name}'; it has {public}")
        named = getattr(named, part)
    if isinstance(named, ExportedProgram):
        return _exported_target(named)
    if not callable(named):
        raise CommandError(
            f"'{text}' is an object of type {type(named).__name__}; name a function, a module or a factory"
        )
    inputs = getattr(named, "example_inputs", None)
    if inputs is None:
        inputs = getattr(module, f"{name}_example_inputs", None)
    if inputs is not None:
        return Target(named, inputs() if callable(inputs) else inputs)
    return _call_factory(named) if _has_no_parameters(named) else Target(named)


def _import(name: str) -> ModuleType:
    """Imports a module by name, or by the path of its file."""
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        check_input_file(name)
        path = Path(name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None  # a path that ends in .py has both
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(f"'{name}' cannot be imported: {type(error).__name__}: {error}") from error


def _has_no_parameters(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_argcount == 0 and code.co_kwonlyargcount == 0


def _call_factory(factory: Any) -> Target:
    """Calls a function without arguments.

    It is a target itself unless it returns (function, inputs) or (function, args, kwargs). Raises CommandError for
    keyword arguments that are not in a mapping.
    """
    result = factory()
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        return Target(factory, ())
    function, inputs, *keywords = result
    if not keywords:
        return Target(function, inputs)
    (named,) = keywords
    if not isinstance(inputs, tuple | list) or not isinstance(named, Mapping):
        kinds = f"({type(inputs).__name__}, {type(named).__name__})"
        raise CommandError(
            f"'{factory.__name__}' returns a function and {kinds}; return (function, inputs), or "
            "(function, args, kwargs) with a tuple and a dict"
        )
    return Target(function, Arguments(tuple(inputs), dict(named)))


def random_inputs(text: str, seed: int) -> Arguments:
    """Returns random inputs of types in the IR's notation, "f32[4, 8], i64[2]@cuda:0"; on the CPU by default.

    "mask=bool[4]" is a keyword argument. Floating tensors are normally distributed, integers are 0 to 7; `int` is 2,
    `float` 0.5 and `bool` true. Raises CommandError for invalid types, and for a positional argument after a keyword.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", text)]
    named = [part.partition("=") if re.match(r"[A-Za-z_]\w*\s*=", part) else ("", "", part) for part in parts]
    names = [name.strip() for name, _, _ in named]
    count = names.count("")
    if any(names[:count]):
        raise CommandError(f'--inputs "{text}" has a positional argument after a keyword argument')
    if len({*names[count:]}) < len(names[count:]):
        raise CommandError(f'--inputs "{text}" has a keyword argument twice')
    values = [random_input(item, generator) for item in _parse_types(text, [part for _, _, part in named])]
    return Arguments(tuple(values[:count]), dict(zip(names[count:], values[count:], strict=True)))


def _parse_types(text: str, parts: Sequence[str]) -> tuple[Input, ...]:
    devices = [re.sub(r"\](?!@)", "]@cpu", part) for part in parts]
    inputs = [f"%x{position}: borrowed {part}" for position, part in enumerate(devices)]
    try:
        program = parse_program(f"program @inputs({', '.join(inputs)}) {{\n  control.return()\n}}\n", CORE_LINES)
    except ParseError as error:
        raise CommandError(
            f'--inputs "{text}" is not a list of types such as "f32[4, 8], i64[2]": {error.reason}'
        ) from error
    return program.inputs


def random_input(item: Input, generator: torch.Generator) -> Any:
    """Returns a random value of an input's type, whose sizes are numbers."""
    type_ = getattr(item.value, "type", None)
    if isinstance(type_, ScalarType):
        return {"int": 2, "float": 0.5, "bool": True}[type_.kind]
    if not isinstance(type_, TensorType):
        raise CommandError('--inputs takes tensors and numbers: "f32[4, 8], i64[2], int"')
    sizes, strides = list(type_.sizes), list(type_.strides)
    if not all(isinstance(number, int) for number in (*sizes, *strides, type_.storage_offset)):
        raise CommandError("--inputs takes sizes that are numbers; pass --dynamic to compile for any size")
    dtype, device = type_.dtype, type_.device
    if dtype is torch.bool:
        values = torch.randint(0, 2, sizes, generator=generator) > 0
    elif dtype.is_floating_point or dtype.is_complex:
        drawn = torch.complex64 if dtype.is_complex else torch.float32
        values = torch.randn(sizes, generator=generator, dtype=drawn).to(dtype)
    else:
        values = torch.randint(0, RANDOM_INTEGERS, sizes, generator=generator).to(dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device).copy_(values)
