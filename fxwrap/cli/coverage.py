"""The table of `show --coverage`: the coverage of a graph's operators, and decline reasons."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.lowering import NodeCoverage

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
