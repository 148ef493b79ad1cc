"""Triton kernels for GPUs: one function of Triton's a kernel, shared by all that launch it, compiled before it runs.

Triton keeps what it compiled by the function's object and by what it read off the arguments: dtypes, whether pointers
and numbers are divisible by 16, whether a number is 1. A kernel is compiled ahead for arguments like those that it will
get, so that its first launch finds it; where they differ, Triton compiles it again then.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import torch

from fxwrap.errors import FxwrapError, KernelBuildError
from fxwrap.runtime.cpp_kernels import KernelOptions, KernelText
from fxwrap.runtime.modules import load_module

_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug", "sanitize_overflow")

_DTYPES = {
    "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip

Scalar: TypeAlias = int | float | bool

one_at_a_time = threading.RLock()
"""Held while Triton's interpreter runs, which changes Triton itself, and while a function is decorated."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel with the device it runs on and typical values of its numbers, in the order of its signature."""

    kernel: KernelText
    device: torch.device
    numbers: tuple[Scalar, ...] = ()


def triton() -> ModuleType:
    """Returns the package. Raises FxwrapError where it cannot be imported."""
    try:
        return importlib.import_module("triton")
    except ImportError as missing:
        raise FxwrapError(
            f"this program has a Triton kernel, and Triton cannot be imported ({missing}): install the package 'triton'"
        ) from missing


def launch_keywords(options: KernelOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a kernel's constant parameters (options in capitals) and how it is compiled (the others).

    Floating-point fusion is off unless an option asks for it: Triton's own default differs between versions. Raises
    FxwrapError for an unknown option.
    """
    constants = {name: option for name, option in options if name.isupper()}
    choices = {"enable_fp_fusion": False} | {name: option for name, option in options if not name.isupper()}
    for name in choices:
        if name not in _LAUNCH_OPTIONS:
            raise FxwrapError(f"a Triton kernel has no option '{name}', only {', '.join(_LAUNCH_OPTIONS)}")
    return constants, choices


@cache
def gpu_function(source: str, signature: tuple[str, ...], options: KernelOptions) -> Any:
    """Returns the function of Triton's that a kernel is on GPUs, the same for equal kernels."""
    triton()
    with one_at_a_time:
        return kernel_of(source)


def kernel_of(source: str) -> Any:
    """Returns the function 'kernel' of a new module made from the text. Raises FxwrapError where there is none."""
    found = getattr(load_module(source, "triton_kernel"), "kernel", None)
    if found is None:
        raise FxwrapError("the text of a Triton kernel defines a function called 'kernel' with @triton.jit")
    return found


def compile_triton_kernels(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles kernels for their GPUs and loads them there, several at once; returns for each what went wrong.

    Triton's passes and the programs it starts (ptxas, the C compiler) leave Python to other threads.
    """
    if not uses:
        return []
    try:
        triton().runtime.driver.active.get_current_target()  # before there are threads
    except FxwrapError as missing:
        return [missing] * len(uses)
    with ThreadPoolExecutor(min(len(uses), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_compile, use.kernel, _index(use.device), use.numbers) for use in uses]
    return [_build_error(future.exception()) for future in futures]


def _build_error(raised: BaseException | None) -> FxwrapError | None:
    if raised is None or isinstance(raised, FxwrapError):
        return raised
    if not isinstance(raised, Exception):
        raise raised
    error = KernelBuildError(f"Triton cannot compile it: {type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


def _index(device: torch.device) -> int:
    """Returns a device's number; the current device is another in another thread."""
    with torch.cuda.device(device):
        return torch.cuda.current_device()


def _compile(kernel: KernelText, device: int, typical: Sequence[Scalar]) -> None:
    function = gpu_function(kernel.source, kernel.signature, kernel.options)
    if not isinstance(function, triton().JITFunction):
        return  # TRITON_INTERPRET is set, and nothing is compiled
    if not kernel.signature:
        return  # nothing says what its arguments are
    constants, choices = launch_keywords(kernel.options)
    numbers = iter(typical)
    arguments = [
        _DTYPES[entry.removeprefix("*")] if entry.startswith("*") else next(numbers) for entry in kernel.signature
    ]
    with torch.cuda.device(device):
        compiled = function.warmup(*arguments, grid=(1,), **constants, **choices)
        if compiled is not None:
            _ = compiled.run  # loads it, which fails where it asks for more than the GPU has
