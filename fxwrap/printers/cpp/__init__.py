"""The C++ printer: loop IR as C++ for CPUs, with OpenMP threads, vectorised loops and the runtime's `kernel.h`."""

from fxwrap.printers.cpp.contractions import is_small_row_product as is_small_row_product
from fxwrap.printers.cpp.contractions import plan_contraction as plan_contraction
from fxwrap.printers.cpp.loop_plan import MIN_SCATTERED_COLUMNS as MIN_SCATTERED_COLUMNS
from fxwrap.printers.cpp.printer import INCLUDE as INCLUDE
from fxwrap.printers.cpp.printer import print_cpp_kernel as print_cpp_kernel
