"""The number of compilations of native code that this process started."""

from __future__ import annotations

import threading


class _Runs:
    """The number, under a lock."""

    def __init__(self) -> None:
        self.number = 0
        self.lock = threading.Lock()


_process = _Runs()


def compiler_runs() -> int:
    """Returns the runs of the C++ compiler that produced code, and the kernels that Triton was asked to compile."""
    return _process.number


def count_compiler_runs(number: int = 1) -> None:
    """Adds to the number."""
    with _process.lock:
        _process.number += number
