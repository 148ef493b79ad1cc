"""Launches of small kernels that are alike, and do not need each other's results, as one launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxwrap.device_registry import Joiner, find_language
from fxwrap.lines import Alloc, Launch, View
from fxwrap.passes.parts import Parts
from fxwrap.passes.units import Unit
from fxwrap.printers import PrintedKernel
from fxwrap.wrapper_ir import Block, KernelDefinition, LineBase, Origin, Program, Value, run_blocks, uses_streams

MOST_TENSORS = 240
"""How many tensors a joined kernel takes at most: launches of our own pass up to 256 parameters to a kernel."""


MOST_HELD = 1 << 18
"""How many bytes more joined launches may hold at the worst moment: results of one number each are few bytes."""


def join_launches(program: Program, most_bytes: Mapping[str, int]) -> Program:
    """Returns the program with small launches of like kernels joined, as far as hardly more memory is held at once.

    Kernels are alike where their language's `Joiner` says so. A launch is moved to the others as what it reads and
    writes allows: late where the results take more memory than what is freed after it, else early. Large ones stay:
    each program chooses among the launches that are joined, and a step of AdamW with large matrices joined too took a
    GPU as long as one with nothing joined. Programs that use streams stay as they are, and so do blocks inside of
    lines. n log n in the number of lines for each joined launch.

    Args:
        program: the program. It is not changed.
        most_bytes: by device type, how much memory the tensors of a launch have at most for it to be small: less than
            the device moves in the time that a launch takes. Launches on devices that are left out stay.
    """
    candidates = _candidates(program, most_bytes)
    if len(candidates) < 2 or uses_streams(program):
        return program
    return _Joining(program, candidates).joined()


@dataclass(frozen=True)
class _Kind:
    """What launches have in common that may be joined: by their kernels, where they run, the numbers they pass."""

    language: str
    kernel: Hashable
    device: torch.device
    numbers: tuple[Any, ...]


@dataclass(frozen=True)
class _Candidate:
    """A launch that may be joined with those of its kind, and its kernel, with the grid of the launch."""

    line: Launch
    kernel: PrintedKernel
    joiner: Joiner
    kind: _Kind


def _candidates(program: Program, most_bytes: Mapping[str, int]) -> dict[int, _Candidate]:
    """Returns the launches that may be joined, by the identity of their lines, where there are several of a kind."""
    kernels = {item.name: (item, joiner) for item in program.kernels if (joiner := _joiner(item)) is not None}
    found: dict[_Kind, list[_Candidate]] = {}
    for line in program.body.lines:
        if not isinstance(line, Launch) or line.kernel not in kernels or line.effect_set or not line.outs:
            continue
        (kernel, joiner), device = kernels[line.kernel], line.outs[0].tensor_type.device
        if not 0 < _bytes(line) <= most_bytes.get(device.type, 0):
            continue
        printed = PrintedKernel(kernel.language, kernel.source, kernel.signature, kernel.options, line.grid)
        alike = joiner.joinable(printed)
        if alike is not None:
            numbers = tuple([item for item in line.arguments if not isinstance(item, Value)])
            kind = _Kind(kernel.language, alike, device, numbers)
            found.setdefault(kind, []).append(_Candidate(line, printed, joiner, kind))
    return {id(item.line): item for items in found.values() if len(items) > 1 for item in items}


def _joiner(kernel: KernelDefinition) -> Joiner | None:
    language = find_language(kernel.language)
    return None if language is None else language.joiner


def _bytes(line: Launch) -> int:
    """Returns how much memory a launch's tensors have; 0 where that is not known."""
    sizes = [value.tensor_type.storage_bytes for value in _tensors(line)]
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) if len(known) == len(sizes) else 0


def _tensors(line: Launch) -> list[Value]:
    """Returns what a launch passes for the tensors among its kernel's parameters, in their order."""
    return [*[item for item in line.arguments if isinstance(item, Value)], *line.outs]


