"""Symbols. The prefix of a name determines its kind and its sympy assumptions."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import sympy

from fxwrap.caching import bounded_cache
from fxwrap.errors import ExpressionError

ScalarKind: TypeAlias = Literal["int", "float", "bool"]
"""The run-time kind of an expression: `int64_t`, `double` or `bool` in C++, the type of the same name in Python."""

Size: TypeAlias = int | sympy.Expr
"""A size, stride, offset or scalar: a constant integer is a plain int, anything else a sympy expression."""

Expression: TypeAlias = int | sympy.Basic
"""A size or a condition (a comparison, `and`, `or`, `not`, `true`, `false`)."""

PREFIX_KINDS: dict[str, ScalarKind] = {"s": "int", "u": "int", "n": "int", "f": "float", "uf": "float", "b": "bool"}
"""Kind by prefix: `s` sizes, `u` unbacked integers, `n` lets, `f` and unbacked `uf` floats, `b` booleans."""

_NAME = re.compile(rf"({'|'.join(PREFIX_KINDS)})(\d+)")


@bounded_cache(65536)
def symbol_kind(name: str) -> ScalarKind:
    """Returns the kind of a symbol's name: "int", "float" or "bool".

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


@bounded_cache(65536)
def make_symbol(name: str) -> sympy.Symbol:
    """Returns the symbol of a name. Integers are assumed integer (of any sign), floats real, booleans nothing.

    Raises `ExpressionError` if `name` is not a known prefix followed by digits.
    """
    kind = symbol_kind(name)
    if kind == "int":
        return sympy.Symbol(name, integer=True)
    if kind == "float":
        return sympy.Symbol(name, real=True)
    return sympy.Symbol(name)
