"""Which pieces of memory share a pool, by numbers alone: spans of lines, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int, int]
"""The first line that a piece of memory is live in, the one after the last, and its bytes."""

Assign = Callable[[Sequence[Span]], tuple[Sequence[int], str]]
"""Gives offsets for spans, and the name of the algorithm that found them."""

_ROUNDS = 3
"""How often pools are looked for among what the ones before have left."""

_BOTH_WAYS = 2_000
"""Up to how many spans groups are made in both directions of time."""

_MOST_JOINED = 24
"""Among how many groups pairs are looked for that one pool can hold."""

_MOST_CUTS = 64
_MEMBERS_A_CUT = 32
"""How often a pool is cut where the offsets of its members need more than is free: so often, or for so many of them."""

_STEP = 8
_MOST_TRIES = 1_000
"""How often a group is offered more, for all groups of one round; a bound that keeps the cost near linear."""

_NO_LIMIT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Pocket:
    """Some of the spans, by index, with their offsets in one pool, and the algorithm that found them."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    algorithm: str


def profile(count: int, spans: Sequence[Span], first: int = 0) -> Tensor:
    """Returns the bytes that are live at each of so many lines from the first one on, int64."""
    return _profile(count, torch.tensor(spans, dtype=torch.int64).reshape(-1, 3), first)


def _profile(count: int, table: Tensor, first: int) -> Tensor:
    steps = torch.zeros(count + 1, dtype=torch.int64)
    firsts, ends, sizes = table.T
    steps.index_add_(0, firsts - first, sizes)
    steps.index_add_(0, ends - first, -sizes)
    return steps.cumsum(0)[:count]


def pool_span(pocket: Pocket, spans: Sequence[Span]) -> Span:
    """Returns when a pool is live, and its bytes."""
    first = min([spans[index][0] for index in pocket.members])
    end = max([spans[index][1] for index in pocket.members])
    return first, end, max([offset + spans[index][2] for index, offset in zip(pocket.members, pocket.offsets)])


def choose_pools(spans: Sequence[Span], around: Tensor, bound: int, assign: Assign) -> list[Pocket]:
    """Returns the pools for spans that may share one, as few as are found.

    A pool is there from its first member to its last, also where little of it is live; what it has more than its
    members must be free then. So it is one pool where that is possible, else several, one after another or beside each
    other; what fits into none is left out.

    Args:
        spans: the pieces of memory.
        around: what else is live at each line, int64.
        bound: the peak that is not exceeded; that without pools, or more.
        assign: gives the members of a pool their offsets.
    """
    free = bound - around - profile(len(around), spans)
    found: list[Pocket] = []
    pending = list(range(len(spans)))
    for _ in range(_ROUNDS):
        groups = _grouped([spans[index] for index in pending], free)
        pockets, left = _placed(groups, [spans[index] for index in pending], free, assign)
        found += [Pocket(tuple([pending[index] for index in pocket.members]), pocket.offsets, pocket.algorithm)
                  for pocket in pockets]  # fmt: skip
        if not pockets or len(left) < 2:
            break
        pending = [pending[index] for index in left]
    return found


def _grouped(spans: Sequence[Span], free: Tensor) -> list[list[int]]:
    """Returns the fewest groups that were found, each of which one pool may hold."""
    flipped = [(len(free) - end, len(free) - first, size) for first, end, size in spans]
    ways = [(spans, free), (flipped, free.flip(0))] if len(spans) <= _BOTH_WAYS else [(spans, free)]
    tried = []
    for level in (False, True)[: len(ways)]:
        for own, around in ways:
            parts = _Parts(own, around.clone())
            parts.grow(level)
            if len(parts.groups) == 1:
                return [parts.groups[0].members]
            tried.append(parts)
    for parts in tried:
        parts.join()
    best = min(tried, key=lambda parts: len(parts.groups))
    return [group.members for group in best.groups]


@dataclass(eq=False)
class _Group:
    """Spans that one pool may hold: by index, and the bytes of them that are live from line `first` on."""

    members: list[int]
    first: int
    own: Tensor

    @property
    def end(self) -> int:
        """The line after the last one."""
        return self.first + len(self.own)

    def waste(self) -> Tensor:
        """Returns what a pool has more than what is live, at each line."""
        return self.own.max() - self.own

    def joined(self, other: _Group) -> _Group:
        """Returns a group of both."""
        first, end = min(self.first, other.first), max(self.end, other.end)
        own = torch.zeros(end - first, dtype=torch.int64)
        for group in (self, other):
            own[group.first - first : group.end - first] += group.own
        return _Group(self.members + other.members, first, own)


