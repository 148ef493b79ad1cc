"""The size of the cache folder: what was used least recently goes where there is more than the limit."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fxwrap.errors import OptionError
from fxwrap.runtime.native import cache_folder

log = logging.getLogger("fxwrap.cache")

LIMIT_VARIABLE = "FXWRAP_CACHE_LIMIT"
"""The environment variable with the limit in MiB; 0 for none."""

DEFAULT_LIMIT = 4096
"""MiB that the cache folder may hold."""

KINDS = ("compiled", "loaded", "programs", "python", "units")
"""The folders whose items, files or folders, may go one by one: each is made again when it is wanted."""

RECENT = 600.0
"""Seconds for which what was used stays, whatever the limit: another process may be about to load it."""

ABANDONED = 3600.0
"""Seconds after which what a process began to write, and did not end, is taken to have been left behind."""

_OLD_LOCK = 7 * 24 * 3600.0


@dataclass(frozen=True)
class _Item:
    path: Path
    used: float
    size: int


def cache_limit() -> int:
    """Returns the bytes that the cache folder may hold; 0 for no limit. Raises OptionError for what is no number."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT << 20
    if not text.isdecimal():
        raise OptionError(f"{LIMIT_VARIABLE} is a number of MiB, or 0 for no limit, not {text!r}")
    return int(text) << 20


def mark_used(path: Path) -> None:
    """Notes that something in the cache folder was used now; a folder that cannot be written to is left as it is."""
    with suppress(OSError):
        os.utime(path)


def limit_cache() -> int:
    """Deletes what was used least recently until the cache folder is within its limit; returns the bytes that went.

    What was used in the last ten minutes stays. What other processes have loaded stays usable for them. Nothing is
    raised for what cannot be deleted.
    """
    limit, now = cache_limit(), time.time()
    folder = cache_folder()
    for path in _abandoned(folder, now):
        _delete(path)
    items = sorted([item for kind in KINDS for item in _items(folder / kind)], key=lambda item: item.used)
    excess, freed = sum([item.size for item in items]) - limit, 0
    if not limit or excess <= 0:
        return 0
    for item in items:
        if freed >= excess or now - item.used < RECENT:
            break
        _delete(item.path)
        freed += item.size
    _drop_notes(folder)
    if freed:
        log.info("the cache folder was %d MiB over its limit: %d MiB deleted", excess >> 20, freed >> 20)
    return freed


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as found:
        yield from found


def _items(folder: Path) -> Iterator[_Item]:
    for entry in _entries(folder):
        with suppress(OSError):  # another process may delete it now
            facts = entry.stat(follow_symlinks=False)
            size = facts.st_size
            if entry.is_dir(follow_symlinks=False):
                size = sum([file.stat(follow_symlinks=False).st_size for file in _entries(Path(entry.path))])
            yield _Item(Path(entry.path), facts.st_mtime, size)


def _abandoned(folder: Path, now: float) -> Iterator[Path]:
    """Yields what processes that ended left half written, and locks that nobody has taken for long."""
    for kind in (*KINDS, "kernels", "tuning"):
        for entry in _entries(folder / kind):
            if entry.name.startswith("building-") or entry.name.endswith(".tmp"):
                with suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
                        yield Path(entry.path)
    for entry in _entries(folder / "locks"):
        with suppress(OSError):
            if now - entry.stat(follow_symlinks=False).st_mtime > _OLD_LOCK:
                yield Path(entry.path)


def _drop_notes(folder: Path) -> None:
    """Deletes the notes of kernels whose library is gone."""
    known: dict[str, bool] = {}
    for entry in _entries(folder / "kernels"):
        with suppress(OSError):
            library = Path(entry.path).read_text(encoding="utf-8")
            if library not in known:
                known[library] = (folder / library).is_file()
            if not known[library]:
                _delete(Path(entry.path))


def _delete(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            aside = path.with_name(f"building-{path.name}.{os.getpid()}")  # nobody may find half of it
            os.replace(path, aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            path.unlink()
