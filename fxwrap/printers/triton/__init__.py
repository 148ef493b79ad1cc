"""The Triton printer: kernels of the loop IR as Triton kernels, and the ways to cut them into programs."""

from fxwrap.printers.triton.configuration import Configuration as Configuration
from fxwrap.printers.triton.configuration import configurations as configurations
from fxwrap.printers.triton.join import join_triton as join_triton
from fxwrap.printers.triton.join import joinable as joinable
from fxwrap.printers.triton.printer import print_triton as print_triton
