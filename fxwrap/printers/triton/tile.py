"""The tile of a kernel: the axes along its dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from fxwrap.loop_ir import Axis, Kernel
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
