"""Printing of loop IR kernels by the registered printer of a kernel language."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import torch

from fxwrap.caching import bounded_cache
from fxwrap.devices import DeviceSpec, KernelCombiner, Printer, get_language
from fxwrap.errors import FxwrapError
from fxwrap.loop_ir import Kernel, ScheduleError
from fxwrap.printers.cpp import is_small_row_product, plan_contraction, print_cpp_kernel
from fxwrap.printers.printed_kernel import PrintedKernel
from fxwrap.printers.triton import Signal as Signal
from fxwrap.printers.triton import add_dependent_launch as add_dependent_launch
from fxwrap.printers.triton import (
    combine_triton_kernels,
    configurations,
    fits_together,
    group_key,
    leaves_idle,
    print_triton,
)
from fxwrap.printers.triton import fills_wait as fills_wait
from fxwrap.printers.triton import is_waiting as is_waiting
from fxwrap.printers.triton import pipelined_bytes as pipelined_bytes
from fxwrap.regions import Region
from fxwrap.symbolic import Number, Size


@dataclass(frozen=True)
class KernelRequest:
    """A kernel to print, with properties of its launch.

    Fields: `language` of the printer; `device` of the launch, and `spec`, its capabilities; `hint` returns a typical
    value of a symbolic size; `limits` are upper bounds of symbols by name; `name` describes the computation, for
    profilers; `region` has the ATen operators that it computes, for languages that take them
    (`KernelLanguage.takes_regions`); `is_matmul` is whether it computes matmuls, which stay library calls where the
    printer raises ScheduleError; `numbers` are typical values of the kernel's symbols, None where one has none.
    """

    kernel: Kernel
    language: str
    device: torch.device
    spec: DeviceSpec
    hint: Callable[[Size], int]
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)
    name: str = ""
    region: Region | None = None
    is_matmul: bool = False
    numbers: tuple[Number, ...] | None = ()


KernelPrinter: TypeAlias = Callable[[KernelRequest], PrintedKernel]
"""Prints a kernel in one of its configurations."""


def print_kernel(request: KernelRequest) -> PrintedKernel:
    """Returns a kernel in its language, in the default configuration.

    Raises FxwrapError for a language without a printer and for a kernel that the language cannot express.
    """
    kernel = request.kernel
    if request.region is not None:
        return candidate_kernels(request)[0]()
    request = request if kernel.symbols else replace(request, hint=int, limits={})
    return _print_cached(request, kernel.uncompared_fields, _printer(request.language))


@bounded_cache(1024)
def _print_cached(request: KernelRequest, _uncompared_fields: tuple[str, ...], _printer: Printer) -> PrintedKernel:
    """Prints a kernel once for all equal layers of a model."""
    return candidate_kernels(request)[0]()


def candidate_kernels(request: KernelRequest) -> tuple[Callable[[], PrintedKernel], ...]:
    """Returns functions that print a kernel in each candidate configuration, the default one first.

    Raises FxwrapError for a language without a printer and for a kernel that its printer declines.
    """
    candidates = tuple(_printer(request.language)(request))
    if not candidates:
        raise FxwrapError(f"the printer for '{request.language}' on device '{request.device}' declines the kernel")
    return candidates


def has_schedule(request: KernelRequest) -> bool:
    """Whether the printer of a kernel's language has a schedule for it: False where it raises ScheduleError.

    A kernel that fails for another reason has one: printing it reports the reason.
    """
    try:
        candidate_kernels(request)
    except ScheduleError:
        return False
    except FxwrapError:
        return True
    return True


def _printer(language: str) -> Printer:
    printer = get_language(language).printer
    if printer is None:
        raise FxwrapError(f"the kernel language '{language}' has no printer; register its device with `printer=`")
    return printer


def cpp_configurations(request: KernelRequest) -> tuple[Callable[[], PrintedKernel], ...]:
    """Returns the function that prints a kernel as C++, which has one configuration.

    Raises ScheduleError for a matmul that it would not compute in tiles.
    """
    kernel = request.kernel
    if request.is_matmul and plan_contraction(kernel) is None and not is_small_row_product(kernel):
        raise ScheduleError("C++ kernels read contiguous columns, and few rows")
    return (partial(print_cpp_kernel, request.kernel, request.name),)


def triton_configurations(request: KernelRequest) -> tuple[Callable[[], PrintedKernel], ...]:
    """Returns functions that print a kernel as Triton in each configuration, the default one first.

    Raises ScheduleError for a matmul that it would not compute in tiles.
    """
    kernel, is_interpreted = request.kernel, request.device.type == "cpu"
    candidates = configurations(
        kernel, request.hint, request.spec, is_matmul=request.is_matmul, is_interpreted=is_interpreted
    )
    return tuple([partial(print_triton, kernel, item, request.limits, request.name) for item in candidates])


def region_configurations(request: KernelRequest) -> tuple[Callable[[], PrintedKernel], ...]:
    """Returns the function that prints a region as the text of its operators, which has one configuration."""
    region = request.region
    assert region is not None, "lowering passes the region to a language that takes regions"
    return (lambda: PrintedKernel(request.language, str(region), region.signature, scheduled=region),)


TRITON_KERNEL_COMBINER = KernelCombiner(group_key, combine_triton_kernels, leaves_idle, fits_together)
"""Combines Triton kernels into combo kernels."""
