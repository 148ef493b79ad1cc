"""The records of a sweep, what is known of its failures, and the table of both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.opinfo.batch import FAILED, PASSED
from tests.opinfo.calls import FORMS
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
    def key(self) -> tuple[str, str, str]:
        """What row of the table it is."""
        return (self.name, self.dtype, self.form)

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


_HEAD = """# Operators of torch's database, compared

Each operator of `torch.testing._internal.common_methods_invocations.op_db` on a CPU, with samples of the database:
traced, compiled by fxwrap with fused C++ kernels, run, and compared with eager. Dtypes, sizes, strides, integers, bools
and the places of NaN and infinities are equal; floats are as near to the operator in float64 as eager's are, by
relative norm. What operands hold afterwards is compared too. `python -m tests.opinfo.sweep --table docs/opinfo.md`
writes it; `--most` limits the calls of a row, which are then chosen evenly among the samples.

"Fused" counts the operators of the traced graphs that became part of kernels, "views" index arithmetic alone, "called"
operator calls, for which the last column names the operators. Results other than "passed":

- *eager refuses it*: eager raises for the sample.
- *torch traces no graph of it*: tracing raises, mostly because Python looks at an element of a tensor.
- *eager differs from itself*: two runs of eager from one seed differ.
- *torch's fake tensors say other strides or dtypes than eager gives*: the program does what the graph says.
- *explained*: it fails for the reason given.
- *failed*: it fails and should not.
"""


def table(records: Sequence[Record]) -> str:
    """Returns a page with a row for each record."""
    rows = sorted(records, key=lambda record: (FORMS.index(record.form), record.name, record.dtype))
    lines = [_HEAD, _summary(rows), ""]
    for form in dict.fromkeys(record.form for record in rows):
        lines += [f"## {_TITLES[form]}", "", *_COLUMNS]
        lines += [_row(record) for record in rows if record.form == form]
        lines.append("")
    return "\n".join(lines)


_COLUMNS = (
    "| operator | dtype | calls | fused | views | called | result | called operators |",
    "|---|---|---:|---:|---:|---:|---|---|",
)
_TITLES = {"function": "Functions", "inplace": "Methods that write their operand", "gradient": "Gradients"}


def _summary(records: Sequence[Record]) -> str:
    """Returns how many rows and calls there are, and how many of each word."""
    counted: Counter[str] = Counter()
    for record in records:
        for word, count in record.words.items():
            counted["explained" if word == FAILED and record.explanation else word] += count
    names = len({record.name for record in records})
    calls = sum(record.calls for record in records)
    words = "; ".join(f"{count} {word}" for word, count in counted.most_common())
    return f"{names} operators and variants, {len(records)} rows, {calls} calls: {words}."


def _row(record: Record) -> str:
    counts = " | ".join(str(record.kinds.get(kind, 0)) for kind in ("fused", "view", "call"))
    called = ", ".join(name.removeprefix("aten.").removesuffix(".default") for name in sorted(record.called))
    what = f"{record.name} | {record.dtype} | {record.calls}"
    return f"| {what} | {counts} | {_result(record)} | {called} |".replace("  ", " ")


def _result(record: Record) -> str:
    if set(record.words) == {PASSED}:
        return PASSED
    parts = [f"{count} {word}" for word, count in record.words.items() if word != FAILED]
    if FAILED in record.words:
        reason = record.explanation
        parts.append(f"{record.words[FAILED]} " + (FAILED if reason is None else f"explained: {reason}"))
    return "; ".join(parts) or PASSED
