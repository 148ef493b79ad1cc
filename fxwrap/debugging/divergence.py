"""The first wrong line of a compiled graph, and the part of the compiler that is at fault."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fxwrap.debugging.agreement import Agreement
from fxwrap.debugging.repro import Failure
from fxwrap.debugging.statistics import TensorStatistics

Part: TypeAlias = Literal["graph pass", "lowering", "pass", "kernel printer", "converter"]
"""A part of the compiler. A "graph pass" changes the FX graph, a "pass" the program."""

_EVIDENCE: dict[str, str] = {
    "graph pass": "the graph before this pass computes other values, in float64",
    "lowering": "the first program, run by the interpreter, differs from the graph that was lowered",
    "pass": "the program before this pass is right, and the one after it is wrong, both run by the interpreter",
    "kernel printer": "the kernel's loop IR, evaluated on the same inputs, is right, and its text is wrong",
    "converter": "the interpreter runs the same program with the right result",
}


@dataclass(frozen=True)
class DivergingLine:
    """The line whose value differs from eager's by more than rounding.

    Fields:
        number: the number of the line in its program.
        text: the line as text.
        handle: the handle of the call, as in `Compiled.provenance`.
        kernel: the name of the kernel that it launches, or "".
        nodes, operators, locations, modules: the origin of the line: nodes of the graph, ATen operators, "file:line" in
            the model's source, and modules of the model.
        node: the node whose result differs, or "".
        occurrence: how often a line of a block had run before.
        actual, eager, float64: statistics of its value, of eager's and of the float64 reference.
        agreement: the errors.
    """

    number: int
    text: str
    handle: str
    kernel: str
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    locations: tuple[str, ...]
    modules: tuple[str, ...]
    node: str
    occurrence: int
    actual: TensorStatistics
    eager: TensorStatistics
    float64: TensorStatistics
    agreement: Agreement

    def to_dict(self) -> dict[str, object]:
        """Returns the fields, for JSON."""
        statistics = {name: getattr(self, name).to_dict() for name in ("actual", "eager", "float64")}
        errors = {"reason": str(self.agreement)}
        return {**{name: item for name, item in vars(self).items() if name not in statistics}, **statistics,
                "agreement": errors}  # fmt: skip


@dataclass(frozen=True)
class Divergence:
    """A compiled graph that computes wrong values.

    Fields:
        graph: the name of the graph: "inference", "forward" or "backward" under torch.compile.
        part: the part of the compiler that is at fault.
        culprit: the pass, the operators of the lowering rules, the kernel and its language, or the emitter.
        line: the first line that is wrong; None for a graph pass, after which a graph differs.
        emitter: the emitter of the program.
        lines: the number of lines of the program.
        runs: the number of runs of the program.
        reference_runs: the number of runs of the graph, operator by operator.
        failure: the graph and the inputs of the call, for `save_repro` and `minify`.
    """

    graph: str
    part: Part
    culprit: str
    line: DivergingLine | None
    emitter: str
    lines: int
    runs: int
    reference_runs: int
    failure: Failure | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        parts = [f"the {self.graph} graph computes wrong values. At fault: {self.part} {self.culprit}"]
        if (line := self.line) is not None:
            where = ", ".join(line.locations)
            parts += [
                f"  line {line.number}: {line.text}",
                *([f"  in run {line.occurrence + 1} of its block"] if line.occurrence else []),
                f"  computes {', '.join(line.operators)}" + (f" of {where}" if where else ""),
                *([f"  in {', '.join(line.modules)}"] if line.modules else []),
                *([f"  kernel @{line.kernel}"] if line.kernel else []),
                f"  {f'node {line.node}' if line.node else 'result'}: {line.agreement}",
                f"  compiled  {line.actual}",
                f"  eager     {line.eager}",
                f"  float64   {line.float64}",
            ]
        parts.append(f"  {_EVIDENCE[self.part]}")
        parts.append(f"  {self.lines} lines, {self.runs} runs of the program, {self.reference_runs} of the graph")
        return "\n".join(parts)

    def to_json(self) -> str:
        """Returns the fields as JSON."""
        fields = {name: item for name, item in vars(self).items() if name != "failure"}
        fields = {**fields, "line": None if self.line is None else self.line.to_dict()}
        return json.dumps(fields, indent=1, default=str)
