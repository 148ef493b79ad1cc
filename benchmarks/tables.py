"""Renders the tables of `README.md` and of the documents in `benchmarks/` from the result files.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`. NAME is a result file, or one of `SUMMARIES`.

    python -m benchmarks.tables           # write the documents
    python -m benchmarks.tables --check   # only compare; the exit status is 1 if a document is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.dashboard_tables import RATIOS, details, summary
from benchmarks.processes import REPOSITORY
from benchmarks.results import FOLDER, Cell, Row, cell_text, describe, geometric_mean

DOCUMENTS = (
    REPOSITORY / "README.md", REPOSITORY / "benchmarks" / "README.md", REPOSITORY / "benchmarks" / "dashboard.md"
)  # fmt: skip
BLOCK = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Ratio = tuple[str, str]
"""Two columns of a result, the second "" where the first holds the ratio itself."""


@dataclass(frozen=True)
class Comparison:
    """A line of README.md's table: a ratio to Inductor, over the rows of results that have these values."""

    title: str
    results: tuple[str, ...]
    ratio: Ratio
    where: Row = field(default_factory=dict)

    def ratios(self) -> list[float]:
        """Returns the ratio of each row that has it."""
        above, below = self.ratio
        rows = [row for name in self.results for row in rows_of(name) if self.where.items() <= row.items()]
        return [number(row[above]) / (number(row[below]) if below else 1.0) for row in rows if row[above] is not None]


def _models(title: str, name: str, mode: str, measure: str = "time", option: str = "") -> Comparison:
    """Returns the line of a measure of the dashboard, over the models that both sides pass in a mode."""
    own, other = f"fxwrap{option}", f"inductor{option}"
    columns = {"time": (f"{other}: speedup", f"{own}: speedup")}
    columns |= {text: (f"{own}: {column}", f"{other}: {column}") for text, column in RATIOS[1:]}
    where: Row = {"mode": mode, f"{own}: status": "pass", f"{other}: status": "pass"}
    return Comparison(f"{title}, {measure}", (f"dashboard-{name}",), columns[measure], where)


INFERENCE, TRAINING = "inference-bfloat16-static", "training-amp-static"
FLEX = tuple(f"flex_attention-cuda{part}" for part in ("-forward", "-backward", "-decode"))
COMPARISONS = (
    _models("H200: models of `transformers` and `timm`, inference in bfloat16", "cuda", INFERENCE),
    _models("the same", "cuda", INFERENCE, "memory"),
    _models("the same", "cuda", INFERENCE, "compile"),
    _models("the same with a dynamic batch", "cuda", "inference-bfloat16-dynamic"),
    _models("H200: training with amp", "cuda", TRAINING),
    _models("the same", "cuda", TRAINING, "memory"),
    _models("the same", "cuda", TRAINING, "compile"),
    Comparison("H200: FlexAttention, device time", FLEX, ("/ inductor", "")),
    Comparison("H200: fused operators, device time", ("ops-cuda-bfloat16",), ("fxwrap / Inductor", "")),
    Comparison("H200: functions of random sizes, device time", ("kernel_sample-cuda",), ("fxwrap / Inductor", "")),
    _models("CPU: models, inference in float32", "cpu", "inference-float32-static"),
    _models(
        "CPU: models with frozen weights, inference in float32",
        "cpu-freezing-two-threads",
        "inference-float32-static",
        option=":freezing",
    ),
    Comparison("CPU: fused operators in float32, time", ("ops-cpu-float32",), ("fxwrap / Inductor", "")),
)


def result(name: str) -> dict[str, Any]:
    """Returns the content of a result file."""
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def rows_of(name: str) -> list[Row]:
    """Returns the rows of a result."""
    return list(result(name)["rows"])


def number(cell: Cell) -> float:
    """Returns a cell that must be a number."""
    assert isinstance(cell, int | float), f"{cell!r} is not a number"
    return float(cell)


def markdown(rows: Sequence[Row]) -> list[str]:
    """Returns rows as a Markdown table."""
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return [*lines, *[f"| {' | '.join(cell_text(row.get(head)) for head in heads)} |" for row in rows]]


def whole_result(name: str) -> list[str]:
    """Returns a result with its provenance."""
    data = result(name)
    command = " ".join([data["script"], *data["arguments"]])
    return [f"`{command}`: {describe(data)}.", "", *markdown(data["rows"])]


