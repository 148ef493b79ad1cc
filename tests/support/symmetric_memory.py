"""The fused operators over symmetric memory on CPUs: torch's own definition of them by collectives and matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import _symmetric_memory


@contextmanager
def operators_on_cpu() -> Iterator[None]:
    """Lets the operators run on CPUs, where torch has none, until the end of a `with` block."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"), "CPU")
    library.impl("one_shot_all_reduce_copy", _one_shot_all_reduce_copy, "CPU")
    yield
    library._destroy()


def _one_shot_all_reduce_copy(buffer: torch.Tensor, x: torch.Tensor, reduction: str, group: str) -> torch.Tensor:
    operators = torch.ops._c10d_functional
    result: torch.Tensor = operators.wait_tensor(operators.all_reduce(buffer.copy_(x), reduction, group))
    return result


def supported(_device: torch.device, _group: str) -> str:
    """Declines nothing."""
    return ""
