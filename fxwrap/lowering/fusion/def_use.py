"""The definitions of a graph, each with the definitions that read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxwrap.lowering.fusion.definitions import Definition, DefinitionLabel, Stored
from fxwrap.lowering.fusion.tracing import Tracer


@dataclass(eq=False)
class DefUse:
    """A definition, the position of its node, and the definitions that read it.

    `max_reads_per_iteration` is the largest number of its elements that one iteration of a consumer reads.
    `operand_consumers` are definitions whose operators take it as an operand; not all of them read its elements.
    """

    definition: Definition
    position: int
    consumers: list[DefUse] = field(default_factory=list)
    operand_consumers: list[DefUse] = field(default_factory=list)
    max_reads_per_iteration: int = 0


class DefUseChains:
    """The definitions of a graph in an order in which they can be computed, each with its consumers.

    A definition without a label, or without an operator, is labelled after its first reader. `operands` has, for each
    result of an operator, the operands of the operator, which its region needs; it is None for kernels without regions.
    """

    def __init__(
        self,
        labels: Mapping[Definition, DefinitionLabel],
        operands: Mapping[Definition, Sequence[Definition]] | None = None,
    ) -> None:
        self.tracer = Tracer()
        self.operands = operands
        self.labels = dict(labels)
        self.uses: dict[Definition, DefUse] = {}

    def add(self, definition: Definition, position: int) -> DefUse:
        """Records a definition, after the definitions that it reads."""
        if definition in self.uses:
            return self.uses[definition]
        use = DefUse(definition, position)
        label = self.labels.setdefault(definition, DefinitionLabel(""))
        for other, count in Counter(other for other, _ in self.tracer.trace(definition).reads).items():
            known = self.labels.get(other, DefinitionLabel(""))
            name = known.name or f"{label.name}_{len(self.uses)}"
            self.labels[other] = DefinitionLabel(name, known.operator or label.operator)
            producer = self.add(other, position)
            producer.consumers.append(use)
            producer.max_reads_per_iteration = max(producer.max_reads_per_iteration, count)
        for operand in self.operands_of(definition):
            self.add(operand, position).operand_consumers.append(use)
        self.uses[definition] = use
        return use

    def operands_of(self, definition: Definition) -> Sequence[Definition]:
        """Returns the operands of the operator of a result, which its region needs; none for other definitions."""
        return () if self.operands is None else self.operands.get(definition, ())

    def is_intermediate(self, definition: Definition) -> bool:
        """Whether a definition is no result of an operator, and so no tensor of a region."""
        return self.operands is not None and definition not in self.operands and not isinstance(definition, Stored)
