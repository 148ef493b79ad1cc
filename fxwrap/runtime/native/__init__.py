"""The C++ runtime: the bridge that emitted C++ calls, its Python binding, and the compiler driver."""

from __future__ import annotations

from .build import NativeSource as NativeSource
from .build import Program as Program
from .build import build_bridge as build_bridge
from .build import cache_folder as cache_folder
from .build import compile_cpp as compile_cpp
from .build import compiled_kernels as compiled_kernels
from .build import load_program as load_program
from .build import record_kernels as record_kernels
