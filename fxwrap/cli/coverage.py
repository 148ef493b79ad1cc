"""The table of `show --coverage`: which operators of a graph were fused, which were called, and why."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.lowering import Outcome

_KINDS = ("fused", "view", "call")
_MOST_NODES = 3


def coverage_table(name: str, outcomes: Sequence[Outcome]) -> str:
    """Returns a table with a row for each operator and what became of it: how often, why, and where."""
    counted = [outcome for outcome in outcomes if outcome.kind in _KINDS]
    rows: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in counted:
        rows.setdefault((outcome.kind, outcome.operator, outcome.reason), []).append(outcome)
    totals = ", ".join([f"{sum(item.kind == kind for item in counted)} {kind}" for kind in _KINDS])
    width = max([len(operator) for _, operator, _ in rows], default=0)
    lines = [f"{name}: {len(counted)} operators: {totals}"]
    for kind in _KINDS:
        for (row_kind, operator, reason), found in sorted(rows.items()):
            if row_kind == kind:
                lines.append(f"  {kind:<5}  {len(found):>4} x {operator:<{width}}  {_why(reason, found)}".rstrip())
    return "\n".join(lines) + "\n"


def _why(reason: str, found: Sequence[Outcome]) -> str:
    if not reason:
        return ""
    places = [f"{item.node} ({item.location})" if item.location else item.node for item in found[:_MOST_NODES]]
    shown = ", ".join(places)
    return f"{reason}: {shown}" + (", ..." if len(found) > _MOST_NODES else "")