class _Parts:
    """Groups of spans, and what is free at each line beside the pools of these."""

    def __init__(self, spans: Sequence[Span], free: Tensor) -> None:
        self.spans = spans
        self.free = free
        self.groups: list[_Group] = []

    def grow(self, level: bool) -> None:
        """Makes groups: each begins with the first span that is in none, and takes those after it that fit.

        With `level`, the first of them is no larger than it may be throughout, so that nothing ends it early.
        """
        order = sorted(range(len(self.spans)), key=lambda index: self.spans[index])
        most = self._level() if level else _NO_LIMIT
        waiting = _Waiting([], order)
        tries, step = 0, len(order)
        while waiting and tries < _MOST_TRIES:
            growing = _Growing(self.spans, self.free, most)
            waiting = growing.run(waiting, step)
            tries, step = tries + growing.tries, max(_STEP, 2 * len(growing.members))
            most = _NO_LIMIT
            if growing.members:
                group = growing.group()
                self.free[group.first : group.end] -= group.waste()
                self.groups.append(group)
        self.groups += [self._single(index) for index in (*waiting.early, *waiting.rest[waiting.at :])]

    def _single(self, index: int) -> _Group:
        first, end, size = self.spans[index]
        return _Group([index], first, torch.full((end - first,), size))

    def _level(self) -> int:
        """Returns the size that a pool for all spans may have throughout."""
        first, end = min([span[0] for span in self.spans]), max([span[1] for span in self.spans])
        return int((self.free[first:end] + profile(end - first, self.spans, first)).min())

    def join(self) -> None:
        """Joins pairs of groups that one pool can hold, those that waste least first."""
        while 1 < len(self.groups) <= _MOST_JOINED:
            before = len(self.groups)
            pairs = [(cost, place, one, other) for place, (one, other) in enumerate(self._pairs())
                     if (cost := self._cost(one, other)) is not None]  # fmt: skip
            for _, _, one, other in sorted(pairs, key=lambda pair: pair[:2]):
                if one in self.groups and other in self.groups and self._cost(one, other) is not None:
                    self._join(one, other)
            if len(self.groups) == before:
                return

    def _pairs(self) -> Iterator[tuple[_Group, _Group]]:
        for place, other in enumerate(self.groups):
            for one in self.groups[:place]:
                yield one, other

    def _cost(self, one: _Group, other: _Group) -> int | None:
        """Returns what one pool wastes more than two, in bytes times lines; None where there is no room for it."""
        both = one.joined(other)
        more = both.waste()
        for group in (one, other):
            more[group.first - both.first : group.end - both.first] -= group.waste()
        return int(more.sum()) if bool((more <= self.free[both.first : both.end]).all()) else None

    def _join(self, one: _Group, other: _Group) -> None:
        both = one.joined(other)
        for group, sign in ((one, 1), (other, 1), (both, -1)):
            self.free[group.first : group.end] += sign * group.waste()
            if group is not both:
                self.groups.remove(group)
        self.groups.append(both)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Spans that are in no group, by index, in the order of their first lines: the early ones, then those from `at`."""

    early: list[int]
    rest: list[int]
    at: int = 0

    def __bool__(self) -> bool:
        return bool(self.early) or self.at < len(self.rest)


class _Growing:
    """One group while it grows."""

    def __init__(self, spans: Sequence[Span], free: Tensor, most: int) -> None:
        self.spans = spans
        self.free = free
        self.most = most  # bytes that a pool may have by the lines that are settled
        self.members: list[int] = []
        self.first = self.end = self.settled = self.size = 0
        self.own = torch.zeros(0, dtype=torch.int64)  # from `first` on
        self.tries = 0

    def group(self) -> _Group:
        """Returns what it has become."""
        return _Group(self.members, self.first, self.own[: self.end - self.first])

    def run(self, waiting: _Waiting, step: int) -> _Waiting:
        """Takes what fits, as much as possible at a time, at first so many; returns the others.

        Together spans are taken more easily than one by one, because a pool may be as large as all that is live.
        """
        others: list[int] = []
        for place, index in enumerate(waiting.early):
            if self._is_closed(index):
                return _Waiting(others + waiting.early[place:], waiting.rest, waiting.at)
            if not self._takes([index]):
                others.append(index)
        at, rest = waiting.at, waiting.rest
        while at < len(rest):
            if self._is_closed(rest[at]):
                return _Waiting(others, rest, at)
            if self._takes(rest[at : at + step]):
                at, step = at + step, 2 * step
            elif min(step, len(rest) - at) > 1:
                step = max(min(step, len(rest) - at) // 2, 1)
            else:
                others.append(rest[at])
                at, step = at + 1, _STEP
        return _Waiting([], others)

    def _is_closed(self, index: int) -> bool:
        """Whether the pool cannot reach the first line of a span. The lines before that are settled here."""
        line = self.spans[index][0]
        if not self.members:
            return False
        until = min(line, self.end)
        if until > self.settled:
            own = self.own[self.settled - self.first : until - self.first]
            self.most = min(self.most, int((self.free[self.settled : until] + own).min()))
            self.settled = until
        return line > self.end and int(self.free[self.end : line].min()) < self.size

    def _takes(self, more: Sequence[int]) -> bool:
        """Adds spans, if a pool that holds them as well fits into what is free."""
        self.tries += 1
        spans = [self.spans[index] for index in more]
        if max([size for _, _, size in spans]) > self.most:
            return False
        if not self.members:
            self.first = self.settled = self.end = spans[0][0]
        start, end = self.settled, max(self.end, max([last for _, last, _ in spans]))
        own = profile(end - start, spans, start)
        own[: self.end - start] += self.own[start - self.first : self.end - self.first]
        size = max(self.size, int(own.max()))
        if size > self.most or size > int((own + self.free[start:end]).min()):
            return False
        self._reserve(end - self.first)
        self.own[start - self.first : end - self.first] = own
        self.end, self.size = end, size
        self.members += more
        return True

    def _reserve(self, count: int) -> None:
        if count > len(self.own):
            self.own = torch.cat([self.own, torch.zeros(count, dtype=torch.int64)])


def _placed(
    groups: Sequence[list[int]], spans: Sequence[Span], free: Tensor, assign: Assign
) -> tuple[list[Pocket], list[int]]:
    """Returns the pools of groups with offsets, and the spans that are in none; `free` becomes what they leave."""
    found: list[Pocket] = []
    for group in groups:
        if len(group) > 1:
            offsets, algorithm = assign([spans[index] for index in group])
            found += _fitting(Pocket(tuple(group), tuple(offsets), algorithm), spans, free)
    taken = {index for pocket in found for index in pocket.members}
    return found, [index for index in range(len(spans)) if index not in taken]


def _fitting(pocket: Pocket, spans: Sequence[Span], free: Tensor) -> list[Pocket]:
    """Returns a pool, or where its offsets need more than is free, pools for parts of it; `free` is what they leave.

    What lies highest is left out; or the pool is cut where there is too little room, or where what lies highest is
    live, if that leaves out less.
    """
    found: list[Pocket] = []
    rows = [(index, offset, *spans[index]) for index, offset in zip(pocket.members, pocket.offsets)]
    pending = [torch.tensor(rows, dtype=torch.int64)]
    cuts, most_cuts = 0, max(_MOST_CUTS, len(rows) // _MEMBERS_A_CUT)
    while pending:
        table = pending.pop()
        if len(table) < 2:
            continue
        _, offsets, firsts, ends, sizes = table.T
        first, end, tops = int(firsts.min()), int(ends.max()), offsets + sizes
        size = int(tops.max())
        own = _profile(end - first, table[:, 2:], first)
        room = own + free[first:end]
        most = int(room.min())
        if size <= most:
            free[first:end] += own - size
            members, places = table[:, 0].tolist(), offsets.tolist()
            found.append(Pocket(tuple(members), tuple(places), pocket.algorithm))
            continue
        tight, highest = (room < size).nonzero(), int(tops.argmax())
        ways = [
            [table[tops <= most]],
            _cut(table, first + int(tight[0]), first + int(tight[-1]) + 1),
            _cut(table, int(firsts[highest]), int(ends[highest])),
        ]
        cuts += 1
        pending += max(ways[: 1 if cuts > most_cuts else 3], key=lambda way: sum(map(len, way)))
    return found


def _cut(table: Tensor, first: int, end: int) -> list[Tensor]:
    """Returns the rows of what is live after some lines, and of what is live before them, but at none of them."""
    return [table[table[:, 2] >= end], table[table[:, 3] <= first]]
