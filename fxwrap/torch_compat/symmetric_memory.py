"""Symmetric memory: the groups that have it, and the operators that fuse collectives with matmuls."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch


def load_symmetric_memory_operators() -> bool:
    """Defines the operators of `torch.ops.symm_mem`; returns whether this build of torch has them.

    Why: torch defines them where their private module is imported.
    """
    if not torch.distributed.is_available():
        return False
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError:
        return False
    return hasattr(torch.ops.symm_mem, "fused_all_gather_matmul")


def enable_symmetric_memory(group_name: str) -> None:
    """Lets a process group of this rank use symmetric memory; nothing is communicated.

    Why: it has no public name, and newer releases, which enable it when memory is first exchanged, warn of it. Without
    it, the query of `has_symmetric_memory` is false there too.
    """
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group_name)  # type: ignore[arg-type]


def has_symmetric_memory(group_name: str) -> bool:
    """Returns whether symmetric memory is enabled for a process group.

    Why: `torch.distributed._symmetric_memory.enable_symm_mem_for_group` is the only way to enable it; the query is
    private too.
    """
    module = sys.modules.get("torch.distributed._symmetric_memory")
    return module is not None and bool(module.is_symm_mem_enabled_for_group(group_name))


def pipelined_all_to_all(produce: Callable[[int, torch.Tensor], None], output: torch.Tensor, group_name: str) -> None:
    """Computes a part for each rank with `produce(rank, out)`, and writes those for this rank to the rows of `output`.

    Parts are transferred while others are computed, through the workspace of the group.
    Why: torch's operators for one matmul are made of it, and it has no public name.
    """
    from torch.distributed import _symmetric_memory

    _symmetric_memory._pipelined_produce_and_all2all(produce, output, group_name)  # type: ignore[arg-type]


def allocate_symmetric(count: int, dtype: torch.dtype, device: torch.device, group_name: str) -> torch.Tensor:
    """Allocates memory that the other ranks of a group can access; each of them must allocate as much at this point.

    Why: symmetric memory has no public name.
    """
    from torch.distributed import _symmetric_memory

    buffer = _symmetric_memory.empty(count, dtype=dtype, device=device)
    _symmetric_memory.rendezvous(buffer, group_name)  # type: ignore[arg-type]
    return buffer
