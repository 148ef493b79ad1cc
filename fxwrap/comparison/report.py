"""The report of a comparison: data, and a table."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxwrap.options import EMITTERS

DISAGREEMENT_KINDS = (
    "structure",
    "dtypes",
    "devices",
    "shapes",
    "strides",
    "aliasing",
    "values",
    "mutations",
    "gradients",
)
"""The kinds: nesting of outputs; their dtypes, devices, sizes and strides; outputs that alias inputs, state or each
other; values of outputs; of inputs and state after the run; of gradients."""


@dataclass(frozen=True)
class Deviation:
    """The errors of tensors.

    `absolute` is the largest difference of two elements; `relative` is the largest ratio, over tensors, of the norm of
    the difference to the norm of the expected tensor.
    """

    absolute: float = 0.0
    relative: float = 0.0

    def maximum(self, other: Deviation) -> Deviation:
        """Returns the larger of each number."""
        return Deviation(max(self.absolute, other.absolute), max(self.relative, other.relative))


@dataclass(frozen=True)
class Disagreement:
    """One difference from eager: its kind (of `DISAGREEMENT_KINDS`), the tensor, and both sides."""

    kind: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.where}: {self.reason}"


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of one run configuration.

    Fields:
        name: "eager", "float64", an emitter's name, or a backend's with its options.
        failure: the error of the run, or "".
        eager_error, float64_error: the largest errors over outputs, mutated inputs, state and gradients; None without
            such a reference.
        disagreements: each difference from eager beyond rounding.
        compile_seconds: the seconds to lower, emit and build all graphs, cached builds included; those of the first
            call of another backend, which compiles.
        run_seconds: the median seconds of a run; None without timing.
        host_seconds: the part until the call returned, before the device is done.
        device_seconds: the seconds of all kernels on a CUDA device; None without one.
        launches: the kernels that a run launches on a CUDA device; without one, the launches of generated kernels in
            fxwrap's programs.
        kernels: the number of generated kernels; None if a backend does not tell.
        peak_bytes: the peak memory of a run, without earlier allocations; None without timing.
        lines: the lines of emitted text of all graphs.
    """

    name: str
    failure: str = ""
    eager_error: Deviation | None = None
    float64_error: Deviation | None = None
    disagreements: tuple[Disagreement, ...] = ()
    compile_seconds: float | None = None
    run_seconds: float | None = None
    peak_bytes: int | None = None
    lines: int | None = None
    host_seconds: float | None = None
    device_seconds: float | None = None
    launches: int | None = None
    kernels: int | None = None

    def agrees_in(self, *kinds: str) -> bool:
        """Whether the run succeeded without disagreements of these kinds; of any kind if none is passed."""
        return not self.failure and not any(item.kind in (kinds or DISAGREEMENT_KINDS) for item in self.disagreements)


