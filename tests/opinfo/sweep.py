"""Every operator of torch's database, compiled and compared with eager.

    python -m tests.opinfo.sweep --table docs/opinfo.md

Each operator and dtype runs in a process of its own, so that a crash is one row of the table. The records of a sweep
are one JSON object a line; `--table` writes them as Markdown. `--resume` adds the rows that a sweep did not come to.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from fxwrap import Options
from tests.opinfo.batch import FAILED, Verdicts, judged
from tests.opinfo.calls import DTYPES, FORMS, Case, cases
from tests.opinfo.table import Record, table

_BATCH = 96
_EXAMPLES = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweep that the arguments ask for; returns 1 where a failure is not explained, else 0."""
    chosen = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    dtypes = [getattr(torch, name) for name in chosen.dtype.split(",")]
    wanted = [
        case for form in chosen.form.split(",") for case in cases(dtypes, form) if re.fullmatch(chosen.only, case.name)
    ]
    options = Options(fallback="error", cpu_kernels=chosen.kernels, emitter=chosen.emitter)
    records = _read(Path(chosen.records)) if chosen.resume else []
    known = {record.key for record in records}
    wanted = [case for case in wanted if (case.name, case.dtype_name, case.form) not in known]
    with Path(chosen.records).open("a" if chosen.resume else "w") as file:
        for record in _swept(wanted, options, chosen.most, chosen.jobs, chosen.timeout):
            records.append(record)
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            _report(record, len(records), len(known) + len(wanted))
    if chosen.table:
        Path(chosen.table).write_text(table(records))
    failed = [record for record in records if record.unexplained]
    print(f"{len(records)} rows, {sum(record.calls for record in records)} calls, {len(failed)} rows with failures")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=".*", help="a regular expression for names of operators, variants included")
    parser.add_argument("--dtype", default=",".join(str(dtype).removeprefix("torch.") for dtype in DTYPES))
    parser.add_argument("--form", default="function", help=f"of {', '.join(FORMS)}, with commas between them")
    parser.add_argument("--kernels", default="cpp", choices=("cpp", "triton"))
    parser.add_argument("--emitter", default="python")
    parser.add_argument("--most", type=int, default=10**6, help="the most calls of each row, evenly chosen")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for an operator and dtype")
    parser.add_argument("--records", default=os.devnull, help="where to write what was found, one JSON object a line")
    parser.add_argument("--resume", action="store_true", help="keep the rows in the records, add the others")
    parser.add_argument("--table", help="where to write the table")
    return parser


def _read(path: Path) -> list[Record]:
    """Returns the records of earlier sweeps; of two for one row the later."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [Record(**json.loads(line)) for line in lines]
    return list({record.key: record for record in records}.values())


def record_of(case: Case, options: Options, most: int) -> Record:
    """Runs at most so many calls of a case, evenly chosen, and returns what became of them."""
    started = time.perf_counter()
    calls = list(case.calls())
    step = -(-len(calls) // most)
    chosen = calls[:: max(step, 1)]
    found = Verdicts()
    for start in range(0, len(chosen), _BATCH):
        found.add(judged(chosen[start : start + _BATCH], options))
    words = Counter(verdict.word for verdict in found.calls)
    examples: dict[str, list[str]] = {}
    for verdict in found.calls:
        if verdict.seen and len(examples.setdefault(verdict.word, [])) < _EXAMPLES:
            examples[verdict.word].append(f"({verdict.call})  {verdict.seen}")
    return Record(
        case.name, case.dtype_name, case.form, len(chosen), dict(words), examples,
        dict(found.kinds), found.called, time.perf_counter() - started,
    )  # fmt: skip


def _broken(case: Case, reason: str) -> Record:
    return Record(case.name, case.dtype_name, case.form, 0, {FAILED: 1}, {FAILED: [reason]}, {}, {}, 0.0)


@dataclass
class _Job:
    case: Case
    process: BaseProcess
    receiver: Connection
    started: float = field(default_factory=time.monotonic)


def _swept(wanted: Sequence[Case], options: Options, most: int, jobs: int, timeout: float) -> Iterator[Record]:
    """Yields the records of cases as they come, so many of them running at a time."""
    waiting, running = list(reversed(wanted)), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_started(waiting.pop(), options, most))
        wait([job.receiver for job in running], timeout=1.0)
        for job in list(running):
            record = _finished(job, timeout)
            if record is not None:
                running.remove(job)
                yield record


def _started(case: Case, options: Options, most: int) -> _Job:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case, options, most, sender))
    process.start()
    sender.close()
    return _Job(case, process, receiver)


def _work(case: Case, options: Options, most: int, sender: Any) -> None:
    try:
        record = record_of(case, options, most)
    except Exception as error:  # noqa: BLE001 - it becomes a row
        record = _broken(case, f"{type(error).__name__}: {error}")
    sender.send(record)


def _finished(job: _Job, timeout: float) -> Record | None:
    """Returns the record of a job that has ended, by itself, by a crash or by taking too long; None while it runs."""
    record = None
    if job.receiver.poll():
        try:
            record = job.receiver.recv()
        except EOFError:
            job.process.join()
            code = job.process.exitcode or 0
            record = _broken(job.case, f"its process died of {signal.Signals(-code).name if code < 0 else code}")
    elif time.monotonic() - job.started > timeout:
        job.process.kill()
        record = _broken(job.case, f"it took more than {timeout:.0f} s")
    if record is not None:
        job.process.join()
        job.receiver.close()
    return record


def _report(record: Record, number: int, total: int) -> None:
    words = ", ".join(f"{count} {word}" for word, count in record.words.items())
    what = f"{record.name} {record.dtype} {record.form}"
    print(f"[{number}/{total}] {what}: {words} ({record.seconds:.1f} s)", flush=True)
    for example in record.examples.get(FAILED, ()) if record.unexplained else ():
        print(f"    {example[:400]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
