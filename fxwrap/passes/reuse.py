"""Freed memory that serves a later allocation of the same block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from fxwrap.lines import Alloc, Free, Reuse
from fxwrap.symbolic import Scalar, evaluate
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Ownership,
    Program,
    TensorType,
    Value,
    blocks,
    called_functions,
    consumed,
    defined,
    last_uses,
    program_arguments,
    reads,
    roots,
    typical_values,
    used,
)

_LONGEST_WAIT = 256
"""For how many lines freed memory is kept for another use at most; a bound that keeps the cost linear."""
_LONGEST_LIFE = 4096
"""How many lines an allocation may live that takes more memory than it needs."""
_MOST_TRIED = 8
"""How many pieces of freed memory are looked at for one allocation."""


def reuse_memory(program: Program, hints: Mapping[str, Scalar] | None = None) -> Program:
    """Returns the program with `memory.reuse` lines in place of frees and later allocations of the same or less bytes.

    Memory that a line of a block allocates and frees serves a later allocation of the block that is freed there
    too, and so does an owned input. What is given back, what a collective, another stream or a vendor's line works
    on and what others own is left alone, and memory waits for no line that runs blocks. Symbolic sizes must be
    equal. The peak by the hints is never above the one before. Linear in the number of lines.

    Args:
        program: the program. It is not changed.
        hints: values of symbols by name; those that the program declares stand in for the others.
    """
    values = typical_values(program, hints)
    owned = [item.value for item in program.inputs
             if isinstance(item.value, Value) and item.ownership is Ownership.OWNED]  # fmt: skip
    body = _changed(program.body, program_arguments(program), owned, values)
    functions = tuple([(name, _changed(block, block.arguments, (), values)) for name, block in program.functions])
    return program.replace(body=body, functions=functions)


def _changed(block: Block, given: Iterable[Value], owned: Sequence[Value], values: Mapping[str, Scalar]) -> Block:
    lines = []
    for line in block.lines:
        inner: dict[str, Any] = {name: _changed(nested, nested.arguments, (), values) for name, nested in blocks(line)}
        lines.append(dataclasses.replace(line, **inner) if inner else line)
    return Block(block.arguments, _Walk(lines, list(given), owned, values).run())


@dataclasses.dataclass(frozen=True, slots=True)
class _Free:
    """Freed memory: its last root, the position of its free, and the bytes that it really has, by the hints."""

    root: Value
    position: int
    held: int


class _Walk:
    """One walk over the lines of a block."""

    def __init__(
        self, lines: Sequence[LineBase], given: Sequence[Value], owned: Sequence[Value], values: Mapping[str, Scalar]
    ) -> None:
        self.lines = lines
        self.values = values
        self.root_of = roots(lines, given)
        self.end = last_uses(lines, given)
        self.usable = {line.result.name for line in lines if isinstance(line, Alloc)} - self._left_alone()
        self.source = self.usable | ({value.name for value in owned} - self._left_alone())
        self.held = {value.name: self._bytes(value.tensor_type) for value in owned}
        self.blocks_before = [0, *accumulate([_runs_blocks(line) for line in lines])]
        self.live = self._profile()
        self.peak = max(self.live)
        self.waiting: list[_Free] = []

    def run(self) -> tuple[LineBase, ...]:
        """Returns the lines with what is reused."""
        found: dict[int, LineBase | None] = {}
        for position, line in enumerate(self.lines):
            if isinstance(line, Free) and line.root.name in self.source:
                held = self.held.get(line.root.name)
                held = self._bytes(line.root.tensor_type) if held is None else held
                self.waiting.append(_Free(line.root, position, held))
            elif isinstance(line, Alloc) and line.result.name in self.usable:
                taken = self._best(position, line.result)
                if taken is not None:
                    self.waiting.remove(taken)
                    self._keep(position, line.result, taken)
                    found[taken.position] = None
                    found[position] = Reuse(line.result, taken.root, origin=line.origin)
            elif _runs_blocks(line):
                self.waiting.clear()
            while self.waiting and self.waiting[0].position < position - _LONGEST_WAIT:
                del self.waiting[0]
        kept = [found.get(position, line) for position, line in enumerate(self.lines)]
        return tuple([line for line in kept if line is not None])

    def _best(self, position: int, wanted: Value) -> _Free | None:
        """Returns the freed memory that fits an allocation with the least waste, the one freed last of equal ones."""
        large = [item for item in reversed(self.waiting) if _is_large_enough(item.root.tensor_type, wanted.tensor_type)]
        large.sort(key=lambda item: item.held)
        return next((item for item in large[:_MOST_TRIED] if self._fits(position, wanted, item)), None)

    def _fits(self, position: int, wanted: Value, item: _Free) -> bool:
        """Whether the peak stays as it is when freed memory is kept for an allocation, and lives as long as that."""
        if max(self.live[item.position + 1 : position], default=0) + item.held > self.peak:
            return False
        slack, end = item.held - self._bytes(wanted.tensor_type), self.end[wanted.name] + 1
        if slack == 0:
            return True
        if end - position > _LONGEST_LIFE or self.blocks_before[end] > self.blocks_before[position]:
            return False
        return max(self.live[position:end]) + slack <= self.peak

    def _keep(self, position: int, wanted: Value, item: _Free) -> None:
        """Counts the bytes that are kept from the free to the allocation, and those that it does not need."""
        self.held[wanted.name] = item.held
        slack = item.held - self._bytes(wanted.tensor_type)
        for place in range(item.position + 1, position):
            self.live[place] += item.held
        if slack:
            for place in range(position, self.end[wanted.name] + 1):
                self.live[place] += slack

    def _left_alone(self) -> set[str]:
        """Returns the roots that are given back, or that lines take for other ends, in flight or on other streams."""
        found = {self.root_of[value.name] for value in reads(self.lines[-1])}
        for line in self.lines:
            if line.starts_flight or line.ends_flight or getattr(line, "stream", 0) != 0:
                found.update([self.root_of[value.name] for value in (*used(line), *defined(line))])
            elif not isinstance(line, Free):
                found.update([value.name for value in consumed(line)])
        return found

    def _profile(self) -> list[int]:
        """Returns the bytes of what the block makes, and of what it is given to own, that are live at each line."""
        count = len(self.lines)
        taken = {value.name: position for position, line in enumerate(self.lines) for value in consumed(line)}
        steps = [sum(self.held.values()), *([0] * count)]
        for name in self.held:
            steps[taken.get(name, count - 1) + 1] -= self.held[name]
        for position, line in enumerate(self.lines):
            for value in defined(line):
                if self.root_of[value.name] == value.name and isinstance(value.type, TensorType):
                    size = self._bytes(value.type)
                    steps[position] += size
                    steps[taken.get(value.name, count - 1) + 1] -= size
        live, found = 0, []
        for step in steps[:count]:
            live += step
            found.append(live)
        return found

    def _bytes(self, type_: TensorType) -> int:
        size = type_.storage_bytes
        return size if isinstance(size, int) else max(0, int(evaluate(size, self.values)))


def _is_large_enough(old: TensorType, new: TensorType) -> bool:
    """Whether memory of one type serves another whatever the symbols are: by numbers, or equal expressions."""
    if old.device != new.device or old.memory_space != new.memory_space:
        return False
    have, need = old.storage_bytes, new.storage_bytes
    return need <= have if isinstance(need, int) and isinstance(have, int) else bool(need == have)


def _runs_blocks(line: LineBase) -> bool:
    return bool(blocks(line) or called_functions(line))
