"""How the elements of a step are shared out among the fragments that tensor cores multiply (`fragment_sums.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from fxwrap.caching import bounded_cache
from fxwrap.devices import WARP_LANES, DeviceSpec
from fxwrap.loop_ir import (
    ContractionForm,
    GroupedSums,
    Load,
    as_index,
    count_points,
    find_grouped_sums,
    row_precision,
    sum_groups,
)
from fxwrap.printers.triton.contraction_queries import adds_zeros
from fxwrap.printers.triton.fragment_digits import find_digits
from fxwrap.printers.triton.kernel_text import parenthesize
from fxwrap.printers.triton.tiling import FragmentConfiguration, next_power_of_2

FRAGMENT_ROWS, FRAGMENT_COLUMNS = 16, 8
"""The elements of a fragment of weights along columns, and the columns of a fragment of results."""

ROW_LANES = 4
"""The lanes that have a row of a fragment."""

RUN = 4
"""The elements of one byte in a register, which are consecutive along the reduced axes."""

_LOAD_BYTES = 16
"""The bytes that a lane loads at once."""

_TILE_BYTES = 32
"""The bytes of a group of 64 weights of four bits."""


@dataclass(frozen=True)
class Fragments:
    """How the elements of a step are shared out, as factors of its sizes.

    `groups` of a step, of `size` bytes of a column each, are those of `warps`, times `parts` one after another, times
    `joined`, whose sums are columns of one fragment; `rows` are the others. A column's bytes of joined groups are
    `chunks` of four lanes, in which a lane has `lane_bytes`, and `side` groups lie side by side in a chunk, or one in
    `repeats` chunks.
    """

    size: int
    rows: int
    columns: int
    warps: int
    parts: int

    @property
    def joined(self) -> int:
        """The groups whose sums are columns of one fragment."""
        return FRAGMENT_COLUMNS // self.rows

    @property
    def lane_bytes(self) -> int:
        """The bytes of a column that a lane has in a chunk."""
        return min(self.joined * self.size // ROW_LANES, _LOAD_BYTES)

    @property
    def side(self) -> int:
        """The groups that lie side by side in a chunk."""
        return max(ROW_LANES * self.lane_bytes // self.size, 1)

    @property
    def repeats(self) -> int:
        """The chunks of a group that fills several."""
        return max(self.size // (ROW_LANES * self.lane_bytes), 1)

    @property
    def chunks(self) -> int:
        """The chunks of joined groups, without repeats."""
        return self.joined // self.side

    @property
    def groups(self) -> int:
        """The groups of a step."""
        return self.warps * self.parts * self.joined

    def fits(self) -> bool:
        """Whether each lane has a register or more of one group, and two of a column at least."""
        has_lanes = self.side <= ROW_LANES and self.lane_bytes >= 2 * RUN
        return self.parts > 0 and has_lanes and self.columns % (FRAGMENT_ROWS // 2) == 0


def make_fragments(configuration: FragmentConfiguration) -> Fragments:
    """Returns how the elements of a configuration are shared out."""
    rows, warps = configuration.x_block, configuration.num_warps
    parts = configuration.p_block * rows // (warps * FRAGMENT_COLUMNS)
    return Fragments(configuration.r_block, rows, configuration.y_block, warps, parts)


class FragmentTile(NamedTuple):
    """The columns and warps of a program, of which each has `parts` groups of `_TILE_BYTES` one after another.

    Larger groups are fewer, so that a lane has as many registers of weights. `loads_ahead` is whether a step loads the
    weights of the next one. `max_registers` limits a thread's registers; 0 for no limit. If `looping`, as many programs
    as run at once go through the columns; each has all groups in a step.
    """

    columns: int
    warps: int
    parts: int
    loads_ahead: bool
    max_registers: int
    looping: bool = False


def fragment_configurations(
    contraction: ContractionForm, form: GroupedSums, tiles: Sequence[FragmentTile], spec: DeviceSpec
) -> list[FragmentConfiguration]:
    """Returns configurations of up to 8 rows whose blocks divide columns; the last step of groups may have fewer.

    Fewer larger groups than those of a tile share a fragment or follow one another. Programs go through columns in a
    loop where these are more than one block for each. Digits are multiplied as bits where rows are few, so that these
    have fewer registers than weights, and of one sum, or in a loop: several sums of a step would need too many; and
    where rows fill fragments.
    """
    count, columns = contraction.row_count, count_points(contraction.columns)
    groups, size = count_points(form.groups), form.contraction.summed_count
    if contraction.batch or not all(isinstance(item, int) for item in (count, columns, groups, size)):
        return []
    scale = max(int(size) // _TILE_BYTES, 1)
    rows = next_power_of_2(int(count)) if contraction.rows else 1
    if rows > FRAGMENT_COLUMNS or not _has_bytes_in_order(form) or not _has_plain_coefficients(form):
        return []
    padded = max(rows, min(scale, FRAGMENT_COLUMNS), 2 if contraction.rows else 1)
    has_digits = _has_digits(contraction)
    candidates = []
    for tile in tiles:
        joined, warps = FRAGMENT_COLUMNS // padded, tile.warps
        parts = max(tile.parts * padded // (scale * rows), 1)
        while parts > 1 and warps * parts * joined >= 2 * int(groups):
            parts //= 2
        while warps > 1 and warps * parts * joined >= 2 * int(groups):
            warps //= 2
        fragments = Fragments(int(size), padded, tile.columns, warps, parts)
        is_whole = int(groups) % fragments.groups == 0 or adds_zeros(form)
        programs = _programs(tile, fragments, spec) if int(groups) <= fragments.groups else 0
        if tile.looping and not 0 < programs < int(columns) // tile.columns:
            continue
        if fragments.fits() and _has_sums(contraction, tile.columns) and int(columns) % tile.columns == 0 and is_whole:
            candidates.append(FragmentConfiguration(
                x=contraction.rows, y=contraction.columns, p=form.groups, x_block=padded, y_block=tile.columns,
                p_block=fragments.groups, r_block=int(size), num_warps=warps, max_registers=tile.max_registers,
                loads_ahead=tile.loads_ahead and groups > fragments.groups, programs=programs,
                raw_digits=has_digits and _multiplies_bits(contraction, fragments, programs),
            ))  # fmt: skip
    return list(dict.fromkeys(candidates))


def _multiplies_bits(contraction: ContractionForm, fragments: Fragments, programs: int) -> bool:
    """Whether digits are multiplied as bits: where these are few registers, or rows fill fragments."""
    return fragments.joined == 1 or (fragments.chunks > 1 and (programs > 0 or len(contraction.sums) == 1))


def _programs(tile: FragmentTile, fragments: Fragments, spec: DeviceSpec) -> int:
    """Returns the number of looping programs that run at once; 0 for a tile without a loop."""
    registers = WARP_LANES * fragments.warps * tile.max_registers
    return spec.multiprocessors * (spec.registers // registers) if tile.looping else 0


def _has_sums(contraction: ContractionForm, columns: int) -> bool:
    """Whether fragments are filled: by columns, or by those of two sums, which then have the same rows."""
    rows = {item.row_operand for item in contraction.sums}
    return columns % FRAGMENT_ROWS == 0 or (len(contraction.sums) % 2 == 0 and len(rows) == 1)


@bounded_cache(64)
def _has_digits(contraction: ContractionForm) -> bool:
    """Whether the weights are digits that can be multiplied as bits."""
    summed = sum_groups(contraction, biased=False)
    precisions = {row_precision(contraction, item) for item in contraction.sums}
    if summed is None or len(precisions) > 1:
        return False
    return bool(find_digits(find_grouped_sums(summed, contraction), *precisions))


def _has_bytes_in_order(form: GroupedSums) -> bool:
    """Whether the weights of a group are bytes beside each other."""
    kernel, summed = form.contraction.kernel, form.contraction.summed
    if len(summed) != 1:
        return False
    columns = {at for item in form.contraction.sums for at in form.contraction.prologue(item.column_operand)}
    loads = [item for at in columns if isinstance(item := kernel.operations[at], Load)]
    varying = [load for load in loads if summed[0] in load.index.axes()]
    return bool(varying) and all(
        load.dtype.itemsize == 1 and load.mask is None and load.index.stride(summed[0]) == as_index(1)
        for load in varying
    )


def _has_plain_coefficients(form: GroupedSums) -> bool:
    """Whether what is applied to sums of groups does not depend on rows by itself."""
    kernel, rows = form.contraction.kernel, frozenset(form.contraction.rows)
    sums = {item.reduction for item in form.sums}
    step = kernel.backward_slice(form.totals, known=sums) - {*form.totals}
    return all(
        kernel.value_axes[at].isdisjoint(rows) or not kernel.backward_slice([at]).isdisjoint(sums) for at in step
    )


@dataclass(frozen=True)
class FragmentBlock:
    """A block of values: matrices whose columns are the last dimension, and whose rows are all other ones.

    The first of the `dimensions`, which have names and sizes, changes fastest from row to row. Rows are the lanes of a
    warp in this order, then warps, then registers. `loops` are the dimensions of the kernel that these are parts of.
    Positions of groups start at `first_group`.
    """

    name: str
    loops: str
    dimensions: tuple[tuple[str, int], ...]
    first_group: int = 0

    @property
    def rows(self) -> int:
        return prod([size for _, size in self.dimensions[:-1]])

    @property
    def shape(self) -> str:
        return shape_text([self.rows, self.dimensions[-1][1]])

    def size(self, name: str) -> int:
        return dict(self.dimensions).get(name, 1)

    def positions(self, name: str) -> str:
        """Returns the text of the position along a dimension; "" where it has one."""
        names = [item for item, _ in self.dimensions]
        number, size = names.index(name), self.size(name)
        if size == 1:
            return ""
        if number == len(names) - 1:
            return f"tl.arange(0, {size})[None, :]"
        step, text = prod([other for _, other in self.dimensions[:number]]), f"tl.arange(0, {self.rows})[:, None]"
        text = text if step == 1 else f"{text} // {step}"
        return text if step * size == self.rows else f"{text} % {size}"

    def position(self, parts: Mapping[str, int]) -> str:
        """Returns the text of the sum of the positions along dimensions times factors; "" where all have one."""
        texts = [(parenthesize(self.positions(name)), factor) for name, factor in parts.items() if self.size(name) > 1]
        return " + ".join([f"{text}.to(tl.int64)" + (f" * {factor}" if factor > 1 else "") for text, factor in texts])

    def permuted(
        self, value: str, order: Sequence[str], shape: Sequence[int], last: tuple[tuple[str, int], ...] = ()
    ) -> str:
        """Returns the text of a value of this block with its dimensions in another order, as a shape.

        Some dimensions may replace the last one.
        """
        *others, own = self.dimensions
        dimensions = [item for item in (*reversed(others), *(last or (own,))) if item[1] > 1]
        names = [name for name, _ in dimensions]
        numbers = [names.index(name) for name in order if name in names]
        text = f"tl.reshape({value}, {shape_text([size for _, size in dimensions])})"
        text = text if numbers == sorted(numbers) else f"tl.permute({text}, {shape_text(numbers)})"
        return f"tl.reshape({text}, {shape_text(shape)})"


def shape_text(sizes: Sequence[int]) -> str:
    """Returns a shape as a tuple in Triton's language."""
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"
