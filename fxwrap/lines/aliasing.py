"""Aliasing and mutation shared by the lines that call operators."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.wrapper_ir import Operand, Result, Value, leaves


def aliased_operand(results: tuple[Result, ...], aliases: tuple[Value | None, ...], result: Value) -> Value | None:
    """Returns the operand that a result aliases, or None for a new root. `aliases` has one item per result, or none."""
    if not aliases:
        return None
    return next(alias for leaf, alias in zip(leaves(results), aliases) if leaf is result or leaf == result)


def alias_error(
    results: tuple[Result, ...], operands: Sequence[Operand], aliases: tuple[Value | None, ...]
) -> str | None:
    """Returns the first error in the aliases of a call, or None."""
    if aliases and len(aliases) != len(list(leaves(results))):
        return "`aliases` has one item, an operand or none, for each result"
    for alias in aliases:
        if alias is not None and alias not in operands:
            return f"%{alias.name} is listed in `aliases` but is not an operand"
    return None


def writes_error(operands: Sequence[Operand], written: tuple[Value, ...]) -> str | None:
    """Returns an error for the first written value that is not an operand of the call, or None."""
    for value in written:
        if value not in operands:
            return f"%{value.name} is listed in `writes` but is not an operand"
    return None
