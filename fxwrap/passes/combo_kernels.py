"""Horizontal fusion: combines launches of small kernels that are independent of each other into one launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from fxwrap.devices import DeviceSpec, KernelCombiner, find_language
from fxwrap.lines import Launch
from fxwrap.loop_ir import Kernel, accessed_bytes
from fxwrap.passes.scheduling import SchedulingRegions, SchedulingUnit
from fxwrap.passes.unit_schedule import UnitSchedule
from fxwrap.printers import PrintedKernel
from fxwrap.wrapper_ir import (
    Block,
    KernelDefinition,
    LineBase,
    Operand,
    Origin,
    Program,
    Value,
    executed_blocks,
    uses_streams,
)

_UNKNOWN_BYTES = 1 << 62


def combine_kernels(
    program: Program, specs: Mapping[str, DeviceSpec], *, max_tensors: int = 240, max_extra_peak_bytes: int = 1 << 18
) -> Program:
    """Returns the program with launches of small kernels combined, at about the same peak memory.

    The language's `KernelCombiner` decides which kernels are similar and prints the combo kernel from their loop IR.
    On massively parallel devices, launches that directly follow each other need not be similar: they are combined if
    the device runs all their programs at once.
    Kernels without loop IR, as those of a parsed program, are not combined. Launches move to a common position that
    their dependences allow: a late one if their results are larger than the memory that is freed after them, else an
    early one. Each program selects its kernel, which among many costs more than a launch of a large kernel: these are
    combined apart from small ones, and few at a time. Starts of collectives and waits stay where overlap put them, and
    no large launch passes one: it would wait for the collectives of the others, or no longer run beside its own.
    Programs that use streams, and blocks inside lines, are unchanged. Takes n log n in the number of lines a combo
    kernel.

    Args:
        program: the program. It is not changed.
        specs: the specs of devices, by type. `combo_kernel_bytes` are the most bytes that a small launch accesses,
            `combo_large_kernels` is the largest number of larger launches in a combo kernel.
        max_tensors: the largest number of tensors of a combo kernel. fxwrap's launchers pass at most 256 parameters.
        max_extra_peak_bytes: how much the estimated peak memory may grow.
    """
    candidates = _candidates(program, specs)
    if len(candidates) < 2 or uses_streams(program):
        return program
    return _KernelCombining(program, candidates, specs, max_tensors, max_extra_peak_bytes).combined()


@dataclass(frozen=True)
class _LaunchKey:
    """The properties that launches need to have in common to be similar; `text` is that of their kernels.

    Similar launches are combined if the group keys of their kernels are equal too. A kernel is printed again for its
    group key, which takes a hundred times as long as this one.
    """

    language: str
    device: torch.device
    signature: tuple[str, ...]
    options: tuple[tuple[str, object], ...]
    scalars: tuple[object, ...]
    is_large: bool
    text: str


@dataclass(frozen=True)
class _Candidate:
    """A launch that may be combined with others, and its kernel with the grid of the launch."""

    line: Launch
    kernel: PrintedKernel
    combiner: KernelCombiner
    key: _LaunchKey


def _candidates(program: Program, specs: Mapping[str, DeviceSpec]) -> dict[int, _Candidate]:
    """Returns the launches that may be combined, by the identity of their lines."""
    combiners = {item.name: (item, combiner) for item in program.kernels if (combiner := _combiner(item)) is not None}
    texts = {name: _text_without_integers(kernel.source) for name, (kernel, _) in combiners.items()}
    accessed = {name: _accessed_bytes(kernel) for name, (kernel, _) in combiners.items()}
    chosen: list[_Candidate] = []
    for line in program.body.lines:
        if not isinstance(line, Launch) or line.kernel not in combiners or line.effect_set or not line.outs:
            continue
        (kernel, combiner), device = combiners[line.kernel], line.outs[0].tensor_type.device
        spec = specs.get(device.type)
        if spec is None or not spec.combo_kernel_bytes:
            continue
        printed = PrintedKernel(
            kernel.language, kernel.source, kernel.signature, kernel.options, line.grid, kernel.scheduled
        )
        size = min(_bytes(line), accessed[line.kernel])
        is_large = size > spec.combo_kernel_bytes and not combiner.leaves_idle(printed, spec)
        if size and (not is_large or spec.combo_large_kernels > 1):
            chosen.append(_Candidate(line, printed, combiner, _LaunchKey(
                kernel.language, device, kernel.signature, kernel.options, tuple(_scalars(line)), is_large,
                texts[line.kernel],
            )))  # fmt: skip
    return {id(item.line): item for item in chosen}


def _text_without_integers(source: str) -> str:
    """Returns a kernel's text without name, comments, integers and spaces: kernels of one group key have one text."""
    return re.sub(r"#.*|\s+", "", re.sub(r"(?<=def )\w+|-?\d+", "0", source))


def _combiner(kernel: KernelDefinition) -> KernelCombiner | None:
    language = find_language(kernel.language)
    return None if language is None or kernel.scheduled is None else language.combiner