class _Joining:
    """The joining of launches in the parts of a program."""

    def __init__(self, program: Program, candidates: Mapping[int, _Candidate]) -> None:
        self.program = program
        self.candidates = candidates
        self.parts = Parts(program, {})
        self.last = {root: unit for units in self.parts.parts for unit in units for root in unit.touched}
        self.orders = list(self.parts.as_they_are)
        self.limit = self.parts.peak(self.orders) + MOST_HELD
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.changed: dict[Unit, Sequence[LineBase]] = {}

    def joined(self) -> Program:
        """Returns the program with launches joined."""
        for number in range(len(self.orders)):
            self._join_in(number)
        if not self.changed:
            return self.program
        program = self.parts.ordered(self.orders, self.changed)
        launched = list(_launched(program.body, dict(program.functions)))
        joined = {item.line.kernel for item in self.candidates.values()}.difference(launched)
        names = [name for name in dict.fromkeys([*launched, *self.kernels]) if name not in joined]
        return program.replace(kernels=tuple([self.kernels[name] for name in names]))

    def _join_in(self, number: int) -> None:
        """Joins launches in one part."""
        places = _Places(self.parts.parts[number])
        kinds: dict[_Kind, list[Unit]] = {}
        for unit in places.units:
            candidate = self.candidates.get(id(unit.lines[0]))
            if candidate is not None and len(unit.lines) == 1:
                kinds.setdefault(candidate.kind, []).append(unit)
        for units in kinds.values():
            pending = list(places.groups(units, self._most_of(units[0])))[::-1]
            while pending:
                group = pending.pop()
                if not self._take(number, places, group) and len(group) > 2:
                    middle = len(group) // 2
                    pending += [group[middle:], group[:middle]]

    def _most_of(self, unit: Unit) -> int:
        line = unit.lines[0]
        assert isinstance(line, Launch)
        return MOST_TENSORS // len(_tensors(line))

    def _take(self, number: int, places: _Places, group: Sequence[Unit]) -> bool:
        """Joins launches if that holds hardly more memory at once; says whether it did."""
        place = places.meeting(group, self._is_late(group))
        if place is None:
            return False
        before = {unit.position: places.at[unit.position] for unit in group}
        places.at.update(dict.fromkeys(before, place))
        order = places.order()
        orders = [*self.orders[:number], order, *self.orders[number + 1 :]]
        if self.parts.peak(orders) > self.limit:
            places.at.update(before)
            return False
        self.orders = orders
        first, *others = sorted(group, key=lambda unit: unit.position)
        self.changed[first] = (self._launch([self.candidates[id(unit.lines[0])] for unit in (first, *others)]),)
        self.changed.update(dict.fromkeys(others, ()))
        return True

    def _is_late(self, group: Sequence[Unit]) -> bool:
        """Whether the results of launches take no less memory than what nothing needs after them."""
        sizes = self.parts.sizes
        lines = [unit.lines[0] for unit in group]
        made = sum([sizes.get(value.name, 0) for line in lines if isinstance(line, Launch) for value in line.outs])
        return made >= sum([sizes.get(root, 0) for unit in group for root in unit.touched if self.last[root] is unit])

    def _launch(self, candidates: Sequence[_Candidate]) -> Launch:
        """Returns the one launch that does what several do."""
        first = candidates[0]
        rows = [_tensors(item.line) for item in candidates]
        same = [len(set(column)) == 1 for column in zip(*rows)]
        inputs = len(rows[0]) - len(first.line.outs)
        numbers = [item for item in first.line.arguments if not isinstance(item, Value)]
        wish = f"joined_{first.line.kernel}"
        printed = first.joiner.join([item.kernel for item in candidates], [*same, *[True] * len(numbers)], wish)
        columns = [column[:1] if shared else column for column, shared in zip(zip(*rows), same)]
        arguments = [value for column in columns[:inputs] for value in column]
        outs = tuple([value for column in columns[inputs:] for value in column])
        sources = [item.line.origin.sources for item in candidates if item.line.origin is not None]
        origin = Origin(tuple(dict.fromkeys([source for given in sources for source in given])))
        return Launch(self._name(wish, printed), (*arguments, *numbers), outs, printed.grid, origin=origin)

    def _name(self, wish: str, printed: PrintedKernel) -> str:
        """Returns the name of a kernel in the program."""
        name, number = wish, 1
        while True:
            kernel = KernelDefinition(name, printed.language, printed.source, printed.signature, printed.options)
            if self.kernels.setdefault(name, kernel) == kernel:
                return name
            number += 1
            name = f"{wish}_{number}"


