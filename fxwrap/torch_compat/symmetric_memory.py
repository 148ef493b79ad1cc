"""Symmetric memory: the groups that have it, and the operators that fuse collectives with matmuls."""

from __future__ import annotations

import sys

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


def has_symmetric_memory(group_name: str) -> bool:
    """Returns whether symmetric memory is enabled for a process group.

    Why: `torch.distributed._symmetric_memory.enable_symm_mem_for_group` is the only way to enable it; the query is
    private too.
    """
    module = sys.modules.get("torch.distributed._symmetric_memory")
    return module is not None and bool(module.is_symm_mem_enabled_for_group(group_name))
