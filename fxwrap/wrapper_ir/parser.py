"""The parser of the text form: `parse_program(print_program(p)) == p` for every program.

A recursive descent over tokens. What a line's operands and attributes are follows from the roles of its class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from typing import Any, NamedTuple

from fxwrap.errors import ExpressionError
from fxwrap.symbolic import SymbolInfo, Token, TokenStream, is_symbol_name, symbol_kind
from fxwrap.wrapper_ir.line import Block, LineBase, wrong_field
from fxwrap.wrapper_ir.literal_parser import LiteralParser
from fxwrap.wrapper_ir.printer import block_label
from fxwrap.wrapper_ir.program import Constant, Input, KernelDefinition, Ownership, Program
from fxwrap.wrapper_ir.roles import FieldSpec, Form, Role
from fxwrap.wrapper_ir.types import Value

_SYMBOL_FACTS = frozenset(["range", "hint", "divisible"])


def parse_program(text: str, line_classes: Iterable[type[LineBase]]) -> Program:
    """Reads a program from its text, whose lines are of these classes; it is not verified.

    Raises ParseError with line and column for text that is no program.
    """
    grammars = {cls.opcode: _Grammar(cls) for cls in line_classes}
    return _Parser(TokenStream(text), grammars).program()


class _Grammar:
    """What the text of one line class holds, read off its roles once."""

    def __init__(self, cls: type[LineBase]) -> None:
        self.cls = cls
        self.opcode = cls.opcode
        forms = {spec.form: spec for spec in cls.specs}
        self.target = forms.get(Form.TARGET)
        self.type = forms.get(Form.TYPE)
        self.result = next((spec for spec in cls.specs if spec.role is Role.DEFINE), None)
        self.operands = [
            spec
            for spec in cls.specs
            if spec.role is not Role.DEFINE and spec.form in (Form.VALUE, Form.VALUES, Form.ARGUMENTS, Form.NAMED)
        ]
        self.blocks = {block_label(spec): spec.name for spec in cls.specs if spec.role is Role.BLOCK}
        self.sequences = frozenset(spec.name for spec in cls.specs if spec.form is Form.SEQUENCE)
        self.attributes = self.sequences | {spec.name for spec in cls.specs if spec.form is Form.LITERAL}
        if Form.SYMBOL in forms:
            self.sequences |= {"range"}
            self.attributes |= _SYMBOL_FACTS
        self.required = [spec for spec in cls.specs if spec.default is MISSING]


class _Named(NamedTuple):
    name: str
    literal: Any


class _Function(NamedTuple):
    name: str
    arguments: tuple[Value, ...]
    start: int


class _Parser(LiteralParser):
    def __init__(self, stream: TokenStream, grammars: Mapping[str, _Grammar]) -> None:
        super().__init__(stream)
        self.grammars = grammars

    # --- the program and its sections -------------------------------------------------------------------------------

    def program(self) -> Program:
        """Reads the whole text. Constants and functions stand at its end, so the sections come before the bodies."""
        stream = self.stream
        stream.accept("newline")
        stream.expect("name", "program")
        name = stream.expect("at").text
        inputs = tuple(self.bracketed("(", ")", self._input))
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

    def _sections(self) -> tuple[list[Constant], list[_Function], list[KernelDefinition]]:
        stream = self.stream
        constants: list[Constant] = []
        functions: list[_Function] = []
        kernels: list[KernelDefinition] = []
        stream.accept("newline")
        while not stream.at("end"):
            word = stream.expect("name")
            if word.text == "constant":
                constants.append(self._constant())
            elif word.text == "function":
                name = stream.expect("at").text
                arguments = tuple(self.bracketed("(", ")", self._argument))
                functions.append(_Function(name, arguments, stream.mark()))
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

    def _constant(self) -> Constant:
        token = self.stream.expect("value")
        self.stream.expect(":")
        mutable = self.stream.accept("name", "mutable") is not None
        return Constant(self.define(token, self.type()), mutable)

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
            options.append((key, self.literal()))
        source = stream.expect("string").text
        entries = tuple(signature.split(", ")) if signature else ()
        kernel = KernelDefinition(name, language, source, entries, tuple(options))
        if kernel.hash != hash_token.text:
            reason = f"kernel @{name} does not have this hash; its content gives {kernel.hash}"
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
        return Input(self._symbol(token, self._attributes(_SYMBOL_FACTS, frozenset(["range"]), "a symbol")))

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
        heads = self._heads()
        opcode = stream.expect("name")
        grammar = self.grammars.get(opcode.text)
        if grammar is None:
            raise stream.error(f"there is no line called '{opcode.text}'", opcode)
        fields: dict[str, Any] = {}
        if grammar.target is not None:
            fields[grammar.target.name] = stream.expect("at").text
        self._operands(grammar, fields, opcode)
        attributes = self._attributes(grammar.attributes, grammar.sequences, f"'{opcode.text}'")
        types = self._types()
        if grammar.type is not None:
            if len(types) != 1 or types[0] is None or isinstance(types[0], tuple):
                raise stream.error(f"'{opcode.text}' takes one type", opcode)
            fields[grammar.type.name], types = types[0], []
        if grammar.blocks:
            self._blocks(grammar, fields)
        self._results(grammar, heads, types, attributes, fields, opcode)
        fields.update(attributes)
        return self._make(grammar, fields, opcode)

    def _make(self, grammar: _Grammar, fields: dict[str, Any], opcode: Token) -> LineBase:
        for spec in grammar.required:
            if spec.name not in fields:
                what = f"block ^{block_label(spec)}" if spec.role is Role.BLOCK else f"'{spec.name}'"
                raise self.stream.error(f"'{grammar.opcode}' needs {what}", opcode)
        line = grammar.cls(**fields)
        reason = wrong_field(line)
        if reason is not None:
            raise self.stream.error(reason, opcode)
        return line

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
            return self.bracketed("[", "]", self._head)
        return self.stream.next() if self.stream.at("name") else self.stream.expect("value")

    def _operands(self, grammar: _Grammar, fields: dict[str, Any], opcode: Token) -> None:
        positional: list[Any] = []
        named: list[tuple[str, Any]] = []
        if self.stream.at("("):
            for operand in self.bracketed("(", ")", self._operand):
                if type(operand) is _Named:
                    named.append((operand.name, operand.literal))
                else:
                    positional.append(operand)
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

    def _operand(self) -> Any:
        stream = self.stream
        if stream.at("name") and stream.peek(1).kind == "=":
            name = stream.next().text
            stream.next()
            return _Named(name, self.literal())
        return self.literal()

    def _attributes(self, known: frozenset[str], sequences: frozenset[str], owner: str) -> dict[str, Any]:
        """Reads `key=literal` pairs; a key whose content is a sequence takes a list in parentheses."""
        stream = self.stream
        found: dict[str, Any] = {}
        while stream.at("name"):
            key = stream.next()
            stream.expect("=")
            if key.text not in known:
                raise stream.error(f"{owner} has no attribute '{key.text}'", key)
            if key.text in found:
                raise stream.error(f"'{key.text}' is given twice", key)
            if key.text in sequences:
                found[key.text] = tuple(self.bracketed("(", ")", self.literal))
            else:
                found[key.text] = self.literal()
        return found

    def _types(self) -> list[Any]:
        if not self.stream.accept(":"):
            return []
        types = [self._type_tree()]
        while self.stream.accept(","):
            types.append(self._type_tree())
        return types

    def _type_tree(self) -> Any:
        if self.stream.at("["):
            return tuple(self.bracketed("[", "]", self._type_tree))
        return None if self.stream.accept("name", "none") else self.type()

    def _blocks(self, grammar: _Grammar, fields: dict[str, Any]) -> None:
        stream = self.stream
        stream.expect("{")
        stream.accept("newline")
        while not stream.at("}"):
            label = stream.expect("label")
            name = grammar.blocks.get(label.text)
            if name is None:
                raise stream.error(f"'{grammar.opcode}' has no block ^{label.text}", label)
            if name in fields:
                raise stream.error(f"block ^{label.text} is given twice", label)
            arguments = tuple(self.bracketed("(", ")", self._argument))
            stream.expect(":")
            stream.accept("newline")
            fields[name] = Block(arguments, self._lines(("}", "label")))
        stream.expect("}")

    # --- results ----------------------------------------------------------------------------------------------------

    def _results(
        self,
        grammar: _Grammar,
        heads: list[Any],
        types: list[Any],
        attributes: dict[str, Any],
        fields: dict[str, Any],
        opcode: Token,
    ) -> None:
        spec, stream = grammar.result, self.stream
        if spec is not None and spec.form is Form.SYMBOL:
            if len(heads) != 1 or isinstance(heads[0], list) or heads[0].kind != "name" or types:
                raise stream.error(f"'{grammar.opcode}' defines one symbol, which has no type", opcode)
            fields[spec.name] = self._symbol(heads[0], attributes)
            return
        if spec is None and (heads or types):
            raise stream.error(f"'{grammar.opcode}' defines nothing", opcode)
        if len(heads) != len(types):
            raise stream.error(f"{len(heads)} results have {len(types)} types", opcode)
        if spec is not None:
            results = tuple([self._result(head, type_, opcode) for head, type_ in zip(heads, types)])
            fields[spec.name] = results if spec.form is Form.RESULTS else self._one_result(spec, results, opcode)

    def _one_result(self, spec: FieldSpec, results: tuple[Any, ...], opcode: Token) -> Any:
        if len(results) != 1 or not isinstance(results[0], Value):
            raise self.stream.error(f"'{opcode.text}' defines one value, its {spec.name}", opcode)
        return results[0]

    def _result(self, head: Any, type_: Any, opcode: Token) -> Any:
        if isinstance(head, list):
            if not isinstance(type_, tuple) or len(type_) != len(head):
                raise self.stream.error(f"a list of {len(head)} results has as many types, in brackets", opcode)
            return tuple([self._result(part, part_type, opcode) for part, part_type in zip(head, type_)])
        if head.kind == "name":
            if head.text != "_" or type_ is not None:
                raise self.stream.error("a result is '%name', or '_' with type none", head)
            return None
        if type_ is None or isinstance(type_, tuple):
            raise self.stream.error("a result with a name has a type", head)
        return self.define(head, type_)

    def _symbol(self, token: Token, attributes: dict[str, Any]) -> SymbolInfo:
        """Makes a symbol of what was said of it, and takes that out of the attributes."""
        limits = attributes.pop("range", (None, None))
        if len(limits) != 2:
            raise self.stream.error("a range has two bounds, such as range=(2, inf)", token)
        lower, upper = (None if isinstance(limit, float) and limit in _INFINITIES else limit for limit in limits)
        try:
            symbol_kind(token.text)
            return SymbolInfo(token.text, lower, upper, attributes.pop("hint", None), attributes.pop("divisible", 1))
        except (ExpressionError, TypeError) as error:
            raise self.stream.error(f"'{token.text}' is no symbol: {error}", token) from None


_INFINITIES = (math.inf, -math.inf)
