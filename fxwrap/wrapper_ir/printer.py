"""The text form: types, literals, lines and blocks. One line of text is one line object."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from fxwrap.symbolic import SymbolInfo, print_expr, quote
from fxwrap.wrapper_ir.effects import Tag
from fxwrap.wrapper_ir.line import Block, LineBase
from fxwrap.wrapper_ir.roles import FieldSpec, Form, Role
from fxwrap.wrapper_ir.types import (
    DTYPE_NAMES,
    ListType,
    OpaqueType,
    OptionalType,
    ScalarType,
    TensorType,
    TokenType,
    Type,
    Value,
    contiguous_strides,
)

_INDENT = "  "


def _print_sizes(sizes: tuple[Any, ...]) -> str:
    return ", ".join([str(size) if type(size) is int else print_expr(size) for size in sizes])


def print_type(type_: Type | None) -> str:
    """Returns the text of a type, e.g. `f32[s0, 64 | 1, s0]@cuda:0`; `none` for a result that is not there."""
    match type_:
        case TensorType():
            inside = _print_sizes(type_.sizes)
            offset = type_.storage_offset
            dense = type_.strides == contiguous_strides(type_.sizes)
            if not dense:
                inside += " | " + _print_sizes(type_.strides)
            if offset != 0:
                inside += f"{' |' if dense else ''} | {print_expr(offset)}"
            text = f"{DTYPE_NAMES[type_.dtype]}[{inside}]@{type_.device}"
            if type_.memory_space or type_.layout:
                text += f"<{quote(type_.memory_space)}, {quote(type_.layout)}>"
            return text
        case ScalarType(kind):
            return kind
        case ListType(element):
            return f"list<{print_type(element)}>"
        case OptionalType(element):
            return f"optional<{print_type(element)}>"
        case OpaqueType(name):
            return f"opaque<{name}>"
        case TokenType():
            return "token"
        case None:
            return "none"


def _print_float(number: float) -> str:
    return repr(number)  # 'inf', '-inf' and 'nan' included: the parser reads these names as floats


def print_literal(literal: Any) -> str:
    """Returns the text of an argument or attribute: a value, number, expression, dtype, ..., or a tuple of such.

    Raises TypeError for data that the IR does not hold.
    """
    match literal:
        case Value():
            return f"%{literal.name}"
        case None:
            return "none"
        case bool():
            return "true" if literal else "false"
        case int():
            return str(literal)
        case float():
            return _print_float(literal)
        case tuple():
            return "[" + ", ".join([print_literal(item) for item in literal]) + "]"
        case str():
            return quote(literal)
        case sympy.Basic():
            return print_expr(literal)
        case complex():
            return f"complex({_print_float(literal.real)}, {_print_float(literal.imag)})"
        case torch.dtype():
            return f"dtype({DTYPE_NAMES[literal]})"
        case torch.device():
            return f"device({quote(str(literal))})"
        case torch.layout():
            return f"layout({quote(str(literal).removeprefix('torch.'))})"
        case torch.memory_format():
            return f"memory_format({quote(str(literal).removeprefix('torch.'))})"
        case Tag(name, arguments):
            return f"{name}({', '.join([print_literal(item) for item in arguments])})"
        case _:
            raise TypeError(f"the IR has no text form for {type(literal).__name__}: {literal!r}")


def print_symbol_info(symbol: SymbolInfo) -> str:
    """Returns what the text says of a symbol after its definition, e.g. ` range=(2, 4096) hint=512 divisible=8`."""
    text = ""
    if symbol.lower is not None or symbol.upper is not None:
        lower = "-inf" if symbol.lower is None else print_literal(symbol.lower)
        upper = "inf" if symbol.upper is None else print_literal(symbol.upper)
        text += f" range=({lower}, {upper})"
    if symbol.hint is not None:
        text += f" hint={print_literal(symbol.hint)}"
    if symbol.divisor != 1:
        text += f" divisible={symbol.divisor}"
    return text


def _print_results(tree: Any) -> str:
    """Prints a tree of results (names or types) without the outermost brackets."""
    return ", ".join([_print_result(item) for item in tree])


def _print_result(item: Any) -> str:
    if type(item) is Value:
        return "%" + item.name
    return "_" if item is None else f"[{_print_results(item)}]"


def _print_result_type(item: Any) -> str:
    if type(item) is Value:
        return print_type(item.type)
    return "none" if item is None else "[" + ", ".join([_print_result_type(part) for part in item]) + "]"


def _is_default(spec: FieldSpec, content: Any) -> bool:
    default = spec.default
    return type(content) is type(default) and bool(content == default)


def print_line(line: LineBase, indent: str = "", *, origins: bool = False) -> str:
    """Returns the text of a line, its nested blocks included, without a newline at the end."""
    head, target, operands, attributes, types, nested = "", "", [], "", "", ""
    for spec in line.specs:
        content = getattr(line, spec.name)
        match spec.form:
            case Form.TARGET:
                target = " @" + content
            case Form.SYMBOL:
                head = content.name + " = "
                attributes += print_symbol_info(content)
            case Form.RESULTS:
                if content:
                    head = _print_results(content) + " = "
                    types = " : " + ", ".join([_print_result_type(item) for item in content])
            case Form.VALUE if spec.role is Role.DEFINE:
                head, types = f"%{content.name} = ", " : " + print_type(content.type)
            case Form.VALUE:
                operands.append(print_literal(content))
            case Form.VALUES | Form.ARGUMENTS:
                operands.extend([print_literal(item) for item in content])
            case Form.NAMED:
                operands.extend([f"{name}={print_literal(item)}" for name, item in content])
            case Form.LITERAL if not _is_default(spec, content):
                attributes += f" {spec.name}={print_literal(content)}"
            case Form.SEQUENCE if not _is_default(spec, content):
                attributes += f" {spec.name}=({', '.join([print_literal(item) for item in content])})"
            case Form.TYPE:
                types = " : " + print_type(content)
            case Form.BLOCK:
                nested += f"{indent}^{block_label(spec)}{_print_block_body(content, indent, origins)}"
            case _:
                pass
    text = f"{indent}{head}{line.opcode}{target}({', '.join(operands)}){attributes}{types}"
    if nested:
        text += f" {{\n{nested}{indent}}}"
    if origins and line.origin is not None:
        first, newline, rest = text.partition("\n")
        text = f"{first}  # {line.origin}{newline}{rest}"
    return text


def block_label(spec: FieldSpec) -> str:
    """Returns the label of a nested block: its field's name, without the underscore that tells it from a keyword."""
    return spec.name.rstrip("_")


def _print_block_body(block: Block, indent: str, origins: bool) -> str:
    arguments = ", ".join([f"%{value.name}: {print_type(value.type)}" for value in block.arguments])
    return f"({arguments}):\n{print_lines(block, indent + _INDENT, origins=origins)}"


def print_lines(block: Block, indent: str = _INDENT, *, origins: bool = False) -> str:
    """Returns the text of a block's lines, each ended by a newline."""
    return "".join([print_line(line, indent, origins=origins) + "\n" for line in block.lines])
