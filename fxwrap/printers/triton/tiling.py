"""How the programs of a Triton kernel share out its iterations: tiles, and the configurations that these follow from.

Each class of configuration belongs to one schedule, whose printer it is passed to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fxwrap.devices import WARP_LANES, DeviceSpec
from fxwrap.loop_ir import Axis, Kernel, count_points
from fxwrap.symbolic import Size, ceiling_divide, product, total


@dataclass(frozen=True)
class Dimension:
    """One dimension of a tile, "x", "y", "r", "p", "row" or "chunk": blocks of flattened axes.

    `more_blocks` is the number of blocks beyond those of consecutive elements, where blocks begin at others' ends. The
    size of a block is a parameter of the kernel, or else a number in its text.
    """

    name: str
    axes: tuple[Axis, ...]
    block: int
    more_blocks: Size = 0
    is_parameter: bool = True

    @property
    def size(self) -> Size:
        """The number of elements of the axes."""
        return count_points(self.axes)

    @property
    def masked(self) -> bool:
        """Whether the last block may extend beyond the end."""
        size = self.size
        return not isinstance(size, int) or size == 0 or size % self.block != 0

    @property
    def blocks(self) -> Size:
        """The number of blocks."""
        blocks = ceiling_divide(self.size, self.block)
        return total((blocks, self.more_blocks)) if self.more_blocks else blocks

    @property
    def block_constant(self) -> str:
        """The name of the constant parameter for the block's size, or the size."""
        return f"{self.name.upper()}_BLOCK" if self.is_parameter else str(self.block)


@dataclass(frozen=True)
class Tile:
    """The iterations of a program: the tile's `dimensions` in order, and `outer` axes with one element a program.

    At most `max_programs` programs go through all blocks, in a loop where these are more; 0 for no limit.
    """

    dimensions: tuple[Dimension, ...]
    outer: tuple[Axis, ...]
    max_programs: int = 0

    @property
    def reduced(self) -> int | None:
        """The position of the dimension with reduced axes, or None."""
        return next((position for position, item in enumerate(self.dimensions) if item.name == "r"), None)

    @property
    def parallel(self) -> tuple[Dimension, ...]:
        """The dimensions of parallel axes, the fastest first."""
        return tuple([item for item in reversed(self.dimensions) if item.name in ("x", "y")])

    @property
    def shape(self) -> str:
        """The tile's shape as text."""
        sizes = [item.block_constant for item in self.dimensions]
        return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"

    @property
    def num_programs(self) -> Size:
        """The number of programs."""
        tiles = self.num_tiles
        return min(tiles, self.max_programs) if self.max_programs and isinstance(tiles, int) else tiles

    @property
    def num_tiles(self) -> Size:
        """The number of blocks of all programs."""
        return product([*[item.blocks for item in self.parallel], count_points(self.outer)])

    def broadcast_subscript(self, position: int) -> str:
        """Returns the subscript that broadcasts a vector along one dimension."""
        if len(self.dimensions) == 1:
            return ""
        return f"[{', '.join([':' if other == position else 'None' for other in range(len(self.dimensions))])}]"


def make_tile(kernel: Kernel, outer: Sequence[Dimension], r_block: int, inner: Sequence[Dimension] = ()) -> Tile:
    """Returns the tile of some dimensions, with one of the remaining reduced axes between them, if there are any.

    Parallel axes that no dimension has are those with one element a program.
    """
    axes = {axis for item in (*outer, *inner) for axis in item.axes}
    rest = tuple([axis for axis in kernel.reduced if axis not in axes])
    reduced = [Dimension("r", rest, r_block)] if rest else []
    return Tile((*outer, *reduced, *inner), tuple([axis for axis in kernel.axes if axis not in axes]))


# --- configurations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaunchConfiguration:
    """The launch metadata that every configuration has.

    Fields: the warps of a program; the stages of its loop's software pipeline; the most registers of a thread, so that
    more programs run beside each other, 0 for no limit.
    """

    num_warps: int = 4
    num_stages: int = 1
    max_registers: int = 0

    @property
    def launch_options(self) -> dict[str, int | bool]:
        """Triton's options of a launch."""
        limit = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, **limit}


@dataclass(frozen=True, kw_only=True)
class BlockConfiguration(LaunchConfiguration):
    """Blocks of parallel and of reduced axes.

    Fields: `x` are the parallel axes flattened into the tile's contiguous dimension, of which a program has `x_block`
    elements; `y` and `y_block` are the same for the other dimension. Other parallel axes have one element a program.
    The reduced axes are flattened into the remaining dimension, in blocks of `r_block` elements.
    """

    x: tuple[Axis, ...] = ()
    y: tuple[Axis, ...] = ()
    x_block: int = 1
    y_block: int = 1
    r_block: int = 1

    @property
    def looped(self) -> bool:
        """Whether a loop goes through blocks of reduced axes; otherwise one block has all of them."""
        return True

    def tile(self, kernel: Kernel) -> Tile:
        """Returns the tile of a kernel's programs. A block of one element is no dimension."""
        return make_tile(kernel, self._y(), self.r_block, self._x() if self.x_block > 1 or not kernel.reduced else ())

    def _x(self) -> tuple[Dimension, ...]:
        return (Dimension("x", self.x, self.x_block),) if self.x else ()

    def _y(self) -> tuple[Dimension, ...]:
        return (Dimension("y", self.y, self.y_block),) if self.y and self.y_block > 1 else ()


@dataclass(frozen=True, kw_only=True)
class TileConfiguration(BlockConfiguration):
    """Elements, or reduced rows or columns: if `looped`, they are read in a loop for each stage of reductions."""

    looped: bool = False


