"""Compiled libraries of saved programs, by the source they were compiled from; they take the place of a compiler.

The caller that registers a library ensures that it is for this machine and these versions. For equal sources the first
library counts. The tables are bounded: code whose entry was evicted is compiled again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


class LibraryTable:
    """Libraries by key, of which the last `size` remain."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._libraries: OrderedDict[str, Path] = OrderedDict()

    def __len__(self) -> int:
        return len(self._libraries)

    def add(self, key: str, library: Path) -> None:
        """Adds a library unless the key has one."""
        self._libraries.setdefault(key, library)
        self._libraries.move_to_end(key)
        if len(self._libraries) > self._size:
            self._libraries.popitem(last=False)

    def find(self, key: str) -> Path | None:
        """Returns the library of a key if its file exists."""
        library = self._libraries.get(key)
        return library if library is not None and library.is_file() else None


@dataclass
class _PrebuiltTables:
    programs: LibraryTable = field(default_factory=lambda: LibraryTable(16384))
    kernels: LibraryTable = field(default_factory=lambda: LibraryTable(65536))
    interim_kernels: LibraryTable = field(default_factory=lambda: LibraryTable(65536))
    bridge: Path | None = None


_tables = _PrebuiltTables()


@contextmanager
def empty_prebuilt_tables() -> Iterator[None]:
    """Runs with empty tables and restores the previous ones afterwards: for tests."""
    previous = dict(vars(_tables))
    vars(_tables).update(vars(_PrebuiltTables()))
    try:
        yield
    finally:
        vars(_tables).update(previous)


def source_key(source: str) -> str:
    """Returns the key of an emitted translation unit, which names its kernels by their content."""
    return hashlib.sha256(source.encode()).hexdigest()


def register_prebuilt_program(key: str, library: Path) -> None:
    """Registers the library of an emitted translation unit under its `source_key`."""
    _tables.programs.add(key, library)


def find_prebuilt_program(source: str) -> Path | None:
    """Returns the registered library of an emitted translation unit, or None."""
    return _tables.programs.find(source_key(source)) if len(_tables.programs) else None


def register_prebuilt_kernels(symbols: Iterable[str], library: Path) -> None:
    """Registers the library of kernels under their symbols."""
    for symbol in symbols:
        _tables.kernels.add(symbol, library)


def find_prebuilt_kernel(symbol: str) -> Path | None:
    """Returns the registered library of a kernel, or None."""
    return _tables.kernels.find(symbol)


def register_interim_kernels(symbols: Iterable[str], library: Path) -> None:
    """Registers the library of kernels that are launched without the bridge under their symbols."""
    for symbol in symbols:
        _tables.interim_kernels.add(symbol, library)


def find_interim_kernel(symbol: str) -> Path | None:
    """Returns the registered library of a kernel that is launched without the bridge, or None."""
    return _tables.interim_kernels.find(symbol)


def register_prebuilt_bridge(folder: Path) -> None:
    """Registers the folder of a built bridge, for a process that has loaded none."""
    _tables.bridge = _tables.bridge or folder


def find_prebuilt_bridge() -> Path | None:
    """Returns the folder of the first registered bridge, or None."""
    return _tables.bridge
