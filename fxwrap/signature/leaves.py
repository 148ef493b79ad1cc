"""The flat inputs and outputs of a program, with their names, types and ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from fxwrap.signature.convention import CallingConvention, returned_operands, tree_text
from fxwrap.symbolic import Expression, SymbolInfo, expression_kind, symbol_kind
from fxwrap.wrapper_ir import (
    ListType,
    Operand,
    OptionalType,
    Ownership,
    Program,
    ScalarType,
    TensorType,
    Type,
    Value,
    alias_roots,
    print_literal,
    print_symbol_info,
    print_type,
    program_arguments,
    symbol_infos,
)


@dataclass(frozen=True)
class ProgramInput:
    """A flat input of a program.

    Fields:
        name: the path to it in the arguments: `cache.0.key`.
        type: its type; sizes may have symbols.
        value: the program's value, or the symbol whose number the caller passes.
        symbols: the declarations, with ranges, of the symbols in its type.
        ownership: the program's rights to its memory.
        is_constant: whether the program was compiled for one value of it, which is `constant`.
    """

    name: str
    type: Type
    value: Value | SymbolInfo
    symbols: tuple[SymbolInfo, ...] = ()
    ownership: Ownership = Ownership.BORROWED
    is_constant: bool = False
    constant: object = None

    def __str__(self) -> str:
        if self.is_constant:
            return f"{self.name}: {_literal(self.constant)}"
        if isinstance(self.value, SymbolInfo):
            return f"{self.name}: {print_type(self.type)} {self.value.name}"
        return f"{self.name}: {self.ownership.value} {print_type(self.type)}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


@dataclass(frozen=True)
class ProgramOutput:
    """A flat output of a program.

    Fields:
        name: the path to it in the result: `logits`, `output.0`.
        type: its type; None for a constant that is no number.
        operand: the value, symbolic expression or constant that the program returns.
        symbols: the declarations, with ranges, of the symbols in its type.
        aliases: the name of the input or constant whose memory it shares; "" if the caller owns its memory.
    """

    name: str
    type: Type | None
    operand: Operand
    symbols: tuple[SymbolInfo, ...] = ()
    aliases: str = ""

    def __str__(self) -> str:
        if not isinstance(self.operand, Value):
            return f"{self.name}: {print_literal(self.operand)}"
        alias = f" aliases {self.aliases}" if self.aliases else ""
        return f"{self.name}: {print_type(self.type)}{alias}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


def program_inputs(program: Program, convention: CallingConvention) -> tuple[ProgramInput, ...]:
    """Returns the flat inputs of a program, in order."""
    infos, constants = symbol_infos(program), convention.constants
    inputs: list[ProgramInput] = []
    for position, (item, name) in enumerate(zip(program.inputs, convention.input_names, strict=True)):
        value = item.value
        type_: Type = ScalarType(symbol_kind(value.name)) if isinstance(value, SymbolInfo) else value.type
        symbols = (value,) if isinstance(value, SymbolInfo) else _declared(_expressions(type_), infos)
        is_constant = position in constants and isinstance(value, Value)
        constant = constants[position] if is_constant else None
        inputs.append(ProgramInput(name, type_, value, symbols, item.ownership, is_constant, constant))
    return tuple(inputs)


def program_outputs(program: Program, convention: CallingConvention) -> tuple[ProgramOutput, ...]:
    """Returns the flat outputs of a program, in order."""
    infos, arguments = symbol_infos(program), program_arguments(program)
    roots = alias_roots(program.body.lines, arguments)
    owners = {item.name: name for item, name in zip(program.inputs, convention.input_names, strict=True)}
    owners = {value.name: owners.get(value.name, value.name) for value in arguments}
    outputs: list[ProgramOutput] = []
    for operand, name in zip(returned_operands(program), convention.output_names, strict=True):
        type_ = _operand_type(operand)
        expressions = [operand] if isinstance(operand, sympy.Basic) else _expressions(type_)
        root = roots.get(operand.name, "") if isinstance(operand, Value) else ""
        outputs.append(ProgramOutput(name, type_, operand, _declared(expressions, infos), owners.get(root, "")))
    return tuple(outputs)


def signature_text(program: Program, convention: CallingConvention) -> str:
    """Returns the signature for people: a line for each flat input, for a tree of outputs, each output and symbol."""
    infos = symbol_infos(program)
    inputs, outputs = program_inputs(program, convention), program_outputs(program, convention)
    tree = [] if convention.result.is_leaf() else [f"returns {tree_text(convention.result)}"]
    lines = [f"  {item}" for item in (*inputs, *tree, *outputs)]
    symbols = [symbol for leaf in inputs for symbol in leaf.symbols]
    symbols += [symbol for output in outputs for symbol in output.symbols]
    names = sorted({symbol.name for symbol in symbols})
    lines += [f"  {name}: {symbol_kind(name)}{print_symbol_info(infos[name])}" for name in names]
    return "\n".join(lines)


def _literal(constant: object) -> str:
    is_literal = isinstance(constant, bool | int | float | complex | str | None)
    return print_literal(constant) if is_literal else repr(constant)


def _operand_type(operand: Operand) -> Type | None:
    match operand:
        case Value():
            return operand.type
        case bool() | int() | float():
            return ScalarType(type(operand).__name__)
        case sympy.Basic():
            return ScalarType(expression_kind(operand))
        case _:
            return None


def _expressions(type_: Type | None) -> list[Expression]:
    match type_:
        case TensorType():
            return [*type_.sizes, *type_.strides, type_.storage_offset]
        case ListType() | OptionalType():
            return _expressions(type_.element)
        case _:
            return []


def _declared(expressions: Iterable[Expression], infos: Mapping[str, SymbolInfo]) -> tuple[SymbolInfo, ...]:
    names = {symbol.name: None for item in expressions if isinstance(item, sympy.Basic) for symbol in _symbols(item)}
    return tuple([infos[name] for name in names if name in infos])


def _symbols(expression: sympy.Basic) -> list[sympy.Symbol]:
    return sorted(expression.free_symbols, key=str)
