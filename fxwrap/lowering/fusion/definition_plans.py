"""Plans of definitions: which are materialised, what they read and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fxwrap.lowering.fusion.definitions import Definition, DefinitionLabel, Pointwise, Reduced, Scanned, Scattered
from fxwrap.lowering.fusion.tracing import Access, Tracer


@dataclass(frozen=True, eq=False)
class DefinitionPlan:
    """A definition, the position of its node, and how it is computed.

    `cost` and `depth` include the definitions inlined into it; `reads` are the materialised definitions that it reads,
    `operands` other ones that its region needs. One with a window reads many elements of one tensor for each of its
    own, on a massively parallel device: neighbouring iterations of its kernel had better share loads.
    """

    definition: Definition
    position: int
    materialised: bool = True
    cost: int = 0
    depth: int = 0
    reads: frozenset[Definition] = frozenset()
    operands: frozenset[Definition] = frozenset()
    has_window: bool = False


@dataclass(frozen=True, eq=False)
class MaterialisationPlan:
    """The plans of all live definitions, in an order in which they can be computed.

    `external` are the definitions that extern calls, outputs or other streams read. `labels` name all definitions.
    """

    definitions: Mapping[Definition, DefinitionPlan]
    external: frozenset[Definition]
    labels: Mapping[Definition, DefinitionLabel]
    tracer: Tracer

    def access_of(self, definition: Definition) -> Access:
        """Returns how bodies get a definition's elements; one without a plan is dead, and its elements are unused."""
        plan = self.definitions.get(definition)
        if plan is None:
            return "unused"
        return "fetched" if plan.materialised else "inlined"

    def operator_of(self, definition: Definition) -> str:
        """Returns the overload name of the operator of a definition, or ""."""
        label = self.labels.get(definition)
        return "" if label is None else label.operator

    def computed(self) -> list[DefinitionPlan]:
        """Returns the definitions that kernels write to memory, in order."""
        kinds = Pointwise | Reduced | Scanned | Scattered
        return [plan for key, plan in self.definitions.items() if plan.materialised and isinstance(key, kinds)]

    @cached_property
    def readers(self) -> Mapping[Definition, set[Definition]]:
        """The definitions in memory that read each one."""
        readers: dict[Definition, set[Definition]] = defaultdict(set)
        for plan in self.computed():
            for other in (*plan.reads, *plan.operands):
                readers[other].add(plan.definition)
        return readers
