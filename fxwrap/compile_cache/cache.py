"""The compile cache: one file a compile, in the cache folder, which many processes may read and write at once."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxwrap.cache_limit import limit_cache, mark_used
from fxwrap.compile_cache.entry import Cached, read_entry, write_entry
from fxwrap.compile_cache.graph_text import NotCacheable
from fxwrap.compile_cache.key import Key, Request, make_key
from fxwrap.converters.emitted import Emitted
from fxwrap.errors import ArtifactError, FxwrapError
from fxwrap.lowering import Outcome
from fxwrap.memory_planning import MemoryPlan
from fxwrap.runtime.native import cache_folder
from fxwrap.wrapper_ir import Program

log = logging.getLogger("fxwrap.cache")

SWITCH = "FXWRAP_COMPILE_CACHE"
"""The environment variable that turns the cache off where it is 0."""

FOLDER = "compiled"

_CHECK_EVERY = 32
"""Entries that a process writes between two looks at how large the cache folder is."""


def is_on() -> bool:
    """Returns whether the environment leaves the cache on."""
    return os.environ.get(SWITCH, "1") != "0"


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keeps Python from looking for garbage: with torch's tracing loaded that takes longer than an entry does."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class Lookup:
    """The place of one compile in the cache."""

    request: Request
    key: Key

    @property
    def path(self) -> Path:
        """The entry's file."""
        return cache_folder() / FOLDER / f"{self.key.digest}.fxw"

    def take(self) -> Cached | None:
        """Returns what the cache has; None, with a line in the log, where that is nothing or nothing whole."""
        path = self.path
        if not path.is_file():
            log.info("'%s' is not in the cache: %s", self.request.name, self.key.digest)
            return None
        start = time.perf_counter()
        try:
            with _without_collection():
                found = read_entry(path, self.key.digest, self.key.graph.tensors)
        except (ArtifactError, OSError) as error:
            log.warning("an entry of the cache is of no use, and '%s' is compiled again: %s", self.request.name, error)
            return None
        mark_used(path)
        seconds = time.perf_counter() - start
        log.info("'%s' was found in the cache in %.3f s: %s", self.request.name, seconds, self.key.digest)
        return found

    def keep(self, program: Program, emitted: Emitted, coverage: Sequence[Outcome], plan: MemoryPlan | None) -> None:
        """Writes what was compiled into the cache; the log says why where that cannot be."""
        name = self.request.name
        if self.key.graph.symbols_text() != self.key.symbols:
            log.info("'%s' is not kept in the cache: compiling it has learned more of its sizes", name)
            return
        found, emitter = Cached(program, tuple(coverage), plan), self.request.options.emitter
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_entry(self.path, self.key.digest, found, emitter, emitted, self.key.graph.tensors)
        except (NotCacheable, FxwrapError, OSError) as error:
            log.info("'%s' is not kept in the cache: %s", name, error)
            return
        log.info("'%s' is kept in the cache: %s", name, self.key.digest)
        _WRITTEN.count()


class _Written:
    """Counts the entries that this process has written, and now and then has the folder's size limited."""

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        if self.number % _CHECK_EVERY == 0:
            limit_cache()
        self.number += 1


_WRITTEN = _Written()


def look_up(request: Request) -> Lookup | None:
    """Returns the place of a compile in the cache; None where the cache is off, or the compile is not to be cached."""
    if not request.options.compile_cache or not is_on():
        return None
    start = time.perf_counter()
    try:
        found = Lookup(request, make_key(request))
    except NotCacheable as reason:
        log.info("'%s' is not looked for in the cache: %s", request.name, reason)
        return None
    log.debug("the key of '%s' took %.3f s", request.name, time.perf_counter() - start)
    return found
