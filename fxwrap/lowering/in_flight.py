"""Point-to-point communication that is in flight at a point of the lowering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxwrap.wrapper_ir import LineBase, Origin, Value, consumed, reads, writes


@dataclass(frozen=True)
class Pending:
    """A result in flight, its fake tensor, and the names of the roots that the communication uses until the wait."""

    value: Value
    fake: torch.Tensor
    operands: frozenset[str]
    origin: Origin | None


class InFlight:
    """The results in flight, by the names of their roots, in the order of their starts."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

    def start(self, root: str, pending: Pending) -> None:
        """Records a result in flight."""
        self._pending[root] = pending

    def finish(self, root: str) -> Pending | None:
        """Removes and returns the result of a root; None if it is not in flight."""
        return self._pending.pop(root, None)

    def blocking(self, line: LineBase, root_names: Callable[[list[Value]], list[str]]) -> list[str]:
        """Returns the roots in flight that a line uses, or whose operands it overwrites or frees."""
        if not self._pending or line.is_async_wait:
            return []
        changed = set(root_names([*writes(line), *consumed(line)]))
        used = {*changed, *root_names(reads(line))}
        return [root for root, item in self._pending.items() if root in used or not changed.isdisjoint(item.operands)]

    def roots(self) -> list[str]:
        """Returns all roots in flight."""
        return list(self._pending)
