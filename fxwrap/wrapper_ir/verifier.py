"""The generic verifier: what every program must hold, read off the roles of its lines.

Rules, by the name an error carries:

- `name`: a name that the text form cannot hold. `undefined`: a value that is not there. `redefined`: a name used twice.
- `type`: types that disagree, negative or fractional sizes, an operand of the wrong kind, a root with an offset.
- `symbol`: a symbol before its definition. Those in the types of inputs and results may be defined by the symbol lines
  that follow directly (frees may stand between).
- `dead`: memory touched or taken after it was taken. `root`: a window taken instead of its root. `borrowed`: memory
  taken that is not owned. `readonly`: memory written that is neither owned nor mutable; a function writes arguments
  where its callers say so and may. `unwritten`: memory read before anything wrote it. `leak`: an owned root that is
  neither taken nor given back.
- `yield`: a block that gives back what it does not own, or one root twice. `terminator`: a block without its end.
- `bracket`: brackets that do not nest. `flight`: memory touched while a collective works on it, a missing wait.
- `race`: memory that work on another stream may still be at, since no event orders the two; see the module streams.
- `kernel`, `function`: a target that is not there or does not fit. `line`: a line that is wrong by itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from fxwrap.errors import ValueKindError, VerifyError
from fxwrap.symbolic import expression_kind
from fxwrap.wrapper_ir.analyses import is_release
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
    writes,
    wrong_field,
)
from fxwrap.wrapper_ir.printer import print_line
from fxwrap.wrapper_ir.program import Ownership, Program
from fxwrap.wrapper_ir.roles import Role
from fxwrap.wrapper_ir.streams import MAIN, StreamOrder, stream_device, stream_name, stream_of, uses_streams
from fxwrap.wrapper_ir.types import TensorType, Value, holds_memory

_CONSTANT = "constant"
_BORROWED, _MUTABLE = Ownership.BORROWED.value, Ownership.MUTABLE.value
_SHARED, _OWNED = Ownership.SHARED.value, Ownership.OWNED.value
_NAME = re.compile(r"\w+(\.\w+)*")


def verify(program: Program) -> Program:
    """Checks every rule of the IR and returns the program. Raises VerifyError for the first rule that is broken."""
    scope = _Scope(program)
    for name, function in program.functions:
        scope.free_symbols = set()
        walk = _BlockVerifier(scope, function, _borrowed(function.arguments), in_function=True)
        walk.run("block")
        scope.functions[name] = FunctionFacts(function, scope.free_symbols, walk.written_arguments)
    scope.free_symbols = None
    arguments: list[tuple[Value, str]] = []
    for item in program.inputs:
        if isinstance(item.value, Value):
            arguments.append((item.value, item.ownership.value))
        else:
            scope.symbols.add(item.name)
            scope.symbol_names.add(item.name)
    for constant in program.constants:
        arguments.append((constant.value, _MUTABLE if constant.mutable else _CONSTANT))
    _BlockVerifier(scope, program.body, arguments).run("program")
    return program


@dataclass(frozen=True)
class FunctionFacts:
    """A function, the symbols that it takes from where it is called, and which of its arguments it writes, by name."""

    block: Block
    symbols: set[str]
    written: set[str]

    @property
    def arguments(self) -> tuple[Value, ...]:
        """The function's arguments."""
        return self.block.arguments

    @property
    def lines(self) -> tuple[LineBase, ...]:
        """The function's lines."""
        return self.block.lines


def _borrowed(values: Iterable[Value]) -> list[tuple[Value, str]]:
    return [(value, _BORROWED) for value in values]


