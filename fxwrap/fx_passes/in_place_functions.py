"""In-place functions of Dynamo's graph become functions with results, where nothing else sees the written memory.

Models of images call activations in place and add residuals so. AOTAutograd functionalises those calls, for which it
first runs each on meta tensors: with symbolic sizes, that takes far longer than to trace the function with a result for
activations that torch decomposes. The graph is the same.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional

from fxwrap.fx_passes.effects import fake_of
from fxwrap.fx_passes.graph_copy import is_dense, items_of, same_layout
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.fx_passes.storage_aliases import nodes_by_storage
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor, copy_dynamo_graph, copy_dynamo_module, fake_like, set_grad_enabled

_ACTIVATIONS: Mapping[Target, int] = {
    functional.relu: 1, functional.relu6: 1, functional.silu: 1, functional.mish: 1, functional.selu: 1,
    functional.hardswish: 1, functional.hardsigmoid: 1, functional.elu: 2, functional.celu: 2, functional.leaky_relu: 2,
    functional.hardtanh: 3,
}  # fmt: skip
"""Functions whose result has the dtype and the layout of their dense operand: the position of `inplace`."""

_ARITHMETIC: Mapping[Target, Target] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}  # fmt: skip


def replace_in_place_functions(graph_module: GraphModule, _options: Options) -> GraphModule:
    """Returns a Dynamo graph whose activations and arithmetic on computed tensors are not in place.

    Only on tensors of their own memory that nothing else reads after the call. Returns the graph itself if there is
    nothing to rewrite. Replaced calls and their operands get example values with memory of their own. Where a write
    would destroy what was saved for a gradient, which autograd refuses, the gradient is computed.
    """
    calls = _private_calls(list(graph_module.graph.nodes))
    if not calls:
        return graph_module
    graph, node_map = copy_dynamo_graph(graph_module.graph)
    for call in calls:
        _replace(node_map[call])
    for node in {*calls, *[call.all_input_nodes[0] for call in calls]}:
        value = fake_of(node)
        node_map[node].meta["example_value"] = fake_like(value).requires_grad_(value.requires_grad)
    return copy_dynamo_module(graph_module, graph)


def _private_calls(nodes: Sequence[Node]) -> list[Node]:
    """Returns the in-place calls that can have results, chain by chain of a tensor and the calls that write it."""
    candidates = {node for node in nodes if _is_in_place(node)}
    if not candidates or any(node.target is set_grad_enabled for node in nodes):  # writes need no gradient there
        return []
    fakes = {node: fake_of(node) for node in nodes}
    values = [item for fake in fakes.values() for item in items_of(fake) if isinstance(item, torch.Tensor)]
    if not all(isinstance(item, FakeTensor) and item.layout is torch.strided for item in values):
        return []
    positions = {node: position for position, node in enumerate(nodes)}
    calls: list[Node] = []
    for tensor, *writes in nodes_by_storage(nodes, fakes).values():
        chain = [tensor, *writes]
        is_private = tensor.op.startswith("call_") and isinstance(fakes[tensor], FakeTensor)
        if is_private and candidates.issuperset(writes):
            last_uses = [max(positions[user] for user in node.users) for node in chain[:-1]]
            reads_last = [write.args[0] is node for node, write in zip(chain, writes, strict=False)]
            if all(reads_last) and last_uses == [positions[write] for write in writes]:
                calls += writes
    return calls


def _is_in_place(node: Node) -> bool:
    """Whether a node writes its first operand, a dense tensor, and a function with a result has the same one."""
    fake = fake_of(node)
    if node.op != "call_function" or not isinstance(fake, FakeTensor) or not is_dense(fake):
        return False
    if node.target in _ACTIVATIONS:
        position = _ACTIVATIONS[node.target]
        return bool(node.args[position] if len(node.args) > position else node.kwargs.get("inplace"))
    if node.target not in _ARITHMETIC or len(node.args) != 2 or not fake.is_floating_point():
        return False
    other = fake_of(node.args[1]) if isinstance(node.args[1], Node) else node.args[1]
    if isinstance(other, torch.Tensor):
        return other.dtype == fake.dtype and other.device == fake.device and same_layout(other, fake)
    return isinstance(other, int | float | torch.SymInt | torch.SymFloat)


def _replace(node: Node) -> None:
    """Lets an in-place call return its result."""
    if node.target in _ARITHMETIC:
        node.target = _ARITHMETIC[node.target]
        return
    position = _ACTIVATIONS[node.target]
    if len(node.args) > position:
        node.update_arg(position, False)
    else:
        node.update_kwarg("inplace", False)
