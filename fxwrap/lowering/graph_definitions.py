"""The definitions and the extern calls of a graph, as the later stages of lowering read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch.fx import Node

from fxwrap.caching import bounded_cache
from fxwrap.lowering.builder import NodeCoverage
from fxwrap.lowering.calls.reinplace import ReinplacePlan
from fxwrap.lowering.fusion.definitions import (
    Definition,
    DefinitionLabel,
    InPlaceWrite,
    Stored,
    definitions_in,
    unwrap_views,
)
from fxwrap.lowering.fusion.kernels import dense_strides
from fxwrap.lowering.symbols.cpu_scalars import ScalarRead
from fxwrap.torch_compat import are_disjoint_slices, storage_identity
from fxwrap.wrapper_ir import Leaf, TensorType

DefinitionOperand: TypeAlias = "Definition | Leaf | tuple[DefinitionOperand, ...] | dict[str, DefinitionOperand]"
"""The operand of a node, with definitions for tensors; a user's kernel has the tensors that it writes by parameter."""


def as_definition(operand: DefinitionOperand) -> Definition:
    """Returns an operand that is a definition."""
    assert isinstance(operand, Definition), "the operand is a number, or several tensors"
    return operand


@dataclass(frozen=True, eq=False)
class CallStep:
    """An extern call of a node: the definitions that it reads, defines and overwrites.

    `symbols` are the symbols that it needs, `bound` those that it defines. With `scalar_read` the step is no call, but
    reads that scalar.
    """

    node: Node
    position: int
    reads: Sequence[Definition]
    defines: Sequence[Definition] = ()
    writes: Sequence[Definition] = ()
    symbols: frozenset[sympy.Symbol] = frozenset()
    bound: frozenset[sympy.Symbol] = frozenset()
    has_ordered_effect: bool = False
    scalar_read: ScalarRead | None = None


@dataclass(frozen=True)
class RuleResult:
    """The node of a definition, its position in the graph, and its fake tensor (None for a write in place).

    `index` is the definition's place among the node's results.
    """

    node: Node
    position: int
    fake: torch.Tensor | None = None
    index: int = 0


class DefinitionStorages:
    """The definitions in each storage of the graph."""

    def __init__(self) -> None:
        self._definitions: dict[int, list[Definition]] = {}
        self._storages: dict[Definition, int] = {}
        self._shared: dict[int, int] = {}

    def add(self, definition: Definition, storage: int) -> None:
        """Records the storage of a definition."""
        storage = self._shared.get(storage, storage)
        self._storages[definition] = storage
        self._definitions.setdefault(storage, []).append(definition)

    def share(self, fake: torch.Tensor, definition: Definition) -> None:
        """Records that a fake tensor, and views of it, are in the storage of a definition.

        The call that returns it has a storage of its own in the graph, and writes the definition in place.
        """
        self._shared[storage_identity(fake)] = self._storages[definition]

    def add_alias(self, definition: Definition, base: Definition) -> None:
        """Records that a definition is in the storage of another."""
        self.add(definition, self._storages[base])

    def on_storage(self, fake: torch.Tensor) -> Sequence[Definition]:
        """Returns the definitions in the storage of a fake tensor."""
        storage = storage_identity(fake)
        return self._definitions.get(self._shared.get(storage, storage), ())

    def aliases_of(self, definition: Definition) -> Sequence[Definition]:
        """Returns the definitions in the storage of a definition, itself included."""
        storage = self._storages.get(definition)
        return [definition] if storage is None else self._definitions[storage]


