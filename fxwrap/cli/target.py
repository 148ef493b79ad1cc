"""What the command line works on: a function, module or exported program found by name, and inputs for it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram

from fxwrap.errors import CommandError, ParseError
from fxwrap.lines import CORE_LINES
from fxwrap.wrapper_ir import Input, ScalarType, TensorType, parse_program

RANDOM_INTEGERS = 8
"""Random integers are drawn from 0 up to here: small enough to index an embedding table."""


@dataclass(frozen=True)
class Target:
    """Something to compile, and what it is called with; `inputs` None means that none are known."""

    function: Any
    inputs: Any = None


def load_target(text: str, inputs: str | None, seed: int) -> Target:
    """Returns what `MODULE:NAME`, `FILE.py:NAME` or `FILE.pt2` names, with inputs.

    `inputs` are types as the IR writes them ("f32[4, 8], i64[2]"), filled at random from the seed; without them, those
    that come with the target. Raises CommandError when there is no such thing or it has no inputs.
    """
    target = _load_exported(Path(text)) if text.endswith(".pt2") else _load_named(text)
    if inputs is not None:
        target = Target(target.function, random_inputs(inputs, seed))
    if target.inputs is None:
        raise CommandError(
            f"nothing says what '{text}' is called with; give --inputs \"f32[4, 8], i64[2]\", or set its attribute "
            "example_inputs, or let NAME be a function without arguments that returns (function, inputs)"
        )
    return target


def _load_exported(path: Path) -> Target:
    if not path.is_file():
        raise CommandError(f"there is no file '{path}'")
    try:
        exported = torch.export.load(path)
    except Exception as error:
        raise CommandError(f"'{path}' is no exported program that this torch can load: {error}") from error
    positional, keywords = exported.example_inputs or ((), {})
    return Target(exported, (*positional, *keywords.values()))


def _load_named(text: str) -> Target:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise CommandError(f"'{text}' is neither MODULE:NAME, FILE.py:NAME nor FILE.pt2")
    module = _import(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(item for item in vars(module) if not item.startswith("_")) or "nothing"
            raise CommandError(f"'{place}' has no '{name}'; it has {public}")
        found = getattr(found, part)
    if isinstance(found, ExportedProgram):
        positional, keywords = found.example_inputs or ((), {})
        return Target(found, (*positional, *keywords.values()))
    if not callable(found):
        raise CommandError(
            f"'{text}' is an object of type {type(found).__name__}; name a function, a module or a factory"
        )
    given = getattr(found, "example_inputs", None)
    if given is None:
        given = getattr(module, f"{name}_example_inputs", None)
    if given is not None:
        return Target(found, given() if callable(given) else given)
    return _made_by(found) if _takes_nothing(found) else Target(found)


def _import(place: str) -> ModuleType:
    """Imports a module by name, from the working directory too, or by the path of its file."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        if not path.is_file():
            raise CommandError(f"there is no file '{place}'")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None  # a path that ends in .py has both
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(f"'{place}' cannot be imported: {type(error).__name__}: {error}") from error


def _takes_nothing(found: Any) -> bool:
    code = getattr(found, "__code__", None)
    return code is not None and code.co_argcount == 0 and code.co_kwonlyargcount == 0


def _made_by(factory: Any) -> Target:
    """Returns what a function without arguments makes: (function, inputs). A function of nothing is itself the
    target."""
    made = factory()
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return Target(*made)
    return Target(factory, ())


def random_inputs(text: str, seed: int) -> tuple[Any, ...]:
    """Returns random inputs of types written as the IR writes them, "f32[4, 8], i64[2]@cuda:0"; on the CPU by default.

    Floating tensors are normal, integers 0 to 7, booleans either, a bare `int` is 2, `float` 0.5, `bool` true. Strides
    are as written. Raises CommandError for what is no such list.
    """
    generator = torch.Generator().manual_seed(seed)
    return tuple(_random(item, generator) for item in _parse_types(text))


def _parse_types(text: str) -> tuple[Input, ...]:
    with_device = re.sub(r"\](?!@)", "]@cpu", text)
    inputs = [f"%x{position}: borrowed {part}" for position, part in enumerate(re.split(r",(?![^\[]*\])", with_device))]
    try:
        program = parse_program(f"program @inputs({', '.join(inputs)}) {{\n  control.return()\n}}\n", CORE_LINES)
    except ParseError as error:
        raise CommandError(
            f'--inputs "{text}" is no list of types such as "f32[4, 8], i64[2]": {error.reason}'
        ) from error
    return program.inputs


def _random(item: Input, generator: torch.Generator) -> Any:
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
    made = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    return made.copy_(values)
