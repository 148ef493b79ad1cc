"""Functions that emitted C++ has recorded and replayed: programs of their own, called through an operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fxwrap.converters.cpp_text import int_text
from fxwrap.converters.cpp_writer import CppWriter
from fxwrap.converters.emitted import Emitted
from fxwrap.lines import CallFunction, Return, Yield
from fxwrap.lines.blocks import device_of
from fxwrap.runtime.native import Program as NativeProgram
from fxwrap.runtime.replay import Memory, Replayed, owning
from fxwrap.runtime.replay_operator import ReplayedFunctions
from fxwrap.symbolic import SymbolInfo, make_symbol
from fxwrap.wrapper_ir import Block, Input, Ownership, Program, TensorType, Value, outer_symbols


def is_replayed(line: CallFunction) -> bool:
    """Whether C++ has a call replayed: one that passes tensors alone."""
    return line.replay > 0 and all(
        isinstance(item, Value) and isinstance(item.type, TensorType) for item in (*line.operands, *line.results)
    )


def write_replay(writer: CppWriter, program: Program, line: CallFunction, handle: str, index: int) -> None:
    """Says a call of a function through the runtime, which records and replays it; `handle` is the slot of its name."""
    numbers = tuple([make_symbol(name) for name in _numbers_of(program, line.function)])
    arguments = [handle, int_text(index), *writer.arguments(line, (line.operands, numbers))]
    results = writer.results((line.results,)) if line.results else ()
    writer.own_results(line.results)
    writer.call("fxwrap_runtime.replay.default", arguments, results)


def _numbers_of(program: Program, function: str) -> tuple[str, ...]:
    """Returns the symbols that a function takes from where it is called, as its arguments' types do."""
    functions = dict(program.functions)
    return outer_symbols(functions[function], functions=functions, argument_types=True)


def function_program(program: Program, line: CallFunction) -> Program:
    """Returns the function that a line calls as a program: its inputs are the arguments, then the symbols."""
    block = dict(program.functions)[line.function]
    written = {line.operands[place].name for place in line.places(line.writes)}
    inputs = [
        Input(value, Ownership.MUTABLE if operand.name in written else Ownership.BORROWED)
        for value, operand in zip(block.arguments, line.operands, strict=True)
    ]
    inputs += [Input(SymbolInfo(name)) for name in _numbers_of(program, line.function)]
    *lines, last = block.lines
    assert isinstance(last, Yield), "a function ends with what it gives"
    body = Block((), (*lines, Return(last.values, origin=last.origin)))
    name = f"{program.name}_{line.function}"
    return Program(name, tuple(inputs), body, (), program.kernels, program.functions, program.header)


def replayed_functions(program: Program, lines: Sequence[CallFunction], bodies: Sequence[Emitted]) -> ReplayedFunctions:
    """Returns what records and replays the functions that lines call, which are compiled."""
    functions, memories = dict(program.functions), dict[str, Memory]()
    found = []
    for line, emitted in zip(lines, bodies, strict=True):
        device = str(device_of(functions[line.function]))
        memory = memories.setdefault(device, Memory(device))
        places = line.places(line.fixed), line.places(line.writes)
        found.append(Replayed(partial(_run, emitted.boxed), memory, line.function, line.replay, *places))
    return ReplayedFunctions(found)


def _run(boxed: Any, arguments: list[Any], *numbers: Any) -> Any:
    inputs = [*arguments, *numbers]
    arguments.clear()
    return boxed(inputs)


class ReplayingProgram:
    """A native program whose functions are replayed. When it goes, their recordings go."""

    def __init__(self, native: NativeProgram, functions: ReplayedFunctions) -> None:
        self.native = native
        self.functions = functions
        self._run = owning(native.boxed, list({id(item.memory): item.memory for item in functions.functions}.values()))

    def boxed(self, inputs: list[Any]) -> Any:
        """Runs the program on inputs in a list, which it empties."""
        return self._run(inputs)

    def __call__(self, *inputs: Any) -> Any:
        """Runs the program on its inputs."""
        return self.native(*inputs)
