"""The long form of the suite: `make long-test` runs all of it, `make test` a sample of the parts that take minutes."""

from __future__ import annotations

import os
from typing import Any

LONG = os.environ.get("FXWRAP_LONG_TESTS", "") not in ("", "0")
"""Whether this run is the long form."""


def sample_size(count: int, part: int = 3) -> int:
    """Returns a number of random examples, steps or repetitions: `count` in the long form, else one in `part`."""
    return count if LONG else max(count // part, min(count, 4))


def long_only(*values: Any) -> Any:
    """Returns a parameter of a test that only the long form runs."""
    import pytest  # child processes read `LONG` without it

    return pytest.param(*values, marks=pytest.mark.long)
