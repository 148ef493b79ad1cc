"""Process groups and their stores."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

ProcessGroup = Any
"""A process group. Builds of torch without distributed have no class for it."""


def functional_collectives() -> Any:
    """Returns the module of functional collectives, which graphs can contain.

    Why: it has no public name.
    """
    from torch.distributed import _functional_collectives

    return _functional_collectives


def process_group(name: str) -> ProcessGroup | None:
    """Returns the process group of a name, None where there is none; its collectives raise torch's error."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    # Why: functional collectives name groups, and no public function resolves a name.
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]
    except (RuntimeError, ValueError, LookupError):
        return None


def group_store(group: ProcessGroup, prefix: str) -> Any:
    """Returns a store for the keys of a process group with a prefix; None for a fake group.

    Why: the store of a group that is not the default one has no public name.
    """
    from torch.distributed import distributed_c10d

    backend, store = distributed_c10d._world.pg_map.get(group, (None, None))
    return None if backend == "fake" or store is None else distributed_c10d.PrefixStore(prefix, store)


def store_timeout(store: Any) -> timedelta:
    """Returns the time that a store waits for a key."""
    timeout: timedelta = store.timeout
    return timeout
