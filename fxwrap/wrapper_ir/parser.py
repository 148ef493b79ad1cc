"""The parser of the text form: `parse_program(print_program(p)) == p` for every program.

A recursive descent over tokens. What a line's operands and attributes are follows from the roles of its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from typing import Any

import torch

from fxwrap.symbolic import FUNCTION_NAMES, SymbolInfo, Token, TokenStream, read_expr, symbol_kind
from fxwrap.wrapper_ir.effects import Tag
from fxwrap.wrapper_ir.line import Block, LineBase
from fxwrap.wrapper_ir.printer import block_label
from fxwrap.wrapper_ir.program import Constant, Input, KernelDefinition, Ownership, Program
from fxwrap.wrapper_ir.roles import FieldSpec, Form, Role
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
    "none": None, "true": True, "false": False, "nan": float("nan"), "inf": float("inf"),
}  # fmt: skip
_SCALARS = ("int", "float", "bool")
_OPERATORS = ("*", "+", "-", "/", "**", "<", ">", "<=", ">=", "==", "!=")


def parse_program(text: str, line_classes: Iterable[type[LineBase]]) -> Program:
    """Reads a program from its text, whose lines are of these classes; it is not verified.

    Raises ParseError with line and column for text that is no program.
    """
    return _Parser(text, {cls.opcode: cls for cls in line_classes}).program()


class _Parser:
    def __init__(self, text: str, classes: Mapping[str, type[LineBase]]) -> None:
        self.stream = TokenStream(text)
        self.classes = classes
        self.values: dict[str, Value] = {}

    # --- the program and its sections -------------------------------------------------------------------------------

    def program(self) -> Program:
        stream = self.stream
        stream.accept("newline")
        stream.expect("name", "program")
        name = stream.expect("at").text
        inputs = tuple(self._bracketed("(", ")", self._input))
        header = []
        while stream.at("name"):
            key = stream.next().text
            stream.expect("=")
            header.append((key, stream.expect("string").text))
        body_start = stream.mark()
        self._skip_braces()
        constants, body_of_function, kernels = self._sections()
        stream.reset(body_start)
        body = self._braced_lines(())
        functions = []
        for function, arguments, start in body_of_function:
            stream.reset(start)
            functions.append((function, self._braced_lines(arguments)))
        return Program(name, inputs, body, tuple(constants), tuple(kernels), tuple(functions), tuple(header))

    def _sections(self) -> tuple[list[Constant], list[tuple[str, tuple[Value, ...], int]], list[KernelDefinition]]:
        stream = self.stream
        constants: list[Constant] = []
        functions: list[tuple[str, tuple[Value, ...], int]] = []
        kernels: list[KernelDefinition] = []
        stream.accept("newline")
        while not stream.at("end"):
            word = stream.expect("name")
            if word.text == "constant":
                value_token = stream.expect("value")
                stream.expect(":")
                mutable = stream.accept("name", "mutable") is not None
                constants.append(Constant(self._define(value_token, self._type()), mutable))
            elif word.text == "function":
                name = stream.expect("at").text
                arguments = tuple(self._bracketed("(", ")", self._argument))
                functions.append((name, arguments, stream.mark()))
                self._skip_braces()
            elif word.text == "kernel":
                kernels.append(self._kernel())
            else:
                raise stream.error(f"expected 'constant', 'function' or 'kernel', found {word.describe()}", word)
            if not stream.at("end"):
                stream.expect("newline")
        return constants, functions, kernels

    def _skip_braces(self) -> None:
        opening = self.stream.expect("{")
        depth = 1
        while depth:
            token = self.stream.next()
            if token.kind == "end":
                raise self.stream.error("this '{' is never closed", opening)
            depth += {"{": 1, "}": -1}.get(token.kind, 0)

    def _kernel(self) -> KernelDefinition:
        stream = self.stream
        name = stream.expect("at").text
        stream.expect("(")
        signature = stream.expect("string").text
        stream.expect(")")
        stream.expect("name", "language")
        stream.expect("=")
        language = stream.expect("name").text
        stream.expect("name", "hash")
        stream.expect("=")
        hash_token = stream.expect("string")
        options = []
        while stream.at("name"):
            key = stream.next().text
            stream.expect("=")
            options.append((key, self._literal()))
        source = stream.expect("string").text
        kernel = KernelDefinition(name, language, source, tuple(s for s in signature.split(", ") if s), tuple(options))
        if kernel.hash != hash_token.text:
            raise stream.error(f"kernel @{name} does not have this hash; its content gives {kernel.hash}", hash_token)
        return kernel

    def _input(self) -> Input:
        stream = self.stream
        if stream.at("name"):
            name_token = stream.next()
            stream.expect(":")
            kind = stream.expect("name")
            if kind.text != symbol_kind(name_token.text):
                raise stream.error(f"symbol {name_token.text} is of kind {symbol_kind(name_token.text)}", kind)
            return Input(self._symbol(name_token.text, self._attributes()))
        token = stream.expect("value")
        stream.expect(":")
        word = stream.expect("name")
        try:
            ownership = Ownership(word.text)
        except ValueError:
            known = ", ".join(item.value for item in Ownership)
            raise stream.error(f"expected an ownership ({known}), found {word.describe()}", word) from None
        return Input(self._define(token, self._type()), ownership)

    def _argument(self) -> Value:
        token = self.stream.expect("value")
        self.stream.expect(":")
        return self._define(token, self._type())

    # --- lines ------------------------------------------------------------------------------------------------------

    def _braced_lines(self, arguments: tuple[Value, ...]) -> Block:
        self.stream.expect("{")
        self.stream.accept("newline")
        lines = self._lines(("}",))
        self.stream.expect("}")
        return Block(arguments, lines)

    def _lines(self, ends: tuple[str, ...]) -> tuple[LineBase, ...]:
        lines = []
        while self.stream.peek().kind not in ends:
            lines.append(self._line())
            if self.stream.peek().kind not in ends:
                self.stream.expect("newline")
        return tuple(lines)

    def _line(self) -> LineBase:
        stream = self.stream
        heads = self._heads()
        opcode = stream.expect("name")
        cls = self.classes.get(opcode.text)
        if cls is None:
            raise stream.error(f"there is no line called '{opcode.text}'", opcode)
        fields: dict[str, Any] = {}
        specs = {spec.form: spec for spec in cls.specs}
        if Form.TARGET in specs:
            fields[specs[Form.TARGET].name] = stream.expect("at").text
        self._operands(cls, fields, opcode)
        attributes = self._attributes(cls)
        type_ = self._types(heads, cls, specs)
        if Form.TYPE in specs:
            fields[specs[Form.TYPE].name] = type_
        if any(spec.role is Role.BLOCK for spec in cls.specs):
            self._blocks(cls, fields)
        self._results(cls, heads, type_, attributes, fields, opcode)
        return self._make(cls, fields | attributes, opcode)

    def _make(self, cls: type[LineBase], fields: dict[str, Any], opcode: Token) -> LineBase:
        known = {spec.name: spec for spec in cls.specs}
        for name in fields:
            if name not in known:
                raise self.stream.error(f"'{cls.opcode}' has no attribute '{name}'", opcode)
        for name, spec in known.items():
            if name not in fields and spec.default is MISSING:
                raise self.stream.error(f"'{cls.opcode}' needs '{name}'", opcode)
        return cls(**fields)

    def _heads(self) -> list[Any]:
        """Reads what stands before '=': tokens of names, nested lists of them, or nothing."""
        stream = self.stream
        if stream.at("name") and stream.peek(1).kind not in ("=", ","):
            return []
        heads = [self._head()]
        while stream.accept(","):
            heads.append(self._head())
        stream.expect("=")
        return heads

    def _head(self) -> Any:
        if self.stream.at("["):
            return self._bracketed("[", "]", self._head)
        return self.stream.next() if self.stream.at("name") else self.stream.expect("value")

    def _operands(self, cls: type[LineBase], fields: dict[str, Any], opcode: Token) -> None:
        positional: list[Any] = []
        named: list[tuple[str, Any]] = []
        for operand in self._bracketed("(", ")", self._operand) if self.stream.at("(") else ():
            if isinstance(operand, _Named):
                named.append((operand.name, operand.literal))
            else:
                positional.append(operand)
        for spec in cls.specs:
            if spec.role is Role.DEFINE or spec.role is Role.BLOCK:
                continue
            if spec.form is Form.VALUE:
                if not positional:
                    raise self.stream.error(f"'{cls.opcode}' needs the operand '{spec.name}'", opcode)
                fields[spec.name] = positional.pop(0)
            elif spec.form in (Form.VALUES, Form.ARGUMENTS):
                fields[spec.name], positional = tuple(positional), []
            elif spec.form is Form.NAMED:
                fields[spec.name], named = tuple(named), []
        if positional or named:
            raise self.stream.error(f"'{cls.opcode}' has too many operands", opcode)

    def _operand(self) -> Any:
        if self.stream.at("name") and self.stream.peek(1).kind == "=":
            name = self.stream.next().text
            self.stream.next()
            return _Named(name, self._literal())
        return self._literal()

    def _attributes(self, cls: type[LineBase] | None = None) -> dict[str, Any]:
        """Reads `key=literal` pairs; a key whose field is a sequence, and `range`, take a list in parentheses."""
        stream = self.stream
        sequences = {spec.name for spec in cls.specs if spec.form is Form.SEQUENCE} if cls else set()
        found: dict[str, Any] = {}
        while stream.at("name"):
            key = stream.next()
            stream.expect("=")
            if key.text in found:
                raise stream.error(f"'{key.text}' is given twice", key)
            if key.text in sequences or key.text == "range":
                found[key.text] = tuple(self._bracketed("(", ")", self._literal))
            else:
                found[key.text] = self._literal()
        return found

    def _types(self, heads: list[Any], cls: type[LineBase], specs: Mapping[Form, FieldSpec]) -> Any:
        if not self.stream.accept(":"):
            return None
        types = [self._type_tree()]
        while self.stream.accept(","):
            types.append(self._type_tree())
        if Form.TYPE in specs:
            return types[0]
        return types

    def _type_tree(self) -> Any:
        if self.stream.at("["):
            return tuple(self._bracketed("[", "]", self._type_tree))
        if self.stream.accept("name", "none"):
            return None
        return self._type()

    def _blocks(self, cls: type[LineBase], fields: dict[str, Any]) -> None:
        stream = self.stream
        stream.expect("{")
        stream.accept("newline")
        labels = {block_label(spec): spec.name for spec in cls.specs if spec.role is Role.BLOCK}
        while not stream.at("}"):
            label = stream.expect("label")
            if label.text not in labels:
                raise stream.error(f"'{cls.opcode}' has no block ^{label.text}", label)
            arguments = tuple(self._bracketed("(", ")", self._argument))
            stream.expect(":")
            stream.accept("newline")
            fields[labels[label.text]] = Block(arguments, self._lines(("}", "label")))
        stream.expect("}")

    def _results(
        self, cls: type[LineBase], heads: list[Any], types: Any, attributes: dict[str, Any], fields: dict[str, Any],
        opcode: Token,
    ) -> None:  # fmt: skip
        spec = next((spec for spec in cls.specs if spec.role is Role.DEFINE), None)
        if spec is None:
            if heads:
                raise self.stream.error(f"'{cls.opcode}' defines nothing", opcode)
            return
        if spec.form is Form.SYMBOL:
            if len(heads) != 1 or heads[0].kind != "name":
                raise self.stream.error(f"'{cls.opcode}' defines one symbol", opcode)
            fields[spec.name] = self._symbol(heads[0].text, attributes)
            return
        types = types or []
        if len(heads) != len(types):
            raise self.stream.error(f"{len(heads)} results have {len(types)} types", opcode)
        results = tuple(self._result(head, type_) for head, type_ in zip(heads, types, strict=True))
        if spec.form is Form.RESULTS:
            fields[spec.name] = results
        elif len(results) == 1 and isinstance(results[0], Value):
            fields[spec.name] = results[0]
        else:
            raise self.stream.error(f"'{cls.opcode}' defines one value", opcode)

    def _result(self, head: Any, type_: Any) -> Any:
        if isinstance(head, list):
            if not isinstance(type_, tuple) or len(type_) != len(head):
                raise self.stream.error(f"a list of {len(head)} results needs as many types in brackets")
            return tuple(self._result(part, part_type) for part, part_type in zip(head, type_, strict=True))
        if head.kind == "name":
            if head.text != "_" or type_ is not None:
                raise self.stream.error("a result is '%name', or '_' with type none", head)
            return None
        if type_ is None or isinstance(type_, tuple):
            raise self.stream.error("a result with a name has a type", head)
        return self._define(head, type_)

    def _symbol(self, name: str, attributes: dict[str, Any]) -> SymbolInfo:
        lower, upper = attributes.pop("range", (None, None))
        return SymbolInfo(name, lower, upper, attributes.pop("hint", None), attributes.pop("divisible", 1))

    def _define(self, token: Token, type_: Type) -> Value:
        if token.text in self.values:
            raise self.stream.error(f"%{token.text} is defined twice", token)
        value = Value(token.text, type_)
        self.values[token.text] = value
        return value

    # --- types and literals -----------------------------------------------------------------------------------------

    def _type(self) -> Type:
        stream = self.stream
        word = stream.expect("name")
        if word.text in DTYPES and stream.at("["):
            return self._tensor_type(DTYPES[word.text])
        if word.text in _SCALARS:
            return ScalarType(word.text)
        if word.text == "token":
            return TokenType()
        if word.text in ("list", "optional", "opaque"):
            stream.expect("<")
            if word.text == "opaque":
                made: Type = OpaqueType(stream.expect("name").text)
            else:
                made = (ListType if word.text == "list" else OptionalType)(self._type())
            stream.expect(">")
            return made
        raise stream.error(f"there is no type called '{word.text}'", word)

    def _tensor_type(self, dtype: torch.dtype) -> TensorType:
        stream = self.stream
        stream.expect("[")
        sizes = self._sizes()
        strides, offset = None, (0,)
        if stream.accept("|"):
            strides = None if stream.at("|") else self._sizes()
            if stream.accept("|"):
                offset = self._sizes()
        stream.expect("]")
        if strides is None:
            strides = contiguous_strides(sizes)
        if len(strides) != len(sizes):
            raise stream.error(f"{len(sizes)} sizes have {len(strides)} strides")
        kind = stream.expect("at")
        device = torch.device(kind.text)
        if stream.at(":") and stream.peek(1).kind == "number":
            stream.next()
            device = torch.device(kind.text, int(stream.next().text))
        space, layout = "", ""
        if stream.accept("<"):
            space = stream.expect("string").text
            stream.expect(",")
            layout = stream.expect("string").text
            stream.expect(">")
        return TensorType(dtype, sizes, strides, device, offset[0], space, layout)

    def _sizes(self) -> tuple[Any, ...]:
        if self.stream.peek().kind in ("]", "|"):
            return ()
        sizes = [self._expression()]
        while self.stream.accept(","):
            sizes.append(self._expression())
        return tuple(sizes)

    def _expression(self) -> Any:
        token = self.stream.peek()
        if token.kind == "number" and token.text.isdigit() and self.stream.peek(1).kind not in _OPERATORS:
            self.stream.next()
            return int(token.text)
        return read_expr(self.stream)

    def _literal(self) -> Any:
        stream = self.stream
        token = stream.peek()
        match token.kind:
            case "value":
                stream.next()
                if token.text not in self.values:
                    raise stream.error(f"%{token.text} is not defined", token)
                return self.values[token.text]
            case "string":
                return stream.next().text
            case "[":
                return tuple(self._bracketed("[", "]", self._literal))
            case "name" if token.text in _WORDS and stream.peek(1).kind not in _OPERATORS:
                stream.next()
                return _WORDS[token.text]
            case "name" if stream.peek(1).kind == "(" and token.text not in FUNCTION_NAMES:
                return self._constructor()
            case "-" if stream.peek(1).kind == "number" and stream.peek(2).kind not in _OPERATORS:
                stream.next()
                return -_number(stream.next().text)
            case "-" if stream.peek(1).text == "inf":
                stream.next()
                stream.next()
                return float("-inf")
            case "number" if stream.peek(1).kind not in _OPERATORS:
                return _number(stream.next().text)
            case _:
                return read_expr(stream)

    def _constructor(self) -> Any:
        """Reads `dtype(f32)`, `device("cpu")`, `complex(0.0, 1.0)`, ..., or a tag such as `random("cpu")`."""
        stream = self.stream
        word = stream.next()
        if word.text == "dtype":
            stream.expect("(")
            name = stream.expect("name")
            stream.expect(")")
            if name.text not in DTYPES:
                raise stream.error(f"there is no dtype called '{name.text}'", name)
            return DTYPES[name.text]
        arguments = self._bracketed("(", ")", self._literal)
        try:
            match word.text:
                case "complex":
                    return complex(*arguments)
                case "device":
                    return torch.device(*arguments)
                case "layout" | "memory_format":
                    return getattr(torch, *arguments)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise stream.error(f"'{word.text}' cannot be made of {arguments}: {error}", word) from None
        return Tag(word.text, tuple(arguments))

    def _bracketed(self, opening: str, closing: str, item: Any) -> list[Any]:
        self.stream.expect(opening)
        items: list[Any] = []
        while not self.stream.at(closing):
            if items:
                self.stream.expect(",")
            items.append(item())
        self.stream.expect(closing)
        return items


class _Named:
    __slots__ = ("literal", "name")

    def __init__(self, name: str, literal: Any) -> None:
        self.name = name
        self.literal = literal


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)
