"""The C++ runtime: the bridge that emitted C++ calls, its Python binding, and the compiler driver."""

from __future__ import annotations

from .binding import Program as Program
from .binding import binding_is_loaded as binding_is_loaded
from .binding import launcher_class as launcher_class
from .binding import load_program as load_program
from .binding import use_driver as use_driver
from .build import BRIDGE_LIBRARIES as BRIDGE_LIBRARIES
from .build import PROGRAM_FLAGS as PROGRAM_FLAGS
from .build import NativeSource as NativeSource
from .build import binary_target as binary_target
from .build import build_bridge as build_bridge
from .build import cache_folder as cache_folder
from .build import compile_ahead as compile_ahead
from .build import compile_cpp as compile_cpp
from .build import compiled_kernels as compiled_kernels
from .build import compiler_identity as compiler_identity
from .build import record_kernels as record_kernels
from .build import unusable as unusable
from .provided import provide_bridge as provide_bridge
from .provided import provide_kernels as provide_kernels
from .provided import provide_program as provide_program
from .provided import provided_bridge as provided_bridge
from .provided import provided_kernel as provided_kernel
from .provided import provided_program as provided_program
from .provided import source_key as source_key
