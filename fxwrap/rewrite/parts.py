"""A program in two parts that run one after the other, on two devices or in two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxwrap.errors import RewriteError
from fxwrap.lines import Alloc, Pool, Return, Reuse, View, Workspace
from fxwrap.lines.frees import insert_frees
from fxwrap.matching import is_plain_free
from fxwrap.symbolic import SymbolInfo, make_symbol
from fxwrap.wrapper_ir import (
    Block,
    Input,
    LineBase,
    Ownership,
    Program,
    Role,
    Value,
    defined,
    defined_symbol,
    holds_memory,
    outer_symbols,
    print_line,
    program_arguments,
    roots,
    run_blocks,
    symbol_infos,
    symbols_used,
    type_symbols,
    used,
    verify,
    writes,
)

Boxed = Callable[[list[Any]], Sequence[Any]]
"""Runs a program on its flat inputs, in a list that it empties."""


@dataclass(frozen=True)
class Parts:
    """The two parts of a program. The first one's results go into the second one.

    `first_inputs` are the positions of the program's inputs that the first part takes, in order; `second_inputs` those
    of the second, behind which it takes what the first one gives.
    """

    first: Program
    second: Program
    first_inputs: tuple[int, ...]
    second_inputs: tuple[int, ...]

    def run(self, inputs: Sequence[Any], first: Boxed, second: Boxed) -> Sequence[Any]:
        """Runs the parts by these entries (`boxed` of what an emitter gives); returns the program's outputs.

        What is passed on may be moved to another device by wrapping the entries.
        """
        given = [inputs[position] for position in self.second_inputs]
        given += first([inputs[position] for position in self.first_inputs])
        return second(given)


def split(program: Program, position: int) -> Parts:
    """Returns a program in two parts, of which the second begins with a line of the body, by its position.

    What the second part needs of the first one's is given over: memory, which the second part then owns, and symbols.
    Views are made again. Frees are placed anew.

    Raises RewriteError for a position between two that belong together: within a bracket, or a flight of a collective.
    """
    return _Split(program, position).parts()


_MEMORY = (Alloc, Reuse, Workspace)


class _Split:
    def __init__(self, program: Program, position: int) -> None:
        lines = program.body.lines
        if not 0 < position < len(lines):
            raise RewriteError(
                f"a program of {len(lines)} lines is cut before one of 1 to {len(lines) - 1}, not {position}"
            )
        self.program = program
        self.before = [line for line in lines[:position] if not is_plain_free(line)]
        self.after = [line for line in lines[position:] if not is_plain_free(line)]
        self._move_late_memory()
        self.root_of = roots(lines, program_arguments(program))
        self.made = {value.name: value for line in self.before for value in defined(line)}
        self._check()

    def _move_late_memory(self) -> None:
        """Moves memory into the second part that the first one makes and does nothing with."""
        touched = {value.name for line in self.before for value in used(line)}
        late = [line for line in self.before if isinstance(line, _MEMORY) and line.result.name not in touched]
        self.before = [line for line in self.before if line not in late]
        self.after = [*late, *self.after]

    def _check(self) -> None:
        if any(isinstance(line, Pool) for line in self.before):
            raise RewriteError("the first part has memory in pools: cut programs before memory is planned")
        open_brackets = sum(line.bracket[1] for line in self.before)
        flights = sum(line.starts_flight - line.ends_flight for line in self.before)
        if open_brackets or flights:
            what = "bracket" if open_brackets else "collective"
            raise RewriteError(f"a {what} is open at this place", print_line(self.after[0]).partition("\n")[0])
        known = {item.name for item in self.program.inputs}
        known |= {name for line in self.before for name in _symbol_of(line)}
        given = [*program_arguments(self.program), *self.made.values()]
        late = [name for value in given for name in _symbols_in(value) if name not in known]
        if late:
            text = print_line(self.after[0]).partition("\n")[0]
            raise RewriteError(f"symbol {late[0]} in types of the first part is defined after this place", text)

    def parts(self) -> Parts:
        shown = self._views_made_again()
        after = [*shown, *self.after]
        needed = {self.root_of[value.name] for line in after for value in used(line)}
        handed = [value for name, value in self.made.items() if self.root_of[name] == name and name in needed]
        numbers = self._symbols(after)
        late = {self.root_of[value.name] for line in after for value in used(line)}
        first_inputs, first = self._inputs(self.before, late)
        second_inputs, second = self._inputs(after, frozenset(), skip=frozenset(numbers))
        given = (*handed, *[make_symbol(name) for name in numbers])
        infos = symbol_infos(self.program)
        passed = [Input(value, Ownership.OWNED if holds_memory(value) else Ownership.BORROWED) for value in handed]
        passed += [Input(infos[name]) for name in numbers]
        one = self._program("first", first, [*self.before, Return(given)])
        other = self._program("second", [*second, *passed], after)
        return Parts(one, other, first_inputs, second_inputs)

    def _views_made_again(self) -> list[LineBase]:
        """Returns the views of the first part that the second one reads through, in order."""
        read = {value.name for line in self.after for value in used(line)}
        shown: list[LineBase] = []
        for line in reversed(self.before):
            for value in defined(line):
                if value.name not in read or self.root_of[value.name] == value.name:
                    continue
                if not isinstance(line, View):
                    text = print_line(line).partition("\n")[0]
                    raise RewriteError(f"%{value.name} is a window that cannot be made again in the second part", text)
                shown.append(line)
                read.add(line.base.name)
        return shown[::-1]

    def _symbols(self, after: Sequence[LineBase]) -> list[str]:
        """Returns the symbols that the first part defines, or is given, and the second one needs."""
        own = {item.name for item in self.program.inputs if isinstance(item.value, SymbolInfo)}
        known = own | {name for line in self.before for name in _symbol_of(line)}
        functions = dict(self.program.functions)
        names: set[str] = set()
        for line in after:
            names.update(symbol.name for symbol in symbols_used(line, *Role))
            names.update(outer_symbols(*run_blocks(line, functions), functions=functions, argument_types=True))
        values = [value for line in after for value in used(line)]
        names |= {name for value in values for name in _symbols_in(value)}
        return sorted(names & known)

    def _inputs(
        self, lines: Sequence[LineBase], late: Iterable[str], skip: frozenset[str] = frozenset()
    ) -> tuple[tuple[int, ...], list[Input]]:
        """Returns which of the program's inputs lines take, and as what; the first part takes all numbers.

        What the other part reads later is only borrowed here.
        """
        kept, written = set(late), {self.root_of[value.name] for line in lines for value in writes(line)}
        read = {self.root_of[value.name] for line in lines for value in used(line)}
        positions, inputs = [], []
        for position, item in enumerate(self.program.inputs):
            if not isinstance(item.value, Value):
                if not skip and lines is self.before:
                    positions.append(position)
                    inputs.append(item)
                continue
            released = item.ownership in (Ownership.OWNED, Ownership.SHARED)
            if item.name not in read and not (released and lines is self.before and item.name not in kept):
                continue
            ownership = item.ownership
            if item.name in kept and released:
                ownership = Ownership.MUTABLE if item.name in written else Ownership.BORROWED
            positions.append(position)
            inputs.append(Input(item.value, ownership))
        return tuple(positions), inputs

    def _program(self, name: str, inputs: Sequence[Input], lines: Sequence[LineBase]) -> Program:
        source = self.program
        read = {value.name for line in lines for value in used(line)}
        constants = tuple([item for item in source.constants if item.value.name in read])
        values = [item.value for item in inputs if isinstance(item.value, Value)]
        owned = [item.value for item in inputs if isinstance(item.value, Value)
                 and item.ownership in (Ownership.OWNED, Ownership.SHARED)]  # fmt: skip
        body = Block((), insert_frees(lines, [*values, *[item.value for item in constants]], owned))
        made = source.replace(name=f"{source.name}_{name}", inputs=tuple(inputs), body=body, constants=constants)
        launched = {getattr(line, field) for line in made.lines() for field, refers in line.target_fields
                    if refers == "kernel"}  # fmt: skip
        return verify(made.replace(kernels=tuple([item for item in source.kernels if item.name in launched])))


def _symbol_of(line: LineBase) -> list[str]:
    made = defined_symbol(line)
    return [] if made is None else [made.name]


def _symbols_in(value: Value) -> list[str]:
    return [symbol.name for symbol in type_symbols(value.type)]