def comparison() -> list[str]:
    """Returns the summary of README.md: geometric means and worst ratios to Inductor."""
    rows: list[Row] = []
    for item in COMPARISONS:
        ratios = item.ratios()
        mean, worst = f"{geometric_mean(ratios):.2f}", f"{max(ratios):.2f}"
        row: Row = {"fxwrap / TorchInductor": item.title, "geometric mean": mean, "worst": worst, "of": len(ratios)}
        links = [f"[{result(name)['date']}](benchmarks/results/{name}.json)" for name in item.results]
        rows.append({**row, "measured": ", ".join(links)})
    return markdown(rows)


def operators() -> list[str]:
    """Returns the ratio to Inductor of each fused operator in all runs of `ops.py`."""
    names = [path.stem for path in sorted(FOLDER.glob("ops-*.json"))]
    columns = {name: {row["operator"]: row["fxwrap / Inductor"] for row in rows_of(name)} for name in names}
    heads = {name: name.removeprefix("ops-").replace("-", ", ") for name in names}
    operators = list(dict.fromkeys(operator for column in columns.values() for operator in column))
    rows: list[dict[str, Cell]] = [
        {"operator": operator, **{heads[name]: columns[name].get(operator) for name in names}} for operator in operators
    ]
    means = {heads[name]: geometric_mean(map(number, columns[name].values())) for name in names}
    provenance = [f"- {heads[name]}: {describe(result(name))}" for name in names]
    return [*provenance, "", *markdown([*rows, {"operator": "geometric mean", **means}])]


def sample() -> list[str]:
    """Returns the distribution of ratios in each run of `kernel_sample.py`, and the slowest functions."""
    lines: list[str] = []
    for path in sorted(FOLDER.glob("kernel_sample-*.json")):
        ratios = {
            f"{row['function']}, {row['dtype']}": number(row["fxwrap / Inductor"])
            for row in rows_of(path.stem)
            if row["fxwrap / Inductor"] is not None
        }
        slowest = sorted(ratios, key=lambda name: ratios[name], reverse=True)[:12]
        distribution: Row = {
            "of": len(ratios),
            "geometric mean of fxwrap / Inductor": geometric_mean(ratios.values()),
            **{f"at most {limit}": sum(ratio <= limit for ratio in ratios.values()) for limit in (0.8, 1.0, 1.05, 1.2)},
        }
        lines += [f"{describe(result(path.stem))}.", "", *markdown([distribution]), ""]
        lines += ["Slowest: " + "; ".join(f"{name} {ratios[name]:.2f}" for name in slowest) + ".", ""]
    return lines


def index() -> list[str]:
    """Returns a line for each script, with its result files and their dates."""
    files: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        data = result(path.stem)
        link = f"[{path.stem}](results/{path.name}) ({data['date']})"
        files.setdefault(Path(data["script"]).name, []).append(link)
    return markdown([{"script": f"`{script}`", "results": ", ".join(links)} for script, links in files.items()])


def dashboard() -> list[str]:
    """Returns the figures of each recorded run of `dashboard.py`."""
    lines: list[str] = []
    for path in sorted(FOLDER.glob("dashboard-*.json")):
        data, rows = result(path.stem), rows_of(path.stem)
        lines += [
            f"## {path.stem.removeprefix('dashboard-')}",
            "",
            f"{describe(data)}.",
            "",
            *markdown(summary(rows)),
            "",
        ]
        lines += [*markdown(details(rows)), ""]
    return lines or ["No run is recorded."]


SUMMARIES: Mapping[str, Callable[[], list[str]]] = {
    "comparison": comparison, "operators": operators, "sample": sample, "index": index, "dashboard": dashboard,
}  # fmt: skip


def rendered(text: str) -> str:
    """Returns a document with all of its tables rendered."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        lines = SUMMARIES[name]() if name in SUMMARIES else whole_result(name)
        return "\n".join([match[1].rstrip(), *lines, match[4]])

    return BLOCK.sub(block, text)


def main() -> int:
    """Writes or checks the documents; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check: bool = parser.parse_args().check
    stale = [path for path in DOCUMENTS if rendered(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.relative_to(REPOSITORY)} is out of date" if check else f"writing {path.relative_to(REPOSITORY)}")
        if not check:
            path.write_text(rendered(path.read_text()))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
