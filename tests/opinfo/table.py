"""The page with a row for each operator, and its summary in `docs/opinfo.md`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tests.opinfo.batch import FAILED, NOT_RUN, PASSED
from tests.opinfo.calls import FORMS
from tests.opinfo.records import Record

_SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.DOTALL)

_PARTS = (
    "| part | operators | dtypes | rows | calls | results | versions and machine |",
    "|---|---:|---|---:|---:|---|---|",
)
_COLUMNS = (
    "| operator | dtype | calls | fused | views | called | result | called operators |",
    "|---|---|---:|---:|---:|---:|---|---|",
)
_FORMS = {"function": "Functions", "inplace": "In-place methods", "gradient": "Gradients"}
_DEVICES = {"cpu": "on a CPU", "cuda": "on a GPU"}


def page(records: Sequence[Record]) -> str:
    """Returns a page with the summary and a row for each record, in parts by form and device."""
    lines = ["# Operators of torch's database, compared", "", *summary(records), ""]
    for part, rows in _parts(records).items():
        lines += [f"## {_title(part)}", "", *_COLUMNS, *[_row(record) for record in rows], ""]
    return "\n".join(lines)


def summary(records: Sequence[Record]) -> list[str]:
    """Returns a table with a row for each form and device, and a sentence on rows and samples that did not run."""
    return [*_PARTS, *[_summary(part, rows) for part, rows in _parts(records).items()], "", _left_out(records)]


def replace_summary(document: str, records: Sequence[Record]) -> str:
    """Returns a document with the summary of records between `<!-- summary -->` and `<!-- end -->`."""
    return _SUMMARY.sub(lambda match: "\n".join([match[1].rstrip(), *summary(records), match[2]]), document)


def _parts(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    parts: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda item: (item.device, FORMS.index(item.form), item.name, item.dtype)):
        parts.setdefault((record.form, record.device), []).append(record)
    return parts


def _left_out(records: Sequence[Record]) -> str:
    """Returns a sentence on rows and samples that did not run."""
    measured = {(record.form, record.device) for record in records}
    parts = [(form, device) for device in _DEVICES for form in FORMS if (form, device) not in measured]
    fewer = [record for record in records if record.calls < record.samples]
    unfinished = sum(NOT_RUN in record.verdicts for record in records)
    omitted = [_title(part).replace(", ", " ").lower().replace("cpu", "CPU").replace("gpu", "GPU") for part in parts]
    omitted += [f"some samples of {len(fewer)} rows"] if fewer else []
    omitted += [f"{unfinished} rows, for lack of time"] if unfinished else []
    return f"Not run: {'; '.join([*omitted, 'other dtypes'])}."


def _title(part: tuple[str, str]) -> str:
    form, device = part
    return f"{_FORMS[form]}, {_DEVICES[device]}"


def _summary(part: tuple[str, str], records: Sequence[Record]) -> str:
    """Returns the counts of rows, calls and outcomes of a part, and its environment."""
    counted: Counter[str] = Counter()
    for record in records:
        for word, count in record.verdicts.items():
            counted["explained" if word == FAILED and record.explanation else word] += count
    outcomes = "; ".join(f"{count} {word}" for word, count in counted.most_common())
    names = len({record.name for record in records})
    calls = f"{sum(record.calls for record in records)} of {sum(record.samples for record in records)}"
    environments = Counter(record.environment for record in records).most_common()
    environment = "; ".join(f"{name} ({count} rows)" if len(environments) > 1 else name for name, count in environments)
    dtypes = ", ".join(sorted({record.dtype for record in records}))
    return f"| {_title(part)} | {names} | {dtypes} | {len(records)} | {calls} | {outcomes} | {environment} |"


def _row(record: Record) -> str:
    counts = " | ".join(str(record.kinds.get(kind, 0)) for kind in ("fused", "view", "call"))
    called = ", ".join(name.removeprefix("aten.").removesuffix(".default") for name in sorted(record.called))
    calls = f"{record.calls}" if record.calls == record.samples else f"{record.calls} of {record.samples}"
    return f"| {record.name} | {record.dtype} | {calls} | {counts} | {_result(record)} | {called} |".replace("  ", " ")


def _result(record: Record) -> str:
    if set(record.verdicts) == {PASSED}:
        return PASSED
    if NOT_RUN in record.verdicts:
        return NOT_RUN
    parts = [f"{count} {word}" for word, count in record.verdicts.items() if word != FAILED]
    if FAILED in record.verdicts:
        reason = record.explanation
        parts.append(f"{record.verdicts[FAILED]} " + (FAILED if reason is None else f"explained: {reason}"))
    return "; ".join(parts) or PASSED
