"""The Python binding of the bridge: loaded programs, and launchers of GPU kernels."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from fxwrap.runtime.native.build import BRIDGE_LIBRARIES, build_bridge
from fxwrap.runtime.native.provided import provided_bridge


class Program(Protocol):
    """A loaded program. Safe to call from several threads at once.

    Inputs and outputs are flat, in the program's order: tensors, ints, floats, bools and None.
    """

    @property
    def name(self) -> str:
        """The program's own name."""

    @property
    def path(self) -> str:
        """The library it was loaded from."""

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors bound when it was loaded."""

    def __call__(self, *inputs: object) -> tuple[Any, ...]:
        """Run with inputs that the caller keeps. Raises InputError, or what the failing operator raises in eager."""

    def boxed(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Empty `inputs`, then run: inputs that the program owns are freed where it drops them."""


def load_program(path: Path | str, constants: Sequence[torch.Tensor] = (), symbol: str = "fxwrap_program") -> Program:
    """Load a compiled program, binding `constants` to its constant slots; a library may have several, by symbol.

    Raises ImportError when the file is not a program of this version, InputError for wrong constants.
    """
    return cast(Program, _binding().Program(str(path), constants=tuple(constants), symbol=symbol))


def launcher_class() -> Any:
    """Returns the bridge's type for launchers of GPU kernels (`triton_launchers.Launcher` says what it does).

    Raises NativeBuildError where the bridge cannot be built.
    """
    return _binding().Launcher


def use_driver(path: Path) -> None:
    """Takes the functions of the CUDA driver, and torch's for the current stream, from a library: for tests.

    Raises RuntimeError where the library cannot be opened or lacks one.
    """
    _binding().use_driver(str(path))


def binding_is_loaded() -> bool:
    """Returns whether this process has loaded a bridge; it then uses that one to its end."""
    return _load_binding.cache_info().currsize > 0


def _binding() -> Any:
    return _load_binding(provided_bridge() or build_bridge().folder)


@cache
def _load_binding(folder: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_fxwrap_binding", str(folder / BRIDGE_LIBRARIES[1]))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    if spec is None:
        raise ImportError(f"cannot load '{folder / BRIDGE_LIBRARIES[1]}'")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
