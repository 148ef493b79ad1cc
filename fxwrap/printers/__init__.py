"""Printers of loop IR kernels, one package for each kernel language."""

from fxwrap.printers.languages import *
from fxwrap.printers.printed_kernel import *
