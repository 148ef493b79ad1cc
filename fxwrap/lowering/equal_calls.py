"""Calls that a graph makes twice, and copies of what nobody writes: the second tensor is the first.

Models make equal calls in every layer: an attention mask in the form that a kernel wants, sines and cosines of
positions. AOTAutograd finds them in graphs of training alone. Dropout in a model that is not trained is a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxwrap.lowering.graph_copy import (
    GraphCopy,
    can_run_again,
    expression_of,
    items_of,
    nodes_by_storage,
    storages_of,
    written_storages,
)
from fxwrap.lowering.source import GraphSource
from fxwrap.options import Options
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir.operators import operator_facts

_SIZED_BY_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


def with_equal_calls_once(
    source: GraphSource, fakes: dict[Node, Any], options: Options
) -> tuple[GraphSource, dict[Node, Any]]:
    """Returns a graph that makes each call once, and the fake values of its nodes; the graph itself where it does so.

    Calls are equal that have an operator and operands in common, do nothing but give tensors, and whose operands and
    results nobody writes; a copy is equal to what it copies. What the graph gives back stays as it is: two outputs are
    two tensors. Linear in nodes.
    """
    nodes = list(source.graph_module.graph.nodes)
    twins = equal_calls(nodes, fakes) if options.fuse else {}
    if not twins:
        return source, fakes
    copy = GraphCopy(source, fakes)
    for node, twin in twins.items():
        copy.substitute(node, copy.made_of[twin])
    return copy.finished()


def equal_calls(nodes: Sequence[Node], fakes: Mapping[Node, Any]) -> dict[Node, Node]:
    """Returns for each call that may be left out the node that gives the same, before it."""
    written = written_storages(nodes, fakes)
    outputs = next(node for node in nodes if node.op == "output").all_input_nodes
    given = _storages_of_all(outputs, fakes)
    on_storage = nodes_by_storage(nodes, fakes)
    first: dict[Any, Node] = {}
    twins: dict[Node, Node] = {}
    for node in nodes:
        if not _is_candidate(node, fakes):
            continue
        read, own = _storages_of_all(node.all_input_nodes, fakes), storages_of(fakes[node])
        if (read | own) & written:
            continue
        twin = _copied(node, fakes, twins)
        if twin is None:
            key = _key((node.target, node.args, tuple(sorted(node.kwargs.items()))), twins)
            twin = first.setdefault(key, node)
        if twin is node or node in outputs or not own.isdisjoint(given - read):
            continue
        if all(can_run_again(other) or other.op != "call_function" for storage in own for other in on_storage[storage]):
            twins[node] = twin
    return twins


def _storages_of_all(nodes: Sequence[Node], fakes: Mapping[Node, Any]) -> set[int]:
    return {storage for node in nodes for storage in storages_of(fakes.get(node))}


def _copied(node: Node, fakes: Mapping[Node, Any], twins: Mapping[Node, Node]) -> Node | None:
    """Returns what a node is a copy of, if it is one that is laid out as that is."""
    if node.target is not torch.ops.aten.clone.default or not isinstance(node.args[0], Node):
        return None
    copied = twins.get(node.args[0], node.args[0])
    one, other = fakes[node], fakes[copied]
    same = [*map(expression_of, one.stride())] == [*map(expression_of, other.stride())]
    return copied if same else None


def _is_candidate(node: Node, fakes: Mapping[Node, Any]) -> bool:
    """Whether a node is a call that only gives tensors, the same ones whenever it is made."""
    fake = fakes.get(node)
    if not items_of(fake) or not all(item is None or isinstance(item, torch.Tensor) for item in items_of(fake)):
        return False
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return operator_facts(node.target).is_pure and _SIZED_BY_DATA.isdisjoint(node.target.tags)


def _key(item: Any, twins: Mapping[Node, Node]) -> Any:
    """Returns what equal calls have in common; 1, 1.0 and True differ."""
    match item:
        case Node():
            return twins.get(item, item)
        case tuple() | list():
            return tuple([_key(part, twins) for part in item])
        case dict():
            return tuple([(name, _key(part, twins)) for name, part in sorted(item.items())])
        case slice():
            return (slice, *[_key(part, twins) for part in (item.start, item.stop, item.step)])
        case _:
            return (type(item), repr(item) if isinstance(item, float | complex) else item)
