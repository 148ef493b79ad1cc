"""The identity of programs: one canonical form for all that differ in names and origins only, and its hash."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from fxwrap.symbolic import SymbolInfo, make_symbol
from fxwrap.symbolic import canonical as canonical_expression
from fxwrap.wrapper_ir.analyses import called_functions, is_release, last_uses, program_arguments, symbol_infos
from fxwrap.wrapper_ir.line import Block, LineBase, blocks, consumed, map_leaves
from fxwrap.wrapper_ir.program import Constant, ConstantStore, Input, Program, print_program
from fxwrap.wrapper_ir.roles import Role
from fxwrap.wrapper_ir.types import ListType, OptionalType, TensorType, Type, Value


def canonical(program: Program) -> Program:
    """Returns the program with every free choice made in one way; it means the same.

    - Values, symbols, functions and kernels are named by the order of their definition (kernels: of their first
      launch; equal kernels become one, unused ones go). The program is called `program`.
    - Functions stand in the order of their first call, those that a function calls before it; unused ones go.
    - Origins are dropped.
    - Each `memory.free` (any line that only gives memory back) stands right after the last line that touches the root,
      or at the start for an argument that nothing touches; several at one place stand in the order of definition.

    Inputs, constants and all other lines keep their order, and the header stays. Idempotent.
    """
    return _Renamer(program).program()


def program_key(program: Program, options_text: str = "", target: str = "") -> str:
    """Returns a content hash, 64 hex digits: equal for programs equal up to names and origins, options and target.

    Payloads of constants are not part of it, as they are not of a program.
    """
    content = repr((print_program(canonical(program)), options_text, target))
    return hashlib.sha256(content.encode()).hexdigest()


class _Renamer:
    def __init__(self, program: Program) -> None:
        self.called = _called_functions(program)
        self.source = program = program.replace(functions=tuple(self.called.items()))
        self.values: dict[str, Value] = {}
        self.expressions: dict[sympy.Basic, Any] = {}
        self.symbols = _symbol_names(program)
        self.rename = {make_symbol(old): make_symbol(new) for old, new in self.symbols.items()}
        self.functions = {name: f"function{index}" for index, name in enumerate(self.called)}
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.kernel_names: dict[str, str] = {}  # by hash

    def program(self) -> Program:
        source = self.source
        inputs = tuple([Input(self._defined(item.value), item.ownership) for item in source.inputs])
        constants = tuple([Constant(self._defined(item.value), item.mutable) for item in source.constants])
        body = Block((), self._lines(source.body.lines, program_arguments(source)))
        functions = tuple([(self.functions[name], self._block(block)) for name, block in self.called.items()])
        by_hash = {kernel.hash: kernel for kernel in source.kernels}
        kernels = [dataclasses.replace(by_hash[key], name=name) for key, name in self.kernel_names.items()]
        tensors = {
            self.values[name].name: tensor for name, tensor in source.store.tensors.items() if name in self.values
        }
        return Program(
            "program", inputs, body, constants, tuple(kernels), functions, source.header, ConstantStore(tensors)
        )

    def _block(self, block: Block) -> Block:
        arguments = tuple([self._defined(value) for value in block.arguments])
        return Block(arguments, self._lines(block.lines, block.arguments))

    def _lines(self, lines: Sequence[LineBase], arguments: Iterable[Value]) -> tuple[LineBase, ...]:
        return tuple([self._line(line) for line in _with_early_releases(lines, arguments)])

    def _line(self, line: LineBase) -> LineBase:
        fields: dict[str, Any] = {}
        for role in (Role.READ, Role.WRITE, Role.CONSUME, Role.ATTR, Role.BLOCK):
            for name in line.fields_by_role[role]:
                fields[name] = map_leaves(getattr(line, name), self._used)
        for name, refers in line.target_fields:
            fields[name] = self._target(getattr(line, name), refers)
        for name in line.fields_by_role[Role.DEFINE]:
            fields[name] = map_leaves(getattr(line, name), self._defined)
        return type(line)(**fields)

    def _target(self, name: str, refers: str) -> str:
        if refers == "function":
            return self.functions[name]
        key = self.kernels[name].hash
        return self.kernel_names.setdefault(key, f"kernel{len(self.kernel_names)}")

    def _used(self, leaf: Any) -> Any:
        kind = type(leaf)
        if kind is Value:
            return self.values[leaf.name]
        if kind is Block:
            return self._block(leaf)
        if not self.rename:
            return leaf
        if kind is TensorType:
            return self._type(leaf)
        return self._expression(leaf) if isinstance(leaf, sympy.Basic) else leaf

    def _defined(self, leaf: Any) -> Any:
        if type(leaf) is SymbolInfo:
            return dataclasses.replace(leaf, name=self.symbols[leaf.name])
        if type(leaf) is not Value:
            return leaf
        renamed = Value(f"v{len(self.values)}", self._type(leaf.type) if self.rename else leaf.type)
        self.values[leaf.name] = renamed
        return renamed

    def _type(self, type_: Type) -> Type:
        if isinstance(type_, ListType | OptionalType):
            return type(type_)(self._type(type_.element))
        if not isinstance(type_, TensorType):
            return type_
        return dataclasses.replace(
            type_,
            sizes=tuple([self._expression(size) for size in type_.sizes]),
            strides=tuple([self._expression(stride) for stride in type_.strides]),
            storage_offset=self._expression(type_.storage_offset),
        )

    def _expression(self, expression: Any) -> Any:
        if isinstance(expression, int):
            return expression
        if expression not in self.expressions:
            self.expressions[expression] = canonical_expression(expression, self.rename)
        return self.expressions[expression]


def _called_functions(program: Program) -> dict[str, Block]:
    """Returns the functions that a program runs, in the order of their first call, callees before their callers."""
    functions = dict(program.functions)
    found: dict[str, Block] = {}

    def visit(block: Block) -> None:
        for line in block.lines:
            for _, nested in blocks(line):
                visit(nested)
            for name in called_functions(line):
                if name not in found and name in functions:
                    visit(functions[name])
                    found[name] = functions[name]

    visit(program.body)
    return found


def _symbol_names(program: Program) -> dict[str, str]:
    """Returns the new name of each symbol: its prefix, and its number among those of that prefix."""
    counts: Counter[str] = Counter()
    names = {}
    for name in symbol_infos(program):
        prefix = name.rstrip("0123456789")
        names[name] = f"{prefix}{counts[prefix]}"
        counts[prefix] += 1
    return names


def _with_early_releases(lines: Sequence[LineBase], arguments: Iterable[Value]) -> list[LineBase]:
    """Returns the lines with each that only gives memory back right after the last that touches the root."""
    releases: dict[str, LineBase] = {}
    kept = []
    for line in lines:
        if is_release(line) and len(consumed(line)) == 1:
            releases[consumed(line)[0].name] = line
        else:
            kept.append(line)
    after: dict[int, list[LineBase]] = {}
    for name, position in last_uses(kept, arguments).items():
        if name in releases:
            after.setdefault(position, []).append(releases[name])
    placed = after.get(-1, [])
    for position, line in enumerate(kept):
        placed.append(line)
        placed.extend(after.get(position, ()))
    return placed
