"""The Triton printer: `configurations` of a loop IR kernel, `print_triton` in one of them, and combo kernels."""

from fxwrap.printers.triton.candidates import *
from fxwrap.printers.triton.combo_kernel import *
from fxwrap.printers.triton.dependent_launch import *
from fxwrap.printers.triton.scheduled_kernel import *
from fxwrap.printers.triton.tiling import *
