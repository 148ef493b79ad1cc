"""Insertion of device guards, which make the device and stream of lines current. The last pass.

Requirements of lines:

- a launch in a language with `KernelLanguage.needs_device_guard`: the device of its tensors, if there may be several of
  the type;
- any line with a `stream` other than 0: that stream and its device;
- other launches, extern calls, allocations, writes, reads of scalars, events on stream 0: stream 0 of any device;
- lines with blocks, and function calls: the device that their lines require, if it is the only one; else none, and the
  guards are inside;
- frees, views, sizes, assertions, comments, events on other streams: none.

The caller's current device is unknown, so no device is assumed to be current.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.devices import language_traits, registered_spec
from fxwrap.lines import EnterDevice, ExitDevice, Launch


def insert_device_guards(program: ir.Program) -> ir.Program:
    """Returns the program with `device.enter` and `device.exit` around the lines that require a device or a stream.

    Adjacent lines with equal requirements share a guard, including compatible lines between them. If a block or a
    function requires a single device, the guard is around the line that runs it. Existing guards are unchanged, and
    their lines get no other. Linear in the number of lines.
    """
    languages = {kernel.language for kernel in program.kernels}
    guarded = {name for name in languages if language_traits(name).needs_device_guard}
    by_device = frozenset([kernel.name for kernel in program.kernels if kernel.language in guarded])
    inserter = _GuardInserter(by_device, dict(program.functions))
    body = inserter.block(program.body)
    functions = tuple([
        (name, block if inserter.single_device([block]) else inserter.block(block)) for name, block in program.functions
    ])  # fmt: skip
    same = body is program.body and all(new is old for (_, new), (_, old) in zip(functions, program.functions))
    return program if same else program.replace(body=body, functions=functions)


@dataclass(frozen=True, slots=True)
class _Requirement:
    """The stream and device that must be current for a line; "" is any device."""

    device: str
    stream: int


_ANY = _Requirement("", 0)


@dataclass(frozen=True, slots=True)
class _BlockRequirements:
    """The devices that lines of a block and its nested blocks require, and whether any requires a stream."""

    devices: frozenset[str]
    streams: bool


class _GuardInserter:
    """Inserts guards in blocks. `by_device` are the kernels whose launches run on the current device."""

    def __init__(self, by_device: frozenset[str], functions: Mapping[str, ir.Block]) -> None:
        self.by_device = by_device
        self.functions = functions
        self._requirements: dict[int, tuple[ir.Block, _BlockRequirements]] = {}  # by identity of the block
        self._guarded: dict[int, tuple[ir.Block, ir.Block]] = {}

    # --- requirements -----------------------------------------------------------------------------------------------

    def requirement(self, line: ir.LineBase) -> _Requirement | None:
        """Returns the requirement of a line, or None."""
        if line.on_host or line.terminator or ir.is_release(line):
            return None
        stream = ir.stream_of(line)
        if line.event_step:
            return _ANY if stream == ir.CURRENT_STREAM else None
        if stream != ir.CURRENT_STREAM:
            return _Requirement(*stream)
        if isinstance(line, Launch) and line.kernel in self.by_device:
            return _device_requirement(ir.stream_device(line))
        inner = ir.executed_blocks(line, self.functions)
        if inner:
            return _Requirement(self.single_device(inner) or "", 0)
        return _ANY if ir.stream_device(line) is not None or line.effects() else None

    def block_requirements(self, block: ir.Block) -> _BlockRequirements:
        """Returns the requirements of the lines of a block."""
        cached = self._requirements.get(id(block))
        if cached is None:
            own = [item for line in block.lines if (item := self.requirement(line)) is not None]
            inner = [nested for line in block.lines for nested in ir.executed_blocks(line, self.functions)]
            nested = [self.block_requirements(item) for item in inner]
            devices = frozenset([item.device for item in own if item.device]).union(*[item.devices for item in nested])
            changes_stream = any(isinstance(line, EnterDevice) or line.event_step for line in block.lines)
            streams = changes_stream or any(item.stream for item in own) or any(item.streams for item in nested)
            cached = self._requirements[id(block)] = block, _BlockRequirements(devices, streams)
        return cached[1]

    def single_device(self, blocks_: Sequence[ir.Block]) -> str | None:
        """Returns the only device that blocks require; None if they require several, none, or a stream.

        Blocks with a single device run under one guard and have none inside.
        """
        requirements = [self.block_requirements(block) for block in blocks_]
        devices = frozenset[str]().union(*[item.devices for item in requirements])
        return next(iter(devices)) if len(devices) == 1 and not any(item.streams for item in requirements) else None

    # --- guards -----------------------------------------------------------------------------------------------------

    def block(self, block: ir.Block) -> ir.Block:
        """Returns a block with its guards."""
        cached = self._guarded.get(id(block))
        if cached is None:
            lines = _LineGuarding(self).run(block.lines)
            same = len(lines) == len(block.lines) and all(new is old for new, old in zip(lines, block.lines))
            cached = self._guarded[id(block)] = block, block if same else ir.Block(block.arguments, lines)
        return cached[1]

    def guard_nested_blocks(self, line: ir.LineBase) -> ir.LineBase:
        """Returns a line with guards in its blocks, unless they run under a guard around the line."""
        inner = dict(ir.blocks(line))
        if not inner or self.single_device([*inner.values()]) is not None:
            return line
        changes = {name: self.block(block) for name, block in inner.items()}
        same = all(changes[name] is block for name, block in inner.items())
        return line if same else line.replace(**changes)


class _LineGuarding:
    """Inserts guards between the lines of a block. A guard is closed after the last line that requires it."""

    def __init__(self, inserter: _GuardInserter) -> None:
        self.inserter = inserter
        self.lines: list[ir.LineBase] = []
        self.tail: list[ir.LineBase] = []  # after the last line that requires the open guard
        self.open: _Requirement | None = None
        self.existing: list[EnterDevice] = []

    def run(self, lines: Sequence[ir.LineBase]) -> tuple[ir.LineBase, ...]:
        """Returns the lines with their guards."""
        for line in lines:
            need = self.inserter.requirement(line)
            if line.bracket[1] or line.terminator:
                self._close()
            elif need is not None and not self._is_compatible(need):
                self._close()
                if not self._is_satisfied(need):
                    self.open = need
                    self.lines.append(EnterDevice(need.device, need.stream))
            self._add(self.inserter.guard_nested_blocks(line), self.open is not None and need == self.open)
        return tuple(self.lines)

    def _add(self, line: ir.LineBase, requires_guard: bool) -> None:
        if isinstance(line, EnterDevice):
            self.existing.append(line)
        elif isinstance(line, ExitDevice):
            self.existing.pop()
        if self.open is None:
            self.lines.append(line)
            return
        self.tail.append(line)
        if requires_guard:
            self.lines += self.tail
            self.tail.clear()

    def _is_compatible(self, need: _Requirement) -> bool:
        if self.open is None:
            return self._is_satisfied(need)
        return need == self.open or (not need.device and not self.open.stream)

    def _is_satisfied(self, need: _Requirement) -> bool:
        if not need.device:
            return True
        return bool(self.existing) and (self.existing[-1].device, self.existing[-1].stream) == (
            need.device,
            need.stream,
        )

    def _close(self) -> None:
        if self.open is None:
            return
        # definitions of a result's symbols directly follow the line of the result
        binds = [ir.defined_symbol(line) is not None and line.on_host for line in self.tail]
        count = binds.index(False) if False in binds else len(binds)
        self.lines += self.tail[:count]
        self.lines.append(ExitDevice(self.open.device, self.open.stream))
        self.lines += self.tail[count:]
        self.tail.clear()
        self.open = None


def _device_requirement(device: torch.device | None) -> _Requirement:
    """Returns the requirement of a launch on a device; any device if there is one of its type only."""
    if device is None or not ir.has_device_index(device):
        return _ANY
    spec = registered_spec(device.type)
    return _Requirement(str(device), 0) if spec is None or spec.supports_multiple_devices else _ANY
