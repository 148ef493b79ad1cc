"""The tile of a kernel: which axes lie along which of its dimensions, and how a program finds its part."""

from __future__ import annotations

from dataclasses import dataclass

from fxwrap.loop_ir import Axis, Kernel
from fxwrap.printers.triton.configuration import Configuration
from fxwrap.symbolic import Size, ceiling_divide, product


@dataclass(frozen=True)
class Dimension:
    """One dimension of a tile: its axes flattened, `block` elements of them at a time.

    `name` is "x", "y" or "r". `masked` says that the last block reaches beyond the axes' end.
    """

    name: str
    axes: tuple[Axis, ...]
    block: int

    @property
    def size(self) -> Size:
        """How many elements the axes have."""
        return product(axis.size for axis in self.axes)

    @property
    def masked(self) -> bool:
        """Whether a block may reach beyond the end."""
        size = self.size
        return not isinstance(size, int) or size == 0 or size % self.block != 0

    @property
    def blocks(self) -> Size:
        """How many blocks there are."""
        return ceiling_divide(self.size, self.block)

    @property
    def option(self) -> str:
        """The constant parameter that holds the block's size."""
        return f"{self.name.upper()}_BLOCK"


@dataclass(frozen=True)
class Tile:
    """A program's part of the space: `dimensions` in the order of the tile, and axes with one element a program."""

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
        """The whole tile's shape as text."""
        sizes = [item.option for item in self.dimensions]
        return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"

    @property
    def programs(self) -> Size:
        """How many programs there are."""
        return product([*[item.blocks for item in self.parallel], *[axis.size for axis in self.outer]])

    def spread(self, position: int) -> str:
        """Returns the subscript that puts a vector along one dimension."""
        if len(self.dimensions) == 1:
            return ""
        return f"[{', '.join([':' if other == position else 'None' for other in range(len(self.dimensions))])}]"


def make_tile(kernel: Kernel, configuration: Configuration) -> Tile:
    """Returns the tile that a configuration asks for; a block of one element is no dimension."""
    chosen = configuration
    y = Dimension("y", chosen.y, chosen.y_block) if chosen.y and chosen.y_block > 1 else None
    x = Dimension("x", chosen.x, chosen.x_block) if chosen.x and (chosen.x_block > 1 or not kernel.reduced) else None
    r = Dimension("r", kernel.reduced, chosen.r_block) if kernel.reduced else None
    order = (y, r, x) if x is not None else (y, r)
    dimensions = tuple([item for item in order if item is not None])
    inside = {axis for item in dimensions for axis in item.axes}
    return Tile(dimensions, tuple([axis for axis in kernel.axes if axis not in inside]))
