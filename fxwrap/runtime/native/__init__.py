"""The C++ runtime: the bridge that emitted C++ calls, its Python binding, and the compiler driver."""

from __future__ import annotations

from fxwrap.runtime.native.binding import NativeProgram as NativeProgram
from fxwrap.runtime.native.binding import binding_is_loaded as binding_is_loaded
from fxwrap.runtime.native.binding import launcher_class as launcher_class
from fxwrap.runtime.native.binding import load_program as load_program
from fxwrap.runtime.native.binding import override_driver_library as override_driver_library
from fxwrap.runtime.native.build import BRIDGE_LIBRARIES as BRIDGE_LIBRARIES
from fxwrap.runtime.native.build import KERNEL_FLAGS as KERNEL_FLAGS
from fxwrap.runtime.native.build import PROGRAM_FLAGS as PROGRAM_FLAGS
from fxwrap.runtime.native.build import NativeSource as NativeSource
from fxwrap.runtime.native.build import binary_target as binary_target
from fxwrap.runtime.native.build import build_bridge as build_bridge
from fxwrap.runtime.native.build import compile_cpp as compile_cpp
from fxwrap.runtime.native.build import compiled_kernels as compiled_kernels
from fxwrap.runtime.native.build import incompatibility_reason as incompatibility_reason
from fxwrap.runtime.native.build import index_kernel_library as index_kernel_library
from fxwrap.runtime.native.build import precompile_cpp as precompile_cpp
from fxwrap.runtime.native.compiler import compiler_identity as compiler_identity
from fxwrap.runtime.native.prebuilt import find_prebuilt_bridge as find_prebuilt_bridge
from fxwrap.runtime.native.prebuilt import find_prebuilt_kernel as find_prebuilt_kernel
from fxwrap.runtime.native.prebuilt import find_prebuilt_program as find_prebuilt_program
from fxwrap.runtime.native.prebuilt import register_prebuilt_bridge as register_prebuilt_bridge
from fxwrap.runtime.native.prebuilt import register_prebuilt_kernels as register_prebuilt_kernels
from fxwrap.runtime.native.prebuilt import register_prebuilt_program as register_prebuilt_program
from fxwrap.runtime.native.prebuilt import source_key as source_key
