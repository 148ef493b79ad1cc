"""Colours of texts on a terminal."""

from __future__ import annotations

import argparse
import os
import sys

from fxwrap.wrapper_ir import highlight_terminal

_LEXERS = {"python": "python", "cpp": "cpp", "fx": "python"}
"""pygments' names of the languages of emitters."""


def add_color_flag(command: argparse.ArgumentParser) -> None:
    """Adds the flag --color."""
    command.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colours (default: auto, on a terminal)"
    )


def coloured(text: str, emitter: str, color: str) -> str:
    """Returns a program's text ("interpreter"), or that of another emitter, in colours where `color` wants them.

    "auto" wants them on a terminal, unless NO_COLOR is set. Emitted texts have colours if pygments is installed.
    """
    on_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    if color == "never" or (color == "auto" and not on_terminal):
        return text
    if emitter not in _LEXERS:
        return highlight_terminal(text)
    try:
        from pygments import highlight
        from pygments.formatters import TerminalFormatter
        from pygments.lexers import get_lexer_by_name
    except ImportError:
        return text
    shown: str = highlight(text, get_lexer_by_name(_LEXERS[emitter], stripnl=False), TerminalFormatter())
    return shown
