"""The compile cache: one file per compile in the cache folder, safe for concurrent processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fxwrap.compile_cache.entry import CachedCompile, entry_content, read_entry
from fxwrap.compile_cache.graph_serializer import NotCacheable
from fxwrap.compile_cache.key import CompileRequest, Key, make_key
from fxwrap.converters.emitted_program import EmittedProgram
from fxwrap.errors import ArtifactError, FxwrapError
from fxwrap.events import CacheBypassed, CacheEntryUnusable, CacheHit, CacheMiss, CacheStored, NotCached
from fxwrap.garbage_collection import gc_paused
from fxwrap.lowering import NodeCoverage
from fxwrap.memory_planning import MemoryPlan
from fxwrap.runtime.cache_eviction import evict_cache_when_due
from fxwrap.runtime.cache_folder import cache_folders, mark_used, open_cache_file, write_cache_file
from fxwrap.wrapper_ir import Program

log = logging.getLogger("fxwrap.cache")

CACHE_ENV = "FXWRAP_COMPILE_CACHE"
"""The environment variable that disables the cache when it is 0."""

FOLDER = "compiled"


def is_enabled() -> bool:
    """Whether the environment enables the cache."""
    return os.environ.get(CACHE_ENV, "1") != "0"


@dataclass(frozen=True)
class CacheSlot:
    """The cache entry of one compile, which may not exist yet.

    Fields: `inodes` are those of the entry's files when the slot was created.
    """

    request: CompileRequest
    key: Key
    inodes: tuple[int | None, ...]

    @property
    def _file(self) -> str:
        return _entry_file(self.key.digest)

    def is_rewritten(self) -> bool:
        """Whether the entry was written since the slot was created."""
        return any(inode is not None and inode not in self.inodes for inode in _inodes(self.key.digest))

    def load(self) -> CachedCompile | None:
        """Returns the cached compile; None, with a log message, where it is missing or damaged."""
        events, start = self.request.events, time.perf_counter()
        for folder in cache_folders():
            path = folder / self._file
            file = open_cache_file(path)
            if file is None:
                continue
            try:
                with gc_paused():
                    graph = self.key.graph
                    cached = read_entry(path, file, self.key.digest, graph.constants, list(graph.devices))
            except (ArtifactError, OSError) as error:
                events.record(CacheEntryUnusable(str(error)))
                continue
            mark_used(path)
            events.record(CacheHit(self.key.digest, time.perf_counter() - start))
            return cached
        events.record(CacheMiss(self.key.digest))
        return None

    def store(
        self, program: Program, emitted: EmittedProgram, coverage: Sequence[NodeCoverage], plan: MemoryPlan | None
    ) -> None:
        """Writes a compile into the cache, or logs why it cannot be cached."""
        events = self.request.events
        if self.key.graph.symbols_text() != self.key.symbols:
            events.record(NotCached("compiling it changed its symbols in the ShapeEnv"))
            return
        cached, emitter = CachedCompile(program, tuple(coverage), plan), self.request.options.emitter
        try:
            graph = self.key.graph
            content = entry_content(self.key.digest, cached, emitter, emitted, graph.constants, list(graph.devices))
            write_cache_file(cache_folders()[-1], self._file, content)
        except (NotCacheable, FxwrapError, OSError) as error:
            events.record(NotCached(str(error)))
            return
        events.record(CacheStored(self.key.digest))
        evict_cache_when_due()

    def read(self) -> bytes | None:
        """Returns the content of the entry, unchecked; None where there is none."""
        for folder in cache_folders():
            file = open_cache_file(folder / self._file)
            if file is not None:
                with file:
                    return file.read()
        return None

    def write(self, content: bytes) -> bool:
        """Writes an entry that another process made, which `load` checks; returns whether it could be written."""
        try:
            write_cache_file(cache_folders()[-1], self._file, content)
        except (FxwrapError, OSError) as error:
            self.request.events.record(NotCached(str(error)))
            return False
        return True


def find_slot(request: CompileRequest) -> CacheSlot | None:
    """Returns the slot of a compile; None where the cache is disabled or the compile cannot be cached."""
    if not request.options.compile_cache or request.options.debug is not None or not is_enabled():
        return None
    start = time.perf_counter()
    try:
        key = make_key(request)
    except NotCacheable as reason:
        request.events.record(CacheBypassed(str(reason)))
        return None
    log.debug("the key of '%s' took %.3f s", request.name, time.perf_counter() - start)
    return CacheSlot(request, key, _inodes(key.digest))


def _entry_file(digest: str) -> str:
    """Returns the file of an entry within a cache folder."""
    return f"{FOLDER}/{digest}.fxw"


def _inodes(digest: str) -> tuple[int | None, ...]:
    """Returns the inodes of an entry in the cache folders: each write is a new file."""
    inodes: list[int | None] = []
    for folder in cache_folders():
        try:
            inodes.append(os.stat(folder / _entry_file(digest)).st_ino)
        except OSError:
            inodes.append(None)
    return tuple(inodes)
