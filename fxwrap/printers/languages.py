"""Printing kernels by language: what the language's registered printer gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeAlias

import torch

from fxwrap.device_registry import Joiner, Printer, language_named
from fxwrap.errors import FxwrapError
from fxwrap.loop_ir import Kernel
from fxwrap.printers.cpp import print_cpp_kernel
from fxwrap.printers.printed import PrintedKernel
from fxwrap.printers.triton import configurations, join_triton, joinable, print_triton
from fxwrap.symbolic import Size


@dataclass(frozen=True)
class KernelRequest:
    """A kernel that is to be printed, and what is known of its launch.

    Fields: `language` of the printer; `device` it will run on; `hint` gives a typical value of a symbolic size;
    `limits` the largest values that symbols can have, by name; `name` says what it does, for profilers to show.
    """

    kernel: Kernel
    language: str
    device: torch.device
    hint: Callable[[Size], int]
    limits: Mapping[str, int] = field(default_factory=dict)
    name: str = ""


KernelPrinter: TypeAlias = Callable[[KernelRequest], PrintedKernel]
"""Prints what is requested in the way it chooses."""


def print_kernel(request: KernelRequest) -> PrintedKernel:
    """Returns a kernel as text in its language, cut by the best guess.

    Raises FxwrapError for a language that has no printer, or a kernel that the language cannot say.
    """
    kernel = request.kernel
    if kernel.numbers:
        return candidate_kernels(request)[0]()
    printer = _printer(request.language)
    return _printed_once(kernel, kernel.details, request.language, request.device, request.name, printer)


@lru_cache(maxsize=1024)
def _printed_once(
    kernel: Kernel, details: tuple[str, ...], language: str, device: torch.device, name: str, _printer: Printer
) -> PrintedKernel:
    """Prints a kernel of fixed sizes, once for all equal layers of a model."""
    return candidate_kernels(KernelRequest(kernel, language, device, int, name=name))[0]()


def candidate_kernels(request: KernelRequest) -> tuple[Callable[[], PrintedKernel], ...]:
    """Returns what prints a kernel in each way that is worth a try, the best guess first; all are correct.

    Raises FxwrapError for a language that has no printer, and for a kernel that its printer gives nothing for, as
    printing does for a kernel that it cannot say.
    """
    ways = tuple(_printer(request.language)(request))
    if not ways:
        raise FxwrapError(f"the printer for '{request.language}' on device '{request.device}' gives nothing for it")
    return ways


def _printer(language: str) -> Printer:
    found = language_named(language).printer
    if found is None:
        raise FxwrapError(f"there is no printer for the kernel language '{language}'")
    return found


def cpp_ways(request: KernelRequest) -> tuple[Callable[[], PrintedKernel], ...]:
    """Returns what prints a kernel as C++, in the one way there is."""
    return (partial(print_cpp_kernel, request.kernel, request.name),)


def triton_ways(request: KernelRequest) -> tuple[Callable[[], PrintedKernel], ...]:
    """Returns what prints a kernel as Triton's Python, in each way to cut it, the best guess first."""
    ways = configurations(request.kernel, request.hint)
    return tuple([partial(print_triton, request.kernel, way, request.limits, request.name) for way in ways])


TRITON_JOINER = Joiner(joinable, join_triton)
"""How one launch runs several of the kernels that are printed in Triton."""
