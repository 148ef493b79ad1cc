"""Compiled code that came with a saved program, by what it was compiled from: found before any compiler is asked for.

Who provides a library vouches that it is for this machine and these versions. What is provided stays for the process;
for equal sources the first library stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_PROGRAMS: dict[str, Path] = {}
_KERNELS: dict[str, Path] = {}
_BRIDGES: list[Path] = []


def source_key(source: str) -> str:
    """Returns what an emitted translation unit is known by; it names its kernels by their content."""
    return hashlib.sha256(source.encode()).hexdigest()


def provide_program(key: str, library: Path) -> None:
    """Makes the library of an emitted translation unit known by its `source_key`."""
    _PROGRAMS.setdefault(key, library)


def provided_program(source: str) -> Path | None:
    """Returns the library of an emitted translation unit, if one was provided."""
    found = _PROGRAMS.get(source_key(source)) if _PROGRAMS else None
    return found if found is not None and found.is_file() else None


def provide_kernels(symbols: Iterable[str], library: Path) -> None:
    """Makes the library that holds these kernels known, by their symbols."""
    for symbol in symbols:
        _KERNELS.setdefault(symbol, library)


def provided_kernel(symbol: str) -> Path | None:
    """Returns the library of a kernel, if one was provided."""
    found = _KERNELS.get(symbol)
    return found if found is not None and found.is_file() else None


def provide_bridge(folder: Path) -> None:
    """Makes the folder of a built bridge known, for a process that has loaded none."""
    _BRIDGES.append(folder)


def provided_bridge() -> Path | None:
    """Returns the folder of the bridge that was provided first, if one was."""
    return _BRIDGES[0] if _BRIDGES else None
