"""Observation points: the values that the lines of a program compute, and calls of observers after these lines."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fxwrap.lines import Alloc, CallFunction, ExternCall, Pool, PoolSlice, Reuse, SaveRngState, View, Workspace
from fxwrap.wrapper_ir import (
    OUTPUT,
    Block,
    LineBase,
    Origin,
    Program,
    TensorType,
    Value,
    blocks,
    defined,
    defined_symbol,
    line_text,
    writes,
)

OBSERVE = "fxwrap_runtime.observe.default"
"""The operator that calls the observer; see `fxwrap.runtime.operators`."""

_NOT_COMPUTED = (Alloc, Pool, PoolSlice, Reuse, SaveRngState, View, Workspace)
"""Lines whose results are memory, other lines' results, or states."""


@dataclass(frozen=True)
class ObservationPoint:
    """A tensor that a line computes.

    Fields:
        number: the number of the point in its program, in the order of lines.
        place: the `id` of the line's block, and the line's index there.
        line_number: the number of the line in the program, nested ones included, as in `Program.lines`.
        line: the line.
        value: the value that has the tensor after the line.
        node: the node of the graph whose result the tensor is, "" if it is unknown.
        position: the position of the tensor among that node's results.
        nested: whether the line is in a block, which may run any number of times.
    """

    number: int
    place: tuple[int, int]
    line_number: int
    line: LineBase
    value: Value
    node: str
    position: int
    nested: bool

    @property
    def origin(self) -> Origin:
        """The origin of the line."""
        return self.line.origin or Origin()

    @property
    def location(self) -> str:
        """The place of the node in the model's source as "file:line", of the line's last node if it is unknown."""
        sources = self.origin.sources
        own = [source for source in sources if source.node == self.node]
        return next((source.location for source in (*own, *reversed(sources)) if source.location), "")

    @property
    def text(self) -> str:
        """The line as text."""
        return line_text(self.line)


def observation_points(program: Program) -> tuple[ObservationPoint, ...]:
    """Returns the points of a program, in order.

    Functions that are captured as device graphs have none, since a replay calls no observer.
    """
    captured = {line.function for line in program.lines() if isinstance(line, CallFunction) and line.max_captures}
    skipped = {id(block) for name, block in program.functions if name in captured}
    points: list[ObservationPoint] = []
    number = 0
    for block in program.all_blocks():
        for index, line in enumerate(block.lines):
            if id(block) not in skipped:
                for value, node, position in _computed(line):
                    place, nested = (id(block), index), block is not program.body
                    points.append(ObservationPoint(len(points), place, number, line, value, node, position, nested))
            number += 1
        skipped.add(id(block))  # an equal block may be the same object
    return tuple(points)


def stored_types(points: Iterable[ObservationPoint]) -> dict[tuple[str, int], TensorType]:
    """Returns the type in which the results of nodes are stored, but for those that are stored in several."""
    types: dict[tuple[str, int], set[TensorType]] = {}
    for point in points:
        types.setdefault((point.node, point.position), set()).add(point.value.tensor_type)
    return {key: next(iter(items)) for key, items in types.items() if len(items) == 1}


def observed_points(program: Program) -> dict[int, ObservationPoint]:
    """Returns the points of a program with observations, by their numbers; lines are numbered in this program."""
    points: dict[int, ObservationPoint] = {}
    number = 0
    for block in program.all_blocks():
        computed: dict[str, tuple[int, LineBase, str, int]] = {}
        for index, line in enumerate(block.lines):
            if isinstance(line, ExternCall) and line.target == OBSERVE:
                value, point = line.arguments
                assert isinstance(value, Value) and isinstance(point, int)
                place, nested = (id(block), index), block is not program.body
                line_number, computing, node, position = computed[value.name]
                points[point] = ObservationPoint(point, place, line_number, computing, value, node, position, nested)
            computed |= {value.name: (number, line, node, at) for value, node, at in _computed(line)}
            number += 1
    return points


def _computed(line: LineBase) -> Iterator[tuple[Value, str, int]]:
    """Yields the tensors that a line computes, each with its node and position."""
    if isinstance(line, _NOT_COMPUTED) or line.terminator or line.is_async_start or line.event_step:
        return
    origin = line.origin or Origin()
    written, results = writes(line), defined(line)
    nodes = origin.results if len(origin.results) == len(written or results) else ()
    only = origin.nodes[0] if len(origin.nodes) == 1 else ""
    for index, value in enumerate(written):
        if isinstance(value.type, TensorType):
            yield value, *(nodes[index] if nodes else (only if not results else "", index))
    positions = {id(value): index for index, value in enumerate(_results(line))}
    for index, value in enumerate(results):
        if isinstance(value.type, TensorType) and line.alias_of(value) is None:
            yield value, *(nodes[index] if nodes and not written else (only, positions.get(id(value), index)))


def _results(line: LineBase) -> tuple[object, ...]:
    """Returns the results of a line with those that are unused, so that positions are those of the operator."""
    return getattr(line, "results", ())


def insert_observations(program: Program, points: Container[int] | None = None) -> Program:
    """Returns a program that calls the observer with each point's number and tensor after the point's line.

    `points` are the numbers of the points, None for all. Inserted after all passes, the calls change no other line.
    """
    after: dict[tuple[int, int], list[ObservationPoint]] = {}
    for point in observation_points(program):
        if points is None or point.number in points:
            after.setdefault(point.place, []).append(point)
    functions = tuple([(name, _observed(block, after)) for name, block in program.functions])
    return program.replace(body=_observed(program.body, after), functions=functions)


def _observed(block: Block, after: Mapping[tuple[int, int], Sequence[ObservationPoint]]) -> Block:
    lines: list[LineBase] = []
    pending: list[ObservationPoint] = []
    for index, line in enumerate(block.lines):
        if defined_symbol(line) is None:  # the lines after a result define the symbols in its type
            lines += map(_call, pending)
            pending = []
        inner = {name: _observed(nested, after) for name, nested in blocks(line)}
        lines.append(line.replace(**inner) if inner else line)
        pending += after.get((id(block), index), ())
    return replace(block, lines=tuple(lines))


def _call(point: ObservationPoint) -> ExternCall:
    return ExternCall(
        (), OBSERVE, (point.value, point.number), effect_set=(OUTPUT,), stream=point.line.stream,
        origin=replace(point.origin, handle=""),
    )  # fmt: skip