@dataclass(frozen=True, kw_only=True)
class DotConfiguration(BlockConfiguration):
    """A contraction by dots of blocks of its operands.

    Programs go through `band` blocks of rows, which stay in a cache, for each block of columns; 0 are all blocks. With
    `descriptors`, operands are loaded through tensor descriptors where these describe them (`descriptors.py`).
    """

    band: int = 0
    descriptors: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupBlockConfiguration(DotConfiguration):
    """A contraction of `rows` in ascending groups, whose blocks of rows have one group each (`group_blocks.py`).

    The last block of a group is the smallest one of `tails`, blocks in descending order, that has all of its rows.
    """

    rows: tuple[Axis, ...]
    groups: Size
    tails: tuple[int, ...] = ()

    def tile(self, kernel: Kernel) -> Tile:
        whole, more = super().tile(kernel), total((self.groups, -1))
        dimensions = [replace(item, more_blocks=more) if item.axes == self.rows else item for item in whole.dimensions]
        return replace(whole, dimensions=tuple(dimensions))


@dataclass(frozen=True, kw_only=True)
class GroupSumConfiguration(BlockConfiguration):
    """A contraction of few rows whose sums of groups get coefficients (`sum_groups`).

    Fields: `p` are the reduced axes of groups, of which a step has `p_block`, whose elements are a block of `r_block`.
    `x` are the rows: a block of several has them also where the kernel has no axis of rows.
    """

    p: tuple[Axis, ...]
    p_block: int = 1

    def tile(self, kernel: Kernel) -> Tile:
        p, x = Dimension("p", self.p, self.p_block), Dimension("x", self.x, self.x_block)
        return make_tile(kernel, (p, *self._y()), self.r_block, (x,) if self.x_block > 1 else ())


@dataclass(frozen=True, kw_only=True)
class BatchedDotConfiguration(GroupSumConfiguration):
    """Sums of groups by dots, of which the groups of a step are a batch."""


@dataclass(frozen=True, kw_only=True)
class RowGroupSumConfiguration(GroupSumConfiguration):
    """Sums of groups of one row without dots.

    With `loads_first`, a step loads all that it reads before it computes, to wait for memory once.
    """

    loads_first: bool = False


@dataclass(frozen=True, kw_only=True)
class FragmentConfiguration(GroupSumConfiguration):
    """Sums of groups of up to 8 rows, loaded into the registers of tensor cores (`fragment_sums.py`).

    With `loads_ahead`, a step loads the weights of the next one. With `programs`, these many programs, which have all
    groups in one step, go through the blocks of columns, and load the weights of the next one. With `raw_digits`, the
    bits of digits are multiplied as they are (`fragment_digits.py`). A block of 8 columns has those of two sums.
    """

    loads_ahead: bool = False
    programs: int = 0
    raw_digits: bool = False

    def tile(self, kernel: Kernel) -> Tile:
        return replace(super().tile(kernel), max_programs=self.programs)


@dataclass(frozen=True, kw_only=True)
class RowPartConfiguration(LaunchConfiguration):
    """Rows that a program reduces in a loop, and whose columns it accumulates (`row_parts.py`).

    Fields: `rows` are the reduced axes of rows, of which a step has `row_block`; `r_block` has all elements of a row,
    in chunks of `chunk`, so that a warp has whole rows, or in one if that is 0.
    """

    rows: tuple[Axis, ...]
    row_block: int = 1
    r_block: int = 1
    chunk: int = 0

    @property
    def looped(self) -> bool:
        """Whether a loop goes through blocks of a row: no step has less than a row."""
        return False

    def tile(self, kernel: Kernel) -> Tile:
        """Returns the tile of a kernel's programs. Chunks are a dimension of their own."""
        rows = Dimension("row", self.rows, self.row_block)
        chunks = [Dimension("chunk", (), self.r_block // self.chunk)] if self.chunk else []
        return make_tile(kernel, (rows, *chunks), self.chunk or self.r_block)


@dataclass(frozen=True, kw_only=True)
class StreamingConfiguration(LaunchConfiguration):
    """The blocks of a streaming reduction: rows of a program, and positions of an iteration.

    With `half_products`, factors of half precision are multiplied as such; Triton's interpreter cannot do that.
    With `branches`, one loop visits partial and full blocks, and masks partial ones in a branch; else there are two
    loops, those over blocks that comparisons of positions mask in part only if `splits`.
    With `waits`, products with weights end before the next step, whose scores can then have the weights' registers.
    With `hoists_distances`, those of a block's positions from the first one, which a linear bias has, are in registers
    from step to step; else they are computed from the positions.
    Programs of one row block in `band` heads follow each other. Those of rows that visit more than others then come
    first in all heads of a band, so that the launch ends with short programs, and the keys of a band are in the cache.
    """

    row_block: int
    key_block: int
    num_stages: int = 2
    branches: bool = False
    waits: bool = False
    hoists_distances: bool = True
    splits: bool = True
    half_products: bool = True
    band: int = 1


TiledConfiguration: TypeAlias = TileConfiguration | DotConfiguration | GroupSumConfiguration | RowPartConfiguration
"""A configuration of a kernel whose programs compute a tile each."""

Configuration: TypeAlias = TiledConfiguration | StreamingConfiguration
"""A configuration of a Triton kernel."""


# --- sizes ----------------------------------------------------------------------------------------------------------


def next_power_of_2(size: int) -> int:
    """Returns the smallest power of two that is at least the size, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def warps_of_tile(tile: int, elements: int) -> int:
    """Returns the warps of a program whose threads have so many elements of its tile."""
    return min(max(next_power_of_2(tile // (WARP_LANES * elements)), 1), 16)


def programs_of_a_wave(spec: DeviceSpec) -> int:
    """Returns the number of programs that occupy a device: two for each multiprocessor."""
    return 2 * spec.multiprocessors
