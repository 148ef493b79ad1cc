"""Every operator of torch's database, compiled and compared with eager.

    python -m tests.opinfo.sweep --records rows.jsonl
    python -m tests.opinfo.sweep --records gradients.jsonl --form inplace,gradient --most 24
    python -m tests.opinfo.sweep --records cuda.jsonl --device cuda --most 4
    python -m tests.opinfo.sweep --page docs/opinfo.md rows.jsonl gradients.jsonl cuda.jsonl

Each operator, dtype and form is a row; a crash is one row. The records of a sweep are one JSON object a line, written
as they come; `--page` makes the table of records, and runs nothing. `--resume` runs the rows that the records lack.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from fxwrap import Options
from tests.opinfo.batch import FAILED, NOT_RUN
from tests.opinfo.calls import DTYPES, FORMS, Case, cases
from tests.opinfo.records import Record, line_of, read
from tests.opinfo.table import table
from tests.opinfo.workers import Setting, swept


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweep that the arguments ask for; returns 1 where a failure is not explained, else 0."""
    chosen = _parser().parse_args(arguments)
    if chosen.page:
        records = read([Path(path) for path in chosen.files])
        Path(chosen.page).write_text(table(records))
        return _summed_up(records)
    torch.set_num_threads(1)
    setting = Setting(
        Options(fallback="error", cpu_kernels=chosen.kernels, emitter=chosen.emitter), chosen.most, chosen.device
    )
    earlier = read([Path(chosen.records)]) if chosen.resume else []
    records = [record for record in earlier if NOT_RUN not in record.words]
    known = {record.key for record in records}
    wanted = [case for case in _wanted(chosen) if case.key not in known]
    with Path(chosen.records).open("a" if chosen.resume else "w") as file:
        for record in swept(wanted, setting, jobs=chosen.jobs, timeout=chosen.timeout, limit=chosen.limit):
            records.append(record)
            file.write(line_of(record))
            file.flush()
            _report(record, len(records), len(known) + len(wanted))
    return _summed_up(records)


def _wanted(chosen: argparse.Namespace) -> list[Case]:
    found: list[Case] = []
    for form in chosen.form.split(","):
        dtypes = DTYPES if form == "function" else DTYPES[:1]
        if chosen.dtype:
            dtypes = tuple(getattr(torch, name) for name in chosen.dtype.split(","))
        found += cases(dtypes, form, chosen.device)
    return [case for case in found if re.fullmatch(chosen.only, case.name)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=".*", help="a regular expression for names of operators, variants included")
    parser.add_argument("--dtype", help="dtypes with commas between them; else three for functions, float32 for others")
    parser.add_argument("--form", default="function", help=f"of {', '.join(FORMS)}, with commas between them")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kernels", default="cpp", choices=("cpp", "triton"), help="what runs on CPUs")
    parser.add_argument("--emitter", default="python")
    parser.add_argument("--most", type=int, default=10**6, help="the most calls of each row, evenly chosen")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a row")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all; then rows are not run")
    parser.add_argument("--records", default=os.devnull, help="where to write what was found, one JSON object a line")
    parser.add_argument("--resume", action="store_true", help="keep the rows in the records, add the others")
    parser.add_argument("--page", help="only write the table of the records in the files that follow")
    parser.add_argument("files", nargs="*", help="records; of two for one row the later counts")
    return parser


def _report(record: Record, number: int, total: int) -> None:
    words = ", ".join(f"{count} {word}" for word, count in record.words.items())
    print(f"[{number}/{total}] {' '.join(record.key)}: {words} ({record.seconds:.1f} s)", flush=True)
    for example in record.examples.get(FAILED, ()) if record.unexplained else ():
        print(f"    {example[:400]}", flush=True)


def _summed_up(records: Sequence[Record]) -> int:
    failed = [record for record in records if record.unexplained]
    print(f"{len(records)} rows, {sum(record.calls for record in records)} calls, {len(failed)} rows with failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
