"""The generic verifier: what every program must hold, read off the roles of its lines.

Rules, by the name an error carries: `undefined`, `redefined`, `type`, `symbol`, `dead` (use after free, double free),
`borrowed` (freed but not owned), `root` (consumed through a view), `readonly`, `unwritten`, `leak`, `yield`,
`terminator`, `bracket`, `flight`, `kernel`, `function`, `line` (a line that is wrong by itself).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fxwrap.errors import VerifyError
from fxwrap.wrapper_ir.line import Block, LineBase, blocks, consumed, defined, defined_symbol, reads, symbols_used, type_symbols, used, writes
from fxwrap.wrapper_ir.printer import print_line
from fxwrap.wrapper_ir.program import Program
from fxwrap.wrapper_ir.roles import Role
from fxwrap.wrapper_ir.types import Value

_CONSTANT, _BORROWED, _WRITABLE, _SHARED, _OWNED = "constant", "borrowed", "mutable", "shared", "owned"
_CONSUMABLE = (_OWNED, _SHARED)
_WRITABLES = (_OWNED, _WRITABLE)


def verify(program: Program) -> Program:
    """Checks every rule of the IR and returns the program. Raises VerifyError for the first that is broken."""
    shared = _Shared(program)
    arguments = [
        (item.value, item.ownership.value) for item in program.inputs if isinstance(item.value, Value)
    ] + [(constant.value, _WRITABLE if constant.mutable else _CONSTANT) for constant in program.constants]
    for item in program.inputs:
        if not isinstance(item.value, Value):
            shared.symbols.add(item.name)
    _BlockVerifier(shared, program.body, arguments, is_program=True).run()
    for _, function in program.functions:
        _BlockVerifier(shared, function, [(value, _BORROWED) for value in function.arguments]).run()
    return program


class _Shared:
    """What all blocks of a program have in common: names taken so far, symbols, kernels and functions."""

    def __init__(self, program: Program) -> None:
        self.names: set[str] = set()
        self.symbols: set[str] = set()
        self.known = {
            "kernel": {kernel.name for kernel in program.kernels},
            "function": {name for name, _ in program.functions},
        }


@dataclass
class _Root:
    """The state of one root's memory while walking a block."""

    ownership: str
    live: bool = True


