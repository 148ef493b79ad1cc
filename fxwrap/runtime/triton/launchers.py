"""Launchers of Triton kernels on NVIDIA GPUs through the bridge, without Triton's Python launch code.

For arguments of a class without a variant, the launcher adds a prebuilt one, or one that Triton compiles. Triton
launches kernels that only it can launch, and its launch hooks only see those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from fxwrap.devices.kernel_names import described_parameters
from fxwrap.errors import NativeBuildError
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import InterimLauncher, find_bridge, launcher_class
from fxwrap.runtime.triton.compile import import_triton
from fxwrap.runtime.triton.prebuilt import find_prebuilt_triton
from fxwrap.runtime.triton.variants import variant_of

Fallback = Callable[..., object]
"""`fallback(grid, *tensors, *scalars)` launches."""


class TritonCalls(Protocol):
    """A kernel as Triton compiles and launches it, on the current GPU."""

    def launch(self, grid: Sequence[int], *arguments: torch.Tensor | float) -> object:
        """Launches it; compiles it for the arguments if it must."""

    def compile(self, grid: Sequence[int], *arguments: torch.Tensor | float) -> Any:
        """Returns the loaded kernel that `launch` would launch, or None."""


class NativeLauncher(Protocol):
    """A kernel launcher of the bridge."""

    @property
    def variant_count(self) -> int:
        """The number of the kernel's variants in this process."""

    def __call__(self, grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        """Launches the kernel on its tensors' GPU, on torch's current stream."""

    def add_variant(
        self,
        name: str,
        threads: int,
        shared: int,
        scratch: int,
        classes: bytes,
        parameter_passing: bytes,
        device: int,
        function: int,
        owner: object,
    ) -> None:
        """Adds a loaded function for arguments of these classes, and keeps its owner alive."""

    def add_variant_image(
        self,
        name: str,
        cubin: bytes,
        ptx: bytes,
        capability: int,
        threads: int,
        shared: int,
        scratch: int,
        classes: bytes,
        parameter_passing: bytes,
    ) -> None:
        """Adds machine code for arguments of these classes, for GPUs that can run it."""


def make_launcher(
    kernel: KernelText, constants: Collection[str], triton: TritonCalls, dependent: bool = False
) -> Fallback:
    """Returns the kernel's launcher, which is Triton's without an NVIDIA GPU or bridge, and in the interpreter.

    Triton launches while the bridge is compiled in the background. `constants` names the kernel's constant parameters.
    `dependent` launches may start before those before them have ended; Triton's start after them.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None or import_triton().knobs.runtime.interpret:
        return triton.launch
    if find_bridge() is None:
        return InterimLauncher(triton.launch, partial(make_native_launcher, kernel, constants, triton, dependent))
    try:
        return make_native_launcher(kernel, constants, triton, dependent)
    except NativeBuildError:
        return triton.launch


def make_native_launcher(
    kernel: KernelText, constants: Collection[str], triton: TritonCalls, dependent: bool = False
) -> NativeLauncher:
    """Returns the kernel's launcher. Raises NativeBuildError where the bridge cannot be built."""
    added, is_launched_by_triton, described = dict[int, object](), False, described_parameters(kernel.source)

    def fallback(grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        nonlocal is_launched_by_triton
        if _load_prebuilt(launcher, kernel.symbol):
            launcher(grid, *arguments)
            return
        aligned = aligned_arguments(arguments, described)
        if aligned is not arguments:
            launcher(grid, *aligned)
            return
        tensor = next((item for item in arguments if isinstance(item, torch.Tensor) and item.is_cuda), None)
        with nullcontext() if tensor is None else torch.cuda.device(tensor.device):
            compiled = None if tensor is None or is_launched_by_triton else triton.compile(grid, *arguments)
            if tensor is None or compiled is None or id(compiled) in added:
                triton.launch(grid, *arguments)
                return
            if not add_variant(launcher, compiled, constants, tensor.device.index):
                is_launched_by_triton = True
                triton.launch(grid, *arguments)
                return
        added[id(compiled)] = compiled
        launcher(grid, *arguments)

    launcher: NativeLauncher = launcher_class()(kernel.symbol, ", ".join(kernel.signature), fallback, dependent)
    return launcher


def aligned_arguments(
    arguments: Sequence[torch.Tensor | float], described: Collection[int]
) -> Sequence[torch.Tensor | float]:
    """Returns the arguments of a launch, with copies of the tensors at these positions that 16 does not divide."""
    copies = dict[int, torch.Tensor]()
    for at in described:
        item = arguments[at]
        if isinstance(item, torch.Tensor) and item.data_ptr() % 16:
            copies[at] = _aligned_copy(item)
    return [copies.get(at, item) for at, item in enumerate(arguments)] if copies else arguments


@torch.no_grad()
def _aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in new memory, whose elements are as far from each other."""
    extent = 1 + sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def add_variant(launcher: NativeLauncher, compiled: Any, constants: Collection[str], device: int) -> bool:
    """Adds a kernel that Triton compiled and loaded on a device; returns False where only Triton can launch it."""
    variant = variant_of(compiled, constants)
    if variant is not None:
        launcher.add_variant(
            variant.name, variant.threads, variant.shared, variant.scratch, variant.classes, variant.parameter_passing,
            device, compiled.function, compiled,
        )  # fmt: skip
    return variant is not None


_LOCK = threading.Lock()
_LOADED_PREBUILT: set[tuple[str, str]] = set()
"""Prebuilt variants in the bridge, which keeps them for the process: symbol of the kernel and Triton's key."""


def _load_prebuilt(launcher: NativeLauncher, symbol: str) -> bool:
    """Adds prebuilt variants of a kernel; returns whether there were new ones."""
    with _LOCK:
        new = [
            item for item in find_prebuilt_triton(symbol) if item.variant and (symbol, item.key) not in _LOADED_PREBUILT
        ]
        for item in new:
            variant = item.variant
            assert variant is not None
            launcher.add_variant_image(
                variant.name, variant.cubin, variant.ptx.encode(), variant.capability, variant.threads, variant.shared,
                variant.scratch, variant.classes, variant.parameter_passing,
            )  # fmt: skip
            _LOADED_PREBUILT.add((symbol, item.key))
    return bool(new)