def _bytes(line: Launch) -> int:
    """Returns the total size of a launch's tensors; 0 if it is unknown."""
    sizes = [value.tensor_type.storage_bytes for value in _tensors(line)]
    return sum([size for size in sizes if isinstance(size, int)]) if all(isinstance(size, int) for size in sizes) else 0


def _accessed_bytes(kernel: KernelDefinition) -> int:
    """Returns the most bytes that a kernel accesses, a large number if they are unknown."""
    if not isinstance(kernel.loop_ir, Kernel):
        return _UNKNOWN_BYTES
    return accessed_bytes(kernel.loop_ir, lambda size: size if isinstance(size, int) else _UNKNOWN_BYTES)


def _tensors(line: Launch) -> list[Value]:
    return [*[item for item in line.arguments if isinstance(item, Value)], *line.outs]


def _scalars(line: Launch) -> list[Operand]:
    return [item for item in line.arguments if not isinstance(item, Value)]


class _KernelCombining:
    """The combination of launches in each region of a program."""

    def __init__(
        self,
        program: Program,
        candidates: Mapping[int, _Candidate],
        specs: Mapping[str, DeviceSpec],
        max_tensors: int,
        max_extra_peak_bytes: int,
    ) -> None:
        self.program = program
        self.candidates = candidates
        self.specs = specs
        self.max_tensors = max_tensors
        self.regions = SchedulingRegions(program, {})
        self.last_user = {root: unit for units in self.regions.regions for unit in units for root in unit.accessed}
        self.orders = list(self.regions.program_order)
        self.max_peak = self.regions.peak(self.orders) + max_extra_peak_bytes
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.group_keys: dict[PrintedKernel, Hashable] = {}
        self.changed: dict[SchedulingUnit, Sequence[LineBase]] = {}

    def combined(self) -> Program:
        """Returns the program with combo kernels."""
        for number in range(len(self.orders)):
            self._combine_in_region(number)
        if not self.changed:
            return self.program
        program = self.regions.apply_order(self.orders, self.changed)
        launched = list(_launched_kernels(program.body, dict(program.functions)))
        combined = {item.line.kernel for item in self.candidates.values()}.difference(launched)
        names = [name for name in dict.fromkeys([*launched, *self.kernels]) if name not in combined]
        return program.replace(kernels=tuple([self.kernels[name] for name in names]))

    def _combine_in_region(self, number: int) -> None:
        schedule = UnitSchedule(self.regions.regions[number], fixed_waits=True, fixed_preparations=True)
        similar: dict[tuple[_LaunchKey, int], list[SchedulingUnit]] = {}
        passed = 0  # the starts and waits before a unit
        for unit in schedule.units:
            line = unit.lines[0]
            passed += line.is_async_start or line.is_async_wait
            candidate = self.candidates.get(id(line))
            if candidate is not None and len(unit.lines) == 1:
                similar.setdefault((candidate.key, passed if candidate.key.is_large else 0), []).append(unit)
        groups = [group for units in similar.values() for group in self._by_group_key(schedule.sharing(units))]
        for units in sorted(groups, key=lambda group: group[0].position):
            first = self._candidate(units[0])
            max_launches = self.max_tensors // len(_tensors(first.line))
            if first.key.is_large:
                max_launches = min(max_launches, self.specs[first.key.device.type].combo_large_kernels)
            self._combine_groups(number, schedule, list(schedule.groups(units, _at_most(max_launches))))
        self._combine_groups(number, schedule, list(self._adjacent_groups(schedule)))

    def _by_group_key(self, units: Sequence[SchedulingUnit]) -> list[list[SchedulingUnit]]:
        """Returns launches of one key by the group keys of their kernels, without those that have none."""
        groups: dict[Hashable, list[SchedulingUnit]] = {}
        for unit in units:
            groups.setdefault(self._group_key(self._candidate(unit)), []).append(unit)
        return [group for key, group in groups.items() if key is not None]

    def _group_key(self, item: _Candidate) -> Hashable:
        if item.kernel not in self.group_keys:
            self.group_keys[item.kernel] = item.combiner.group_key(item.kernel)
        return self.group_keys[item.kernel]

    def _adjacent_groups(self, schedule: UnitSchedule) -> Iterator[list[SchedulingUnit]]:
        """Yields groups of launches that directly follow each other and fit together, whatever they compute."""
        group: list[SchedulingUnit] = []
        for position in schedule.order():
            if position not in schedule.at:
                continue  # allocations and views run nothing
            unit = schedule.units[position]
            if not self._joins(schedule, group, unit):
                yield from [group] if len(group) > 1 else []
                group = []
            if self._joins(schedule, [], unit):
                group.append(unit)
        yield from [group] if len(group) > 1 else []

    def _joins(self, schedule: UnitSchedule, group: Sequence[SchedulingUnit], unit: SchedulingUnit) -> bool:
        """Whether a small launch that nothing is combined with yet fits to those of a group, which may be empty."""
        item = self.candidates.get(id(unit.lines[0]))
        if item is None or item.key.is_large or unit in self.changed or len(unit.lines) > 1:
            return False
        spec, others = self.specs[item.key.device.type], [self._candidate(other) for other in group]
        if not schedule.before(unit.position).isdisjoint([other.position for other in group]):
            return False
        launches = [*others, item]
        return (
            spec.massively_parallel
            and len({(other.key.language, other.key.device) for other in launches}) == 1
            and sum([len(_tensors(other.line)) for other in launches]) <= self.max_tensors
            and item.combiner.fits_together([other.kernel for other in launches], spec)
        )

    def _combine_groups(self, number: int, schedule: UnitSchedule, groups: Sequence[list[SchedulingUnit]]) -> None:
        """Combines the launches of each group; those of half a group where the peak memory grows too much."""
        pending = [*groups][::-1]
        while pending:
            group = pending.pop()
            if not self._try_combine(number, schedule, group) and len(group) > 2:
                middle = len(group) // 2
                pending += [group[middle:], group[:middle]]

    def _candidate(self, unit: SchedulingUnit) -> _Candidate:
        return self.candidates[id(unit.lines[0])]

    def _try_combine(self, number: int, schedule: UnitSchedule, group: Sequence[SchedulingUnit]) -> bool:
        """Combines launches unless the peak memory grows too much; returns whether it did."""
        position = schedule.common_position(group, self._runs_late(group))
        if position is None:
            return False
        before = {unit.position: schedule.at[unit.position] for unit in group}
        schedule.at.update(dict.fromkeys(before, position))
        orders = [*self.orders[:number], schedule.order(), *self.orders[number + 1 :]]
        if self.regions.peak(orders) > self.max_peak:
            schedule.at.update(before)
            return False
        self.orders = orders
        first, *others = sorted(group, key=lambda unit: unit.position)
        self.changed[first] = (self._combined_launch([self._candidate(unit) for unit in (first, *others)]),)
        self.changed.update(dict.fromkeys(others, ()))
        return True

    def _runs_late(self, group: Sequence[SchedulingUnit]) -> bool:
        """Whether the results of launches are at least as large as the memory whose last use they are."""
        sizes = self.regions.sizes
        results = sum([sizes.get(value.name, 0) for unit in group for value in self._candidate(unit).line.outs])
        last = [root for unit in group for root in unit.accessed if self.last_user[root] is unit]
        return results >= sum([sizes.get(root, 0) for root in last])

    def _combined_launch(self, candidates: Sequence[_Candidate]) -> Launch:
        first = candidates[0]
        lines = [item.line for item in candidates]
        inputs = _distinct([[item for item in line.arguments if isinstance(item, Value)] for line in lines])
        outs = tuple(_distinct([line.outs for line in lines]))
        typed = [list(zip(item.kernel.signature[::-1], _scalars(item.line)[::-1]))[::-1] for item in candidates]
        scalars = _distinct(typed)
        numbers: dict[object, int] = {item: number for number, item in enumerate((*inputs, *outs, *scalars))}
        positions = [[numbers[item] for item in (*_tensors(line), *row)] for line, row in zip(lines, typed)]
        are_similar = len({item.key for item in candidates}) == 1
        group_keys = {self._group_key(item) for item in candidates} if are_similar else set()
        is_mixed = len(group_keys) != 1 or None in group_keys
        name_hint = f"combo_{first.line.kernel}" + (f"_and_{len(lines) - 1}_more" if is_mixed else "")
        printed = first.combiner.combine([item.kernel for item in candidates], positions, name_hint)
        origins = [(item.line, item.line.origin) for item in candidates if item.line.origin is not None]
        sources = [source for _, origin in origins for source in origin.sources]
        nodes = {value: node for line, origin in origins for value, node in zip(line.outs, origin.results)}
        origin = Origin(tuple(dict.fromkeys(sources)), results=tuple([nodes.get(value, ("", 0)) for value in outs]))
        kernel = self._add_kernel(name_hint, printed)
        return Launch(kernel, (*inputs, *[scalar for _, scalar in scalars]), outs, printed.grid, origin=origin)

    def _add_kernel(self, name_hint: str, printed: PrintedKernel) -> str:
        """Adds a kernel unless the program has an equal one; returns its name."""
        name, number = name_hint, 1
        while True:
            kernel = KernelDefinition(name, printed.language, printed.source, printed.signature, printed.options)
            if self.kernels.setdefault(name, kernel) == kernel:
                return name
            number += 1
            name = f"{name_hint}_{number}"


_Item = TypeVar("_Item")


def _distinct(rows: Sequence[Sequence[_Item]]) -> list[_Item]:
    """Returns the distinct items of rows, by columns."""
    columns = range(max(map(len, rows)))
    return list(dict.fromkeys([row[column] for column in columns for row in rows if column < len(row)]))


def _at_most(count: int) -> Callable[[Sequence[SchedulingUnit]], bool]:
    return lambda group: len(group) <= count


def _launched_kernels(block: Block, functions: Mapping[str, Block]) -> Iterator[str]:
    """Yields the kernels that a block launches, in order, which is the order of definitions in a program."""
    for line in block.lines:
        if isinstance(line, Launch):
            yield line.kernel
        for inner in executed_blocks(line, functions):
            yield from _launched_kernels(inner, functions)
