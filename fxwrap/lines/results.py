"""What lines that call operators share: whose memory a result is a window on, and which operands are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxwrap.wrapper_ir import Value, leaves


def aliased_operand(results: tuple[Any, ...], aliases: tuple[Value | None, ...], result: Value) -> Value | None:
    """Returns the operand whose root a result shares; None for a root of its own. `aliases` is () or one a result."""
    if not aliases:
        return None
    return next(alias for leaf, alias in zip(leaves(results), aliases) if leaf is result or leaf == result)


def wrong_aliases(results: tuple[Any, ...], operands: Sequence[Any], aliases: tuple[Value | None, ...]) -> str | None:
    """Returns what is wrong with the aliases of a call, or None."""
    if not aliases:
        return None
    if len(aliases) != len(list(leaves(results))):
        return "aliases name one operand, or none, for each result"
    for alias in aliases:
        if alias is not None and alias not in operands:
            return f"%{alias.name} is named as an alias but is no operand"
    return None


def wrong_writes(operands: Sequence[Any], written: tuple[Value, ...]) -> str | None:
    """Returns which written value is no operand of a call, or None."""
    for value in written:
        if value not in operands:
            return f"%{value.name} is written but is no operand"
    return None
