"""Compiles shared by processes: the first one that needs a compile makes it, the others receive its cache entry.

Processes with one cache folder wait for a lock in it. Ranks of a job exchange entries through the store of the default
process group too, without collectives, so ranks may compile different graphs in any order. Of the ranks with one cache
folder, only the one that holds its lock asks the store: a rank that waits there holds no lock that the compiling rank
could need.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import IO, Any

import torch

from fxwrap.artifact.environment import environment_text, sources_hash_of_process
from fxwrap.compile_cache.cache import CacheSlot
from fxwrap.errors import OptionError, RankError
from fxwrap.events import CacheReceived, CacheShared, WaitTimedOut
from fxwrap.runtime.cache_folder import cache_folders, file_lock
from fxwrap.torch_compat import group_store

log = logging.getLogger("fxwrap.cache")

WAIT_ENV = "FXWRAP_COMPILE_WAIT"
"""The environment variable with the seconds that a process waits for the compile of another one; 0 for none."""

DEFAULT_WAIT_S = 300.0

_NO_ENTRY = b"-"
"""The entry of a compile that failed or cannot be cached; also the content of its lock file."""


def check_ranks_compile_alike(slot: CacheSlot) -> None:
    """Raises RankError where ranks of a job compile a graph with other options, or with other versions of packages."""
    exchange = _find_exchange(slot, _wait_seconds())
    if exchange is not None:
        exchange.check_agreement()


@contextmanager
def shared_compile(slot: CacheSlot) -> Iterator[bool]:
    """Claims a compile that is not in the cache, or waits for the process that did; the body then compiles or loads.

    Yields whether another process has written an entry into the cache folder since the slot was created. Processes that
    waited `FXWRAP_COMPILE_WAIT` seconds, or for a compile without an entry, compile themselves.
    """
    wait_s = _wait_seconds()
    exchange = _find_exchange(slot, wait_s)
    with ExitStack() as stack:
        lock = _claim(stack, slot, wait_s) if wait_s else None
        if slot.is_rewritten():
            stack.close()  # entries are loaded at the same time
            yield True
            return
        if lock is not None and lock.read(1) == _NO_ENTRY:
            stack.close()  # processes need not compile one after another
            lock = None
        if exchange is not None and exchange.receive():
            stack.close()
            yield True
            return
        try:
            yield False
        finally:
            content = slot.read() if slot.is_rewritten() else None
            if exchange is not None:
                exchange.publish(content)
            if lock is not None and content is None:
                with suppress(OSError):  # a full disk; processes then compile one after another
                    lock.write(_NO_ENTRY)


def _claim(stack: ExitStack, slot: CacheSlot, wait_s: float) -> IO[bytes] | None:
    """Holds the lock of a compile until the stack ends; returns None where it cannot be had."""
    name = slot.request.name
    try:
        lock = stack.enter_context(file_lock(cache_folders()[-1], slot.key.digest, wait_s))
    except OSError as error:
        log.info("the compile of '%s' has no lock: %s", name, error)
        return None
    if lock is None:
        slot.request.events.record(WaitTimedOut(f"process {os.getpid()}", wait_s))
    return lock


@dataclass(frozen=True)
class _Exchange:
    """One compile among the ranks of a job.

    Fields:
        slot: its slot in the compile cache.
        store: the job's store.
        rank: this rank.
        wait_s: the seconds that this rank waits for another one's compile.
    """

    slot: CacheSlot
    store: Any
    rank: int
    wait_s: float

    def receive(self) -> bool:
        """Claims the compile, or waits for the rank that did; returns whether its entry is in the cache folder now."""
        name, digest = self.slot.request.name, self.slot.key.digest
        if self.store.add(f"{digest}/claims", 1) == 1:
            return False
        try:
            self.store.wait([f"{digest}/entry"], timedelta(seconds=self.wait_s))
            content = self.store.get(f"{digest}/entry")
        except RuntimeError as error:  # the time is over, or the store's host is gone
            self.slot.request.events.record(WaitTimedOut(f"rank {self.rank}", self.wait_s, str(error)))
            return False
        if content == _NO_ENTRY:
            log.info("'%s' has no entry that ranks could share", name)
            return False
        if not self.slot.write(content):
            return False
        self.slot.request.events.record(CacheReceived(digest))
        return True

    def publish(self, content: bytes | None) -> None:
        """Sends an entry to the ranks that wait, or that there is none."""
        self.store.set(f"{self.slot.key.digest}/entry", _NO_ENTRY if content is None else content)
        if content is not None:
            self.slot.request.events.record(CacheShared(self.slot.key.digest))

    def check_agreement(self) -> None:
        """Compares versions and options with those of the rank that came first."""
        versions = f"{environment_text()}\nfxwrap_sources={sources_hash_of_process()}"
        self._agree("versions", versions, "versions", "Install the same packages on all ranks")
        graph = hashlib.sha256(self.slot.key.graph.text().encode("utf-8", "surrogatepass")).hexdigest()
        # Ranks may compile a graph several times: the n-th compile of a rank belongs to the n-th one of the others.
        number = self.store.add(f"rank {self.rank}/{graph}", 1)
        what = f"'{self.slot.request.name}' with options"
        options = "\n".join(self.slot.request.options.text().split(" "))
        self._agree(f"options/{graph}/{number}", options, what, "Compile with the same options on all ranks")

    def _agree(self, key: str, text: str, what: str, remedy: str) -> None:
        own = f"{self.rank}\n{text}"
        first = self.store.compare_set(key, "", own).decode()
        rank, _, expected = first.partition("\n")
        if expected != text:
            pairs = zip_longest(expected.split("\n"), text.split("\n"), fillvalue="the default")
            differences = [(a or "the defaults", b or "the defaults") for a, b in pairs if a != b]
            shown = "; ".join([f"{a} on rank {rank} and {b} on rank {self.rank}" for a, b in differences])
            raise RankError(f"ranks compile {what} that differ: {shown}. {remedy}")


def _find_exchange(slot: CacheSlot, wait_s: float) -> _Exchange | None:
    """Returns the exchange of a compile with the other ranks; None for one process, a fake group, and by setting."""
    if not wait_s or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if torch.distributed.get_world_size() == 1:
        return None
    store = group_store(torch.distributed.group.WORLD, "fxwrap/compiles")
    return None if store is None else _Exchange(slot, store, torch.distributed.get_rank(), wait_s)


def _wait_seconds() -> float:
    text = os.environ.get(WAIT_ENV, "")
    try:
        return float(text) if text else DEFAULT_WAIT_S
    except ValueError:
        raise OptionError(f"{WAIT_ENV}={text!r} is no number of seconds") from None
