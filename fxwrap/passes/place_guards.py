"""Device guards: what makes the device and the stream current that lines need. The last pass; nothing runs after it.

What lines need:

- a launch in a language whose launches run on the current device (`KernelLanguage.on_current_device`): the device of
  its tensors, where there may be several of the type;
- any line with a `stream` other than 0: that stream, and its device;
- other launches, calls of operators, allocations, writes, reads of numbers, events on stream 0: stream 0, and no
  device, since they go by their tensors or by an argument;
- lines with blocks, and calls of functions: the one device that all lines in there need, if there is only one; else
  none, and the guards are in there;
- frees, views, sizes, assertions, remarks, events on other streams: nothing.

The device that is current when a program begins is whatever its caller has, so no device is taken to be current.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxwrap.device_registry import language_facts, registered_spec
from fxwrap.lines import EnterDevice, ExitDevice, Launch
from fxwrap.wrapper_ir import (
    MAIN,
    Block,
    LineBase,
    Program,
    blocks,
    defined_symbol,
    is_one_of_several,
    is_release,
    run_blocks,
    stream_device,
    stream_of,
)


def place_guards(program: Program) -> Program:
    """Returns the program with `device.enter` and `device.exit` around the lines that need a device or a stream.

    Neighbours that need the same share a guard, with all between them that can do with it. Where all that a block or a
    function needs is one device, the guard is around the line that runs it. Guards that are there already stay, and
    what is in them gets no other. Linear in the number of lines.
    """
    languages = {kernel.language for kernel in program.kernels}
    moved = {name for name in languages if language_facts(name).on_current_device}
    by_device = frozenset([kernel.name for kernel in program.kernels if kernel.language in moved])
    placing = _Placing(by_device, dict(program.functions))
    body = placing.block(program.body)
    functions = tuple([
        (name, block if placing.only_device(block) else placing.block(block)) for name, block in program.functions
    ])  # fmt: skip
    same = body is program.body and all(new is old for (_, new), (_, old) in zip(functions, program.functions))
    return program if same else program.replace(body=body, functions=functions)


@dataclass(frozen=True, slots=True)
class _Need:
    """What must be current for a line: a stream, and its device or, with "", any device."""

    device: str
    stream: int


_ANY = _Need("", 0)


@dataclass(frozen=True, slots=True)
class _Inside:
    """What the lines of a block need, those of the blocks in them included: devices, and whether also streams."""

    devices: frozenset[str]
    streams: bool


class _Placing:
    """Places guards in blocks. `by_device` are the kernels whose launches run on the current device."""

    def __init__(self, by_device: frozenset[str], functions: Mapping[str, Block]) -> None:
        self.by_device = by_device
        self.functions = functions
        self._inside: dict[int, tuple[Block, _Inside]] = {}  # by identity, with the block itself to keep it alive
        self._placed: dict[int, tuple[Block, Block]] = {}

    # --- what is needed ---------------------------------------------------------------------------------------------

    def need(self, line: LineBase) -> _Need | None:
        """Returns what must be current for a line; None for one that needs nothing."""
        if line.on_host or line.terminator or is_release(line):
            return None
        stream = stream_of(line)
        if line.event_step:
            return _ANY if stream == MAIN else None
        if stream != MAIN:
            return _Need(*stream)
        if isinstance(line, Launch) and line.kernel in self.by_device:
            return _need_of(stream_device(line))
        inner = run_blocks(line, self.functions)
        if inner:
            return _Need(self._only([self.inside(block) for block in inner]) or "", 0)
        return _ANY if _is_work(line) else None

    def inside(self, block: Block) -> _Inside:
        """Returns what the lines of a block need."""
        known = self._inside.get(id(block))
        if known is None:
            found = [need for line in block.lines if (need := self.need(line)) is not None]
            nested = [self.inside(inner) for line in block.lines for inner in run_blocks(line, self.functions)]
            devices = frozenset([need.device for need in found if need.device])
            devices = devices.union(*[item.devices for item in nested])
            guarded = any(line.bracket[1] and isinstance(line, EnterDevice) for line in block.lines)
            events = any(line.event_step for line in block.lines)
            streams = guarded or events or any(need.stream for need in found) or any(item.streams for item in nested)
            known = self._inside[id(block)] = block, _Inside(devices, streams)
        return known[1]

    @staticmethod
    def _only(parts: Sequence[_Inside]) -> str | None:
        """Returns the only device that blocks need; None where there are several, or none, or streams are needed."""
        devices = frozenset[str]().union(*[part.devices for part in parts])
        return next(iter(devices)) if len(devices) == 1 and not any(part.streams for part in parts) else None

    def only_device(self, block: Block) -> str | None:
        """Returns the device that is current wherever a block runs, so that it needs no guards of its own."""
        return self._only([self.inside(block)])

    # --- guards -----------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> Block:
        """Returns a block with its guards."""
        known = self._placed.get(id(block))
        if known is None:
            lines = _Walk(self).run(block.lines)
            same = len(lines) == len(block.lines) and all(new is old for new, old in zip(lines, block.lines))
            known = self._placed[id(block)] = block, block if same else Block(block.arguments, lines)
        return known[1]

    def with_blocks(self, line: LineBase) -> LineBase:
        """Returns a line whose blocks have guards, if they do not run under one of the line's own."""
        inner = blocks(line)
        if not inner or self._only([self.inside(block) for _, block in inner]) is not None:
            return line
        changes: dict[str, Any] = {name: self.block(block) for name, block in inner}
        same = all(changes[name] is block for name, block in inner)
        return line if same else dataclasses.replace(line, **changes)


