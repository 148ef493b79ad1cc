"""Regions of a program's body in which lines may be reordered, and the peak memory of their orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fxwrap import wrapper_ir as ir
from fxwrap.lines.frees import insert_frees
from fxwrap.passes.scheduling_units import SchedulingUnit, build_units, split_regions
from fxwrap.symbolic import Number, evaluate

Orders: TypeAlias = Sequence[Sequence[int]]
"""The order of the units of each region, by index."""


class SchedulingRegions:
    """The regions of a program's body between brackets, as units with their dependences."""

    def __init__(self, program: ir.Program, hints: Mapping[str, Number]) -> None:
        self.program = program
        self.arguments = ir.program_arguments(program)
        root_of = ir.alias_roots(program.body.lines, self.arguments)
        functions = dict(program.functions)
        lines = [line for line in program.body.lines if not ir.is_release(line)]
        has_symbols = bool(ir.symbol_infos(program))
        self.regions = [build_units(region, root_of, functions, has_symbols) for region in split_regions(lines)]
        self.sizes = _owned_sizes(program, hints)
        self.uses = Counter([root for units in self.regions for unit in units for root in unit.accessed])
        """The number of units that use each root."""

    @property
    def program_order(self) -> Orders:
        """The order of the program."""
        return [range(len(units)) for units in self.regions]

    def peak(self, orders: Orders) -> int:
        """Returns the peak of the memory that the body may free, without blocks inside lines."""
        sizes, remaining = self.sizes, dict(self.uses)
        live = peak = 0
        for units, order in zip(self.regions, orders, strict=True):
            for unit in [units[index] for index in order]:
                live += sum([sizes.get(root, 0) for root in unit.defined_roots])
                peak = max(peak, live - sum([sizes.get(root, 0) for root in unit.consumed_roots]))
                for root in unit.accessed:
                    remaining[root] -= 1
                    if not remaining[root]:
                        live -= sizes.get(root, 0)
        return peak

    def apply_order(
        self, orders: Orders, changed: Mapping[SchedulingUnit, Sequence[ir.LineBase]] | None = None
    ) -> ir.Program:
        """Returns the program with the units of each region in an order, and with the `changed` lines of some."""
        changed = changed or {}
        lines = [line for units, order in zip(self.regions, orders, strict=True) for index in order
                 for line in changed.get(units[index], units[index].lines)]  # fmt: skip
        freed = insert_frees(lines, self.arguments, ir.released_inputs(self.program.inputs))
        return self.program.replace(body=ir.Block(self.program.body.arguments, freed))


def _owned_sizes(program: ir.Program, hints: Mapping[str, Number]) -> dict[str, int]:
    """Returns the size in bytes of each root of the body that it may free or return."""
    owned = ir.released_inputs(program.inputs)
    owned += [value for line in program.body.lines for value in ir.defined(line) if line.alias_of(value) is None]
    sizes = {value.name: value.type.storage_bytes for value in owned if isinstance(value.type, ir.TensorType)}
    values = ir.symbol_values(program, hints) if any(not isinstance(size, int) for size in sizes.values()) else {}
    return {name: int(evaluate(size, values)) for name, size in sizes.items()}
