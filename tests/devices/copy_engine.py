"""The Abacus's copy engine: its line, the pass that inserts the line, and the emitters' code for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fxwrap.converters.interpreter import Interpreter
from fxwrap.converters.python import PythonConverter
from fxwrap.lines import Alloc, ExtensionLine, Free, Launch, Line, Mutate, Reuse
from fxwrap.wrapper_ir import (
    Block,
    Effect,
    LineBase,
    Program,
    Value,
    attribute,
    consume,
    define,
    line_class,
    program_arguments,
    read,
)
from tests.devices import abacus_runtime


@line_class("abacus.copy")
class AbacusCopy(ExtensionLine):
    """Copies `source` into the memory of `staging` by the copy engine, and takes that memory for the result.

    Example: `%y = abacus.copy(%staging, %x) channel=1 : f32[4, 8]@cpu`
    """

    result: Value = define()
    staging: Value = consume()
    source: Value = read()
    channel: int = attribute(default=0)

    def effects(self) -> tuple[Effect, ...]:
        return ()

    def expand(self) -> tuple[Line, ...]:
        copy = Mutate((), "aten.copy_.default", (self.result, self.source), (self.result,))
        return Reuse(self.result, self.staging), copy


def stage_inputs(program: Program) -> Program:
    """Has the copy engine bring inputs and constants into the device's own memory, the first of each kernel's."""
    argument_names = {item.name for item in program_arguments(program)}
    lines: list[LineBase] = []
    channels: Counter[str] = Counter()
    for line in program.body.lines:
        first = _first(line, argument_names) if isinstance(line, Launch) else None
        if isinstance(line, Launch) and first is not None:
            type_ = replace(first.tensor_type, storage_offset=0, memory_space="beads")
            number = channels.total()
            staging, staged = Value(f"staging{number}", type_), Value(f"staged{number}", type_)
            channels[first.name] += 1
            arguments = tuple([staged if item is first else item for item in line.arguments])
            copy = AbacusCopy(staged, staging, first, number % 2, origin=line.origin)
            lines += [Alloc(staging), copy, line.replace(arguments=arguments), Free(staged)]
        else:
            lines.append(line)
    return program.replace(body=Block(program.body.arguments, tuple(lines)))


def _first(line: Launch, argument_names: set[str]) -> Value | None:
    """Returns the first operand of a launch that is in memory before the program runs, and is only read."""
    operands = [item for item in line.arguments if isinstance(item, Value) and item.name in argument_names]
    return next((item for item in operands if item not in line.outs), None)


def _in_python(converter: PythonConverter, line: AbacusCopy) -> None:
    copy = converter.module.import_function(abacus_runtime.__name__, "copy")
    staging, source = converter.text(line.staging), converter.text(line.source)
    converter.assign(line.result, f"{copy}({staging}, {source}, {line.channel})")
    converter.free(Free(line.staging))


def _interpreted(converter: Interpreter, line: AbacusCopy) -> None:
    copied = abacus_runtime.copy(converter.values[line.staging.name], converter.values[line.source.name], line.channel)
    converter.free(Free(line.staging))
    converter.define(line.result, copied)


LINES: Mapping[type, Mapping[str, Any]] = {AbacusCopy: {"python": _in_python, "interpreter": _interpreted}}
"""The other emitters run the line's expansion."""
