"""Devices: how a vendor's package makes a device type known to fxwrap. CPU and CUDA are registered here, the same way.

    fxwrap.devices.register(DeviceSpec("npu", "npu_c", ...), printer=print_kernel, runtime=DeviceRuntime(...))

`docs/devices.md` takes one through it.
"""

from __future__ import annotations

from fxwrap.device_registry import Allocate as Allocate
from fxwrap.device_registry import DeviceRuntime as DeviceRuntime
from fxwrap.device_registry import Handlers as Handlers
from fxwrap.device_registry import Joiner as Joiner
from fxwrap.device_registry import KernelRuntime as KernelRuntime
from fxwrap.device_registry import Launcher as Launcher
from fxwrap.device_registry import Printer as Printer
from fxwrap.device_registry import register, register_language
from fxwrap.device_registry import registered as registered
from fxwrap.device_registry import registered_spec as registered_spec
from fxwrap.device_registry import registered_specs as registered_specs
from fxwrap.device_spec import CPP, CPU, CUDA, TRITON, USER_TRITON
from fxwrap.device_spec import DeviceSpec as DeviceSpec
from fxwrap.device_spec import KernelLanguage as KernelLanguage
from fxwrap.printers import TRITON_JOINER, cpp_ways, triton_ways
from fxwrap.printers import KernelRequest as KernelRequest
from fxwrap.printers import PrintedKernel as PrintedKernel
from fxwrap.runtime.devices import CPU_RUNTIME, CUDA_RUNTIME
from fxwrap.runtime.kernels import USER_TRITON_KERNELS

register(CPU, printer=cpp_ways, runtime=CPU_RUNTIME, language=CPP)
register(CUDA, printer=triton_ways, joiner=TRITON_JOINER, runtime=CUDA_RUNTIME, language=TRITON)
register_language(USER_TRITON, USER_TRITON_KERNELS)
