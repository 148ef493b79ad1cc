"""Programmatic dependent launch (compute capability 9.0): a kernel begins before the launch before it has ended.

The kernel computes indices, reads memory that no launch before it writes, and then waits. All other statements, which
stay as they were printed, run after the wait: that a program waits once, whatever it computes, follows from the form of
the text. It signals that the next kernel may start: first of all, right after its wait, or at its end.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum

from fxwrap.devices import WARP_LANES
from fxwrap.names import NameAllocator
from fxwrap.printers.triton.block_sizes import BlockSizes, Definition, Definitions
from fxwrap.printers.triton.helpers import helper_sources
from fxwrap.printers.triton.kernel_source import (
    KernelSource,
    defined_names,
    is_load,
    loads,
    pointer_names,
    target_names,
    used_names,
)
from fxwrap.printers.triton.kernel_text import RESERVED_WORDS

_LOADED_BYTES = 128
"""The bytes that each thread loads before the wait at most: 32 registers, which it would need soon after."""

_WAIT, _SIGNAL = "wait_for_launches", "launch_dependents"


class Signal(IntEnum):
    """When a kernel lets the next one start, once all its programs have come so far: the earlier, the larger."""

    AT_END = 0
    AFTER_WAIT = 1
    AT_START = 2


def add_dependent_launch(
    source: str,
    signature: tuple[str, ...],
    options: Sequence[tuple[str, object]],
    unwritten: Collection[int],
    signal: Signal,
) -> tuple[str, tuple[int, ...]]:
    """Returns a printed kernel's source with both instructions, and the parameters that it reads before the wait.

    Args:
        source: the kernel's source.
        signature: of the kernel.
        options: of the kernel.
        unwritten: the positions of tensors that no launch writes which may run while the kernel starts.
        signal: when the next kernel may start.
    """
    return _prelude_of(source, signature, options, unwritten).text(signal)


def fills_wait(
    source: str, signature: tuple[str, ...], options: Sequence[tuple[str, object]], unwritten: Collection[int]
) -> bool:
    """Whether a printed kernel with both instructions loads much before the wait: half of what a thread may at least.

    Args:
        source: the kernel's source, without the instructions.
        signature: of the kernel.
        options: of the kernel.
        unwritten: the positions of tensors that no launch writes which may run while the kernel starts.
    """
    prelude = _prelude_of(source, signature, options, unwritten)
    prelude.text(Signal.AT_START)
    return 2 * prelude.loaded_bytes >= _LOADED_BYTES


def _prelude_of(
    source: str, signature: tuple[str, ...], options: Sequence[tuple[str, object]], unwritten: Collection[int]
) -> _Prelude:
    kernel = KernelSource(source, signature, {name: item for name, item in options if name.isupper()})
    warps = dict(options).get("num_warps", 4)
    assert isinstance(warps, int), "the number of warps is an integer"
    return _Prelude(kernel, frozenset(unwritten), warps)


def is_waiting(source: str) -> bool:
    """Whether a kernel's source has the instructions."""
    return f"    {_WAIT}()\n" in source


class _NotEarlyError(Exception):
    """A value that cannot be computed before the wait."""


