"""Programmatic dependent launches: kernels that start before the kernel launched before them has ended.

`wrapper_ir/dependent_launches.py` has the rules and why they suffice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fxwrap.devices import TRITON, WARP_LANES, DeviceSpec
from fxwrap.devices.kernel_names import EARLY_READS, is_printed
from fxwrap.lines import Launch
from fxwrap.printers import Signal, add_dependent_launch, fills_wait, is_waiting, pipelined_bytes
from fxwrap.symbolic import product
from fxwrap.wrapper_ir import (
    Block,
    KernelDefinition,
    LaunchChain,
    LineBase,
    Program,
    Value,
    alias_roots,
    blocks,
    program_arguments,
)

_RESIDENT_WARPS = 64
"""The warps that a multiprocessor runs at once at most."""

_FEW_REGISTERS = 64
"""The registers of a thread whose number is not limited."""

_REGISTER_UNIT, _MOST_REGISTERS = 8, 255
"""Registers of a thread are a multiple of the one, and at most the other."""

_PARTITIONS = 4
"""The parts of a multiprocessor, each with a part of its registers: it runs a multiple of so many warps of a kernel."""

_MANY_PROGRAMS = 4
"""The programs of a processor of which one more or less is a small part of its work."""


def insert_dependent_launches(program: Program, specs: Mapping[str, DeviceSpec]) -> Program:
    """Returns the program in which launches that directly follow a launch are dependent.

    The kernels of such launches, and of those before them, are printed Triton kernels; they are replaced by kernels
    that wait. Each reads early what none of its dependent launches' chains writes. Linear in the number of lines.

    Args:
        program: the program. It is not changed.
        specs: the specs of the devices whose kernels may be dependent, by type.
    """
    return _DependentLaunches(program, specs).program()


@dataclass
class _DependentLaunches:
    """The pass over one program.

    Fields: `dependent` has the identities of the launches that may be dependent, `unwritten` the tensors that all such
    launches of a kernel may read early; `signals` has, for each kernel of a chain, when the next launch may start;
    `shared_bytes` and `early_loaders` the results of `_shared_bytes` and `_loads_early`.
    """

    original: Program
    specs: Mapping[str, DeviceSpec]
    dependent: set[int] = field(default_factory=set)
    unwritten: dict[str, frozenset[int]] = field(default_factory=dict)
    signals: dict[str, Signal] = field(default_factory=dict)
    shared_bytes: dict[str, int] = field(default_factory=dict)
    early_loaders: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.original
        printed = [
            item for item in program.kernels
            if item.language == TRITON.name and is_printed(item.source) and not is_waiting(item.source)
        ]  # fmt: skip
        self.warps = {item.name: int(dict(item.options).get("num_warps", 4)) for item in printed}
        self.limits = {item.name: int(dict(item.options).get("maxnreg", 0)) for item in printed}
        launches: dict[str, list[Launch]] = {}
        self._find_dependent(program.body, program_arguments(program), launches)
        for _, block in program.functions:
            self._find_dependent(block, block.arguments, launches)
        for name, items in launches.items():
            self.limits[name] = max(self._even_registers(items), self.limits[name])
        self.registers = {
            name: WARP_LANES * self.warps[name] * (limit or _FEW_REGISTERS) for name, limit in self.limits.items()
        }

    def program(self) -> Program:
        """Returns the program with dependent launches."""
        program = self.original
        body = self._block(program.body)
        functions = tuple([(name, self._block(block)) for name, block in program.functions])
        if not self.unwritten:
            return program
        kernels = tuple([self._waiting(item) if item.name in self.signals else item for item in program.kernels])
        return program.replace(body=body, functions=functions, kernels=kernels)

    def _find_dependent(self, block: Block, arguments: Collection[Value], launches: dict[str, list[Launch]]) -> None:
        """Finds the launches of a block that may be dependent; adds all that may wait to those of their kernels."""
        root_of, chain = alias_roots(block.lines, arguments), LaunchChain()
        before = False
        for line in block.lines:
            for _, nested in blocks(line):
                self._find_dependent(nested, nested.arguments, launches)
            waits = isinstance(line, Launch) and self._may_wait(line)
            if isinstance(line, Launch) and waits:
                launches.setdefault(line.kernel, []).append(line)
                if before and chain.conflict(line, (), root_of) is None:
                    self.dependent.add(id(line))
                    early = chain.unwritten(line, root_of)
                    self.unwritten[line.kernel] = self.unwritten.get(line.kernel, early) & early
                before = True
            chain.add(line, waits, root_of)

    def _block(self, block: Block) -> Block:
        lines, later = [], self._large_launches(block)
        earlier: Launch | None = None  # the launch that may still run when the one before waits
        before: Launch | None = None
        for line in block.lines:
            inner = {name: self._block(nested) for name, nested in blocks(line)}
            new: LineBase = line.replace(**inner) if inner else line
            if isinstance(line, Launch) and self._may_wait(line):
                if before is not None and id(line) in self.dependent:
                    new = line.replace(dependent=True)
                    signal = self._signal(earlier, before, line, later.get(id(line)))
                    self.signals[before.kernel] = min(self.signals.get(before.kernel, signal), signal)
                    self.signals.setdefault(line.kernel, Signal.AT_START)
                    earlier = before
                else:
                    earlier = None
                before = line
            lines.append(new)
        return Block(block.arguments, tuple(lines))

    def _even_registers(self, launches: Sequence[Launch]) -> int:
        """Returns the registers of a thread with which processors have room for their parts of the programs alone.

        Then programs spread evenly wherever the first ones start. 0 where these load little early, run in several
        waves, or have no limit, and where no number of registers does that.
        """
        kernel, spec = launches[0].kernel, self._spec(launches[0])
        counts = {programs if isinstance(programs := product(line.grid), int) else 0 for line in launches}
        part = math.ceil(max(counts) / spec.multiprocessors)
        limit = self.limits[kernel]
        if len(counts) > 1 or not limit or not 0 < part <= self._places(launches[0], limit):
            return 0
        warps = math.ceil(part * self.warps[kernel] / _PARTITIONS) * _PARTITIONS
        registers = spec.registers // (warps * WARP_LANES) // _REGISTER_UNIT * _REGISTER_UNIT
        registers = min(registers, _MOST_REGISTERS)
        is_even = self._places(launches[0], registers) == part
        return registers if is_even and self._loads_early(kernel) else 0

    def _places(self, line: Launch, registers: int) -> int:
        """Returns the number of a launch's programs for whose threads a processor has so many registers."""
        warps = self._spec(line).registers // (WARP_LANES * registers) // _PARTITIONS * _PARTITIONS
        return warps // self.warps[line.kernel]

    def _loads_early(self, name: str) -> bool:
        """Whether a kernel loads so much before it waits that an early start pays off."""
        if name not in self.early_loaders:
            kernel, unwritten = self.original.kernel(name), self.unwritten.get(name, frozenset())
            self.early_loaders[name] = fills_wait(kernel.source, kernel.signature, kernel.options, unwritten)
        return self.early_loaders[name]

    def _may_wait(self, line: Launch) -> bool:
        on_device = bool(line.outs) and line.outs[0].tensor_type.device.type in self.specs
        return on_device and line.kernel in self.warps

    def _large_launches(self, block: Block) -> Mapping[int, Launch]:
        """Returns the first launch after each small one that is not small, by the identity of the small one."""
        launches: dict[int, Launch] = {}
        large: Launch | None = None
        for line in reversed(block.lines):
            if isinstance(line, Launch) and self._may_wait(line):
                if not self._is_small(line):
                    large = line
                elif large is not None:
                    launches[id(line)] = large
        return launches

    def _signal(self, earlier: Launch | None, before: Launch, line: Launch, later: Launch | None) -> Signal:
        """Returns when a launch may start: as early as its programs occupy a GPU evenly nevertheless.

        Programs start where others end first. That leaves processors without work unless one launch has few programs,
        or the later one has so many that they are distributed until its end. Before its wait, the launch `before` runs
        beside the one `earlier`, which must have few programs, too, or leave room for all programs of the other two.
        The launch `later` starts soon after a small one.
        """
        programs, new = product(before.grid), product(line.grid)
        if not isinstance(programs, int) or not isinstance(new, int):
            return Signal.AT_END
        if self._fills(line, new):
            return Signal.AT_START
        many = 2 * self._spec(line).multiprocessors * _RESIDENT_WARPS
        if not self._is_small(before) and not self._is_small(line) and new * self.warps[line.kernel] < many:
            return Signal.AT_END
        is_even = earlier is None or self._is_even(earlier, before, line, later)
        return Signal.AT_START if is_even else Signal.AFTER_WAIT

    def _fills(self, line: Launch, programs: int) -> bool:
        """Whether a launch has one wave of programs that leave no registers for more of them: each place is one's."""
        of_processor = math.ceil(programs / self._spec(line).multiprocessors)
        return self._places(line, self.limits[line.kernel] or _FEW_REGISTERS) == of_processor

    def _is_even(self, earlier: Launch, before: Launch, line: Launch, later: Launch | None) -> bool:
        """Whether the programs of a launch occupy a GPU evenly although they start while `earlier` runs.

        They do if processors have registers and shared memory for all of them, and registers for those of the launch
        `later`. Where there is not so much, programs that start later are a small part of a processor's work if it has
        many: those of the launch where shared memory does not suffice, or where they load much before they wait, those
        of `later` where registers do not.
        """
        if self._is_small(earlier):
            return True
        spec, launches = self._spec(line), (earlier, before, line)
        counts = [count for item in launches if isinstance(count := product(item.grid), int)]
        if len(counts) < len(launches):
            return False
        programs = [(item.kernel, count / spec.multiprocessors) for item, count in zip(launches, counts, strict=True)]
        has_many = counts[-1] >= _MANY_PROGRAMS * spec.multiprocessors
        if has_many and self._loads_early(line.kernel):
            return True
        registers = sum([number * self.registers[name] for name, number in programs])
        following = 0 if later is None else product(later.grid)
        if later is not None and isinstance(following, int) and following < _MANY_PROGRAMS * spec.multiprocessors:
            registers += following / spec.multiprocessors * self.registers[later.kernel]
        if registers > spec.registers:
            return False
        if has_many:
            return True
        return sum([number * self._shared_bytes(name) for name, number in programs]) <= spec.shared_memory_bytes

    def _shared_bytes(self, name: str) -> int:
        """Returns the shared memory of a program of a kernel, which its text tells."""
        if name not in self.shared_bytes:
            kernel = self.original.kernel(name)
            self.shared_bytes[name] = pipelined_bytes(kernel.source, kernel.signature, kernel.options)
        return self.shared_bytes[name]

    def _is_small(self, line: Launch) -> bool:
        """Whether a launch has no more programs than the device has processors."""
        programs = product(line.grid)
        return isinstance(programs, int) and programs <= self._spec(line).multiprocessors

    def _spec(self, line: Launch) -> DeviceSpec:
        return self.specs[line.outs[0].tensor_type.device.type]

    def _waiting(self, kernel: KernelDefinition) -> KernelDefinition:
        """Returns a kernel that signals and waits; one without dependent launches reads nothing early."""
        unwritten = self.unwritten.get(kernel.name, frozenset())
        source, read = add_dependent_launch(
            kernel.source, kernel.signature, kernel.options, unwritten, self.signals[kernel.name]
        )
        limit = {"maxnreg": self.limits[kernel.name]} if self.limits[kernel.name] else {}
        options = tuple(sorted({**dict(kernel.options), **limit, EARLY_READS: " ".join(map(str, read))}.items()))
        return replace(kernel, source=source, options=options)
