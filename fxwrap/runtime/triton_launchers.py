"""Launchers of Triton kernels on NVIDIA GPUs: the bridge starts what Triton compiled, and asks Triton for the rest.

A launch costs what the driver's costs, where Triton looks at each argument in Python first. Arguments of a class that
the bridge holds nothing for yet are tried with what files brought along; then they go to Triton, which compiles and
launches, and the bridge holds what it compiled. Hooks that are set for Triton's own launches see those only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from fxwrap.errors import NativeBuildError
from fxwrap.runtime.cpp_kernels import KernelText
from fxwrap.runtime.native import launcher_class
from fxwrap.runtime.triton_compile import triton
from fxwrap.runtime.triton_provided import provided_triton
from fxwrap.runtime.triton_variants import variant_of

Otherwise = Callable[..., Any]
"""`otherwise(grid, *tensors, *numbers)` launches by Triton, and returns what Triton compiled, or None."""


class Launcher(Protocol):
    """A kernel as the bridge launches it. `hold` and `hold_image` are the bridge's, which says what they take."""

    @property
    def held(self) -> int:
        """How many compilations of the kernel this process holds."""

    def __call__(self, grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        """Launches the kernel on its tensors' GPU, on torch's current stream there."""

    def hold(
        self,
        name: str,
        threads: int,
        shared: int,
        classes: bytes,
        passed: bytes,
        device: int,
        function: int,
        owner: Any,
    ) -> None:
        """Launches for arguments of these classes start this function from now on; its owner is kept alive."""

    def hold_image(
        self,
        name: str,
        cubin: bytes,
        ptx: bytes,
        capability: int,
        threads: int,
        shared: int,
        classes: bytes,
        passed: bytes,
    ) -> None:
        """Launches for arguments of these classes start this code from now on, where the GPU can run it."""


def native_launcher(kernel: KernelText, constants: Collection[str], by_triton: Otherwise) -> Callable[..., Any]:
    """Returns the kernel's launcher, or `by_triton` where only Triton can launch: there is no NVIDIA GPU, Triton
    interprets, or the bridge cannot be built. `constants` names the kernel's constant parameters.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None or triton().knobs.runtime.interpret:
        return by_triton
    try:
        return held_launcher(kernel, constants, by_triton)
    except NativeBuildError:
        return by_triton


def held_launcher(kernel: KernelText, constants: Collection[str], by_triton: Otherwise) -> Launcher:
    """Returns the kernel's launcher. Raises NativeBuildError where the bridge cannot be built."""
    seen: dict[int, Any] = {}

    def otherwise(grid: Sequence[int], *arguments: torch.Tensor | float) -> None:
        if _hold_provided(launcher, kernel.symbol):
            launcher(grid, *arguments)
            return
        tensor = next((item for item in arguments if isinstance(item, torch.Tensor) and item.is_cuda), None)
        if tensor is None:
            by_triton(grid, *arguments)
            return
        with torch.cuda.device(tensor.device):
            compiled = by_triton(grid, *arguments)
        if compiled is not None and id(compiled) not in seen:
            hold(launcher, compiled, constants, tensor.device.index)
            seen[id(compiled)] = compiled

    launcher: Launcher = launcher_class()(kernel.symbol, ", ".join(kernel.signature), otherwise)
    return launcher


def hold(launcher: Launcher, compiled: Any, constants: Collection[str], device: int) -> None:
    """Gives what Triton has compiled and loaded on a device to a launcher; nothing where only Triton can launch it."""
    variant = variant_of(compiled, constants)
    if variant is not None:
        launcher.hold(
            *(variant.name, variant.threads, variant.shared, variant.classes, variant.passed, device),
            *(compiled.function, compiled),
        )


_LOCK = threading.Lock()
_TAKEN_UP: set[tuple[str, str]] = set()
"""What files brought along that the bridge holds: symbol of the kernel, and Triton's key."""


def _hold_provided(launcher: Launcher, symbol: str) -> bool:
    """Gives what files brought along of a kernel to the bridge; returns whether that was anything new."""
    with _LOCK:
        new = [item for item in provided_triton(symbol) if item.variant and (symbol, item.key) not in _TAKEN_UP]
        for item in new:
            variant = item.variant
            assert variant is not None
            launcher.hold_image(
                variant.name, variant.cubin, variant.ptx.encode(), variant.capability, variant.threads, variant.shared,
                variant.classes, variant.passed,
            )  # fmt: skip
            _TAKEN_UP.add((symbol, item.key))
    return bool(new)
