"""The text form of programs in colours, for notebooks and terminals."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping

_TOKENS = re.compile(
    r"""
    (?P<comment>\#.*$)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<value>%[\w.]+)
    | (?P<opcode>\b(?:memory|kernel|control|extern|check|symbol|collective|device|random|note|stream)\.\w+\b)
    | (?P<type>\b(?:[bif]\d+|bf16|u\d+|bool|c\d+)(?=\[))
    | (?P<name>@\w[\w.]*)
    | (?P<number>\b\d+(?:\.\d+)?\b)
    """,
    re.VERBOSE | re.MULTILINE,
)

_HTML: Mapping[str, str] = {
    "comment": "#6a737d", "string": "#116329", "value": "#953800", "opcode": "#8250df", "type": "#116329",
    "name": "#8250df", "number": "#0550ae",
}  # fmt: skip
_TERMINAL: Mapping[str, str] = {
    "comment": "90", "string": "32", "value": "33", "opcode": "35", "type": "36", "name": "35", "number": "34",
}  # fmt: skip


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yields the parts of a text with their kinds, "" for plain text."""
    last = 0
    for match in _TOKENS.finditer(text):
        if match.start() > last:
            yield "", text[last : match.start()]
        yield match.lastgroup or "", match[0]
        last = match.end()
    yield "", text[last:]


def highlight_html(text: str) -> str:
    """Returns a program's text as an HTML element."""
    parts = [
        f'<span style="color:{_HTML[kind]}">{html.escape(part)}</span>' if kind else html.escape(part)
        for kind, part in _tokens(text)
    ]
    return f'<pre style="overflow:auto;max-height:600px;line-height:1.4">{"".join(parts)}</pre>'


def highlight_terminal(text: str) -> str:
    """Returns a program's text with the colour sequences of terminals."""
    return "".join([f"\033[{_TERMINAL[kind]}m{part}\033[0m" if kind else part for kind, part in _tokens(text)])
