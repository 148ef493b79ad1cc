"""Partitioning of a program into functions that a device captures and replays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Alloc, CallFunction, Comment, ExternCall, Let, Reuse, View, WaitCollective, Yield
from fxwrap.lines.frees import insert_frees
from fxwrap.names import NameAllocator
from fxwrap.passes.scheduling import SchedulingUnit, build_units, split_regions

MIN_CAPTURED_CALLS = 3
"""Smallest number of launches and calls to capture: a replay costs the host about as much."""

CaptureCheck: TypeAlias = Callable[[ir.LineBase], torch.device | str]
"""Returns the device to capture a line on, or the reason why it cannot be captured."""


def partition(
    program: ir.Program,
    can_capture: CaptureCheck,
    *,
    max_captures: int = 8,
    static_inputs: Collection[str] = (),
    min_calls: int = MIN_CAPTURED_CALLS,
) -> ir.Program:
    """Returns the program with groups of lines that can be captured as functions, each called by one line.

    Lines are reordered as their data, symbols and effects allow, so that there are few functions: lines outside run
    before a function as far as possible, captured lines before its end. Views are rematerialised in each function,
    memory is allocated where it is first written, and memory reused from outside of a function is allocated again.
    A collective is in one function with all of its waits, or outside with them; the order of communication in a group
    stays. Functions return the values that are used after them. Brackets and blocks inside lines are not moved. The
    pass runs before memory planning: lines that use a pool are not captured. Programs that use streams are unchanged,
    since their events depend on the order of lines. n log n in the number of lines.

    Args:
        program: the program. It is not changed.
        can_capture: returns the device to capture a line on, or the reason why it cannot be captured.
        max_captures: the number of captured graphs to keep for each function.
        static_inputs: the names of inputs whose address is the same in each call; constants are static too.
        min_calls: the smallest number of launches and calls of a function.
    """
    if ir.uses_streams(program):
        return program
    lines = [line for line in program.body.lines if not ir.is_release(line)]
    arguments = ir.program_arguments(program)
    root_of = ir.alias_roots(lines, arguments)
    functions, has_symbols = dict(program.functions), bool(ir.symbol_infos(program))
    regions = [build_units(region, root_of, functions, has_symbols) for region in split_regions(lines)]
    classifier = _UnitClassifier(can_capture, lines, root_of, regions)
    groups = [group for units in regions for group in _schedule_groups(units, classifier)]
    for group in groups:
        if group.device is not None and _count_calls(group, functions) < min_calls:
            group.device = None
    if all(group.device is None for group in groups):
        return program
    constants = {constant.value.name for constant in program.constants}
    builder = _PartitionBuilder(program, groups, classifier, {*static_inputs, *constants}, max_captures)
    body_lines = insert_frees(builder.lines(), arguments, ir.released_inputs(program.inputs))
    body = ir.Block(program.body.arguments, body_lines)
    return program.replace(body=body, functions=(*program.functions, *builder.functions))


@dataclass(eq=False)
class _CaptureGroup:
    """Units that run in one function on a device, or outside of functions (None).

    `prologue` are symbol definitions that run outside before it.
    """

    device: torch.device | None
    prologue: list[SchedulingUnit] = field(default_factory=list)
    units: list[SchedulingUnit] = field(default_factory=list)

    def lines(self) -> Iterator[ir.LineBase]:
        """Yields the lines of the units."""
        for unit in self.units:
            yield from unit.lines


def _pool_roots(lines: Sequence[ir.LineBase], root_of: Mapping[str, str]) -> frozenset[str]:
    """Returns the roots of pools, that is, of lines other than views and waits with aliasing results."""
    slices = [line for line in lines if line.alias_fields and not isinstance(line, View | WaitCollective)]
    return frozenset([root_of[value.name] for line in slices for value in ir.reads(line)])


class _UnitClassifier:
    """Classifies units: captured on a device, outside, or rematerialised.

    `definitions` are the rematerialised lines by the names they define. `bound` are views that are not rematerialised.
    `pending` are the values that are waited for, by the name of a wait's result: after the wait they are the same.
    """

    def __init__(
        self,
        can_capture: CaptureCheck,
        lines: Sequence[ir.LineBase],
        root_of: Mapping[str, str],
        regions: Sequence[Sequence[SchedulingUnit]],
    ) -> None:
        self.can_capture = can_capture
        self.root_of = root_of
        self.pooled = _pool_roots(lines, root_of)
        self.definitions: dict[str, ir.LineBase] = {}
        self.bound: set[str] = set()
        self.pending: dict[str, ir.Value] = {}
        for unit in [unit for units in regions for unit in units]:
            self._add_definitions(unit)
        self._collective_devices: dict[SchedulingUnit, torch.device] = {}
        """The devices of captured collectives and their waits."""
        self._add_collectives(regions)

    def _add_definitions(self, unit: SchedulingUnit) -> None:
        names = [value.name for line in unit.lines for value in ir.defined(line)]
        (line, *_) = unit.lines
        if self.is_rematerializable(unit):
            self.definitions.update(dict.fromkeys(names, line))
        elif isinstance(line, WaitCollective) and _renames(line) and line.pending.name not in self.bound:
            self.pending[line.result.name] = line.pending
        else:
            self.bound.update([name for name in names if name not in unit.defined_roots])

    def _add_collectives(self, regions: Sequence[Sequence[SchedulingUnit]]) -> None:
        """Finds the collectives that one function can contain with all waits for their results.

        A wait then runs in the function of its start: nothing else precedes it that does not precede the start.
        """
        waits: dict[str, list[tuple[int, SchedulingUnit]]] = {}  # by root, with the region
        for region, units in enumerate(regions):
            for unit in [unit for unit in units if unit.lines[0].is_async_wait]:
                for value in ir.reads(unit.lines[0]):
                    waits.setdefault(self.root_of[value.name], []).append((region, unit))
        for region, units in enumerate(regions):
            for unit in [unit for unit in units if unit.lines[0].is_async_start]:
                if not unit.defined_roots or not unit.defined_roots <= waits.keys():
                    continue
                parts = [(region, unit), *[item for root in unit.defined_roots for item in waits[root]]]
                before = unit.predecessors | {part.position for _, part in parts}
                devices = {self._device(part) for _, part in parts}
                if len(devices) == 1 and all(here == region and part.predecessors <= before for here, part in parts):
                    self._collective_devices |= {part: device for _, part in parts for device in devices if device}

    def is_rematerializable(self, unit: SchedulingUnit) -> bool:
        """Whether a unit is a view, an allocation, a symbol definition or a comment."""
        (line, *rest) = unit.lines
        if rest or any(root in self.pooled for root in unit.accessed):
            return False
        if is_view_only(line):
            return all(value.name not in self.bound for value in ir.reads(line))
        return isinstance(line, Alloc | Reuse | Let | Comment)

    def device(self, unit: SchedulingUnit) -> torch.device | None:
        """Returns the device to capture a unit on, or None."""
        line = unit.lines[0]
        is_collective = line.is_async_start or line.is_async_wait
        return self._collective_devices.get(unit) if is_collective else self._device(unit)

    def _device(self, unit: SchedulingUnit) -> torch.device | None:
        """Returns the device to capture a unit on, or None, whether or not a collective is with its waits."""
        (line, *rest) = unit.lines
        if rest or line.terminator or line.bracket[1]:
            return None
        if (
            ir.defined_symbol(line) is not None
            or ir.consumed(line)
            or any(root in self.pooled for root in unit.accessed)
        ):
            return None
        results, operands = ir.defined(line), ir.used(line)
        aliases = 0 if line.is_async_wait else len(results) - len(unit.defined_roots)
        if not (results or ir.writes(line)) or aliases:
            return None
        if any(
            value.name in self.bound or not isinstance(value.type, ir.TensorType) for value in (*operands, *results)
        ):
            return None
        verdict = self.can_capture(line)
        return None if isinstance(verdict, str) else verdict


def _renames(line: WaitCollective) -> bool:
    """Whether a wait's result is the value that it waits for, with the same type."""
    return line.result.type == line.pending.type


