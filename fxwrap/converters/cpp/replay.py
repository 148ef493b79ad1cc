"""Functions of emitted C++ that the runtime captures and replays: separate programs, called through an operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy

from fxwrap.converters.cpp.writer import CppWriter
from fxwrap.converters.emitted_program import BoxedCallable, EmittedProgram
from fxwrap.lines import CallFunction, Return, Yield
from fxwrap.lines.operands import block_device, communicating_groups
from fxwrap.runtime.graph_capture.operator import GraphedFunctions
from fxwrap.runtime.graph_capture.replay import GraphedFunction, GraphManager, bind_graph_lifetime
from fxwrap.runtime.native import NativeProgram
from fxwrap.symbolic import Number, SymbolInfo, make_symbol, symbol_kind
from fxwrap.wrapper_ir import Block, Input, Ownership, Program, TensorType, Value, captured_symbols, values_in


def is_replayed(line: CallFunction) -> bool:
    """Returns whether emitted C++ replays a call. All of its operands and results must be tensors."""
    return line.max_captures > 0 and all(
        isinstance(item, Value) and isinstance(item.type, TensorType) for item in (*line.operands, *line.results)
    )


def write_replay(writer: CppWriter, program: Program, line: CallFunction, handle: str, index: int) -> None:
    """Emits a call of a captured function through the runtime; `handle` is the slot of the functions' handle."""
    symbols = [make_symbol(name) for name in _captured_symbols(program, line.function)]
    numbers = ", ".join([_number_text(writer, symbol) for symbol in symbols])
    tensors = ", ".join([writer.name_of(item) for item in line.operands if isinstance(item, Value)])
    writer.track_results(line.results)
    outs = ", ".join([writer.name_of(item) for item in values_in(line.results)])
    writer.unit.needs_torch = True
    writer.emit(f"replay(f, {handle}, {index}, {{{tensors}}}, {{{numbers}}}, {{{outs}}});")


def _number_text(writer: CppWriter, symbol: sympy.Symbol) -> str:
    text = writer.number(symbol)
    return f"{text} != 0" if symbol_kind(symbol.name) == "bool" else text


def _captured_symbols(program: Program, function: str) -> tuple[str, ...]:
    functions = dict(program.functions)
    return captured_symbols(functions[function], functions=functions, argument_types=True)


def function_as_program(program: Program, line: CallFunction) -> Program:
    """Returns the function that a line calls as a program. Its inputs are the arguments, then the symbols."""
    block = dict(program.functions)[line.function]
    inputs = [
        Input(value, Ownership.MUTABLE if operand in line.writes else Ownership.BORROWED)
        for value, operand in zip(block.arguments, line.operands, strict=True)
    ]
    inputs += [Input(SymbolInfo(name)) for name in _captured_symbols(program, line.function)]
    *lines, last = block.lines
    assert isinstance(last, Yield), "a function ends in control.yield"
    body = Block((), (*lines, Return(last.values, origin=last.origin)))
    name = f"{program.name}_{line.function}"
    return Program(name, tuple(inputs), body, (), program.kernels, program.functions, program.header)


def graphed_functions(
    program: Program, lines: Sequence[CallFunction], bodies: Sequence[EmittedProgram]
) -> GraphedFunctions:
    """Returns the captured functions of the calls `lines`, whose compiled bodies are `bodies`."""
    functions, graph_managers = dict(program.functions), dict[str, GraphManager]()
    graphed = []
    for line, emitted in zip(lines, bodies, strict=True):
        device = str(block_device(functions[line.function]))
        manager = graph_managers.setdefault(device, GraphManager(device))
        operand_positions = line.operand_positions(line.static_operands), line.operand_positions(line.writes)
        groups = communicating_groups(functions[line.function], functions)
        body = partial(_run, emitted.boxed)
        graphed.append(GraphedFunction(body, manager, line.function, line.max_captures, *operand_positions, groups))
    return GraphedFunctions(graphed)


def _run(boxed: BoxedCallable, arguments: list[object], *symbols: Number) -> Any:
    inputs = [*arguments, *symbols]
    arguments.clear()
    return boxed(inputs)


class ReplayingProgram:
    """A native program with captured functions, whose graphs are released with it."""

    def __init__(self, native: NativeProgram, functions: GraphedFunctions) -> None:
        self.native = native
        self.functions = functions
        self._run = bind_graph_lifetime(
            native.boxed, list({id(item.manager): item.manager for item in functions.functions}.values())
        )

    def boxed(self, inputs: list[object]) -> object:
        """Runs the program on the inputs in a list, which it clears."""
        return self._run(inputs)

    def __call__(self, *inputs: object) -> object:
        """Runs the program on its inputs."""
        return self.native(*inputs)
