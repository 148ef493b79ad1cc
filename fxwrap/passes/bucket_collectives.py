"""Bucketing: collectives of one kind in one group that are independent of each other become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from fxwrap import wrapper_ir as ir
from fxwrap.devices import DeviceSpec, collective_bucket_bytes
from fxwrap.lines import ExtensionLine, ExternCall, StartCollective, View, WaitCollective
from fxwrap.names import NameAllocator
from fxwrap.passes.scheduling import SchedulingRegions, SchedulingUnit
from fxwrap.passes.unit_schedule import UnitSchedule
from fxwrap.symbolic import evaluate_size
from fxwrap.wrapper_ir import LineBase, Operand, Origin, Program, Size, TensorType, Value

_NAMESPACE, _OVERLOAD = "_c10d_functional.", ".default"
_GATHER, _REDUCE, _REDUCE_SCATTER = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"
_BUCKETED = frozenset({_GATHER, _REDUCE, _REDUCE_SCATTER})


def bucket_collectives(
    program: Program, specs: Mapping[str, DeviceSpec], speeds: Mapping[str, tuple[float, float]] = MappingProxyType({})
) -> Program:
    """Returns the program with independent all_gathers, all_reduces and reduce_scatters of one kind as one.

    One kind means one operator, reduction, group, dtype and device. A bucket has at most the bytes that follow from the
    speed of its group, by default `bucket_bytes` of its device's collectives, and may raise the peak memory by as
    much. It runs as soon as all operands are ready. Where the process group runs a coalesced form as one collective,
    the bucket is that form, without copies; otherwise operands are concatenated and results are views. All decisions
    follow from the program; symbols count with one fixed value, so ranks with other hints agree, and parts of
    parameters that some ranks pad before they gather them do not count. Programs that use streams, and blocks inside
    lines, are unchanged.

    Args:
        program: the program. It is not changed.
        specs: the capabilities of device types, by name.
        speeds: the latency in seconds and the bytes per second of process groups, by name.
    """
    if not any(map(functional_name, program.body.lines)):
        return program
    buckets = _Bucketing(program, specs, speeds)
    return program if not buckets.candidates or ir.uses_streams(program) else buckets.bucketed()


@dataclass(frozen=True)
class _Kind:
    """The properties that collectives of a bucket have in common."""

    operator: str
    arguments: tuple[Operand, ...]
    group: str
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Candidate:
    """A collective that can be in a bucket of its kind, and the bytes of its larger side."""

    line: StartCollective
    kind: _Kind
    bytes: int

    @property
    def name(self) -> str:
        return functional_name(self.line) or ""

    @property
    def operand(self) -> Value:
        operand = self.line.arguments[0]
        assert isinstance(operand, Value)
        return operand

    @property
    def result(self) -> Value:
        (result,) = self.line.results
        assert isinstance(result, Value)
        return result


def functional_name(line: LineBase) -> str | None:
    """Returns the name of a functional collective that commutes with others, such as "all_reduce", or None.

    Its order among such collectives may change if it changes in the same way on all ranks.
    """
    if not isinstance(line, StartCollective) or line.writes or line.outs or line.stream:
        return None
    name = line.operator.removeprefix(_NAMESPACE).removesuffix(_OVERLOAD).removesuffix("_coalesced")
    return name if name in _BUCKETED else None


class _Bucketing:
    def __init__(
        self, program: Program, specs: Mapping[str, DeviceSpec], speeds: Mapping[str, tuple[float, float]]
    ) -> None:
        self.program = program
        self.specs = specs
        self.speeds = speeds
        self.hints = dict.fromkeys(ir.symbol_infos(program), ir.FALLBACK_SIZE_HINT)
        self.fixed = _fixed_roots(program)
        self.candidates = {id(line): item for line in program.body.lines if (item := self._candidate(line))}
        self.values: dict[str, Value] = {}  # values that moved into a bucket, with their new types
        self.changed: dict[SchedulingUnit, Sequence[LineBase]] = {}
        self.names = NameAllocator(ir.value_names(program))

    def _candidate(self, line: LineBase) -> _Candidate | None:
        name = functional_name(line)
        if name is None or not isinstance(line, StartCollective):
            return None
        match line.arguments, line.results:
            case (Value(type=TensorType() as type_), *others), (Value(type=TensorType() as result) as value,):
                spec = self.specs.get(type_.device.type)
                if spec is None or type_.dtype != result.dtype or type_.dtype.is_complex:
                    return None  # coalesced forms take no complex tensors
                if name not in spec.collectives.coalesced and not self._can_concatenate(name, type_, value):
                    return None
                kind = _Kind(line.operator, tuple(others), line.group, type_.dtype, type_.device)
                size = max(evaluate_size(item.storage_bytes, self.hints) for item in (type_, result))
                return _Candidate(line, kind, size) if size <= self._limit(kind) else None
            case _:
                return None

    def _limit(self, kind: _Kind) -> int:
        """Returns the largest number of bytes of a bucket; 0 on devices that have none."""
        default = self.specs[kind.device.type].collectives.bucket_bytes
        return collective_bucket_bytes(*self.speeds[kind.group]) if default and kind.group in self.speeds else default

    def _can_concatenate(self, name: str, operand: TensorType, value: Value) -> bool:
        """Whether a collective can be on a concatenation of operands, with results that are views of a bucket."""
        if name == _GATHER or value.name in self.fixed:  # a gathered bucket has the rows of each rank together
            return False
        result = value.tensor_type
        return (
            bool(result.element_count)
            and operand.is_static
            and operand.is_contiguous
            and result.is_contiguous
            and not operand.layout
        )

    def bucketed(self) -> Program:
        """Returns the program with buckets."""
        regions = SchedulingRegions(
            self.program, self.hints, lambda line: functional_name(line) is not None, _padded_parts(self.program)
        )
        orders: list[Sequence[int]] = list(regions.program_order)
        peak = regions.peak(orders)
        for number, units in enumerate(regions.regions):
            schedule, waits = UnitSchedule(units), self._waits(units)
            for kind, members in self._by_kind(units).items():
                limit = self._limit(kind)
                pending = list(schedule.groups(members, self._fits(limit)))[::-1]
                while pending:
                    group, before = pending.pop(), dict(schedule.at)
                    if schedule.move_together(group):
                        order = schedule.order()
                        if regions.peak([*orders[:number], order, *orders[number + 1 :]]) <= peak + limit:
                            orders[number] = order
                            self._merge(sorted(group, key=lambda unit: unit.position), waits)
                            continue
                        schedule.at = before
                    middle = len(group) // 2
                    pending += [half for half in (group[middle:], group[:middle]) if len(half) > 1]
        if not self.changed:
            return self.program
        program = regions.apply_order(orders, self.changed)
        return self._with_moved_values(program) if self.values else program

    def _by_kind(self, units: Sequence[SchedulingUnit]) -> dict[_Kind, list[SchedulingUnit]]:
        by_kind: dict[_Kind, list[SchedulingUnit]] = {}
        for unit in units:
            if len(unit.lines) == 1 and (candidate := self.candidates.get(id(unit.lines[0]))) is not None:
                by_kind.setdefault(candidate.kind, []).append(unit)
        return by_kind

    def _fits(self, limit: int) -> Callable[[Sequence[SchedulingUnit]], bool]:
        return lambda group: self._bytes(group) <= limit

    def _bytes(self, group: Sequence[SchedulingUnit]) -> int:
        return sum([self.candidates[id(unit.lines[0])].bytes for unit in group])

    @staticmethod
    def _waits(units: Sequence[SchedulingUnit]) -> dict[str, list[SchedulingUnit]]:
        """Returns the units that wait for each value in flight, by its name."""
        waits: dict[str, list[SchedulingUnit]] = {}
        for unit in units:
            if isinstance(line := unit.lines[0], WaitCollective):
                waits.setdefault(line.pending.name, []).append(unit)
        return waits

    # --- buckets ----------------------------------------------------------------------------------------------------

    def _merge(self, group: Sequence[SchedulingUnit], waits: Mapping[str, Sequence[SchedulingUnit]]) -> None:
        """Replaces the starts of a group by that of a bucket."""
        members = [self.candidates[id(unit.lines[0])] for unit in group]
        first = members[0]
        sources = [source for item in members if item.line.origin is not None for source in item.line.origin.sources]
        origin = Origin(tuple(dict.fromkeys(sources)))
        self.changed.update(dict.fromkeys(group, ()))
        if first.name in self.specs[first.kind.device.type].collectives.coalesced:
            arguments = (tuple([item.operand for item in members]), *first.kind.arguments)
            operator = f"{_NAMESPACE}{first.name}_coalesced{_OVERLOAD}"
            results = (tuple([item.result for item in members]),)
            self.changed[group[0]] = (StartCollective(results, operator, arguments, first.kind.group, origin=origin),)
        else:
            self.changed[group[0]] = self._concatenated(members, origin, waits)

    def _concatenated(
        self, members: Sequence[_Candidate], origin: Origin, waits: Mapping[str, Sequence[SchedulingUnit]]
    ) -> Sequence[LineBase]:
        """Returns a collective on the concatenation of operands: one row for each rank of a reduce_scatter."""
        first, offset = members[0], 0
        lines: list[LineBase] = []
        views: list[Value] = []
        counts = [int(item.result.tensor_type.element_count) for item in members]
        rows = int(first.operand.tensor_type.element_count) // counts[0]
        whole = (1, sum(counts))
        pending = self._value("bucket", first, whole)
        for item, count in zip(members, counts, strict=True):
            view = self._value(f"{item.operand.name}_rows", item, (rows, count), item.operand)
            lines.append(View(view, item.operand, origin=origin))
            views.append(view)
            for unit in waits.get(item.result.name, ()):
                wait = unit.lines[0]
                assert isinstance(wait, WaitCollective)
                ready = self._value("bucket_ready", first, whole)
                result = self._moved(wait.result, offset)
                self.changed[unit] = (
                    WaitCollective(ready, pending, wait.group, origin=wait.origin),
                    View(result, ready, origin=wait.origin),
                    *unit.lines[1:],
                )
            offset += count
        joined = self._value("bucket_operand", first, (rows, sum(counts)))
        cat = ExternCall((joined,), "aten.cat.default", (tuple(views), 1), origin=origin)
        start = first.line.replace(results=(pending,), arguments=(joined, *first.kind.arguments), origin=origin)
        return [*lines, cat, start]

    def _value(self, hint: str, member: _Candidate, sizes: tuple[int, ...], base: Value | None = None) -> Value:
        name = self.names.create_name(hint)
        type_ = TensorType.contiguous(member.kind.dtype, sizes, member.kind.device)
        return Value(name, type_ if base is None else replace(type_, storage_offset=base.tensor_type.storage_offset))

    def _moved(self, value: Value, offset: Size) -> Value:
        """Returns a value that is a view of a bucket from an offset on, in elements."""
        self.values[value.name] = Value(value.name, replace(value.tensor_type, storage_offset=offset))
        return self.values[value.name]

    def _with_moved_values(self, program: Program) -> Program:
        """Returns the program with all views of values that moved into buckets at their new offsets."""

        def change(item: object) -> object:
            return self.values.get(item.name, item) if type(item) is Value else item

        lines = []
        for line in program.body.lines:
            for value in ir.defined(line):
                base = line.alias_of(value)
                if base is not None and base.name in self.values and value.name not in self.values:
                    moved = self.values[base.name].tensor_type.storage_offset - base.tensor_type.storage_offset
                    self._moved(value, value.tensor_type.storage_offset + moved)
            lines.append(ir.map_line(line, change))
        return program.replace(body=ir.Block(program.body.arguments, tuple(lines)))


def _padded_parts(program: Program) -> set[str]:
    """Returns the operands of all_gathers that are computed of a smaller input of their dtype: its part, padded."""
    arguments = ir.program_arguments(program)
    root_of, inputs = ir.alias_roots(program.body.lines, arguments), {value.name for value in arguments}
    gathers = [line for line in program.body.lines if functional_name(line) == _GATHER]
    gathered = {root_of[value.name]: value for line in gathers for value in ir.used(line)}
    padded: set[str] = set()
    for line in program.body.lines:
        written = {root_of[value.name] for value in (*ir.defined(line), *ir.writes(line))} & gathered.keys() - inputs
        read = [value for value in ir.reads(line) if root_of[value.name] in inputs]
        if len(written) == len(read) == 1 and line not in gathers:
            (root,), (type_,) = written, [value.tensor_type for value in read]
            whole = gathered[root].tensor_type
            if type_.dtype is whole.dtype and type_.element_count != whole.element_count:
                padded.add(root)
    return padded


def _fixed_roots(program: Program) -> set[str]:
    """Returns the roots of the body whose values cannot become views of larger memory.

    Blocks, functions and vendors' lines use them, or lines other than frees consume them.
    """
    root_of = ir.alias_roots(program.body.lines, ir.program_arguments(program))
    fixed: set[str] = set()
    for line in program.body.lines:
        if isinstance(line, ExtensionLine) or ir.executed_blocks(line, dict(program.functions)):
            fixed.update([root_of[value.name] for value in ir.used(line)])
        elif not ir.is_release(line):
            fixed.update([root_of[value.name] for value in ir.consumed(line)])
    return fixed
