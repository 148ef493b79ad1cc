"""Triton kernels for GPUs: one function of Triton's a kernel, shared by all that launch it, compiled before it runs.

Triton keeps what it compiled by the function's object and by what it read off the arguments: dtypes, whether pointers
and numbers are divisible by 16, whether a number is 1. A kernel is compiled ahead for arguments like those that it will
get, so that its first launch finds it; where they differ, Triton compiles it again then.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import torch

from fxwrap.device_spec import CUDA
from fxwrap.errors import FxwrapError, KernelBuildError
from fxwrap.kernel_names import function_in
from fxwrap.runtime.compile_workers import POOL
from fxwrap.runtime.cpp_kernels import KernelOptions, KernelText
from fxwrap.runtime.modules import load_module, write_module
from fxwrap.runtime.triton_provided import launches_provided

log = logging.getLogger("fxwrap.kernels")

_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug", "sanitize_overflow")

_DTYPES = {
    "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip

MODULE_NAME = "triton_kernel"
"""What the files of kernels' texts begin with."""

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
    """Returns the kernel of a new module made from the text. Raises FxwrapError where there is none."""
    found = getattr(load_module(source, MODULE_NAME), function_in(source), None)
    if found is None:
        raise FxwrapError("the text of a Triton kernel defines a function called 'kernel' with @triton.jit")
    return found


def compile_triton_kernels(uses: Sequence[KernelUse]) -> list[FxwrapError | None]:
    """Compiles kernels for their GPUs and loads them there, several at once; returns for each what went wrong.

    Threads of this process and workers take one after another. What a worker compiles, this process finds in Triton's
    cache. What a file brought along is left to its first launch.
    """
    errors: list[FxwrapError | None] = [None] * len(uses)
    left = [position for position, use in enumerate(uses) if not _is_provided(use)]
    if not left:
        return errors
    try:
        target = triton().runtime.driver.active.get_current_target()  # before there are threads
    except FxwrapError as missing:
        return [missing if position in left else None for position in range(len(uses))]
    devices = {position: _index(uses[position].device) for position in left}
    jobs = {position: job for position in left if (job := _job_if_any(uses[position], target)) is not None}
    positions, by_workers = list(jobs), []

    def finish(position: int, answer: str | None) -> None:
        by_workers.extend([position] if answer is not None else [])
        if answer:
            errors[position] = KernelBuildError(f"Triton cannot compile it: {answer}")
            return
        try:
            _compile(uses[position], devices[position])
        except Exception as raised:  # noqa: BLE001  whatever Triton raises is this kernel's
            errors[position] = _build_error(raised)

    start = time.perf_counter()
    for position in set(left) - set(positions):
        finish(position, None)
    POOL.run([*jobs.values()], lambda place, answer: finish(positions[place], answer), _threads())
    seconds = time.perf_counter() - start
    log.info("%d Triton kernels compiled in %.3f s, %d by other processes", len(left), seconds, len(by_workers))
    return errors


def _threads() -> int:
    """Returns how many kernels this process compiles at once."""
    return os.cpu_count() or 1


def start_workers(device_type: str) -> None:
    """Starts the processes that compile kernels for GPUs, so that they are ready when there are kernels."""
    if device_type != CUDA.device_type or not torch.cuda.is_available():
        return
    with suppress(FxwrapError):  # without Triton there will be no kernels
        if not triton().knobs.runtime.interpret:
            POOL.start()


def _job_if_any(use: KernelUse, target: Any) -> dict[str, Any] | None:
    """Returns the job for a worker; None for a kernel that fails, or needs no compiling, for reasons seen here."""
    if not use.kernel.signature or triton().knobs.runtime.interpret:
        return None
    try:
        return worker_job(use, target)
    except (FxwrapError, LookupError, StopIteration, OSError):
        return None


def worker_job(use: KernelUse, target: Any) -> dict[str, Any]:
    """Returns what a worker is told of a kernel, for a target of Triton's: what `_compile` does, as plain data."""
    constants, choices = launch_keywords(use.kernel.options)
    arguments = [{"dtype": str(item).removeprefix("torch.")} if isinstance(item, torch.dtype) else item
                 for item in typical_arguments(use)]  # fmt: skip
    environment = {name: text for name, text in os.environ.items() if name.startswith("TRITON")}
    return {
        "path": str(write_module(use.kernel.source, MODULE_NAME)),
        "function": function_in(use.kernel.source),
        "target": [target.backend, target.arch, target.warp_size],
        "arguments": arguments,
        "constants": constants,
        "choices": choices,
        "environment": {**environment, "TRITON_CACHE_DIR": str(triton().knobs.cache.dir)},
    }


def typical_arguments(use: KernelUse) -> list[Any]:
    """Returns arguments as Triton takes them when it only compiles: dtypes for tensors, typical numbers."""
    numbers = iter(use.numbers)
    return [_DTYPES[entry.removeprefix("*")] if entry.startswith("*") else next(numbers)
            for entry in use.kernel.signature]  # fmt: skip


def _build_error(raised: Exception) -> FxwrapError:
    if isinstance(raised, FxwrapError):
        return raised
    error = KernelBuildError(f"Triton cannot compile it: {type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


def _is_provided(use: KernelUse) -> bool:
    if use.device.type != CUDA.device_type or not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    major, minor = torch.cuda.get_device_capability(use.device)
    return launches_provided(use.kernel.symbol, 10 * major + minor)


def _index(device: torch.device) -> int:
    """Returns a device's number; the current device is another in another thread."""
    with torch.cuda.device(device):
        return torch.cuda.current_device()


def _compile(use: KernelUse, device: int) -> None:
    kernel = use.kernel
    function = gpu_function(kernel.source, kernel.signature, kernel.options)
    if not isinstance(function, triton().JITFunction):
        return  # TRITON_INTERPRET is set, and nothing is compiled
    if not kernel.signature:
        return  # nothing says what its arguments are
    constants, choices = launch_keywords(kernel.options)
    with torch.cuda.device(device):
        compiled = function.warmup(*typical_arguments(use), grid=(1,), **constants, **choices)
        if compiled is not None:
            _ = compiled.run  # loads it, which fails where it asks for more than the GPU has
