"""What can be recorded once and replayed becomes functions of the program: as few and as large as can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from fxwrap.lines import Alloc, Call, CallFunction, Comment, Let, Reuse, View, Yield
from fxwrap.lines.frees import insert_frees
from fxwrap.passes.units import Unit, segments, units_of
from fxwrap.wrapper_ir import (
    Block,
    LineBase,
    Program,
    TensorType,
    Value,
    called_functions,
    consumed,
    defined,
    defined_symbol,
    is_release,
    map_line,
    program_arguments,
    reads,
    released_inputs,
    roots,
    symbol_infos,
    used,
    uses_streams,
    writes,
)

FEWEST_CALLS = 3
"""How many launches and calls are worth a recording: a replay costs the host about as much as so many of them."""

Judge = Callable[[LineBase], torch.device | str]
"""Says on which device a line's work can be recorded, or why it cannot."""


def partition(
    program: Program,
    judge: Judge,
    *,
    recordings: int = 8,
    fixed: Collection[str] = (),
    fewest: int = FEWEST_CALLS,
) -> Program:
    """Returns the program with each run of lines that can be recorded as a function, which one line calls.

    Lines may change places as their data, symbols and effects allow: all that can run outside runs before a function
    begins, and all that can be recorded runs before it ends. So there are as few functions as one can have. Windows
    (views) are made again wherever they are needed, memory is allocated where it is first written, and memory that a
    line takes over from outside of its function is allocated anew. Functions give what is used after them, and lines
    that they write stand in `writes`. Brackets stay where they are, and so do blocks inside of lines. It runs before
    memory is planned: what touches a pool stays outside, and programs that use streams stay as they are. n log n in the
    number of lines.

    Args:
        program: the program. It is not changed.
        judge: says on which device the work of a line that launches, calls or writes can be recorded, or why it cannot.
        recordings: how many recordings of each function are kept.
        fixed: the names of inputs that keep their address from call to call; constants do so anyway.
        fewest: runs of fewer lines than this stay as they are.
    """
    if uses_streams(program):
        return program  # events order their work by the order of lines, which this would change
    lines = [line for line in program.body.lines if not is_release(line)]
    arguments = program_arguments(program)
    root_of = roots(lines, arguments)
    functions, has_symbols = dict(program.functions), bool(symbol_infos(program))
    parts = [units_of(segment, root_of, functions, has_symbols) for segment in segments(lines)]
    kinds = _Kinds(judge, _pooled(lines, root_of), [unit for units in parts for unit in units])
    groups = [group for units in parts for group in _scheduled(units, kinds)]
    for group in groups:
        if group.device is not None and _count_calls(group, functions) < fewest:
            group.device = None
    if all(group.device is None for group in groups):
        return program
    constants = {constant.value.name for constant in program.constants}
    assembly = _Assembly(program, groups, kinds.makers, {*fixed, *constants}, recordings)
    found = assembly.lines()
    body = Block(program.body.arguments, insert_frees(found, arguments, released_inputs(program.inputs)))
    return program.replace(body=body, functions=(*program.functions, *assembly.functions))


@dataclass(eq=False)
class _Group:
    """Units that run together: on a device, as one function, or outside of any (None).

    `ahead` are lines about numbers that run outside before it.
    """

    device: torch.device | None
    ahead: list[Unit] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)

    def lines(self) -> Iterator[LineBase]:
        """Yields the lines of the units."""
        for unit in self.units:
            yield from unit.lines


def _pooled(lines: Sequence[LineBase], root_of: Mapping[str, str]) -> frozenset[str]:
    """Returns the roots that lines take parts of: they hold memory that is planned already."""
    taken = [line for line in lines if line.alias_fields and not isinstance(line, View)]
    return frozenset([root_of[value.name] for line in taken for value in reads(line)])


class _Kinds:
    """What each unit is: on a device, outside, or made wherever it is needed.

    `makers` are the lines of the last kind by what they define. `bound` are windows that only one line makes, outside.
    """

    def __init__(self, judge: Judge, pooled: frozenset[str], units: Sequence[Unit]) -> None:
        self.judge = judge
        self.pooled = pooled
        self.makers: dict[str, LineBase] = {}
        self.bound: set[str] = set()
        for unit in units:
            names = [value.name for line in unit.lines for value in defined(line)]
            if self.is_neutral(unit):
                self.makers.update(dict.fromkeys(names, unit.lines[0]))
            else:
                self.bound.update([name for name in names if name not in unit.made])

    def is_neutral(self, unit: Unit) -> bool:
        """Whether a unit only names memory, makes it or works out a number."""
        (line, *rest) = unit.lines
        if rest or any(root in self.pooled for root in unit.touched):
            return False
        if is_window(line):
            return all(value.name not in self.bound for value in reads(line))
        return isinstance(line, Alloc | Reuse | Let | Comment)

    def device(self, unit: Unit) -> torch.device | None:
        """Returns the device that a unit's work can be recorded on."""
        (line, *rest) = unit.lines
        if rest or line.terminator or line.bracket[1] or line.starts_flight or line.ends_flight:
            return None
        if defined_symbol(line) is not None or consumed(line) or any(root in self.pooled for root in unit.touched):
            return None
        results, operands = defined(line), used(line)
        if not (results or writes(line)) or len(unit.made) < len(results):
            return None
        if any(value.name in self.bound or not isinstance(value.type, TensorType) for value in (*operands, *results)):
            return None
        found = self.judge(line)
        return None if isinstance(found, str) else found


