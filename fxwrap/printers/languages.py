"""The printers by kernel language."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fxwrap.errors import FxwrapError
from fxwrap.loop_ir import Kernel
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.printers.printed import PrintedKernel
from fxwrap.printers.triton import configurations, print_triton
from fxwrap.symbolic import Size


def print_kernel(
    kernel: Kernel, language: str, hint: Callable[[Size], int], limits: Mapping[str, int]
) -> PrintedKernel:
    """Returns a kernel as text in a kernel language.

    `hint` gives a typical value of a symbolic size, `limits` the largest values that symbols can have, by name. Raises
    FxwrapError for a language that has no printer, or a kernel that the language cannot say.
    """
    if language == "cpp":
        return print_cpp_kernel(kernel)
    if language == "triton":
        return print_triton(kernel, configurations(kernel, hint)[0], limits)
    raise FxwrapError(f"there is no printer for the kernel language '{language}'")
