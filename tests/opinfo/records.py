"""What became of the calls of a row: an operator with a dtype, a device and a form of calling it."""

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
from tests.opinfo.batch import FAILED, NOT_RUN, REFUSED, Verdict, Verdicts, judged, text_of
from tests.opinfo.calls import Call, Case
from tests.opinfo.known import KNOWN

_BATCH = 96
_EXAMPLES = 6


@dataclass(frozen=True)
class Record:
    """What became of the calls of a row: how many of each word, with examples of what was seen.

    Of so many `samples` of the database so many `calls` were made. `kinds` counts the nodes of their graphs that were
    fused, were views or were called; `called` says why. `where` names the versions and the machine.
    """

    name: str
    dtype: str
    form: str
    device: str
    where: str
    samples: int
    calls: int
    words: dict[str, int]
    examples: dict[str, list[str]]
    kinds: dict[str, int]
    called: dict[str, str]
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What row of the table it is."""
        return (self.name, self.dtype, self.form, self.device)

    @property
    def explanation(self) -> str | None:
        """Why calls of this operator fail, where that is known."""
        for known in KNOWN:
            patterns = (known.name, known.dtype, known.form, known.device)
            if all(re.fullmatch(pattern, part) for pattern, part in zip(patterns, self.key, strict=True)):
                if all(re.search(known.seen, example) for example in self.examples.get(FAILED, ())):
                    return known.reason
        return None

    @property
    def unexplained(self) -> bool:
        """Whether calls failed and nobody knows why."""
        return FAILED in self.words and self.explanation is None


@cache
def where() -> str:
    """Returns the versions of what computes here, the processor and the GPU if there is one."""
    parts = [f"torch {torch.__version__}"]
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else []
    parts += names[:1]
    if torch.cuda.is_available():
        import triton

        parts[1:1] = [f"Triton {triton.__version__}"]
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def record_of(case: Case, options: Options, most: int) -> Record:
    """Runs at most so many calls of a case, evenly chosen, and returns what became of them."""
    started = time.perf_counter()
    samples = case.samples()
    found, calls = Verdicts(), []
    for sample in _chosen(samples, most):
        try:
            calls.append(case.call_of(sample))
        except Exception as error:  # noqa: BLE001 - operators raise what they please
            found.calls.append(Verdict(sample, REFUSED, text_of(error)))
    for start in range(0, len(calls), _BATCH):
        found.add(judged(calls[start : start + _BATCH], options))
    words = Counter(verdict.word for verdict in found.calls)
    examples: dict[str, list[str]] = {}
    for verdict in found.calls:
        if verdict.seen and len(examples.setdefault(verdict.word, [])) < _EXAMPLES:
            examples[verdict.word].append(f"({verdict.call})  {verdict.seen}")
    return Record(
        *case.key, where(), len(samples), len(found.calls), dict(words), examples,
        dict(found.kinds), found.called, time.perf_counter() - started,
    )  # fmt: skip


def _chosen(samples: Sequence[Call], most: int) -> list[Call]:
    if len(samples) <= most:
        return list(samples)
    return [samples[number * len(samples) // most] for number in range(most)]


def broken(case: Case, reason: str) -> Record:
    """Returns the record of a case whose process gave none."""
    return _empty(case, FAILED, reason)


def not_run(case: Case, reason: str) -> Record:
    """Returns the record of a case that nobody ran."""
    return _empty(case, NOT_RUN, reason)


def _empty(case: Case, word: str, reason: str) -> Record:
    return Record(*case.key, where(), 0, 0, {word: 1}, {word: [reason]}, {}, {}, 0.0)


def read(paths: Sequence[Path]) -> list[Record]:
    """Returns the records in files; of two for one row the later, but one that ran stands before one that did not."""
    found: dict[tuple[str, ...], Record] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            record = Record(**json.loads(line))
            if NOT_RUN not in record.words or record.key not in found:
                found[record.key] = record
    return list(found.values())


def line_of(record: Record) -> str:
    """Returns a record as a line of a file."""
    fields: dict[str, Any] = asdict(record)
    return json.dumps(fields) + "\n"
