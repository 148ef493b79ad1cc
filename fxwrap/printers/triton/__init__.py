"""The Triton printer: loop IR kernels as Triton kernels, their configurations, and combo kernels."""

from fxwrap.printers.triton.candidates import *
from fxwrap.printers.triton.combo_kernel import *
from fxwrap.printers.triton.contraction_queries import can_use_dot as can_use_dot
from fxwrap.printers.triton.dependent_launch import *
from fxwrap.printers.triton.pointwise_configuration import *
from fxwrap.printers.triton.scheduled_kernel import *
from fxwrap.printers.triton.shared_elements import *
from fxwrap.printers.triton.streaming import *
from fxwrap.printers.triton.streaming_configuration import *
from fxwrap.printers.triton.tiling import *
