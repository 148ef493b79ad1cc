"""The tokens of IR text, shared by the expression parser and the program parser."""

from __future__ import annotations

import json
import re
from typing import NamedTuple, NoReturn

from fxwrap.errors import ParseError

PUNCTUATION = (
    "->", "**", "<=", ">=", "==", "!=",
    "(", ")", "[", "]", "{", "}", "<", ">", ",", ":", "=", "|", "*", "+", "-", "/",
)  # fmt: skip
"""Punctuation tokens, longer ones first; the kind of a punctuation token is its text."""

_TOKEN = re.compile(
    r"[ \t\r\f]*(?:"
    r"(?P<type>[^\W\d]\w*\[[\d, |]*\]@\w+(?::\d+)?(?![\w.<]|:\d))|"
    r"(?P<name>[^\W\d]\w*(?:\.\w+)*)"
    r"|%(?P<value>\w+(?:\.\w+)*)"
    r"|(?P<number>(?:\d{1,4000}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])"
    r"|(?P<raw>\"\"\".*?\"\"\")"
    r"|(?P<string>(?!\"\"\")\"(?:[^\"\\\n]|\\.)*\")"
    r"|(?P<newline>\n(?:[ \t\r\f]*(?:#[^\n]*)?\n)*)"
    r"|@(?P<at>\w+(?:\.\w+)*)"
    r"|\^(?P<label>\w+(?:\.\w+)*)"
    r"|(?P<comment>#[^\n]*)"
    rf"|(?P<punctuation>{'|'.join(re.escape(mark) for mark in PUNCTUATION)})"
    r"|(?P<end>\Z)"
    r")",
    re.DOTALL,
)
_PREFIXES = {"value": "%", "at": "@", "label": "^"}
_KIND_DESCRIPTIONS = {
    "end": "end of text",
    "newline": "end of line",
    "value": "a %value",
    "at": "an @name",
    "label": "a ^label",
}
_CLOSING = {"(": 1, "[": 1, ")": -1, "]": -1}


class Token(NamedTuple):
    """A token: its kind, its text and its start (line and column from 1).

    Kinds are `value` (`%name`), `name` (dots allowed), `at` (`@name`), `label` (`^name`), `number`, `string`, `type` (a
    tensor type with constant sizes, `f32[2, 3]@cpu`, one token for speed), `newline`, `end`, and for punctuation the
    mark itself. The text of `value`, `at` and `label` has no prefix; that of a `string` is decoded.
    """

    kind: str
    text: str
    line: int
    column: int

    def describe(self) -> str:
        """Returns the token's description in error messages."""
        if self.kind in ("newline", "end"):
            return f"end of {'line' if self.kind == 'newline' else 'text'}"
        if self.kind == "string":
            return f"string {json.dumps(self.text if len(self.text) < 40 else self.text[:37] + '...')}"
        return f"'{_PREFIXES.get(self.kind, '')}{self.text}'"


def tokenize(text: str) -> list[Token]:
    """Splits IR text into tokens, the last of kind `end`.

    Comments and blank lines are skipped. A run of line ends is one `newline` token, except inside `()` and `[]` and
    before the first token. Raises `ParseError` at a character that starts no token.
    """
    tokens: list[Token] = []
    append = tokens.append
    match_at = _TOKEN.match
    line, line_start, position, depth = 1, 0, 0, 0
    while True:
        match = match_at(text, position)
        if match is None:
            _fail(text, position, line, line_start)
        kind = match.lastgroup
        assert kind is not None  # every alternative of the pattern is a named group
        start, position = match.span(kind)
        if kind == "punctuation":
            mark = match[kind]
            depth = max(0, depth + _CLOSING.get(mark, 0))
            append(Token(mark, mark, line, start - line_start + 1))
        elif kind == "newline":
            if depth == 0 and tokens and tokens[-1].kind != "newline":
                append(Token("newline", "\n", line, start - line_start + 1))
            line += match[kind].count("\n")
            line_start = position
        elif kind == "raw":
            content = text[start + 3 : position - 3]
            append(Token("string", content, line, start - line_start + 1))
            if "\n" in content:
                line += content.count("\n")
                line_start = text.rindex("\n", start, position) + 1
        elif kind == "string":
            content = _decode(text, start, position, line, line_start)
            append(Token("string", content, line, start - line_start + 1))
        elif kind == "end":
            append(Token("end", "", line, start - line_start + 1))
            return tokens
        elif kind != "comment":
            prefix = 1 if kind in _PREFIXES else 0
            append(Token(kind, match[kind], line, start - line_start + 1 - prefix))


