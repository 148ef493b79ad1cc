"""Outputs of which AOTAutograd reads the layout only are views of the inputs that they alias in eager mode.

A functional graph returns views of the new content of a mutated input, which has an allocation of its own, besides the
copy into the input. AOTAutograd creates the returned alias of the input from sizes, strides and storage offset of such
an output: those of the allocation are not the input's where that one is a slice.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.effects import fake_of
from fxwrap.fx_passes.graph_copy import fake_call
from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir import operator_schema

_aten = torch.ops.aten


def with_aliases_of_inputs(graph_module: GraphModule, outputs: Collection[int]) -> GraphModule:
    """Returns a graph whose outputs at some positions are views of mutated inputs instead of the copied tensors.

    Args:
        graph_module: a graph that ends in the copies into its inputs. It stays as it is.
        outputs: the positions of outputs that alias inputs in eager mode, and of which only the layout is read.

    Returns the same object if nothing changes.
    """
    values: Any = graph_module.graph.output_node().args[0]
    writes = _writes(graph_module)
    chains = {at: chain for at in outputs if isinstance(values[at], Node) and (chain := _chain(values[at], writes))}
    if not chains:
        return graph_module
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    results = list(graph.graph_copy(graph_module.graph, copies))  # type: ignore[arg-type]
    for position, (source, *views) in chains.items():
        result = copies[writes[source]]
        for view in views:
            arguments = (result, *torch.fx.node.map_arg(view.args[1:], copies.__getitem__))
            result = graph.call_function(view.target, arguments, view.kwargs)  # type: ignore[arg-type]
            fakes = torch.fx.node.map_arg(result.args, lambda item: item.meta["val"])
            result.meta |= {**view.meta, "val": fake_call(result.target, fakes, result.kwargs)}
        results[position] = result
    graph.output(tuple(results)).meta |= graph_module.graph.output_node().meta
    graph.eliminate_dead_code()
    return GraphModule(graph_module, graph)


def _writes(graph_module: GraphModule) -> dict[Node, Node]:
    """Returns the copies into inputs, by the copied tensor."""
    copies = graph_module.graph.find_nodes(op="call_function", target=_aten.copy_.default)
    return {node.args[1]: node for node in copies if _is_whole(node)}


def _is_whole(copy: Node) -> bool:
    """Whether a call copies a tensor of the same sizes and dtype into an input."""
    target, source = copy.args[:2]
    if not isinstance(target, Node) or not isinstance(source, Node) or target.op != "placeholder":
        return False
    one, other = fake_of(target), fake_of(source)
    return one.dtype == other.dtype and list(map(str, one.shape)) == list(map(str, other.shape))


def _chain(node: Node, writes: dict[Node, Node]) -> list[Node]:
    """Returns a tensor that is copied into an input, and the views of it that lead to a node; none for other nodes."""
    chain = [node]
    while chain[0] not in writes:
        node = chain[0]
        if not isinstance(node.target, OpOverload) or node.target is _aten.as_strided.default or not node.args:
            return []
        schema = operator_schema(node.target)
        if schema.aliased_argument != 0 or schema.may_alias or not isinstance(node.args[0], Node):
            return []
        if not isinstance(node.meta.get("val"), torch.Tensor):  # several views
            return []
        chain.insert(0, node.args[0])
    return chain