@dataclass(frozen=True, eq=False)
class GraphDefinitions:
    """The definitions and the extern calls of a graph.

    Fields:
        operands: for each node a definition, a tuple of them, or a literal.
        steps: extern calls and reads of scalars, in order.
        results: the node of each definition of a rule.
        labels: the labels of all definitions of nodes.
        stored_types: the types of tensors in memory.
        mutations: stored definitions, and the positions at which they are overwritten.
        slice_writes: the slices that kernels overwrite, and the calls that do so.
        reinplacing: the calls that write their operands in place.
        storages: the definitions in each storage.
        coverage: the outcome of each call.
        in_memory: definitions that rules want in memory.
    """

    operands: Mapping[Node, DefinitionOperand]
    steps: Sequence[CallStep]
    results: Mapping[Definition, RuleResult]
    labels: Mapping[Definition, DefinitionLabel]
    stored_types: Mapping[Stored, TensorType]
    mutations: Sequence[tuple[Definition, int]]
    slice_writes: Mapping[Definition, Node]
    reinplacing: ReinplacePlan
    storages: DefinitionStorages
    coverage: Sequence[NodeCoverage]
    in_memory: Collection[Definition]

    def fake(self, definition: Definition) -> torch.Tensor | None:
        """Returns the fake tensor of a rule's result, or None for other definitions."""
        result = self.results.get(definition)
        return None if result is None else result.fake

    def tensor_type(self, definition: Definition, type_of: Callable[[torch.Tensor], TensorType]) -> TensorType:
        """Returns the type of a definition in memory; `type_of` returns that of a fake tensor."""
        stored = self.stored_types.get(definition) if isinstance(definition, Stored) else None
        if stored is not None:
            return stored
        fake = self.fake(definition)
        if fake is not None:
            return type_of(fake)
        strides = dense_strides(definition.sizes)
        return TensorType(definition.dtype, definition.sizes, strides, definition.device)

    def are_disjoint(self, first: Definition, second: Definition) -> bool:
        """Whether two definitions in memory share no element: in different storages, or slices of one tensor."""
        if second not in self.storages.aliases_of(first):
            return True
        if not isinstance(first, Stored) or not isinstance(second, Stored):
            return False
        types = [self.stored_types.get(item) for item in (first, second)]
        layouts = [(item.sizes, item.strides, item.storage_offset) for item in types if item is not None]
        return len(layouts) == 2 and are_disjoint_slices(*layouts)

    def definition(self, node: Node) -> Definition:
        """Returns the definition of a node that has one result."""
        return as_definition(self.operands[node])

    def region_operands(self) -> dict[Definition, list[Definition]]:
        """Returns the tensors that the operator of each rule's result takes, with views resolved.

        A write in place takes only the tensors that it reads.
        """
        operands: dict[Node, list[Definition]] = {}
        for result in self.results.values():
            if result.node not in operands:
                operands[result.node] = [unwrap_views(item) for item in self.of_nodes(result.node.all_input_nodes)]
        return {
            definition: [] if isinstance(definition, InPlaceWrite) else operands[result.node]
            for definition, result in self.results.items()
        }

    def of_nodes(self, nodes: Collection[Node]) -> list[Definition]:
        """Returns the definitions of nodes."""
        return [definition for node in nodes for definition in definitions_in(self.operands[node])]


_FAMILIES = {
    "matmul": r"mm|bmm|addmm|addbmm|baddbmm|addr|mv|addmv|dot|vdot|linear|bilinear|matmul|_trilinear|_addmm_activation"
    r"|_(int|scaled|grouped|scaled_grouped|cslt_sparse|weight_int8pack|weight_int4pack)_mm\w*",
    "convolution": r"\w*conv(olution|\dd|_transpose\dd|_tbc)?(_\w+)?",
    "attention": r"\w*scaled_dot_product\w*|_(flash|efficient)_attention(_forward)?|_native_multi_head_attention",
}


@bounded_cache(4096)
def library_family(name: str) -> str | None:
    """Returns the family of an operator ("aten.mm.default"): "matmul", "convolution", "attention" or None."""
    namespace, _, rest = name.partition(".")
    operator = rest.partition(".")[0].removesuffix("_backward")
    families = _FAMILIES.items() if namespace in ("aten", "mkldnn") else ()
    return next((family for family, pattern in families if re.fullmatch(pattern, operator)), None)


def library_call_reason(name: str) -> str | None:
    """Returns why a matmul, convolution or attention ("aten.mm.default") is a call, None for other operators."""
    family = library_family(name)
    return None if family is None else f"a library call, by design: {family}"
