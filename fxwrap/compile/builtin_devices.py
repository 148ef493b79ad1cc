"""The built-in devices, registered as a vendor's package registers its own."""

from __future__ import annotations

from fxwrap.devices import CPP, CPU, CUDA, TRITON, USER_TRITON, register, register_language
from fxwrap.printers import TRITON_KERNEL_COMBINER, cpp_configurations, triton_configurations
from fxwrap.runtime.devices import CPU_RUNTIME, CUDA_RUNTIME
from fxwrap.runtime.kernels import USER_TRITON_KERNELS


def register_builtin_devices() -> None:
    """Registers the CPU, CUDA and the language of user-defined Triton kernels."""
    register(CPU, printer=cpp_configurations, runtime=CPU_RUNTIME, language=CPP)
    register(
        CUDA, printer=triton_configurations, combiner=TRITON_KERNEL_COMBINER, runtime=CUDA_RUNTIME, language=TRITON
    )
    register_language(USER_TRITON, USER_TRITON_KERNELS)
