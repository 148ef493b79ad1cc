"""The printers by kernel language."""

from __future__ import annotations

from collections.abc import Callable

from fxwrap.errors import FxwrapError
from fxwrap.loop_ir import Kernel
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.printers.printed import PrintedKernel
from fxwrap.symbolic import Size


def print_kernel(kernel: Kernel, language: str, hint: Callable[[Size], int]) -> PrintedKernel:
    """Returns a kernel as text in a kernel language. `hint` gives a typical value of a symbolic size.

    Raises FxwrapError for a language that has no printer, or a kernel that the language cannot say.
    """
    if language == "cpp":
        return print_cpp_kernel(kernel)
    raise FxwrapError(f"there is no printer for the kernel language '{language}'")
