"""A program's body as parts within which lines may change places, and what an order of them means for its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxwrap.lines.frees import insert_frees
from fxwrap.passes.units import Unit, segments, units_of
from fxwrap.symbolic import Scalar, evaluate
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Program,
    TensorType,
    defined,
    is_release,
    known_values,
    program_arguments,
    released_inputs,
    roots,
    symbol_infos,
)

Orders = Sequence[Sequence[int]]
"""For each part of a program, its units by index."""


class Parts:
    """The parts of a program's body between brackets, as units with what must come before what."""

    def __init__(self, program: Program, hints: Mapping[str, Scalar]) -> None:
        self.program = program
        self.arguments = program_arguments(program)
        root_of = roots(program.body.lines, self.arguments)
        functions = dict(program.functions)
        kept = [line for line in program.body.lines if not is_release(line)]
        has_symbols = bool(symbol_infos(program))
        self.parts = [units_of(segment, root_of, functions, has_symbols) for segment in segments(kept)]
        self.sizes = _owned_sizes(program, hints)
        self.uses: dict[str, int] = {}
        """How many units touch each root."""
        for units in self.parts:
            for unit in units:
                for root in unit.touched:
                    self.uses[root] = self.uses.get(root, 0) + 1

    @property
    def as_they_are(self) -> Orders:
        """The order of the program."""
        return [range(len(units)) for units in self.parts]

    def peak(self, orders: Orders) -> int:
        """Returns the most bytes that are live at once, of what may be freed, blocks inside of lines left out."""
        sizes, remaining = self.sizes, dict(self.uses)
        live = peak = 0
        for units, order in zip(self.parts, orders, strict=True):
            for unit in [units[index] for index in order]:
                live += sum([sizes.get(root, 0) for root in unit.made])
                peak = max(peak, live - sum([sizes.get(root, 0) for root in unit.taken]))
                for root in unit.touched:
                    remaining[root] -= 1
                    if not remaining[root]:
                        live -= sizes.get(root, 0)
        return peak

    def ordered(self, orders: Orders, changed: Mapping[Unit, Sequence[LineBase]] | None = None) -> Program:
        """Returns the program with the units of each part in this order, some of them with other lines."""
        changed = changed or {}
        found = [line for units, order in zip(self.parts, orders, strict=True) for index in order
                 for line in changed.get(units[index], units[index].lines)]  # fmt: skip
        lines = insert_frees(found, self.arguments, released_inputs(self.program.inputs))
        return self.program.replace(body=Block(self.program.body.arguments, lines))


def _owned_sizes(program: Program, hints: Mapping[str, Scalar]) -> dict[str, int]:
    """Returns the bytes of each root of the body that may be freed in it; what is given back counts too."""
    owned = released_inputs(program.inputs)
    owned += [value for line in program.body.lines for value in defined(line) if line.alias_of(value) is None]
    sizes = {value.name: value.type.storage_bytes for value in owned if isinstance(value.type, TensorType)}
    values = known_values(program, hints) if any(not isinstance(size, int) for size in sizes.values()) else {}
    return {name: size if isinstance(size, int) else int(evaluate(size, values)) for name, size in sizes.items()}