def _launched(block: Block, functions: Mapping[str, Block]) -> Iterator[str]:
    """Yields the kernels that a block launches, in order: that of the definitions in a program."""
    for line in block.lines:
        if isinstance(line, Launch):
            yield line.kernel
        for inner in run_blocks(line, functions):
            yield from _launched(inner, functions)


class _Places:
    """Where the units of a part stand: launches that are joined in one place, each other line in one of its own.

    What must come before a line has a lower place. Allocations and views have none: they stand before their first use.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        light = [len(unit.lines) == 1 and isinstance(unit.lines[0], Alloc | View) for unit in units]
        self.at = {unit.position: float(unit.position) for unit in units if not light[unit.position]}
        self._before: list[frozenset[int]] = []
        """For each unit, what must come before it, through allocations and views."""
        for unit in units:
            direct = [item for item in unit.before if not light[item]]
            self._before.append(frozenset(direct).union(*[self._before[item] for item in unit.before if light[item]]))
        self._after: dict[int, list[int]] = {}
        for unit in units:
            for item in self._before[unit.position] if not light[unit.position] else ():
                self._after.setdefault(item, []).append(unit.position)

    def groups(self, units: Sequence[Unit], most: int) -> Iterator[list[Unit]]:
        """Yields groups of several units that can stand in one place, of so many at most, in their order."""
        group: list[Unit] = []
        for unit in units:
            if group and (len(group) == most or self._span([*group, unit]) is None):
                yield from [group] if len(group) > 1 else []
                group = []
            group.append(unit)
        yield from [group] if len(group) > 1 else []

    def _span(self, group: Sequence[Unit]) -> tuple[float, float] | None:
        """Returns the places between which units can stand together; None where there are none."""
        positions = {unit.position for unit in group}
        before = frozenset[int]().union(*[self._before[position] for position in positions])
        after = [item for position in positions for item in self._after.get(position, ())]
        low = max([self.at[item] for item in before], default=-1.0)
        high = min([self.at[item] for item in after], default=float(len(self.units)))
        return (low, high) if low < high and before.isdisjoint(positions) else None

    def meeting(self, group: Sequence[Unit], late: bool) -> float | None:
        """Returns where units can stand together: where the last, or the first, of them stands, or as near as can be.

        None where what was moved since has left no place.
        """
        span = self._span(group)
        if span is None:
            return None
        low, high = span
        taken = sorted([low, *[place for place in self.at.values() if low < place < high], high])
        own = [self.at[unit.position] for unit in group]
        if late:
            return max(own) if max(own) < high else (taken[-2] + high) / 2
        return min(own) if min(own) > low else (low + taken[1]) / 2

    def order(self) -> list[int]:
        """Returns the units by their places, allocations and views right before their first use."""
        keys: dict[int, tuple[float, bool, int]] = {}
        for unit in reversed(self.units):
            own = self.at.get(unit.position)
            first = min([keys[item][0] for item in unit.after], default=float(len(self.units)))
            keys[unit.position] = (first if own is None else own, own is not None, unit.position)
        return sorted(keys, key=lambda position: keys[position])
