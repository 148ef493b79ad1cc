"""An interpreter that poisons memory when it is allocated and released, and checks that live buffers never overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxwrap.converters.base import Handlers
from fxwrap.converters.interpreter.interpreter import Content, Interpreter
from fxwrap.errors import MemoryCheckError
from fxwrap.lines import Alloc, Free, Pool, PoolSlice, Reuse, Workspace
from fxwrap.runtime import tensors
from fxwrap.wrapper_ir import Block, LineBase, Program, Value, consumed, defined, line_text, reads, used

_NAN_BYTE = 0xFF
"""The byte that makes a NaN of every floating-point dtype."""
_POISON_BYTE = 0xA5


@dataclass(frozen=True, slots=True)
class _LiveAllocation:
    """A live byte range [start, end) of a device, the value that it belongs to, and its last use."""

    device: torch.device
    start: int
    end: int
    name: str
    last_use: str


class CheckedInterpreter(Interpreter):
    """An interpreter that checks each allocation, pool slice, reuse and free.

    It fills memory with a pattern (NaN for floats) when it is allocated, sliced from a pool, reused or released: a read
    before the first write or after the last use returns visibly wrong numbers. Raises MemoryCheckError, with the line,
    if live buffers overlap or memory does not have the declared address.
    """

    name = "checked interpreter"

    def __init__(self, program: Program, handlers: Handlers | None = None) -> None:
        super().__init__(program, handlers)
        self.live_allocations: dict[str, _LiveAllocation] = {}
        self.allocated: dict[str, torch.Tensor] = {}  # by the lines of this block, by root or slice
        self.label = "body"

    def _run_lines(self, block: Block) -> None:
        allocation_of = _allocation_by_value(block, [*self.values])
        last = _last_uses(block.lines, allocation_of)
        for name, content in self.values.items():
            if isinstance(content, torch.Tensor):
                self._mark_live(name, content.data_ptr(), _extent(content), content.device, last.get(name, 0))
        for position, line in enumerate(block.lines):
            if isinstance(line, Reuse):
                old_address = self.values[line.root.name].data_ptr()
            if isinstance(line, Free):
                self._release_root(line.root.name, [name for name, memory in allocation_of.items() if memory == name])
            self.convert(line)
            match line:
                case Alloc() | Workspace() | Pool():
                    self._track_allocation(position, line, line.result, last, poison=not line.zeroed)
                case PoolSlice():
                    self._check_slice(position, line)
                    self._track_allocation(position, line, line.result, last)
                case Reuse():
                    self.live_allocations.pop(line.root.name, None)
                    if self.values[line.result.name].data_ptr() != old_address and self._bytes(line.result):
                        self._fail(position, line, f"%{line.result.name} is not at the address of %{line.root.name}")
                    self._track_allocation(position, line, line.result, last)
                case _:
                    for value in consumed(line):
                        self.live_allocations.pop(value.name, None)
                        self.allocated.pop(value.name, None)
                    self._check_results(position, line, last)
            for name in [name for name in self.live_allocations if last.get(name) == position]:
                if allocation_of.get(name) == name and name in self.allocated and not line.terminator:
                    self._poison_and_release(name)

    def _track_allocation(
        self, position: int, line: LineBase, value: Value, last: Mapping[str, int], *, poison: bool = True
    ) -> None:
        """Records new memory and poisons it. A pool is not live itself; its slices are."""
        content = self.values[value.name]
        if poison:
            _poison(content)
        self.allocated[value.name] = content
        if isinstance(line, Pool):
            return
        start, size = content.data_ptr(), self._bytes(value)
        for other in self.live_allocations.values():
            if other.device == content.device and start < other.end and other.start < start + size:
                common = min(start + size, other.end) - max(start, other.start)
                self._fail(position, line, f"%{value.name} overlaps %{other.name} by {common} bytes, {other.last_use}")
        self._mark_live(value.name, start, size, content.device, last.get(value.name, position))

    def _mark_live(self, name: str, start: int, size: int, device: torch.device, last: int) -> None:
        if size:
            last_use = f"which line {last} of ^{self.label} uses"
            self.live_allocations[name] = _LiveAllocation(device, start, start + size, name, last_use)

    def _bytes(self, value: Value) -> int:
        if any(self._evaluate(size) == 0 for size in value.tensor_type.sizes):
            return 0  # symbolic strides may be at least 1 where a size is 0
        return int(self._evaluate(value.tensor_type.storage_bytes))

    def _check_slice(self, position: int, line: PoolSlice) -> None:
        pool, content = self.values[line.pool.name], self.values[line.result.name]
        offset, size = self._evaluate(line.offset), self._bytes(line.result)
        if offset < 0 or offset + size > pool.nbytes:
            reason = f"bytes {offset} to {offset + size} exceed %{line.pool.name}, which has {pool.nbytes} bytes"
            self._fail(position, line, reason)
        if size and content.data_ptr() != pool.data_ptr() + offset:
            self._fail(position, line, f"%{line.result.name} is not {offset} bytes after the start of its pool")

    def _check_results(self, position: int, line: LineBase, last: Mapping[str, int]) -> None:
        """Checks that aliases are in the memory of their base, and that new roots overlap no live buffer."""
        for value in defined(line):
            content = self.values.get(value.name)
            if not isinstance(content, torch.Tensor) or not content.nbytes:
                continue
            base = line.alias_of(value)
            if base is not None:
                memory = self.values[base.name].untyped_storage()
                if not 0 <= content.data_ptr() - memory.data_ptr() < memory.nbytes():
                    self._fail(position, line, f"%{value.name} does not alias the memory of %{base.name}")
                continue
            start = content.data_ptr()
            for other in self.live_allocations.values():
                if other.device == content.device and other.start <= start < other.end:
                    self._fail(position, line, f"%{value.name} is a new root but overlaps the live %{other.name}")
            self._mark_live(value.name, start, _extent(content), content.device, last.get(value.name, position))

    def _release_root(self, root: str, memories: Sequence[str]) -> None:
        for name in memories:
            if self.root_of.get(name) == root and name in self.allocated:
                self._poison_and_release(name)
        self.live_allocations.pop(root, None)

    def _poison_and_release(self, name: str) -> None:
        _poison(self.allocated.pop(name))
        self.live_allocations.pop(name, None)

    def _run_block(self, block: Block, arguments: list[Content]) -> tuple[Content, ...]:
        inner = self._block_interpreter(block, arguments)
        inner.live_allocations = dict(self.live_allocations)
        inner.label = f"{self.label}'s block"
        inner._run_lines(block)
        return inner.outputs

    def _fail(self, position: int, line: LineBase, reason: str) -> None:
        raise MemoryCheckError(f"line {position} of ^{self.label}, `{line_text(line)}`: {reason}")


def _allocation_by_value(block: Block, arguments: Sequence[str]) -> dict[str, str]:
    """Returns the allocation of each value by name: its root, or the slice of a pool that it is in."""
    allocation_of = {name: name for name in arguments}
    for line in block.lines:
        for value in defined(line):
            base = None if isinstance(line, PoolSlice) else line.alias_of(value)
            allocation_of[value.name] = value.name if base is None else allocation_of[base.name]
    return allocation_of


def _last_uses(lines: Sequence[LineBase], allocation_of: Mapping[str, str]) -> dict[str, int]:
    last: dict[str, int] = {}
    in_flight: dict[str, list[str]] = {}  # allocation -> the operands of its collective
    for position, line in enumerate(lines):
        names = [allocation_of[value.name] for value in (*used(line), *defined(line))]
        if line.is_async_start:
            in_flight |= dict.fromkeys([allocation_of[value.name] for value in defined(line)], names)
        if line.is_async_wait:
            names += [operand for name in names for operand in in_flight.pop(name, ())]
        last |= dict.fromkeys(names, position)
        if line.terminator:
            last.update(dict.fromkeys([allocation_of[value.name] for value in reads(line)], len(lines)))
    return last


def _poison(content: torch.Tensor) -> None:
    """Fills the memory of a tensor, from its first element, with the pattern of its dtype."""
    if not content.nbytes:
        return
    floats = content.dtype.is_floating_point or content.dtype.is_complex
    pattern = _NAN_BYTE if floats else 1 if content.dtype == torch.bool else _POISON_BYTE
    tensors.reinterpret(content, (_extent(content),), (1,), torch.uint8).fill_(pattern)


def _extent(content: torch.Tensor) -> int:
    """Returns the number of bytes from the first element to the end of the last one."""
    if not content.numel():
        return 0
    return content.itemsize * (1 + sum([(size - 1) * stride for size, stride in zip(content.shape, content.stride())]))
