"""The memory of this process."""

from __future__ import annotations

import ctypes
from pathlib import Path


def resident_bytes() -> int:
    """Returns the size of this process's memory, without what its allocator could return to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