def is_window(line: LineBase) -> bool:
    """Whether a line does nothing but give names to parts of memory that is there."""
    if isinstance(line, View):
        return True
    if not isinstance(line, Call) or line.outs or line.effects():
        return False
    results = defined(line)
    return bool(results) and all(
        line.alias_of(value) is not None and isinstance(value.type, TensorType) for value in results
    )


def _count_calls(group: _Group, functions: Mapping[str, Block]) -> int:
    """Returns how many lines of a group start work, those of functions that it calls included."""

    def count(line: LineBase) -> int:
        inner = [functions[name].lines for name in called_functions(line)]
        if inner:
            return sum([count(other) for lines in inner for other in lines])
        return int(bool(defined(line) or writes(line)) and not (isinstance(line, Alloc | Reuse) or is_window(line)))

    return sum([count(line) for line in group.lines()])


def _scheduled(units: Sequence[Unit], kinds: _Kinds) -> list[_Group]:
    """Returns the units in an order with few changes between outside and devices, in the program's order else."""
    neutral = [kinds.is_neutral(unit) for unit in units]
    devices = [None if neutral[unit.position] else kinds.device(unit) for unit in units]
    waiting = [len(unit.before) for unit in units]
    ready: dict[torch.device | None, list[int]] = {None: []}
    numbers: list[Unit] = []  # that nothing has run before yet

    def release(position: int) -> None:
        pending = [position]
        while pending:
            unit = units[pending.pop()]
            if not neutral[unit.position]:
                heappush(ready.setdefault(devices[unit.position], []), unit.position)
                continue
            if isinstance(unit.lines[0], Let | Comment):
                numbers.append(unit)
            pending.extend(done(unit))

    def done(unit: Unit) -> list[int]:
        for later in unit.after:
            waiting[later] -= 1
        return [later for later in unit.after if not waiting[later]]

    for unit in units:
        if not unit.before:
            release(unit.position)
    groups: list[_Group] = []
    while any(ready.values()):
        device = None if ready[None] else min([(heap[0], device) for device, heap in ready.items() if heap],
                                              key=lambda pair: pair[0])[1]  # fmt: skip
        group = _Group(device)
        groups.append(group)
        heap = ready[device]
        while heap:
            if device is None and numbers:  # outside, numbers stand where they are known
                group.units += numbers
                numbers.clear()
            unit = units[heappop(heap)]
            group.units.append(unit)
            for later in done(unit):
                release(later)
        (group.units if device is None else group.ahead).extend(numbers)
        numbers.clear()
    if numbers:
        groups.append(_Group(None, units=numbers))
    return groups


