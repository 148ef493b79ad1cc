"""Printers of the loop IR: one package for each kernel language."""

from fxwrap.printers.languages import TRITON_JOINER as TRITON_JOINER
from fxwrap.printers.languages import KernelPrinter as KernelPrinter
from fxwrap.printers.languages import KernelRequest as KernelRequest
from fxwrap.printers.languages import candidate_kernels as candidate_kernels
from fxwrap.printers.languages import cpp_ways as cpp_ways
from fxwrap.printers.languages import print_kernel as print_kernel
from fxwrap.printers.languages import triton_ways as triton_ways
from fxwrap.printers.printed import PrintedKernel as PrintedKernel
