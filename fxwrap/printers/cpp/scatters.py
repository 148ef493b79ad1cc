"""Loops of kernels that combine values with elements of memory, which several iterations may reach.

Elements are combined in the order of the loops: results do not depend on the number of threads. Threads divide columns,
or axes along which no two iterations reach an element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace

from fxwrap.loop_ir import OPERATIONS, Compute, IndirectIndex, Load, operands
from fxwrap.printers.cpp.axis_tables import choose_tables
from fxwrap.printers.cpp.loop_plan import MIN_PARALLEL_WORK, SCATTER_BLOCK, VECTOR_COST
from fxwrap.printers.cpp.loops import PointwisePrinter, loop_head
from fxwrap.printers.cpp.operations import print_size
from fxwrap.printers.cpp.statements import EmittedValues

VALUE_BLOCK = 64
"""Values that are computed as vectors before they are combined with memory one by one."""


class ScatterPrinter(PointwisePrinter):
    """A pointwise kernel whose stores combine values with those in memory."""

    def print(self) -> None:
        """Writes the loops."""
        if self.plan.vector_axis is None:
            super().print()
            return
        inner = [item for item in self.device_asserts if self.vector_axis in self.kernel.value_axes[item]]
        if self.plan.scatters_are_disjoint:
            self.print_columns(inner)
        elif not self.has_expensive_values():
            super().print()
        else:
            self.tables = choose_tables(self.plan)
            self.statements.lane, known = self.vector_axis, self.print_tables()
            with self.writer.nest([loop_head(axis) for axis in self.outer_axes()], self.parallel()):
                self.hoist(known)
                self.write_device_asserts([item for item in self.device_asserts if item not in inner], known)
                self.print_blocks(inner, known, "0", print_size(self.vector_axis.size))

    def is_parallel(self) -> bool:
        """Whether threads may share the outer axes: no two iterations of them reach an element."""
        axes = self.outer_axes()
        return bool(axes) and all(self.plan.is_scattered_apart(axis) for axis in axes)

    def has_expensive_values(self) -> bool:
        """Whether vectors are worth blocks of values, none of which depends on what the kernel has stored."""
        stored = {store.buffer for store in self.kernel.stores}
        if any(isinstance(item, Load) and item.buffer in stored for item in self.kernel.operations):
            return False
        return any(
            isinstance(item, Compute)
            and OPERATIONS[item.name].cost >= VECTOR_COST
            and self.vector_axis in self.kernel.value_axes[position]
            for position, item in enumerate(self.kernel.operations)
        )

    def print_columns(self, inner: Collection[int]) -> None:
        """Writes loops in which each thread updates a block of columns of all rows, in order: no two threads meet.

        `inner` are the assertions that depend on the vectorised axis.
        """
        lane, first, work = self.vector_axis, f"{self.vector_axis.name}_0", self.plan.work
        if isinstance(lane.size, int) and lane.size <= SCATTER_BLOCK:
            self.print_rows(inner, "0", "")
            return
        is_large = not isinstance(work, int) or work >= MIN_PARALLEL_WORK
        pragma = f"#pragma omp parallel for schedule(static){self.clause}" if is_large else ""
        self.writer.line(f"const int64_t block = {f'scattered_columns({lane.size})' if is_large else lane.size};")
        with self.writer.nest([f"for (int64_t {first} = 0; {first} < {lane.size}; {first} += block)"], pragma):
            self.writer.line(f"const int64_t end = fxwrap::min<int64_t>({first} + block, {lane.size});")
            self.print_rows(inner, first, "end")

    def print_rows(self, inner: Collection[int], start: str, end: str) -> None:
        """Writes the loops over all rows that update a part of their columns. A row's condition is around its loop."""
        lane, stores = self.vector_axis, self.kernel.stores
        masks = {store.mask for store in stores}
        mask = masks.pop() if len(masks) == 1 and not inner else None
        with self.writer.nest([loop_head(axis) for axis in self.outer_axes()]):
            known: EmittedValues = {}
            self.hoist(known)
            self.write_device_asserts([item for item in self.device_asserts if item not in inner], known)
            if self.scatters_lanes() and self.has_expensive_values():
                self.print_blocks(inner, known, start, end or print_size(lane.size))
                return
            condition = None if mask is None or lane in self.kernel.value_axes[mask] else known[mask]
            if condition is not None:
                stores = tuple([replace(store, mask=None) for store in stores])
            with nullcontext() if condition is None else self.writer.block(f"if ({condition})"):
                pragma = "" if self.scatters_lanes() else f"#pragma omp simd{self.clause if inner else ''}"
                with self.writer.nest([loop_head(lane, start, end)], pragma):
                    self.write_device_asserts(inner, known)
                    self.write_stores(stores, known)

    def scatters_lanes(self) -> bool:
        """Whether each lane has an index of its own: processors update such elements one by one, or take as long."""
        return any(
            isinstance(atom, IndirectIndex) and self.vector_axis in self.kernel.value_axes[atom.operation]
            for store in self.kernel.stores
            for atom in store.index.atoms()
        )

    def print_blocks(self, inner: Collection[int], known: Mapping[int, str], start: str, end: str) -> None:
        """Writes the loop along the vectorised axis in blocks: the values as vectors, then their stores in order."""
        lane, first, stores = self.vector_axis, f"{self.vector_axis.name}_1", self.kernel.stores
        targets = sorted({item for store in stores for item in operands(store)})
        lanes = "for (int lane = 0; lane < count; ++lane)"
        with self.writer.nest([f"for (int64_t {first} = {start}; {first} < {end}; {first} += {VALUE_BLOCK})"]):
            self.writer.line(f"const int count = int(fxwrap::min<int64_t>({VALUE_BLOCK}, {end} - {first}));")
            names = {item: f"{self.statements.name(item)}_block" for item in targets if item not in known}
            for item, name in names.items():
                self.writer.line(f"{self.statements.type(item)} {name}[{VALUE_BLOCK}];")
            with self.writer.nest([lanes], f"#pragma omp simd{self.clause if inner else ''}"):
                self.writer.line(f"const int64_t {lane.name} = {first} + lane;")
                values = dict(known)
                self.write_device_asserts(inner, values)
                self.statements.write(targets, values)
                for item, name in names.items():
                    self.writer.line(f"{name}[lane] = {values[item]};")
            with self.writer.nest([lanes]):
                self.writer.line(f"const int64_t {lane.name} = {first} + lane;")
                blocks = {
                    item: self.statements.element(f"{name}[lane]", self.statements.dtype(item))
                    for item, name in names.items()
                }
                for store in stores:
                    self.statements.store(store, {**known, **blocks})
