"""The nodes of the prepared graph that a planned kernel computes: between the memory that it reads and its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torch.fx import Node

from fxwrap.lowering.builder import Builder
from fxwrap.lowering.fusion.definition_plans import MaterialisationPlan
from fxwrap.lowering.fusion.definitions import Definition, InPlaceScatter, InPlaceStore, Viewed, definitions_in
from fxwrap.lowering.fusion.iteration_mappings import KernelPlan
from fxwrap.lowering.graph_definitions import DefinitionOperand, GraphDefinitions
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import Value
from fxwrap.wrapper_ir.operators import operator_schema


class RegionCut(Exception):
    """A kernel without a region; `node` is the node that the cut goes through."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.node = node


@dataclass(frozen=True)
class KernelContext:
    """The graph that kernels are parts of: its nodes, and the values of definitions so far."""

    builder: Builder
    definitions: GraphDefinitions
    plan: MaterialisationPlan
    nodes: Sequence[Node]
    values: Mapping[Definition, Value]

    @cached_property
    def order(self) -> Mapping[Node, int]:
        """The positions of the nodes."""
        return {node: position for position, node in enumerate(self.nodes)}


Source: TypeAlias = "tuple[Node, int | None]"
"""A node, and the index of its result if it has several."""


@dataclass(eq=False)
class KernelNodes:
    """The nodes of one planned kernel."""

    context: KernelContext
    plan: KernelPlan

    def __post_init__(self) -> None:
        self.builder = self.context.builder
        self.definitions = self.context.definitions
        self.readable = {*self.plan.reads, *self.plan.operands}

    def root(self, value: Value) -> str:
        """Returns the name of the value that owns a value's memory."""
        return self.builder.storages.root(value).name

    def source_of_output(self, definition: Definition) -> Source:
        """Returns the node that computes a stored definition.

        Raises RegionCut for an intermediate result, and for a scatter in place, whose operator would copy its target.
        """
        result = self.definitions.results.get(definition)
        if result is None:  # an intermediate result of an operator
            raise RegionCut(self.context.nodes[self.context.plan.definitions[definition].position])
        if isinstance(definition, InPlaceScatter):
            raise RegionCut(result.node)
        if not isinstance(definition, InPlaceStore):
            return self.source_of_result(definition, result.node)
        write = self.definitions.reinplacing.slice_writes.get(result.node)
        source = result.node.args[1] if write is None else write.source
        assert isinstance(source, Node)
        return self.source(source)

    def source(self, node: Node) -> Source:
        """Returns the node that computes a node's tensor.

        A node that writes its operand in place has no operator in a region: its memory already has the new content.
        """
        reinplacing = self.definitions.reinplacing
        while node in reinplacing.slice_writes or node in reinplacing.copies:
            write = reinplacing.slice_writes.get(node)
            base = node.args[0] if write is None else write.base
            assert isinstance(base, Node)
            node = base
        definition = self.definitions.operands[node]
        if not isinstance(definition, Definition) or definition not in self.definitions.results:
            return node, None
        return self.source_of_result(definition, self.definitions.results[definition].node)

    def source_of_result(self, definition: Definition, node: Node) -> Source:
        """Returns a node, and the index of a definition among the node's results."""
        operand = self.definitions.operands[node]
        return (node, operand.index(definition)) if isinstance(operand, tuple) else (node, None)

    def needed(self, outputs: Iterable[Source]) -> set[Node]:
        """Returns the nodes that compute the outputs from memory."""
        needed: set[Node] = set()
        pending = [source for source in outputs if not self.is_boundary(source)]
        while pending:
            node, _ = pending.pop()
            if node in needed:
                continue
            if not isinstance(node.target, OpOverload) or not operator_schema(node.target).is_pure:
                raise RegionCut(node)
            needed.add(node)
            operands = [self.source(operand) for operand in node.all_input_nodes]
            pending.extend([source for source in operands if not self.is_boundary(source)])
        return needed

    def operand_of(self, source: Source) -> DefinitionOperand:
        """Returns the definition of a result, or what the node is instead of a tensor."""
        node, index = source
        operand = self.definitions.operands[node]
        return operand[index] if isinstance(operand, tuple) and index is not None else operand

    def is_boundary(self, source: Source) -> bool:
        """Whether a result is in memory, or a number."""
        return not any(self.is_computed_here(item) for item in definitions_in(self.operand_of(source)))

    def is_computed_here(self, definition: Definition) -> bool:
        """Whether the kernel computes a definition, itself or as a view, instead of reading it from memory."""
        if isinstance(definition, Viewed) or definition in self.plan.computed:
            return True
        is_result = definition in self.definitions.results
        return is_result and self.context.plan.access_of(definition) != "fetched"