@dataclass(frozen=True)
class Report:
    """The result of `compare`. It prints as a table, with the disagreements below it.

    `outcomes` has eager, the float64 reference and the emitters, in this order; `graphs` is the number of captured
    graphs, `program_lines` the lines of their programs. `eager_defects` are calls that eager computes wrongly, which
    were corrected in its run and in the reference's.
    """

    title: str
    outcomes: tuple[RunOutcome, ...]
    graphs: int
    program_lines: int
    eager_defects: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> RunOutcome:
        """Returns the outcome with a name. Raises KeyError for an unknown one."""
        for outcome in self.outcomes:
            if outcome.name == name:
                return outcome
        raise KeyError(name)

    @property
    def emitters(self) -> tuple[RunOutcome, ...]:
        """The outcomes of the emitters and of other backends."""
        return tuple(outcome for outcome in self.outcomes if outcome.name not in ("eager", "float64"))

    @property
    def agrees(self) -> bool:
        """Whether every emitter ran and agrees with eager, up to the tolerance."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """The failures and disagreements of the emitters, one sentence each."""
        reasons: list[str] = []
        for outcome in self.emitters:
            if outcome.failure:
                reasons.append(f"{outcome.name} failed: {outcome.failure}")
            reasons.extend(f"{outcome.name}: {item}" for item in outcome.disagreements)
        return tuple(reasons)

    def __str__(self) -> str:
        head = f"{self.title}: {_count(self.graphs, 'graph')}, {_count(self.program_lines, 'program line')}"
        notes = [f"  {reason}" for reason in self.reasons]
        notes += [f"  eager is wrong, and was corrected: {defect}" for defect in self.eager_defects]
        notes += [
            f"  there is no float64 reference: {outcome.failure}"
            for outcome in self.outcomes
            if outcome.name == "float64" and outcome.failure
        ]
        verdict = "all emitters agree with eager" if self.agrees else "the emitters do not agree with eager:"
        return "\n".join([head, *_text_table(table(self.outcomes)), verdict, *notes, *self._next_steps()])

    def _next_steps(self) -> list[str]:
        """Returns the commands that find the cause of a difference."""
        own = [outcome for outcome in self.emitters if outcome.name in EMITTERS]
        steps = []
        if any(outcome.disagreements for outcome in own):
            steps.append(
                "next: fxwrap.bisect(function, inputs), or python -m fxwrap bisect, names the first wrong line"
            )
        if any(outcome.failure for outcome in own):
            steps.append("next: fxwrap.save_repro(error, 'repro.py') writes the error of a compile as a file")
        return steps

    def to_json(self) -> str:
        """Returns all fields as JSON; numbers that JSON cannot express are None."""
        fields = {**dataclasses.asdict(self), "agrees": self.agrees, "reasons": self.reasons}
        return json.dumps(_finite(fields), indent=1)

    def to_html(self) -> str:
        """Returns the report as one HTML page that needs no other file."""
        head, *rows = table(self.outcomes)
        lines = str(self).splitlines()
        notes = lines[len(rows) + 3 :]
        cells = "".join([
            f"<tr>{''.join([f'<td{_BAD * (cell == _DIFFER)}>{html.escape(cell)}</td>' for cell in row])}</tr>"
            for row in rows
        ])  # fmt: skip
        titles = "".join([f"<th>{html.escape(cell)}</th>" for cell in head])
        return _PAGE.format(
            title=html.escape(lines[0]), titles=titles, rows=cells, notes=html.escape("\n".join(notes)),
            state="good" if self.agrees else "bad",
        )  # fmt: skip

    def _repr_html_(self) -> str:
        """Returns the report in a frame, which notebooks show."""
        return f'<iframe style="width:100%;height:400px;border:0" srcdoc="{html.escape(self.to_html())}"></iframe>'


_DIFFER, _BAD = "DIFFER", ' class="bad"'

_COLUMNS = (
    "", "abs err", "rel err", "abs err 64", "rel err 64",
    "values", "mutation", "aliasing", "strides", "dtypes", "devices",
    "compile", "run", "ratio", "host", "device", "peak", "kernels", "launches", "lines",
)  # fmt: skip

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px sans-serif; margin: 2em; }} table {{ border-collapse: collapse; }}
th, td {{ padding: 4px 10px; text-align: right; border-bottom: 1px solid #ccc; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }} .bad {{ color: #b00020; font-weight: bold; }}
</style></head><body><h1>{title}</h1><table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>
<pre class="{state}">{notes}</pre></body></html>
"""


def table(outcomes: Sequence[RunOutcome]) -> list[tuple[str, ...]]:
    """Returns the rows of the table as texts, the titles first, without columns in which nothing is known."""
    eager = next((outcome for outcome in outcomes if outcome.name == "eager"), None)
    rows = [_row(outcome, eager.run_seconds if eager else None) for outcome in outcomes]
    shown = [column for column in range(len(_COLUMNS)) if not column or any(row[column] != "-" for row in rows)]
    return [tuple([row[column] for column in shown]) for row in (_COLUMNS, *rows)]


def _text_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _finite(item: Any) -> Any:
    """Returns nested values with None for the numbers that JSON cannot express."""
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def _row(outcome: RunOutcome, eager_seconds: float | None) -> tuple[str, ...]:
    ran = outcome.name not in ("eager", "float64") and not outcome.failure
    agreements = [
        ("same" if outcome.agrees_in(*kinds) else "DIFFER") if ran else "-"
        for kinds in (
            ("values", "gradients", "structure", "shapes"), ("mutations",), ("aliasing",), ("strides",), ("dtypes",),
            ("devices",),
        )
    ]  # fmt: skip
    name = f"{outcome.name} (failed)" if outcome.failure else outcome.name
    seconds, own = outcome.run_seconds, outcome.compile_seconds
    return (
        name,
        *_errors(outcome.eager_error),
        *_errors(outcome.float64_error),
        *agreements,
        "-" if own is None else f"{own:.2f} s",
        "-" if seconds is None else f"{seconds * 1e3:.3f} ms",
        "-" if seconds is None or not eager_seconds else f"{seconds / eager_seconds:.2f}",
        *["-" if item is None else f"{item * 1e3:.3f} ms" for item in (outcome.host_seconds, outcome.device_seconds)],
        "-" if outcome.peak_bytes is None else bytes_text(outcome.peak_bytes),
        *["-" if item is None else str(item) for item in (outcome.kernels, outcome.launches, outcome.lines)],
    )


def _errors(error: Deviation | None) -> tuple[str, str]:
    if error is None:
        return "-", "-"
    return _small(error.absolute), _small(error.relative)


def _small(number: float) -> str:
    if number == 0 or math.isinf(number) or math.isnan(number):
        return f"{number:g}"
    return f"{number:.1e}"


_UNITS: Mapping[str, int] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def bytes_text(count: int) -> str:
    """Returns a number of bytes for people: `1.5 KiB`."""
    for unit, size in _UNITS.items():
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
