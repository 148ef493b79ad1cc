"""Whether the exchanges of a sweep fit the capacity: a flow of bytes from leaves that end to those that take over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Takeover:
    """Leaves that end and leaves that take over their memory."""

    ended: tuple[int, ...]
    started: tuple[int, ...]


class ByteFlow:
    """Bytes of each leaf, not fewer than its size, such that both sides of each takeover have equally many.

    `sizes` are by buffer; leaves beyond are gaps, which may be empty. The initial gap, if it has bytes, is the first.
    """

    def __init__(self, sizes: Sequence[int], initial: Sequence[int], gap: int) -> None:
        self._sizes = sizes
        self._initial = initial
        self._bytes = {leaf: sizes[leaf] if leaf < len(sizes) else gap for leaf in initial}
        self._source: dict[int, int] = {}
        self._target: dict[int, int] = {}
        self._takeovers: list[Takeover] = []

    def with_takeover(self, takeover: Takeover) -> ByteFlow | None:
        """Returns the flow after one more takeover; None if there are not enough bytes."""
        flow = ByteFlow(self._sizes, self._initial, 0)
        flow._bytes, flow._source, flow._target = dict(self._bytes), dict(self._source), dict(self._target)
        flow._takeovers = [*self._takeovers]
        return flow if flow._add(takeover) else None

    def _add(self, takeover: Takeover) -> bool:
        available = sum([self._bytes[leaf] for leaf in takeover.ended])
        needed = sum([self._size(leaf) for leaf in takeover.started])
        if available < needed:
            if not self._supply(takeover.ended, needed - available):
                return False
            available = needed
        number = len(self._takeovers)
        for leaf in takeover.ended:
            self._target[leaf] = number
        for leaf in takeover.started:
            self._source[leaf] = number
            self._bytes[leaf] = self._size(leaf)
        self._bytes[takeover.started[-1]] += available - needed
        self._takeovers.append(takeover)
        return True

    def _size(self, leaf: int) -> int:
        return self._sizes[leaf] if leaf < len(self._sizes) else 0

    def _spare(self, leaf: int) -> int:
        return self._bytes[leaf] - self._size(leaf)

    def _supply(self, leaves: Sequence[int], needed: int) -> bool:
        """Moves bytes to leaves from others that exist, along shortest paths of takeovers (Edmonds and Karp, 1972)."""
        while needed:
            path = self._path_from(leaves)
            if path is None:
                return False
            giver, steps = path
            amount = min([needed, self._spare(giver), *[self._spare(leaf) for leaf, shrinks in steps if shrinks]])
            self._bytes[giver] -= amount
            for leaf, shrinks in steps:
                self._bytes[leaf] += -amount if shrinks else amount
            needed -= amount
        return True

    def _path_from(self, leaves: Sequence[int]) -> tuple[int, list[tuple[int, bool]]] | None:
        """Returns a leaf with more bytes than its size, and those on the way, each with whether it shrinks."""
        origin = len(self._takeovers)
        reached: dict[int, tuple[int, int]] = {}
        for leaf in leaves:
            reached.setdefault(self._source.get(leaf, origin), (-1, leaf))
        queue = list(reached)
        for node in queue:
            takeover = None if node == origin else self._takeovers[node]
            for leaf in self._initial if takeover is None else takeover.started:
                if self._spare(leaf) <= 0 or leaf in leaves:
                    continue
                target = self._target.get(leaf)
                if target is None:
                    return leaf, self._steps_to(node, reached)
                if target not in reached:
                    reached[target] = (node, leaf)
                    queue.append(target)
            for leaf in () if takeover is None else takeover.ended:
                source = self._source.get(leaf, origin)
                if source not in reached:
                    reached[source] = (node, leaf)
                    queue.append(source)
        return None

    def _steps_to(self, node: int, reached: dict[int, tuple[int, int]]) -> list[tuple[int, bool]]:
        steps = []
        while node >= 0:
            previous, leaf = reached[node]
            steps.append((leaf, previous >= 0 and self._target.get(leaf) == node))
            node = previous
        return steps