def is_view_only(line: ir.LineBase) -> bool:
    """Whether all results of a line are views of its operands, and it has no effects."""
    if isinstance(line, View):
        return True
    if not isinstance(line, ExternCall) or line.outs or line.effects():
        return False
    results = ir.defined(line)
    return bool(results) and all(
        line.alias_of(value) is not None and isinstance(value.type, ir.TensorType) for value in results
    )


def _count_calls(group: _CaptureGroup, functions: Mapping[str, ir.Block]) -> int:
    """Returns the number of launches and calls in a group, including those of called functions."""

    def count(line: ir.LineBase) -> int:
        inner = [functions[name].lines for name in ir.called_functions(line)]
        if inner:
            return sum([count(other) for lines in inner for other in lines])
        return int(
            bool(ir.defined(line) or ir.writes(line))
            and not (isinstance(line, Alloc | Reuse) or line.is_async_wait or is_view_only(line))
        )

    return sum([count(line) for line in group.lines()])


def _schedule_groups(units: Sequence[SchedulingUnit], classifier: _UnitClassifier) -> list[_CaptureGroup]:
    """Returns groups of units in an order with few changes of device, otherwise in the program's order."""
    neutral = [classifier.is_rematerializable(unit) for unit in units]
    devices = [None if neutral[unit.position] else classifier.device(unit) for unit in units]
    waiting = [len(unit.predecessors) for unit in units]
    ready: dict[torch.device | None, list[int]] = {None: []}
    symbols: list[SchedulingUnit] = []  # pending definitions

    def release(position: int) -> None:
        pending = [position]
        while pending:
            unit = units[pending.pop()]
            if not neutral[unit.position]:
                heappush(ready.setdefault(devices[unit.position], []), unit.position)
                continue
            if isinstance(unit.lines[0], Let | Comment):
                symbols.append(unit)
            pending.extend(done(unit))

    def done(unit: SchedulingUnit) -> list[int]:
        for later in unit.successors:
            waiting[later] -= 1
        return [later for later in unit.successors if not waiting[later]]

    for unit in units:
        if not unit.predecessors:
            release(unit.position)
    groups: list[_CaptureGroup] = []
    while any(ready.values()):
        device = None if ready[None] else min([device for device in ready if ready[device]], key=lambda d: ready[d][0])
        group = _CaptureGroup(device)
        groups.append(group)
        heap = ready[device]
        while heap:
            if device is None:
                group.units += symbols
                symbols.clear()
            unit = units[heappop(heap)]
            group.units.append(unit)
            for later in done(unit):
                release(later)
        (group.units if device is None else group.prologue).extend(symbols)
        symbols.clear()
    if symbols:
        groups.append(_CaptureGroup(None, units=symbols))
    return groups


