"""Native libraries that an installed wheel carries, one folder for each set of versions that they were compiled for.

A folder is an entry of the cache: its name ends in the hash of everything that the libraries depend on, and its table
has their sizes and hashes. An intact entry is copied to the cache folder, where all other code looks for it.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from fxwrap.errors import NativeBuildError
from fxwrap.runtime import cache_folder

log = logging.getLogger("fxwrap.native")

PACKAGED_FOLDER = Path(__file__).parent / "compiled"
"""The folder with the entries of a wheel; a source checkout has none."""

# The only header with the configuration of torch's build that the bridge's sources include.
_BUILD_CONFIGURATION = "include/torch/headeronly/macros/cmake_macros.h"


class _Unusable:
    """The entries of this installation that failed a check in this process: each is reported once."""

    names: set[str] = set()


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

    `libraries` are loaded once, in this order, when they are copied. Damaged ones, and those that the system cannot
    load, are reported in one line of the log, and None is returned: the caller compiles them. Raises CacheError where
    no cache folder can be written.
    """
    if name in _Unusable.names or not (PACKAGED_FOLDER / name).is_dir():
        return None
    entry = cache_folder.find_entry(name)
    if entry is not None:
        return entry
    files = cache_folder.read_entry_files(PACKAGED_FOLDER / name)
    if not files:
        return _report(name, "they are damaged: their hashes are not those of the wheel; install it again")

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
        return _report(name, str(error))


def _report(name: str, reason: str) -> None:
    _Unusable.names.add(name)
    log.warning("the native libraries of this installation are not used, and are compiled now: %s", reason)
