"""Loads of the elements of a later step of fragments, as Triton code.

A step loads them before it computes, or where it has used its own. Then they take no registers besides those of the
step. Lines that load a step's elements are printed once before the loop; the loop has them again for the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxwrap.loop_ir import Load, operation_dtype
from fxwrap.printers.triton.fragment_operands import FragmentOperandPrinter
from fxwrap.printers.triton.fragments import RUN, FragmentBlock

Part = tuple[FragmentBlock, Collection[int]]
"""A block with the operations that are computed there."""

_Pairs = tuple[tuple[tuple[int, int], str], ...]
"""The operations of two elements of rows that are loaded together, with the name of both."""

_PAIR_BYTES = 4
"""The bytes of two elements of a row."""


@dataclass(frozen=True)
class Loads:
    """The lines that load what a step needs, the block, operation and name of each value, and the pairs of rows."""

    lines: tuple[str, ...]
    values: tuple[tuple[FragmentBlock, int, str], ...]
    pairs: _Pairs

    @property
    def names(self) -> list[str]:
        """The names of all values."""
        return [*[name for _, _, name in self.values], *[name for _, name in self.pairs]]


class FragmentLoadPrinter(FragmentOperandPrinter):
    """Prints the loads of a step's elements, and of those of the next one."""

    def _emit_first_loads(self, of_columns: Sequence[Part], start: str) -> list[Loads]:
        """Prints the loads of the first step, block by block; returns these."""
        loads = []
        for block, positions in of_columns:
            before = len(self.lines)
            with self._inside(block):
                if self.configuration.programs:
                    self._emit_fixed_positions(block)
                self._emit_group_positions(block, start)
                self._emit_loads([at for at in positions if self.varying[at] or self.configuration.programs])
            loads.append(self._packed_loads([(block, positions)], before, ()))
        return loads

    def _next_loads(self, loads: Sequence[Loads], mask: str) -> list[list[str]]:
        """Prints the bytes of loaded words; returns the lines of the next loads, done where `mask` is true."""
        for block, position, name in [value for item in loads for value in item.values]:
            if self._is_packed(block, position):
                self._emit_bytes(block, position, name)
        return [[f"    {_masked(line, mask) if mask else line}" for line in item.lines] for item in loads]

    def _emit_pairs(self, row: Part, start: str) -> _Pairs:
        """Prints the loads of a step's pairs of elements of rows; returns these with their names.

        There are none where they would take more registers than the weights of a step.
        """
        block, positions = row
        if block.rows * RUN * _PAIR_BYTES > self.column_blocks[0].rows * self.fragments.lane_bytes:
            return ()
        names: dict[tuple[int, int], str] = {}
        with self._inside(block):
            self._emit_group_positions(block, start)
            for position in sorted(positions):
                operation = self.kernel.operations[position]
                if not isinstance(operation, Load) or not self.varying[position] or not self.is_summed[position]:
                    continue
                pair = self._pair(position, operation)
                if pair is not None and pair not in names:
                    names[pair] = self._load_contiguous(pair, operation)
        return tuple(names.items())

    def _packed_loads(self, of_columns: Sequence[Part], before: int, pairs: _Pairs) -> Loads:
        """Prints the bytes of a step's loads as words, which take fewer registers; returns what the lines define."""
        loaded = [
            (block, position, self.texts[block.name][position]) for block, positions in of_columns
            for position in sorted(positions) if position in self.texts[block.name]
            and isinstance(self.kernel.operations[position], Load)
            and (self.varying[position] or self.configuration.programs)
        ]  # fmt: skip
        for block, position, name in loaded:
            if self._is_packed(block, position):
                self.line(f"{name} = {self.use('words_of_bytes')}({name})")
        return Loads(tuple(self.lines[before:]), tuple(loaded), pairs)

    def _is_packed(self, block: FragmentBlock, position: int) -> bool:
        return block in self.column_blocks and operation_dtype(self.kernel.operations[position]).itemsize == 1

    def _emit_next_loads(self, loads: Loads, before: Sequence[str], mask: str) -> None:
        """Prints the values of this step, and the loads of the next one after the lines that say where it is.

        `mask` is the name of whether there is one; "" where the lines lead to a step again.
        """
        now = {name: self._stable_name(f"{name}_now") for name in loads.names}
        for name in loads.names:
            self.line(f"{now[name]} = {name}")
        for block, position, name in loads.values:
            self.texts[block.name][position] = now[name]
        self.contiguous |= {pair: now[name] for pair, name in loads.pairs}
        for line in before:
            self.line(line)
        self.lines += [f"    {_masked(line, mask) if mask else line}" for line in loads.lines]
        for block, position, _ in loads.values:
            if self._is_packed(block, position):
                self._emit_bytes(block, position, self.texts[block.name][position])

    def _emit_bytes(self, block: FragmentBlock, position: int, words: str) -> None:
        """Prints the bytes of words, which are then the value of a load."""
        self.texts[block.name][position] = self._stable_name(f"{words}_bytes")
        self.line(f"{self.texts[block.name][position]} = {self.use('bytes_of_words')}({words})")


def _masked(line: str, mask: str) -> str:
    """Returns a line that defines a name; if it is a load, one that is done where a mask is true."""
    if " = tl.load(" not in line:
        return line
    assert line.endswith(")"), "values are loaded as they are in memory"
    return line.replace("mask=", f"mask={mask} & ") if "mask=" in line else f"{line[:-1]}, mask={mask})"