class _Walk:
    """One walk over the lines of a block. A guard that is open is closed after the last line that needed it."""

    def __init__(self, placing: _Placing) -> None:
        self.placing = placing
        self.lines: list[LineBase] = []
        self.tail: list[LineBase] = []  # since the last line that needed the open guard
        self.open: _Need | None = None
        self.around: list[EnterDevice] = []  # guards that were there before

    def run(self, lines: Sequence[LineBase]) -> tuple[LineBase, ...]:
        """Returns the lines with their guards."""
        for line in lines:
            need = self.placing.need(line)
            if line.bracket[1] or line.terminator:
                self._close()
            elif need is not None and not self._fits(need):
                self._close()
                if not self._is_around(need):
                    self.open = need
                    self.lines.append(EnterDevice(need.device, need.stream))
            self._add(self.placing.with_blocks(line), self.open is not None and need == self.open)
        return tuple(self.lines)

    def _add(self, line: LineBase, is_needing: bool) -> None:
        if isinstance(line, EnterDevice):
            self.around.append(line)
        elif isinstance(line, ExitDevice):
            self.around.pop()
        if self.open is None:
            self.lines.append(line)
            return
        self.tail.append(line)
        if is_needing:
            self.lines += self.tail
            self.tail.clear()

    def _fits(self, need: _Need) -> bool:
        """Whether a line may stand where the walk is."""
        if self.open is None:
            return self._is_around(need)
        return need == self.open or (not need.device and not self.open.stream)

    def _is_around(self, need: _Need) -> bool:
        if not need.device:
            return True
        return bool(self.around) and (self.around[-1].device, self.around[-1].stream) == (need.device, need.stream)

    def _close(self) -> None:
        if self.open is None:
            return
        # what defines the symbols of a result stays with the line that makes it
        count = next((place for place, line in enumerate(self.tail) if not _follows(line)), len(self.tail))
        self.lines += self.tail[:count]
        self.lines.append(ExitDevice(self.open.device, self.open.stream))
        self.lines += self.tail[count:]
        self.tail.clear()
        self.open = None


def _follows(line: LineBase) -> bool:
    return defined_symbol(line) is not None and line.on_host


def _need_of(device: torch.device | None) -> _Need:
    """Returns what a line needs whose device must be current: nothing where there is one of its type."""
    spec = None if device is None else registered_spec(device.type)
    indexed = device is not None and is_one_of_several(device) and (spec is None or spec.indexed)
    return _Need(str(device), 0) if indexed else _ANY


def _is_work(line: LineBase) -> bool:
    """Whether a line touches memory, or runs something that does."""
    return stream_device(line) is not None or bool(line.effects())
