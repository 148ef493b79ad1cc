"""The order of kernels that read one tensor: the one that can store a result in its memory runs last."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fxwrap.loop_ir import Index, as_index
from fxwrap.lowering.fusion.definitions import Definition, Pointwise
from fxwrap.lowering.fusion.fusion import Fusion, ScheduledItem
from fxwrap.symbolic import product


def move_readers_before_overwriting(
    fusion: Fusion, preserved: Collection[Definition], mutated: Collection[Definition]
) -> list[ScheduledItem]:
    """Returns the items in order; later readers of a tensor precede the kernel that can store a result in its memory.

    Gradients of a norm are an example: one kernel reads the operand and stores its gradient, another one sums columns
    of both. After the sums, the gradient needs no memory of its own. Readers are moved if they write fewer bytes than
    the tensor has.

    Args:
        fusion: calls and kernels.
        preserved: the definitions whose memory no result may overwrite.
        mutated: those that the graph mutates, the readers of which are not moved.
    """
    order = _ReaderOrder(fusion, preserved, mutated)
    for definition in fusion.read_definitions():
        order.move_readers_of(definition)
    return order.items()


@dataclass(eq=False)
class _ReaderOrder:
    """The positions of items by identity; an item moves at most once, and none before one that has moved."""

    fusion: Fusion
    preserved: Collection[Definition]
    mutated: Collection[Definition]
    positions: dict[int, float] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.positions = {id(item): float(number) for number, item in enumerate(self.fusion.items())}

    def items(self) -> list[ScheduledItem]:
        return sorted(self.fusion.items(), key=self._position)

    def move_readers_of(self, definition: Definition) -> None:
        """Moves the later readers of a definition, if they may precede the kernel that can overwrite it."""
        readers = self._readers(definition)
        numbers = [number for number, item in enumerate(readers[:-1]) if self._stores_over(item, definition)]
        if not numbers or self._stores_over(readers[-1], definition):
            return
        target, others = readers[numbers[-1]], readers[numbers[-1] + 1 :]
        bytes_ = self._bytes([definition])
        if all(self._can_precede(item, target) and self._written_bytes(item) < bytes_ for item in others):
            self.fixed.update(map(id, (target, *others)))
            self.positions |= {id(item): self._position(target) - 0.5 for item in others}

    def _position(self, item: ScheduledItem) -> float:
        return self.positions[id(item)]

    def _readers(self, definition: Definition) -> Sequence[ScheduledItem]:
        """Returns the items that read a definition or an alias, in order; none if its memory is preserved."""
        aliases = self.fusion.aliases_of(definition)
        if any(alias in self.preserved for alias in aliases):
            return ()
        readers = {id(item): item for alias in aliases for item in self.fusion.readers(alias)}
        return sorted(readers.values(), key=self._position)

    def _stores_over(self, item: ScheduledItem, definition: Definition) -> bool:
        """Whether a kernel stores elements where it reads those of a definition, and no other operand ends there."""
        kernel = item.kernel
        points = [] if kernel is None else kernel.reads.get(definition, [])
        if kernel is None or len(points) != 1:
            return False
        kind = _kind(definition)
        results = [
            member for member in kernel.members
            if type(member.definition) is Pointwise and _kind(member.definition) == kind
            and self.fusion.is_stored(member.definition, item)
        ]  # fmt: skip
        if all(member.element != points[0] for member in results):
            return False
        others = [other for other in kernel.reads if other is not definition and _kind(other) == kind]
        return len(results) > sum([self._readers(other)[-1:] == [item] for other in others])

    def _can_precede(self, item: ScheduledItem, target: ScheduledItem) -> bool:
        """Whether a kernel may run before an earlier one."""
        kernel = item.kernel
        if kernel is None or kernel.overwritten or not self.fixed.isdisjoint((id(item), id(target))):
            return False
        read = [alias for other in (*kernel.reads, *kernel.operands) for alias in self.fusion.aliases_of(other)]
        if any(alias in self.mutated for alias in read) or not self.fusion.share_segment(item, target):
            return False
        return all(self._position(other) < self._position(target) for other in self.fusion.dependences(item))

    def _written_bytes(self, item: ScheduledItem) -> int:
        computed = () if item.kernel is None else item.kernel.computed
        return self._bytes([definition for definition in computed if self.fusion.is_stored(definition, item)])

    def _bytes(self, definitions: Collection[Definition]) -> int:
        return sum([self.fusion.hint(product(item.sizes)) * item.dtype.itemsize for item in definitions])


def _kind(definition: Definition) -> tuple[object, Index]:
    """Returns the dtype and the number of elements: a result with equal ones has the size of a definition."""
    return definition.dtype, as_index(product(definition.sizes))
