"""The records of a sweep, what is known of its failures, and the table of both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.opinfo.batch import FAILED, PASSED
from tests.opinfo.known import KNOWN


@dataclass(frozen=True)
class Record:
    """What became of the calls of an operator with a dtype: how many of each word, with examples of what was seen.

    `kinds` counts the nodes of their graphs that were fused, were views or were called; `called` says why.
    """

    name: str
    dtype: str
    form: str
    calls: int
    words: dict[str, int]
    examples: dict[str, list[str]]
    kinds: dict[str, int]
    called: dict[str, str]
    seconds: float

    @property
    def explanation(self) -> str | None:
        """Why calls of this operator fail, where that is known."""
        for known in KNOWN:
            named = re.fullmatch(known.name, self.name) and re.fullmatch(known.dtype, self.dtype)
            if named and re.fullmatch(known.form, self.form):
                if all(re.search(known.seen, example) for example in self.examples.get(FAILED, ())):
                    return known.reason
        return None

    @property
    def unexplained(self) -> bool:
        """Whether calls failed and nobody knows why."""
        return FAILED in self.words and self.explanation is None


def table(records: Sequence[Record]) -> str:
    """Returns a page with a row for each record."""
    rows = sorted(records, key=lambda record: (record.form, record.name, record.dtype))
    lines = [*_HEAD, _summary(rows), "", "| operator | dtype | form | calls | fused/view/called | result |"]
    lines.append("|---|---|---|---|---|---|")
    lines += [_row(record) for record in rows]
    return "\n".join(lines) + "\n"


_HEAD = ["# Operators of torch's database, compared", ""]


def _summary(records: Sequence[Record]) -> str:
    counted: dict[str, int] = {}
    for record in records:
        for word, count in record.words.items():
            counted[word] = counted.get(word, 0) + count
    return ", ".join(f"{count} {word}" for word, count in counted.items()) + "."


def _row(record: Record) -> str:
    kinds = "/".join(str(record.kinds.get(kind, 0)) for kind in ("fused", "view", "call"))
    words = [f"{count} {word}" for word, count in record.words.items()]
    result = PASSED if set(record.words) == {PASSED} else "; ".join(words)
    if FAILED in record.words:
        result += f": {record.explanation or 'not explained'}"
    return f"| {record.name} | {record.dtype} | {record.form} | {record.calls} | {kinds} | {result} |"
