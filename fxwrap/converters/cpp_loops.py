"""Loops of emitted C++. The arguments of a loop's body hold the carried values from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxwrap.converters.cpp_text import indented
from fxwrap.converters.cpp_writer import CppWriter
from fxwrap.lines import Map, Scan, While
from fxwrap.wrapper_ir import Block, TensorType, Value


def write_while(writer: CppWriter, line: While) -> None:
    """Writes `control.while`."""
    rounds, go_on = (writer.unit.fresh_symbol(*wish) for wish in (("rounds", "int"), ("go_on", "bool")))
    arguments = line.body.arguments
    count = len(line.carried)
    writer.lend(arguments, (*line.carried, *line.extra))
    stacks = _Stacks(writer, line, f"f.ints[{rounds}]") if line.stacked else None

    def judge(given: tuple[Any, ...]) -> None:
        writer.say(f"f.ints[{go_on}] = {writer.truth(given[0])};")
        _drop_tensors(writer, given)

    def advance(given: tuple[Any, ...]) -> None:
        if stacks is not None:
            stacks.append(given)
        writer.hand_over(arguments[:count], given)

    condition = writer.block(line.cond, judge, begin=lambda: writer.lend(line.cond.arguments, arguments))
    body = writer.block(line.body, advance, keep=arguments)
    head = f"for (f.ints[{rounds}] = 0;; ++f.ints[{rounds}])"
    writer.say(f"{head} {{\n{indented([*condition, f'if (!f.ints[{go_on}]) break;', *body])}\n}}")
    if stacks is None:
        _last_values(writer, line.results, arguments[:count], f"f.ints[{rounds}]")
    else:
        stacks.finish()
    _drop_tensors(writer, arguments)
    writer.own_results(line.results)


class _Stacks:
    """The stacked results of a loop whose rounds nobody has counted before.

    Memory for them has room for more rounds than there are so far, and grows to twice its size when it is full, so that
    each row is copied a few times at most. Its end is given back when the number of rounds is known.
    """

    def __init__(self, writer: CppWriter, line: While, rounds: str) -> None:
        self.writer = writer
        self.line = line
        self.rounds = rounds
        self.room = f"f.ints[{writer.unit.fresh_symbol('room', 'int')}]"
        self.rows = [value.tensor_type for value in line.carried]
        self.slots = [writer.unit.slot(result.name) for result in line.results]
        writer.say(f"{self.room} = 0;")
        for slot, row in zip(self.slots, self.rows):
            writer.empty(line, slot, TensorType.contiguous(row.dtype, (0, *row.sizes), row.device))

    def append(self, given: tuple[Any, ...]) -> None:
        """Says that what a round yields is copied into its rows."""
        writer = self.writer
        grow = [f"{self.room} = 2 * {self.room} + {_FIRST_ROOM};"]
        for slot, row in zip(self.slots, self.rows):
            grow += self._moved(slot, row, self.room)
        writer.say(f"if ({self.rounds} == {self.room}) {{\n{indented(grow)}\n}}")
        for slot, row, item in zip(self.slots, self.rows, given):
            place = writer.unit.fresh_slot("place")
            strides = TensorType.contiguous(row.dtype, row.sizes, row.device).strides
            offset = f"{self.rounds} * ({writer.unit.number(row.element_count)})"
            writer.window(place, slot, row.sizes, strides, offset)
            writer.call("aten.copy_.default", [place, writer.name_of(item)])
            writer.drop([place])

    def finish(self) -> None:
        """Says that the results have as many rows as there were rounds."""
        for slot, row in zip(self.slots, self.rows):
            moved = self._moved(slot, row, self.rounds)
            self.writer.say(f"if ({self.rounds} != {self.room}) {{\n{indented(moved)}\n}}")

    def _moved(self, slot: str, row: TensorType, count: str) -> list[str]:
        """Returns the statements that move the rows so far to memory with room for `count` of them."""
        writer, unit = self.writer, self.writer.unit
        moved, part = unit.fresh_slot("moved"), unit.fresh_slot("part")
        whole = TensorType.contiguous(row.dtype, (1, *row.sizes), row.device)
        inner, strides = unit.sizes(row.sizes)[1:], unit.sizes(whole.strides)
        comma = ", " if row.sizes else ""
        dtype, device = writer.dtype(self.line, row.dtype), unit.device(row.device)
        growing = count == self.room
        target, source = (part, slot) if growing else (moved, part)
        copy = unit.operator("aten.copy_.default")
        return [
            f"empty_strided(f, {moved}, {{{count}{comma}{inner}, {strides}, {dtype}, {device});",
            f"view(f, {part}, {moved if growing else slot}, {{{self.rounds}{comma}{inner}, {strides}, 0);",
            f"CALL(f, {copy}, ({target}, {source}), ());",
            f"drop(f, {part});",
            f"move(f, {slot}, {moved});",
        ]


_FIRST_ROOM = 8
"""For how many rounds a loop that stacks what it carries has room at first."""


def write_scan(writer: CppWriter, line: Scan) -> None:
    """Writes `control.scan`."""
    _slices(writer, line, line.carried, line.over, line.extra, line.body, line.reverse)


def write_map(writer: CppWriter, line: Map) -> None:
    """Writes `control.map`: a scan that carries nothing."""
    _slices(writer, line, (), line.over, line.extra, line.body, False)


def _slices(
    writer: CppWriter,
    line: Scan | Map,
    carried: Sequence[Value],
    over: Sequence[Value],
    extra: Sequence[Value],
    body: Block,
    reverse: bool,
) -> None:
    row = f"f.ints[{writer.unit.fresh_symbol('row', 'int')}]"
    length = over[0].tensor_type.sizes[0]
    rows = writer.unit.number(length)
    count = len(carried)
    arguments, slices = body.arguments, body.arguments[count : count + len(over)]
    lasting = (*arguments[:count], *arguments[count + len(over) :])
    stacked = line.results[count:]
    writer.lend(lasting, (*carried, *extra))
    for result in stacked:
        writer.empty(line, writer.define(result), result.tensor_type)

    def begin() -> None:
        for argument, operand in zip(slices, over):
            _row(writer, writer.name_of(argument), operand, row)

    def take(given: tuple[Any, ...]) -> None:
        writer.hand_over(tuple(arguments[:count]), given[:count])
        for result, item in zip(stacked, given[count:]):
            place = writer.unit.fresh_slot("place")
            _row(writer, place, result, row)
            writer.call("aten.copy_.default", [place, writer.name_of(item)])
            writer.drop([place, writer.name_of(item)])

    statements = writer.block(body, take, begin=begin, keep=lasting)
    forward = f"for ({row} = 0; {row} < {rows}; ++{row})"
    backward = f"for ({row} = {rows} - 1; {row} >= 0; --{row})"
    writer.say(f"{backward if reverse else forward} {{\n{indented(statements)}\n}}")
    _last_values(writer, line.results[:count], arguments[:count], length if isinstance(length, int) else rows)
    _drop_tensors(writer, lasting)
    writer.own_results(line.results)


def _row(writer: CppWriter, slot: str, whole: Value, row: str) -> None:
    """Says a view of one slice of a tensor along its first dimension."""
    type_ = whole.tensor_type
    offset = f"{row} * ({writer.unit.number(type_.strides[0])})"
    writer.window(slot, writer.name_of(whole), type_.sizes[1:], type_.strides[1:], offset)


def _last_values(writer: CppWriter, results: Sequence[Value], carried: Sequence[Value], rounds: int | str) -> None:
    """Says that the results are the carried values; copies of the operands where no round has run.

    `rounds` is how many have run, or the text of that.
    """
    for result, value in zip(results, carried):
        if not isinstance(result.type, TensorType):
            writer.hand_over((result,), (value,))
            continue
        name, source = writer.unit.slot(result.name), writer.name_of(value)
        moved = f"move(f, {name}, {source});"
        copied = f"CALL(f, {writer.unit.operator('aten.clone.default')}, ({source}), ({name}));"
        if isinstance(rounds, int):
            writer.say(moved if rounds else copied)
        else:
            writer.say(f"if ({rounds} == 0) {copied}\nelse {moved}")


def _drop_tensors(writer: CppWriter, items: Sequence[Any]) -> None:
    tensors = [item for item in items if isinstance(item, Value) and isinstance(item.type, TensorType)]
    writer.drop([writer.name_of(item) for item in tensors])
