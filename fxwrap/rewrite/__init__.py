"""Rewriting: patterns over a program's lines, and over the FX graphs that programs become.

`docs/rewriting.md` is the guide.
"""

from fxwrap.matching import (
    Operation,
    Pattern,
    TypePattern,
    Wildcard,
    anything,
    call,
    computes,
    launch,
    line,
    number,
    one_of,
    reading,
    tensor,
    tensors,
    view,
)
from fxwrap.rewrite.builder import LineBuilder
from fxwrap.rewrite.engine import Refusal, Rewritten, Skip, find, rewrite
from fxwrap.rewrite.match import Match

__all__ = [
    "LineBuilder",
    "Match",
    "Operation",
    "Pattern",
    "Refusal",
    "Rewritten",
    "Skip",
    "TypePattern",
    "Wildcard",
    "anything",
    "call",
    "computes",
    "find",
    "launch",
    "line",
    "number",
    "one_of",
    "reading",
    "rewrite",
    "tensor",
    "tensors",
    "view",
]
