"""Split of a program into two that run one after the other, on two devices or in two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxwrap import wrapper_ir as ir
from fxwrap.errors import RewriteError
from fxwrap.lines import Alloc, Pool, Return, Reuse, View, Workspace
from fxwrap.lines.frees import insert_frees
from fxwrap.matching import is_movable_free
from fxwrap.symbolic import SymbolInfo, make_symbol

BoxedCallable = Callable[[list[object]], Sequence[object]]
"""Runs a program on a list of its flat inputs, and empties the list."""


@dataclass(frozen=True)
class ProgramSplit:
    """The two parts of a program; results of the first are the last inputs of the second.

    `first_inputs` and `second_inputs` are the positions of the program's inputs that the parts take, in order.
    """

    first: ir.Program
    second: ir.Program
    first_inputs: tuple[int, ...]
    second_inputs: tuple[int, ...]

    def run(self, inputs: Sequence[object], first: BoxedCallable, second: BoxedCallable) -> Sequence[object]:
        """Runs the parts by their entries (`boxed` of emitted programs); returns the program's outputs.

        Wrap the entries to move intermediate values to another device.
        """
        second_inputs = [inputs[position] for position in self.second_inputs]
        second_inputs += first([inputs[position] for position in self.first_inputs])
        return second(second_inputs)


def split(program: ir.Program, position: int) -> ProgramSplit:
    """Splits a program before the line at a position of its body.

    The first part returns the memory and symbols that the second one needs; the second part owns that memory. Views are
    rematerialised, frees inserted again. Raises RewriteError for a position inside of a bracket, or between the start
    and the wait of a collective.
    """
    return _Split(program, position).parts()


_MEMORY = (Alloc, Reuse, Workspace)


class _Split:
    def __init__(self, program: ir.Program, position: int) -> None:
        lines = program.body.lines
        if not 0 < position < len(lines):
            raise RewriteError(
                f"a program of {len(lines)} lines is split before one of lines 1 to {len(lines) - 1}, not {position}"
            )
        self.program = program
        self.before = [line for line in lines[:position] if not is_movable_free(line)]
        self.after = [line for line in lines[position:] if not is_movable_free(line)]
        self._sink_allocations()
        self.root_of = ir.alias_roots(lines, ir.program_arguments(program))
        self.defined = {value.name: value for line in self.before for value in ir.defined(line)}
        self._check()

    def _sink_allocations(self) -> None:
        """Moves allocations that the first part does not use into the second part."""
        accessed = {value.name for line in self.before for value in ir.used(line)}
        late = [line for line in self.before if isinstance(line, _MEMORY) and line.result.name not in accessed]
        self.before = [line for line in self.before if line not in late]
        self.after = [*late, *self.after]

    def _check(self) -> None:
        if any(isinstance(line, Pool) for line in self.before):
            raise RewriteError("the first part has memory in pools: split programs before memory planning")
        open_brackets = sum(line.bracket[1] for line in self.before)
        if open_brackets or self._in_flight():
            what = "bracket" if open_brackets else "collective"
            raise RewriteError(f"a {what} is open at this position", ir.line_text(self.after[0]))
        known = {item.name for item in self.program.inputs}
        known |= {name for line in self.before for name in _symbol_of(line)}
        values = [*ir.program_arguments(self.program), *self.defined.values()]
        late = [name for value in values for name in _symbols_in(value) if name not in known]
        if late:
            reason = f"symbol {late[0]} in types of the first part is defined after this position"
            raise RewriteError(reason, ir.line_text(self.after[0]))

    def _in_flight(self) -> set[str]:
        """Returns the roots whose collectives the first part starts and does not wait for."""
        roots: set[str] = set()
        for line in self.before:
            if line.is_async_start:
                roots.update([self.root_of[value.name] for value in ir.defined(line)])
            if line.is_async_wait:
                roots.difference_update([self.root_of[value.name] for value in ir.reads(line)])
        return roots

    def parts(self) -> ProgramSplit:
        after = [*self._rematerialised_views(), *self.after]
        needed = {self.root_of[value.name] for line in after for value in ir.used(line)}
        roots = [value for name, value in self.defined.items() if self.root_of[name] == name and name in needed]
        symbols = self._symbols(after)
        first_inputs, first = self._inputs(self.before, needed)
        second_inputs, second = self._inputs(after, frozenset(), skip=frozenset(symbols))
        results = (*roots, *[make_symbol(name) for name in symbols])
        infos = ir.symbol_infos(self.program)
        second += [
            ir.Input(value, ir.Ownership.OWNED if ir.holds_memory(value) else ir.Ownership.BORROWED) for value in roots
        ]
        second += [ir.Input(infos[name]) for name in symbols]
        first_program = self._program("first", first, [*self.before, Return(results)])
        return ProgramSplit(first_program, self._program("second", second, after), first_inputs, second_inputs)

    def _rematerialised_views(self) -> list[ir.LineBase]:
        """Returns the views of the first part that the second one uses, in order."""
        read = {value.name for line in self.after for value in ir.used(line)}
        views: list[ir.LineBase] = []
        for line in reversed(self.before):
            for value in ir.defined(line):
                if value.name not in read or self.root_of[value.name] == value.name:
                    continue
                if not isinstance(line, View):
                    reason = f"%{value.name} is an alias that cannot be rematerialised in the second part"
                    raise RewriteError(reason, ir.line_text(line))
                views.append(line)
                read.add(line.base.name)
        return views[::-1]

    def _symbols(self, after: Sequence[ir.LineBase]) -> list[str]:
        """Returns the symbols that the first part defines or takes, and the second one needs."""
        own = {item.name for item in self.program.inputs if isinstance(item.value, SymbolInfo)}
        known = own | {name for line in self.before for name in _symbol_of(line)}
        functions = dict(self.program.functions)
        names: set[str] = set()
        for line in after:
            names.update(symbol.name for symbol in ir.symbols_used(line, *ir.Role))
            executed = ir.executed_blocks(line, functions)
            names.update(ir.captured_symbols(*executed, functions=functions, argument_types=True))
        values = [value for line in after for value in ir.used(line)]
        names |= {name for value in values for name in _symbols_in(value)}
        return sorted(names & known)

    def _inputs(
        self, lines: Sequence[ir.LineBase], late: Iterable[str], skip: frozenset[str] = frozenset()
    ) -> tuple[tuple[int, ...], list[ir.Input]]:
        """Returns the positions and declarations of the program's inputs that lines use.

        The first part takes all numbers, and borrows the inputs that the second one reads (`late`).
        """
        borrowed, written = set(late), {self.root_of[value.name] for line in lines for value in ir.writes(line)}
        read = {self.root_of[value.name] for line in lines for value in ir.used(line)}
        positions, inputs = [], []
        for position, item in enumerate(self.program.inputs):
            if not isinstance(item.value, ir.Value):
                if not skip and lines is self.before:
                    positions.append(position)
                    inputs.append(item)
                continue
            released = item.ownership in (ir.Ownership.OWNED, ir.Ownership.SHARED)
            if item.name not in read and not (released and lines is self.before and item.name not in borrowed):
                continue
            ownership = item.ownership
            if item.name in borrowed and released:
                ownership = ir.Ownership.MUTABLE if item.name in written else ir.Ownership.BORROWED
            positions.append(position)
            inputs.append(ir.Input(item.value, ownership))
        return tuple(positions), inputs

    def _program(self, name: str, inputs: Sequence[ir.Input], lines: Sequence[ir.LineBase]) -> ir.Program:
        source = self.program
        read = {value.name for line in lines for value in ir.used(line)}
        constants = tuple([item for item in source.constants if item.value.name in read])
        values = [item.value for item in inputs if isinstance(item.value, ir.Value)]
        owned = [item.value for item in inputs if isinstance(item.value, ir.Value)
                 and item.ownership in (ir.Ownership.OWNED, ir.Ownership.SHARED)]  # fmt: skip
        body = ir.Block((), insert_frees(lines, [*values, *[item.value for item in constants]], owned))
        part = source.replace(name=f"{source.name}_{name}", inputs=tuple(inputs), body=body, constants=constants)
        launched = {getattr(line, field) for line in part.lines() for field, target_kind in line.target_fields
                    if target_kind == "kernel"}  # fmt: skip
        return ir.verify(part.replace(kernels=tuple([item for item in source.kernels if item.name in launched])))


def _symbol_of(line: ir.LineBase) -> list[str]:
    symbol = ir.defined_symbol(line)
    return [] if symbol is None else [symbol.name]


def _symbols_in(value: ir.Value) -> list[str]:
    return [symbol.name for symbol in ir.type_symbols(value.type)]
