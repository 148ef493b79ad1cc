"""The loops of streaming reductions as C++, over tiles of rows and of the streamed axes, and these tiles.

Rows of a tile are lanes. Factors that do not depend on rows are packed, in the type of the computation, into tiles that
stay in the nearest caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from fxwrap.loop_ir import (
    FAR_ABOVE_LOWEST,
    ZERO,
    Axis,
    AxisBound,
    Contraction,
    KernelError,
    Load,
    StreamingReduction,
    as_index,
    assume,
)
from fxwrap.printers.cpp.loop_plan import LoopPlan
from fxwrap.printers.cpp.loops import LoopPrinter, loop_head
from fxwrap.printers.cpp.operations import CPP_TYPES, print_size
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues
from fxwrap.printers.cpp.streaming_tiles import asserts_by_scope, at_most, element_count, position_of, round_up

_MAX_LANES = 64
"""Rows of a tile."""

_MAX_KEYS = 64
"""Positions of the innermost streamed axis in a tile."""

_MAX_TILE_ELEMENTS = 98304
"""Elements of all tiles, which are on the stack of a thread."""


class StreamingLoopPrinter(LoopPrinter):
    """The loops and tiles of a streaming reduction. Raises KernelError where the tiles do not fit on a stack."""

    def __init__(
        self, plan: LoopPlan, parts: StreamingReduction, writer: CppSourceWriter, origin_comments: bool
    ) -> None:
        super().__init__(replace(plan, kernel=parts.kernel), writer, origin_comments)
        self.parts = parts
        self.inner = parts.axes[-1]
        self.outer = [axis for axis in self.kernel.axes if axis != parts.row and axis not in parts.columns]
        self.lanes = self._row_count()
        self.statements.gather_loads = replace(self.plan, vector_axis=self._lane_axis()).gather_loads
        self.keys = at_most(_MAX_KEYS, self.inner.size)
        self.type = CPP_TYPES[self.statements.dtype(parts.products[0].position)]
        depths = [element_count(item.axes) for item in parts.products]
        widths = [self._width(item) for item in parts.weighted_sums]
        elements = self.lanes * self.keys * (len(depths) + len(parts.weights) - (parts.softmax is not None))
        elements += (self.lanes + self.keys) * (sum(depths) + sum(widths))
        self.matrices = self._matrix_loads()
        elements += self.lanes * self.keys * len(self.matrices)
        if elements > _MAX_TILE_ELEMENTS:
            raise KernelError(f"the tiles of its streaming reduction have {elements} elements, too many for a stack")
        self.asserts = asserts_by_scope(self.kernel, parts, self.outer, self.device_asserts)

    def _lane_axis(self) -> Axis:
        """The axis of the elements that are computed at once."""
        return self.parts.row

    def _row_count(self) -> int:
        """Returns the rows of a tile."""
        return round_up(at_most(_MAX_LANES, self.parts.row.size), 16)

    def _columns(self, item: Contraction) -> tuple[Axis, ...]:
        """Returns the column that the values of a sum vary along, if any."""
        return tuple([axis for axis in self.parts.columns if axis in self.kernel.value_axes[item.right]])

    def _width(self, item: Contraction) -> int:
        """Returns the elements of the values of a sum for one position, rounded up as in its tile."""
        return round_up(element_count(self._columns(item)))

    def _depth(self, item: Contraction) -> int:
        """Returns the elements of a position in the tile of a product's second factors."""
        return element_count(item.axes)

    # --- scopes -------------------------------------------------------------------------------------------------------

    def _hoist(self, targets: Iterable[int], axes: Collection[Axis], known: EmittedValues) -> None:
        """Writes the values among those that the targets are computed from that depend on these axes only.

        A masked load depends on the axes of its mask, where that is not assumed to hold.
        """
        targets, allowed, kernel = list(targets), frozenset(axes), self.statements.kernel
        positions = sorted(kernel.backward_slice(targets, known))
        fixed = {item for item in positions if kernel.value_axes[item] <= allowed}
        needed = sorted(self.frontier(positions, fixed) | fixed.intersection(targets))
        self.statements.write(needed, known, named=needed)

    @contextmanager
    def _lane_loop(self, asserts: Collection[int] = ()) -> Iterator[None]:
        """Opens the vectorised loop over the rows of a tile; those beyond the end repeat the last one.

        `asserts` are the assertions that it checks.
        """
        row, size = self.parts.row.name, self.parts.row.size
        is_whole = isinstance(size, int) and size % self.lanes == 0
        index = f"{row}_0 + lane"
        with self._lanes(self.clause if asserts else ""):
            text = index if is_whole else f"fxwrap::min<int64_t>({index}, {print_size(size)} - 1)"
            self.writer.line(f"const int64_t {row} = {text};")
            yield

    @contextmanager
    def _lanes(self, clause: str = "") -> Iterator[None]:
        with self.writer.nest([f"for (int lane = 0; lane < {self.lanes}; ++lane)"], f"#pragma omp simd{clause}"):
            yield

    @contextmanager
    def _assume(self, conditions: Mapping[int, bool]) -> Iterator[None]:
        """Prints with known values of conditions."""
        kernel = self.statements.kernel
        self.statements.kernel = assume(kernel, conditions)
        yield
        self.statements.kernel = kernel

    @contextmanager
    def _key_loop(self) -> Iterator[None]:
        """Opens the loop over the positions of a tile of the innermost streamed axis."""
        with self.writer.block("for (int64_t key = 0; key < count; ++key)"):
            self.writer.line(f"const int64_t {self.inner.name} = {self.inner.name}_0 + key;")
            yield

    @contextmanager
    def _streamed_loops(self, known: EmittedValues) -> Iterator[EmittedValues]:
        """Opens the loops over tiles of the streamed axes, within bounds; the conditions of exact ones hold inside."""
        axes = self.parts.axes
        with ExitStack() as stack:
            for number, axis in enumerate(axes):
                start, end, name, step = "0", print_size(axis.size), axis.name, f"++{axis.name}"
                bounds = [bound for bound in self.parts.bounds if bound.axis == axis]
                start, end = self._within(bounds, [*self.outer, *axes[:number]], start, end, known)
                if axis == self.inner:
                    name, step = f"{axis.name}_0", f"{axis.name}_0 += {self.keys}"
                if self.parts.lowest_masks and len(axes) == 1:
                    start, end = stack.enter_context(self._far_loop(start, end, known))
                head = f"for (int64_t {name} = {start}, {axis.name}_end = {end}; {name} < {axis.name}_end; {step})"
                stack.enter_context(self.writer.nest([head]))
            yield known

    def _within(
        self, bounds: Iterable[AxisBound], axes: Sequence[Axis], start: str, end: str, known: EmittedValues
    ) -> tuple[str, str]:
        """Writes the limits of bounds of an axis; returns the texts of the first position within them and the end."""
        for bound in bounds:
            limit = self._limit(bound, axes, known)
            start = f"fxwrap::max<int64_t>({start}, {limit})" if bound.is_lower else start
            end = end if bound.is_lower else f"fxwrap::min<int64_t>({end}, {limit})"
        return start, end

    @contextmanager
    def _far_loop(self, start: str, end: str, known: EmittedValues) -> Iterator[tuple[str, str]]:
        """Opens a loop over positions within the lowest masks, then those before and after them where a row needs any.

        Yields the texts of the first position of a part and of its end.
        """
        line = self.writer.line
        line(f"const int64_t first = {start}, last = fxwrap::max<int64_t>(first, {end});")
        near_start, near_end = self._within(self.parts.lowest_masks, self.outer, "first", "last", known)
        line(f"const int64_t near_start = fxwrap::min<int64_t>({near_start}, last);")
        line(f"const int64_t near_end = fxwrap::max<int64_t>(near_start, {near_end});")
        with self.writer.block("for (int part = 0; part < 3; ++part)"):
            with self.writer.block("if (part == 1)"):
                line(f"{self.type} least = maxima[0];")
                with self.writer.nest([f"for (int lane = 1; lane < {self.lanes}; ++lane)"]):
                    line("least = maxima[lane] < least ? maxima[lane] : least;")
                line(f"if (least > {self.type}({FAR_ABOVE_LOWEST})) break;")
            line("const int64_t part_start = part == 0 ? near_start : part == 1 ? first : near_end;")
            line("const int64_t part_end = part == 0 ? near_end : part == 1 ? near_start : last;")
            yield "part_start", "part_end"

    def _limit(self, bound: AxisBound, axes: Sequence[Axis], known: EmittedValues) -> str:
        """Writes the limit of a bound for a tile of rows, where axes have indices; returns its text."""
        self._hoist([bound.limit], axes, known)
        if self.parts.is_exact(bound):
            return known[bound.limit]
        row, size, name = self.parts.row.name, print_size(self.parts.row.size), f"limit_{bound.condition}"
        values, combine, start = dict(known), *(("min", "INT64_MAX") if bound.is_lower else ("max", "INT64_MIN"))
        self.writer.line(f"int64_t {name} = {start};")
        with self.writer.block(f"for (int lane = 0; lane < {self.lanes} && {row}_0 + lane < {size}; ++lane)"):
            self.writer.line(f"const int64_t {row} = {row}_0 + lane;")
            self.statements.write([bound.limit], values)
            self.writer.line(f"{name} = fxwrap::{combine}<int64_t>({name}, {values[bound.limit]});")
        return name

    # --- tiles --------------------------------------------------------------------------------------------------------

    def _declare(self, name: str, elements: int, value: str = "") -> None:
        self.writer.line(f"alignas(64) {self.type} {name}[{elements}]{value};")

    def _element(self, tile: str) -> str:
        """Returns the element of a tile of products or weights in the loops over its positions and rows."""
        return f"{tile}[key * {self.lanes} + lane]"

    def _pack(self, tile: str, value: int, axes: Sequence[Axis], stride: int, known: EmittedValues) -> None:
        """Writes a tile of factors that do not depend on rows, `stride` elements for each key."""
        with self._key_loop():
            values = dict(known)
            self._hoist([value], [*self.outer, *self.parts.axes], values)
            self._print_key(value, axes, values)
            heads = [loop_head(axis) for axis in axes]
            with self.writer.nest(heads[:-1]), self.writer.nest(heads[-1:], "#pragma omp simd"):
                self.statements.write([value], values)
                self.writer.line(f"{tile}[key * {stride} + {position_of(axes)}] = {values[value]};")

    def _print_key(self, value: int, axes: Sequence[Axis], known: EmittedValues) -> None:
        """Writes what is done once for each position of a tile of factors."""

    def _matrix_loads(self) -> tuple[int, ...]:
        """Returns the loads whose neighbours in memory are of neighbouring keys: rows are far apart.

        Read row by row, each in whole cache lines, they become a tile in which rows are lanes.
        """
        row, inner = self.parts.row, self.inner
        factors = [item.factor for item in self.parts.scaled_weights]
        positions = sorted(self.kernel.backward_slice([*self.parts.elements, *factors]))
        return tuple([
            position for position in sorted(positions)
            if isinstance(load := self.kernel.operations[position], Load) and load.mask is None
            and load.index.stride(inner) == as_index(1) and load.index.stride(row) not in (None, ZERO, as_index(1))
        ])  # fmt: skip

    def _pack_matrix(self, position: int, known: EmittedValues) -> None:
        """Writes a tile of a matrix of rows and keys."""
        name, type_ = f"matrix_{position}", CPP_TYPES[self.statements.dtype(position)]
        self.writer.line(f"alignas(64) {type_} {name}[{self.keys * self.lanes}];")
        row, size = self.parts.row.name, print_size(self.parts.row.size)
        with self.writer.block(f"for (int lane = 0; lane < {self.lanes}; ++lane)"):
            self.writer.line(f"const int64_t {row} = fxwrap::min<int64_t>({row}_0 + lane, {size} - 1);")
            with self._key_loop():
                values = dict(known)
                self.statements.write([position], values)
                self.writer.line(f"{self._element(name)} = {values[position]};")
        known[position] = self._element(name)
