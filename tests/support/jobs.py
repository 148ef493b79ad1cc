"""Jobs in one process: of this process alone, or of several ranks whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def single_rank_job() -> Iterator[str]:
    """A job of this process alone, whose collectives run; yields the name of its group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_job(ranks: int) -> Iterator[None]:
    """A job of so many ranks, of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
