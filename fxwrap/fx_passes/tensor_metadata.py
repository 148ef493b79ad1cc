"""Assertions of tensor metadata, which `torch.export` puts before each cast: checked at compile time, and removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.errors import GraphError
from fxwrap.fx_passes.effects import calls_higher_order
from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.model_source import location_of
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph
from fxwrap.torch_compat import PROMOTION_KINDS, arguments_by_name, elementwise_dtypes

_ASSERTION = torch.ops.aten._assert_tensor_metadata.default


def check_tensor_metadata(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph without the assertions that hold; those on symbolic sizes or strides stay calls.

    Raises GraphError for one that fails, as eager mode would raise.
    """
    decided = [node for node in graph.nodes if node.target is _ASSERTION and _holds(node, graph.fakes)]
    if not decided:
        return graph
    copy = GraphCopy(graph)
    for node in decided:
        copy.erase(node)
    return copy.finish()


def _holds(node: Node, fakes: NodeValues) -> bool:
    """Whether an assertion is known to hold. Raises GraphError if it is known to fail."""
    known = True
    for name, expected, actual in _comparisons(node, fakes):
        if any(isinstance(item, Node | torch.SymInt) for value in (expected, actual) for item in _items(value)):
            known = False
        elif expected != actual:
            reason = f"it asserts that the {name} of '{node.args[0]}' is {expected}, but it is {actual}"
            raise GraphError(node.name, reason, "Export the model again, for inputs like these", location_of(node))
    return known


def _comparisons(node: Node, fakes: NodeValues) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, the asserted value and the actual value of each property that a node asserts."""
    arguments = arguments_by_name(node)
    fake: torch.Tensor = fakes[arguments["a"]]
    actual = {"size": tuple(fake.shape), "stride": fake.stride(), "dtype": fake.dtype, "device": fake.device,
              "layout": fake.layout}  # fmt: skip
    for name, value in actual.items():
        expected = arguments.get(name)
        if expected is not None:
            yield name, tuple(expected) if isinstance(expected, list | tuple) else expected, value


def _items(value: object) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


_aten = torch.ops.aten


def expand_out_dtype(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph in which `out_dtype` is casts, the operator, and a cast of its result, as in eager mode."""
    calls = [node for node in graph.nodes if calls_higher_order(node, "out_dtype")]
    if not calls:
        return graph
    copy = GraphCopy(graph)
    for node in calls:
        copy.substitute(node, _expand(copy, node), "fused")
    return copy.finish()


def _expand(copy: GraphCopy, node: Node) -> Node:
    before, name = copy.node_map[node], node.name
    target: object
    dtype: Any
    target, dtype, *arguments = before.args
    tensors = [item for item in before.all_input_nodes if isinstance(copy.fakes[item], torch.Tensor)]
    fakes = [copy.fakes[item] for item in tensors]
    if target is _aten.mm.default and dtype == torch.int32 and all(fake.dtype == torch.int8 for fake in fakes):
        return copy.call(before, _aten._int_mm.default, arguments, name)
    result = torch.empty(1, dtype=dtype, device="meta")
    promoted, _ = elementwise_dtypes(*fakes, result, type_promotion_kind=PROMOTION_KINDS["DEFAULT"])

    def cast(item: Node, dtype: torch.dtype) -> Node:
        if not isinstance(copy.fakes[item], torch.Tensor) or copy.fakes[item].dtype == dtype:
            return item
        return copy.call(before, _aten._to_copy.default, (item,), name, {"dtype": dtype})

    operands: Any = map_arg(arguments, lambda item: cast(item, promoted))
    return cast(copy.call(before, target, operands, name), dtype)
