"""Whether parts of a concatenation read the same elements, so that one iteration computes an element of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from fxwrap.loop_ir import Atom, IndexLike, as_index
from fxwrap.lowering.fusion.definitions import Definition, EvenConcatenation, Pointwise
from fxwrap.lowering.fusion.tracing import IndexTuple, Tracer

_MAX_READS = 256
"""The most elements of definitions that one element of a part is followed through."""


@dataclass(frozen=True, eq=False)
class ConcatenatedParts:
    """The parts of a graph's concatenations; `external` are the definitions that are in memory in any case."""

    tracer: Tracer
    external: Collection[Definition]
    _sharing: dict[EvenConcatenation, bool] = field(default_factory=dict)

    def share_reads(self, concatenation: EvenConcatenation) -> bool:
        """Returns whether several parts read one element in memory, if all that may be inlined is."""
        if concatenation not in self._sharing:
            reads = [read for part in concatenation.parts for read in self._reads(part)]
            self._sharing[concatenation] = len({*reads}) < len(reads)
        return self._sharing[concatenation]

    def _reads(self, part: Definition) -> set[tuple[Definition, IndexTuple]]:
        """Returns the elements in memory that an element is computed from; none where these are too many to follow."""
        first = tuple([as_index(axis) for axis in self.tracer.trace(part).axes])
        pending, seen = [(part, first)], set[tuple[Definition, IndexTuple]]()
        while pending and len(seen) <= _MAX_READS:
            read = pending.pop()
            definition, at = read
            if read not in seen and self._is_inlined(definition):
                trace = self.tracer.trace(definition)
                axes: dict[Atom, IndexLike] = dict(zip(trace.axes, at, strict=True))
                pending += [(other, tuple([index.substitute(axes) for index in place])) for other, place in trace.reads]
            seen.add(read)
        return set() if pending else {read for read in seen if not self._is_inlined(read[0])}

    def _is_inlined(self, definition: Definition) -> bool:
        return isinstance(definition, Pointwise) and definition not in self.external
