"""Loops of emitted C++. The arguments of a loop's body hold the carried values from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxwrap.converters.cpp_text import indented
from fxwrap.converters.cpp_writer import CppWriter
from fxwrap.lines import Map, Scan, While
from fxwrap.wrapper_ir import Block, TensorType, Value


def write_while(writer: CppWriter, line: While) -> None:
    """Writes `control.while`; stacked results grow by one row a round."""
    rounds, go_on = (writer.unit.fresh_symbol(*wish) for wish in (("rounds", "int"), ("go_on", "bool")))
    arguments = line.body.arguments
    count = len(line.carried)
    writer.lend(arguments, (*line.carried, *line.extra))
    if line.stacked:
        for result, operand in zip(line.results, line.carried):
            _empty_stack(writer, line, result, operand)

    def judge(given: tuple[Any, ...]) -> None:
        writer.say(f"f.ints[{go_on}] = {writer.truth(given[0])};")
        _drop_tensors(writer, given)

    def advance(given: tuple[Any, ...]) -> None:
        if line.stacked:
            for result, item in zip(line.results, given):
                _append_row(writer, result, item)
        writer.hand_over(arguments[:count], given)

    condition = writer.block(line.cond, judge, begin=lambda: writer.lend(line.cond.arguments, arguments))
    body = writer.block(line.body, advance, keep=arguments)
    head = f"for (f.ints[{rounds}] = 0;; ++f.ints[{rounds}])"
    writer.say(f"{head} {{\n{indented([*condition, f'if (!f.ints[{go_on}]) break;', *body])}\n}}")
    if not line.stacked:
        _last_values(writer, line.results, arguments[:count], f"f.ints[{rounds}] == 0")
    _drop_tensors(writer, arguments)
    writer.own_results(line.results)


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
    _last_values(writer, line.results[:count], arguments[:count], f"{rows} == 0")
    _drop_tensors(writer, lasting)
    writer.own_results(line.results)


def _row(writer: CppWriter, slot: str, whole: Value, row: str) -> None:
    """Says a view of one slice of a tensor along its first dimension."""
    type_ = whole.tensor_type
    offset = f"{row} * ({writer.unit.number(type_.strides[0])})"
    writer.window(slot, writer.name_of(whole), type_.sizes[1:], type_.strides[1:], offset)


def _empty_stack(writer: CppWriter, line: While, result: Value, operand: Value) -> None:
    type_ = operand.tensor_type
    empty = TensorType.contiguous(type_.dtype, (0, *type_.sizes), type_.device)
    writer.empty(line, writer.unit.slot(result.name), empty)


def _append_row(writer: CppWriter, stack: Value, item: Value) -> None:
    row, name = writer.unit.fresh_slot("row"), writer.unit.slot(stack.name)
    writer.call("aten.unsqueeze.default", [writer.name_of(item), "0"], [row])
    writer.call("aten.cat.default", ["list(2)", name, row], [name])
    writer.drop([row])


def _last_values(writer: CppWriter, results: Sequence[Value], carried: Sequence[Value], none: str) -> None:
    """Says that the results are the carried values; copies of the operands where no round has run."""
    for result, value in zip(results, carried):
        if not isinstance(result.type, TensorType):
            writer.hand_over((result,), (value,))
            continue
        name, source = writer.unit.slot(result.name), writer.name_of(value)
        clone = writer.unit.operator("aten.clone.default")
        writer.say(f"if ({none}) CALL(f, {clone}, ({source}), ({name}));\nelse move(f, {name}, {source});")


def _drop_tensors(writer: CppWriter, items: Sequence[Any]) -> None:
    tensors = [item for item in items if isinstance(item, Value) and isinstance(item.type, TensorType)]
    writer.drop([writer.name_of(item) for item in tensors])
