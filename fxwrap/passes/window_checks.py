"""Run-time checks that views, pool slices and reused memory are inside of their memory, for programs from files.

The verifier checks windows of constant size. The others are asserted where they are made, unless they are inside for
all sizes: a file may declare any range for a symbol, so ranges are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from fxwrap import wrapper_ir as ir
from fxwrap.lines import Assert, SizeOf
from fxwrap.symbolic import Size, SymbolInfo, bounds, canonicalize, parse_expr, print_expr, product


def check_windows(program: ir.Program) -> ir.Program:
    """Returns the program with an assertion before each window of memory that may not be inside for some sizes.

    Assertions that are there already are not added again. Returns the same object if there is nothing to assert.
    """
    sizes = [line.symbol.name for line in program.lines() if isinstance(line, SizeOf) and line.of != "storage_offset"]
    checker = _WindowChecker({name: SymbolInfo(name, lower=0) for name in sizes})
    functions = tuple([(name, checker.block(block, ())) for name, block in program.functions])
    body = checker.block(program.body, ir.program_arguments(program))
    same = body is program.body and all(new is old for (_, new), (_, old) in zip(functions, program.functions))
    return program if same else program.replace(body=body, functions=functions)


class _WindowChecker:
    """Adds assertions to blocks. `infos` are the symbols that are never negative."""

    def __init__(self, infos: Mapping[str, SymbolInfo]) -> None:
        self._infos = infos

    def block(self, block: ir.Block, arguments: Sequence[ir.Value]) -> ir.Block:
        memory: dict[str, ir.Type | None] = {value.name: value.type for value in (*arguments, *block.arguments)}
        asserted: set[object] = set()
        lines: list[ir.LineBase] = []
        for line in block.lines:
            if isinstance(line, Assert):
                asserted.add(line.condition)
            condition = self._condition(line, memory)
            if condition is not None and condition not in asserted:
                asserted.add(condition)
                result = ir.defined(line)[0].name
                lines.append(Assert(condition, f"%{result} is not inside of its memory", "InputError"))
            lines.append(ir.map_line(line, lambda nested: self.block(nested, ()), (ir.Role.BLOCK,)))
            self._define_memory(line, memory)
        same = len(lines) == len(block.lines) and all(new is old for new, old in zip(lines, block.lines))
        return block if same else ir.Block(block.arguments, tuple(lines))

    def _condition(self, line: ir.LineBase, memory: Mapping[str, ir.Type | None]) -> Size | bool | None:
        """Returns the condition under which a line's window is inside of its memory; None if it always is."""
        window = line.window()
        if window is None:
            return None
        result, base, start = window
        type_, whole = result.tensor_type, memory[base.name]
        if not isinstance(whole, ir.TensorType) or (type(start) is int and type_.is_static and whole.is_static):
            return None
        end = _expanded(start + type_.storage_bytes)
        excess = _expanded(end - whole.storage_bytes)
        if self._is_at_most_zero(excess) and self._is_at_most_zero(_expanded(-start)):
            return None
        inside = f"and({print_expr(start)} >= 0, {print_expr(end)} <= {print_expr(whole.storage_bytes)})"
        return parse_expr(f"or({inside}, {print_expr(product(type_.sizes))} == 0)")

    def _define_memory(self, line: ir.LineBase, memory: dict[str, ir.Type | None]) -> None:
        """Adds the memory, a root or a pool slice, of each result of a line; None if an operator may have left it."""
        is_view = line.window() is not None and line.results_initialized
        for value in ir.defined(line):
            base = line.alias_of(value)
            whole = memory[base.name] if base is not None and (is_view or line.window() is None) else value.type
            if base is not None and line.window() is None and isinstance(value.type, ir.TensorType):
                inside = isinstance(whole, ir.TensorType) and self._is_at_most_zero(
                    _expanded(value.type.end_bytes - whole.storage_bytes)
                )
                whole = whole if inside else None
            memory[value.name] = whole

    def _is_at_most_zero(self, size: Size) -> bool:
        upper = bounds(size, self._infos)[1]
        return upper is not None and upper <= 0


def _expanded(size: Size) -> Size:
    return size if isinstance(size, int) else canonicalize(sympy.expand(size))
