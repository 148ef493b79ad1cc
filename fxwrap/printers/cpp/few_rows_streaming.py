"""Streaming reductions of few rows as C++: decoding, whose time is that of reading keys and values.

Positions of the streamed axis are lanes, since rows would fill no vector. A product is a sum along the width of a head,
of which sixteen positions are combined at once, and weighted sums are vectors along the columns of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fxwrap.loop_ir import (
    Axis,
    Compute,
    Constant,
    Contraction,
    DeviceAssert,
    IndirectIndex,
    Kernel,
    Load,
    StreamingReduction,
    as_index,
)
from fxwrap.printers.cpp.loop_plan import LoopPlan
from fxwrap.printers.cpp.operations import parenthesize
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues
from fxwrap.printers.cpp.streaming import StreamingPrinter
from fxwrap.printers.cpp.streaming_tiles import element_count, position_of, round_up

MAX_ROWS = 8
"""More rows fill a good part of a vector."""

_LANES = 16
"""Positions that are combined at once, as in `kernel.h`."""

_LINE_BYTES = 64


def has_few_rows(kernel: Kernel, parts: StreamingReduction) -> bool:
    """Whether a streaming reduction has few rows, and a running maximum; it checks no position."""
    size = parts.row.size
    is_small = isinstance(size, int) and 0 < size <= MAX_ROWS
    asserts = [position for position, item in enumerate(kernel.operations) if isinstance(item, DeviceAssert)]
    is_checked = any(parts.axes[-1] in kernel.value_axes[position] for position in asserts)
    return is_small and parts.softmax is not None and not (parts.updates or parts.row_updates or is_checked)


class FewRowsPrinter(StreamingPrinter):
    """A streaming reduction of few rows, as `has_few_rows` says; all of them are one tile."""

    def __init__(
        self, plan: LoopPlan, parts: StreamingReduction, writer: CppSourceWriter, origin_comments: bool
    ) -> None:
        super().__init__(plan, parts, writer, origin_comments)
        self.keys = round_up(self.keys, _LANES)
        self.factors: dict[str, tuple[str, str, bool]] = {}

    def _lane_axis(self) -> Axis:
        return self.inner

    def _row_count(self) -> int:
        assert isinstance(self.parts.row.size, int), "few rows are a constant number"
        return self.parts.row.size

    def _matrix_loads(self) -> tuple[int, ...]:
        """Returns nothing: elements of neighbouring positions are neighbours in memory."""
        return ()

    def _depth(self, item: Contraction) -> int:
        return round_up(element_count(item.axes), _LANES)

    def _width(self, item: Contraction) -> int:
        return round_up(element_count(self._columns(item)), _LANES)

    def _row_element(self, item: Contraction) -> str:
        return f"rows_{item.position}[lane * {self._depth(item)} + {position_of(item.axes)}]"

    def _sum_element(self, item: Contraction) -> str:
        return f"sums_{item.position}[lane * {self._width(item)} + {position_of(self._columns(item))}]"

    def _element(self, tile: str) -> str:
        return f"{tile}[lane * {self.keys} + key]"

    @contextmanager
    def _rows_and_keys(self, known: EmittedValues, *targets: int) -> Iterator[EmittedValues]:
        """Opens the loop over rows, and in it the values that the targets are computed from and all keys share."""
        row = self.parts.row.name
        with self.writer.block(f"for (int lane = 0; lane < {self.lanes}; ++lane)"):
            self.writer.line(f"const int64_t {row} = {row}_0 + lane;")
            values = dict(known)
            self._hoist(targets, [*self.outer, self.parts.row, *self.parts.axes[:-1]], values)
            yield values

    @contextmanager
    def _keys_of_row(self) -> Iterator[None]:
        """Opens the vectorised loop over the positions of a tile; `part` is the lane."""
        with self.writer.block(f"for_lanes<{_LANES}>(count, [&](int64_t key, int part)", "});"):
            self.writer.line(f"const int64_t {self.inner.name} = {self.inner.name}_0 + key;")
            yield

    # --- a tile of the streamed axes --------------------------------------------------------------------------------

    def _print_tile_condition(self, known: EmittedValues) -> None:
        """Writes the end of the step of a tile of positions that all rows mask: nothing of it is read."""
        visible = self._visible_operand()
        if visible is None:
            return
        position, is_bias = visible
        line = self.writer.line
        line(f"Lanes<int, {_LANES}> visible(0);")
        with self._rows_and_keys(known, position) as values, self._keys_of_row():
            self.statements.write([position], values)
            text = f"{values[position]} != {self._lowest}" if is_bias else values[position]
            line(f"visible[part] |= int({text});")
        line("if (visible.combined(combine::max) == 0) continue;")

    def _visible_operand(self) -> tuple[int, bool] | None:
        """Returns the value that masks scores whatever their products are: a bias, if True, or a condition."""
        assert self.parts.softmax is not None, "few rows have a running maximum"
        kernel = self.statements.kernel
        operation = kernel.operations[self.parts.softmax.scores]
        if not isinstance(operation, Compute) or operation.name not in ("where", "add"):
            return None
        if operation.name == "where":
            condition, _, other = operation.operands
            value = kernel.operations[other]
            is_lowest = isinstance(value, Constant) and value.value == -math.inf
            candidates = [condition] if is_lowest else []
        else:
            candidates = list(operation.operands)
        products = {item.position for item in self.parts.products}
        for position in candidates:
            if isinstance(kernel.operations[position], Constant):
                continue
            if products.isdisjoint(self.kernel.backward_slice([position])):
                return position, operation.name == "add"
        return None

    def _pack(self, tile: str, value: int, axes: Sequence[Axis], stride: int, known: EmittedValues) -> None:
        load = self._row_load(value, axes)
        if load is None or self.statements.kernel.operations[value] is not load or element_count(axes) % _LANES:
            super()._pack(tile, value, axes, stride, known)
            self.factors[tile] = tile, str(stride), False
            return
        index, across = self.statements.index(known), load.index.stride(self.inner)
        assert across is not None, "rows in memory have a stride"
        first = load.index.substitute({axes[0]: 0, self.inner: Axis(f"{self.inner.name}_0", self.inner.size)})
        self.factors[tile] = f"{load.buffer} + {index(first)}", index(across), True

    def _print_key(self, value: int, axes: Sequence[Axis], known: EmittedValues) -> None:
        """Writes the prefetches of the same position of the next tile."""
        load = self._row_load(value, axes)
        if load is not None:
            first = load.index.substitute({axes[0]: 0, self.inner: as_index(self.inner) + self.keys})
            text = f"{load.buffer} + {self.statements.index(known)(first)}"
            for start in range(0, element_count(axes), _LINE_BYTES // load.dtype.itemsize):
                self.writer.line(f"prefetch_line({text} + {start});")

    def _row_load(self, value: int, axes: Sequence[Axis]) -> Load | None:
        """Returns the load that a factor is, or widens, if its elements are contiguous for each position; else None.

        A value may select the block of all positions of a tile, as the list of a block mask does.
        """
        operations = self.statements.kernel.operations  # under the conditions of the loops' bounds
        operation = operations[value]
        if isinstance(operation, Compute) and operation.name == "cast":
            operation = operations[operation.operands[0]]
        if not isinstance(operation, Load) or operation.mask is not None:
            return None
        selecting = [atom.operation for atom in operation.index.atoms() if isinstance(atom, IndirectIndex)]
        if any(not self.kernel.value_axes[at].isdisjoint((*axes, self.inner)) for at in selecting):
            return None
        strides = [operation.index.stride(axis) for axis in axes]
        return operation if strides == [as_index(1)] and operation.index.stride(self.inner) is not None else None

    def _print_product(self, item: Contraction) -> None:
        keys, across, is_direct = self.factors[f"keys_{item.position}"]
        name = f"contract_rows<{self.lanes}, {str(is_direct).lower()}, {self.type}>"
        tiles = f"rows_{item.position}, {keys}, {across}, {self._depth(item)}, count, products_{item.position}"
        self.writer.line(f"{name}({tiles}, {self.keys}, {self.keys} * {across});")

    def _print_elements(self, known: EmittedValues) -> None:
        softmax, line = self.parts.softmax, self.writer.line
        assert softmax is not None, "few rows have a running maximum"
        with self._rows_and_keys(known, softmax.scores) as values:
            line(f"Lanes<{self.type}, {_LANES}> largest({self._lowest});")
            with self._keys_of_row():
                inside = dict(values)
                self.statements.write([softmax.scores], inside, named=[softmax.scores])
                line(f"{self._element(self._scores)} = {inside[softmax.scores]};")
                line(f"largest[part] = combine::max(largest[part], {inside[softmax.scores]});")
            line("next[lane] = combine::max(next[lane], largest.combined(combine::max));")

    def _print_weights(self) -> None:
        line, sums = self.writer.line, self.parts.sums
        with self.writer.block(f"for (int lane = 0; lane < {self.lanes}; ++lane)"):
            line(f"Lanes<{self.type}, {_LANES}> total({self.type}(0));")
            with self._keys_of_row():
                line(f"const {self.type} weight = op::weight({self._element(self._scores)} - next[lane]);")
                line(f"{self._element(self._scores)} = weight;")
                line("total[part] += weight;")
            for item in sums:
                name = f"sums_{item.position}[lane]"
                line(f"{name} = {name} * factors[lane] + total.combined(combine::sum);")

    def _print_scaled_weights(self, known: EmittedValues) -> None:
        for item in self.parts.scaled_weights:
            with self._rows_and_keys(known, item.factor) as values, self._keys_of_row():
                self.statements.write([item.factor], values)
                product = f"{self._element(self._scores)} * {parenthesize(values[item.factor])}"
                self.writer.line(f"{self._element(f'weights_{item.position}')} = {product};")

    def _print_accumulation(self, item: Contraction, weights: str) -> None:
        values, across, is_direct = self.factors[f"values_{item.position}"]
        name = f"accumulate_rows<{self.lanes}, {str(is_direct).lower()}, {self.type}>"
        tiles = f"{weights}, {self.keys}, {values}, {across}, count, factors, sums_{item.position}"
        self.writer.line(f"{name}({tiles}, {self._width(item)}, {self.keys} * {across});")
