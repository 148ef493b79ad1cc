"""The report of a comparison: data, and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        name: "eager", "float64" or an emitter's name.
        failure: the error of the run, or "".
        eager_error, float64_error: the largest errors over outputs, mutated inputs, state and gradients; None without
            such a reference.
        disagreements: each difference from eager beyond rounding.
        compile_seconds: the seconds to lower, emit and build all graphs, cached builds included.
        run_seconds: the median seconds of a run; None without timing.
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
        """The outcomes of the emitters."""
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
        return "\n".join([head, *_table(self.outcomes), verdict, *notes])


_COLUMNS = (
    "", "abs err", "rel err", "abs err 64", "rel err 64",
    "values", "mutation", "aliasing", "strides", "dtypes", "devices",
    "compile", "run", "ratio", "peak", "lines",
)  # fmt: skip


def _table(outcomes: Sequence[RunOutcome]) -> list[str]:
    eager = next((outcome for outcome in outcomes if outcome.name == "eager"), None)
    rows = [_COLUMNS, *[_row(outcome, eager.run_seconds if eager else None) for outcome in outcomes]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


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
        "-" if outcome.peak_bytes is None else bytes_text(outcome.peak_bytes),
        "-" if outcome.lines is None else str(outcome.lines),
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
