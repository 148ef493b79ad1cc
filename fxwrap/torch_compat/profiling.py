"""Ranges for torch's profiler.

Why: `torch.profiler.record_function` costs microseconds although no profiler runs, and whether one runs has no public
name.
"""

from __future__ import annotations

import torch
from torch.autograd import profiler as _profiler

profiler_module = _profiler
PROFILER_FLAG = "_is_profiler_enabled"
"""The attribute of `profiler_module` that says whether a profiler runs: emitted Python reads it before it calls."""


def enter_range(name: str) -> torch.profiler.record_function | None:
    """Opens a range, which its `__exit__` closes; returns None if no profiler runs in this process.

    `torch.autograd.profiler.emit_nvtx` turns ranges into those of NVTX.
    """
    if not _profiler._is_profiler_enabled:
        return None
    range_ = torch.profiler.record_function(name)
    range_.__enter__()  # type: ignore[no-untyped-call]
    return range_


def range_profiler(*, cuda: bool) -> _profiler.profile:
    """Returns torch's profiler that times ranges and operators by the clock and, on GPUs, by CUDA events.

    Why: `torch.profiler.profile` times kernels through CUPTI, and cannot attribute those that no operator launches.
    """
    if cuda:
        return _profiler.profile(use_cpu=True, use_device="cuda", use_kineto=False)
    return _profiler.profile(use_cpu=True)


def delay_stream(seconds: float) -> None:
    """Lets the current GPU's current stream wait, so that the host can queue work. It has no public name."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(int(seconds * 2e9))  # cycles
