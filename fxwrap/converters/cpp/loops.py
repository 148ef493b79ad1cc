"""Loops of emitted C++. The arguments of a loop's body hold the carried values between iterations."""

from __future__ import annotations

from collections.abc import Sequence

import fxwrap.lines as lines
from fxwrap.converters.base import Converter
from fxwrap.converters.cpp.text import indent_statements
from fxwrap.converters.cpp.writer import CppWriter
from fxwrap.wrapper_ir import LineBase, Operand, TensorType, Value, values_in


class LoopConverter(Converter):
    """The part of the C++ converter that converts loops."""

    writer: CppWriter

    def while_(self, line: lines.While) -> None:
        writer = self.writer
        iterations = f"f.ints[{writer.unit.fresh_symbol('iterations', 'int')}]"
        keep_running = f"f.ints[{writer.unit.fresh_symbol('keep_running', 'bool')}]"
        arguments = line.body.arguments
        carried = arguments[: len(line.carried)]
        writer.alias_arguments(arguments, (*line.carried, *line.extra))
        stacks = _StackedResults(writer, line, iterations) if line.stacked else None

        def emit_condition(outputs: tuple[Operand, ...]) -> None:
            writer.emit(f"{keep_running} = {writer.condition_text(outputs[0])};")
            _emit_drops(writer, outputs)

        def advance(outputs: tuple[Operand, ...]) -> None:
            if stacks is not None:
                stacks.append(outputs)
            writer.move_outputs(carried, outputs)

        condition = writer.block(
            line.cond, emit_condition, begin=lambda: writer.alias_arguments(line.cond.arguments, arguments)
        )
        body = writer.block(line.body, advance, preserve=arguments)
        statements = indent_statements([*condition, f"if (!{keep_running}) break;", *body])
        writer.emit(f"for ({iterations} = 0;; ++{iterations}) {{\n{statements}\n}}")
        if stacks is None:
            _emit_final_carries(writer, line, values_in(line.results), carried, iterations)
        else:
            stacks.finish()
        _emit_drops(writer, arguments)
        writer.track_results(line.results)

    def scan(self, line: lines.ScanLoop | lines.Map) -> None:
        writer = self.writer
        row = f"f.ints[{writer.unit.fresh_symbol('row', 'int')}]"
        length = line.over[0].tensor_type.sizes[0]
        rows = writer.unit.number(length)
        count, end = len(line.carried), len(line.carried) + len(line.over)
        arguments = line.body.arguments
        carried, slices, lasting = arguments[:count], arguments[count:end], (*arguments[:count], *arguments[end:])
        stacked = values_in(line.results[count:])
        writer.alias_arguments(lasting, (*line.carried, *line.extra))
        for result in stacked:
            writer.emit_allocation(line, writer.define(result), result.tensor_type)

        def begin() -> None:
            for argument, operand in zip(slices, line.over):
                _emit_row_view(writer, writer.name_of(argument), operand, row)

        def consume_outputs(outputs: tuple[Operand, ...]) -> None:
            writer.move_outputs(carried, outputs[:count])
            for result, item in zip(stacked, values_in(outputs[count:])):
                target = writer.unit.fresh_slot("place")
                _emit_row_view(writer, target, result, row)
                writer.emit(f"copy(f, {target}, {writer.name_of(item)});")
                writer.drop([target, writer.name_of(item)])

        statements = writer.block(line.body, consume_outputs, begin=begin, preserve=lasting)
        forward = f"for ({row} = 0; {row} < {rows}; ++{row})"
        backward = f"for ({row} = {rows} - 1; {row} >= 0; --{row})"
        writer.emit(f"{backward if line.reverse else forward} {{\n{indent_statements(statements)}\n}}")
        results = values_in(line.results[:count])
        _emit_final_carries(writer, line, results, carried, length if isinstance(length, int) else rows)
        _emit_drops(writer, lasting)
        writer.track_results(line.results)

    map = scan


