"""Captured graphs with collectives are freed before their process groups: NCCL's communicators wait for the graphs."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

from fxwrap.torch_compat import call_before_groups_are_destroyed


class CollectiveGraphs(Protocol):
    """An owner of captured graphs, some of which contain collectives."""

    def free_collectives(self) -> None:
        """Frees the graphs that contain collectives."""
        ...


_owners: weakref.WeakSet[CollectiveGraphs] = weakref.WeakSet()


def free_before_groups(owner: CollectiveGraphs) -> None:
    """Frees an owner's captured collectives before process groups are destroyed, and before the process exits."""
    _owners.add(owner)
    call_before_groups_are_destroyed(_free)


@atexit.register
def _free() -> None:
    for owner in tuple(_owners):
        owner.free_collectives()
    _owners.clear()
