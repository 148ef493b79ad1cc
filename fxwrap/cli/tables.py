"""The tables of `show --coverage` and `passes`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fxwrap.compile import DYNAMO_PASSES, EMISSION_STEPS, PROGRAM_STEPS
from fxwrap.fx_passes import EXPORTED_GRAPH_PASSES, FX_PASSES, JOINT_GRAPH_PASSES, SOURCE_PASSES
from fxwrap.lowering import NodeCoverage
from fxwrap.options import FX_BEFORE_LOWERING, Step

_KINDS = ("fused", "view", "call")
_MAX_NODES = 3


def coverage_table(name: str, outcomes: Sequence[NodeCoverage]) -> str:
    """Returns a table with a row for each operator, coverage and decline reason: how often, and where."""
    counted = [outcome for outcome in outcomes if outcome.kind in _KINDS]
    rows: dict[tuple[str, str, str], list[NodeCoverage]] = {}
    for outcome in counted:
        rows.setdefault((outcome.kind, outcome.operator, outcome.reason), []).append(outcome)
    totals = ", ".join([f"{sum(item.kind == kind for item in counted)} {kind}" for kind in _KINDS])
    width = max([len(operator) for _, operator, _ in rows], default=0)
    lines = [f"{name}: {len(counted)} operators: {totals}"]
    for kind in _KINDS:
        for (row_kind, operator, reason), group in sorted(rows.items()):
            if row_kind == kind:
                lines.append(f"  {kind:<5}  {len(group):>4} x {operator:<{width}}  {_why(reason, group)}".rstrip())
    return "\n".join(lines) + "\n"


def _why(reason: str, group: Sequence[NodeCoverage]) -> str:
    if not reason:
        return ""
    nodes = [f"{item.node} ({item.location})" if item.location else item.node for item in group[:_MAX_NODES]]
    shown = ", ".join(nodes)
    return f"{reason}: {shown}" + (", ..." if len(group) > _MAX_NODES else "")


_USER_FX_PASSES: tuple[Step[object, object], ...] = (
    Step(FX_BEFORE_LOWERING, "the user's passes over the FX graph", lambda graph, _context: graph, "passes"),
)

_GROUPS: tuple[tuple[str, Iterable[Step[Any, Any]]], ...] = (
    ("Dynamo's graph, under torch.compile", DYNAMO_PASSES),
    ("joint graph of training", JOINT_GRAPH_PASSES),
    ("graph of ATen operators", (*SOURCE_PASSES, *_USER_FX_PASSES)),
    ("exported program, before the user's passes", EXPORTED_GRAPH_PASSES),
    ("graph with fake values", FX_PASSES),
    ("program", PROGRAM_STEPS),
    ("emission", EMISSION_STEPS),
)


def passes_table() -> str:
    """Returns a row for each step: its name, what it does, and the option that turns it on."""
    width = max(len(step.name) for _, steps in _GROUPS for step in steps)
    lines: list[str] = []
    for title, steps in _GROUPS:
        lines.append(f"{title}:")
        for step in steps:
            option = f" [{step.option}]" if step.option else ""
            lines.append(f"  {step.name:<{width}}  {step.description}{option}")
    return "\n".join(lines)
