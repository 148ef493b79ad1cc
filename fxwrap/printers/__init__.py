"""Printers of loop IR kernels, one package for each kernel language."""

from fxwrap.printers.languages import TRITON_KERNEL_COMBINER as TRITON_KERNEL_COMBINER
from fxwrap.printers.languages import KernelPrinter as KernelPrinter
from fxwrap.printers.languages import KernelRequest as KernelRequest
from fxwrap.printers.languages import candidate_kernels as candidate_kernels
from fxwrap.printers.languages import cpp_configurations as cpp_configurations
from fxwrap.printers.languages import print_kernel as print_kernel
from fxwrap.printers.languages import triton_configurations as triton_configurations
from fxwrap.printers.printed_kernel import PrintedKernel as PrintedKernel
