"""The long form of the suite: `make long-test` runs all of it, `make test` a sample of the parts that take minutes."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

LONG = os.environ.get("FXWRAP_LONG_TESTS", "") not in ("", "0")
"""Whether this run is the long form."""


def sample_size(count: int, part: int = 3) -> int:
    """Returns a number of random examples, steps or repetitions: `count` in the long form, else one in `part`."""
    return count if LONG else max(count // part, min(count, 4))


def sampled(items: Sequence[T], turn: int, part: int = 3) -> Sequence[T]:
    """Returns all items in the long form, else one in `part`: others for the next turn, so that cases share them."""
    return items if LONG else items[turn % part :: part]


def covering(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Returns positions of combinations of parameters in which each value of each parameter occurs, few of them.

    Combinations with the most values that no earlier one has come first: of a product of lists, as many remain as the
    longest list has values.
    """
    values = [frozenset(case.items()) for case in cases]
    chosen: list[int] = []
    seen: set[tuple[str, Hashable]] = set()
    for gain in range(max(map(len, values), default=0), 0, -1):
        for position, items in enumerate(values):
            if len(items - seen) >= gain:
                chosen.append(position)
                seen |= items
    return sorted(chosen)


def long_only(*values: Any) -> Any:
    """Returns a parameter of a test that only the long form runs."""
    import pytest  # child processes read `LONG` without it

    return pytest.param(*values, marks=pytest.mark.long)
