"""Questions about programs that passes, memory planning and lowering ask: pure functions, linear in the lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxwrap.symbolic import Scalar, Size, SymbolInfo, evaluate, symbol_kind
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


def roots(lines: Iterable[LineBase], arguments: Iterable[Value] = ()) -> dict[str, str]:
    """Returns the root of each value of a block by name: itself, or the value whose memory it is a window on.

    `arguments` are the block's own, or a program's inputs and constants; values of nested blocks are not included.
    """
    found = {value.name: value.name for value in arguments}
    for line in lines:
        for value in defined(line):
            base = line.alias_of(value)
            found[value.name] = value.name if base is None else found[base.name]
    return found


def program_arguments(program: Program) -> list[Value]:
    """Returns what a program's body borrows or is given: values among its inputs, then its constants."""
    inputs = [item.value for item in program.inputs if isinstance(item.value, Value)]
    return [*inputs, *(constant.value for constant in program.constants)]


def released_inputs(inputs: Iterable[Input]) -> list[Value]:
    """Returns the inputs that a program's body takes over: it frees, reuses or gives back each of them."""
    taken = (Ownership.SHARED, Ownership.OWNED)
    return [item.value for item in inputs if isinstance(item.value, Value) and item.ownership in taken]


def last_uses(lines: Sequence[LineBase], arguments: Iterable[Value] = ()) -> dict[str, int]:
    """Returns the position of the last line that touches each root of a block, by the root's name.

    A line touches the roots it defines, reads, writes or consumes, by any value over them; one that is in flight is
    touched until its wait. An argument that nothing touches has position -1.
    """
    root_of = {value.name: value.name for value in arguments}
    last = dict.fromkeys(root_of, -1)
    in_flight: dict[str, list[str]] = {}
    for position, line in enumerate(lines):
        touched = [root_of[value.name] for value in used(line)]
        for value in defined(line):
            base = line.alias_of(value)
            root_of[value.name] = value.name if base is None else root_of[base.name]
            if line.starts_flight:
                in_flight[root_of[value.name]] = touched
            last[root_of[value.name]] = position
        if line.ends_flight:
            touched = [*touched, *(other for root in touched for other in in_flight.pop(root, ()))]
        for root in touched:
            last[root] = position
    return last


def called_functions(line: LineBase) -> list[str]:
    """Returns the names of the program's functions that a line runs."""
    fields = line.target_fields
    return [getattr(line, name) for name, refers in fields if refers == "function"] if fields else []


def all_effects(line: LineBase, functions: Mapping[str, Block]) -> tuple[Effect, ...]:
    """Returns what a line does besides its reads and writes, nested blocks and the functions it calls included."""
    found = dict.fromkeys(line.effects())
    for nested in run_blocks(line, functions):
        for other in nested.lines:
            found.update(dict.fromkeys(all_effects(other, functions)))
    return tuple(found)


def outer_symbols(*run: Block, functions: Mapping[str, Block], argument_types: bool = False) -> tuple[str, ...]:
    """Returns the names of the symbols that blocks use and do not define, sorted.

    Nested blocks count, and the functions that they call, out of those of the program. With `argument_types`, the
    symbols in the types of the blocks' arguments count as used.
    """
    used_names: set[str] = set()
    own: set[str] = set()
    pending = list(run)
    while pending:
        current = pending.pop()
        if argument_types:
            types = [value.type for value in current.arguments]
            used_names.update(symbol.name for type_ in types for symbol in type_symbols(type_))
        for line in current.lines:
            used_names.update(symbol.name for symbol in symbols_used(line, *Role))
            made = defined_symbol(line)
            if made is not None:
                own.add(made.name)
            pending.extend(run_blocks(line, functions))
    return tuple(sorted(used_names - own))


def run_blocks(line: LineBase, functions: Mapping[str, Block]) -> list[Block]:
    """Returns the blocks that a line runs: those in it, and the functions of the program that it calls."""
    return [*[nested for _, nested in blocks(line)], *[functions[name] for name in called_functions(line)]]


def symbol_infos(program: Program) -> dict[str, SymbolInfo]:
    """Returns what the program says of each of its symbols, by name."""
    inputs = [item.value for item in program.inputs if isinstance(item.value, SymbolInfo)]
    made = [defined_symbol(line) for line in program.lines()]
    return {info.name: info for info in [*inputs, *made] if info is not None}


