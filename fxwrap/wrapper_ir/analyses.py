"""Analyses of programs: pure functions, linear in the number of lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.symbolic import Number, SymbolInfo, evaluate_size, symbol_kind
from fxwrap.wrapper_ir.effects import Effect
from fxwrap.wrapper_ir.line import (
    Block,
    LineBase,
    blocks,
    consumed,
    defined,
    defined_symbol,
    reads,
    symbols_used,
    type_symbols,
    used,
)
from fxwrap.wrapper_ir.program import Input, Ownership, Program
from fxwrap.wrapper_ir.roles import Role
from fxwrap.wrapper_ir.types import TensorType, Value


def alias_roots(lines: Iterable[LineBase], arguments: Iterable[Value] = ()) -> dict[str, str]:
    """Returns the root of each value of a block by name: the value that it aliases, or itself.

    `arguments` are the block's arguments, or a program's inputs and constants. Nested blocks are excluded.
    """
    root_of = {value.name: value.name for value in arguments}
    for line in lines:
        for value in defined(line):
            base = line.alias_of(value)
            root_of[value.name] = value.name if base is None else root_of[base.name]
    return root_of


def program_arguments(program: Program) -> list[Value]:
    """Returns the arguments of a program's body: the values among its inputs, then its constants."""
    inputs = [item.value for item in program.inputs if isinstance(item.value, Value)]
    return [*inputs, *(constant.value for constant in program.constants)]


def value_names(program: Program) -> set[str]:
    """Returns the names of all values of a program."""
    names = {value.name for value in program_arguments(program)}
    for block in program.all_blocks():
        names.update([value.name for value in block.arguments])
        names.update([value.name for line in block.lines for value in defined(line)])
    return names


def released_inputs(inputs: Iterable[Input]) -> list[Value]:
    """Returns the shared and owned inputs, each of which the body frees, reuses or returns."""
    released = (Ownership.SHARED, Ownership.OWNED)
    return [item.value for item in inputs if isinstance(item.value, Value) and item.ownership in released]


def last_uses(lines: Sequence[LineBase], arguments: Iterable[Value] = ()) -> dict[str, int]:
    """Returns the position of the last use of each root of a block, by the root's name.

    A line uses the roots of all values that it defines, reads, writes or consumes. Roots in flight, and their operands,
    are used until the wait, of several results of one collective the last one. An unused argument has position -1.
    """
    root_of = {value.name: value.name for value in arguments}
    memory_of = dict(root_of)  # the slice of a pool that a value is in, else its root
    last = dict.fromkeys(root_of, -1)
    in_flight: dict[str, list[str]] = {}  # by memory
    for position, line in enumerate(lines):
        roots = [root_of[value.name] for value in used(line)]
        for value in defined(line):
            base = line.alias_of(value)
            root_of[value.name] = value.name if base is None else root_of[base.name]
            has_content = line.results_initialized or line.zeroed
            memory_of[value.name] = value.name if base is None or not has_content else memory_of[base.name]
            if line.is_async_start:
                in_flight[memory_of[value.name]] = roots
            last[root_of[value.name]] = position
        if line.is_async_wait:
            pending = [memory_of[value.name] for value in reads(line)]
            roots = [*roots, *(operand for memory in pending for operand in in_flight.pop(memory, ()))]
        for root in roots:
            last[root] = position
    return last


def called_functions(line: LineBase) -> list[str]:
    """Returns the names of the functions that a line calls."""
    fields = line.target_fields
    return [getattr(line, name) for name, target_kind in fields if target_kind == "function"] if fields else []


def all_effects(line: LineBase, functions: Mapping[str, Block]) -> tuple[Effect, ...]:
    """Returns the effects of a line, including those of its nested blocks and called functions."""
    effects = dict.fromkeys(line.effects())
    for nested in executed_blocks(line, functions):
        for other in nested.lines:
            effects |= dict.fromkeys(all_effects(other, functions))
    return tuple(effects)


def captured_symbols(*run: Block, functions: Mapping[str, Block], argument_types: bool = False) -> tuple[str, ...]:
    """Returns the sorted names of the symbols that blocks use but do not define, including nested and called blocks.

    `functions` are the functions of the program. With `argument_types`, symbols in the types of arguments are used.
    """
    used_names: set[str] = set()
    defined_names: set[str] = set()
    pending = list(run)
    while pending:
        current = pending.pop()
        if argument_types:
            types = [value.type for value in current.arguments]
            used_names.update(symbol.name for type_ in types for symbol in type_symbols(type_))
        for line in current.lines:
            used_names.update(symbol.name for symbol in symbols_used(line, *Role))
            info = defined_symbol(line)
            if info is not None:
                defined_names.add(info.name)
            pending.extend(executed_blocks(line, functions))
    return tuple(sorted(used_names - defined_names))


def executed_blocks(line: LineBase, functions: Mapping[str, Block]) -> list[Block]:
    """Returns the nested blocks and the called functions of a line."""
    return [*[nested for _, nested in blocks(line)], *[functions[name] for name in called_functions(line)]]


def symbol_infos(program: Program) -> dict[str, SymbolInfo]:
    """Returns the declaration of each symbol of a program, by name."""
    inputs = [item.value for item in program.inputs if isinstance(item.value, SymbolInfo)]
    infos = [*inputs, *[defined_symbol(line) for line in program.lines()]]
    return {info.name: info for info in infos if info is not None}