class _Scope:
    """What all blocks of a program have in common.

    `symbols` are those defined here and now, `symbol_names` all that ever were; `functions` those verified so far;
    `free_symbols` collects what a function takes from where it is called while it is verified.
    """

    def __init__(self, program: Program) -> None:
        self.names: set[str] = set()
        self.symbols: set[str] = set()
        self.symbol_names: set[str] = set()
        self.free_symbols: set[str] | None = None
        self.uses_streams = uses_streams(program)
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.functions: dict[str, FunctionFacts] = {}
        symbols = [item.name for item in program.inputs if not isinstance(item.value, Value)]
        for what, names in (
            ("kernel", [kernel.name for kernel in program.kernels]),
            ("function", [name for name, _ in program.functions]),
            ("symbol", symbols),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise VerifyError("redefined", f"{what} {twice[0]} is defined twice in program @{program.name}")


class _BlockVerifier:
    """The walk over one block: whose memory each value is a window on, and the state of that memory."""

    def __init__(
        self, scope: _Scope, block: Block, arguments: list[tuple[Value, str]], *, in_function: bool = False
    ) -> None:
        self.scope = scope
        self.in_function = in_function
        self.written_arguments: set[str] = set()  # of a function, whose callers must own what it writes
        self.block = block
        self.arguments = arguments
        self.position = 0
        self.values: dict[str, Value] = {}
        self.root_of: dict[str, str] = {}
        self.memory_of: dict[str, str] = {}  # as root_of, but each slice of a pool by itself
        self.ownership: dict[str, str] = {}  # by root
        self.dead: set[str] = set()  # roots
        self.written: set[str] = set()  # memories
        self.pending: dict[str, list[str]] = {}  # root in flight -> the roots it borrows
        self.borrows: Counter[str] = Counter()  # root -> flights that borrow it
        self.brackets: list[LineBase] = []
        self.awaited: list[str] = []  # symbols of types that the next lines must define
        self.own_symbols: list[str] = []
        self.streams = StreamOrder([value for value, _ in arguments]) if scope.uses_streams else None

    def run(self, terminator: str) -> None:
        lines = self.block.lines
        for value, ownership in self.arguments:
            self._define_root(value, ownership)
            self.written.add(value.name)
        ends = [index for index, line in enumerate(lines) if line.terminator]
        if ends != [len(lines) - 1] or lines[-1].terminator != terminator:
            self.position = ends[0] if ends else max(0, len(lines) - 1)
            what = "a program ends in control.return" if terminator == "program" else "a block ends in control.yield"
            self._fail("terminator", f"{what}, which stands nowhere else")
        for self.position, line in enumerate(lines):
            self._check_alone(line)
            self._check_symbols(line)
            self._check_operands(line)
            for _, nested in blocks(line):
                _BlockVerifier(self.scope, nested, _borrowed(nested.arguments)).run("block")
            self._define_results(line)
            if self.streams is not None:
                self._check_streams(line, self.streams)
        self._check_end(lines[-1], terminator)
        self.scope.symbols.difference_update(self.own_symbols)

    # --- a line by itself, and its symbols --------------------------------------------------------------------------

    def _check_alone(self, line: LineBase) -> None:
        try:
            reason = wrong_field(line) or line.verify_self()
        except ValueKindError as error:
            self._fail("type", str(error))
        if reason is not None:
            self._fail("line", reason)
        for field, refers in line.target_fields:
            self._check_target(line, getattr(line, field), refers)
        name, step = line.bracket
        if step > 0:
            self.brackets.append(line)
        elif step < 0 and not (self.brackets and _closes(self.brackets.pop(), line)):
            self._fail("bracket", f"a {name} is closed that was not opened last")

    def _check_target(self, line: LineBase, name: str, refers: str) -> None:
        target: Any = None
        if refers == "kernel":
            target = self.scope.kernels.get(name)
        elif name in self.scope.functions:
            target = self.scope.functions[name]
            for symbol in target.symbols:
                self._use_symbol(symbol, f"function @{name} uses symbol {symbol}, which no line before defines")
            self._check_written_apart(line)
        if target is None:
            order = "; a function calls only those before it" if refers == "function" else ""
            self._fail(refers, f"the program defines no {refers} @{name}{order}")
        reason = line.verify_target(target)
        if reason is not None:
            self._fail(refers, f"@{name}: {reason}")

    def _check_written_apart(self, line: LineBase) -> None:
        """Each operand is memory of its own to a function, so what it writes may be no other operand's too."""
        written = writes(line)
        if not written:
            return
        count = Counter([self.root_of.get(value.name) for value in reads(line)])
        for value in written:
            if count[self.root_of.get(value.name)] > 1:
                self._fail("function", f"%{value.name} is written, and another operand is the same memory")

    def _check_symbols(self, line: LineBase) -> None:
        made = defined_symbol(line)
        if self.awaited and made is None and not is_release(line):
            for name in self.awaited:
                self._use_symbol(name, f"symbol {name} is in a type, but no line that follows directly defines it")
            self.awaited.clear()
        for symbol in symbols_used(line, Role.READ, Role.WRITE, Role.CONSUME, Role.ATTR):
            self._use_symbol(symbol.name, f"symbol {symbol.name} is used before a line defines it")
        if made is not None:
            if made.name in self.scope.symbol_names or made.name in (self.scope.free_symbols or ()):
                self._fail("redefined", f"symbol {made.name} is defined twice")
            self.scope.symbol_names.add(made.name)
            self.scope.symbols.add(made.name)
            self.own_symbols.append(made.name)

    def _use_symbol(self, name: str, reason: str) -> None:
        if name in self.scope.symbols:
            return
        if self.scope.free_symbols is None or name in self.scope.symbol_names:
            self._fail("symbol", reason)
        self.scope.free_symbols.add(name)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _check_operands(self, line: LineBase) -> None:
        read, written = reads(line), writes(line)
        for value in read:
            self._touch(line, value)
        for value in written:
            self._check_writable(line, value)
        for value in consumed(line):
            self._take(line, value)
        if not line.alias_fields:  # a line that only renames memory does not read it
            self._check_content(read, written)
        self.written.update([self.memory_of[value.name] for value in written])
        if line.ends_flight:
            for value in read:
                self._land(value)

    def _touch(self, line: LineBase, value: Value) -> str:
        root = self.root_of.get(value.name)
        if root is None:
            self._fail("undefined", f"%{value.name} is not defined here; a block sees its arguments and its own values")
        known = self.values[value.name]
        if known is not value and known.type != value.type:
            self._fail("type", f"%{value.name} is used with another type than it was defined with")
        if root in self.dead:
            self._fail("dead", f"%{value.name} is used after its memory, %{root}, was taken")
        if root in self.pending and not line.ends_flight:
            self._fail("flight", f"%{value.name} is touched while it is in flight; wait for it first")
        return root

    def _check_writable(self, line: LineBase, value: Value) -> None:
        root = self._touch(line, value)
        ownership = self.ownership[root]
        if self.in_function and ownership == _BORROWED:
            self.written_arguments.add(root)
        elif ownership not in (_OWNED, _MUTABLE):
            self._fail("readonly", f"%{value.name} is written but its memory, %{root}, is {ownership}")
        if self.borrows[root]:
            self._fail("flight", f"%{value.name} is written while a collective still reads it")

    def _take(self, line: LineBase, value: Value) -> None:
        root = self._touch(line, value)
        ownership = self.ownership[root]
        if root != value.name:
            self._fail("root", f"%{value.name} is a window on %{root}; only the root can be taken")
        # A shared input may be dropped, but others still see its memory: a line that makes something of it may not.
        if ownership != _OWNED and (ownership != _SHARED or defined(line)):
            self._fail("borrowed", f"%{value.name} is {ownership} and cannot be taken by {line.opcode}")
        if self.borrows[root]:
            self._fail("flight", f"%{value.name} is taken while a collective still reads it")
        self.dead.add(root)

    def _check_content(self, read: list[Value], written: list[Value]) -> None:
        for value in read:
            memory = self.memory_of[value.name]
            if memory not in self.written and all(self.memory_of[other.name] != memory for other in written):
                self._fail("unwritten", f"%{value.name} is read but nothing has written it")

    def _land(self, value: Value) -> None:
        root = self.root_of[value.name]
        if root not in self.pending:
            self._fail("flight", f"%{value.name} is not in flight")
        self.borrows.subtract(self.pending.pop(root))

    # --- streams ----------------------------------------------------------------------------------------------------

    def _check_streams(self, line: LineBase, streams: StreamOrder) -> None:
        for found in streams.conflicts(line):
            what = "written" if found.was_write else "read"
            still = f"work on {stream_name(found.earlier)} may still be under way, by which it is {what}"
            remedy = f"record an event there and wait for it on {stream_name(found.later)}"
            self._fail("race", f"%{found.value} is touched on {stream_name(found.later)} while {still}; {remedy}")
        guard = next((opened for opened in reversed(self.brackets) if getattr(opened, "stream", 0)), None)
        needs_none = line.on_host or is_release(line) or (bool(line.event_step) and stream_of(line) != MAIN)
        if guard is not None and not line.bracket[1] and not needs_none:
            entered = stream_of(guard)
            if str(getattr(line, "device", None) or stream_device(line)) == entered[0] and stream_of(line) != entered:
                where = f"runs on {stream_name(stream_of(line))} where {stream_name(entered)} is made current"
                self._fail("race", f"a line of '{line.opcode}' {where}; put it outside of the guard")
        streams.add(line, self.position)

    # --- definitions ------------------------------------------------------------------------------------------------

    def _define_results(self, line: LineBase) -> None:
        has_content = line.starts_written or getattr(line, "zeroed", False)
        for value in defined(line):
            base = line.alias_of(value)
            if base is None:
                self._define_root(value, _OWNED)
            else:
                self._define(value, self.root_of[base.name], self.memory_of[base.name] if has_content else value.name)
            if has_content:
                self.written.add(self.memory_of[value.name])
            if line.starts_flight:
                root = self.root_of[value.name]
                borrowed = [self.root_of[operand.name] for operand in reads(line)]
                self.pending[root] = [other for other in borrowed if other != root]
                self.borrows.update(self.pending[root])

    def _define_root(self, value: Value, ownership: str) -> None:
        self._define(value, value.name, value.name)
        self.ownership[value.name] = ownership

    def _define(self, value: Value, root: str, memory: str) -> None:
        name, type_ = value.name, value.type
        if name in self.scope.names:
            self._fail("redefined", f"%{name} is defined twice")
        if not name.isidentifier() and not _NAME.fullmatch(name):
            self._fail("name", f"%{name} is no name; one has letters, digits and underscores, in parts joined by dots")
        self.scope.names.add(name)
        self.values[name] = value
        self.root_of[name] = root
        self.memory_of[name] = memory
        if not isinstance(type_, TensorType):
            self.awaited.extend([symbol.name for symbol in type_symbols(type_)])
            return
        if memory == name and type_.storage_offset != 0:
            self._fail("type", f"%{name} is new memory: an offset counts from its own first element, so it is 0")
        for size in type_.sizes:
            if size < 0 if type(size) is int else expression_kind(size) != "int":
                self._fail("type", f"%{name} has the size {size}; one is an integer that is not negative")
        self.awaited.extend([symbol.name for symbol in type_symbols(type_)])

    # --- the end ----------------------------------------------------------------------------------------------------

    def _check_end(self, line: LineBase, terminator: str) -> None:
        if self.brackets:
            self._fail("bracket", f"a {self.brackets[-1].bracket[0]} is never closed")
        if self.pending:
            self._fail("flight", f"nothing waits for %{next(iter(self.pending))}")
        roots = Counter([self.root_of[value.name] for value in reads(line) if holds_memory(value)])
        for name, ownership in self.ownership.items():
            if not holds_memory(self.values[name]):
                continue
            if ownership in (_OWNED, _SHARED) and name not in self.dead and name not in roots:
                self._fail("leak", f"%{name} is neither freed nor given back")
        for name, count in roots.items() if terminator == "block" else ():
            if self.ownership[name] != _OWNED:
                self._fail("yield", f"%{name} is {self.ownership[name]}; a block yields what it owns, so yield a clone")
            if count > 1:
                self._fail("yield", f"%{name} is yielded twice; each result has memory of its own, so yield a clone")

    def _fail(self, rule: str, reason: str) -> NoReturn:
        lines = self.block.lines
        first = max(0, self.position - 2)
        context = []
        for index, line in enumerate(lines[first : self.position + 2], start=first):
            text = print_line(line).partition("\n")[0]
            context.append(("> " if index == self.position else "  ") + text)
        raise VerifyError(rule, reason, "\n".join(context))


def _closes(opening: LineBase, closing: LineBase) -> bool:
    """Whether a bracket pairs with another: the same kind, with equal attributes."""
    return opening.bracket[0] == closing.bracket[0] and all(
        getattr(opening, name) == getattr(closing, name) for name in closing.fields_by_role[Role.ATTR]
    )
