"""Common subexpression elimination, which also removes clones of tensors that nothing writes.

Models repeat calls in every layer: an attention mask in the layout that a kernel needs, sines and cosines of
positions. Dropout in evaluation mode is a clone.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, can_propagate_fake, items_of, same_strides, storages_of
from fxwrap.fx_passes.prepared_graph import RECOMPUTED, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import nodes_by_storage, written_storages
from fxwrap.torch_compat import OpOverload, symbol_expression
from fxwrap.wrapper_ir.operators import operator_schema

_DATA_DEPENDENT_TAGS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


def eliminate_common_subexpressions(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph that makes each pure call once; linear in the number of nodes.

    Two calls are equal if their operator and operands are equal and nothing writes their operands or results; a clone
    is equal to its operand. Outputs of the graph keep their own storages. A recomputed call is equal to other
    recomputed ones only.
    """
    duplicates = common_subexpressions(graph.nodes, graph.fakes)
    if not duplicates:
        return graph
    copy = GraphCopy(graph)
    for node, first in duplicates.items():
        copy.substitute(node, copy.node_map[first])
    return copy.finish()


def common_subexpressions(nodes: Sequence[Node], fakes: NodeValues, *, saves_results: bool = False) -> dict[Node, Node]:
    """Returns, for each redundant call, the earlier node with the same value.

    `saves_results` says that the graph is partitioned later, and any result may be saved for the backward. Between
    the parts a caller may write inputs and outputs: clones stay, and calls that share storage with an output.
    """
    written = written_storages(nodes, fakes)
    storages = {node: storages_of(fakes.get(node)) for node in nodes}
    outputs = next(node for node in nodes if node.op == "output").all_input_nodes
    returned = _union(storages, outputs)
    on_storage = nodes_by_storage(nodes, fakes)
    first_by_key: dict[Hashable, Node] = {}
    duplicates: dict[Node, Node] = {}
    for node in nodes:
        if not _is_candidate(node, fakes):
            continue
        read, own = _union(storages, node.all_input_nodes), storages[node]
        if (read | own) & written or (saves_results and own & returned):
            continue
        first = None if saves_results else _clone_source(node, fakes, duplicates)
        if first is None:
            key = _expression_key((node.target, node.args, tuple(sorted(node.kwargs.items()))), duplicates)
            first = first_by_key.setdefault((key, RECOMPUTED in node.meta), node)
        if first is node or node in outputs or not own.isdisjoint(returned - read):
            continue
        aliases = [alias for storage in own for alias in on_storage[storage]]
        if all(can_propagate_fake(alias) or alias.op != "call_function" for alias in aliases):
            duplicates[node] = first
    return duplicates


def _union(storages: Mapping[Node, set[int]], nodes: Iterable[Node]) -> set[int]:
    return {storage for node in nodes for storage in storages[node]}


def _clone_source(node: Node, fakes: NodeValues, duplicates: Mapping[Node, Node]) -> Node | None:
    """Returns the operand of a clone with equal strides, else None."""
    if node.target is not torch.ops.aten.clone.default or not isinstance(node.args[0], Node):
        return None
    source = duplicates.get(node.args[0], node.args[0])
    return source if same_strides(fakes[node], fakes[source]) else None


def _is_candidate(node: Node, fakes: NodeValues) -> bool:
    """Whether a node is a deterministic call without effects whose results are tensors."""
    items = items_of(fakes.get(node))
    if not items or not all(item is None or isinstance(item, torch.Tensor) for item in items):
        return False
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return operator_schema(node.target).is_pure and _DATA_DEPENDENT_TAGS.isdisjoint(node.target.tags)


def _expression_key(item: object, duplicates: Mapping[Node, Node]) -> Hashable:
    """Returns a key that is equal for equal arguments; 1, 1.0 and True differ."""
    match item:
        case Node():
            return duplicates.get(item, item)
        case tuple() | list():
            return tuple([_expression_key(part, duplicates) for part in item])
        case dict():
            return tuple([(name, _expression_key(part, duplicates)) for name, part in sorted(item.items())])
        case slice():
            return (slice, *[_expression_key(part, duplicates) for part in (item.start, item.stop, item.step)])
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():  # AOTAutograd leaves some among the arguments
            return (type(item), symbol_expression(item))
        case _:
            return (type(item), repr(item) if isinstance(item, float | complex) else item)
