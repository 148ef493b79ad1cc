"""User-defined Triton kernels, launched on a GPU or in Triton's interpreter.

The source is a module that defines `kernel`, a function under `@triton.jit` and possibly `@triton.autotune`. It may
define `CONSTANTS`, keyword arguments of every launch, and `DESCRIPTORS`, the block shapes of tensor descriptor
parameters. Signature entries are a type and a parameter name ("*f32 x_ptr", "i64 n"); entries named "grid" are the
launch grids of further configurations, three numbers each.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from fxwrap.caching import shared_cache
from fxwrap.devices.in_process_kernels import InProcessKernel, get_in_process_kernel
from fxwrap.errors import FxwrapError
from fxwrap.runtime.cpp_kernels import KernelOptions
from fxwrap.runtime.modules import load_module
from fxwrap.runtime.triton.compile import import_triton, triton_lock
from fxwrap.runtime.triton.kernels import interpreter_mode, unwrap_interpreter_errors

Grid = tuple[int, ...]


@shared_cache(256)
def load_user_kernel(source: str, signature: tuple[str, ...], options: KernelOptions) -> UserKernel:
    """Returns `launcher(grid, *tensors, *outs, *scalars)` of a kernel, in signature order.

    Raises FxwrapError where Triton is missing, for a source without `kernel`, and for a kernel of another process.
    """
    import_triton()
    return UserKernel(source, signature, options)


class UserKernel:
    """The launcher of a user-defined kernel, also for torch's operator for Triton kernels."""

    fxwrap_hash: str

    def __init__(self, source: str, signature: tuple[str, ...], options: KernelOptions) -> None:
        self._source = source
        self._options = dict(options)
        names = [entry.partition(" ")[2] for entry in signature]
        self.names = [name for name in names if name != "grid"]
        self._grid_numbers = len(names) - len(self.names)
        self._lock = threading.Lock()

    # --- properties -------------------------------------------------------------------------------------------------

    def _loaded(self) -> InProcessKernel:
        key = self._options.get("live")
        if key is not None:
            return get_in_process_kernel(str(key), str(self._options.get("reason", "")))
        module = load_module(self._source, "user_kernel")
        kernel = getattr(module, "kernel", None)
        if kernel is None:
            raise FxwrapError("the source of a Triton kernel must define a function 'kernel' with @triton.jit")
        return InProcessKernel(kernel, getattr(module, "CONSTANTS", {}), getattr(module, "DESCRIPTORS", {}))

    @cached_property
    def on_gpu(self) -> InProcessKernel:
        """The kernel for Triton's compiler."""
        with triton_lock:
            return self._loaded()

    @cached_property
    def _interpreted(self) -> InProcessKernel:
        """The kernel for Triton's interpreter, without autotuning."""
        with interpreter_mode():
            loaded = self._loaded()
            function, config = loaded.kernel, {}
            if hasattr(function, "configs"):
                function, config = function.fn, function.configs[0].kwargs
            if isinstance(function, import_triton().JITFunction):
                function = importlib.import_module("triton.runtime.interpreter").InterpretedFunction(function.fn)
            if not hasattr(function, "rewrite"):
                raise FxwrapError(f"Triton's interpreter has no {type(function).__name__}")
            return InProcessKernel(function, {**config, **loaded.constants}, loaded.descriptors)

    @cached_property
    def _order(self) -> tuple[list[str], list[str]]:
        """The names of positional and of keyword arguments.

        As many as possible are positional: hooks of Triton's autotuner only see those.
        """
        loaded = self.on_gpu
        available = {*self.names, *loaded.constants}
        first: list[str] = []
        for name in loaded.kernel.arg_names:
            if name not in available:
                break
            first.append(name)
        return first, [name for name in (*self.names, *loaded.constants) if name not in first]

    @property
    def constants(self) -> Mapping[str, object]:
        """Keyword arguments of every launch."""
        return self.on_gpu.constants

    @property
    def descriptors(self) -> Mapping[str, Sequence[int]]:
        """Block shapes of tensor descriptor parameters."""
        return self.on_gpu.descriptors

    # --- launches ---------------------------------------------------------------------------------------------------

    def __call__(self, grid: Sequence[int], *arguments: Any) -> None:
        """Launches the kernel with the arguments of its signature."""
        count = len(self.names)
        numbers: Sequence[int] = arguments[count:]
        grids = [tuple(grid), *[tuple(numbers[start : start + 3]) for start in range(0, self._grid_numbers, 3)]]
        self.launch(grids, dict(zip(self.names, arguments, strict=False)))

    def launch(self, grids: Sequence[Grid], named: Mapping[str, object]) -> None:
        """Launches the kernel with one grid for all configurations, or one for each."""
        if any(isinstance(item, torch.Tensor) and not item.is_cpu for item in named.values()):
            self._launch_on_gpu(grids, named)
            return
        loaded = self._interpreted
        with interpreter_mode(), unwrap_interpreter_errors(loaded.kernel.__name__):
            arguments = _make_tensor_descriptors(named, loaded.descriptors)
            loaded.kernel[grids[0]](**arguments, **loaded.constants)

    def _launch_on_gpu(self, grids: Sequence[Grid], named: Mapping[str, object]) -> None:
        loaded, (first, rest) = self.on_gpu, self._order
        arguments = {**loaded.constants, **_make_tensor_descriptors(named, loaded.descriptors)}
        configs = getattr(loaded.kernel, "configs", None)
        grid: Any = grids[0] if len(grids) == 1 else _grid_of_config(configs or (), grids)
        launcher = loaded.kernel[grid]
        positional, keywords = [arguments[name] for name in first], {name: arguments[name] for name in rest}
        if configs is None:
            launcher(*positional, **keywords)
            return
        with self._lock:  # the autotuner stores the arguments of a launch
            launcher(*positional, **keywords)


