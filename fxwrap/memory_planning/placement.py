"""Partial placements of the search for offsets: floors, their consequences, and undoing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import add
from typing import Any

from fxwrap.memory_planning.greedy import Buffer

NO_END = 1 << 126
"""Above every end: the lowest end of a section without pending buffers."""


def in_sections(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Returns the buffers with numbers of sections for times.

    A section is a maximal range of time in which all its buffers are live at once.
    """
    events = sorted([(last, 0, index) for index, (_, last, _) in enumerate(buffers)]
                    + [(first, 1, index) for index, (first, _, _) in enumerate(buffers)])  # fmt: skip
    first, last = [0] * len(buffers), [0] * len(buffers)
    section, ended = 0, False
    for _, starts, index in events:
        if starts:
            section, ended = section + ended, False
            first[index] = section
        else:
            last[index], ended = section + 1, True
    return [(begin, end, size) for begin, end, (_, _, size) in zip(first, last, buffers)]


@dataclass(frozen=True)
class Subproblem:
    """Buffers by index, and a capacity.

    Times are numbers of sections. `twin_rank` orders buffers with equal ranges, which may be exchanged: large ones come
    first.
    """

    first: list[int]
    last: list[int]
    size: list[int]
    twin_rank: list[int]
    sections: int
    capacity: int

    @staticmethod
    def of(buffers: Sequence[Buffer], capacity: int) -> Subproblem:
        """Returns the problem to place buffers within a capacity."""
        ranges = in_sections(buffers)
        first, last = [begin for begin, _, _ in ranges], [end for _, end, _ in ranges]
        sizes = [size for _, _, size in buffers]
        twin_rank = [0] * len(buffers)
        for rank, index in enumerate(sorted(range(len(buffers)), key=lambda index: (-sizes[index], index))):
            twin_rank[index] = rank
        return Subproblem(first, last, sizes, twin_rank, max(last, default=1), capacity)

    def members(self) -> list[list[int]]:
        """Returns the buffers of each section."""
        members: list[list[int]] = [[] for _ in range(self.sections)]
        for index in range(len(self.size)):
            for number in range(self.first[index], self.last[index]):
                members[number].append(index)
        return members