def quote(text: str, *, raw: bool = False) -> str:
    """Returns `text` as a string token; with `raw`, in triple quotes and unescaped where possible.

    The token of `tokenize(quote(text))` has the same text for every string.
    """
    if raw and '"""' not in text and not text.endswith('"') and "\r" not in text:
        return f'"""{text}"""'
    return json.dumps(text)


def _decode(text: str, start: int, end: int, line: int, line_start: int) -> str:
    if "\\" not in text[start:end]:
        return text[start + 1 : end - 1]
    try:
        decoded: str = json.loads(text[start:end], strict=False)
    except json.JSONDecodeError as error:
        column = start + error.pos - line_start + 1
        reason = f"bad escape in string: {error.msg}"
        raise ParseError(reason, line, column, _line_at(text, line_start)) from None
    return decoded


def _fail(text: str, position: int, line: int, line_start: int) -> NoReturn:
    while text[position] in " \t\r\f":
        position += 1
    character = text[position]
    if text.startswith('"""', position):
        reason = 'string that is never closed by """'
    elif character == '"':
        reason = "string that is not closed on its line"
    elif character.isdigit():
        reason = "malformed number; digits followed by letters or dots must be quoted"
    else:
        reason = f"character {character!r} starts no token"
    raise ParseError(reason, line, position - line_start + 1, _line_at(text, line_start))


def _line_at(text: str, line_start: int) -> str:
    end = text.find("\n", line_start)
    return text[line_start : end if end >= 0 else len(text)]


class TokenStream:
    """Tokens with a position, for a recursive-descent parser. Errors have line, column and source line."""

    __slots__ = ("_lines", "_position", "_source", "_tokens")

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = tokenize(source)
        self._position = 0
        self._lines: list[str] | None = None

    def peek(self, offset: int = 0) -> Token:
        """Returns the token at an offset from the next one without consuming it, `end` past the end."""
        tokens = self._tokens
        position = self._position + offset
        return tokens[position] if position < len(tokens) else tokens[-1]

    def next(self) -> Token:
        """Consumes and returns the next token; `end` is never consumed."""
        token = self._tokens[self._position]
        if token.kind != "end":
            self._position += 1
        return token

    def at(self, kind: str, text: str | None = None) -> bool:
        """Whether the next token has this kind, and this text if not None."""
        token = self._tokens[self._position]
        return token[0] == kind and (text is None or token[1] == text)

    def accept(self, kind: str, text: str | None = None) -> Token | None:
        """Consumes the next token if it has this kind (and text), else returns None."""
        token = self._tokens[self._position]
        if token[0] != kind or (text is not None and token[1] != text):
            return None
        if kind != "end":
            self._position += 1
        return token

    def expect(self, kind: str, text: str | None = None) -> Token:
        """Consumes the next token. Raises `ParseError` if it has another kind or text."""
        token = self._tokens[self._position]
        if token[0] != kind or (text is not None and token[1] != text):
            quoted = text is not None or kind in PUNCTUATION
            description = f"'{text or kind}'" if quoted else _KIND_DESCRIPTIONS.get(kind, f"a {kind}")
            raise self.error(f"expected {description}, found {token.describe()}")
        if kind != "end":
            self._position += 1
        return token

    def mark(self) -> int:
        """Returns the position, for `reset`."""
        return self._position

    def reset(self, mark: int) -> None:
        """Moves to a marked position."""
        self._position = mark

    def error(self, reason: str, token: Token | None = None) -> ParseError:
        """Returns a `ParseError` at `token` (the next one if None)."""
        at = token or self.peek()
        if self._lines is None:
            self._lines = self._source.split("\n")
        return ParseError(reason, at.line, at.column, self._lines[at.line - 1])
