"""The Triton printer: loop IR kernels as Triton kernels, their configurations, and combo kernels."""

from fxwrap.printers.triton.combo_kernel import combine_triton_kernels as combine_triton_kernels
from fxwrap.printers.triton.combo_kernel import group_key as group_key
from fxwrap.printers.triton.configuration import Configuration as Configuration
from fxwrap.printers.triton.configuration import configurations as configurations
from fxwrap.printers.triton.printer import print_triton as print_triton
