"""The numbers of compilations of native code that this process started, and of the kernels that are compiled."""

from __future__ import annotations

import threading


class _Runs:
    """The numbers, under a lock."""

    def __init__(self) -> None:
        self.number = 0
        self.finished_kernels = 0
        self.lock = threading.Lock()


_process = _Runs()


def compiler_runs() -> int:
    """Returns the runs of the C++ compiler that produced code, and the kernels that Triton was asked to compile."""
    return _process.number


def finished_kernels() -> int:
    """Returns the number of kernels that were compiled, or found in a cache, for the progress of compiles."""
    return _process.finished_kernels


def count_finished_kernels(number: int = 1) -> None:
    """Adds to the number of finished kernels."""
    with _process.lock:
        _process.finished_kernels += number


def count_compiler_runs(number: int = 1) -> None:
    """Adds to the number."""
    with _process.lock:
        _process.number += number