class _PartitionBuilder:
    """Builds the functions of captured groups, and the lines of the body."""

    def __init__(
        self,
        program: ir.Program,
        groups: Sequence[_CaptureGroup],
        classifier: _UnitClassifier,
        static_inputs: Collection[str],
        max_captures: int,
    ) -> None:
        self.groups = groups
        self.definitions: Mapping[str, ir.LineBase] = classifier.definitions
        self.pending: Mapping[str, ir.Value] = classifier.pending
        self.static_inputs = static_inputs
        self.max_captures = max_captures
        self.names = NameAllocator(ir.value_names(program))
        self.function_names = NameAllocator({name for name, _ in program.functions})
        self.functions: list[tuple[str, ir.Block]] = []
        self.home: dict[str, _CaptureGroup | None] = {value.name: None for value in ir.program_arguments(program)}
        """The group that defines each root; None for outside."""
        self.last_user: dict[str, int] = {}
        """The last group that uses each root."""
        for index, group in enumerate(groups):
            for unit in group.units:
                self.last_user.update(dict.fromkeys(unit.accessed, index))
        self.outer: list[ir.LineBase] = []
        self.materialized: set[str] = set()  # names of rematerialised lines in the body

    def lines(self) -> list[ir.LineBase]:
        """Returns the lines of the body, and fills `functions`."""
        for index, group in enumerate(self.groups):
            for unit in group.prologue:
                self.outer += unit.lines
            if group.device is None:
                for line in group.lines():
                    self._emit_outside(line)
            else:
                self._emit_function(index, group)
        return self.outer

    # --- outside ----------------------------------------------------------------------------------------------------

    def _emit_outside(self, line: ir.LineBase) -> None:
        for value in ir.used(line):
            self._materialize_outside(value)
        self._append_outside(line)
        for value in ir.defined(line):
            if line.alias_of(value) is None:
                self.home[value.name] = None

    def _append_outside(self, line: ir.LineBase) -> None:
        """Adds a line, in which values replace results of waits in functions."""
        names = [value.name for value in ir.used(line) if value.name in self.pending]
        waited = {name: self.pending_value(name) for name in names if name not in self.materialized}
        if waited:
            line = ir.map_line(line, lambda leaf: waited.get(leaf.name, leaf) if type(leaf) is ir.Value else leaf)
        self.outer.append(line)
        if isinstance(line, WaitCollective):
            self.materialized.add(line.result.name)

    def pending_value(self, name: str) -> ir.Value:
        """Returns the value that a wait's result is after the wait."""
        value = self.pending[name]
        return self.pending_value(value.name) if value.name in self.pending else value

    def _materialize_outside(self, value: ir.Value) -> None:
        line = self.definitions.get(value.name)
        if line is None or value.name in self.materialized:
            return
        if is_view_only(line):
            for base in ir.reads(line):
                self._materialize_outside(base)
            self._append_outside(line)
            self.materialized.update([result.name for result in ir.defined(line)])
        elif value.name not in self.home:
            self.home[value.name] = None
            self.materialized.add(value.name)
            self.outer.append(self.allocation(line, value, None))

    def allocation(self, line: ir.LineBase, value: ir.Value, group: _CaptureGroup | None) -> ir.LineBase:
        """Returns the line that allocates memory in a group: memory of another group is not reused."""
        if isinstance(line, Reuse) and (line.root.name not in self.home or self.home[line.root.name] is not group):
            return Alloc(value, origin=line.origin)
        return line

    # --- functions --------------------------------------------------------------------------------------------------

    def _emit_function(self, index: int, group: _CaptureGroup) -> None:
        number = len(self.functions)
        function = _FunctionBuilder(self, group, number)
        for line in group.lines():
            function.add(line)
        results = [value for value in function.defined_roots if self.last_user.get(value.name, -1) > index]
        name = self.function_names.create_name(f"partition_{number}")
        lines = [*function.lines, Yield(tuple([function.env[value.name] for value in results]))]
        operands = tuple(function.operands)
        arguments = tuple([function.env[value.name] for value in operands])
        self.functions.append((name, ir.Block(arguments, insert_frees(lines, arguments, ()))))
        static_inputs = tuple([value for value in operands if value.name in self.static_inputs])
        written = tuple([value for value in operands if value.name in function.written])
        for value in operands:
            self._materialize_outside(value)
        self.outer.append(CallFunction(tuple(results), name, operands, written, self.max_captures, static_inputs))

    def inner_value(self, value: ir.Value, number: int) -> ir.Value:
        """Returns a value with an unused name for a function."""
        return ir.Value(self.names.create_name(f"{value.name}_p{number}"), value.type)


