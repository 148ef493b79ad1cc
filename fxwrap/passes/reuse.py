"""Reuse of freed memory for later allocations of the same block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, Free, Reuse
from fxwrap.symbolic import Number, evaluate_size

_MAX_REUSE_DISTANCE = 256
"""Largest number of lines between a free and the allocation that reuses it, which keeps the cost linear."""
_MAX_OVERSIZED_LIFETIME = 4096
"""Largest number of lines that an allocation may live in larger memory than it needs."""
_MAX_CANDIDATES = 8
"""Largest number of freed buffers to consider for an allocation."""


def reuse_memory(program: ir.Program, hints: Mapping[str, Number] | None = None) -> ir.Program:
    """Returns the program with `memory.reuse` lines for allocations that reuse freed memory of at least their size.

    Reusable are buffers that a block allocates and frees, and donated inputs without gaps: others may have the elements
    between those of a slice. Returned values, borrowed memory, and memory in flight, on other streams or of extension
    lines are excluded, and no memory is reused across lines that run blocks. Symbolic sizes must be equal. The peak for
    the hints does not grow. Linear in the number of lines.

    Args:
        program: the program. It is not changed.
        hints: values of symbols by name; the default is the hints that the program declares.
    """
    values = ir.hints_with_fallback(program, hints)
    owned = [item.value for item in program.inputs
             if isinstance(item.value, ir.Value) and item.ownership is ir.Ownership.OWNED]  # fmt: skip
    body = _reuse_in_block(program.body, ir.program_arguments(program), owned, values)
    functions = [(name, _reuse_in_block(block, block.arguments, (), values)) for name, block in program.functions]
    return program.replace(body=body, functions=tuple(functions))


def _reuse_in_block(
    block: ir.Block, inputs: Sequence[ir.Value], owned: Sequence[ir.Value], values: Mapping[str, Number]
) -> ir.Block:
    lines = []
    for line in block.lines:
        inner = {name: _reuse_in_block(nested, nested.arguments, (), values) for name, nested in ir.blocks(line)}
        lines.append(line.replace(**inner) if inner else line)
    return ir.Block(block.arguments, _BlockReuse(lines, inputs, owned, values).run())


@dataclass(frozen=True, slots=True)
class _FreedBuffer:
    """A freed buffer: its last root, the position of the free, and its size in bytes for the hints."""

    root: ir.Value
    position: int
    byte_size: int


class _BlockReuse:
    """The memory of one block's lines: which of it may be reused, and the live bytes at each line.

    Fields:
        usable: the roots of allocations that may reuse memory, and be reused.
        source: these, and donated inputs without gaps.
        byte_size: the bytes of roots whose memory has another size than their type: donated inputs, and reused memory.
        freed: the buffers that an allocation may reuse at the current line.
    """

    def __init__(
        self,
        lines: Sequence[ir.LineBase],
        inputs: Sequence[ir.Value],
        owned: Sequence[ir.Value],
        values: Mapping[str, Number],
    ) -> None:
        self.lines = lines
        self.values = values
        self.root_of = ir.alias_roots(lines, inputs)
        self.end = ir.last_uses(lines, inputs)
        self.usable = {line.result.name for line in lines if isinstance(line, Alloc)} - self._excluded_roots()
        whole = {item.name for item in owned if item.tensor_type.element_bytes == item.tensor_type.storage_bytes}
        self.source = self.usable | (whole - self._excluded_roots())
        self.byte_size = {item.name: evaluate_size(item.tensor_type.element_bytes, values) for item in owned}
        self.blocks_before = [0, *accumulate([_runs_blocks(line) for line in lines])]
        self.live = self._live_bytes()
        self.peak = max(self.live)
        self.freed: list[_FreedBuffer] = []

    def run(self) -> tuple[ir.LineBase, ...]:
        """Returns the lines with `memory.reuse`."""
        changed: dict[int, ir.LineBase | None] = {}
        for position, line in enumerate(self.lines):
            if isinstance(line, Free) and line.root.name in self.source:
                byte_size = self.byte_size.get(line.root.name)
                byte_size = self._bytes(line.root.tensor_type) if byte_size is None else byte_size
                self.freed.append(_FreedBuffer(line.root, position, byte_size))
            elif isinstance(line, Alloc) and line.result.name in self.usable:
                buffer = self._best_fit(position, line.result)
                if buffer is not None:
                    self.freed.remove(buffer)
                    self._record_reuse(position, line.result, buffer)
                    changed[buffer.position] = None
                    changed[position] = Reuse(line.result, buffer.root, origin=line.origin)
            elif _runs_blocks(line):
                self.freed.clear()
            while self.freed and self.freed[0].position < position - _MAX_REUSE_DISTANCE:
                del self.freed[0]
        lines = [changed.get(position, line) for position, line in enumerate(self.lines)]
        return tuple([line for line in lines if line is not None])

    def _best_fit(self, position: int, wanted: ir.Value) -> _FreedBuffer | None:
        """Returns the smallest freed buffer that fits an allocation, the last one of equal ones; None if none does."""
        large = [item for item in reversed(self.freed) if _is_large_enough(item.root.tensor_type, wanted.tensor_type)]
        large.sort(key=lambda item: item.byte_size)
        return next((item for item in large[:_MAX_CANDIDATES] if self._fits(position, wanted, item)), None)

    def _fits(self, position: int, wanted: ir.Value, item: _FreedBuffer) -> bool:
        """Whether the peak does not grow if a freed buffer is kept for an allocation and lives as long."""
        if max(self.live[item.position + 1 : position], default=0) + item.byte_size > self.peak:
            return False
        slack, end = item.byte_size - self._bytes(wanted.tensor_type), self.end[wanted.name] + 1
        if slack == 0:
            return True
        if end - position > _MAX_OVERSIZED_LIFETIME or self.blocks_before[end] > self.blocks_before[position]:
            return False
        return max(self.live[position:end]) + slack <= self.peak

    def _record_reuse(self, position: int, wanted: ir.Value, item: _FreedBuffer) -> None:
        """Adds the bytes kept from the free to the allocation, and the unused ones after it, to the live bytes."""
        self.byte_size[wanted.name] = item.byte_size
        slack = item.byte_size - self._bytes(wanted.tensor_type)
        for between in range(item.position + 1, position):
            self.live[between] += item.byte_size
        if slack:
            for after in range(position, self.end[wanted.name] + 1):
                self.live[after] += slack

    def _excluded_roots(self) -> set[str]:
        """Returns the roots that are returned, consumed by other lines, in flight or on other streams."""
        excluded = {self.root_of[value.name] for value in ir.reads(self.lines[-1])}
        for line in self.lines:
            if line.is_async_start or line.is_async_wait or line.stream != 0:
                excluded.update([self.root_of[value.name] for value in (*ir.used(line), *ir.defined(line))])
            elif not isinstance(line, Free):
                excluded.update([value.name for value in ir.consumed(line)])
        return excluded

    def _live_bytes(self) -> list[int]:
        """Returns the live bytes of allocations and donated inputs at each line."""
        count = len(self.lines)
        consumed_at = {value.name: position for position, line in enumerate(self.lines) for value in ir.consumed(line)}
        steps = [sum(self.byte_size.values()), *([0] * count)]
        for name in self.byte_size:
            steps[consumed_at.get(name, count - 1) + 1] -= self.byte_size[name]
        for position, line in enumerate(self.lines):
            for value in ir.defined(line):
                if self.root_of[value.name] == value.name and isinstance(value.type, ir.TensorType):
                    size = self._bytes(value.type)
                    steps[position] += size
                    steps[consumed_at.get(value.name, count - 1) + 1] -= size
        return list(accumulate(steps[:count]))

    def _bytes(self, type_: ir.TensorType) -> int:
        return max(0, evaluate_size(type_.storage_bytes, self.values))


def _is_large_enough(old: ir.TensorType, new: ir.TensorType) -> bool:
    """Whether memory of one type is large enough for another for all values of symbols."""
    if old.device != new.device or old.memory_space != new.memory_space:
        return False
    have, need = old.storage_bytes, new.storage_bytes
    return need <= have if isinstance(need, int) and isinstance(have, int) else bool(need == have)


def _runs_blocks(line: ir.LineBase) -> bool:
    return bool(ir.blocks(line) or ir.called_functions(line))
