"""Bounds of streaming reductions in Triton: the blocks of the innermost streamed axis that a program visits.

Limits are known before the loop. Those that vary over rows are limits of each row in the conditions of its elements,
and the loop ends at the last one.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxwrap.loop_ir import AxisBound, Kernel
from fxwrap.printers.triton.blocks import Scope
from fxwrap.printers.triton.streaming_values import StreamingValuePrinter
from fxwrap.printers.triton.tiling import StreamingConfiguration


class BoundedStreamPrinter(StreamingValuePrinter):
    """Prints the limits of one streaming reduction, outside of rows `outer`, and of loops over `leading` axes."""

    def __init__(self, kernel: Kernel, configuration: StreamingConfiguration, limits: Mapping[str, int]) -> None:
        super().__init__(kernel, configuration, limits)
        self.outer = [axis for axis in kernel.axes if axis != self.parts.row and axis not in self.parts.columns]
        self.leading, self.streamed = self.parts.axes[:-2], self.parts.axes[-2:]
        self.limits: dict[AxisBound, str] = {}

    def tiles(self, scope: Scope) -> str:
        """Prints the number of blocks of the innermost axis within its bounds; returns the first one, "" for 0."""
        size = end = self.index_printer(scope).size_operand(self.inner.size)
        start, outside = "", frozenset([*self.outer, *self.leading, self.parts.row])
        self.limits = {}
        for bound in self.parts.bounds:
            if bound.axis == self.inner and self.kernel.value_axes[bound.limit] <= outside:
                limit = self._limit(bound, size, scope)
                if bound.is_lower:
                    start = f"tl.maximum({start}, {limit})" if start else limit
                else:
                    end = limit if end == size else f"tl.minimum({end}, {limit})"
        if not start:
            self.line(f"tiles = tl.cdiv({end}, KEY_BLOCK)")
            return ""
        self.line(f"first_tile = {start} // KEY_BLOCK")
        self.line(f"tiles = tl.maximum(tl.cdiv({end}, KEY_BLOCK) - first_tile, 0)")
        return "first_tile"

    def _limit(self, bound: AxisBound, size: str, scope: Scope) -> str:
        """Prints the limit of a bound of an axis; returns the text of that of a block of rows, from 0 to the size."""
        self.write([bound.limit], scope)
        limit = self.limits[bound] = self.names.create_name("limit")
        index, row = "tl.int64" if self.use_int64 else "tl.int32", self.parts.row
        self.line(f"{limit} = tl.minimum(tl.maximum({self.value(bound.limit, scope)}, 0), {size}).to({index})")
        if self.parts.is_exact(bound):
            return limit
        text, neutral = limit, size if bound.is_lower else "0"
        if row in scope.masks:
            text = f"tl.where({scope.masks[row]}, {limit}, {neutral})"
        return f"tl.{'min' if bound.is_lower else 'max'}({text})"

    def write_conditions(self, scope: Scope) -> None:
        """Prints the conditions of bounds as comparisons with limits, which have no more bits than indices."""
        for bound, limit in self.limits.items():
            name = self.names.create_name("inside")
            relation = ">=" if bound.is_lower == bound.holds else "<"
            self.line(f"{name} = {scope.names[self.inner]} {relation} {limit}")
            scope.text[bound.condition] = name
