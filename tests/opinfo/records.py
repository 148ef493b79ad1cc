"""The outcomes of the calls of a row: an operator with a dtype, a form and a device."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fxwrap import Options
from tests.opinfo.batch import FAILED, NOT_RUN, REJECTED_BY_EAGER, Verdict, Verdicts, run_and_compare, text_of
from tests.opinfo.calls import Call, Case
from tests.opinfo.known_failures import KNOWN_FAILURES

_BATCH = 96
_EXAMPLES = 6


@dataclass(frozen=True)
class Record:
    """The outcomes of the calls of a row.

    Fields:
        environment: versions and machine.
        samples, calls: how many samples the database has, and how many of them ran.
        verdicts, examples: how many calls have each outcome, with examples of differences and errors.
        kinds: how many nodes of the traced graphs were fused, were views or were called.
        called: the reason for each called operator.
    """

    name: str
    dtype: str
    form: str
    device: str
    environment: str
    samples: int
    calls: int
    verdicts: dict[str, int]
    examples: dict[str, list[str]]
    kinds: dict[str, int]
    called: dict[str, str]
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key of its case."""
        return (self.name, self.dtype, self.form, self.device)

    @property
    def explanation(self) -> str | None:
        """The known reason why calls of this row fail, or None."""
        for known in KNOWN_FAILURES:
            patterns = (known.name, known.dtype, known.form, known.device)
            if all(re.fullmatch(pattern, part) for pattern, part in zip(patterns, self.key, strict=True)):
                if all(re.search(known.detail, example) for example in self.examples.get(FAILED, ())):
                    return known.reason
        return None

    @property
    def unexplained(self) -> bool:
        """Whether calls failed for an unknown reason."""
        return FAILED in self.verdicts and self.explanation is None


@cache
def environment() -> str:
    """Returns the versions of torch and Triton, the processor, the GPU if there is one, and the date."""
    parts = [f"torch {torch.__version__}"]
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else []
    parts += names[:1]
    if torch.cuda.is_available():
        import triton

        parts[1:1] = [f"Triton {triton.__version__}"]
        parts.append(torch.cuda.get_device_name())
    return ", ".join([*parts, time.strftime("%Y-%m-%d", time.gmtime())])


def record_of(case: Case, options: Options, most: int) -> Record:
    """Runs at most `most` calls of a case, evenly sampled, and returns their outcomes."""
    started = time.perf_counter()
    samples = case.samples()
    verdicts, calls = Verdicts(), []
    for sample in _subsample(samples, most):
        try:
            calls.append(case.call_of(sample))
        except Exception as error:  # noqa: BLE001 - operators raise any exception
            verdicts.calls.append(Verdict(sample, REJECTED_BY_EAGER, text_of(error)))
    for start in range(0, len(calls), _BATCH):
        verdicts.add(run_and_compare(calls[start : start + _BATCH], options))
    counts = Counter(verdict.word for verdict in verdicts.calls)
    examples: dict[str, list[str]] = {}
    for verdict in verdicts.calls:
        if verdict.detail and len(examples.setdefault(verdict.word, [])) < _EXAMPLES:
            examples[verdict.word].append(f"({verdict.call})  {verdict.detail}")
    return Record(
        *case.key, environment(), len(samples), len(verdicts.calls), dict(counts), examples,
        dict(verdicts.kinds), verdicts.called, time.perf_counter() - started,
    )  # fmt: skip


def _subsample(samples: Sequence[Call], most: int) -> list[Call]:
    if len(samples) <= most:
        return list(samples)
    return [samples[number * len(samples) // most] for number in range(most)]


def crashed(case: Case, reason: str) -> Record:
    """Returns the record of a case whose process died or timed out."""
    return _empty(case, FAILED, reason)


def not_run(case: Case, reason: str) -> Record:
    """Returns the record of a case that did not run."""
    return _empty(case, NOT_RUN, reason)


def _empty(case: Case, word: str, reason: str) -> Record:
    return Record(*case.key, environment(), 0, 0, {word: 1}, {word: [reason]}, {}, {}, 0.0)


def read(paths: Sequence[Path]) -> list[Record]:
    """Returns the records in files: of several for one row, the last one that ran."""
    records: dict[tuple[str, ...], Record] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            record = Record(**json.loads(line))
            if NOT_RUN not in record.verdicts or record.key not in records:
                records[record.key] = record
    return list(records.values())


def line_of(record: Record) -> str:
    """Returns a record as a line of a file."""
    fields: dict[str, Any] = asdict(record)
    return json.dumps(fields) + "\n"
