"""Streaming reductions of few rows as C++: decoding, whose time is that of reading keys and values.

Positions of the streamed axis are lanes, since rows would fill no vector. A product is a sum along the width of a head,
of which sixteen positions are combined at once, and weighted sums are vectors along the columns of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fxwrap.loop_ir import Axis, Compute, Constant, Contraction, DeviceAssert, Kernel, Load, StreamingReduction, as_index
from fxwrap.printers.cpp.contractions import is_direct
from fxwrap.printers.cpp.loop_plan import LoopPlan
from fxwrap.printers.cpp.operations import parenthesize
from fxwrap.printers.cpp.statements import CppSourceWriter, EmittedValues
from fxwrap.printers.cpp.streaming import StreamingPrinter, element_count, position_of, round_up

MAX_ROWS = 8
"""More rows fill a good part of a vector."""

_LANES = 16
"""Positions that are combined at once, as in `kernel.h`."""

_LINE_BYTES = 64


def has_few_rows(kernel: Kernel, parts: StreamingReduction) -> bool:
    """Whether a streaming reduction has few rows, and a running maximum; it checks no element."""
    size = parts.row.size
    is_small = isinstance(size, int) and size <= MAX_ROWS
    is_checked = any(isinstance(item, DeviceAssert) for item in kernel.operations)
    return is_small and parts.softmax is not None and not (parts.updates or parts.row_updates or is_checked)


class FewRowsPrinter(StreamingPrinter):
    """A streaming reduction of few rows, as `has_few_rows` says; all of them are one tile."""

    def __init__(
        self, plan: LoopPlan, parts: StreamingReduction, writer: CppSourceWriter, origin_comments: bool
    ) -> None:
        super().__init__(plan, parts, writer, origin_comments)
        self.keys = round_up(self.keys, _LANES)

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
            if products.isdisjoint(self.statements.backward_slice([position], {})):
                return position, operation.name == "add"
        return None

    def _pack(self, tile: str, value: int, axes: Sequence[Axis], stride: int, known: EmittedValues) -> None:
        self._print_prefetches(value, element_count(axes), known)
        super()._pack(tile, value, axes, stride, known)

    def _print_prefetches(self, value: int, count: int, known: EmittedValues) -> None:
        """Writes the prefetches of the next tile's elements, where they are contiguous for each position."""
        kernel = self.kernel
        for at in sorted(self.statements.backward_slice([value], {})):
            load = kernel.operations[at]
            if not isinstance(load, Load) or load.mask is not None or not is_direct(load):
                continue
            axes = [axis for axis in load.index.axes() if axis not in (*self.outer, *self.parts.axes)]
            if self.inner not in load.index.axes() or [load.index.stride(axis) for axis in axes] != [as_index(1)]:
                continue
            first = load.index.substitute({axes[0]: 0, self.inner: as_index(self.inner) + self.keys})
            with self._key_loop():
                for start in range(0, count, _LINE_BYTES // load.dtype.itemsize):
                    self.writer.line(f"prefetch_line({load.buffer} + {self.statements.index(known)(first)} + {start});")

    def _print_product(self, item: Contraction) -> None:
        tiles = f"rows_{item.position}, keys_{item.position}"
        arguments = f"{tiles}, {self._depth(item)}, count, products_{item.position}, {self.keys}"
        self.writer.line(f"contract_rows<{self.lanes}, {self.type}>({arguments});")

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
        tiles = f"{weights}, {self.keys}, values_{item.position}"
        arguments = f"{tiles}, {self._width(item)}, count, factors, sums_{item.position}"
        self.writer.line(f"accumulate_rows<{self.lanes}, {self.type}>({arguments});")
