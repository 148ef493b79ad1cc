"""The built-in devices, registered as a vendor's package registers its own.

A process that only runs programs imports no compiler, so the printers, and the parser of regions, are imported when
they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fxwrap.devices import (
    CPP,
    CPU,
    CUDA,
    FX,
    TRITON,
    USER_TRITON,
    DeviceSpec,
    KernelCombiner,
    KernelRuntime,
    Launcher,
    register,
    register_language,
)
from fxwrap.runtime.devices import CPU_RUNTIME, CUDA_RUNTIME
from fxwrap.runtime.kernels import USER_TRITON_KERNELS


def register_builtin_devices() -> None:
    """Registers the CPU, CUDA, and the languages of user-defined Triton kernels and of regions."""
    register(CPU, printer=_cpp_configurations, runtime=CPU_RUNTIME, language=CPP)
    combiner = KernelCombiner(_triton_group_key, _combine_triton_kernels, _triton_leaves_idle, _triton_fits_together)
    register(CUDA, printer=_triton_configurations, combiner=combiner, runtime=CUDA_RUNTIME, language=TRITON)
    register_language(USER_TRITON, USER_TRITON_KERNELS)
    register_language(FX, KernelRuntime(load=_load_region), _region_configurations)


def _cpp_configurations(request: Any) -> Sequence[Callable[[], Any]]:
    from fxwrap.printers import cpp_configurations

    return cpp_configurations(request)


def _triton_configurations(request: Any) -> Sequence[Callable[[], Any]]:
    from fxwrap.printers import triton_configurations

    return triton_configurations(request)


def _region_configurations(request: Any) -> Sequence[Callable[[], Any]]:
    from fxwrap.printers import region_configurations

    return region_configurations(request)


def _load_region(source: str, signature: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Launcher:
    from fxwrap.regions import load_region

    return load_region(source, signature, options)


def _triton_group_key(kernel: Any) -> Hashable:
    from fxwrap.printers import TRITON_KERNEL_COMBINER

    return TRITON_KERNEL_COMBINER.group_key(kernel)


def _triton_leaves_idle(kernel: Any, spec: DeviceSpec) -> bool:
    from fxwrap.printers import TRITON_KERNEL_COMBINER

    return TRITON_KERNEL_COMBINER.leaves_idle(kernel, spec)


def _triton_fits_together(kernels: Sequence[Any], spec: DeviceSpec) -> bool:
    from fxwrap.printers import TRITON_KERNEL_COMBINER

    return TRITON_KERNEL_COMBINER.fits_together(kernels, spec)


def _combine_triton_kernels(kernels: Sequence[Any], positions: Sequence[Sequence[int]], name: str) -> Any:
    from fxwrap.printers import TRITON_KERNEL_COMBINER

    return TRITON_KERNEL_COMBINER.combine(kernels, positions, name)
