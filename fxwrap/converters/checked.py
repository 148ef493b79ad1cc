"""A program run line by line with its memory watched: poisoned when it is given and taken, and never in two hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxwrap.converters.base import Handler
from fxwrap.converters.interpreter import Interpreter
from fxwrap.errors import MemoryCheckError
from fxwrap.lines import Alloc, ExtensionLine, Free, Pool, PoolSlice, Reuse, Workspace
from fxwrap.runtime import tensors
from fxwrap.wrapper_ir import Block, LineBase, Program, Value, consumed, defined, print_line, reads, used

_FLOATS = 0xFF
"""The byte that makes a NaN of every floating-point dtype."""
_OTHERS = 0xA5


@dataclass(frozen=True, slots=True)
class _Held:
    """Memory in use: the device, the first byte and the one after the last, the value, and until when."""

    device: torch.device
    start: int
    end: int
    name: str
    until: str


class CheckedInterpreter(Interpreter):
    """An interpreter that checks each allocation, slice, reuse and free against what the program says of it.

    Memory is filled with a pattern (NaN for floats) when it is allocated, taken from a pool or reused, and when it is
    given back, so that what reads it too early or too late gives wrong numbers that are easily seen. Raises
    MemoryCheckError, naming the line, where a slice overlaps another that is needed later, or memory is not where the
    program says.
    """

    name = "checked interpreter"

    def __init__(self, program: Program, handlers: Mapping[type[ExtensionLine], Handler] | None = None) -> None:
        super().__init__(program, handlers)
        self.held: dict[str, _Held] = {}
        self.own: dict[str, torch.Tensor] = {}  # memory that lines of this block made, by root or slice
        self.label = "body"

    def _lines(self, block: Block) -> None:
        memory_of = _memories(block, [*self.values])
        last = _last_positions(block.lines, memory_of)
        for name, content in self.values.items():
            if isinstance(content, torch.Tensor):
                self._hold(name, content.data_ptr(), _extent(content), content.device, last.get(name, 0))
        for position, line in enumerate(block.lines):
            if isinstance(line, Reuse):
                taken = self.values[line.root.name].data_ptr()
            if isinstance(line, Free):
                self._give_back(line.root.name, [name for name, memory in memory_of.items() if memory == name])
            self.convert(line)
            match line:
                case Alloc() | Workspace() | Pool():
                    self._take(position, line, line.result, last, poison=not getattr(line, "zeroed", False))
                case PoolSlice():
                    self._check_slice(position, line)
                    self._take(position, line, line.result, last)
                case Reuse():
                    self.held.pop(line.root.name, None)
                    if self.values[line.result.name].data_ptr() != taken and self._bytes(line.result):
                        self._fail(position, line, f"%{line.result.name} is not where %{line.root.name} was")
                    self._take(position, line, line.result, last)
                case _:
                    for value in consumed(line):
                        self.held.pop(value.name, None)
                        self.own.pop(value.name, None)
                    self._check_results(position, line, last)
            for name in [name for name in self.held if last.get(name) == position]:
                if memory_of.get(name) == name and name in self.own and not line.terminator:
                    self._let_go(name)

    def _take(
        self, position: int, line: LineBase, value: Value, last: Mapping[str, int], *, poison: bool = True
    ) -> None:
        """Notes new memory and fills it. Pools themselves are no memory in use: their slices are."""
        content = self.values[value.name]
        if poison:
            _fill(content)
        self.own[value.name] = content
        if isinstance(line, Pool):
            return
        start, size = content.data_ptr(), self._bytes(value)
        for other in self.held.values():
            if other.device == content.device and start < other.end and other.start < start + size:
                common = min(start + size, other.end) - max(start, other.start)
                self._fail(position, line, f"%{value.name} overlaps %{other.name} by {common} bytes, {other.until}")
        self._hold(value.name, start, size, content.device, last.get(value.name, position))

    def _hold(self, name: str, start: int, size: int, device: torch.device, last: int) -> None:
        if size:
            until = f"which line {last} of ^{self.label} still needs"
            self.held[name] = _Held(device, start, start + size, name, until)

    def _bytes(self, value: Value) -> int:
        return int(self._number(value.tensor_type.storage_bytes))

    def _check_slice(self, position: int, line: PoolSlice) -> None:
        pool, content = self.values[line.pool.name], self.values[line.result.name]
        offset, size = self._number(line.offset), self._bytes(line.result)
        if offset < 0 or offset + size > pool.nbytes:
            reason = f"bytes {offset} to {offset + size} lie outside of %{line.pool.name}, which has {pool.nbytes}"
            self._fail(position, line, reason)
        if size and content.data_ptr() != pool.data_ptr() + offset:
            self._fail(position, line, f"%{line.result.name} is not {offset} bytes after the start of its pool")

    def _check_results(self, position: int, line: LineBase, last: Mapping[str, int]) -> None:
        """Checks that windows show the memory of their root, and that new memory is nobody else's."""
        for value in defined(line):
            content = self.values.get(value.name)
            if not isinstance(content, torch.Tensor) or not content.nbytes:
                continue
            base = line.alias_of(value)
            if base is not None:
                shown = self.values[base.name]
                if content.untyped_storage().data_ptr() != shown.untyped_storage().data_ptr():
                    self._fail(position, line, f"%{value.name} is no window on the memory of %{base.name}")
                continue
            start = content.data_ptr()
            for other in self.held.values():
                if other.device == content.device and other.start <= start < other.end:
                    self._fail(position, line, f"%{value.name} is no new memory but lies in that of %{other.name}")
            self._hold(value.name, start, _extent(content), content.device, last.get(value.name, position))

    def _give_back(self, root: str, memories: Sequence[str]) -> None:
        for name in memories:
            if self.root_of.get(name) == root and name in self.own:
                self._let_go(name)
        self.held.pop(root, None)

    def _let_go(self, name: str) -> None:
        _fill(self.own.pop(name))
        self.held.pop(name, None)

    def _block(self, block: Block, arguments: list[Any]) -> tuple[Any, ...]:
        inner = self._inner(block, arguments)
        assert isinstance(inner, CheckedInterpreter)
        inner.held = dict(self.held)
        inner.label = f"{self.label}'s block"
        inner._lines(block)
        return inner.given

    def _fail(self, position: int, line: LineBase, reason: str) -> None:
        text = print_line(line).partition("\n")[0]
        raise MemoryCheckError(f"line {position} of ^{self.label}, `{text}`: {reason}")


