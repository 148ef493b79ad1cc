"""Planned kernels whose members do not depend on each other, as a kernel for each independent group."""

from __future__ import annotations

from collections.abc import Sequence

from fxwrap.loop_ir import Atom, IndexLike
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan, Member, substituted
from fxwrap.lowering.fusion.tracing import shared_source


def independent_parts(kernel: KernelPlan) -> list[KernelPlan]:
    """Returns kernels that compute the members of a kernel, of which no two share a member's result or its source.

    The kernel is returned itself if its members depend on each other, or if it overwrites memory.
    """
    groups = _groups(kernel.members)
    if len(groups) < 2 or kernel.overwritten:
        return [kernel]
    parts = []
    for members in groups:
        part = KernelPlan(kernel.axes, kernel.reduced)
        for member in members:
            part.add(member)
        for member in members:
            axes: dict[Atom, IndexLike] = dict(zip(member.trace.axes, member.at, strict=True))
            for other, read_at in member.trace.reads:
                if other not in part.computed:
                    points, mine = part.reads.setdefault(other, []), substituted(read_at, axes)
                    if mine not in points:
                        points.append(mine)
            part.operands |= {other for other in member.plan.operands if other not in part.computed}
        parts.append(part)
    return parts


def _groups(members: Sequence[Member]) -> list[list[Member]]:
    """Returns the members in groups that read no results of each other, each in order."""
    groups: list[list[Member]] = []
    for member in members:
        needed = {other for other, _ in member.trace.reads} | set(member.plan.operands)
        source = shared_source(member.definition)
        related = [
            group for group in groups
            if any(item.definition in needed or shared_source(item.definition) is source for item in group)
        ]  # fmt: skip
        merged = [item for group in related for item in group]
        groups = [group for group in groups if group not in related]
        groups.append(sorted([*merged, member], key=members.index))
    return sorted(groups, key=lambda group: members.index(group[0]))
