"""Every operator of torch's database, compiled and compared with eager.

    python -m tests.opinfo.sweep --records rows.jsonl
    python -m tests.opinfo.sweep --records gradients.jsonl --form inplace,gradient --most 24
    python -m tests.opinfo.sweep --records cuda.jsonl --device cuda --most 4
    python -m tests.opinfo.sweep --page opinfo_rows.md --summary docs/opinfo.md rows.jsonl gradients.jsonl cuda.jsonl

Each operator, dtype and form is a row; a crash costs one row. Records are written as they arrive, one JSON object per
line. `--page` writes a table of all rows and `--summary` replaces the summary in a document; both run nothing.
`--resume` runs the rows that the records lack.
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
from tests.opinfo.table import page, replace_summary
from tests.opinfo.workers import Setting, run_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweep; returns 1 if a failure has no known reason, else 0."""
    chosen = _parser().parse_args(arguments)
    if chosen.page or chosen.summary:
        records = read([Path(path) for path in chosen.files])
        if chosen.page:
            Path(chosen.page).write_text(page(records))
        if chosen.summary:
            document = Path(chosen.summary)
            document.write_text(replace_summary(document.read_text(), records))
        return _exit_status(records)
    torch.set_num_threads(1)
    setting = Setting(
        Options(fallback="error", cpu_kernels=chosen.kernels, emitter=chosen.emitter), chosen.most, chosen.device
    )
    earlier = read([Path(chosen.records)]) if chosen.resume else []
    records = [record for record in earlier if NOT_RUN not in record.verdicts]
    known = {record.key for record in records}
    pending = [case for case in _selected_cases(chosen) if case.key not in known]
    with Path(chosen.records).open("a" if chosen.resume else "w") as file:
        for record in run_sweep(pending, setting, jobs=chosen.jobs, timeout=chosen.timeout, limit=chosen.limit):
            records.append(record)
            file.write(line_of(record))
            file.flush()
            _report(record, len(records), len(known) + len(pending))
    return _exit_status(records)


def _selected_cases(chosen: argparse.Namespace) -> list[Case]:
    selected: list[Case] = []
    for form in chosen.form.split(","):
        dtypes = DTYPES if form == "function" else DTYPES[:1]
        if chosen.dtype:
            dtypes = tuple(getattr(torch, name) for name in chosen.dtype.split(","))
        selected += cases(dtypes, form, chosen.device)
    return [case for case in selected if re.fullmatch(chosen.only, case.name)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=".*", help="a regular expression for names of operators, variants included")
    parser.add_argument(
        "--dtype", help="dtypes, separated by commas; default: three for functions, float32 for other forms"
    )
    parser.add_argument("--form", default="function", help=f"of {', '.join(FORMS)}, separated by commas")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kernels", default="cpp", choices=("cpp", "triton"), help="kernel language on CPUs")
    parser.add_argument("--emitter", default="python")
    parser.add_argument("--most", type=int, default=10**6, help="the largest number of calls per row, evenly sampled")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per row")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds for the whole sweep; later rows do not run"
    )
    parser.add_argument("--records", default=os.devnull, help="file for the records, one JSON object per line")
    parser.add_argument("--resume", action="store_true", help="run only rows that the records lack")
    parser.add_argument("--page", help="write a table of all rows of the record files")
    parser.add_argument("--summary", help="replace the summary in this document by that of the record files")
    parser.add_argument("files", nargs="*", help="record files; of several records for one row the last counts")
    return parser


def _report(record: Record, number: int, total: int) -> None:
    verdicts = ", ".join(f"{count} {word}" for word, count in record.verdicts.items())
    print(f"[{number}/{total}] {' '.join(record.key)}: {verdicts} ({record.seconds:.1f} s)", flush=True)
    for example in record.examples.get(FAILED, ()) if record.unexplained else ():
        print(f"    {example[:400]}", flush=True)


def _exit_status(records: Sequence[Record]) -> int:
    failed = [record for record in records if record.unexplained]
    print(f"{len(records)} rows, {sum(record.calls for record in records)} calls, {len(failed)} rows with failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
