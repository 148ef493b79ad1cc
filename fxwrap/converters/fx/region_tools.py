"""Tools for the regions of an emitted graph: listing, copying and inlining them."""

from __future__ import annotations

import copy
import keyword
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.converters.fx.regions import NAME, called_region, get_called_region, region_of
from fxwrap.regions import Region
from fxwrap.torch_compat import OpOverload, operator_name

_ORIGIN = (
    "fxwrap_origin", "stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "partitioner_tag", "stream",
)  # fmt: skip


@dataclass(frozen=True)
class RegionCall:
    """The call of a region: the node, and the submodule, which equal regions of a graph share.

    Fields:
        owner: the module of the graph that the node is in.
        node: the call; its `fxwrap_origin` has the model's operators.
        module: the operators as a graph. It may be edited after `copy_region`, or replaced by any module that takes
            the same arguments.
        region: their metadata.
    """

    owner: GraphModule
    node: Node
    module: GraphModule
    region: Region

    @property
    def name(self) -> str:
        """The name of the submodule in its owner."""
        return str(self.node.target)


def regions(graph_module: GraphModule) -> tuple[RegionCall, ...]:
    """Returns the calls of regions in an emitted graph and in the graphs of its blocks, in order."""
    return tuple(_region_calls(graph_module))


def _region_calls(graph_module: GraphModule) -> Iterator[RegionCall]:
    for owner in graph_module.modules():
        if not isinstance(owner, GraphModule) or region_of(owner) is not None:
            continue
        for node in owner.graph.nodes:
            module = called_region(owner, node)
            if module is not None:
                region = region_of(module)
                assert region is not None
                yield RegionCall(owner, node, module, region)


def copy_region(node: Node) -> GraphModule:
    """Gives the call of a region a copy of its submodule, which can be edited for this call alone; returns the copy.

    After an edit, `update_region(node)` makes the copy's metadata that of its new graph. Raises GraphModuleError for a
    node that calls no region.
    """
    module, owner = copy.deepcopy(get_called_region(node)), node.graph.owning_module
    base, number = str(node.target), 0
    while hasattr(owner, f"{base}_copy_{number}") or keyword.iskeyword(base):
        number += 1
    node.target = f"{base}_copy_{number}"
    setattr(owner, node.target, module)
    module.meta[NAME] = node.target
    return module


def inline_regions(graph_module: GraphModule) -> GraphModule:
    """Returns a copy of an emitted graph in which each region's call is replaced by the region's operators.

    In the in-place form each result is then copied to its memory by `aten.copy_`.
    """
    copied = copy.deepcopy(graph_module)
    calls = regions(copied)
    for call in calls:
        _inline(call)
    for owner, name in {(call.owner, call.name) for call in calls}:
        delattr(owner, name)
    for owner in {call.owner for call in calls}:
        owner.recompile()
    return copied


def _inline(call: RegionCall) -> None:
    """Replaces a call by the nodes of its region, which get the origin of the call."""
    graph, node = call.owner.graph, call.node
    placeholders = call.module.graph.find_nodes(op="placeholder")
    env: dict[Node, Any] = dict(zip(placeholders, node.args, strict=True))
    origin = {key: node.meta[key] for key in _ORIGIN if key in node.meta}
    with graph.inserting_before(node):
        for inner in call.module.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            arguments, keywords = map_arg((inner.args, inner.kwargs), env.__getitem__)
            name = operator_name(inner.target) if isinstance(inner.target, OpOverload) else None
            env[inner] = graph.create_node(inner.op, inner.target, arguments, keywords, name)
            env[inner].meta = {**inner.meta, **origin}
            if isinstance(inner.target, OpOverload):
                env[inner].meta["original_aten"] = inner.target
    returned: Any = map_arg(call.module.graph.output_node().args[0], env.__getitem__)
    for user in list(node.users):
        if user.target is operator.getitem:
            index: Any = user.args[1]
            user.replace_all_uses_with(returned[index])
            graph.erase_node(user)
    graph.erase_node(node)
