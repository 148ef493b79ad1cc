"""The identity of programs: a canonical form that is equal up to names and origins, and its hash."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from fxwrap.symbolic import Size, SymbolInfo, make_symbol
from fxwrap.symbolic import canonicalize as canonical_expression
from fxwrap.wrapper_ir.analyses import called_functions, is_release, is_view, last_uses, program_arguments, symbol_infos
from fxwrap.wrapper_ir.line import Block, LineBase, blocks, consumed, defined, map_leaves, used
from fxwrap.wrapper_ir.program import ConstantStore, Input, Program, ProgramConstant, print_program
from fxwrap.wrapper_ir.roles import Role
from fxwrap.wrapper_ir.streams import multi_stream_roots
from fxwrap.wrapper_ir.types import ListType, OptionalType, TensorType, Type, Value


def canonicalize_program(program: Program) -> Program:
    """Returns an equivalent program in canonical form. Idempotent.

    - Values, symbols and functions are named in the order of their definition, kernels in the order of their first
      launch. Equal kernels are merged and unused ones removed. The program is called `program`.
    - Functions are in the order of their first call, callees before callers. Unused functions are removed.
    - Origins are removed.
    - Each release (`memory.free`) follows the last use of its root, or starts the block for an unused argument.
      Releases at one position are in the order of definition. Memory that several streams use is released where it was.
    - Each view of memory precedes its first use, and unused views are removed.

    Inputs, constants and all other lines keep their order, and the header is unchanged.
    """
    return _Canonicalizer(program).program()


def program_key(program: Program, options_text: str = "", target: str = "") -> str:
    """Returns a hash of 64 hex digits of the canonical program, the options and the target.

    It does not cover the contents of constants.
    """
    content = repr((print_program(canonicalize_program(program)), options_text, target))
    return hashlib.sha256(content.encode()).hexdigest()


class _Canonicalizer:
    def __init__(self, program: Program) -> None:
        self.called = _called_functions(program)
        self.source = program = program.replace(functions=tuple(self.called.items()))
        self.values: dict[str, Value] = {}
        self.expressions: dict[sympy.Basic, Size] = {}
        self.symbols = _symbol_names(program)
        self.rename = {make_symbol(old): make_symbol(new) for old, new in self.symbols.items()}
        self.functions = {name: f"function{index}" for index, name in enumerate(self.called)}
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.kernel_names: dict[str, str] = {}  # by hash

    def program(self) -> Program:
        source = self.source
        inputs = tuple([Input(self._defined(item.value), item.ownership) for item in source.inputs])
        constants = tuple([ProgramConstant(self._defined(item.value), item.mutable) for item in source.constants])
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
        return tuple([self._line(line) for line in _hoist_releases(_sink_views(lines), arguments)])

    def _line(self, line: LineBase) -> LineBase:
        fields: dict[str, object] = {}
        for role in (Role.READ, Role.WRITE, Role.CONSUME, Role.ATTR, Role.BLOCK):
            for name in line.fields_by_role[role]:
                fields[name] = map_leaves(getattr(line, name), self._used)
        for name, target_kind in line.target_fields:
            fields[name] = self._target(getattr(line, name), target_kind)
        for name in line.fields_by_role[Role.DEFINE]:
            fields[name] = map_leaves(getattr(line, name), self._defined)
        return line.replace(**fields, origin=None)

    def _target(self, name: str, target_kind: str) -> str:
        if target_kind == "function":
            return self.functions[name]
        key = self.kernels[name].hash
        return self.kernel_names.setdefault(key, f"kernel{len(self.kernel_names)}")

    def _used(self, leaf: object) -> object:
        if isinstance(leaf, Value):
            return self.values[leaf.name]
        if isinstance(leaf, Block):
            return self._block(leaf)
        if self.rename and isinstance(leaf, TensorType):
            return self._type(leaf)
        return self._expression(leaf) if self.rename and isinstance(leaf, sympy.Basic) else leaf

    def _defined(self, leaf: object) -> Any:
        if isinstance(leaf, SymbolInfo):
            return dataclasses.replace(leaf, name=self.symbols[leaf.name])
        if not isinstance(leaf, Value):
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

    def _expression(self, expression: Size) -> Size:
        if isinstance(expression, int):
            return expression
        if expression not in self.expressions:
            self.expressions[expression] = canonical_expression(expression, self.rename)
        return self.expressions[expression]


def _called_functions(program: Program) -> dict[str, Block]:
    """Returns the functions that a program calls, in the order of their first call, callees before callers."""
    functions = dict(program.functions)
    called: dict[str, Block] = {}

    def visit(block: Block) -> None:
        for line in block.lines:
            for _, nested in blocks(line):
                visit(nested)
            for name in called_functions(line):
                if name not in called and name in functions:
                    visit(functions[name])
                    called[name] = functions[name]

    visit(program.body)
    return called


def _symbol_names(program: Program) -> dict[str, str]:
    """Returns the new name of each symbol: its prefix, and its index among the symbols with that prefix."""
    counts: Counter[str] = Counter()
    names = {}
    for name in symbol_infos(program):
        prefix = name.rstrip("0123456789")
        names[name] = f"{prefix}{counts[prefix]}"
        counts[prefix] += 1
    return names


def _sink_views(lines: Sequence[LineBase]) -> list[LineBase]:
    """Returns the lines with each view of memory moved right before its first use."""
    waiting: dict[str, LineBase] = {}
    result: list[LineBase] = []

    def place(value: Value) -> None:
        line = waiting.pop(value.name, None)
        if line is not None:
            for base in used(line):
                place(base)
            result.append(line)

    for line in lines:
        if is_view(line):
            waiting[defined(line)[0].name] = line
            continue
        for value in used(line):
            place(value)
        result.append(line)
    return result


def _hoist_releases(lines: Sequence[LineBase], arguments: Iterable[Value]) -> list[LineBase]:
    """Returns the lines with each release moved right after the last use of its root, which is on one stream."""
    arguments = list(arguments)
    fixed = multi_stream_roots(lines, arguments)
    releases: dict[str, LineBase] = {}
    others = []
    for line in lines:
        if is_release(line) and len(consumed(line)) == 1 and consumed(line)[0].name not in fixed:
            releases[consumed(line)[0].name] = line
        else:
            others.append(line)
    after: dict[int, list[LineBase]] = {}
    for name, position in last_uses(others, arguments).items():
        if name in releases:
            after.setdefault(position, []).append(releases[name])
    result = after.get(-1, [])
    for position, line in enumerate(others):
        result.append(line)
        result.extend(after.get(position, ()))
    return result
