"""The long form of the suite: `make long-test` runs all of it, `make test` a sample of the parts that take minutes."""

from __future__ import annotations

import os
from collections.abc import Sequence
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


def long_only(*values: Any) -> Any:
    """Returns a parameter of a test that only the long form runs."""
    import pytest  # child processes read `LONG` without it

    return pytest.param(*values, marks=pytest.mark.long)
