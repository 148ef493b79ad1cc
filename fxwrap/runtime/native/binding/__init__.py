"""The Python binding of the bridge: loaded programs, launchers of GPU kernels, and a check of inputs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from fxwrap.runtime.native.bridge_build import BRIDGE_LIBRARIES, build_bridge, find_bridge
from fxwrap.runtime.native.prebuilt import find_prebuilt_bridge


class NativeProgram(Protocol):
    """A loaded program. Thread-safe.

    Inputs and outputs are flat, in the program's order: tensors, ints, floats, bools and None.
    """

    @property
    def name(self) -> str:
        """The program's name."""

    @property
    def path(self) -> str:
        """The path of its library."""

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The bound constants."""

    def __call__(self, *inputs: object) -> tuple[object, ...]:
        """Runs with inputs that the caller owns. Raises InputError, or the eager error of a failing operator."""

    def boxed(self, inputs: list[object]) -> tuple[object, ...]:
        """Empties `inputs`, then runs: the program frees inputs that it owns after their last use."""


def load_program(
    path: Path | str, constants: Sequence[torch.Tensor] = (), symbol: str = "fxwrap_program"
) -> NativeProgram:
    """Loads the program of a symbol in a library and binds its constants.

    Raises ImportError for a file that is not a program of this version, InputError for wrong constants.
    """
    return cast(NativeProgram, _binding().Program(os.fsencode(path), constants=tuple(constants), symbol=symbol))


def launcher_class() -> Any:
    """Returns the binding's class of GPU launchers, see `triton.launchers.NativeLauncher`.

    Raises NativeBuildError where the bridge cannot be built.
    """
    return _binding().Launcher


def load_binding() -> None:
    """Loads the bridge, with its kernels of fxwrap's operators, into this process, if it is not loaded.

    Raises NativeBuildError where the bridge cannot be built.
    """
    _binding()


def native_operator(name: str) -> Callable[..., object]:
    """Returns the bridge's function of the operator `fxwrap::name`, which takes all arguments by position.

    It is also torch's operator `fxwrap_native::name`. Raises NativeBuildError where the bridge cannot be built.
    """
    function: Callable[..., object] = getattr(_binding(), name)
    return function


def find_plain_inputs_check() -> Callable[[tuple[object, ...]], bool] | None:
    """Returns the binding's `are_plain_inputs`, see `runtime.direct`; None while this process has loaded no bridge."""
    return _binding().are_plain_inputs if binding_is_loaded() and find_bridge() is not None else None


def override_driver_library(path: Path) -> None:
    """Replaces the functions of the CUDA driver, and torch's for the current stream, by a library's: for tests.

    Raises RuntimeError where the library cannot be opened or lacks a function.
    """
    _binding().override_driver_library(str(path))


def binding_is_loaded() -> bool:
    """Whether this process has loaded a bridge, which it then uses until it ends."""
    return _load_binding.cache_info().currsize > 0


def _binding() -> Any:
    return _load_binding(find_prebuilt_bridge() or build_bridge().folder)


@cache
def _load_binding(folder: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_fxwrap_binding", str(folder / BRIDGE_LIBRARIES[1]))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    if spec is None:
        raise ImportError(f"cannot load '{folder / BRIDGE_LIBRARIES[1]}'")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