class _FunctionBuilder:
    """Builds one function. `env` maps names outside to values inside."""

    def __init__(self, partition: _PartitionBuilder, group: _CaptureGroup, number: int) -> None:
        self.partition = partition
        self.group = group
        self.number = number
        self.lines: list[ir.LineBase] = []
        self.env: dict[str, ir.Value] = {}
        self.operands: list[ir.Value] = []
        self.defined_roots: list[ir.Value] = []
        self.root_of: dict[str, str] = {}
        self.written: set[str] = set()  # roots

    def add(self, line: ir.LineBase) -> None:
        """Adds a line after the rematerialised lines it uses."""
        for value in ir.used(line):
            self._materialize(value)
        for value in ir.writes(line):
            self.written.add(self.root_of[value.name])
        self._emit(line)

    def _materialize(self, value: ir.Value) -> None:
        if value.name in self.env:
            return
        line, home = self.partition.definitions.get(value.name), self.partition.home
        if line is not None and is_view_only(line):
            for base in ir.reads(line):
                self._materialize(base)
            self._emit(line)
        elif line is not None and value.name not in home:
            self._emit(self.partition.allocation(line, value, self.group))
        elif value.name in self.partition.pending:  # its wait ran before this function
            base = self.partition.pending_value(value.name)
            self._materialize(base)
            self.env[value.name], self.root_of[value.name] = self.env[base.name], self.root_of[base.name]
        else:
            self.env[value.name] = self.partition.inner_value(value, self.number)
            self.root_of[value.name] = value.name
            self.operands.append(value)

    def _emit(self, line: ir.LineBase) -> None:
        """Adds a line with the names inside."""
        for value in ir.defined(line):
            self.env[value.name] = self.partition.inner_value(value, self.number)
            base = line.alias_of(value)
            self.root_of[value.name] = value.name if base is None else self.root_of[base.name]
            if base is None:
                self.partition.home[value.name] = self.group
                self.defined_roots.append(value)
        self.lines.append(ir.map_line(line, lambda leaf: self.env[leaf.name] if type(leaf) is ir.Value else leaf))
