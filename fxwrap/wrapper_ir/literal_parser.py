"""Parsing of types, values and literals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch

from fxwrap.caching import bounded_cache
from fxwrap.symbolic import FUNCTION_NAMES, Size, Token, TokenStream, read_expr, read_size
from fxwrap.wrapper_ir.effects import Tag
from fxwrap.wrapper_ir.types import (
    DTYPES,
    ListType,
    OpaqueType,
    Operand,
    OptionalType,
    ScalarType,
    TensorType,
    TokenType,
    Type,
    Value,
    contiguous_strides,
)

Literal: TypeAlias = "Operand | Tag"

_KEYWORDS: dict[str, float | bool | None] = {
    "none": None, "true": True, "false": False, "nan": math.nan, "inf": math.inf,
}  # fmt: skip
_SIMPLE_TYPES: dict[str, Type] = {
    "int": ScalarType("int"),
    "float": ScalarType("float"),
    "bool": ScalarType("bool"),
    "token": TokenType(),
}
_OPERATORS = frozenset(["*", "+", "-", "/", "**", "<", ">", "<=", ">=", "==", "!="])
_EXPRESSION_FUNCTIONS = FUNCTION_NAMES | {"ceildiv"}

ItemT = TypeVar("ItemT")
ConstantT = TypeVar("ConstantT", torch.layout, torch.memory_format)


@bounded_cache(1024)
def _device(kind: str, index: int | None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


@bounded_cache(4096)
def _static_type(text: str) -> TensorType | tuple[str, int]:
    """Returns the type in the text of a `type` token, or an error and its offset in the text."""
    name, _, rest = text.partition("[")
    inner, _, device_text = rest.partition("]@")
    if name not in DTYPES:
        return f"unknown dtype '{name}'", 0
    try:
        parts = [tuple([int(size) for size in part.split(",")]) if part.strip() else () for part in inner.split("|")]
    except ValueError:
        return f"'[{inner}]' is not a list of sizes", len(name)
    sizes = parts[0]
    strides = parts[1] if len(parts) > 1 and parts[1] else contiguous_strides(sizes)
    offset = parts[2] if len(parts) > 2 else (0,)
    if len(parts) > 3 or len(strides) != len(sizes) or len(offset) != 1:
        return _layout_error(sizes, strides, offset), len(name)
    kind, _, index = device_text.partition(":")
    try:
        device = _device(kind, int(index) if index else None)
    except (RuntimeError, ValueError):
        return f"unknown device '{kind}'", text.index("@")
    return TensorType(DTYPES[name], sizes, strides, device, offset[0])


def _layout_error(sizes: Sequence[Size], strides: Sequence[Size], offset: Sequence[Size]) -> str:
    return f"{len(sizes)} sizes need {len(sizes)} strides and one offset, not {len(strides)} and {len(offset)}"


class LiteralParser:
    """Reads types and literals from a stream of tokens. `values` are the values defined so far, by name."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.values: dict[str, Value] = {}

    def define(self, token: Token, type_: Type) -> Value:
        """Defines a value. Raises ParseError for a repeated name."""
        if token.text in self.values:
            raise self.stream.error(f"%{token.text} is defined twice", token)
        value = self.values[token.text] = Value(token.text, type_)
        return value

    def delimited_list(self, opening: str, closing: str, item: Callable[[], ItemT]) -> tuple[ItemT, ...]:
        """Reads items separated by commas between two tokens."""
        self.stream.expect(opening)
        items = () if self.stream.at(closing) else self.comma_list(item)
        self.stream.expect(closing)
        return items

    def comma_list(self, item: Callable[[], ItemT]) -> tuple[ItemT, ...]:
        """Reads one or more items separated by commas."""
        items = [item()]
        while self.stream.accept(","):
            items.append(item())
        return tuple(items)

    # --- types ------------------------------------------------------------------------------------------------------

    def type(self) -> Type:
        """Reads a type."""
        stream = self.stream
        token = stream.accept("type")
        if token is not None:
            result = _static_type(token.text)
            if isinstance(result, tuple):
                reason, offset = result
                raise stream.error(reason, token._replace(column=token.column + offset))
            return result
        word = stream.expect("name")
        if stream.at("["):
            return self._tensor_type(self._dtype(word))
        if word.text in _SIMPLE_TYPES:
            return _SIMPLE_TYPES[word.text]
        if word.text not in ("list", "optional", "opaque"):
            raise stream.error(f"unknown type '{word.text}'", word)
        stream.expect("<")
        if word.text == "opaque":
            type_: Type = OpaqueType(stream.expect("string" if stream.at("string") else "name").text)
        else:
            type_ = ListType(self.type()) if word.text == "list" else OptionalType(self.type())
        stream.expect(">")
        return type_

    def _dtype(self, word: Token) -> torch.dtype:
        if word.text not in DTYPES:
            raise self.stream.error(f"unknown dtype '{word.text}'", word)
        return DTYPES[word.text]

    def _tensor_type(self, dtype: torch.dtype) -> TensorType:
        stream = self.stream
        opening = stream.expect("[")
        sizes = self._sizes()
        strides = contiguous_strides(sizes)
        offset: tuple[Size, ...] = (0,)
        if stream.accept("|"):
            if not stream.at("|"):
                strides = self._sizes()
            if stream.accept("|"):
                offset = self._sizes()
        stream.expect("]")
        if len(strides) != len(sizes) or len(offset) != 1:
            raise stream.error(_layout_error(sizes, strides, offset), opening)
        device = self._device()
        if not stream.accept("<"):
            return TensorType(dtype, sizes, strides, device, offset[0])
        space = stream.expect("string").text
        stream.expect(",")
        layout = stream.expect("string").text
        stream.expect(">")
        return TensorType(dtype, sizes, strides, device, offset[0], space, layout)

    def _device(self) -> torch.device:
        stream = self.stream
        kind = stream.expect("at")
        index = None
        if stream.at(":") and stream.peek(1).kind == "number":
            stream.next()
            index = int(stream.next().text)
        try:
            return _device(kind.text, index)
        except (RuntimeError, ValueError):
            raise stream.error(f"unknown device '{kind.text}'", kind) from None

    def _sizes(self) -> tuple[Size, ...]:
        is_empty = self.stream.peek().kind in ("]", "|")
        return () if is_empty else self.comma_list(lambda: read_size(self.stream))

    # --- literals ---------------------------------------------------------------------------------------------------

    def operand(self) -> Operand:
        """Reads an operand."""
        token = self.stream.peek()
        literal = self.literal()
        if isinstance(literal, Tag):
            raise self.stream.error(f"'{token.text}' is not an operand", token)
        return literal

    def literal(self) -> Literal:
        """Reads an operand or attribute, the inverse of `print_literal`."""
        stream = self.stream
        token = stream.peek()
        kind = token.kind
        if kind == "value":
            stream.next()
            if token.text not in self.values:
                raise stream.error(f"%{token.text} is not defined", token)
            return self.values[token.text]
        if kind == "string":
            return stream.next().text
        if kind == "[":
            return self.delimited_list("[", "]", self.operand)
        following = stream.peek(1)
        if kind == "name":
            if following.kind == "(" and token.text not in _EXPRESSION_FUNCTIONS:
                return self._constructor()
            if token.text in _KEYWORDS and following.kind not in _OPERATORS:
                stream.next()
                return _KEYWORDS[token.text]
        elif kind == "number" and following.kind not in _OPERATORS:
            return self._number(1)
        elif kind == "-" and stream.peek(2).kind not in _OPERATORS:
            if following.kind == "number" or following.text == "inf":
                stream.next()
                return self._number(-1)
        return read_expr(stream)

    def _number(self, sign: int) -> int | float:
        text = self.stream.next().text
        return sign * (int(text) if text.isdigit() else float(text))

    def _constructor(self) -> Literal:
        """Reads `dtype(f32)`, `device("cpu")`, `complex(0.0, 1.0)`, ..., or a tag such as `random("cpu")`."""
        stream = self.stream
        word = stream.next()
        if word.text == "dtype":
            stream.expect("(")
            name = stream.expect("name")
            stream.expect(")")
            return self._dtype(name)
        arguments = self.delimited_list("(", ")", self.operand)
        constructor = _CONSTRUCTORS.get(word.text)
        if constructor is None:
            tag_arguments = tuple([argument for argument in arguments if isinstance(argument, str | int)])
            if len(tag_arguments) != len(arguments):
                raise stream.error(f"'{word.text}' takes strings and integers", word)
            return Tag(word.text, tag_arguments)
        try:
            return constructor(*arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise stream.error(f"invalid {word.text}: {reason}", word) from None


def _torch_constant(kind: type[ConstantT], name: str) -> ConstantT:
    constant = getattr(torch, name, None)
    if not isinstance(constant, kind):
        raise ValueError(f"torch has no {kind.__name__} '{name}'")
    return constant


_CONSTRUCTORS: dict[str, Callable[..., Operand]] = {
    "complex": complex,
    "device": torch.device,
    "layout": partial(_torch_constant, torch.layout),
    "memory_format": partial(_torch_constant, torch.memory_format),
}
