"""What a comparison found, as data, and as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS = ("structure", "dtypes", "devices", "shapes", "strides", "aliasing", "values", "mutations", "gradients")
"""What can disagree: the nesting of outputs; their dtypes, devices, sizes and strides; which outputs share memory with
inputs, state or each other; the numbers of outputs; of inputs and state after the run; of gradients."""


@dataclass(frozen=True)
class Error:
    """How far tensors are apart.

    `absolute` is the largest difference of two elements; `relative` the largest ratio, over tensors, of the norm of the
    difference to the norm of what was expected.
    """

    absolute: float = 0.0
    relative: float = 0.0

    def worst(self, other: Error) -> Error:
        """Returns the larger of each number."""
        return Error(max(self.absolute, other.absolute), max(self.relative, other.relative))


@dataclass(frozen=True)
class Disagreement:
    """One thing in which a way of running differs from eager: its kind (of `KINDS`), the tensor, and both sides."""

    kind: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.where}: {self.reason}"


@dataclass(frozen=True)
class Outcome:
    """What one way of running the function did.

    Fields:
        name: "eager", "float64" or an emitter's name.
        failure: the error that it ended in, or "".
        against_eager, against_float64: the largest errors over outputs, mutated inputs, state and gradients; None where
            there is nothing to compare with.
        disagreements: each difference from eager that is more than rounding.
        compile_seconds: lowering, emitting and building all graphs; what the build cache has costs next to nothing.
        run_seconds: the median of the timed runs. None when timing was not asked for.
        peak_bytes: the most memory that was allocated during a run and alive at once, without what was there before.
        lines: lines of emitted text of all graphs.
    """

    name: str
    failure: str = ""
    against_eager: Error | None = None
    against_float64: Error | None = None
    disagreements: tuple[Disagreement, ...] = ()
    compile_seconds: float | None = None
    run_seconds: float | None = None
    peak_bytes: int | None = None
    lines: int | None = None

    def agrees_in(self, *kinds: str) -> bool:
        """Whether it ran and nothing of these kinds differs from eager; of any kind when none is given."""
        return not self.failure and not any(item.kind in (kinds or KINDS) for item in self.disagreements)


@dataclass(frozen=True)
class Report:
    """What `compare` found. It prints as a table, with the reasons below it.

    `outcomes` starts with eager, then the float64 reference, then the emitters; `graphs` is the number of graphs that
    were captured, `program_lines` the lines of their programs together.
    """

    title: str
    outcomes: tuple[Outcome, ...]
    graphs: int
    program_lines: int

    def __getitem__(self, name: str) -> Outcome:
        """Returns the outcome of this name. Raises KeyError when it was not run."""
        for outcome in self.outcomes:
            if outcome.name == name:
                return outcome
        raise KeyError(name)

    @property
    def emitters(self) -> tuple[Outcome, ...]:
        """The outcomes of the emitters."""
        return tuple(outcome for outcome in self.outcomes if outcome.name not in ("eager", "float64"))

    @property
    def agrees(self) -> bool:
        """Whether every emitter ran and did what eager does, up to the tolerance."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the emitters do not agree with eager, one sentence a difference; empty when they do."""
        found: list[str] = []
        for outcome in self.emitters:
            if outcome.failure:
                found.append(f"{outcome.name} failed: {outcome.failure}")
            found.extend(f"{outcome.name}: {item}" for item in outcome.disagreements)
        return tuple(found)

    def __str__(self) -> str:
        head = f"{self.title}: {_count(self.graphs, 'graph')}, {_count(self.program_lines, 'program line')}"
        notes = [f"  {reason}" for reason in self.reasons]
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


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    eager = next((outcome for outcome in outcomes if outcome.name == "eager"), None)
    rows = [_COLUMNS, *[_row(outcome, eager.run_seconds if eager else None) for outcome in outcomes]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _row(outcome: Outcome, eager_seconds: float | None) -> tuple[str, ...]:
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
        *_errors(outcome.against_eager),
        *_errors(outcome.against_float64),
        *agreements,
        "-" if own is None else f"{own:.2f} s",
        "-" if seconds is None else f"{seconds * 1e3:.3f} ms",
        "-" if seconds is None or not eager_seconds else f"{seconds / eager_seconds:.2f}",
        "-" if outcome.peak_bytes is None else _bytes(outcome.peak_bytes),
        "-" if outcome.lines is None else str(outcome.lines),
    )


def _errors(error: Error | None) -> tuple[str, str]:
    if error is None:
        return "-", "-"
    return _small(error.absolute), _small(error.relative)


def _small(number: float) -> str:
    if number == 0 or math.isinf(number) or math.isnan(number):
        return f"{number:g}"
    return f"{number:.1e}"


_UNITS: Mapping[str, int] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def _bytes(count: int) -> str:
    for unit, size in _UNITS.items():
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
