"""Triton kernels of the user's: loaded from their text, launched on a GPU or interpreted on the CPU.

The text is a module that defines `kernel`, a function under `@triton.jit`, perhaps under `@triton.autotune`, and may
define `CONSTANTS`, arguments by name that every launch has, and `DESCRIPTORS`, the block shapes of parameters that are
tensor descriptors. A signature's entry is a type and the parameter's name ("*f32 x_ptr", "i64 n"); entries called
"grid" are the launch grids of the second configuration and those after it, three numbers each.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch

from fxwrap.errors import FxwrapError
from fxwrap.live_kernels import LiveKernel, live_kernel
from fxwrap.runtime.cpp_kernels import KernelOptions
from fxwrap.runtime.modules import load_module
from fxwrap.runtime.triton_compile import one_at_a_time, triton
from fxwrap.runtime.triton_kernels import interpreting, own_errors

Grid = tuple[int, ...]


@cache
def load_user_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> UserKernel:
    """Returns the launcher of a kernel: `launcher(grid, *tensors, *outs, *numbers)`, in the order of the signature.

    Raises FxwrapError where Triton is missing, for a text without `kernel`, and for a kernel that only another process
    has.
    """
    triton()
    return UserKernel(source, signature, options)


class UserKernel:
    """A kernel of the user's, ready to launch; also as torch's operator for Triton kernels launches one, by index."""

    fxwrap_hash: str

    def __init__(self, source: str, signature: tuple[str, ...], options: KernelOptions) -> None:
        self._source = source
        self._options = dict(options)
        names = [entry.partition(" ")[2] for entry in signature]
        self.names = [name for name in names if name != "grid"]
        self._grid_numbers = len(names) - len(self.names)
        self._lock = threading.Lock()

    # --- what it is -------------------------------------------------------------------------------------------------

    def _loaded(self) -> LiveKernel:
        key = self._options.get("live")
        if key is not None:
            return live_kernel(str(key), str(self._options.get("reason", "")))
        module = load_module(self._source, "user_kernel")
        kernel = getattr(module, "kernel", None)
        if kernel is None:
            raise FxwrapError("the text of a Triton kernel defines a function called 'kernel' with @triton.jit")
        return LiveKernel(kernel, getattr(module, "CONSTANTS", {}), getattr(module, "DESCRIPTORS", {}))

    @cached_property
    def on_gpu(self) -> LiveKernel:
        """The kernel as Triton compiles it."""
        with one_at_a_time:
            return self._loaded()

    @cached_property
    def _interpreted(self) -> LiveKernel:
        """The kernel as Triton interprets it; its function is under no tuner."""
        with interpreting():
            loaded = self._loaded()
            function, config = loaded.kernel, {}
            if hasattr(function, "configs"):
                function, config = function.fn, function.configs[0].kwargs
            if isinstance(function, triton().JITFunction):
                made = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
                function = made(function.fn)
            if not hasattr(function, "rewrite"):
                raise FxwrapError(f"Triton's interpreter has no {type(function).__name__}")
            return LiveKernel(function, {**config, **loaded.constants}, loaded.descriptors)

    @cached_property
    def _order(self) -> tuple[list[str], list[str]]:
        """The names of the arguments that are passed by position, and of those that are passed by name.

        Hooks of a tuner see those that are passed by position only, so these are as many as can be.
        """
        loaded = self.on_gpu
        given = {*self.names, *loaded.constants}
        first: list[str] = []
        for name in loaded.kernel.arg_names:
            if name not in given:
                break
            first.append(name)
        return first, [name for name in (*self.names, *loaded.constants) if name not in first]

    @property
    def constants(self) -> Mapping[str, Any]:
        """Arguments by name that every launch has."""
        return self.on_gpu.constants

    @property
    def descriptors(self) -> Mapping[str, Any]:
        """Block shapes of the parameters that are tensor descriptors."""
        return self.on_gpu.descriptors

    # --- launches ---------------------------------------------------------------------------------------------------

    def __call__(self, grid: Sequence[int], *arguments: Any) -> None:
        """Launches the kernel with the arguments of its signature."""
        count = len(self.names)
        numbers: Sequence[int] = arguments[count:]
        grids = [tuple(grid), *[tuple(numbers[start : start + 3]) for start in range(0, self._grid_numbers, 3)]]
        self.launch(grids, dict(zip(self.names, arguments, strict=False)))

    def launch(self, grids: Sequence[Grid], given: Mapping[str, Any]) -> None:
        """Launches the kernel over the grid of the configuration that is chosen: one for all, or one for each."""
        if any(isinstance(item, torch.Tensor) and not item.is_cpu for item in given.values()):
            self._launch_on_gpu(grids, given)
            return
        with interpreting(), own_errors():
            loaded = self._interpreted
            arguments = _described(given, loaded.descriptors)
            loaded.kernel[grids[0]](**arguments, **loaded.constants)

    def _launch_on_gpu(self, grids: Sequence[Grid], given: Mapping[str, Any]) -> None:
        loaded, (first, rest) = self.on_gpu, self._order
        arguments = {**loaded.constants, **_described(given, loaded.descriptors)}
        configs = getattr(loaded.kernel, "configs", None)
        grid: Any = grids[0] if len(grids) == 1 else _chosen_grid(configs or (), grids)
        launcher = loaded.kernel[grid]
        positional, keywords = [arguments[name] for name in first], {name: arguments[name] for name in rest}
        if configs is None:
            launcher(*positional, **keywords)
            return
        with self._lock:  # a tuner keeps a launch's arguments in itself
            launcher(*positional, **keywords)


def _described(given: Mapping[str, Any], descriptors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments with tensor descriptors in the place of the tensors that they describe."""
    if not descriptors:
        return dict(given)
    make = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    return {
        name: make(item, descriptors[name]) if name in descriptors and isinstance(item, torch.Tensor) else item
        for name, item in given.items()
    }  # torch's operator has made them already


def _chosen_grid(configs: Sequence[Any], grids: Sequence[Grid]) -> Callable[[Mapping[str, Any]], Grid]:
    """Returns the grid of a launch by its arguments, those of the configuration among them."""

    def grid(arguments: Mapping[str, Any]) -> Grid:
        for config, sizes in zip(configs, grids, strict=True):
            if all(arguments[name] == item for name, item in config.kwargs.items() if name in arguments):
                return sizes
        raise FxwrapError("a Triton kernel was launched with a configuration that its tuner does not have")

    return grid


class InterpretedTableKernel:
    """A kernel of the user's on the CPU, as torch's operator for Triton kernels launches one."""

    fxwrap_hash: str

    def __init__(self, kernel: UserKernel) -> None:
        self._kernel = kernel
        loaded = kernel.on_gpu.kernel
        self.fn = loaded.fn
        self.arg_names: list[str] = list(loaded.arg_names)
        self.configs = getattr(loaded, "configs", [])

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        if callable(grid):
            grid = grid(self.configs[0].kwargs)

        def launch(*arguments: Any, **keywords: Any) -> None:
            given = {**dict(zip(self.arg_names, arguments, strict=False)), **keywords}
            self._kernel.launch([tuple(grid)], {name: given[name] for name in self._kernel.names})

        return launch


@cache
def user_table_kernel(
    source: str, signature: tuple[str, ...], options: KernelOptions, kernel_hash: str, on_cpu: bool
) -> Any:
    """Returns the object for torch's table; its `fxwrap_hash` says which kernel of a program it is."""
    kernel = load_user_kernel(source, signature, options)
    made = InterpretedTableKernel(kernel) if on_cpu else kernel.on_gpu.kernel
    made.fxwrap_hash = kernel_hash
    return made
