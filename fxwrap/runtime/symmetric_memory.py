"""Operators over symmetric memory that torch does not have."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from fxwrap.runtime.tensors import reinterpret
from fxwrap.torch_compat import allocate_symmetric, pipelined_all_to_all, storage_use_counts

_BUFFERS: dict[tuple[str, torch.device, int], list[tuple[torch.Tensor, tuple[int, int]]]] = {}
"""Symmetric buffers by group, device and bytes, each with the counts of its storage while nobody uses it.

They live as long as the process: other ranks map them, and captured CUDA graphs have their addresses."""

_LEAST_BYTES = 4096


def allocate(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, group: str
) -> torch.Tensor:
    """Returns uninitialised memory that the other ranks of a group can access; on CPUs, which have none, any memory.

    All ranks allocate in one order, as they call collectives, so that their buffers belong together: a new buffer is
    exchanged with the other ranks. A released one is used again.
    """
    if device.type != "cuda":
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    count = 1 + sum([(size - 1) * step for size, step in zip(sizes, strides, strict=True)]) if prod(sizes) else 0
    size = max(_LEAST_BYTES, 1 << max(count * dtype.itemsize - 1, 0).bit_length())
    buffers = _BUFFERS.setdefault((group, device, size), [])
    for buffer, unused in buffers:
        if storage_use_counts(buffer.untyped_storage()) == unused:
            return reinterpret(buffer, sizes, strides, dtype)
    buffer = allocate_symmetric(size, torch.uint8, device, group)
    buffers.append((buffer, storage_use_counts(buffer.untyped_storage())))
    return reinterpret(buffer, sizes, strides, dtype)


_library = torch.library.Library("fxwrap_runtime", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "matmuls_reduce_scatter(Tensor[] lefts, Tensor[] rights, str reduction, int dimension, int ranks, str group)"
    " -> Tensor"
)


@torch.library.impl(_library, "matmuls_reduce_scatter", "CUDA")
def _matmuls_reduce_scatter(
    lefts: list[torch.Tensor], rights: list[torch.Tensor], reduction: str, dimension: int, ranks: int, group: str
) -> torch.Tensor:
    """Returns this rank's part of the sum over all ranks, or the mean, of the sum of matmuls.

    Left operands are contiguous and may have several leading dimensions, one of which is scattered: no part is copied.
    The part of one rank is computed while those of others are transferred, as `symm_mem.fused_matmul_reduce_scatter`
    does for the rows of one matmul.
    """
    sizes = [*lefts[0].shape[:-1], rights[0].shape[1]]
    sizes[dimension] //= ranks
    batches, rows = prod(sizes[:dimension]), prod(sizes[dimension:-1])
    parts = [left.view(batches, ranks, rows, left.shape[-1]) for left in lefts]
    batched = [right.expand(batches, *right.shape) for right in rights]
    partials = lefts[0].new_empty(ranks * batches, rows, sizes[-1])

    def produce(rank: int, out: torch.Tensor) -> None:
        torch.bmm(parts[0][:, rank], batched[0], out=out)
        for part, right in zip(parts[1:], batched[1:], strict=True):
            out.baddbmm_(part[:, rank], right)

    pipelined_all_to_all(produce, partials, group)
    by_rank = partials.view(ranks, *sizes)
    return by_rank.sum(0) if reduction == "sum" else by_rank.mean(0)


@torch.library.impl(_library, "matmuls_reduce_scatter", "CPU")
def _by_collective(
    lefts: list[torch.Tensor], rights: list[torch.Tensor], reduction: str, dimension: int, ranks: int, group: str
) -> torch.Tensor:
    """The definition of the operator, by a collective."""
    total = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total = total + left @ right
    operators = torch.ops._c10d_functional
    rows = torch.cat(total.chunk(ranks, dimension))
    result: torch.Tensor = operators.wait_tensor(operators.reduce_scatter_tensor(rows, reduction, ranks, group))
    return result


@torch.library.register_fake("fxwrap_runtime::matmuls_reduce_scatter")  # type: ignore[untyped-decorator]
def _(
    lefts: list[torch.Tensor], rights: list[torch.Tensor], reduction: str, dimension: int, ranks: int, group: str
) -> torch.Tensor:
    sizes = [*lefts[0].shape[:-1], rights[0].shape[1]]
    sizes[dimension] = sizes[dimension] // ranks
    return lefts[0].new_empty(sizes)


_library.define("one_shot_all_reduce(Tensor x, str group) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "one_shot_all_reduce", "CUDA")
def _one_shot_all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Returns the sum over all ranks: each rank reads the others' tensors from symmetric memory, in one kernel.

    The kernel returns when all ranks have read the buffer, so the next call may use it.
    """
    buffer = allocate(x.shape, x.stride(), x.dtype, x.device, group)
    result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group)
    return result


@torch.library.impl(_library, "one_shot_all_reduce", "CPU")
def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The definition of the operator, by a collective."""
    operators = torch.ops._c10d_functional
    result: torch.Tensor = operators.wait_tensor(operators.all_reduce(x, "sum", group))
    return result


@torch.library.register_fake("fxwrap_runtime::one_shot_all_reduce")  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)
