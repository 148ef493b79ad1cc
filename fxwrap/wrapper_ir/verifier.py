"""The generic verifier, which checks every program by the roles of its lines' fields.

Rules, by the name in an error:

- `name`: a name that the text form cannot represent. `undefined`: a value that is not defined. `redefined`: a name
  defined twice.
- `type`: disagreeing types, negative or fractional sizes, an operand of the wrong kind, a root with an offset.
- `bounds`: a view, pool slice or reuse beyond the end of its memory, as far as sizes are constant.
- `symbol`: a symbol used before its definition. Symbols in the types of inputs and results may be defined by the symbol
  lines that directly follow, also after frees.
- `consumed`: memory used after it was consumed. `root`: an alias consumed instead of its root. `borrowed`: memory
  consumed that is not owned. `readonly`: memory written that is neither owned nor mutable; a function may write
  arguments that its callers declare as written. `uninitialized`: memory read before it is written. `leak`: an owned
  root that is neither consumed nor returned.
- `yield`: a block that yields a value that it does not own, or one root twice. `terminator`: a missing or misplaced
  terminator.
- `bracket`: brackets that do not nest. `async`: memory used while a collective is in flight, or a missing wait.
- `race`: memory used while work on another stream may use it, since no event orders the two; see streams.py.
- `dependent`: a dependent launch that may run before what it needs; see dependent_launches.py.
- `overlap`: a launch that writes one memory through two of its tensors, or reads through one what it writes through
  another, as far as types decide it; see overlaps.py. Kernels that a user wrote may.
- `kernel`, `function`: a target that is not defined or does not match. `line`: a line that is invalid by itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from fxwrap.devices import language_traits
from fxwrap.errors import ValueKindError, VerifyError
from fxwrap.symbolic import Size, expression_kind, total
from fxwrap.wrapper_ir.analyses import is_release
from fxwrap.wrapper_ir.dependent_launches import LaunchChain, early_reads, kernel_name
from fxwrap.wrapper_ir.line import (
    Block,
    FunctionSummary,
    LineBase,
    blocks,
    consumed,
    defined,
    defined_symbol,
    field_type_error,
    reads,
    symbols_used,
    type_symbols,
    writes,
)
from fxwrap.wrapper_ir.overlaps import Access, certain_overlap
from fxwrap.wrapper_ir.printer import line_text
from fxwrap.wrapper_ir.program import Ownership, Program, check_program
from fxwrap.wrapper_ir.roles import Role
from fxwrap.wrapper_ir.streams import CURRENT_STREAM, StreamOrder, stream_device, stream_name, stream_of, uses_streams
from fxwrap.wrapper_ir.types import TensorType, Value, holds_memory

_CONSTANT = "constant"
_BORROWED, _MUTABLE = Ownership.BORROWED.value, Ownership.MUTABLE.value
_SHARED, _OWNED = Ownership.SHARED.value, Ownership.OWNED.value
_LIMIT = 1 << 63
_NAME = re.compile(r"\w+(\.\w+)*")


def verify(program: Program) -> Program:
    """Checks every rule of the IR and returns the program.

    Raises VerifyError for the first violation, and ArgumentError for another object than a program.
    """
    check_program("fxwrap.verify", program)
    scope = _Scope(program)
    for name, function in program.functions:
        scope.free_symbols = set()
        walk = _BlockVerifier(scope, function, _borrowed(function.arguments), in_function=True)
        walk.run("block")
        scope.functions[name] = FunctionSummary(function, scope.free_symbols, walk.written_arguments)
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


def _borrowed(values: Iterable[Value]) -> list[tuple[Value, str]]:
    return [(value, _BORROWED) for value in values]


class _Scope:
    """The state shared by all blocks of a program.

    `symbols` are the visible symbols, `symbol_names` all symbols defined so far, `functions` the functions verified so
    far. `free_symbols` collects the free symbols of the function that is being verified.
    """

    def __init__(self, program: Program) -> None:
        self.names: set[str] = set()
        self.symbols: set[str] = set()
        self.symbol_names: set[str] = set()
        self.free_symbols: set[str] | None = None
        self.uses_streams = uses_streams(program)
        self.has_dependent_launches = any(line.dependent for line in program.lines())
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.user_kernels = {kernel.name for kernel in program.kernels if language_traits(kernel.language).user_defined}
        self.functions: dict[str, FunctionSummary] = {}
        symbols = [item.name for item in program.inputs if not isinstance(item.value, Value)]
        for what, names in (
            ("kernel", [kernel.name for kernel in program.kernels]),
            ("function", [name for name, _ in program.functions]),
            ("symbol", symbols),
        ):
            repeated = [name for name, count in Counter(names).items() if count > 1]
            if repeated:
                raise VerifyError("redefined", f"{what} {repeated[0]} is defined twice in program @{program.name}")


class _BlockVerifier:
    """Verifies one block: tracks the root of each value and the state of its memory."""

    def __init__(
        self, scope: _Scope, block: Block, arguments: list[tuple[Value, str]], *, in_function: bool = False
    ) -> None:
        self.scope = scope
        self.in_function = in_function
        self.written_arguments: set[str] = set()  # of a function, by name
        self.block = block
        self.arguments = arguments
        self.position = 0
        self.values: dict[str, Value] = {}
        self.root_of: dict[str, str] = {}
        self.memory_of: dict[str, str] = {}  # by value: the root, or the slice of a pool
        self.slice_starts: dict[str, Size] = {}  # by slice of a pool: its first byte there
        self.ownership: dict[str, str] = {}  # by root
        self.consumed: set[str] = set()  # roots
        self.written: set[str] = set()  # as in memory_of
        self.memory_bytes: dict[str, int | None] = {}  # of the memory in memory_of; None where symbols decide
        self.external = {value.name for value, _ in arguments}  # a caller may have started their collectives
        self.started: set[str] = set()  # memory, as in memory_of, that is or was in flight
        self.pending: dict[str, list[str]] = {}  # by memory in flight: the memory and the roots that it borrows
        self.borrows: Counter[str] = Counter()  # by memory and root: the collectives in flight that borrow it
        self.brackets: list[LineBase] = []
        self.undefined_symbols: list[str] = []  # in types; the next lines must define them
        self.own_symbols: list[str] = []
        self.streams = StreamOrder([value for value, _ in arguments]) if scope.uses_streams else None
        self.chain = LaunchChain() if scope.has_dependent_launches else None

    def run(self, terminator: str) -> None:
        lines = self.block.lines
        for value, ownership in self.arguments:
            self._define_root(value, ownership)
            self.written.add(value.name)
            if isinstance(value.type, TensorType):
                self._extend_memory(value.name, value.type)
        ends = [index for index, line in enumerate(lines) if line.terminator]
        if ends != [len(lines) - 1] or lines[-1].terminator != terminator:
            self.position = ends[0] if ends else max(0, len(lines) - 1)
            what = "a program ends in control.return" if terminator == "program" else "a block ends in control.yield"
            self._fail("terminator", f"{what}, its only terminator")
        for self.position, line in enumerate(lines):
            self._check_line(line)
            self._check_symbols(line)
            self._check_operands(line)
            for _, nested in blocks(line):
                _BlockVerifier(self.scope, nested, _borrowed(nested.arguments)).run("block")
            self._define_results(line)
            if self.streams is not None:
                self._check_streams(line, self.streams)
            if self.chain is not None:
                self._check_chain(line, self.chain)
        self._check_end(lines[-1], terminator)
        self.scope.symbols.difference_update(self.own_symbols)

    # --- a line by itself, and its symbols --------------------------------------------------------------------------

    def _check_line(self, line: LineBase) -> None:
        try:
            reason = field_type_error(line) or line.verify_self()
        except ValueKindError as error:
            self._fail("type", str(error))
        if reason is not None:
            self._fail("line", reason)
        for field, target_kind in line.target_fields:
            self._check_target(line, getattr(line, field), target_kind)
        name, step = line.bracket
        if step > 0:
            self.brackets.append(line)
        elif step < 0 and not (self.brackets and _closes(self.brackets.pop(), line)):
            self._fail("bracket", f"this closes a {name} that is not the innermost open bracket")

    def _check_target(self, line: LineBase, name: str, target_kind: str) -> None:
        if target_kind == "kernel":
            if name not in self.scope.kernels:
                self._fail("kernel", f"the program defines no kernel @{name}")
            reason = line.verify_kernel(self.scope.kernels[name].signature)
        else:
            if name not in self.scope.functions:
                self._fail("function", f"no function @{name} is defined before; a function calls only earlier ones")
            function = self.scope.functions[name]
            for symbol in function.symbols:
                self._use_symbol(symbol, f"function @{name} uses symbol {symbol}, which no earlier line defines")
            self._check_writes_not_aliased(line)
            reason = line.verify_function(function)
        if reason is not None:
            self._fail(target_kind, f"@{name}: {reason}")

    def _check_writes_not_aliased(self, line: LineBase) -> None:
        """Checks that no written operand aliases another operand, since a function's arguments never alias."""
        written = writes(line)
        if not written:
            return
        count = Counter([self.root_of.get(value.name) for value in reads(line)])
        for value in written:
            if count[self.root_of.get(value.name)] > 1:
                self._fail("function", f"%{value.name} is written, but another operand aliases it")

    def _check_symbols(self, line: LineBase) -> None:
        symbol_info = defined_symbol(line)
        if self.undefined_symbols and symbol_info is None and not is_release(line):
            for name in self.undefined_symbols:
                self._use_symbol(name, f"symbol {name} is in a type, but none of the next lines defines it")
            self.undefined_symbols.clear()
        for symbol in symbols_used(line, Role.READ, Role.WRITE, Role.CONSUME, Role.ATTR):
            self._use_symbol(symbol.name, f"symbol {symbol.name} is used before a line defines it")
        if symbol_info is not None:
            name = symbol_info.name
            if name in self.scope.symbol_names or name in (self.scope.free_symbols or ()):
                self._fail("redefined", f"symbol {name} is defined twice")
            self.scope.symbol_names.add(name)
            self.scope.symbols.add(name)
            self.own_symbols.append(name)

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
            self._access(line, value)
        for value in written:
            self._check_writable(line, value)
        for value in consumed(line):
            self._consume(line, value)
        if not line.alias_fields:  # a view does not read memory
            self._check_initialized(read, written)
        kernel = kernel_name(line)
        if kernel and written and len(read) + len(written) > 1 and kernel not in self.scope.user_kernels:
            self._check_overlaps(line, read, written)
        self.written.update([self.memory_of[value.name] for value in written])
        if line.is_async_wait:
            for value in read:
                self._finish_async(value)

    def _access(self, line: LineBase, value: Value) -> str:
        root = self.root_of.get(value.name)
        if root is None:
            self._fail("undefined", f"%{value.name} is not defined here; a block sees its arguments and its own values")
        known = self.values[value.name]
        if known is not value and known.type != value.type:
            self._fail("type", f"%{value.name} is used with another type than that of its definition")
        if root in self.consumed:
            self._fail("consumed", f"%{value.name} is used after its root, %{root}, was consumed")
        if self.memory_of[value.name] in self.pending and not line.is_async_wait:
            self._fail("async", f"%{value.name} is used while it is in flight; wait for it first")
        return root

    def _check_writable(self, line: LineBase, value: Value) -> None:
        root = self._access(line, value)
        ownership = self.ownership[root]
        if self.in_function and ownership == _BORROWED:
            self.written_arguments.add(root)
        elif ownership not in (_OWNED, _MUTABLE):
            self._fail("readonly", f"%{value.name} is written but its memory, %{root}, is {ownership}")
        if self.borrows[self.memory_of[value.name]]:
            self._fail("async", f"%{value.name} is written while a collective reads it")

    def _consume(self, line: LineBase, value: Value) -> None:
        root = self._access(line, value)
        ownership = self.ownership[root]
        if root != value.name:
            self._fail("root", f"%{value.name} aliases %{root}; only the root can be consumed")
        # A shared input may be freed but not reused, since the caller may still use its memory.
        if ownership != _OWNED and (ownership != _SHARED or defined(line)):
            self._fail("borrowed", f"%{value.name} is {ownership} and cannot be consumed by {line.opcode}")
        if self.borrows[root]:
            self._fail("async", f"%{value.name} is consumed while a collective reads it")
        self.consumed.add(root)

    def _check_initialized(self, read: list[Value], written: list[Value]) -> None:
        for value in read:
            memory = self.memory_of[value.name]
            if memory not in self.written and all(self.memory_of[other.name] != memory for other in written):
                self._fail("uninitialized", f"%{value.name} is read before it is written")

    def _check_overlaps(self, line: LineBase, read: list[Value], written: list[Value]) -> None:
        """Checks that no tensor of a launch shares elements with one that its kernel writes."""
        accesses = [self._tensor_access(value, is_write=False) for value in read]
        overlap = certain_overlap([*accesses, *[self._tensor_access(value, is_write=True) for value in written]])
        if overlap is not None:
            first, second = overlap
            verb = "writes" if second.is_write else "reads"
            reason = f"the kernel writes %{first.value.name} and {verb} the same memory through %{second.value.name}"
            self._fail("overlap", f"{reason}; a tensor that a kernel updates is in `outs` alone, once")

    def _tensor_access(self, value: Value, *, is_write: bool) -> Access:
        type_, memory = value.tensor_type, self.memory_of[value.name]
        offset = type_.storage_offset * type_.dtype.itemsize
        start = total((offset, self.slice_starts[memory])) if memory in self.slice_starts else offset
        return Access(value, self.root_of[value.name], start, is_write)

    def _finish_async(self, value: Value) -> None:
        memory = self.memory_of[value.name]
        if memory not in self.started and self.root_of[value.name] not in self.external:
            self._fail("async", f"no collective was started for %{value.name}")
        self.borrows.subtract(self.pending.pop(memory, ()))

    # --- streams ----------------------------------------------------------------------------------------------------

    def _check_streams(self, line: LineBase, streams: StreamOrder) -> None:
        for conflict in streams.conflicts(line):
            access = "write" if conflict.was_write else "read"
            reason = f"while work on {stream_name(conflict.earlier)} may still {access} it"
            remedy = f"record an event there and wait for it on {stream_name(conflict.later)}"
            self._fail("race", f"%{conflict.value} is used on {stream_name(conflict.later)} {reason}; {remedy}")
        guard = next((bracket for bracket in reversed(self.brackets) if bracket.stream), None)
        needs_none = line.on_host or is_release(line) or (bool(line.event_step) and stream_of(line) != CURRENT_STREAM)
        if guard is not None and not line.bracket[1] and not needs_none:
            entered = stream_of(guard)
            if str(line.device or stream_device(line)) == entered[0] and stream_of(line) != entered:
                where = f"runs on {stream_name(stream_of(line))} inside a guard of {stream_name(entered)}"
                self._fail("race", f"'{line.opcode}' {where}; move it out of the guard")
        streams.add(line, self.position)

    def _check_chain(self, line: LineBase, chain: LaunchChain) -> None:
        kernel = self.scope.kernels.get(kernel_name(line))
        early = None if kernel is None else early_reads(kernel)
        if line.dependent:
            if early is None:
                self._fail("dependent", f"kernel @{kernel_name(line)} does not wait for earlier launches")
            reason = chain.conflict(line, early, self.root_of)
            if reason is not None:
                self._fail("dependent", f"the launch may not be dependent: {reason}")
        chain.add(line, early is not None, self.root_of)

    # --- definitions ------------------------------------------------------------------------------------------------

    def _define_results(self, line: LineBase) -> None:
        has_content = line.results_initialized or line.zeroed
        window = line.window()
        if window is not None:
            self._check_window(*window)
        for value in defined(line):
            base = line.alias_of(value)
            if base is None:
                self._define_root(value, _OWNED)
            else:
                self._define(value, self.root_of[base.name], self.memory_of[base.name] if has_content else value.name)
            if window is not None and base is not None and self.memory_of[value.name] == value.name:
                self.slice_starts[value.name] = window[2]
            if isinstance(value.type, TensorType) and (window is None or self.memory_of[value.name] == value.name):
                self._extend_memory(self.memory_of[value.name], value.type)
            if has_content:
                self.written.add(self.memory_of[value.name])
            if line.is_async_start:
                memory = self.memory_of[value.name]
                self.started.add(memory)
                operands = [operand.name for operand in reads(line) if self.memory_of[operand.name] != memory]
                self.pending[memory] = [
                    name for operand in operands for name in {self.memory_of[operand], self.root_of[operand]}
                ]
                self.borrows.update(self.pending[memory])

    def _check_window(self, result: Value, base: Value, start: Size) -> None:
        type_, have = result.tensor_type, self.memory_bytes.get(self.memory_of[base.name])
        if have is None or type(start) is not int or not type_.is_static:
            return
        size = type_.storage_bytes
        if start < 0 or (size and start + size > have):
            self._fail("bounds", f"%{result.name} is bytes {start} to {start + size} of memory of {have} bytes")

    def _extend_memory(self, memory: str, type_: TensorType) -> None:
        """Records that memory reaches to the end of a value that an operator returned, which operators check."""
        have, end = self.memory_bytes.get(memory, 0), type_.end_bytes if type_.is_static else None
        self.memory_bytes[memory] = None if have is None or not isinstance(end, int) else max(have, end)

    def _define_root(self, value: Value, ownership: str) -> None:
        self._define(value, value.name, value.name)
        self.ownership[value.name] = ownership

    def _define(self, value: Value, root: str, memory: str) -> None:
        name, type_ = value.name, value.type
        if name in self.scope.names:
            self._fail("redefined", f"%{name} is defined twice")
        if not name.isidentifier() and not _NAME.fullmatch(name):
            self._fail("name", f"%{name} is not a name: letters, digits and underscores, in parts joined by dots")
        self.scope.names.add(name)
        self.values[name] = value
        self.root_of[name] = root
        self.memory_of[name] = memory
        self.undefined_symbols.extend([symbol.name for symbol in type_symbols(type_)])
        if not isinstance(type_, TensorType):
            return
        if memory == name and type_.storage_offset != 0:
            self._fail("type", f"%{name} is new memory, whose offset must be 0")
        for size in type_.sizes:
            if not 0 <= size < _LIMIT if type(size) is int else expression_kind(size) != "int":
                self._fail("type", f"%{name} has the size {size}; sizes are non-negative integers of 64 bits")
        for step in (*type_.strides, type_.storage_offset):
            if type(step) is int and not 0 <= step < _LIMIT:
                self._fail("type", f"%{name} has the stride or offset {step}; they are non-negative, of 64 bits")
        if type_.is_static and type_.storage_bytes >= _LIMIT:
            self._fail("type", f"%{name} has {type_.storage_bytes} bytes, more than an address has")

    # --- the end ----------------------------------------------------------------------------------------------------

    def _check_end(self, line: LineBase, terminator: str) -> None:
        if self.brackets:
            self._fail("bracket", f"a {self.brackets[-1].bracket[0]} is never closed")
        if self.pending:
            self._fail("async", f"no line waits for %{next(iter(self.pending))}")
        roots = Counter([self.root_of[value.name] for value in reads(line) if holds_memory(value)])
        for name, ownership in self.ownership.items():
            if not holds_memory(self.values[name]):
                continue
            if ownership in (_OWNED, _SHARED) and name not in self.consumed and name not in roots:
                self._fail("leak", f"%{name} is neither freed nor returned")
        for name, count in roots.items() if terminator == "block" else ():
            if self.ownership[name] != _OWNED:
                self._fail("yield", f"%{name} is {self.ownership[name]}; a block yields owned values, so yield a clone")
            if count > 1:
                self._fail("yield", f"%{name} is yielded twice; each result has its own storage, so yield a clone")

    def _fail(self, rule: str, reason: str) -> NoReturn:
        lines = self.block.lines
        first = max(0, self.position - 2)
        context = []
        for index, line in enumerate(lines[first : self.position + 2], start=first):
            context.append(("> " if index == self.position else "  ") + line_text(line))
        raise VerifyError(rule, reason, "\n".join(context))


def _closes(opening: LineBase, closing: LineBase) -> bool:
    """Returns whether two brackets pair: they have the same kind and equal attributes."""
    return opening.bracket[0] == closing.bracket[0] and all(
        getattr(opening, name) == getattr(closing, name) for name in closing.fields_by_role[Role.ATTR]
    )
