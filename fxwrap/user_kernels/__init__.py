"""User-defined Triton kernels: their definitions in programs, and the arguments of calls of torch's operator."""

from fxwrap.user_kernels.definition import *
from fxwrap.user_kernels.serialization import *