class _StackedResults:
    """The stacked results of a loop with an unknown number of iterations.

    Their capacity doubles when it is exhausted, so that copying is amortized. The excess is released when the number of
    iterations is known.
    """

    def __init__(self, writer: CppWriter, line: lines.While, iterations: str) -> None:
        self.writer = writer
        self.line = line
        self.iterations = iterations
        self.capacity = f"f.ints[{writer.unit.fresh_symbol('capacity', 'int')}]"
        self.rows = [value.tensor_type for value in values_in(line.carried)]
        self.slots = [writer.unit.slot(result.name) for result in values_in(line.results)]
        writer.emit(f"{self.capacity} = 0;")
        for slot, row in zip(self.slots, self.rows):
            writer.emit_allocation(line, slot, TensorType.contiguous(row.dtype, (0, *row.sizes), row.device))

    def append(self, outputs: tuple[Operand, ...]) -> None:
        """Emits the copy of an iteration's outputs to the next rows."""
        writer = self.writer
        grow = [f"{self.capacity} = 2 * {self.capacity} + {_INITIAL_CAPACITY};"]
        for slot, row in zip(self.slots, self.rows):
            grow += self._reallocate(slot, row, self.capacity)
        writer.emit(f"if ({self.iterations} == {self.capacity}) {{\n{indent_statements(grow)}\n}}")
        for slot, row, item in zip(self.slots, self.rows, values_in(outputs)):
            target = writer.unit.fresh_slot("place")
            strides = TensorType.contiguous(row.dtype, row.sizes, row.device).strides
            offset = f"{self.iterations} * ({writer.unit.number(row.element_count)})"
            writer.emit_view(target, slot, row.sizes, strides, offset)
            writer.emit(f"copy(f, {target}, {writer.name_of(item)});")
            writer.drop([target])

    def finish(self) -> None:
        """Emits the release of the excess capacity."""
        for slot, row in zip(self.slots, self.rows):
            moved = self._reallocate(slot, row, self.iterations)
            self.writer.emit(f"if ({self.iterations} != {self.capacity}) {{\n{indent_statements(moved)}\n}}")

    def _reallocate(self, slot: str, row: TensorType, count: str) -> list[str]:
        """Returns the statements that move the existing rows to memory for `count` rows."""
        writer, unit = self.writer, self.writer.unit
        moved, part = unit.fresh_slot("moved"), unit.fresh_slot("part")
        whole = TensorType.contiguous(row.dtype, (1, *row.sizes), row.device)
        inner, strides = unit.sizes(row.sizes)[1:], unit.sizes(whole.strides)
        comma = ", " if row.sizes else ""
        dtype, device = writer.dtype(self.line, row.dtype), unit.device(row.device)
        growing = count == self.capacity
        target, source = (part, slot) if growing else (moved, part)
        return [
            f"empty_strided(f, {moved}, {{{count}{comma}{inner}, {strides}, {dtype}, {device});",
            f"view(f, {part}, {moved if growing else slot}, {{{self.iterations}{comma}{inner}, {strides}, 0);",
            f"copy(f, {target}, {source});",
            f"drop(f, {part});",
            f"move(f, {slot}, {moved});",
        ]


_INITIAL_CAPACITY = 8
"""The first capacity, in iterations, of stacked results."""


def _emit_row_view(writer: CppWriter, slot: str, whole: Value, row: str) -> None:
    type_ = whole.tensor_type
    offset = f"{row} * ({writer.unit.number(type_.strides[0])})"
    writer.emit_view(slot, writer.name_of(whole), type_.sizes[1:], type_.strides[1:], offset)


def _emit_final_carries(
    writer: CppWriter, line: LineBase, results: Sequence[Value], carried: Sequence[Value], iterations: int | str
) -> None:
    """Emits the move of the carried values to the results, or a copy of the operands if no iteration has run.

    `iterations` is the number of iterations or its text.
    """
    for result, value in zip(results, carried):
        if not isinstance(result.type, TensorType):
            writer.move_outputs((result,), (value,))
            continue
        name, source = writer.unit.slot(result.name), writer.name_of(value)
        moved = f"move(f, {name}, {source});"
        copied = f"{{ {writer.allocation_text(line, name, result.tensor_type)} copy(f, {name}, {source}); }}"
        if isinstance(iterations, int):
            writer.emit(moved if iterations else copied)
        else:
            writer.emit(f"if ({iterations} == 0) {copied}\nelse {moved}")


def _emit_drops(writer: CppWriter, items: Sequence[Operand]) -> None:
    tensors = [value for value in values_in(tuple(items)) if isinstance(value.type, TensorType)]
    writer.drop([writer.name_of(value) for value in tensors])