@dataclass
class _BlockVerifier:
    shared: _Shared
    block: Block
    arguments: Iterable[tuple[Value, str]]
    is_program: bool = False
    types: dict[str, Value] = field(default_factory=dict)
    root_of: dict[str, str] = field(default_factory=dict)
    roots: dict[str, _Root] = field(default_factory=dict)
    memory_of: dict[str, str] = field(default_factory=dict)  # as root_of, but each slice of a pool by itself
    written: set[str] = field(default_factory=set)
    in_flight: dict[str, set[str]] = field(default_factory=dict)  # pending root -> roots it borrows
    brackets: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    position: int = 0

    def run(self) -> None:
        outer_symbols = set(self.shared.symbols)
        for value, ownership in self.arguments:
            self._define(value)
            self.awaited.extend(symbol.name for symbol in type_symbols(value.type))
            self.roots[value.name] = _Root(ownership)
            self.written.add(value.name)
        lines = self.block.lines
        if not lines or not lines[-1].terminator or any(line.terminator for line in lines[:-1]):
            self.position = max(0, len(lines) - 1)
            self._fail("terminator", "a block ends in control.yield or control.return, and has no other")
        for self.position, line in enumerate(lines):  # noqa: B007
            self._line(line)
        self._end(lines[-1])
        if not self.is_program:
            self.shared.symbols &= outer_symbols

    def _line(self, line: LineBase) -> None:
        reason = line.verify_self()
        if reason is not None:
            self._fail("line", reason)
        self._check_symbols(line)
        self._check_uses(line)
        for _, nested in blocks(line):
            _BlockVerifier(self.shared, nested, [(value, _BORROWED) for value in nested.arguments]).run()
        self._apply(line)

    def _check_symbols(self, line: LineBase) -> None:
        made = defined_symbol(line)
        if made is None:
            self._check_awaited()
        for symbol in symbols_used(line, Role.DEFINE):
            self.awaited.append(symbol.name)
        for symbol in symbols_used(line, Role.READ, Role.WRITE, Role.CONSUME, Role.ATTR):
            if symbol.name not in self.shared.symbols:
                self._fail("symbol", f"symbol {symbol.name} is used before a line defines it")
        if made is not None:
            if made.name in self.shared.symbols:
                self._fail("redefined", f"symbol {made.name} is defined twice")
            self.shared.symbols.add(made.name)
        for spec in line.specs:
            if spec.refers and spec.refers != "operator" and getattr(line, spec.name) not in self.shared.known[spec.refers]:
                self._fail(spec.refers, f"the program defines no {spec.refers} @{getattr(line, spec.name)}")

    def _check_awaited(self) -> None:
        """Symbols in the types of inputs and results may be defined by the symbol lines that follow directly."""
        for name in self.awaited:
            if name not in self.shared.symbols:
                self._fail("symbol", f"symbol {name} is in a type, but no line that follows directly defines it")
        self.awaited.clear()

    def _check_uses(self, line: LineBase) -> None:
        for value in used(line):
            known = self.types.get(value.name)
            if known is None:
                self._fail("undefined", f"%{value.name} is not defined here")
            elif known is not value and known.type != value.type:
                self._fail("type", f"%{value.name} is used with another type than it was defined with")
            root = self.root_of[value.name]
            if not self.roots[root].live:
                self._fail("dead", f"%{value.name} is used after its memory, %{root}, was taken")
            if root in self.in_flight and not line.ends_flight:
                self._fail("flight", f"%{value.name} is touched before collective.wait")
        written = [self.memory_of[value.name] for value in writes(line)]
        for value in reads(line):
            memory = self.memory_of[value.name]
            if memory not in self.written and memory not in written and not self._only_renames(line):
                self._fail("unwritten", f"%{value.name} is read but nothing has written it")
        borrowed_in_flight = set().union(*self.in_flight.values()) if self.in_flight else set()
        for value in writes(line):
            self._check_taken(value, borrowed_in_flight)
            if self.roots[self.root_of[value.name]].ownership not in _WRITABLES:
                ownership = self.roots[self.root_of[value.name]].ownership
                self._fail("readonly", f"%{value.name} is written but its memory is {ownership}")
        for value in consumed(line):
            self._check_taken(value, borrowed_in_flight)
            self._check_consumed(line, value)

    def _check_taken(self, value: Value, borrowed_in_flight: set[str]) -> None:
        if self.root_of[value.name] in borrowed_in_flight:
            self._fail("flight", f"%{value.name} is written or taken while a collective still reads it")

    def _check_consumed(self, line: LineBase, value: Value) -> None:
        root = self.root_of[value.name]
        if root != value.name:
            self._fail("root", f"%{value.name} is a window on %{root}; only the root can be taken")
        ownership = self.roots[root].ownership
        reusable = _CONSUMABLE if not any(True for _ in defined(line)) else (_OWNED,)
        if ownership not in reusable:
            self._fail("borrowed", f"%{value.name} is {ownership} and cannot be taken by {line.opcode}")

    @staticmethod
    def _only_renames(line: LineBase) -> bool:
        """A line whose result is a window on what it reads does not read the memory itself."""
        return any(spec.alias for spec in line.specs) and not line.ends_flight

    def _apply(self, line: LineBase) -> None:
        for value in consumed(line):
            self.roots[value.name].live = False
        for value in writes(line):
            self.written.add(self.memory_of[value.name])
        has_content = all(spec.written for spec in line.specs) or getattr(line, "zeroed", False)
        for value in defined(line):
            base = line.alias_of(value)
            self._define(value, base)
            if base is None:
                self.roots[value.name] = _Root(_OWNED)
                if line.starts_flight:
                    self.in_flight[value.name] = {self.root_of[operand.name] for operand in used(line)}
            elif not has_content:
                self.memory_of[value.name] = value.name
            if base is None and has_content:
                self.written.add(value.name)
        if line.ends_flight:
            for value in reads(line):
                self.in_flight.pop(self.root_of[value.name], None)
        self._apply_bracket(line)

    def _apply_bracket(self, line: LineBase) -> None:
        name, step = line.bracket
        if step > 0:
            self.brackets.append(name)
        elif step < 0 and (not self.brackets or self.brackets.pop() != name):
            self._fail("bracket", f"a {name} is closed that was not opened last")

    def _define(self, value: Value, base: Value | None = None) -> None:
        if value.name in self.shared.names:
            self._fail("redefined", f"%{value.name} is defined twice")
        self.shared.names.add(value.name)
        self.types[value.name] = value
        self.root_of[value.name] = self.root_of[base.name] if base is not None else value.name
        self.memory_of[value.name] = self.memory_of[base.name] if base is not None else value.name

    def _end(self, line: LineBase) -> None:
        released = {self.root_of[value.name] for value in reads(line)}
        for name, root in self.roots.items():
            if root.ownership in _CONSUMABLE and root.live and name not in released:
                self._fail("leak", f"%{name} is neither freed nor given back")
        if not self.is_program:
            for name in released:
                if self.roots[name].ownership != _OWNED:
                    self._fail("yield", f"%{name} is {self.roots[name].ownership}; a block yields what it owns")
        if self.brackets:
            self._fail("bracket", f"a {self.brackets[-1]} is never closed")
        if self.in_flight:
            self._fail("flight", f"nothing waits for %{next(iter(self.in_flight))}")

    def _fail(self, rule: str, reason: str) -> None:
        lines = self.block.lines
        first = max(0, self.position - 2)
        context = []
        for index, line in enumerate(lines[first : self.position + 2], start=first):
            text = print_line(line).partition("\n")[0]
            context.append(("> " if index == self.position else "  ") + text)
        raise VerifyError(rule, reason, "\n".join(context))
