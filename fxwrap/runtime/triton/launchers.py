"""Launchers of Triton kernels on NVIDIA GPUs through the bridge, without Triton's Python launch code.

For arguments of a class without a variant, the launcher tries prebuilt variants, then Triton, which compiles and
launches; the bridge adds the compiled variant. Triton's launch hooks only see Triton's own launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fxwrap.errors import NativeBuildError
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import InterimLauncher, find_bridge, launcher_class
from fxwrap.runtime.triton.compile import import_triton
from fxwrap.runtime.triton.prebuilt import find_prebuilt_triton
from fxwrap.runtime.triton.variants import variant_of

Fallback = Callable[..., object]
"""`fallback(grid, *tensors, *scalars)` launches by Triton and returns the compiled kernel, or None."""


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
        classes: bytes,
        parameter_passing: bytes,
    ) -> None:
        """Adds machine code for arguments of these classes, for GPUs that can run it."""


def make_launcher(kernel: KernelText, constants: Collection[str], launch_with_triton: Fallback) -> Fallback:
    """Returns the kernel's launcher, or `launch_with_triton` without an NVIDIA GPU or bridge, and in the interpreter.

    Triton launches while the bridge is compiled in the background. `constants` names the kernel's constant parameters.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None or import_triton().knobs.runtime.interpret:
        return launch_with_triton
    if find_bridge() is None:
        return InterimLauncher(launch_with_triton, partial(make_native_launcher, kernel, constants, launch_with_triton))
    try:
        return make_native_launcher(kernel, constants, launch_with_triton)
    except NativeBuildError:
        return launch_with_triton


def make_native_launcher(
    kernel: KernelText, constants: Collection[str], launch_with_triton: Fallback
) -> NativeLauncher:
    """Returns the kernel's launcher. Raises NativeBuildError where the bridge cannot be built."""
    seen: dict[int, object] = {}

    def fallback(grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        if _load_prebuilt(launcher, kernel.symbol):
            launcher(grid, *arguments)
            return
        tensor = next((item for item in arguments if isinstance(item, torch.Tensor) and item.is_cuda), None)
        if tensor is None:
            launch_with_triton(grid, *arguments)
            return
        with torch.cuda.device(tensor.device):
            compiled = launch_with_triton(grid, *arguments)
        if compiled is not None and id(compiled) not in seen:
            add_variant(launcher, compiled, constants, tensor.device.index)
            seen[id(compiled)] = compiled

    launcher: NativeLauncher = launcher_class()(kernel.symbol, ", ".join(kernel.signature), fallback)
    return launcher


def add_variant(launcher: NativeLauncher, compiled: Any, constants: Collection[str], device: int) -> None:
    """Adds a kernel that Triton compiled and loaded on a device, unless only Triton can launch it."""
    variant = variant_of(compiled, constants)
    if variant is not None:
        launcher.add_variant(
            *(variant.name, variant.threads, variant.shared, variant.classes, variant.parameter_passing, device),
            *(compiled.function, compiled),
        )


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
                variant.classes, variant.parameter_passing,
            )  # fmt: skip
            _LOADED_PREBUILT.add((symbol, item.key))
    return bool(new)
