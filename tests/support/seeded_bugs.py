"""Bugs of each part of the compiler, put in for the time of a test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fxwrap.caching import clear_caches
from fxwrap.compile import steps
from fxwrap.converters.cpp import converter as cpp_converter
from fxwrap.converters.python import converter as python_converter
from fxwrap.fx_passes import prepare
from fxwrap.lines import ExternCall
from fxwrap.lowering import RULES
from fxwrap.printers.cpp import statements
from fxwrap.wrapper_ir import Block, Program, blocks


def lowering(patch: pytest.MonkeyPatch) -> None:
    """`tanh` is lowered as `sigmoid`."""
    patch.setitem(RULES, "aten.tanh.default", RULES["aten.sigmoid.default"])


def printer(patch: pytest.MonkeyPatch) -> None:
    """The C++ printer prints `tanh` 1% too large, until the end of the test."""
    scale_printed(patch, "tanh", "1.01f")


def scale_printed(patch: pytest.MonkeyPatch, name: str, factor: str) -> None:
    """Lets the C++ printer multiply the results of an operation by a factor."""
    clear_caches()
    original = statements.expression

    def expression(operation: Any, operands: Any, dtype: Any) -> str:
        text = original(operation, operands, dtype)
        return f"({text} * {factor})" if operation.name == name else text

    patch.setattr(statements, "expression", expression)


THIRD = 3
"""The number of the matmul whose operands a wrong pass swaps."""


def swap_operands(program: Program) -> Program:
    """Swaps the operands of the third matmul of a program, blocks included."""
    count = itertools.count(1)

    def swap(block: Block) -> Block:
        lines = []
        for line in block.lines:
            if isinstance(line, ExternCall) and line.target == "aten.mm.default" and next(count) == THIRD:
                line = line.replace(arguments=line.arguments[::-1])
            inner = {name: swap(nested) for name, nested in blocks(line)}
            lines.append(line.replace(**inner) if inner else line)
        return dataclasses.replace(block, lines=tuple(lines))

    return program.replace(body=swap(program.body))


def program_pass(patch: pytest.MonkeyPatch) -> None:
    """The pass `insert_device_guards` swaps the operands of a matmul."""
    change_program(patch, swap_operands)


def change_program(patch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> None:
    """Lets the pass `insert_device_guards` change its result."""

    def run(step: Any, state: Any, context: Any) -> Any:
        after = step.run(state, context)
        return dataclasses.replace(after, program=change(after.program))

    patch.setattr(steps, "PROGRAM_STEPS", replaced_step(steps.PROGRAM_STEPS, "insert_device_guards", run))


def graph_pass(patch: pytest.MonkeyPatch) -> None:
    """The FX pass `unfuse_biases` changes the factor of a multiplication."""

    def run(step: Any, state: Any, context: Any) -> Any:
        after = step.run(state, context)
        for node in after.graph_module.graph.nodes:
            if str(node.target) == "aten.mul.Tensor" and node.args[1] == 0.5:
                node.args = (node.args[0], 0.25)
        return after

    patch.setattr(prepare, "FX_PASSES", replaced_step(prepare.FX_PASSES, "unfuse_biases", run))


def converter(patch: pytest.MonkeyPatch) -> None:
    """The converters to Python and C++ swap the operands of matmuls whose right operand is `w3`."""
    original, original_call = python_converter.call_text, cpp_converter.CppConverter._call

    def swapped(target: str, arguments: Any) -> Any:
        return arguments[::-1] if target == "aten.mm.default" and is_third(arguments) else arguments

    def call_text(module: Any, target: str, arguments: Any, keywords: Any) -> str:
        return original(module, target, swapped(target, arguments), keywords)

    def call(self: Any, line: Any, target: str, keywords: Any) -> None:
        original_call(self, line.replace(arguments=swapped(target, line.arguments)), target, keywords)

    patch.setattr(python_converter, "call_text", call_text)
    patch.setattr(cpp_converter.CppConverter, "_call", call)


def is_third(arguments: Any) -> bool:
    """Whether a matmul of the functions in `tests/debugging/test_bisection.py` has the right operand `w3`."""
    return arguments[1].name in ("arg3_1", "primals_4", "arg0_1", "arg2_1_2")


def replaced_step(table: Any, name: str, run: Callable[[Any, Any, Any], Any]) -> Any:
    """Returns a table of steps in which `run(step, state, context)` runs the step of this name."""
    return tuple([
        dataclasses.replace(step, run=lambda state, context, step=step: run(step, state, context))
        if step.name == name else step
        for step in table
    ])  # fmt: skip


BUGS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "lowering": lowering, "kernel printer": printer, "pass": program_pass, "graph pass": graph_pass,
    "converter": converter,
}  # fmt: skip
"""The bugs by the part of the compiler that is at fault."""
