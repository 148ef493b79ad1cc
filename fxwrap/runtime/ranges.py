"""Profiler ranges of emitted Python and of the interpreter."""

from fxwrap.torch_compat import enter_range as enter_range
from fxwrap.torch_compat import profiler_module as profiler_module
