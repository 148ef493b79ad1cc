"""Grouped contractions as Triton kernels whose blocks of rows have one group each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from fxwrap.loop_ir import IndirectIndex
from fxwrap.printers.triton.contractions import DotPrinter
from fxwrap.printers.triton.tiling import Dimension, GroupBlockConfiguration, Tile, next_power_of_2
from fxwrap.symbolic import ceiling_divide

_MAX_WINDOWS = 1024
"""The number of windows whose groups are loaded at once."""

_STATE_OF_BLOCK = ("whole", "tile", "index_printer", "positions", "dimension_masks", "stable_names", "results")
"""The attributes of a printer that depend on the size of a block of rows."""


class GroupBlockPrinter(DotPrinter):
    """Prints a contraction of rows in ascending groups by blocks that begin at the first row of their group.

    Each program finds its block itself. Windows of consecutive rows are as long as blocks; a group that begins in
    window w has the blocks from number w + group on, so that no two blocks have one number. Of a number, w is the last
    window whose first row has a group of at most `number - w`, which is the group of the block; a number between those
    of two groups has no rows. Numbers are as many as windows, and one for each further group. Few rows at the end of a
    group are a smaller block, in a branch of its own.
    """

    configuration: GroupBlockConfiguration
    group_number = first_row = end = ""
    """The names of the block's group, of its first row, and of the row at which the group or the next window ends."""

    @property
    def _rows(self) -> Dimension:
        """The dimension of rows."""
        return self._dimension("y" if self._rows_are_first() else "x")

    def _block_start(self, dimension: Dimension, number: str) -> str:
        if dimension is not self._rows:
            return super()._block_start(dimension, number)
        self._emit_search(number)
        return self.first_row

    def _is_masked(self, dimension: Dimension) -> bool:
        return dimension is not self._rows and super()._is_masked(dimension)

    def _is_aligned(self, dimension: Dimension) -> bool:
        return dimension is not self._rows

    def _emit_block_offsets(self, dimension: Dimension, start: str) -> None:
        super()._emit_block_offsets(dimension, start)
        if dimension is self._rows:
            number, flat = self.tile.dimensions.index(dimension), self.positions[dimension.name]
            self.masks[number] = self._stable_name("members")
            self.line(f"{self.masks[number]} = {flat} < {self.end}")

    def _emit_search(self, number: str) -> None:
        """Prints the search for the block of a number: its group, first row and end, which is 0 without rows."""
        block = self._rows.block_constant
        wanted = ("number", "window", "group", "first", "begin", "first_row", "end")
        names = [self.names.create_name(name) for name in wanted]
        own, window, one, first, begin, self.first_row, self.end = names
        self.group_number = one
        self.line(f"{own} = {number}")
        self._emit_last_window(window, lambda group, at: f"{group} + {at} <= {own}")
        self.line(f"{one} = ({own} - {window}).to({self._integer})")
        self._emit_last_window(first, lambda group, _: f"{group} < {one}")
        self.line(f"{first} = {first} * {block}")
        before = self._emit_condition(f"{first} + tl.arange(0, {block})", lambda group: f"{group} < {one}")
        self.line(f"{begin} = {first} + tl.sum({before}.to({self._integer}))")
        self.line(f"{self.first_row} = {begin} + ({window} - {begin} // {block}) * {block}")
        near = f"{window} * {block} + tl.arange(0, 2 * {block})"
        until = self._emit_condition(near, lambda group: f"{group} <= {one}")
        ends = f"{window} * {block} + tl.sum({until}.to({self._integer}))"
        self.line(f"{self.end} = tl.where({self.first_row} < {begin}, 0, {ends})")

    @property
    def _integer(self) -> str:
        return "tl.int64" if self.use_int64 else "tl.int32"

    def _emit_last_window(self, name: str, condition: Callable[[str, str], str]) -> None:
        """Prints the number of the last window whose first row's group fulfils a condition, 0 for none.

        The condition, of a group and the number of its window, holds for windows up to that one.
        """
        block, count = self._rows.block_constant, ceiling_divide(self._rows.size, self._rows.block)
        chunk = min(next_power_of_2(count), _MAX_WINDOWS) if isinstance(count, int) else _MAX_WINDOWS
        start, at = self.names.create_name("chunk"), self.names.create_name("windows")
        self.line(f"{name} = tl.full((), -1, {self._integer})")
        with self.nested(f"for {start} in tl.range(0, {self.index_printer.size(count)}, {chunk}):"):
            self.line(f"{at} = {start} + tl.arange(0, {chunk})")
            holds = self._emit_condition(f"{at} * {block}", lambda group: condition(group, at))
            self.line(f"{name} += tl.sum({holds}.to({self._integer}))")
        self.line(f"{name} = tl.maximum({name}, 0)")

    def _emit_condition(self, rows: str, condition: Callable[[str], str]) -> str:
        """Prints a condition on the groups of a vector of rows; returns its name. It is false beyond the last row."""
        group, dimension = self.contraction.group, self._rows
        assert group is not None, "blocks of groups are those of a grouped contraction"
        saved = self.index_printer, self.masks, dict(self.positions)
        flat, names = self._emit_axes(dimension.axes, rows, "row")
        mask, holds = self.names.create_name("row_mask"), self.names.create_name("holds")
        self.line(f"{mask} = {flat} < {self.index_printer.size_operand(dimension.size)}")
        self.index_printer, self.positions[dimension.name] = self._indices_at(names), flat
        self.tile = Tile((dimension,), self.whole.outer)
        self.dimension_of, self.masks = dict.fromkeys(dimension.axes, 0), {0: mask}
        self._analyze_dimensions()
        computed = sorted(self.kernel.backward_slice([group.operation]))
        for position in computed:
            self._operation(position, looped=True)
        self.line(f"{holds} = {mask} & ({condition(self._value(group.operation))})")
        for position in computed:
            self.results.pop(position, None)
        self._enter(self.result_block)
        self.index_printer, self.masks, self.positions = saved
        return holds

    def _emit_looped(self) -> None:
        after = [*[f"{self.first_row} + {rows}" for rows in self.configuration.tails], self.first_row]
        with self.nested(f"if {after[0]} < {self.end}:"):
            super()._emit_looped()
        for block, (most, least) in zip(self.configuration.tails, pairwise(after), strict=True):
            with self.nested(f"if ({least} < {self.end}) & ({self.end} <= {most}):"), self._tail(block):
                super()._emit_looped()

    @contextmanager
    def _tail(self, block: int) -> Iterator[None]:
        """Prints the positions of a smaller block of rows, which is the current one then."""
        state = {name: vars(self)[name] for name in _STATE_OF_BLOCK}
        whole, rows = self._rows, replace(self._rows, block=block, is_parameter=False)
        dimensions = tuple([rows if item is whole else item for item in self.whole.dimensions])
        self.whole = replace(self.whole, dimensions=dimensions)
        self.index_printer = self._indices_at({axis: self.names.create_name(axis.name) for axis in rows.axes})
        self.positions, self.dimension_masks = dict(self.positions), dict(self.dimension_masks)
        self.stable_names, self.results = {}, {}
        self._enter(self.result_block)
        self._emit_block_offsets(rows, self.first_row)
        self.dimension_masks[rows.name] = self.masks[self.tile.dimensions.index(rows)]
        yield
        vars(self).update(state)

    def _emit_groups(
        self,
        group: IndirectIndex,
        targets: tuple[set[int], set[int]],
        prologues: list[set[int]],
        of_group: frozenset[int],
    ) -> None:
        """Prints the sums of the block's group."""
        size = self.index_printer.size(self._dimension("r").size)
        self._emit_sums_of_group(self.group_number, targets, prologues, of_group, size)
