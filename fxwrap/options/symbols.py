"""Ranges and typical values of symbols in options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fxwrap.errors import OptionError

_SYMBOL = re.compile(r"(s|u|uf|f|n|b)\d+")


def check_symbol_ranges(ranges: Mapping[str, Any]) -> None:
    """Raises OptionError for a name of no symbol, and for a range that is not (lower, upper) of integers."""
    option = "option 'symbol_ranges'"
    for name, bounds in ranges.items():
        _check_name(option, name)
        if not isinstance(bounds, tuple | list) or [type(bound) for bound in bounds] != [int, int]:
            raise OptionError(f"{option} takes (lower, upper) of integers, not {bounds!r} for '{name}'")
        if bounds[0] > bounds[1]:
            raise OptionError(f"{option}: the lower bound of {bounds!r} for '{name}' is the larger one")


def check_symbol_hints(hints: Mapping[str, Any], ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raises OptionError for a name of no symbol, and for a hint that is no integer of 63 bits.

    One is negative only if the symbol's range has negative numbers.
    """
    option = "option 'symbol_hints'"
    for name, hint in hints.items():
        _check_name(option, name)
        if type(hint) is not int:
            raise OptionError(f"{option} takes integers, not {hint!r} for '{name}'")
        least = min(0, ranges.get(name, (0, 0))[0])
        if not least <= hint < 1 << 63:
            raise OptionError(
                f"{option}: {hint} for '{name}' is not from {least} to 2**63 - 1. "
                "Pass a typical value; a number that may be negative has a range in 'symbol_ranges'"
            )


def _check_name(option: str, name: str) -> None:
    if not _SYMBOL.fullmatch(str(name)):
        raise OptionError(f"{option}: {name!r} is not a symbol; symbols look like 's0' or 'u0'")
