"""Native libraries that an installed wheel carries, one folder for each set of versions that they were compiled for.

A folder is an entry of the cache: its name ends in the hash of everything that the libraries depend on, and its table
has their sizes and hashes. An intact entry is copied to the cache folder, where all other code looks for it.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from fxwrap.errors import NativeBuildError
from fxwrap.runtime import cache_folder

log = logging.getLogger("fxwrap.native")

# The only header with the configuration of torch's build that the bridge's sources include.
_BUILD_CONFIGURATION = "include/torch/headeronly/macros/cmake_macros.h"


@dataclass
class _Installation:
    """The folder of this installation's entries, which a source checkout lacks.

    It has the names of entries that were reported as missing, damaged or not loadable: each is reported once a
    process.
    """

    folder: Path = Path(__file__).parent / "compiled"
    unusable: set[str] = field(default_factory=set)


_installation = _Installation()


@contextmanager
def installed_libraries(folder: Path) -> Iterator[None]:
    """Runs as an installation with the libraries of this folder, and restores the state afterwards: for tests."""
    before = dict(vars(_installation))
    vars(_installation).update(vars(_Installation(folder)))
    try:
        yield
    finally:
        vars(_installation).update(before)


@cache
def torch_identity() -> tuple[str, ...]:
    """Identifies the binary interface of the installed torch and Python for libraries of a wheel.

    Builds of one release of torch for a CPU and for GPUs are equal here, as their headers are.
    """
    header = Path(torch.__file__).parent / _BUILD_CONFIGURATION
    return (
        torch.__version__.partition("+")[0],
        str(torch.version.git_version),
        str(torch.compiled_with_cxx11_abi()),
        header.read_text(encoding="utf-8") if header.is_file() else "",
        str(sysconfig.get_config_var("SOABI")),
    )


def find_packaged_entry(name: str, libraries: Iterable[str]) -> Path | None:
    """Returns the entry of the cache folder with libraries of this installation; None where it has none.

    `libraries` are loaded once, in this order, when they are copied. If they are missing or damaged, or the system
    cannot load them, one line of the log says so and None is returned: the caller compiles them. Raises CacheError
    where no cache folder can be written.
    """
    if name in _installation.unusable or not _installation.folder.is_dir():
        return None
    if not (_installation.folder / name).is_dir():
        _report(name, f"none of them is for torch {torch.__version__} with this Python and machine")
        return None
    entry = cache_folder.find_entry(name)
    if entry is not None:
        return entry
    files = cache_folder.read_entry_files(_installation.folder / name)
    if not files:
        _report(name, "they are damaged: their hashes are not those of the wheel; install it again")
        return None

    def copy(folder: Path) -> None:
        for file, content in files.items():
            (folder / file).write_bytes(content)
        try:
            for library in libraries:
                ctypes.CDLL(str(folder / library))
        except OSError as error:
            raise NativeBuildError(f"they cannot be loaded: {error}") from None

    try:
        return cache_folder.find_or_build_entry(name, copy)
    except NativeBuildError as error:
        _report(name, str(error))
        return None


def _report(name: str, reason: str) -> None:
    _installation.unusable.add(name)
    log.warning("the native libraries of this installation are not used, and are compiled now: %s", reason)