def _make_tensor_descriptors(named: Mapping[str, object], descriptors: Mapping[str, object]) -> dict[str, object]:
    if not descriptors:
        return dict(named)
    make = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    return {
        name: make(item, descriptors[name]) if name in descriptors and isinstance(item, torch.Tensor) else item
        for name, item in named.items()
    }  # torch's operator passes descriptors


def _grid_of_config(configs: Sequence[Any], grids: Sequence[Grid]) -> Callable[[Mapping[str, object]], Grid]:
    """Returns the grid of a launch as a function of its arguments, which include the configuration."""

    def grid(arguments: Mapping[str, object]) -> Grid:
        for config, sizes in zip(configs, grids, strict=True):
            if all(arguments[name] == item for name, item in config.kwargs.items() if name in arguments):
                return sizes
        raise FxwrapError("a Triton kernel was launched with a configuration that its autotuner does not have")

    return grid


class InterpretedUserKernel:
    """A user-defined kernel on the CPU, for torch's operator for Triton kernels."""

    fxwrap_hash: str

    def __init__(self, kernel: UserKernel) -> None:
        self._kernel = kernel
        loaded = kernel.on_gpu.kernel
        self.fn = loaded.fn
        self.__name__: str = loaded.fn.__name__  # torch's errors name kernels
        self.arg_names: list[str] = list(loaded.arg_names)
        self.configs = getattr(loaded, "configs", [])

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        if callable(grid):
            grid = grid(self.configs[0].kwargs)

        def launch(*arguments: object, **keywords: object) -> None:
            named = {**dict(zip(self.arg_names, arguments, strict=False)), **keywords}
            self._kernel.launch([tuple(grid)], {name: named[name] for name in self._kernel.names})

        return launch


@shared_cache(256)
def user_side_table_kernel(
    source: str, signature: tuple[str, ...], options: KernelOptions, kernel_hash: str, on_cpu: bool
) -> Any:
    """Returns the object for torch's side table; its `fxwrap_hash` identifies the kernel of the program."""
    kernel = load_user_kernel(source, signature, options)
    entry = InterpretedUserKernel(kernel) if on_cpu else kernel.on_gpu.kernel
    entry.fxwrap_hash = kernel_hash
    return entry
