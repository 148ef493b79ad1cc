"""The listing of `passes`: every step of a compile, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxwrap.compile import DYNAMO_PASSES, EMISSION_STEPS, PROGRAM_STEPS
from fxwrap.fx_passes import FX_PASSES, JOINT_GRAPH_PASSES, SOURCE_PASSES
from fxwrap.options import FX_BEFORE_LOWERING, Step

_USER_FX_PASSES: tuple[Step[Any, Any], ...] = (
    Step(FX_BEFORE_LOWERING, "the user's passes over the FX graph", lambda graph, _context: graph, "passes"),
)

_GROUPS: tuple[tuple[str, Iterable[Step[Any, Any]]], ...] = (
    ("Dynamo's graph, under torch.compile", DYNAMO_PASSES),
    ("joint graph of training", JOINT_GRAPH_PASSES),
    ("graph of ATen operators", (*SOURCE_PASSES, *_USER_FX_PASSES)),
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
