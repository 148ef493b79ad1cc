"""The part of the parser that reads types, values and literals."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch

from fxwrap.errors import ParseError
from fxwrap.symbolic import FUNCTION_NAMES, Size, Token, TokenStream, read_expr, read_size
from fxwrap.wrapper_ir.effects import Tag
from fxwrap.wrapper_ir.types import (
    DTYPES,
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

_WORDS: dict[str, Any] = {
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


@lru_cache(maxsize=1024)
def _device(kind: str, index: int | None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


@lru_cache(maxsize=4096)
def _static_type(text: str) -> TensorType | tuple[str, int]:
    """Returns the type that a `type` token is, or why it is none, and the character of it where that is seen."""
    name, _, rest = text.partition("[")
    inner, _, place = rest.partition("]@")
    if name not in DTYPES:
        return f"there is no element type called '{name}'", 0
    try:
        parts = [tuple([int(size) for size in part.split(",")]) if part.strip() else () for part in inner.split("|")]
    except ValueError:
        return f"'[{inner}]' are no sizes", len(name)
    sizes = parts[0]
    strides = parts[1] if len(parts) > 1 and parts[1] else contiguous_strides(sizes)
    offset = parts[2] if len(parts) > 2 else (0,)
    if len(parts) > 3 or len(strides) != len(sizes) or len(offset) != 1:
        reason = f"{len(sizes)} sizes take {len(sizes)} strides and one offset"
        return f"{reason}, not {len(strides)} and {len(offset)}", len(name)
    kind, _, index = place.partition(":")
    try:
        device = _device(kind, int(index) if index else None)
    except (RuntimeError, ValueError):
        return f"there is no device called '{kind}'", text.index("@")
    return TensorType(DTYPES[name], sizes, strides, device, offset[0])


class LiteralParser:
    """Reads types and literals from a stream of tokens; `values` holds what was defined so far, by name."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.values: dict[str, Value] = {}

    def define(self, token: Token, type_: Type) -> Value:
        """Makes a value that later text may name. Raises ParseError for a name that is taken."""
        if token.text in self.values:
            raise self.stream.error(f"%{token.text} is defined twice", token)
        value = Value(token.text, type_)
        self.values[token.text] = value
        return value

    def bracketed(self, opening: str, closing: str, item: Callable[[], ItemT]) -> list[ItemT]:
        """Reads items separated by commas between two marks."""
        stream = self.stream
        stream.expect(opening)
        items: list[ItemT] = []
        while not stream.at(closing):
            if items:
                stream.expect(",")
            items.append(item())
        stream.next()
        return items

    # --- types ------------------------------------------------------------------------------------------------------

    def type(self) -> Type:
        """Reads a type."""
        stream = self.stream
        whole = stream.accept("type")
        if whole is not None:
            found = _static_type(whole.text)
            if isinstance(found, tuple):
                reason, place = found
                raise stream.error(reason, whole._replace(column=whole.column + place))
            return found
        word = stream.expect("name")
        if stream.at("["):
            if word.text not in DTYPES:
                raise stream.error(f"there is no element type called '{word.text}'", word)
            return self._tensor_type(DTYPES[word.text])
        if word.text in _SIMPLE_TYPES:
            return _SIMPLE_TYPES[word.text]
        if word.text not in ("list", "optional", "opaque"):
            raise stream.error(f"there is no type called '{word.text}'", word)
        stream.expect("<")
        if word.text == "opaque":
            made: Type = OpaqueType(stream.expect("name").text)
        else:
            made = ListType(self.type()) if word.text == "list" else OptionalType(self.type())
        stream.expect(">")
        return made

    def _tensor_type(self, dtype: torch.dtype) -> TensorType:
        stream = self.stream
        opening = stream.expect("[")
        sizes = self._sizes()
        strides, offset = contiguous_strides(sizes), (0,)
        if stream.accept("|"):
            if not stream.at("|"):
                strides = self._sizes()
            if stream.accept("|"):
                offset = self._sizes()
        stream.expect("]")
        if len(strides) != len(sizes) or len(offset) != 1:
            reason = f"{len(sizes)} sizes take {len(sizes)} strides and one offset"
            raise stream.error(f"{reason}, not {len(strides)} and {len(offset)}", opening)
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
            raise stream.error(f"there is no device called '{kind.text}'", kind) from None

    def _sizes(self) -> tuple[Any, ...]:
        if self.stream.peek().kind in ("]", "|"):
            return ()
        sizes = [self._size()]
        while self.stream.accept(","):
            sizes.append(self._size())
        return tuple(sizes)

    def _size(self) -> Size:
        return read_size(self.stream)

    # --- literals ---------------------------------------------------------------------------------------------------

    def literal(self) -> Any:
        """Reads an argument or attribute: whatever `print_literal` writes."""
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
            return tuple(self.bracketed("[", "]", self.literal))
        following = stream.peek(1)
        if kind == "name":
            if following.kind == "(" and token.text not in _EXPRESSION_FUNCTIONS:
                return self._constructor()
            if token.text in _WORDS and following.kind not in _OPERATORS:
                stream.next()
                return _WORDS[token.text]
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

    def _constructor(self) -> Any:
        """Reads `dtype(f32)`, `device("cpu")`, `complex(0.0, 1.0)`, ..., or a tag such as `random("cpu")`."""
        stream = self.stream
        word = stream.next()
        if word.text == "dtype":
            stream.expect("(")
            name = stream.expect("name")
            stream.expect(")")
            if name.text not in DTYPES:
                raise stream.error(f"there is no element type called '{name.text}'", name)
            return DTYPES[name.text]
        arguments = self.bracketed("(", ")", self.literal)
        make = _CONSTRUCTORS.get(word.text)
        if make is None:
            return self._tag(word, arguments)
        try:
            return make(*arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._unmakable(word, error) from None

    def _tag(self, word: Token, arguments: list[Any]) -> Tag:
        if not all(isinstance(argument, str | int) for argument in arguments):
            raise self.stream.error(f"'{word.text}' takes strings and integers", word)
        return Tag(word.text, tuple(arguments))

    def _unmakable(self, word: Token, error: Exception) -> ParseError:
        reason = str(error).partition("\n")[0]
        return self.stream.error(f"no {word.text} can be made of this: {reason}", word)


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"torch has no layout '{name}'")
    return found


def _memory_format(name: str) -> torch.memory_format:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.memory_format):
        raise ValueError(f"torch has no memory format '{name}'")
    return found


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "device": torch.device,
    "layout": _layout,
    "memory_format": _memory_format,
}