def symbol_values(program: Program, values: Mapping[str, Number] | None = None) -> dict[str, Number]:
    """Returns values of a program's symbols by name: `values`, else their hints."""
    declared = {name: info.hint for name, info in symbol_infos(program).items() if info.hint is not None}
    return {**declared, **(values or {})}


FALLBACK_SIZE_HINT = 8192
"""The assumed value of an integer symbol without a hint."""
_FALLBACK_HINTS: Mapping[str, Number] = {"int": FALLBACK_SIZE_HINT, "float": 0.5, "bool": True}


def hints_with_fallback(program: Program, values: Mapping[str, Number] | None = None) -> dict[str, Number]:
    """Returns values of all symbols of a program by name: `values`, else their hints, else a default by kind."""
    fallbacks = {name: _FALLBACK_HINTS[symbol_kind(name)] for name in symbol_infos(program)}
    return {**fallbacks, **symbol_values(program, values)}


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """The live bytes of tensor memory of a program, without the allocator's rounding.

    `at_line` has the live bytes while each line of the body runs, including the peak of the blocks that it runs. `peak`
    is their maximum and `position` the first line that reaches it.
    """

    peak: int
    position: int
    at_line: tuple[int, ...]


def live_bytes(
    program: Program,
    hints: Mapping[str, Number] | None = None,
    *,
    include_inputs: bool = True,
    include_constants: bool = True,
    release_shared: bool = True,
) -> LiveBytes:
    """Returns the bytes of tensor memory that are live at each line, and their peak.

    A root is live from its definition until it is consumed or returned. A reused root has the size of the consumed one.
    Released inputs, such as the slices of one packed projection that a backward gets, have the size of their elements.
    Owned and shared inputs are live until they are consumed, other inputs and constants throughout. Lists and opaque
    values have no bytes. Without `release_shared`, shared inputs are live throughout: the caller has another reference.

    `hints` are the values of symbols by name, by default their declared hints. Raises ExpressionError for a symbol
    without a value.
    """
    meter = _Meter(program, symbol_values(program, hints))
    inputs = [(item.value, item.ownership) for item in program.inputs if include_inputs]
    values = [(value, ownership) for value, ownership in inputs if isinstance(value, Value)]
    held = [value for value, ownership in values if ownership is Ownership.SHARED and not release_shared]
    live = [value for value, ownership in values if ownership is not Ownership.SHARED or release_shared]
    live += [constant.value for constant in program.constants if include_constants]
    released = {value.name for value in released_inputs(program.inputs)}
    shared = sum(map(meter.element_bytes_of, held))
    sizes = {
        item.name: meter.element_bytes_of(item) if item.name in released else meter.bytes_of(item) for item in live
    }
    at_line = [shared + item for item in meter.block(program.body, sizes)]
    peak = max(at_line)
    return LiveBytes(peak, at_line.index(peak), tuple(at_line))


class _Meter:
    def __init__(self, program: Program, environment: Mapping[str, Number]) -> None:
        self.environment = environment
        self.functions = dict(program.functions)
        self.function_peaks: dict[str, int] = {}

    def bytes_of(self, value: Value) -> int:
        """Returns the number of bytes from the first element to the end of the last one."""
        type_ = value.type
        if not isinstance(type_, TensorType):
            return 0
        last = 1
        for size, stride in zip(type_.sizes, type_.strides):
            length = evaluate_size(size, self.environment)
            if length == 0:
                return 0
            last += (length - 1) * evaluate_size(stride, self.environment)
        return last * type_.dtype.itemsize

    def element_bytes_of(self, value: Value) -> int:
        """Returns the number of bytes of the elements."""
        return evaluate_size(value.type.element_bytes, self.environment) if isinstance(value.type, TensorType) else 0

    def block(self, block: Block, live: dict[str, int]) -> list[int]:
        """Returns the live bytes while each line runs. `live` has the bytes of roots by name and is modified."""
        total = sum(live.values())
        at_line = []
        for line in block.lines:
            released = sum([live.pop(value.name, 0) for value in consumed(line)])
            allocated = self._define(line, live, released)
            at_line.append(total - released + max(allocated, released, self._inner_peak(line)))
            total += allocated - released
        return at_line

    def _define(self, line: LineBase, live: dict[str, int], reusable: int) -> int:
        """Adds the roots that a line defines and returns their bytes. The first root has the reusable memory."""
        allocated = 0
        for value in defined(line):
            if line.alias_of(value) is None:
                live[value.name] = reusable or self.bytes_of(value)
                allocated += live[value.name]
                reusable = 0
        return allocated

    def _inner_peak(self, line: LineBase) -> int:
        peaks = [max(self.block(nested, {})) for _, nested in blocks(line)]
        return max([*peaks, *[self._function_peak(name) for name in called_functions(line)]], default=0)

    def _function_peak(self, name: str) -> int:
        if name not in self.function_peaks:
            self.function_peaks[name] = max(self.block(self.functions[name], {}))
        return self.function_peaks[name]


def is_release(line: LineBase) -> bool:
    """Returns whether a line only releases memory: it consumes roots, and defines, reads and affects nothing else."""
    return bool(consumed(line)) and not (
        line.effects() or defined(line) or reads(line) or defined_symbol(line) or blocks(line)
    )


def is_view(line: LineBase) -> bool:
    """Returns whether a line only names initialized memory of another value: it has one result, which aliases it."""
    return line.on_host and line.results_initialized and bool(line.alias_fields) and not line.effects()