class _Prelude:
    """The statements before the wait, which repeat those that addresses are computed from."""

    def __init__(self, kernel: KernelSource, unwritten: frozenset[int], warps: int) -> None:
        self.kernel = kernel
        self.unwritten = unwritten
        self.warps = warps
        used = defined_names(kernel.function) | used_names(kernel.function) | {*kernel.parameters}
        self.names = NameAllocator(used, RESERVED_WORDS)
        self.lines: list[str] = []
        self.copies: dict[tuple[Definition, str], str] = {}
        self.loaded: dict[int, str] = {}  # by the identity of the load
        self.loaded_bytes = 0.0
        self.read: set[int] = set()
        self.sizes = BlockSizes(kernel)
        self.prefix = self._pure_prefix()
        self.definitions: Definitions = {}
        for statement in kernel.body[: self.prefix]:
            self.sizes.define(self.definitions, statement)

    def text(self, signal: Signal) -> tuple[str, tuple[int, ...]]:
        """Returns the kernel's new source and the parameters that it reads early."""
        replaced: list[tuple[ast.Call, str]] = []
        current = dict(self.definitions)
        for statement in self.kernel.body[self.prefix :]:
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr):
                for load in loads(statement):
                    with suppress(_NotEarlyError), self._attempt():
                        replaced.append((load, self._load(load, current)))
            self.sizes.define(current, statement)
        return self._inserted(replaced, signal), tuple(sorted(self.read))

    def _pure_prefix(self) -> int:
        """Returns the number of statements before the first one that accesses memory."""
        kinds = (ast.Assign, ast.AugAssign, ast.If)
        count = 0
        for statement in self.kernel.body:
            if not isinstance(statement, kinds) or not self.kernel.is_pure(statement):
                break
            count += 1
        return count

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Restores the prelude if its body raises."""
        saved = list(self.lines), dict(self.copies), dict(self.loaded), set(self.read), self.loaded_bytes
        try:
            yield
        except _NotEarlyError:
            self.lines, self.copies, self.loaded, self.read, self.loaded_bytes = saved
            raise

    # --- values -------------------------------------------------------------------------------------------------------

    def _load(self, load: ast.Call, definitions: Mapping[str, Definition]) -> str:
        """Prints a load unless it is printed, and returns the name of its result."""
        if id(load) not in self.loaded:
            pointers = pointer_names(load.args[0], self.kernel.pointers)
            roots = frozenset[int]().union(*[self.kernel.pointers[name] for name in pointers])
            if not roots or not roots <= self.unwritten or load.lineno != load.end_lineno:
                raise _NotEarlyError
            size = self.sizes.loaded_bytes(load, definitions)
            if size is None or self.loaded_bytes + size / (WARP_LANES * self.warps) > _LOADED_BYTES:
                raise _NotEarlyError
            self.loaded_bytes += size / (WARP_LANES * self.warps)
            arguments = [ast.unparse(self._rewrite(item, definitions)) for item in load.args]
            arguments += [f"{item.arg}={ast.unparse(self._rewrite(item.value, definitions))}" for item in load.keywords]
            name = self.names.create_name(f"{pointers[0].removesuffix('_ptr')}_early")
            self.lines.append(f"{name} = tl.load({', '.join(arguments)})")
            self.read |= roots
            self.loaded[id(load)] = name
        return self.loaded[id(load)]

    def _rewrite(self, node: ast.AST, definitions: Mapping[str, Definition]) -> ast.AST:
        """Returns a copy of an expression that has its value before the wait."""
        if isinstance(node, ast.Call) and is_load(node):
            return ast.Name(self._load(node, definitions), ast.Load())
        if isinstance(node, ast.Name):
            return ast.Name(self._name(node.id, definitions.get(node.id)), ast.Load())
        if isinstance(node, ast.Call) and not self.kernel.is_pure(node, memory=True):
            raise _NotEarlyError
        fields: dict[str, object] = {}
        for name, content in ast.iter_fields(node):
            if isinstance(content, list):
                fields[name] = [self._rewrite(item, definitions) for item in content]
            else:
                is_node = isinstance(content, ast.AST) and not isinstance(content, ast.expr_context | ast.operator)
                fields[name] = self._rewrite(content, definitions) if is_node else content
        return type(node)(**fields)

    def _name(self, name: str, definition: Definition | None) -> str:
        """Returns the name of a value before the wait; prints its statement again if it is not there yet."""
        is_there = definition is None or self.definitions.get(name) is definition
        if definition is None or is_there or self.kernel.is_constant_name(name):
            return name
        statement = definition.statement
        if statement is None:
            raise _NotEarlyError
        if (definition, name) not in self.copies:
            value = self._rewrite(statement.value, definition.before)
            names = target_names(statement.targets[0])
            self.copies |= {(definition, item): self.names.create_name(f"{item}_early") for item in names}
            self.lines.append(f"{', '.join([self.copies[definition, item] for item in names])} = {ast.unparse(value)}")
        return self.copies[definition, name]

    # --- the text -----------------------------------------------------------------------------------------------------

    def _inserted(self, replaced: Sequence[tuple[ast.Call, str]], signal: Signal) -> str:
        """Returns the source with the prelude and both instructions, and early loads replaced by their results."""
        lines = [line.encode() for line in self.kernel.source.splitlines()]
        for load, name in sorted(replaced, key=lambda item: (item[0].lineno, item[0].col_offset), reverse=True):
            line = lines[load.lineno - 1]
            lines[load.lineno - 1] = line[: load.col_offset] + name.encode() + line[load.end_col_offset :]
        texts = [line.decode() for line in lines]
        if signal is Signal.AT_END:
            texts.insert(self.kernel.body[-1].end_lineno or len(texts), f"    {_SIGNAL}()")
        start = self.kernel.body[min(self.prefix, len(self.kernel.body) - 1)].lineno - 1
        while texts[start - 1].strip().startswith("#"):
            start -= 1
        prelude = [*self.lines, f"{_WAIT}()"]
        if signal is not Signal.AT_END:
            prelude.insert(0 if signal is Signal.AT_START else len(prelude), f"{_SIGNAL}()")
        texts[start:start] = [f"    {line}" for line in prelude]
        head = self.kernel.function.decorator_list[0].lineno - 1
        texts[head:head] = [*"\n\n\n".join(helper_sources([_WAIT, _SIGNAL])).splitlines(), "", ""]
        return "\n".join(texts) + "\n"
