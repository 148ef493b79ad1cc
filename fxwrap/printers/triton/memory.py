"""Hints for the cache, and atomic stores."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxwrap.loop_ir import Gathered, Kernel, Load

_WORDS = (torch.int32, torch.int64, torch.float32, torch.float64)
ATOMIC = {"add": (*_WORDS, torch.float16, torch.bfloat16), "max": _WORDS, "min": _WORDS}
"""The dtypes that each mode of an atomic store takes: those that a GPU has instructions for, of integers at least."""


def eviction(kernel: Kernel, load: Load, again: bool, last_use: bool) -> str:
    """Returns the eviction policy of a load, or nothing: `again` says that several loops over a row have it.

    What later loops read again stays in the cache, what nobody reads again goes first, weights stay. What a pointwise
    kernel shares along inner axes only is read by one program or by neighbours, which need no hint: a rotary embedding
    took 33.5 us instead of 35.5.
    """
    axes = load.index.axes()
    if any(isinstance(atom, Gathered) for atom in load.index.atoms()):
        return ""
    far = kernel.axes if kernel.reduced else kernel.axes[:1]
    if not axes.issuperset(far):
        return "evict_last"
    if again:
        return "evict_first" if last_use else "evict_last"
    if load.mask is not None and not kernel.reduced:
        # Parts of a whole, as of a cat: 95.6 us instead of 97.1. Not where a buffer is read in several ways.
        loads = [item for item in kernel.operations if isinstance(item, Load) and item.buffer == load.buffer]
        return "evict_last" if len(loads) == 1 else ""
    return ""


def atomic_text(mode: str, dtype: torch.dtype, address: str, value: str, mask: str, use: Callable[[str], str]) -> str:
    """Returns the statement that combines a value into memory; `use` notes a helper."""
    if mode != "add" and dtype.is_floating_point:  # GPUs compare only integers in memory
        integers = "tl.int64, tl.uint64" if dtype is torch.float64 else "tl.int32, tl.uint32"
        nan = {"max": {4: "0x7FC00000", 8: "0x7FF8000000000000"}, "min": {4: "-0x400000", 8: "-0x8000000000000"}}
        chosen = nan[mode][dtype.itemsize]
        return f"{use(f'atomic_{mode}_of_floats')}({address}, {value}, {mask or 'True'}, {integers}, {chosen})"
    masked = f", mask={mask}" if mask else ""
    return f'tl.atomic_{mode}({address}, {value}{masked}, sem="relaxed")'
