"""The recursive-descent parser of the text form: `parse_program(print_program(p)) == p` for every program.

The operands and attributes of a line follow from the roles of its class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, NamedTuple, TypeAlias

from fxwrap.errors import ExpressionError
from fxwrap.garbage_collection import gc_paused
from fxwrap.symbolic import SymbolInfo, Token, TokenStream, is_symbol_name, symbol_kind
from fxwrap.wrapper_ir.line import Block, LineBase, field_type_error
from fxwrap.wrapper_ir.literal_parser import LiteralParser
from fxwrap.wrapper_ir.printer import block_label
from fxwrap.wrapper_ir.program import Input, KernelDefinition, Ownership, Program, ProgramConstant
from fxwrap.wrapper_ir.roles import Form, Role
from fxwrap.wrapper_ir.types import Operand, Result, Type, Value

_Head: TypeAlias = "Token | tuple[_Head, ...]"
_TypeTree: TypeAlias = "Type | tuple[_TypeTree, ...] | None"

_SYMBOL_ATTRIBUTES = frozenset(["range", "hint", "divisible"])


@gc_paused()
def parse_program(text: str, line_classes: Iterable[type[LineBase]]) -> Program:
    """Parses a program with lines of these classes, without verifying it. Raises ParseError with line and column."""
    grammars = {cls.opcode: _Grammar(cls) for cls in line_classes}
    return _Parser(TokenStream(text), grammars).program()


class _Grammar:
    """The syntax of a line class."""

    def __init__(self, cls: type[LineBase]) -> None:
        self.cls = cls
        self.opcode = cls.opcode
        forms = {spec.form: spec for spec in cls.specs}
        self.target = forms.get(Form.TARGET)
        self.type = forms.get(Form.TYPE)
        self.result = next((spec for spec in cls.specs if spec.role is Role.DEFINE), None)
        forms_of_operands = (Form.VALUE, Form.VALUES, Form.ARGUMENTS, Form.NAMED)
        self.operands = [spec for spec in cls.specs if spec.role is not Role.DEFINE and spec.form in forms_of_operands]
        self.blocks = {block_label(spec): spec.name for spec in cls.specs if spec.role is Role.BLOCK}
        self.sequences = frozenset(spec.name for spec in cls.specs if spec.form is Form.SEQUENCE)
        self.attributes = self.sequences | {spec.name for spec in cls.specs if spec.form is Form.LITERAL}
        if Form.SYMBOL in forms:
            self.sequences |= {"range"}
            self.attributes |= _SYMBOL_ATTRIBUTES
        self.required = [spec for spec in cls.specs if spec.default is MISSING]


class _KeywordOperand(NamedTuple):
    name: str
    operand: Operand


class _FunctionHeader(NamedTuple):
    name: str
    arguments: tuple[Value, ...]
    start: int


class _Parser(LiteralParser):
    def __init__(self, stream: TokenStream, grammars: Mapping[str, _Grammar]) -> None:
        super().__init__(stream)
        self.grammars = grammars

    # --- the program and its sections -------------------------------------------------------------------------------

    def program(self) -> Program:
        """Reads a program. The sections at its end are read before the bodies, which use their constants."""
        stream = self.stream
        stream.accept("newline")
        stream.expect("name", "program")
        name = stream.expect("at").text
        inputs = self.delimited_list("(", ")", self._input)
        header = []
        while stream.at("name"):
            key = stream.next().text
            stream.expect("=")
            header.append((key, stream.expect("string").text))
        body_start = stream.mark()
        self._skip_braces()
        constants, functions, kernels = self._sections()
        stream.reset(body_start)
        body = self._braced_lines(())
        blocks = []
        for function in functions:
            stream.reset(function.start)
            blocks.append((function.name, self._braced_lines(function.arguments)))
        return Program(name, inputs, body, tuple(constants), tuple(kernels), tuple(blocks), tuple(header))

    def _sections(self) -> tuple[list[ProgramConstant], list[_FunctionHeader], list[KernelDefinition]]:
        stream = self.stream
        constants: list[ProgramConstant] = []
        functions: list[_FunctionHeader] = []
        kernels: list[KernelDefinition] = []
        stream.accept("newline")
        while not stream.at("end"):
            word = stream.expect("name")
            if word.text == "constant":
                constants.append(self._constant())
            elif word.text == "function":
                name = stream.expect("at").text
                arguments = self.delimited_list("(", ")", self._argument)
                functions.append(_FunctionHeader(name, arguments, stream.mark()))
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

    def _constant(self) -> ProgramConstant:
        token = self.stream.expect("value")
        self.stream.expect(":")
        mutable = self.stream.accept("name", "mutable") is not None
        return ProgramConstant(self.define(token, self.type()), mutable)

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
            option = self.literal()
            if not isinstance(option, str | int | float):
                raise stream.error(f"the kernel option '{key}' is a string, number or boolean")
            options.append((key, option))
        source = stream.expect("string").text
        entries = tuple(signature.split(", ")) if signature else ()
        kernel = KernelDefinition(name, language, source, entries, tuple(options))
        if kernel.hash != hash_token.text:
            reason = f"kernel @{name} does not have this hash; its content has the hash {kernel.hash}"
            raise stream.error(reason, hash_token)
        return kernel

    def _input(self) -> Input:
        stream = self.stream
        if stream.at("name"):
            return self._symbol_input()
        token = stream.expect("value")
        stream.expect(":")
        word = stream.expect("name")
        known = [item.value for item in Ownership]
        if word.text not in known:
            raise stream.error(f"expected an ownership ({', '.join(known)}), found {word.describe()}", word)
        return Input(self.define(token, self.type()), Ownership(word.text))

    def _symbol_input(self) -> Input:
        stream = self.stream
        token = stream.next()
        if not is_symbol_name(token.text):
            raise stream.error(f"expected a %value or a symbol such as s0, found {token.describe()}", token)
        stream.expect(":")
        kind = stream.expect("name")
        if kind.text != symbol_kind(token.text):
            raise stream.error(f"symbol {token.text} is of kind {symbol_kind(token.text)}", kind)
        return Input(self._symbol(token, self._attributes(_SYMBOL_ATTRIBUTES, frozenset(["range"]), "a symbol")))

    def _argument(self) -> Value:
        token = self.stream.expect("value")
        self.stream.expect(":")
        return self.define(token, self.type())

    # --- lines ------------------------------------------------------------------------------------------------------

    def _braced_lines(self, arguments: tuple[Value, ...]) -> Block:
        self.stream.expect("{")
        self.stream.accept("newline")
        lines = self._lines(("}",))
        self.stream.expect("}")
        return Block(arguments, lines)

    def _lines(self, ends: tuple[str, ...]) -> tuple[LineBase, ...]:
        stream = self.stream
        lines = []
        while stream.peek().kind not in ends:
            lines.append(self._line())
            if stream.peek().kind not in ends:
                stream.expect("newline")
        return tuple(lines)

    def _line(self) -> LineBase:
        stream = self.stream
        heads = self._result_names()
        opcode = stream.expect("name")
        grammar = self.grammars.get(opcode.text)
        if grammar is None:
            raise stream.error(f"unknown line '{opcode.text}'", opcode)
        fields: dict[str, object] = {}
        if grammar.target is not None:
            fields[grammar.target.name] = stream.expect("at").text
        self._operands(grammar, fields, opcode)
        attributes = self._attributes(grammar.attributes, grammar.sequences, f"'{opcode.text}'")
        types = self.comma_list(self._type_tree) if stream.accept(":") else ()
        if grammar.type is not None:
            if len(types) != 1 or types[0] is None or isinstance(types[0], tuple):
                raise stream.error(f"'{opcode.text}' takes one type", opcode)
            fields[grammar.type.name], types = types[0], ()
        if grammar.blocks:
            self._blocks(grammar, fields)
        self._results(grammar, heads, types, attributes, fields, opcode)
        fields.update(attributes)
        return self._build_line(grammar, fields, opcode)

    def _build_line(self, grammar: _Grammar, fields: Mapping[str, Any], opcode: Token) -> LineBase:
        for spec in grammar.required:
            if spec.name not in fields:
                missing = f"block ^{block_label(spec)}" if spec.role is Role.BLOCK else f"'{spec.name}'"
                raise self.stream.error(f"'{grammar.opcode}' needs {missing}", opcode)
        line = grammar.cls(**fields)
        reason = field_type_error(line)
        if reason is not None:
            raise self.stream.error(reason, opcode)
        return line

    def _result_names(self) -> tuple[_Head, ...]:
        """Reads the result names before '=': tokens, nested tuples of them, or nothing."""
        if self.stream.at("name") and self.stream.peek(1).kind not in ("=", ","):
            return ()
        heads = self.comma_list(self._result_name)
        self.stream.expect("=")
        return heads

    def _result_name(self) -> _Head:
        if self.stream.at("["):
            return self.delimited_list("[", "]", self._result_name)
        return self.stream.next() if self.stream.at("name") else self.stream.expect("value")

    def _operands(self, grammar: _Grammar, fields: dict[str, object], opcode: Token) -> None:
        operands = self.delimited_list("(", ")", self._operand) if self.stream.at("(") else ()
        named = [tuple(operand) for operand in operands if isinstance(operand, _KeywordOperand)]
        positional = [operand for operand in operands if not isinstance(operand, _KeywordOperand)]
        for spec in grammar.operands:
            if spec.form is Form.NAMED:
                fields[spec.name], named = tuple(named), []
            elif spec.form is not Form.VALUE:
                fields[spec.name], positional = tuple(positional), []
            elif positional:
                fields[spec.name] = positional.pop(0)
            elif spec.default is MISSING:
                raise self.stream.error(f"'{grammar.opcode}' needs the operand '{spec.name}'", opcode)
        if positional or named:
            raise self.stream.error(f"'{grammar.opcode}' has too many operands", opcode)

    def _operand(self) -> Operand | _KeywordOperand:
        stream = self.stream
        if stream.at("name") and stream.peek(1).kind == "=":
            name = stream.next().text
            stream.next()
            return _KeywordOperand(name, self.operand())
        return self.operand()

    def _attributes(self, known: frozenset[str], sequences: frozenset[str], owner: str) -> dict[str, Any]:
        """Reads `key=literal` pairs, with `key=(literal, ...)` for sequences."""
        stream = self.stream
        attributes: dict[str, object] = {}
        while stream.at("name"):
            key = stream.next()
            stream.expect("=")
            if key.text not in known:
                raise stream.error(f"{owner} has no attribute '{key.text}'", key)
            if key.text in attributes:
                raise stream.error(f"'{key.text}' is repeated", key)
            is_sequence = key.text in sequences
            attributes[key.text] = self.delimited_list("(", ")", self.literal) if is_sequence else self.literal()
        return attributes

    def _type_tree(self) -> _TypeTree:
        if self.stream.at("["):
            return self.delimited_list("[", "]", self._type_tree)
        return None if self.stream.accept("name", "none") else self.type()

    def _blocks(self, grammar: _Grammar, fields: dict[str, object]) -> None:
        stream = self.stream
        stream.expect("{")
        stream.accept("newline")
        while not stream.at("}"):
            label = stream.expect("label")
            name = grammar.blocks.get(label.text)
            if name is None:
                raise stream.error(f"'{grammar.opcode}' has no block ^{label.text}", label)
            if name in fields:
                raise stream.error(f"block ^{label.text} is repeated", label)
            arguments = self.delimited_list("(", ")", self._argument)
            stream.expect(":")
            stream.accept("newline")
            fields[name] = Block(arguments, self._lines(("}", "label")))
        stream.expect("}")

    # --- results ----------------------------------------------------------------------------------------------------

    def _results(
        self,
        grammar: _Grammar,
        heads: Sequence[_Head],
        types: Sequence[_TypeTree],
        attributes: dict[str, object],
        fields: dict[str, object],
        opcode: Token,
    ) -> None:
        spec, stream = grammar.result, self.stream
        if spec is not None and spec.form is Form.SYMBOL:
            if len(heads) != 1 or not isinstance(heads[0], Token) or heads[0].kind != "name" or types:
                raise stream.error(f"'{grammar.opcode}' defines one symbol, which has no type", opcode)
            fields[spec.name] = self._symbol(heads[0], attributes)
            return
        if spec is None and (heads or types):
            raise stream.error(f"'{grammar.opcode}' defines nothing", opcode)
        if len(heads) != len(types):
            raise stream.error(f"{len(heads)} results have {len(types)} types", opcode)
        if spec is not None:
            results = tuple([self._result(head, type_, opcode) for head, type_ in zip(heads, types)])
            if spec.form is not Form.RESULTS and (len(results) != 1 or not isinstance(results[0], Value)):
                raise stream.error(f"'{opcode.text}' defines one value, its {spec.name}", opcode)
            fields[spec.name] = results if spec.form is Form.RESULTS else results[0]

    def _result(self, head: _Head, type_: _TypeTree, opcode: Token) -> Result:
        if not isinstance(head, Token):
            if not isinstance(type_, tuple) or len(type_) != len(head):
                raise self.stream.error(f"a list of {len(head)} results needs {len(head)} types in brackets", opcode)
            return tuple([self._result(part, part_type, opcode) for part, part_type in zip(head, type_)])
        if head.kind == "name":
            if head.text != "_" or type_ is not None:
                raise self.stream.error("a result is '%name', or '_' with type none", head)
            return None
        if type_ is None or isinstance(type_, tuple):
            raise self.stream.error("a named result needs a type", head)
        return self.define(head, type_)

    def _symbol(self, token: Token, attributes: dict[str, Any]) -> SymbolInfo:
        """Returns a symbol with the attributes of its definition, which are removed from `attributes`."""
        limits = attributes.pop("range", (None, None))
        if len(limits) != 2:
            raise self.stream.error("a range has two bounds, such as range=(2, inf)", token)
        lower, upper = (None if isinstance(limit, float) and limit in _INFINITIES else limit for limit in limits)
        try:
            symbol_kind(token.text)
            return SymbolInfo(token.text, lower, upper, attributes.pop("hint", None), attributes.pop("divisible", 1))
        except (ExpressionError, TypeError) as error:
            raise self.stream.error(f"invalid symbol '{token.text}': {error}", token) from None


_INFINITIES = (math.inf, -math.inf)
