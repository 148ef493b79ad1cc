"""The tile of a kernel: the axes along its dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxwrap.loop_ir import Axis, IndirectIndex, Kernel, Load
from fxwrap.printers.triton.configuration import Configuration
from fxwrap.symbolic import Size, ceiling_divide, product


@dataclass(frozen=True)
class Dimension:
    """One dimension of a tile, "x", "y" or "r": blocks of flattened axes."""

    name: str
    axes: tuple[Axis, ...]
    block: int

    @property
    def size(self) -> Size:
        """The number of elements of the axes."""
        return product(axis.size for axis in self.axes)

    @property
    def masked(self) -> bool:
        """Whether the last block may extend beyond the end."""
        size = self.size
        return not isinstance(size, int) or size == 0 or size % self.block != 0

    @property
    def blocks(self) -> Size:
        """The number of blocks."""
        return ceiling_divide(self.size, self.block)

    @property
    def block_constant(self) -> str:
        """The name of the constant parameter for the block's size."""
        return f"{self.name.upper()}_BLOCK"


@dataclass(frozen=True)
class Tile:
    """The iterations of a program: the tile's `dimensions` in order, and `outer` axes with one element a program."""

    dimensions: tuple[Dimension, ...]
    outer: tuple[Axis, ...]

    @property
    def reduced(self) -> int | None:
        """The position of the dimension with reduced axes, or None."""
        return next((position for position, item in enumerate(self.dimensions) if item.name == "r"), None)

    @property
    def parallel(self) -> tuple[Dimension, ...]:
        """The dimensions of parallel axes, the fastest first."""
        return tuple([item for item in reversed(self.dimensions) if item.name != "r"])

    @property
    def shape(self) -> str:
        """The tile's shape as text."""
        sizes = [item.block_constant for item in self.dimensions]
        return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"

    @property
    def num_programs(self) -> Size:
        """The number of programs."""
        return product([*[item.blocks for item in self.parallel], *[axis.size for axis in self.outer]])

    def broadcast_subscript(self, position: int) -> str:
        """Returns the subscript that broadcasts a vector along one dimension."""
        if len(self.dimensions) == 1:
            return ""
        return f"[{', '.join([':' if other == position else 'None' for other in range(len(self.dimensions))])}]"


def make_tile(kernel: Kernel, configuration: Configuration) -> Tile:
    """Returns the tile of a configuration. A block of one element is no dimension."""
    chosen = configuration
    y = Dimension("y", chosen.y, chosen.y_block) if chosen.y and chosen.y_block > 1 else None
    x = Dimension("x", chosen.x, chosen.x_block) if chosen.x and (chosen.x_block > 1 or not kernel.reduced) else None
    r = Dimension("r", kernel.reduced, chosen.r_block) if kernel.reduced else None
    order = (y, r, x) if x is not None else (y, r)
    dimensions = tuple([item for item in order if item is not None])
    inside = {axis for item in dimensions for axis in item.axes}
    return Tile(dimensions, tuple([axis for axis in kernel.axes if axis not in inside]))


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
