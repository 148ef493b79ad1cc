"""The choice of buffers that share a pool, from their spans of lines and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

Span: TypeAlias = tuple[int, int, int]
"""The first line at which a buffer is live, the one after the last, and its size in bytes."""

Assign: TypeAlias = Callable[[Sequence[Span]], tuple[Sequence[int], str]]
"""Returns offsets of spans, and the name of the algorithm."""

_ROUNDS = 3
"""Number of rounds; each chooses pools for the spans without one."""

_MAX_BIDIRECTIONAL_SPANS = 2_000
"""Largest number of spans that are grouped in both directions of time."""

_MAX_MERGED_GROUPS = 24
"""Largest number of groups whose pairs are candidates for merging."""

_MAX_CUTS = 64
_MEMBERS_PER_CUT = 32
"""Limits of the cuts of a pool that is too large: the number of cuts, or one for each so many members."""

_STEP = 8
_MAX_TRIES = 1_000
"""Limit of the attempts to grow all groups of one round, which keeps the cost near linear."""

_NO_LIMIT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class OffsetAssignment:
    """The members of a pool by index of their spans, their offsets, and the algorithm that assigned them."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    algorithm: str


def profile(count: int, spans: Sequence[Span], first: int = 0) -> Tensor:
    """Returns the live bytes at each of `count` lines from `first` on, int64."""
    return _profile(count, torch.tensor(spans, dtype=torch.int64).reshape(-1, 3), first)


def _profile(count: int, table: Tensor, first: int) -> Tensor:
    steps = torch.zeros(count + 1, dtype=torch.int64)
    firsts, ends, sizes = table.T
    steps.index_add_(0, firsts - first, sizes)
    steps.index_add_(0, ends - first, -sizes)
    return steps.cumsum(0)[:count]


def pool_span(pool: OffsetAssignment, spans: Sequence[Span]) -> Span:
    """Returns the span of a pool."""
    first = min([spans[index][0] for index in pool.members])
    end = max([spans[index][1] for index in pool.members])
    return first, end, max([offset + spans[index][2] for index, offset in zip(pool.members, pool.offsets)])


def choose_pools(spans: Sequence[Span], around: Tensor, bound: int, assign: Assign) -> list[OffsetAssignment]:
    """Returns few pools for spans that may share one.

    A pool is allocated from its first member to its last; the bytes beyond its live members must be free. If one pool
    is too large, there are several, which may overlap in time; spans that fit no pool are omitted.

    Args:
        spans: the spans of the buffers.
        around: other live bytes at each line, int64.
        bound: the largest peak allowed, at least the one without pools.
        assign: assigns the offsets of a pool's members.
    """
    free = bound - around - profile(len(around), spans)
    pools: list[OffsetAssignment] = []
    pending = list(range(len(spans)))
    for _ in range(_ROUNDS):
        rest = [spans[index] for index in pending]
        assignments = _assign_groups(_group_spans(rest, free), rest, free, assign)
        members = {pending[index] for item in assignments for index in item.members}
        pools += [replace(item, members=tuple([pending[index] for index in item.members])) for item in assignments]
        pending = [index for index in pending if index not in members]
        if not assignments or len(pending) < 2:
            break
    return pools


def _group_spans(spans: Sequence[Span], free: Tensor) -> list[list[int]]:
    """Returns groups of spans that may share a pool, the fewest of several attempts."""
    flipped = [(len(free) - end, len(free) - first, size) for first, end, size in spans]
    directions = [(spans, free), (flipped, free.flip(0))][: 2 if len(spans) <= _MAX_BIDIRECTIONAL_SPANS else 1]
    attempts = []
    for level in (False, True)[: len(directions)]:
        for directed, around in directions:
            grouping = _Grouping(directed, around.clone())
            grouping.grow(level)
            if len(grouping.groups) == 1:
                return [grouping.groups[0].members]
            attempts.append(grouping)
    for grouping in attempts:
        grouping.merge_pairs()
    best = min(attempts, key=lambda grouping: len(grouping.groups))
    return [group.members for group in best.groups]


@dataclass(eq=False)
class _PoolGroup:
    """Spans that may share a pool, by index, and their live bytes from line `first` on."""

    members: list[int]
    first: int
    own: Tensor

    @property
    def end(self) -> int:
        """The line after the last one."""
        return self.first + len(self.own)

    def waste(self) -> Tensor:
        """Returns the unused bytes of a pool at each line."""
        return self.own.max() - self.own

    def merged(self, other: _PoolGroup) -> _PoolGroup:
        """Returns a group of both."""
        first, end = min(self.first, other.first), max(self.end, other.end)
        own = torch.zeros(end - first, dtype=torch.int64)
        for group in (self, other):
            own[group.first - first : group.end - first] += group.own
        return _PoolGroup(self.members + other.members, first, own)


