"""Memory: allocation, views without autograd, storage reference counts, CUDA pools and allocation profiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch._C._autograd import DeviceType

from fxwrap.torch_compat.tensors import storage_identity

# Why: emitted Python allocates and takes views dozens of times per call, for which the public functions cost two to
# three times as much. TorchInductor's wrappers use the same private functions.


def allocator(device: str) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """Returns the fastest function that allocates an uninitialised tensor on a device from sizes, strides and dtype."""
    kind = torch.device(device)
    # torch's function for CUDA allocates on the current device, which is the right one only where there is one
    only = kind.type == "cpu" or (kind.type == "cuda" and torch.cuda.device_count() == 1)
    fast: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind.type}", None)
    if only and fast is not None:
        return fast

    def allocate(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=kind)

    return allocate


def strided_view_fallback(
    base: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """Does the same as `strided_view` through public functions."""
    return base.data.as_strided(sizes, strides, base.storage_offset() + offset)


strided_view: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_reinterpret_tensor", strided_view_fallback
)
"""`strided_view(base, sizes, strides, offset=0)` returns a tensor on the same storage, `offset` elements after `base`.

It is not a view for autograd: it has its own version counter and no base. Sizes and strides are not checked."""


# Why: replayed functions return memory that they overwrite once it is no longer referenced. Only the reference count of
# the storage shows that, and no public function returns it, compares many addresses, or copies many tensors by one
# kernel. TorchInductor's CUDA graphs use the same functions.


def storage_use_counts(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Returns the reference counts of a storage and of its Python object."""
    return torch._C._storage_Use_Count(storage_identity(storage)), sys.getrefcount(storage)


def _same_addresses(tensors: list[torch.Tensor], addresses: list[int | None], positions: list[int]) -> bool:
    return all(tensors[position].data_ptr() == addresses[position] for position in positions)


same_addresses: Callable[[list[torch.Tensor], list[int | None], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _same_addresses
)
"""`same_addresses(tensors, addresses, positions)`: whether the tensors at these positions start at their addresses.

All three are lists; `addresses` has an item for each tensor, of which only those at `positions` are read."""

foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
"""`foreach_copy(destinations, sources)` copies a list of tensors by few kernels."""


def clear_cublas_workspaces() -> None:
    """Releases the workspaces of NVIDIA's libraries, which reallocate them when needed. It has no public name."""
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def end_allocate_to_pool(pool: tuple[int, int], device: torch.device) -> None:
    """Ends the allocation to a GPU's private pool after a failed capture: torch's `capture_end` raises before it."""
    with suppress(RuntimeError):  # the capture ended it already
        torch._C._cuda_endAllocateToPool(device.index, pool)


def is_caching_allocator_enabled() -> bool:
    """Whether torch's caching allocator is on, without which a capture can neither allocate nor free."""
    is_enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)  # missing on torch 2.11
    return "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ and (is_enabled is None or is_enabled())


def allocation_trace(profile: torch.profiler.profile) -> list[int]:
    """Returns the bytes of each CPU allocation (positive) and release (negative) in a profile, in order of time.

    Why: the public event list only has sums for each operator, which show no peak, and omits allocations of native
    code.
    """
    results = getattr(profile.profiler, "kineto_results", None)
    recorded = results.events() if results is not None else []
    events = [event for event in recorded if event.name() == "[memory]" and event.device_type() == DeviceType.CPU]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Suppresses the two lines that torch's profiler writes to stderr per profile, unless the user set a log level.

    Why: the profiler reads its level from the environment at its first use, and has no other setting. Tested on 2.13.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]
