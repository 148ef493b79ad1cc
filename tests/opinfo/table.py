"""The page that says what became of every operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.opinfo.batch import FAILED, NOT_RUN, PASSED
from tests.opinfo.calls import FORMS
from tests.opinfo.records import Record

_HEAD = """# Operators of torch's database, compared

Each operator of `torch.testing._internal.common_methods_invocations.op_db`, with samples of the database: traced,
compiled by fxwrap with fused kernels (C++ on a CPU, Triton on a GPU), run by emitted Python, and compared with eager.
Dtypes, sizes, strides, integers, bools and the places of NaN and infinities are equal; floats are as near to the
operator in float64 as eager's are, by relative norm. What operands hold afterwards is compared too.
`python -m tests.opinfo.sweep --help` says how this page is made.

"Calls" are samples that were run; where the database has more, they were chosen evenly, and the column says of how
many. "Fused" counts the operators of the traced graphs that became part of kernels, "views" index arithmetic alone,
"called" operator calls, for which the last column names the operators. Results other than "passed":

- *eager refuses it*: eager raises for the sample.
- *torch traces no graph of it*: tracing raises, mostly because Python looks at an element of a tensor.
- *eager differs from itself*: two runs of eager from one seed differ.
- *torch's fake tensors say other strides or dtypes than eager gives*: the program does what the graph says.
- *torch's graph computes something else than eager*: the compiled program agrees with the graph run by eager. Gradients
  of products, say, have another formula where eager sees that no factor is zero.
- *explained*: it fails for the reason given.
- *failed*: it fails and should not.
- *not run*: the time was over.
"""

_PARTS = (
    "| part | operators | dtypes | rows | calls | results | versions and machine |",
    "|---|---:|---|---:|---:|---|---|",
)
_COLUMNS = (
    "| operator | dtype | calls | fused | views | called | result | called operators |",
    "|---|---|---:|---:|---:|---:|---|---|",
)
_FORMS = {"function": "Functions", "inplace": "Methods that write their operand", "gradient": "Gradients"}
_DEVICES = {"cpu": "on a CPU", "cuda": "on a GPU"}


def table(records: Sequence[Record]) -> str:
    """Returns a page with a row for each record, in parts by form and device."""
    rows = sorted(records, key=lambda record: (record.device, FORMS.index(record.form), record.name, record.dtype))
    parts: dict[tuple[str, str], list[Record]] = {}
    for record in rows:
        parts.setdefault((record.form, record.device), []).append(record)
    lines = [_HEAD, *_PARTS, *[_summary(part, rows) for part, rows in parts.items()], "", _left_out(records), ""]
    for part, rows in parts.items():
        lines += [f"## {_title(part)}", "", *_COLUMNS, *[_row(record) for record in rows], ""]
    return "\n".join(lines)


def _left_out(records: Sequence[Record]) -> str:
    """Returns a sentence on what the records lack."""
    ran = {(record.form, record.device) for record in records}
    parts = [(form, device) for device in _DEVICES for form in FORMS if (form, device) not in ran]
    fewer = [record for record in records if record.calls < record.samples]
    late = sum(NOT_RUN in record.words for record in records)
    left = [_title(part).replace(", ", " ").lower().replace("cpu", "CPU").replace("gpu", "GPU") for part in parts]
    left += [f"samples of {len(fewer)} rows that have more of them than were chosen"] if fewer else []
    left += [f"{late} rows for which there was no time"] if late else []
    return f"Not run: {'; '.join([*left, 'other dtypes'])}."


def _title(part: tuple[str, str]) -> str:
    form, device = part
    return f"{_FORMS[form]}, {_DEVICES[device]}"


def _summary(part: tuple[str, str], records: Sequence[Record]) -> str:
    """Returns how many rows and calls a part has, how many of each word, and where they were run."""
    counted: Counter[str] = Counter()
    for record in records:
        for word, count in record.words.items():
            counted["explained" if word == FAILED and record.explanation else word] += count
    words = "; ".join(f"{count} {word}" for word, count in counted.most_common())
    names = len({record.name for record in records})
    calls = f"{sum(record.calls for record in records)} of {sum(record.samples for record in records)}"
    places = Counter(record.where for record in records).most_common()
    ran = "; ".join(f"{place} ({count} rows)" if len(places) > 1 else place for place, count in places)
    dtypes = ", ".join(sorted({record.dtype for record in records}))
    return f"| {_title(part)} | {names} | {dtypes} | {len(records)} | {calls} | {words} | {ran} |"


def _row(record: Record) -> str:
    counts = " | ".join(str(record.kinds.get(kind, 0)) for kind in ("fused", "view", "call"))
    called = ", ".join(name.removeprefix("aten.").removesuffix(".default") for name in sorted(record.called))
    calls = f"{record.calls}" if record.calls == record.samples else f"{record.calls} of {record.samples}"
    return f"| {record.name} | {record.dtype} | {calls} | {counts} | {_result(record)} | {called} |".replace("  ", " ")


def _result(record: Record) -> str:
    if set(record.words) == {PASSED}:
        return PASSED
    if NOT_RUN in record.words:
        return NOT_RUN
    parts = [f"{count} {word}" for word, count in record.words.items() if word != FAILED]
    if FAILED in record.words:
        reason = record.explanation
        parts.append(f"{record.words[FAILED]} " + (FAILED if reason is None else f"explained: {reason}"))
    return "; ".join(parts) or PASSED