class _Grouping:
    """Groups of spans, and the bytes that are free beside their pools at each line."""

    def __init__(self, spans: Sequence[Span], free: Tensor) -> None:
        self.spans = spans
        self.free = free
        self.groups: list[_PoolGroup] = []

    def grow(self, level: bool) -> None:
        """Forms groups: each starts with the first span without a group and adds later ones that fit.

        With `level`, the first group is no larger than a pool over all lines could be.
        """
        order = sorted(range(len(self.spans)), key=lambda index: self.spans[index])
        max_size = self._level() if level else _NO_LIMIT
        pending = _PendingSpans([], order)
        tries, step = 0, len(order)
        while pending and tries < _MAX_TRIES:
            builder = _GroupBuilder(self.spans, self.free, max_size)
            pending = builder.run(pending, step)
            tries, step = tries + builder.tries, max(_STEP, 2 * len(builder.members))
            max_size = _NO_LIMIT
            if builder.members:
                group = builder.group()
                self.free[group.first : group.end] -= group.waste()
                self.groups.append(group)
        self.groups += [self._single(index) for index in (*pending.early, *pending.rest[pending.at :])]

    def _single(self, index: int) -> _PoolGroup:
        first, end, size = self.spans[index]
        return _PoolGroup([index], first, torch.full((end - first,), size))

    def _level(self) -> int:
        """Returns the largest size of a pool over all lines."""
        first, end = min([span[0] for span in self.spans]), max([span[1] for span in self.spans])
        return int((self.free[first:end] + profile(end - first, self.spans, first)).min())

    def merge_pairs(self) -> None:
        """Merges pairs of groups that may share a pool, those that waste least first."""
        while 1 < len(self.groups) <= _MAX_MERGED_GROUPS:
            before = len(self.groups)
            pairs = [(cost, one, other) for one, other in self._pairs()
                     if (cost := self._cost(one, other)) is not None]  # fmt: skip
            for _, one, other in sorted(pairs, key=lambda pair: pair[0]):
                if one in self.groups and other in self.groups and self._cost(one, other) is not None:
                    self._merge(one, other)
            if len(self.groups) == before:
                return

    def _pairs(self) -> Iterator[tuple[_PoolGroup, _PoolGroup]]:
        for number, other in enumerate(self.groups):
            for one in self.groups[:number]:
                yield one, other

    def _cost(self, one: _PoolGroup, other: _PoolGroup) -> int | None:
        """Returns the extra waste of one pool over two, in bytes times lines; None if it does not fit."""
        both = one.merged(other)
        extra = both.waste()
        for group in (one, other):
            extra[group.first - both.first : group.end - both.first] -= group.waste()
        return int(extra.sum()) if bool((extra <= self.free[both.first : both.end]).all()) else None

    def _merge(self, one: _PoolGroup, other: _PoolGroup) -> None:
        both = one.merged(other)
        for group, sign in ((one, 1), (other, 1), (both, -1)):
            self.free[group.first : group.end] += sign * group.waste()
            if group is not both:
                self.groups.remove(group)
        self.groups.append(both)


@dataclass(frozen=True, slots=True)
class _PendingSpans:
    """Spans without a group by index, ordered by first line: `early`, then `rest` from `at` on."""

    early: list[int]
    rest: list[int]
    at: int = 0

    def __bool__(self) -> bool:
        return bool(self.early) or self.at < len(self.rest)


