"""Which definitions get memory, and which are computed again wherever they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fxwrap.device_spec import DeviceSpec
from fxwrap.lowering.definitions import Definition, Pointwise, Reduced, Scanned, Scattered, Viewed
from fxwrap.lowering.tracing import Tracer, space_of
from fxwrap.symbolic import Size, product

_CHEAP = 8
"""Instructions that are cheaper to repeat than a value is to write and read."""
_CHEAP_BROADCAST = 16
_SLOW, _TABLE = 12, 16
"""Instructions of a function that is worth a table, and how often an element of the table is read."""
_MOST_INLINED = 400
_MOST_READS = 24
_STENCIL = 3
"""Elements of one tensor that one iteration reads from which on it is read as if by as many consumers."""
_DEEPEST = 40
"""Definitions in a row that are inlined one into the next: bodies call one another."""


@dataclass(eq=False)
class Use:
    """What is known of one definition: when its node comes, who reads it, and whether it gets memory.

    `most_read` is how many elements of it one iteration of a consumer reads.
    """

    definition: Definition
    position: int
    consumers: list[Use] = field(default_factory=list)
    most_read: int = 0
    external: bool = False
    realised: bool = False
    cost: int = 0
    depth: int = 0
    reads: set[Definition] = field(default_factory=set)
    mutated_reads: dict[Definition, int] = field(default_factory=dict)

    @property
    def last_consumer(self) -> int:
        """The position of the last definition that reads it."""
        return max([use.position for use in self.consumers], default=self.position)


class Uses:
    """All definitions of a graph, in the order in which they can be computed."""

    def __init__(self, hint: Callable[[Size], int], specs: Mapping[str, DeviceSpec]) -> None:
        """`specs` has the facts about each device type that has kernels."""
        self._specs = specs
        self.tracer = Tracer()
        self.by_definition: dict[Definition, Use] = {}
        self._hint = hint

    def add(self, definition: Definition, position: int) -> Use:
        """Records a definition, and what it reads before it; a view stands for what it shows."""
        known = self.by_definition.get(definition)
        if known is not None:
            return known
        use = Use(definition, position, realised=not isinstance(definition, Pointwise | Viewed))
        for other, count in Counter(other for other, _ in self.tracer.trace(definition).reads).items():
            other.origin = other.origin or definition.origin
            other.name = other.name or f"{definition.name}_{len(self.by_definition)}"
            producer = self.add(other, position)
            producer.consumers.append(use)
            producer.most_read = max(producer.most_read, count)
        self.by_definition[definition] = use
        return use

    def decide(self, mutations: Iterable[tuple[Definition, int]]) -> None:
        """Decides what is realised. `mutations` are stored definitions that are written at a position."""
        self._forget_dead()
        written: dict[Definition, list[int]] = {}
        for definition, position in mutations:
            written.setdefault(definition, []).append(position)
        for use in self.by_definition.values():
            self._decide(use, written)

    def _forget_dead(self) -> None:
        """Forgets definitions that nothing needs: parts of results that nobody uses, and what only they read."""
        live: set[int] = set()
        for use in reversed(self.by_definition.values()):
            use.consumers = [consumer for consumer in use.consumers if id(consumer) in live]
            if use.external or use.consumers:
                live.add(id(use))
        self.by_definition = {key: use for key, use in self.by_definition.items() if id(use) in live}

    def _decide(self, use: Use, written: dict[Definition, list[int]]) -> None:
        trace = self.tracer.trace(use.definition)
        use.cost = trace.cost
        for other, _ in trace.reads:
            producer = self.by_definition[other]
            if producer.realised:
                use.reads.add(other)
            else:
                use.cost += producer.cost
                use.depth = max(use.depth, producer.depth + 1)
                use.reads |= producer.reads
        stale = any(
            use.position <= position < use.last_consumer
            for other in use.reads if other in written
            for position in written[other]
        )  # fmt: skip
        if isinstance(use.definition, Pointwise):
            use.realised = use.external or stale or not self._worth_inlining(use)

    def _worth_inlining(self, use: Use) -> bool:
        if use.depth > _DEEPEST:
            return False
        if not use.reads and use.cost <= _MOST_INLINED // 4:
            return True
        if use.cost > _MOST_INLINED or len(use.reads) > _MOST_READS:
            return False
        own = self._count(use.definition.sizes)
        if self._ends_rows(use, own):
            return False
        widest = max([self._count(space_of(consumer.definition)[0]) for consumer in use.consumers], default=own)
        if widest > 2 * own:
            return use.cost <= _CHEAP_BROADCAST and not self._is_table(use, widest / own)
        if len(use.consumers) <= 1 and use.most_read < _STENCIL:
            return True
        if use.cost <= _CHEAP and self._bytes(use.reads) <= self._bytes([use.definition]) * 1.25:
            return True
        return self._quick_to_repeat(use, own)

    def _quick_to_repeat(self, use: Use, own: int) -> bool:
        """Whether a device computes a tensor again for each reader in less time than it writes and reads it."""
        spec = self._specs.get(use.definition.device.type)
        moved = 0 if spec is None else spec.instructions_per_byte
        readers = max(len(use.consumers), use.most_read)
        repeated = (readers - 1) * (use.cost + moved * self._bytes(use.reads) / own)
        return repeated <= moved * use.definition.dtype.itemsize * readers  # the first has it at hand when it writes it

    def _is_table(self, use: Use, times: float) -> bool:
        """Whether each element takes long, and so many read it that they had better find it in a cache."""
        spec = self._specs.get(use.definition.device.type)
        after = any(isinstance(other, Reduced) for other in use.reads)  # which is at hand where rows are
        slow = self.tracer.trace(use.definition).cost >= _SLOW
        return slow and times >= _TABLE and not after and spec is not None and spec.instructions_per_byte > 0

    def _ends_rows(self, use: Use, own: int) -> bool:
        """Whether a definition computes on the results of a reduction, one for one, what another reduction combines.

        The first reduction's kernel has it at hand, in parallel; it is no more to write than these results are.
        """
        after = any(isinstance(other, Reduced) and self._count(other.sizes) == own for other in use.reads)
        return after and all(
            isinstance(consumer.definition, Reduced) and self._count(space_of(consumer.definition)[0]) == own
            for consumer in use.consumers
        )

    def _bytes(self, definitions: Iterable[Definition]) -> float:
        return sum(self._count(item.sizes) * item.dtype.itemsize for item in definitions)

    def _count(self, sizes: Iterable[Size]) -> int:
        return max(self._hint(product(sizes)), 1)

    def inlined(self, definition: Definition) -> bool:
        """Whether a definition is computed where it is read.

        One that no definition reads by itself is: an index that is known to be inside there need not be known to be so
        where the reader is computed again for another one.
        """
        use = self.by_definition.get(definition)
        return use is None or not use.realised

    def units(self) -> list[Use]:
        """Returns what kernels compute into memory, in order."""
        return [
            use for use in self.by_definition.values()
            if use.realised and isinstance(use.definition, Pointwise | Reduced | Scanned | Scattered)
        ]  # fmt: skip


