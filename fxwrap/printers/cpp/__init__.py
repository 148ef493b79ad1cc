"""The loop IR as C++ for CPUs: OpenMP threads, vectorised loops, no header but `kernel.h` of the runtime."""

from fxwrap.printers.cpp.printer import INCLUDE as INCLUDE
from fxwrap.printers.cpp.printer import print_cpp_kernel as print_cpp_kernel