class _GroupBuilder:
    def __init__(self, spans: Sequence[Span], free: Tensor, max_size: int) -> None:
        self.spans = spans
        self.free = free
        self.max_size = max_size  # of a pool, for the settled lines
        self.members: list[int] = []
        self.first = self.end = self.settled = self.size = 0
        self.own = torch.zeros(0, dtype=torch.int64)  # from `first` on
        self.tries = 0

    def group(self) -> _PoolGroup:
        """Returns the group."""
        return _PoolGroup(self.members, self.first, self.own[: self.end - self.first])

    def run(self, pending: _PendingSpans, step: int) -> _PendingSpans:
        """Adds the spans that fit, at first `step` at a time; returns the others.

        Spans fit together more often than one by one, because a pool may be as large as its live members.
        """
        others: list[int] = []
        for number, index in enumerate(pending.early):
            if self._is_closed(index):
                return _PendingSpans(others + pending.early[number:], pending.rest, pending.at)
            if not self._try_add([index]):
                others.append(index)
        at, rest = pending.at, pending.rest
        while at < len(rest):
            if self._is_closed(rest[at]):
                return _PendingSpans(others, rest, at)
            if self._try_add(rest[at : at + step]):
                at, step = at + step, 2 * step
            elif min(step, len(rest) - at) > 1:
                step = max(min(step, len(rest) - at) // 2, 1)
            else:
                others.append(rest[at])
                at, step = at + 1, _STEP
        return _PendingSpans([], others)

    def _is_closed(self, index: int) -> bool:
        """Whether the pool cannot extend to the first line of a span. Settles the lines before it."""
        line = self.spans[index][0]
        if not self.members:
            return False
        until = min(line, self.end)
        if until > self.settled:
            own = self.own[self.settled - self.first : until - self.first]
            self.max_size = min(self.max_size, int((self.free[self.settled : until] + own).min()))
            self.settled = until
        return line > self.end and int(self.free[self.end : line].min()) < self.size

    def _try_add(self, more: Sequence[int]) -> bool:
        """Adds spans if the larger pool fits the free bytes; returns whether it did."""
        self.tries += 1
        if len(more) == 1 and self.members:
            return self._try_add_one(more[0])
        spans = [self.spans[index] for index in more]
        if max([size for _, _, size in spans]) > self.max_size:
            return False
        if not self.members:
            self.first = self.settled = self.end = spans[0][0]
        start, end = self.settled, max(self.end, max([last for _, last, _ in spans]))
        own = profile(end - start, spans, start)
        own[: self.end - start] += self.own[start - self.first : self.end - self.first]
        size = max(self.size, int(own.max()))
        if size > self.max_size or size > int((own + self.free[start:end]).min()):
            return False
        self._reserve(end - self.first)
        self.own[start - self.first : end - self.first] = own
        self.end, self.size = end, size
        self.members += more
        return True

    def _try_add_one(self, index: int) -> bool:
        """Adds a span as `_try_add` does, from the lines that it changes: most attempts are of one span, and fail.

        `_is_closed` has settled the lines before it.
        """
        first, end, size = self.spans[index]
        shared = min(end, self.end)
        total = max(self.size, size)
        if first < shared:
            total = max(total, int(self.own[first - self.first : shared - self.first].max()) + size)
        if total > self.max_size:
            return False
        room = self.own[first - self.first : self.end - self.first] + self.free[first : self.end]
        after = max(first, self.end)
        if (
            (first < shared and total > int(room[: shared - first].min()) + size)
            or (after < end and total > int(self.free[after:end].min()) + size)
            or (end < self.end and total > int(room[end - first :].min()))
            or (self.end < first and total > int(self.free[self.end : first].min()))
        ):
            return False
        self.end, self.size = max(self.end, end), total
        self._reserve(self.end - self.first)
        self.own[first - self.first : end - self.first] += size
        self.members.append(index)
        return True

    def _reserve(self, count: int) -> None:
        if count > len(self.own):
            self.own = torch.cat([self.own, torch.zeros(count, dtype=torch.int64)])


def _assign_groups(
    groups: Sequence[list[int]], spans: Sequence[Span], free: Tensor, assign: Assign
) -> list[OffsetAssignment]:
    """Returns the pools of groups; subtracts their unused bytes from `free`."""
    pools: list[OffsetAssignment] = []
    for group in groups:
        if len(group) > 1:
            offsets, algorithm = assign([spans[index] for index in group])
            pools += _fit_pools(OffsetAssignment(tuple(group), tuple(offsets), algorithm), spans, free)
    return pools


def _fit_pools(pool: OffsetAssignment, spans: Sequence[Span], free: Tensor) -> list[OffsetAssignment]:
    """Returns a pool, or pools for parts of it if it is too large; subtracts their unused bytes from `free`.

    The alternatives drop the members with the highest ends, or cut the pool where free bytes are short or where the
    highest member is live; the one with the most members is chosen.
    """
    fitting: list[OffsetAssignment] = []
    rows = [(index, offset, *spans[index]) for index, offset in zip(pool.members, pool.offsets)]
    pending = [torch.tensor(rows, dtype=torch.int64)]
    cuts, max_cuts = 0, max(_MAX_CUTS, len(rows) // _MEMBERS_PER_CUT)
    while pending:
        table = pending.pop()
        if len(table) < 2:
            continue
        _, offsets, firsts, ends, sizes = table.T
        first, end, tops = int(firsts.min()), int(ends.max()), offsets + sizes
        size = int(tops.max())
        own = _profile(end - first, table[:, 2:], first)
        room = own + free[first:end]
        max_size = int(room.min())
        if size <= max_size:
            free[first:end] += own - size
            members, own_offsets = tuple(table[:, 0].tolist()), tuple(offsets.tolist())
            fitting.append(OffsetAssignment(members, own_offsets, pool.algorithm))
            continue
        tight, highest = (room < size).nonzero(), int(tops.argmax())
        alternatives = [
            [table[tops <= max_size]],
            _cut(table, first + int(tight[0]), first + int(tight[-1]) + 1),
            _cut(table, int(firsts[highest]), int(ends[highest])),
        ]
        cuts += 1
        pending += max(alternatives[: 1 if cuts > max_cuts else 3], key=lambda tables: sum(map(len, tables)))
    return fitting


def _cut(table: Tensor, first: int, end: int) -> list[Tensor]:
    """Returns the rows that are live only after some lines, and those that are live only before them."""
    return [table[table[:, 2] >= end], table[table[:, 3] <= first]]
