"""The rows of the dashboard: what was measured of a model in a mode, their cells, and the file that holds them."""

from __future__ import annotations

import json
import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.dashboard_tables import EAGER_FAILS, OWN
from benchmarks.results import Cell, write_result

FACTS = ("script", "arguments", "commit", "date", "machine", "versions")
"""What a row says of the run that measured it."""


def value_of(row: Mapping[str, Any], side: str, measure: str) -> float | None:
    """Returns a measure of a side, None if it is missing: "compile" and "time" in seconds, "memory" in bytes."""
    measured = row["sides"].get(side, {}).get(measure)
    if measured is None:
        return None
    match measure:
        case "time":
            return statistics.median(measured["seconds"])
        case "memory":
            return float(measured["peak"])
        case _:
            return float(measured["seconds"])


def status(row: Mapping[str, Any], side: str) -> str | None:
    """Returns "pass", "wrong", the text of a failure, or `EAGER_FAILS`; None if the side was not chosen."""
    if side not in row["chosen sides"]:
        return None
    measures = row["sides"].get(side, {})
    if "failure" in measures:
        return str(measures["failure"]["text"])
    if "accuracy" not in row["sides"].get("eager", {}):
        return EAGER_FAILS
    if "accuracy" not in measures:
        return row["failure"] or "not measured"
    return "pass" if measures["accuracy"]["passes"] else "wrong"


def table_cells(row: Mapping[str, Any], sides: Sequence[str]) -> dict[str, Cell]:
    """Returns the cells of a row: eager's time, and of each side its status, speedup, compile time and memory.

    Sides have the part of the compile time that is Dynamo's, and fxwrap's the part that is their back end's: None in
    rows that were measured without.
    """
    eager = value_of(row, "eager", "time")
    cells: dict[str, Cell] = {"library": row["library"], "model": row["model"], "mode": row["mode"]}
    cells["eager, ms"] = None if eager is None else 1e3 * eager
    cells["failure"] = row["failure"] or row["sides"].get("eager", {}).get("failure", {}).get("text") or None
    for side in sides:
        seconds, memory = value_of(row, side, "time"), value_of(row, side, "memory")
        cells[f"{side}: status"] = status(row, side)
        cells[f"{side}: speedup"] = eager / seconds if eager and seconds else None
        cells[f"{side}: compile, s"] = value_of(row, side, "compile")
        parts = row["sides"].get(side, {}).get("compile", {})
        cells[f"{side}: Dynamo, s"] = parts.get("dynamo")
        if side.startswith(OWN):
            cells[f"{side}: back end, s"] = parts.get("backend")
        cells[f"{side}: peak, MB"] = None if memory is None else memory / 1e6
    return cells


def is_complete(measures: Mapping[str, Mapping[str, Any]], sides: Sequence[str]) -> bool:
    """Whether each side has its last measure or a failure, so that the end of the process does not matter."""
    return all({"time", "failure"} & set(measures.get(side, {})) for side in sides)


def exhausted_memory(row: Mapping[str, Any]) -> bool:
    """Whether a side ran out of memory, which other processes on the same device can cause."""
    texts = [measures["failure"]["text"] for measures in row["sides"].values() if "failure" in measures]
    return any(sign in text.lower() for text in [row["failure"], *texts] for sign in ("out of memory", "cublas_status"))


@dataclass
class RowFile:
    """The rows of a result file, which is written again when a row is added; its raw values are the rows.

    Fields:
        path: the file; rows that are there are read.
        note: what the rows have in common, such as the sizes of models. Raises ValueError for a file with another.
    """

    path: Path
    note: str
    rows: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        result = json.loads(self.path.read_text())
        if not result["note"].startswith(self.note):
            raise ValueError(
                f"{self.path} has rows of other sizes: {result['note']!r}, not {self.note!r}; name another file"
            )
        self.rows = {(row["model"], row["mode"]): row for row in result["raw"]}

    def has(self, model: str, mode: str, sides: Sequence[str], since: str = "") -> bool:
        """Whether a row is there with all of these sides, and was measured on the day `since` or later."""
        row = self.rows.get((model, mode))
        return row is not None and set(sides) <= set(row["chosen sides"]) and row["date"] >= since

    def add(self, row: dict[str, Any]) -> None:
        """Adds or replaces a row and writes the file, under another name first: a reader finds it whole.

        A row that its time limit stopped does not replace one that is whole.
        """
        with self._lock:
            before = self.rows.get((row["model"], row["mode"]))
            if row["failure"].startswith("stopped") and before is not None and not before["failure"]:
                return
            self.rows[row["model"], row["mode"]] = row
            rows = self.sorted()
            runs = sorted({f"{item['machine']['device']}, commit {item['commit'][:8]}" for item in rows})
            facts = {name: max(rows, key=lambda item: str(item["date"]))[name] for name in FACTS}
            result = {**facts, "note": f"{self.note}; rows of {'; '.join(runs)}", "rows": self.tables(), "raw": rows}
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            temporary.parent.mkdir(parents=True, exist_ok=True)
            write_result(temporary, result)
            temporary.replace(self.path)

    def sorted(self) -> list[dict[str, Any]]:
        """Returns the rows by mode, library and model."""
        return sorted(self.rows.values(), key=lambda row: (row["mode"], row["library"], row["model"]))

    def tables(self) -> list[dict[str, Cell]]:
        """Returns the cells of the rows, with every side that one of them has."""
        rows = self.sorted()
        sides = dict.fromkeys(side for row in rows for side in row["chosen sides"])
        return [table_cells(row, list(sides)) for row in rows]
