"""Process groups and their stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def all_gather_single(shard: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Returns the shards of all ranks of a group, concatenated along a dimension, as a functional collective.

    Why: its name is another since torch 2.15, where the former one warns.
    """
    collectives = functional_collectives()
    gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    whole: torch.Tensor = gather(shard, dim, group)
    return whole


def reduce_scatter_single(tensor: torch.Tensor, reduction: str, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Returns this rank's part, along a dimension, of the reduction over all ranks, as a functional collective.

    Why: its name is another since torch 2.15, where the former one warns.
    """
    collectives = functional_collectives()
    scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
    part: torch.Tensor = scatter(tensor, reduction, dim, group)
    return part


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


def is_nccl_group(name: str, device: torch.device) -> bool:
    """Whether the process group of a name communicates through NCCL on a device, without checks by a wrapper.

    Why: no public function returns the backend of one device.
    """
    group, nccl = process_group(name), getattr(torch.distributed, "ProcessGroupNCCL", None)
    if group is None or nccl is None:
        return False
    try:
        return isinstance(group._get_backend(device), nccl)
    except RuntimeError:  # there is none for the device
        return False


class _BeforeDestruction:
    """An entry in torch's list of communicators, which it finalises before it destroys process groups."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def finalize(self) -> None:
        """Calls the function."""
        self.callback()


def call_before_groups_are_destroyed(callback: Callable[[], None]) -> None:
    """Calls a function once before `destroy_process_group()` destroys the groups, where this version of torch can.

    Why: torch has no hook for it.
    """
    from torch.distributed import distributed_c10d

    communicators: list[Any] | None = getattr(distributed_c10d._world, "comms", None)
    if communicators is not None and not any(getattr(item, "callback", None) is callback for item in communicators):
        communicators.append(_BeforeDestruction(callback))


def group_store(group: ProcessGroup, prefix: str) -> Any:
    """Returns a store for the keys of a process group with a prefix; None for a fake group.

    Why: the store of a group that is not the default one has no public name.
    """
    from torch.distributed import distributed_c10d

    backend, store = distributed_c10d._world.pg_map.get(group, (None, None))
    return None if backend == "fake" or store is None else distributed_c10d.PrefixStore(prefix, store)


def start_coalesced(
    outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], reduction: str | None, group: Any
) -> None:
    """Starts one all_gather of several tensors into others, or with a reduction one reduce_scatter, in a group.

    `_c10d_functional.wait_tensor` waits for each of `outs`, whose storages must differ from those of other results in
    flight.
    Why: functional collectives have no such form, and the calls of process groups that they make, whose names torch
    changed in 2.13, and the table of works in flight are not public.
    """
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d

    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]
    if reduction is None:
        start = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
        work = start(list(outs), list(inputs))
    else:
        options = torch.distributed.ReduceScatterOptions()
        options.reduceOp = getattr(torch.distributed.ReduceOp, reduction.upper())
        start = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
        work = start(list(outs), list(inputs), options)
    for out in outs:
        _distributed_c10d._register_work(out, work)


def store_timeout(store: Any) -> timedelta:
    """Returns the time that a store waits for a key."""
    timeout: timedelta = store.timeout
    return timeout
