"""Triton kernels for GPUs: one shared `JITFunction` per kernel, compiled ahead of its first launch.

Triton caches compilations by function object and argument properties: dtypes, divisibility of pointers and scalars by
16, whether a scalar is 1. Kernels are compiled for typical arguments; for others Triton compiles again at the launch.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from fxwrap import torch_compat
from fxwrap.caching import shared_cache
from fxwrap.devices import CUDA
from fxwrap.devices.kernel_names import EARLY_READS, find_function_name
from fxwrap.errors import FxwrapError, KernelBuildError
from fxwrap.runtime.compiler_runs import count_compiler_runs, count_finished_kernels
from fxwrap.runtime.cpp_kernels import KernelOptions, KernelText
from fxwrap.runtime.modules import load_module, write_module
from fxwrap.runtime.triton.prebuilt import WorkerKernel, has_prebuilt_variant, register_prebuilt_triton, triton_binary
from fxwrap.runtime.triton.workers import WORKER_POOL, Answer

log = logging.getLogger("fxwrap.kernels")

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug", "sanitize_overflow")

_DTYPES = {
    "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip

PROCESS_THREADS = 3
"""The threads of this process that compile kernels. Triton holds the GIL for two fifths of a compile (its Python code,
and the linking of libdevice): more threads would wait for one another with jobs that free workers could run."""

MODULE_NAME = "triton_kernel"
"""The prefix of file names of kernel sources."""

Scalar: TypeAlias = int | float | bool
Option: TypeAlias = str | int | float | bool

triton_lock = threading.RLock()
"""Held while Triton's interpreter runs, which patches Triton, and while functions are decorated."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel with its device and typical values of its scalars, in signature order."""

    kernel: KernelText
    device: torch.device
    numbers: tuple[Scalar, ...] = ()


def import_triton() -> ModuleType:
    """Returns the Triton package. Raises FxwrapError where it cannot be imported."""
    try:
        triton = importlib.import_module("triton")
    except ImportError as missing:
        raise FxwrapError(
            f"this program has a Triton kernel, and Triton cannot be imported ({missing}): install the package 'triton'"
        ) from missing
    torch_compat.defer_triton_launchers(triton.__version__)
    return triton


def split_launch_options(options: KernelOptions) -> tuple[dict[str, Option], dict[str, Option]]:
    """Splits a kernel's options into constant parameters (in capitals) and compile options.

    `early_reads` describes the text and is neither. Floating-point fusion is off by default: Triton's default differs
    between versions. So are checks of integer overflow, which Triton traces and then removes where `debug` is off.
    Raises FxwrapError for an unknown option.
    """
    constants = {name: option for name, option in options if name.isupper()}
    compile_options: dict[str, Option] = {"enable_fp_fusion": False, "sanitize_overflow": False} | {
        name: option for name, option in options if not name.isupper() and name != EARLY_READS
    }
    for name in compile_options:
        if name not in LAUNCH_OPTIONS:
            raise FxwrapError(f"a Triton kernel has no option '{name}', only {', '.join(LAUNCH_OPTIONS)}")
    return constants, compile_options


@shared_cache(1024)
def triton_jit_function(source: str, signature: tuple[str, ...], options: KernelOptions) -> Any:
    """Returns the `JITFunction` of a kernel, shared by equal kernels."""
    import_triton()
    with triton_lock:
        function = _JIT_FUNCTIONS[(source, signature, options)] = load_jit_function(source)
    return function


_JIT_FUNCTIONS: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()


def find_jit_function(kernel: KernelText) -> Any | None:
    """Returns the `JITFunction` of a kernel if this process has one, to compile or launch it."""
    return _JIT_FUNCTIONS.get((kernel.source, kernel.signature, kernel.options))


def load_jit_function(source: str) -> Any:
    """Returns the kernel function of a new module with this source. Raises FxwrapError without one."""
    function = getattr(load_module(source, MODULE_NAME), find_function_name(source), None)
    if function is None:
        raise FxwrapError("the source of a Triton kernel must define a function 'kernel' with @triton.jit")
    return function


def compile_triton_kernels(uses: Sequence[KernelUse], threads: int | None = None) -> list[FxwrapError | None]:
    """Compiles kernels for their GPUs and loads them there, in parallel; returns the error or None of each.

    Workers and up to `threads` threads of this process (by default `PROCESS_THREADS`) share the jobs. Kernels of
    workers become prebuilt ones, which are loaded at their first launch; those that only Triton can launch, this
    process finds in Triton's cache.
    """
    errors: list[FxwrapError | None] = [None] * len(uses)
    pending = [position for position, use in enumerate(uses) if not _is_prebuilt(use)]
    if not pending:
        return errors
    try:
        target = import_triton().runtime.driver.active.get_current_target()  # not in a thread
    except FxwrapError as missing:
        return [missing if position in pending else None for position in range(len(uses))]
    count_compiler_runs(len(pending))
    devices = {position: _index(uses[position].device) for position in pending}
    jobs = {position: job for position in pending if (job := _job_if_any(uses[position], target)) is not None}
    positions, by_workers = list(jobs), []

    def finish(position: int, answer: Answer | None) -> None:
        count_finished_kernels()
        by_workers.extend([position] if answer is not None else [])
        if answer is not None and answer.error:
            errors[position] = KernelBuildError(f"Triton cannot compile it: {answer.error}")
            return
        use, device = uses[position], devices[position]
        try:
            if answer is None or not _register(use, answer, device):
                _compile(use, device)
        except Exception as raised:  # noqa: BLE001  any error of Triton is the kernel's
            errors[position] = _build_error(raised)

    start = time.perf_counter()
    for position in set(pending) - set(positions):
        finish(position, None)
    WORKER_POOL.run(
        [*jobs.values()], lambda place, answer: finish(positions[place], answer), threads or PROCESS_THREADS
    )
    seconds = time.perf_counter() - start
    log.info("%d Triton kernels compiled in %.3f s, %d by other processes", len(pending), seconds, len(by_workers))
    return errors


