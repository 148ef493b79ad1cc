"""The long form of the suite: `make long-test` runs all of it, `make test` a sample of the parts that take minutes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from math import prod
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


def short_form(
    cases: Sequence[Mapping[str, Hashable]], lists: Sequence[Sequence[str]], turn: int = 0, part: int = 1
) -> Sequence[int]:
    """Returns the positions of the cases of a test that the short form runs: those that cover its axes (see `axes`).

    These are all cases of a test with one axis; with two those in which each value occurs, with more each pair of
    values. A `part` above 1 leaves one in `part` of so many, at least as many as the second longest axis has values:
    only of the longest some values do not occur. They are chosen by parameter, so that the values in the rows of a
    table also occur if they can. `turn` chooses which: others for other tests.
    """
    by_axis = axes(cases, lists)
    together = min(len(by_axis[0]), 3) - 1
    chosen = covering(by_axis, turn, together) if together > 0 else range(len(cases))
    if part == 1:
        return chosen
    lengths = sorted(len({case[name] for case in by_axis}) for name in by_axis[0])
    return covering(cases, turn, count=max(len(chosen[turn % part :: part]), *lengths[:-1], 1))


def covering(
    cases: Sequence[Mapping[str, Hashable]], turn: int = 0, together: int = 1, count: int | None = None
) -> list[int]:
    """Returns positions of combinations of parameters in which each value of each parameter occurs, few of them.

    The next one chosen has the most values that no earlier one has, of these the one whose values occur least often so
    far: of a product of lists, as many remain as the longest list has values, and the values of the others occur about
    equally often. Among equals, the first after position `turn`: other turns choose other combinations. `together` is
    the number of parameters whose values occur in each combination of theirs: 2 for each pair of values. With a
    `count`, so many are chosen, in steps, and among equals those whose pairs of values occur least often.
    """
    items = [sorted(case.items(), key=_name) for case in cases]
    values = [[*combinations(row, min(together, len(row)))] for row in items]
    pairs = [[*combinations(row, 2)] if count else [] for row in items]
    step = max(len(cases) // (count or len(cases) or 1), 1)
    turned = [(position + turn) % len(values) for position in range(len(values))]
    remaining = [position for first in range(step) for position in turned[first::step]]
    counts: Counter[Hashable] = Counter()
    chosen: list[int] = []
    while remaining and len(chosen) != count:
        best = min(remaining, key=lambda position: _preference(values[position], pairs[position], counts))
        if count is None and chosen and all(counts[item] for item in values[best]):
            break
        chosen.append(best)
        remaining.remove(best)
        counts.update(values[best] + pairs[best])
    return sorted(chosen)


def _name(item: tuple[str, Hashable]) -> str:
    return item[0]


def _preference(
    values: Sequence[Hashable], pairs: Sequence[Hashable], counts: Mapping[Hashable, int]
) -> tuple[int, int, int]:
    occurrences = [counts[item] for item in values]
    return -occurrences.count(0), sum(occurrences), sum([counts[item] for item in pairs])


def axes(cases: Sequence[Mapping[str, Hashable]], lists: Sequence[Sequence[str]]) -> list[dict[str, Hashable]]:
    """Returns the cases of a test by axes: each list of parameters, by a decorator, is one if it has several values.

    A row of a table is one value. A list that has each combination of the values of its parameters is a product, and
    each of these an axis. Parameters of no list are axes of their own.
    """
    names = [name for case in cases[:1] for name in case]
    groups = [tuple(group) for group in lists if all(name in names for name in group)]
    groups += [(name,) for name in names if not any(name in group for group in groups)]
    varied = []
    for group in groups:
        rows = {tuple([case[name] for name in group]) for case in cases}
        counts = [len({row[position] for row in rows}) for position in range(len(group))]
        is_product = len(rows) == prod(counts)
        varied += [(name,) for name in group] if is_product else [group]
    columns = {group: [tuple([case[name] for name in group]) for case in cases] for group in varied}
    several = {group: column for group, column in columns.items() if len({*column}) > 1}
    return [{",".join(group): column[position] for group, column in several.items()} for position in range(len(cases))]


def long_only(*values: Any) -> Any:
    """Returns a parameter of a test that only the long form runs."""
    import pytest  # child processes read `LONG` without it

    return pytest.param(*values, marks=pytest.mark.long)