def _memories(block: Block, given: Sequence[str]) -> dict[str, str]:
    """Returns the memory of each value by name: its root, but for slices of a pool, which are memory by themselves."""
    found = {name: name for name in given}
    for line in block.lines:
        for value in defined(line):
            base = None if isinstance(line, PoolSlice) else line.alias_of(value)
            found[value.name] = value.name if base is None else found[base.name]
    return found


def _last_positions(lines: Sequence[LineBase], memory_of: Mapping[str, str]) -> dict[str, int]:
    last = {}
    for position, line in enumerate(lines):
        for value in (*used(line), *defined(line)):
            last[memory_of[value.name]] = position
        if line.terminator:
            last.update(dict.fromkeys([memory_of[value.name] for value in reads(line)], len(lines)))
    return last


def _fill(content: torch.Tensor) -> None:
    """Fills the memory of a tensor, from its first element on, with the pattern of its dtype."""
    if not content.nbytes:
        return
    floats = content.dtype.is_floating_point or content.dtype.is_complex
    pattern = _FLOATS if floats else 1 if content.dtype == torch.bool else _OTHERS
    tensors.reinterpret(content, (_extent(content),), (1,), torch.uint8).fill_(pattern)


def _extent(content: torch.Tensor) -> int:
    """Returns the bytes from the first element to past the last one."""
    if not content.numel():
        return 0
    return content.itemsize * (1 + sum([(size - 1) * stride for size, stride in zip(content.shape, content.stride())]))
