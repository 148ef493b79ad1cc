"""Rows at indirect indices whose elements are in different lines of the cache, as those of a transposed matrix.

A block of elements is gathered in several rows before the next one: the elements of other rows are in the same lines.
"""

from __future__ import annotations

from fxwrap.loop_ir import DeviceAssert, IndirectIndex, Load
from fxwrap.printers.cpp.axis_tables import choose_tables
from fxwrap.printers.cpp.loop_plan import VECTOR_LANES, LoopPlan
from fxwrap.printers.cpp.loops import PointwisePrinter, loop_head
from fxwrap.printers.cpp.operations import print_size
from fxwrap.printers.cpp.statements import CppSourceWriter

ROWS = 64
"""Rows that are gathered together."""

MIN_ROWS = 16
"""The least number of rows that are gathered in blocks."""

LINE_BYTES = 64
CACHE_BYTES = 32768
"""Sizes in bytes of a line of the cache, and of what a block of elements spans: a common size of the L1 cache."""


def gathered_block(plan: LoopPlan) -> int:
    """Returns the number of elements of blocks in which a pointwise kernel gathers rows; 0 for another kernel."""
    kernel, lane = plan.kernel, plan.vector_axis
    if lane is None or kernel.reduced or plan.serial or plan.transposed_loads[1]:
        return 0
    if any(
        lane in kernel.value_axes[at] for at, item in enumerate(kernel.operations) if isinstance(item, DeviceAssert)
    ):
        return 0
    widest = max([_distance(plan, item) for item in kernel.operations if isinstance(item, Load)], default=0)
    if widest < LINE_BYTES:
        return 0
    block = 2 * VECTOR_LANES if 2 * VECTOR_LANES * widest <= CACHE_BYTES else VECTOR_LANES
    return 0 if isinstance(lane.size, int) and lane.size <= block else block


def _distance(plan: LoopPlan, load: Load) -> int:
    """Returns the bytes between a row's adjacent elements in memory, 0 where the kernel does not gather many rows."""
    kernel, lane = plan.kernel, plan.vector_axis
    rows = [axis for axis in kernel.axes if axis is not lane][-1:]
    used = [kernel.value_axes[item.operation] for item in load.index.atoms() if isinstance(item, IndirectIndex)]
    if lane is None or not rows or not any(rows[0] in axes for axes in used) or any(lane in axes for axes in used):
        return 0
    is_short = isinstance(rows[0].size, int) and rows[0].size < MIN_ROWS
    stride = load.index.stride(lane)
    if is_short or load.mask is not None or stride is None or stride.constant is None:
        return 0
    return abs(stride.constant) * load.dtype.itemsize


class GatheredRowPrinter(PointwisePrinter):
    """A pointwise kernel that gathers rows in blocks of so many elements."""

    def __init__(self, plan: LoopPlan, block: int, writer: CppSourceWriter, origin_comments: bool) -> None:
        super().__init__(plan, writer, origin_comments)
        self.block = block

    def print(self) -> None:
        """Writes loops over blocks of several rows, whose indices are computed before."""
        self.tables = choose_tables(self.plan)
        known = self.print_tables()
        lane, block, (*outer, row) = self.vector_axis, self.block, self.outer_axes()
        first, start, size = f"{row.name}_0", f"{lane.name}_block", print_size(row.size)
        heads = [*map(loop_head, outer), f"for (int64_t {first} = 0; {first} < {size}; {first} += {ROWS})"]
        with self.writer.nest(heads, self.parallel()):
            self.writer.line(f"const int64_t {row.name}_end = fxwrap::min<int64_t>({first} + {ROWS}, {size});")
            invariants = self.lane_invariants(known)
            values = [position for position in invariants if row in self.kernel.value_axes[position]]
            self.statements.write([position for position in invariants if position not in values], known)
            names = {position: f"{self.statements.name(position)}_rows" for position in values}
            for position, name in names.items():
                self.writer.line(f"{self.statements.type(position)} {name}[{ROWS}];")
            rows = loop_head(row, first, f"{row.name}_end")
            with self.writer.nest([rows]):
                inner = dict(known)
                self.write_device_asserts(self.device_asserts, inner)
                self.statements.write(values, inner, named=values)
                for position, name in names.items():
                    self.writer.line(f"{name}[{row.name} - {first}] = {inner[position]};")
            size = print_size(lane.size)
            with self.writer.nest([f"for (int64_t {start} = 0; {start} < {size}; {start} += {block})"]):
                self.writer.line(f"const int64_t end = fxwrap::min<int64_t>({start} + {block}, {size});")
                with self.writer.nest([rows]):
                    inner = {
                        item: self.statements.declare(item, f"{name}[{row.name} - {first}]")
                        for item, name in names.items()
                    }
                    self.write_store_loop(self.kernel.stores, {**known, **inner}, start, "end")
