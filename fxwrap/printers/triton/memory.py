"""Eviction policies of loads, and atomic stores."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxwrap.loop_ir import IndirectIndex, Kernel, Load

_ATOMIC_WORD_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
ATOMIC_DTYPES = {
    "add": (*_ATOMIC_WORD_DTYPES, torch.float16, torch.bfloat16),
    "max": _ATOMIC_WORD_DTYPES,
    "min": _ATOMIC_WORD_DTYPES,
}
"""The dtypes of each mode of atomic stores. GPUs have no float maximum or minimum, which integer atomics replace."""


def eviction_policy(kernel: Kernel, load: Load, again: bool, last_use: bool) -> str:
    """Returns the eviction policy of a load, or "" for none.

    Elements that later loops or distant programs read again stay in the cache. `again` says that several loops over a
    row have the load, `last_use` that this is the last one.
    """
    if any(isinstance(atom, IndirectIndex) for atom in load.index.atoms()):
        return ""
    if not load.index.axes().issuperset(kernel.axes if kernel.reduced else kernel.axes[:1]):
        return "evict_last"
    if again:
        return "evict_first" if last_use else "evict_last"
    if load.mask is not None and not kernel.reduced:  # a segment, as in a cat
        loads = [item for item in kernel.operations if isinstance(item, Load) and item.buffer == load.buffer]
        return "evict_last" if len(loads) == 1 else ""
    return ""


def atomic_text(mode: str, dtype: torch.dtype, address: str, value: str, mask: str, use: Callable[[str], str]) -> str:
    """Returns the statement that updates memory atomically; `use` records a helper."""
    if mode != "add" and dtype.is_floating_point:
        integers = "tl.int64, tl.uint64" if dtype is torch.float64 else "tl.int32, tl.uint32"
        nan = {"max": {4: "0x7FC00000", 8: "0x7FF8000000000000"}, "min": {4: "-0x400000", 8: "-0x8000000000000"}}
        arguments = f"{address}, {value}, {mask or 'True'}, {integers}, {nan[mode][dtype.itemsize]}"
        return f"{use(f'atomic_{mode}_float')}({arguments})"
    masked = f", mask={mask}" if mask else ""
    return f'tl.atomic_{mode}({address}, {value}{masked}, sem="relaxed")'