def known_values(program: Program, given: Mapping[str, Scalar] | None = None) -> dict[str, Scalar]:
    """Returns values of a program's symbols by name: those that are given, else the hints that it declares."""
    declared = {name: info.hint for name, info in symbol_infos(program).items() if info.hint is not None}
    return {**declared, **(given or {})}


UNKNOWN_SIZE = 8192
"""What a whole number is taken to be that has neither a value nor a hint."""
_LIKE_ANY: Mapping[str, Scalar] = {"int": UNKNOWN_SIZE, "float": 0.5, "bool": True}


def typical_values(program: Program, given: Mapping[str, Scalar] | None = None) -> dict[str, Scalar]:
    """Returns values of all of a program's symbols by name: the known ones, and numbers like any other, by kind."""
    return {**{name: _LIKE_ANY[symbol_kind(name)] for name in symbol_infos(program)}, **known_values(program, given)}


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """What a program keeps alive, in bytes of tensor memory without an allocator's rounding.

    `peak` is the most that is live at once; `position` the first line of the body at which it is; `at_line` what is
    live while each line of the body runs: its operands and results, and at their peak the blocks that it runs.
    """

    peak: int
    position: int
    at_line: tuple[int, ...]


def live_bytes(
    program: Program,
    hints: Mapping[str, Scalar] | None = None,
    *,
    include_inputs: bool = True,
    include_constants: bool = True,
) -> LiveBytes:
    """Returns the bytes of tensor memory that are live at each line, and their peak.

    Each root counts from its definition until it is taken or given back, by what its type needs from its first element
    to its last; a line that takes memory and gives a root (reuse) gives it the memory it took. Owned and shared inputs
    count until they are taken, other inputs and constants throughout. Lists and opaque values count nothing.

    `hints` are the values of symbols, by name; those that the program declares stand in for the others. Raises
    ExpressionError for a symbol that has no value.
    """
    meter = _Meter(program, known_values(program, hints))
    inputs = [item.value for item in program.inputs if isinstance(item.value, Value)]
    held = inputs if include_inputs else []
    held = held + ([constant.value for constant in program.constants] if include_constants else [])
    at_line = meter.block(program.body, {value.name: meter.bytes_of(value) for value in held})
    peak = max(at_line)
    return LiveBytes(peak, at_line.index(peak), tuple(at_line))


class _Meter:
    def __init__(self, program: Program, environment: Mapping[str, Scalar]) -> None:
        self.environment = environment
        self.functions = dict(program.functions)
        self.function_peaks: dict[str, int] = {}

    def bytes_of(self, value: Value) -> int:
        """The bytes from the first element to past the last one."""
        type_ = value.type
        if not isinstance(type_, TensorType):
            return 0
        last = 1
        for size, stride in zip(type_.sizes, type_.strides):
            length = self._number(size)
            if length == 0:
                return 0
            last += (length - 1) * self._number(stride)
        return last * type_.dtype.itemsize

    def _number(self, size: Size) -> int:
        return size if isinstance(size, int) else int(evaluate(size, self.environment))

    def block(self, block: Block, live: dict[str, int]) -> list[int]:
        """The bytes live while each line runs; `live` holds the bytes of roots by name, and is used up."""
        total = sum(live.values())
        at_line = []
        for line in block.lines:
            taken = sum([live.pop(value.name, 0) for value in consumed(line)])
            made = self._define(line, live, taken)
            at_line.append(total - taken + max(made, taken, self._inner_peak(line)))
            total += made - taken
        return at_line

    def _define(self, line: LineBase, live: dict[str, int], taken: int) -> int:
        """Adds the roots that a line defines; returns their bytes. The first has the memory that the line took."""
        made = 0
        for value in defined(line):
            if line.alias_of(value) is None:
                size = taken if taken else self.bytes_of(value)
                live[value.name] = size
                made += size
                taken = 0
        return made

    def _inner_peak(self, line: LineBase) -> int:
        inner, functions = blocks(line), called_functions(line)
        if not inner and not functions:
            return 0
        peaks = [max(self.block(nested, {})) for _, nested in inner]
        return max([*peaks, *[self._function_peak(name) for name in functions]])

    def _function_peak(self, name: str) -> int:
        if name not in self.function_peaks:
            self.function_peaks[name] = max(self.block(self.functions[name], {}))
        return self.function_peaks[name]


def is_release(line: LineBase) -> bool:
    """Returns whether a line does nothing but give memory back: it takes a root, defines nothing and has no effect."""
    return bool(consumed(line)) and not (
        line.effects() or defined(line) or reads(line) or defined_symbol(line) or blocks(line)
    )
