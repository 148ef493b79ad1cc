"""The size limit of the cache folder: least recently used entries are evicted."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fxwrap.errors import OptionError
from fxwrap.runtime.cache_folder import BUILDING, UNFINISHED_ENTRIES, cache_folders, read_cache_file, remove_path

log = logging.getLogger("fxwrap.cache")

LIMIT_ENV = "FXWRAP_CACHE_LIMIT"
"""The environment variable with the limit in MiB; 0 for no limit."""

DEFAULT_LIMIT = 4096
"""The default limit in MiB."""

EVICTABLE_FOLDERS = ("compiled", "loaded", "programs", "python", "units")
"""Folders whose files or folders can be evicted one by one: each is rebuilt on demand."""

MIN_AGE_SECONDS = 600.0
"""Seconds after its last use in which an entry is not evicted: another process may be loading it."""

CHECK_SECONDS = 600.0
"""Seconds between checks of a folder's size by the processes that write to it: reading a large folder takes seconds."""

_CHECKED = "size_checked"
"""A file that is touched by each check."""

STALE_TEMPORARY_SECONDS = 3600.0
"""Age in seconds at which an unfinished temporary is considered abandoned."""

_STALE_LOCK_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True)
class _CacheItem:
    path: Path
    used: float
    size: int


def cache_limit() -> int:
    """Returns the limit in bytes; 0 for no limit. Raises OptionError for an invalid environment variable."""
    text = os.environ.get(LIMIT_ENV, "")
    if not text:
        return DEFAULT_LIMIT << 20
    if not text.isdecimal():
        raise OptionError(f"{LIMIT_ENV} must be a number of MiB, or 0 for no limit, not {text!r}")
    return int(text) << 20


def evict_cache_when_due() -> None:
    """Calls `evict_cache` for the folders whose size no process has checked in the last ten minutes."""
    now = time.time()
    for folder in cache_folders():
        marker = folder / _CHECKED
        with suppress(OSError):
            if 0 <= now - marker.stat().st_mtime < CHECK_SECONDS:
                continue
        with suppress(OSError):
            marker.touch()  # before the check: other processes need not check too
            _evict(folder, cache_limit(), now)


def evict_cache() -> int:
    """Deletes least recently used entries until the cache folder is within its limit; returns the deleted bytes.

    Entries used in the last ten minutes remain. Libraries that other processes have loaded remain valid for them.
    Entries that cannot be deleted are skipped.
    """
    return sum([_evict(folder, cache_limit(), time.time()) for folder in cache_folders()])


def _evict(folder: Path, limit: int, now: float) -> int:
    for path in _stale_paths(folder, now):
        _delete(path)
    items = sorted([item for kind in EVICTABLE_FOLDERS for item in _items(folder / kind)], key=lambda item: item.used)
    excess, freed = sum([item.size for item in items]) - limit, 0
    if not limit or excess <= 0:
        return 0
    for item in items:
        if freed >= excess or now - item.used < MIN_AGE_SECONDS:
            break
        _delete(item.path)
        freed += item.size
    _drop_stale_index_files(folder)
    if freed:
        log.info("the cache folder exceeded its limit by %d MiB: %d MiB deleted", excess >> 20, freed >> 20)
    return freed


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _items(folder: Path) -> Iterator[_CacheItem]:
    for entry in _entries(folder):
        with suppress(OSError):  # another process may delete it
            status = entry.stat(follow_symlinks=False)
            size = status.st_size
            if entry.is_dir(follow_symlinks=False):
                size = sum([file.stat(follow_symlinks=False).st_size for file in _entries(Path(entry.path))])
            yield _CacheItem(Path(entry.path), status.st_mtime, size)


def _stale_paths(folder: Path, now: float) -> Iterator[Path]:
    for kind in ("", *EVICTABLE_FOLDERS, "kernels", "tuning", UNFINISHED_ENTRIES):
        for entry in _entries(folder / kind):
            if entry.name.startswith(BUILDING) or entry.name.endswith(".tmp"):
                with suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > STALE_TEMPORARY_SECONDS:
                        yield Path(entry.path)
    for entry in _entries(folder / "locks"):
        with suppress(OSError):
            if now - entry.stat(follow_symlinks=False).st_mtime > _STALE_LOCK_SECONDS:
                yield Path(entry.path)


def _drop_stale_index_files(folder: Path) -> None:
    """Deletes index files of kernels whose library was deleted."""
    known: dict[str, bool] = {}
    for entry in _entries(folder / "kernels"):
        with suppress(OSError):
            library = (read_cache_file(Path(entry.path)) or b"").decode(errors="replace")
            if library not in known:
                known[library] = (folder / library).is_file()
            if not known[library]:
                _delete(Path(entry.path))


def _delete(path: Path) -> None:
    with suppress(OSError):
        remove_path(path)