class _Assembly:
    """Writes the groups: functions for those on devices, and the lines of the body."""

    def __init__(
        self,
        program: Program,
        groups: Sequence[_Group],
        makers: Mapping[str, LineBase],
        fixed: Collection[str],
        recordings: int,
    ) -> None:
        self.groups = groups
        self.makers = makers
        self.fixed = fixed
        self.recordings = recordings
        self.names = _names(program)
        self.taken_names = {name for name, _ in program.functions}
        self.functions: list[tuple[str, Block]] = []
        self.home: dict[str, _Group | None] = {value.name: None for value in program_arguments(program)}
        """Where each root is made: in a group on a device, or outside."""
        self.last_user: dict[str, int] = {}
        """The last group that touches each root."""
        for index, group in enumerate(groups):
            for unit in group.units:
                self.last_user.update(dict.fromkeys(unit.touched, index))
        self.outer: list[LineBase] = []
        self.seen: set[str] = set()  # what the body has defined so far, of what is made wherever it is needed

    def lines(self) -> list[LineBase]:
        """Returns the lines of the body; `functions` are filled on the way."""
        for index, group in enumerate(self.groups):
            for unit in group.ahead:
                self.outer += unit.lines
            if group.device is None:
                for line in group.lines():
                    self._outside(line)
            else:
                self._function(index, group)
        return self.outer

    # --- outside ----------------------------------------------------------------------------------------------------

    def _outside(self, line: LineBase) -> None:
        for value in used(line):
            self._make_outside(value)
        self.outer.append(line)
        for value in defined(line):
            if line.alias_of(value) is None:
                self.home[value.name] = None

    def _make_outside(self, value: Value) -> None:
        """Makes what is made wherever it is needed, unless it is there."""
        line = self.makers.get(value.name)
        if line is None or value.name in self.seen:
            return
        if is_window(line):
            for base in reads(line):
                self._make_outside(base)
            self.outer.append(line)
            self.seen.update([made.name for made in defined(line)])
        elif value.name not in self.home:
            self.home[value.name] = None
            self.seen.add(value.name)
            self.outer.append(self._memory(line, value, None))

    def _memory(self, line: LineBase, value: Value, group: _Group | None) -> LineBase:
        """Returns the line that makes memory in a group: memory from outside of the group is not taken over."""
        if isinstance(line, Reuse) and (line.root.name not in self.home or self.home[line.root.name] is not group):
            return Alloc(value, origin=line.origin)
        return line

    # --- functions --------------------------------------------------------------------------------------------------

    def _function(self, index: int, group: _Group) -> None:
        number = len(self.functions)
        inside = _Inside(self, group, number)
        for line in group.lines():
            inside.add(line)
        given = [value for value in inside.made if self.last_user.get(value.name, -1) > index]
        name = self._function_name(number)
        ended = [*inside.lines, Yield(tuple([inside.env[value.name] for value in given]))]
        arguments = tuple([inside.env[value.name] for value in inside.operands])
        self.functions.append((name, Block(arguments, insert_frees(ended, arguments, ()))))
        fixed = tuple([value for value in inside.operands if value.name in self.fixed])
        written = tuple([value for value in inside.operands if value.name in inside.written])
        for value in inside.operands:
            self._make_outside(value)
        self.outer.append(CallFunction(tuple(given), name, tuple(inside.operands), written, self.recordings, fixed))

    def _function_name(self, number: int) -> str:
        name = f"partition_{number}"
        while name in self.taken_names:
            name += "_"
        self.taken_names.add(name)
        return name

    def inner_value(self, value: Value, number: int) -> Value:
        """Returns a value for inside of a function, whose name no other value has."""
        name = f"{value.name}_p{number}"
        while name in self.names:
            name += "_"
        self.names.add(name)
        return Value(name, value.type)


def _names(program: Program) -> set[str]:
    """Returns the names of all values of a program."""
    found = {value.name for value in program_arguments(program)}
    for block in program.all_blocks():
        found.update([value.name for value in block.arguments])
        found.update([value.name for line in block.lines for value in defined(line)])
    return found


class _Inside:
    """The lines of one function while it is written. `env` are the values inside, by the names they have outside."""

    def __init__(self, assembly: _Assembly, group: _Group, number: int) -> None:
        self.assembly = assembly
        self.group = group
        self.number = number
        self.lines: list[LineBase] = []
        self.env: dict[str, Value] = {}
        self.operands: list[Value] = []
        self.made: list[Value] = []
        self.root_of: dict[str, str] = {}
        self.written: set[str] = set()  # roots

    def add(self, line: LineBase) -> None:
        """Adds a line, after what makes the memory it needs."""
        for value in used(line):
            self._make(value)
        for value in writes(line):
            self.written.add(self.root_of[value.name])
        self._emit(line)

    def _make(self, value: Value) -> None:
        if value.name in self.env:
            return
        line, home = self.assembly.makers.get(value.name), self.assembly.home
        if line is not None and is_window(line):
            for base in reads(line):
                self._make(base)
            self._emit(line)
        elif line is not None and value.name not in home:
            self._emit(self.assembly._memory(line, value, self.group))
        else:
            self.env[value.name] = self.assembly.inner_value(value, self.number)
            self.root_of[value.name] = value.name
            self.operands.append(value)

    def _emit(self, line: LineBase) -> None:
        """Adds a line with the names that things have inside."""
        for value in defined(line):
            self.env[value.name] = self.assembly.inner_value(value, self.number)
            base = line.alias_of(value)
            self.root_of[value.name] = value.name if base is None else self.root_of[base.name]
            if base is None:
                self.assembly.home[value.name] = self.group
                self.made.append(value)
        self.lines.append(map_line(line, lambda leaf: self.env[leaf.name] if type(leaf) is Value else leaf))


def partitions(program: Program) -> dict[str, CallFunction]:
    """Returns the lines of a program's body that call functions to be replayed, by the function's name."""
    found = [line for line in program.body.lines if isinstance(line, CallFunction) and line.replay]
    return {line.function: line for line in found}
