"""Device types and kernel languages. A vendor's package registers a device type like fxwrap does CPU and CUDA:

    fxwrap.devices.register(DeviceSpec("npu", "npu_c", ...), printer=print_kernel, runtime=DeviceRuntime(...))

See `docs/devices.md`.
"""

from fxwrap.devices.registry import AllocateFunction as AllocateFunction
from fxwrap.devices.registry import DeviceRuntime as DeviceRuntime
from fxwrap.devices.registry import KernelCombiner as KernelCombiner
from fxwrap.devices.registry import KernelRuntime as KernelRuntime
from fxwrap.devices.registry import Launcher as Launcher
from fxwrap.devices.registry import Printer as Printer
from fxwrap.devices.registry import RegisteredLanguage as RegisteredLanguage
from fxwrap.devices.registry import check_languages as check_languages
from fxwrap.devices.registry import device_runtime as device_runtime
from fxwrap.devices.registry import find_language as find_language
from fxwrap.devices.registry import get_language as get_language
from fxwrap.devices.registry import language_traits as language_traits
from fxwrap.devices.registry import line_handlers as line_handlers
from fxwrap.devices.registry import missing_function_error as missing_function_error
from fxwrap.devices.registry import register as register
from fxwrap.devices.registry import register_language as register_language
from fxwrap.devices.registry import registered_lines as registered_lines
from fxwrap.devices.registry import registered_spec as registered_spec
from fxwrap.devices.registry import registered_specs as registered_specs
from fxwrap.devices.registry import scoped_registration as scoped_registration
from fxwrap.devices.spec import CPP as CPP
from fxwrap.devices.spec import CPU as CPU
from fxwrap.devices.spec import CUDA as CUDA
from fxwrap.devices.spec import DEVICE_SPECS as DEVICE_SPECS
from fxwrap.devices.spec import ROW_ALIGNMENT as ROW_ALIGNMENT
from fxwrap.devices.spec import TRITON as TRITON
from fxwrap.devices.spec import USER_TRITON as USER_TRITON
from fxwrap.devices.spec import DeviceSpec as DeviceSpec
from fxwrap.devices.spec import GemmPaddingCosts as GemmPaddingCosts
from fxwrap.devices.spec import KernelLanguage as KernelLanguage
