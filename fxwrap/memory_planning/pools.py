"""Which pieces of memory share a pool, by numbers alone: spans of lines, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int, int]
"""The first line that a piece of memory is live in, the one after the last, and its bytes."""

Assign = Callable[[Sequence[Span]], tuple[Sequence[int], str]]
"""Gives offsets for spans, and the name of the algorithm that found them."""

MOST_POOLS = 8
"""How many pools, one after another or beside each other, memory of one kind is cut into at most."""

_MOST_CUTS = 16
_MOST_EVICTIONS = 24


@dataclass(frozen=True, slots=True)
class Pocket:
    """Some of the spans, by index, with their offsets in one pool, and the algorithm that found them."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    algorithm: str


def profile(count: int, spans: Sequence[Span]) -> Tensor:
    """Returns the bytes that are live at each of so many lines, int64."""
    steps = torch.zeros(count + 1, dtype=torch.int64)
    if spans:
        columns = torch.tensor(spans, dtype=torch.int64).T
        steps.index_add_(0, columns[0], columns[2])
        steps.index_add_(0, columns[1], -columns[2])
    return steps.cumsum(0)[:count]


def choose_pools(spans: Sequence[Span], around: Tensor, bound: int, assign: Assign) -> list[Pocket]:
    """Returns the pools for spans that may share one.

    It is one pool, or several where they hold less together at the worst moment: a pool is there from its first member
    to its last, also where little of it is live. What makes the peak larger than it is without pools is left out.

    Args:
        spans: the pieces of memory.
        around: what else is live at each line, int64.
        bound: the peak without pools, which is not exceeded.
        assign: gives the members of a pool their offsets.
    """
    pockets = []
    for members in _split(spans, around, bound):
        offsets, algorithm = assign([spans[index] for index in members])
        pockets.append(Pocket(tuple(members), tuple(offsets), algorithm))
    pockets = _relieved(pockets, spans, around, bound)
    return [pocket for pocket in pockets if len(pocket.members) > 1]


def pool_span(pocket: Pocket, spans: Sequence[Span]) -> Span:
    """Returns when a pool is live, and its bytes."""
    first = min([spans[index][0] for index in pocket.members])
    end = max([spans[index][1] for index in pocket.members])
    return first, end, max([offset + spans[index][2] for index, offset in zip(pocket.members, pocket.offsets)])


def _add(total: Tensor, span: Span, sign: int = 1) -> None:
    total[span[0] : span[1]] += sign * span[2]


def _split(spans: Sequence[Span], around: Tensor, bound: int) -> list[list[int]]:
    """Returns the members of each pool, by the least sizes that pools of such members could have.

    A pool that is there at the worst moment is cut in two, as long as this lowers the peak.
    """
    table = torch.tensor(spans, dtype=torch.int64)
    groups = [torch.arange(len(spans))]
    envelopes = [_envelope(table)]
    total = around.clone()
    _add(total, envelopes[0])
    while len(groups) < MOST_POOLS:
        peak, worst = int(total.max()), int(total.argmax())
        if peak <= bound:
            break
        best: tuple[int, int, int] | None = None  # peak, group, line of the cut
        for index, (first, end, _) in enumerate(envelopes):
            if first <= worst < end:
                rest = total.clone()
                _add(rest, envelopes[index], -1)
                found = _best_cut(table[groups[index]], rest)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found[0], index, found[1]
        if best is None or best[0] >= peak:
            break
        _, index, cut = best
        early = table[groups[index]][:, 0] < cut
        parts = [groups[index][early], groups[index][~early]]
        _add(total, envelopes[index], -1)
        groups[index : index + 1] = parts
        envelopes[index : index + 1] = [_envelope(table[part]) for part in parts]
        for envelope in envelopes[index : index + 2]:
            _add(total, envelope)
    return [group.tolist() for group in groups]


def _best_cut(table: Tensor, rest: Tensor) -> tuple[int, int] | None:
    """Returns the peak after the best cut of a pool, and the line of it; None where it cannot be cut.

    Lines that the fewest bytes cross are tried.
    """
    first, end = int(table[:, 0].min()), int(table[:, 1].max())
    starts = torch.tensor(sorted(set(table[:, 0].tolist()))[1:], dtype=torch.int64)
    if not len(starts):
        return None
    both = table.clone()
    both[:, 0] += 1  # what is live at a line and at the one before it crosses a cut there
    crossing = _table_profile(both, first, end)[starts - first]
    best: tuple[int, int] | None = None
    for cut in starts[crossing.argsort(stable=True)[:_MOST_CUTS]].tolist():
        early = table[:, 0] < cut
        tried = rest.clone()
        _add(tried, _envelope(table[early]))
        _add(tried, _envelope(table[~early]))
        peak = int(tried.max())
        if best is None or peak < best[0]:
            best = peak, cut
    return best


def _table_profile(table: Tensor, first: int, end: int) -> Tensor:
    steps = torch.zeros(end - first + 2, dtype=torch.int64)
    steps.index_add_(0, table[:, 0] - first, table[:, 2])
    steps.index_add_(0, table[:, 1] - first, -table[:, 2])
    return steps.cumsum(0)


def _envelope(table: Tensor) -> Span:
    """Returns the span of a pool with these members, of the least size it could have."""
    first, end = int(table[:, 0].min()), int(table[:, 1].max())
    return first, end, int(_table_profile(table, first, end).max())


def _relieved(pockets: list[Pocket], spans: Sequence[Span], around: Tensor, bound: int) -> list[Pocket]:
    """Returns the pools without what makes the peak worse than it is without pools.

    What reaches into the part of a pool that is too much at the worst moment is left to allocations of its own. Where
    that does not end soon, pools are halved.
    """
    total = around.clone()
    sizes = [pool_span(pocket, spans) for pocket in pockets]
    for size in sizes:
        _add(total, size)
    attempts = 0
    while True:
        worst = int(total.argmax())
        excess = int(total[worst]) - bound
        there = [index for index, (first, end, _) in enumerate(sizes) if first <= worst < end]
        if excess <= 0 or not there:
            return pockets
        index = max(there, key=lambda item: sizes[item][2])
        whole = sizes[index][2]
        level = whole - excess if attempts < _MOST_EVICTIONS else min(whole - excess, whole // 2)
        attempts += 1
        pocket = pockets.pop(index)
        _add(total, sizes.pop(index), -1)
        stays = [offset + spans[item][2] <= level for item, offset in zip(pocket.members, pocket.offsets)]
        for item, kept in zip(pocket.members, stays):
            if not kept:
                _add(total, spans[item])
        members = tuple([item for item, kept in zip(pocket.members, stays) if kept])
        if members:
            offsets = tuple([offset for offset, kept in zip(pocket.offsets, stays) if kept])
            pockets.append(Pocket(members, offsets, pocket.algorithm))
            sizes.append(pool_span(pockets[-1], spans))
            _add(total, sizes[-1])
