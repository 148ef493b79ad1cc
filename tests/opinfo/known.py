"""What fails in the sweep and may: by name, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A reason why calls of an operator fail. Regular expressions say of which, and what is then seen."""

    name: str
    reason: str
    seen: str = ""
    dtype: str = ".*"
    form: str = ".*"


UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)
"""Operators whose results hold whatever the memory held; of these only dtypes, sizes and strides are compared."""

KNOWN: tuple[Known, ...] = ()