class Placement:
    """A partial placement, with a trail to undo it.

    By buffer: `lowest` is the top of the placed buffers below it, its offset once it is placed; `bound`, at least that,
    is a lower bound of its offset. A buffer whose bound is above its lowest offset waits. By section: `height` is the
    top of the placed buffers, `members` are the pending ones, `remaining` is their total size.
    """

    def __init__(self, part: Subproblem) -> None:
        count, sections = len(part.size), part.sections
        self.part = part
        self.lowest = [0] * count
        self.bound = [0] * count
        self.is_placed = [False] * count
        self.height = [0] * sections
        self.members = part.members()
        self.neighbours = [
            sorted(set().union(*self.members[first:last]) - {index})
            for index, (first, last) in enumerate(zip(part.first, part.last))
        ]
        """By buffer: the others that share a section with it."""
        self.remaining = [sum([part.size[index] for index in members]) for members in self.members]
        self.candidate_count = [0] * sections
        self.ends: list[tuple[int, int, int]] = [(0, -1, 0)] * sections
        """By section: the lowest end of a pending buffer, its index, and the lowest end of the others."""
        self.crossing = [0] * sections
        """By section: the pending buffers that the next section has too."""
        for first, last in zip(part.first, part.last):
            for section in range(first, last - 1):
                self.crossing[section] += 1
        self.trail: list[tuple[list[Any], int, Any]] = []
        self.failed = 0
        """The section of the last failure."""
        self._changed: dict[int, None] = {}
        self._support_section = part.first[:]
        """By buffer: a section that may still have its lowest support."""

    def start(self) -> bool:
        """Computes the state of an empty placement; returns False if the buffers cannot fit."""
        self._changed = dict.fromkeys(range(len(self.members)))
        return self._propagate()

    def undo(self, length: int) -> None:
        """Undoes all changes since the trail had a length."""
        trail = self.trail
        while len(trail) > length:
            values, index, value = trail.pop()
            values[index] = value

    def place(self, pick: int) -> bool:
        """Places a buffer at its lowest offset; returns False if the others cannot fit."""
        part, lowest, bound = self.part, self.lowest, self.bound
        first, last, size = part.first, part.last, part.size
        top = lowest[pick] + size[pick]
        self._set(self.is_placed, pick, True)
        for section in range(first[pick], last[pick]):
            self._set(self.height, section, top)
            self._set(self.remaining, section, self.remaining[section] - size[pick])
            members = self.members[section].copy()
            members.remove(pick)
            self._set(self.members, section, members)
            self._changed[section] = None
            if section + 1 < last[pick]:
                self._set(self.crossing, section, self.crossing[section] - 1)
        for index in self.neighbours[pick]:
            if self.is_placed[index] or lowest[index] >= top:
                continue
            self._set(lowest, index, top)
            if not self._raise(index, top, max(first[pick], first[index])):
                return False
            # of two buffers with equal ranges, one on the other, the larger is below
            is_exchangeable = first[index] == first[pick] and last[index] == last[pick] and bound[index] == top
            if is_exchangeable and part.twin_rank[index] < part.twin_rank[pick]:
                if not self._raise(index, top + 1, first[pick]):
                    return False
        return self._propagate()

    def postpone(self, pick: int) -> bool:
        """Makes a buffer wait, and equal ones; returns False if the pending buffers cannot fit."""
        part, above = self.part, self.lowest[pick] + 1
        kind = (part.first[pick], part.last[pick], part.size[pick])
        section = part.first[pick]
        for index in self.members[section]:
            if index == pick or (
                (part.first[index], part.last[index], part.size[index]) == kind
                and part.twin_rank[index] > part.twin_rank[pick]
            ):
                if not self._raise(index, above, section):
                    return False
        return self._propagate()

    def raise_lowest_end(self, sections: range) -> bool:
        """Raises the bound of the waiting buffer with the lowest end to the lowest end of another neighbour."""
        _, index = min([self.ends[section][:2] for section in sections if self.members[section]])
        return self._raise(index, self._lowest_support(index), self.part.first[index]) and self._propagate()

    def is_ready(self, index: int) -> bool:
        """Whether a pending buffer does not wait and, at its lowest offset, leaves no gap that another fits."""
        part, offset = self.part, self.lowest[index]
        if self.bound[index] != offset:
            return False
        latest_remaining = part.capacity - offset
        own = slice(part.first[index], part.last[index])
        if max(self.remaining[own]) > latest_remaining:
            return False
        for height, (end, lowest, other) in zip(self.height[own], self.ends[own]):
            if height < offset and (other if lowest == index else end) <= offset:
                return False
        return True

    def part_around(self, section: int) -> range:
        """Returns the sections that pending buffers connect with a section."""
        first, last = section, section
        while first > 0 and self.crossing[first - 1]:
            first -= 1
        while self.crossing[last]:
            last += 1
        return range(first, last + 1)

    def _set(self, values: list[Any], index: int, value: object) -> None:
        self.trail.append((values, index, values[index]))
        values[index] = value

    def _raise(self, index: int, bound: int, section: int) -> bool:
        """Raises the bound of a buffer; returns False if it is beyond the capacity, a failure of the section."""
        part, old = self.part, self.bound[index]
        if old >= bound:
            return True
        if bound + part.size[index] > part.capacity:
            self.failed = section
            self._changed.clear()
            return False
        self._set(self.bound, index, bound)
        own, old_end = slice(part.first[index], part.last[index]), old + part.size[index]
        for section, (_, _, other), remaining in zip(range(own.start, own.stop), self.ends[own], self.remaining[own]):
            # else neither the lowest ends nor the number of candidates change
            if old_end <= other or bound + remaining > part.capacity:
                self._changed[section] = None
        return True

    def _end_of_others(self, section: int, index: int) -> int:
        end, lowest, other = self.ends[section]
        return other if lowest == index else end

    def _lowest_support(self, index: int) -> int:
        """Returns the lowest end of another pending buffer in a buffer's sections."""
        lowest = NO_END
        for section, (end, other, rest) in enumerate(self.ends[self.part.first[index] : self.part.last[index]]):
            support = rest if other == index else end
            if support < lowest:
                lowest, self._support_section[index] = support, self.part.first[index] + section
        return lowest

    def _propagate(self) -> bool:
        """Updates changed sections; returns False if the pending buffers of one do not fit above their floor."""
        while self._changed:
            section, _ = self._changed.popitem()
            if not self._update(section):
                self.failed = section
                self._changed.clear()
                return False
        return True

    def _update(self, section: int) -> bool:
        """Updates a section.

        If a pending buffer cannot be the next one in a section, because the rest does not fit above it, it is above one
        that can. If it waits, it is on top of another.
        """
        members, bound, size = self.members[section], self.bound, self.part.size
        if not members:
            self._set(self.ends, section, (NO_END, -1, NO_END))
            return True
        latest = self.part.capacity - self.remaining[section]
        bounds = list(map(bound.__getitem__, members))
        if min(bounds) > latest:
            return False
        ends = list(map(add, bounds, map(size.__getitem__, members)))
        can_be_next = list(map(latest.__ge__, bounds))
        next_end = min(compress(ends, can_be_next))
        end = min(ends)
        position = ends.index(end)
        lowest = members[position]
        ends[position] = NO_END
        other = min(ends)
        if self.ends[section] != (end, lowest, other):
            self._set(self.ends, section, (end, lowest, other))
        count = sum(can_be_next)
        if self.candidate_count[section] != count:
            self._set(self.candidate_count, section, count)
        if count == len(bounds) and bounds == list(map(self.lowest.__getitem__, members)):
            return True
        for index, offset in zip(members, bounds):
            if offset > latest:
                support = next_end
            elif offset > self.lowest[index]:
                if self._end_of_others(self._support_section[index], index) <= offset:
                    continue
                support = self._lowest_support(index)
            else:
                continue
            if support > offset and not self._raise(index, support, section):
                return False
        return True
