"""Tables of benchmarks: printed while a script runs and, with `--record`, written to `benchmarks/results/`.

A result file is JSON: the script and its arguments, the commit, the date, the machine, the versions, a note, the rows
of the table and, by row, the raw values that they were computed from. `tables.py` renders the files for the documents.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.processes import REPOSITORY

FOLDER = REPOSITORY / "benchmarks" / "results"

Cell: TypeAlias = str | int | float | None
Row: TypeAlias = Mapping[str, Cell]


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--record`, which `Report` reads."""
    parser.add_argument(
        "--record", nargs="?", const="", metavar="LABEL",
        help="write each table to benchmarks/results/NAME.json, or NAME-LABEL.json",
    )  # fmt: skip


def split_lists(
    parser: argparse.ArgumentParser, chosen: argparse.Namespace, known: Mapping[str, Iterable[str]]
) -> None:
    """Replaces options that are names with commas by lists; ends with an error for a name that is not `known`."""
    for option, names in known.items():
        values = getattr(chosen, option).split(",")
        if unknown := set(values).difference(names):
            parser.error(f"--{option}: {', '.join(sorted(unknown))} is not among {', '.join(names)}")
        setattr(chosen, option, values)


class Report:
    """One table: prints each row when it is added, and writes the result file if `--record` was given.

    Args:
        name: of the table and of its result file, `SCRIPT` or `SCRIPT-PART`.
        chosen: the parsed command line, for `record`.
        device: where the work ran.
        note: conditions that the arguments do not show.
        folder: where the result file is written.
        earlier: rows of an earlier run that the result file keeps, ahead of the new ones.
        earlier_raw: their raw values; None for each row by default.
    """

    def __init__(
        self,
        name: str,
        chosen: argparse.Namespace,
        device: str | torch.device = "cpu",
        note: str = "",
        folder: Path = FOLDER,
        earlier: Sequence[Row] = (),
        earlier_raw: Sequence[object] = (),
    ) -> None:
        self._path = result_path(name, chosen, folder)
        self._facts: dict[str, object] = {**environment(torch.device(device)), **({"note": note} if note else {})}
        self._rows: list[Row] = [*earlier]
        self._raw: list[object] = [*earlier_raw] or [None] * len(earlier)
        self._is_header_printed = False
        print(f"\n{name}: {describe(self._facts)}", flush=True)

    def add(self, row: Row, raw: object = None) -> None:
        """Prints a row and writes the file again, so that an interrupted run keeps its rows. `raw` must be JSON."""
        if not self._is_header_printed:
            print(" | ".join(row))
            self._is_header_printed = True
        self._rows.append(row)
        self._raw.append(raw)
        print(" | ".join(map(cell_text, row.values())), flush=True)
        if self._path is not None:
            write_result(self._path, {**self._facts, "rows": self._rows, "raw": self._raw})


def result_path(name: str, chosen: argparse.Namespace, folder: Path = FOLDER) -> Path | None:
    """Returns the path of a table's result file, or None without `--record`."""
    label: str | None = chosen.record
    return None if label is None else folder / f"{name}{f'-{label}' if label else ''}.json"


def recorded_rows(path: Path | None) -> tuple[list[Row], list[object]]:
    """Returns the rows of a result file and their raw values, if there is one."""
    if path is None or not path.exists():
        return [], []
    result = json.loads(path.read_text())
    return result["rows"], result["raw"]


def write_result(path: Path, result: Mapping[str, object]) -> None:
    """Writes a result file with one row a line."""
    parts = []
    for name, item in result.items():
        if name in ("rows", "raw") and isinstance(item, list):
            lines = ",\n".join(f"  {json.dumps(row)}" for row in item)
            parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(item)}")
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def environment(device: torch.device) -> dict[str, object]:
    """Returns what figures depend on: script, arguments, commit, date, machine and versions."""
    machine: dict[str, object] = {"device": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        machine |= {"device": torch.cuda.get_device_name(device), "host": machine["device"]}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "triton": _package_version("triton")}
    compiler = _output(os.environ.get("CXX", "g++"), "-dumpfullversion", "-dumpversion")
    return {
        "script": _script(),
        "arguments": _arguments(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine,
        "versions": {**{name: text for name, text in versions.items() if text}, "g++": compiler},
    }


def _script() -> str:
    """Returns the path of the script that runs, in the repository."""
    path = Path(sys.argv[0]).resolve()
    return path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else f"benchmarks/{path.name}"


def describe(facts: Mapping[str, object]) -> str:
    """Returns the provenance of a result in one line."""
    machine, versions = facts["machine"], facts["versions"]
    assert isinstance(machine, Mapping) and isinstance(versions, Mapping)
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    text = f"{machine['device']}, {machine['cores']} cores{threads}, torch {versions['torch']}"
    text += f", {facts['date']}, commit {str(facts['commit'])[:8]}"
    return text + (f". {facts['note']}" if "note" in facts else "")


def cell_text(value: Cell) -> str:
    """Returns a cell's text: four digits of a float, a dash for None."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    whole, _, fraction = f"{value:.4g}".partition(".")
    return f"{whole}.{fraction:0<{2 if abs(value) < 10 else 1}}"


def display_name(backend: str) -> str:
    """Returns the name of a backend in a table."""
    return backend.replace("inductor", "Inductor")


def parse_backend(backend: str) -> tuple[str, dict[str, Any]]:
    """Returns the backend and the options of a name such as "fxwrap:cpp+graphs".

    "fxwrap:cpp" selects an emitter, "inductor:fx_wrapper" turns an option of Inductor's configuration on, and "+graphs"
    turns CUDA graphs on (Inductor's mode "reduce-overhead"). "fxwrap:fx+functional" selects the form of FX graphs.
    """
    name, _, variant = backend.partition(":")
    variant, _, graphs = variant.partition("+")
    if graphs == "functional":
        return name, {"emitter": variant, "fx_form": "functional"}
    if name == "fxwrap":
        return name, {**({"emitter": variant} if variant else {}), **({"cuda_graphs": True} if graphs else {})}
    return name, {**({variant: True} if variant else {}), **({"triton.cudagraphs": True} if graphs else {})}


def geometric_mean(ratios: Iterable[float]) -> float:
    """Returns exp(mean(log)); NaN of nothing."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(statistics.fmean(logarithms)) if logarithms else math.nan


def _arguments() -> list[str]:
    """Returns the command line without `--record` and its label."""
    arguments = sys.argv[1:]
    if "--record" in arguments:
        position = arguments.index("--record")
        following = arguments[position + 1 : position + 2]
        has_label = bool(following) and not following[0].startswith("-")
        del arguments[position : position + 1 + has_label]
    return arguments


def _commit() -> str:
    """Returns the commit of the working tree, with "+changes" if tracked files differ from it."""
    changed = _output("git", "-C", str(REPOSITORY), "status", "--porcelain", "--untracked-files=no", "--", "fxwrap")
    return _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD") + ("+changes" if changed else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
