"""Device types and kernel languages.

A vendor's package registers a device type like fxwrap does CPU and CUDA:

    fxwrap.devices.register(DeviceSpec("npu", "npu_c", ...), printer=print_kernel, runtime=DeviceRuntime(...))

See `docs/devices.md`.
"""

from fxwrap.devices.matmul_traits import *
from fxwrap.devices.registry import *
from fxwrap.devices.spec import *