def start_workers(device_type: str) -> None:
    """Starts worker processes for GPU kernels, ahead of the kernels."""
    if device_type != CUDA.device_type or not torch.cuda.is_available():
        return
    with suppress(FxwrapError):  # without Triton there are no kernels
        if not import_triton().knobs.runtime.interpret:
            WORKER_POOL.start()


def compile_ahead(use: KernelUse) -> None:
    """Lets a worker compile a kernel that `compile_triton_kernels` will probably get, if there are workers."""
    if not WORKER_POOL.processes or use.device.type != CUDA.device_type or _is_prebuilt(use):
        return
    job = _job_if_any(use, import_triton().runtime.driver.active.get_current_target())
    if job is not None:
        WORKER_POOL.compile_ahead(job)


def _job_if_any(use: KernelUse, target: object) -> dict[str, object] | None:
    """Returns the job for a worker; None for a kernel that this process compiles or rejects itself."""
    if not use.kernel.signature or import_triton().knobs.runtime.interpret:
        return None
    try:
        return make_worker_job(use, target)
    except (FxwrapError, LookupError, StopIteration, OSError):
        return None


def make_worker_job(use: KernelUse, target: Any) -> dict[str, object]:
    """Returns the job of compiling a kernel for a Triton target, as JSON data; equivalent to `_compile`."""
    constants, compile_options = split_launch_options(use.kernel.options)
    arguments = [{"dtype": str(item).removeprefix("torch.")} if isinstance(item, torch.dtype) else item
                 for item in warmup_arguments(use)]  # fmt: skip
    environment = {name: text for name, text in os.environ.items() if name.startswith("TRITON")}
    return {
        "cost": _estimated_cost(use.kernel.source, constants, compile_options),
        "path": str(write_module(use.kernel.source, MODULE_NAME)),
        "function": find_function_name(use.kernel.source),
        "target": [target.backend, target.arch, target.warp_size],
        "arguments": arguments,
        "constants": constants,
        "compile_options": compile_options,
        "environment": {**environment, "TRITON_CACHE_DIR": str(import_triton().knobs.cache.dir)},
    }


def _estimated_cost(source: str, constants: Mapping[str, Option], compile_options: Mapping[str, Option]) -> float:
    """Returns an estimate of a kernel's compile time: each operation of its text is repeated for a thread's elements.

    Both factors, and the constant, which stands for the passes before that repetition, correlate with measured times.
    """
    tile = math.prod([size for name, size in constants.items() if name.endswith("BLOCK") and isinstance(size, int)])
    return len(source) * (16 + tile / (32 * int(compile_options.get("num_warps", 4))))


def has_known_types(signature: Sequence[str]) -> bool:
    """Returns whether `warmup_arguments` knows the types of the tensors in a signature."""
    return all(entry.removeprefix("*") in _DTYPES for entry in signature if entry.startswith("*"))


def warmup_arguments(use: KernelUse) -> list[torch.dtype | Scalar]:
    """Returns the arguments of Triton's `warmup`: dtypes for tensors, typical scalars."""
    numbers = iter(use.numbers)
    return [_DTYPES[entry.removeprefix("*")] if entry.startswith("*") else next(numbers)
            for entry in use.kernel.signature]  # fmt: skip


def _build_error(raised: Exception) -> FxwrapError:
    if isinstance(raised, FxwrapError):
        return raised
    error = KernelBuildError(f"Triton cannot compile it: {type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


def _is_prebuilt(use: KernelUse) -> bool:
    if use.device.type != CUDA.device_type or not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    major, minor = torch.cuda.get_device_capability(use.device)
    return has_prebuilt_variant(use.kernel.symbol, 10 * major + minor)


def _index(device: torch.device) -> int:
    """Returns a device's index; other threads have their own current device."""
    with torch.cuda.device(device):
        return torch.cuda.current_device()


def _register(use: KernelUse, answer: Answer, device: int) -> bool:
    """Registers the binary of a worker for launches without Triton; returns whether that is enough for this device.

    It is not where only Triton can launch the kernel, and where its shared memory exceeds the device's, which Triton
    reports.
    """
    if answer.compiled is None:
        return False
    constants, _ = split_launch_options(use.kernel.options)
    try:
        binary = triton_binary(WorkerKernel(answer.compiled), constants)
    except (OSError, LookupError, ValueError):  # its files have been deleted, or are another GPU's
        return False
    if binary.variant is None or binary.variant.shared > _shared_memory(device):
        return False
    register_prebuilt_triton(use.kernel.symbol, binary)
    return True


@cache
def _shared_memory(device: int) -> int:
    """Returns the most bytes of shared memory that a block can have."""
    properties = import_triton().runtime.driver.active.utils.get_device_properties(device)
    return int(properties["max_shared_mem"])


def _compile(use: KernelUse, device: int) -> None:
    kernel = use.kernel
    function = triton_jit_function(kernel.source, kernel.signature, kernel.options)
    if not isinstance(function, import_triton().JITFunction):
        return  # TRITON_INTERPRET is set
    if not kernel.signature:
        return  # its argument types are unknown
    constants, compile_options = split_launch_options(kernel.options)
    with torch.cuda.device(device):
        compiled = function.warmup(*warmup_arguments(use), grid=(1,), **constants, **compile_options)
        if compiled is not None:
            _ = compiled.run  # loads it; fails if the kernel exceeds the GPU's resources
