"""Symbols of sizes: the prefix of a name fixes its kind and its sympy assumptions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, TypeAlias

import sympy

from fxwrap.errors import ExpressionError

Kind: TypeAlias = Literal["int", "float", "bool"]
"""What an expression is at run time: `int64_t`, `double` or `bool` in C++, the same-named type in Python."""

Size: TypeAlias = int | sympy.Expr
"""A size, stride, offset or scalar: a constant integer is a plain int, anything else a sympy expression."""

Expression: TypeAlias = int | sympy.Basic
"""A size or a condition (a comparison, `and`, `or`, `not`, `true`, `false`)."""

PREFIX_KINDS: dict[str, Kind] = {"s": "int", "u": "int", "n": "int", "f": "float", "uf": "float", "b": "bool"}
"""Kind by prefix: `s` sizes, `u` unbacked integers, `n` lets, `f` and unbacked `uf` floats, `b` booleans."""

_NAME = re.compile(rf"({'|'.join(PREFIX_KINDS)})(\d+)")


@lru_cache(maxsize=65536)
def symbol_kind(name: str) -> Kind:
    """The kind that a symbol's name fixes: "int", "float" or "bool".

    Raises `ExpressionError` if `name` is not a known prefix followed by digits.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        known = ", ".join(f"{prefix}0 ({kind})" for prefix, kind in PREFIX_KINDS.items())
        raise ExpressionError(f"'{name}' is not a symbol; symbols look like {known}")
    return PREFIX_KINDS[match[1]]


def is_symbol_name(name: str) -> bool:
    """Whether `name` is a known prefix followed by digits."""
    return _NAME.fullmatch(name) is not None


@lru_cache(maxsize=65536)
def make_symbol(name: str) -> sympy.Symbol:
    """The one symbol of this name; integers are assumed integer (no sign), floats real, booleans nothing.

    Raises `ExpressionError` if `name` is not a known prefix followed by digits.
    """
    kind = symbol_kind(name)
    if kind == "int":
        return sympy.Symbol(name, integer=True)
    if kind == "float":
        return sympy.Symbol(name, real=True)
    return sympy.Symbol(name)
