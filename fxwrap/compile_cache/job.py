"""Compiles shared by the ranks of a job: the first rank that needs a compile makes it, the others receive its entry.

Ranks exchange entries of the compile cache through the store of the default process group, without collectives, so
ranks may compile different graphs in any order.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch

from fxwrap.artifact.environment import environment_text
from fxwrap.compile_cache.cache import CacheSlot
from fxwrap.compile_cache.key import sources_hash_of_process
from fxwrap.errors import OptionError, RankError
from fxwrap.torch_compat import group_store

log = logging.getLogger("fxwrap.cache")

WAIT_ENV = "FXWRAP_RANK_WAIT"
"""The environment variable with the seconds that a rank waits for the compile of another one; 0 for none."""

DEFAULT_WAIT_S = 300.0

_NO_ENTRY = b"-"
"""The entry of a compile that failed or cannot be cached."""


@dataclass(frozen=True)
class JobCompile:
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
        """Claims the compile, or waits for the rank that did; returns whether its entry is in the cache folder now.

        Raises RankError where ranks compile the same graph with other options, or with other versions of packages.
        """
        self._check_agreement()
        name, digest = self.slot.request.name, self.slot.key.digest
        if self.store.add(f"{digest}/claims", 1) == 1:
            return False
        try:
            self.store.wait([f"{digest}/entry"], timedelta(seconds=self.wait_s))
            content = self.store.get(f"{digest}/entry")
        except RuntimeError as error:  # the time is over, or the store's host is gone
            log.warning("'%s' is compiled by rank %d itself after %.0f s: %s", name, self.rank, self.wait_s, error)
            return False
        if content == _NO_ENTRY:
            log.info("'%s' has no entry that ranks could share", name)
            return False
        log.info("'%s' was compiled by another rank: %s", name, digest)
        return self.slot.write(content)

    def publish(self) -> None:
        """Publishes the entry that the cache folder has now for the ranks that wait, or that there is none."""
        content = self.slot.read()
        self.store.set(f"{self.slot.key.digest}/entry", _NO_ENTRY if content is None else content)

    def _check_agreement(self) -> None:
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


def find_job_compile(slot: CacheSlot) -> JobCompile | None:
    """Returns the exchange of a compile with the other ranks; None for one process, a fake group, and by setting."""
    wait_s = _wait_seconds()
    if not wait_s or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if torch.distributed.get_world_size() == 1:
        return None
    store = group_store(torch.distributed.group.WORLD, "fxwrap/compiles")
    return None if store is None else JobCompile(slot, store, torch.distributed.get_rank(), wait_s)


def _wait_seconds() -> float:
    text = os.environ.get(WAIT_ENV, "")
    try:
        return float(text) if text else DEFAULT_WAIT_S
    except ValueError:
        raise OptionError(f"{WAIT_ENV}={text!r} is no number of seconds") from None
