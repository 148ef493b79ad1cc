"""The text form of types, literals, lines and blocks."""

from __future__ import annotations

import sympy
import torch

from fxwrap.symbolic import Size, SymbolInfo, print_expr, quote
from fxwrap.torch_compat import DTYPE_NAMES
from fxwrap.wrapper_ir.effects import Tag
from fxwrap.wrapper_ir.line import Block, LineBase
from fxwrap.wrapper_ir.roles import FieldSpec, Form, Role
from fxwrap.wrapper_ir.types import (
    ListType,
    OpaqueType,
    Operand,
    OptionalType,
    Result,
    ScalarType,
    TensorType,
    TokenType,
    Type,
    Value,
    contiguous_strides,
)

_INDENT = "  "


def _print_sizes(sizes: tuple[Size, ...]) -> str:
    return ", ".join([str(size) if type(size) is int else print_expr(size) for size in sizes])


def print_type(type_: Type | None) -> str:
    """Returns the text of a type, e.g. `f32[s0, 64 | 1, s0]@cuda:0`; `none` for a missing result."""
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
            return f"opaque<{name if _is_dotted_name(name) else quote(name)}>"
        case TokenType():
            return "token"
        case None:
            return "none"


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def print_literal(literal: Operand | Tag) -> str:
    """Returns the text of an operand or attribute. Raises TypeError for other data."""
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
            return repr(literal)  # the parser reads inf, -inf and nan as floats
        case tuple():
            return "[" + ", ".join([print_literal(item) for item in literal]) + "]"
        case str():
            return quote(literal)
        case sympy.Basic():
            return print_expr(literal)
        case complex():
            return f"complex({literal.real!r}, {literal.imag!r})"
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
    """Returns the attributes of a symbol's definition, e.g. ` range=(2, 4096) hint=512 divisible=8`."""
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


def _print_result(result: Result) -> str:
    if isinstance(result, tuple):
        return f"[{', '.join([_print_result(item) for item in result])}]"
    return "_" if result is None else "%" + result.name


def _print_result_type(result: Result) -> str:
    if isinstance(result, tuple):
        return f"[{', '.join([_print_result_type(item) for item in result])}]"
    return print_type(None if result is None else result.type)


def _is_default(spec: FieldSpec, content: object) -> bool:
    return type(content) is type(spec.default) and bool(content == spec.default)


def print_line(line: LineBase, indent: str = "", *, origins: bool = False) -> str:
    """Returns the text of a line and its nested blocks, without a final newline."""
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
                    head = ", ".join([_print_result(item) for item in content]) + " = "
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


def line_text(line: LineBase) -> str:
    """Returns the text of a line without its nested blocks, for messages."""
    return print_line(line).partition("\n")[0]


def block_label(spec: FieldSpec) -> str:
    """Returns the label of a nested block: its field's name without a final underscore, which avoids keywords."""
    return spec.name.rstrip("_")


def _print_block_body(block: Block, indent: str, origins: bool) -> str:
    arguments = ", ".join([f"%{value.name}: {print_type(value.type)}" for value in block.arguments])
    return f"({arguments}):\n{print_lines(block, indent + _INDENT, origins=origins)}"


def print_lines(block: Block, indent: str = _INDENT, *, origins: bool = False) -> str:
    """Returns the text of a block's lines, each with a final newline."""
    return "".join([print_line(line, indent, origins=origins) + "\n" for line in block.lines])
