"""Frozen convolutions: batch norms folded into their weights, which stay in the library's layout.

In inference a batch norm multiplies and shifts each channel by numbers that depend on parameters and statistics alone,
so the convolution before it can do that. The library then also adds a residual to its accumulators, and
computes an activation of them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, same_layout
from fxwrap.fx_passes.matmuls.prepacked_weights import frozen_nodes
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import StorageAliases
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_BATCH_NORM = _aten._native_batch_norm_legit_no_training.default


@dataclass(frozen=True)
class _Convolution:
    """A convolution of a frozen weight, and the nodes after it that its library computes, in order.

    `norm` holds the batch norm's weight, bias, mean and variance, or nothing.
    """

    node: Node
    image: Node
    weight: Node
    bias: Node | None
    norm: tuple[Node, ...]
    epsilon: float
    residual: Node | None
    activation: str
    absorbed: tuple[Node, ...]

    @property
    def end(self) -> Node:
        """The node whose result the call returns."""
        return self.absorbed[-1] if self.absorbed else self.node


def freeze_convolutions(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph whose convolutions with frozen weights are calls that keep weights in the library's layout."""
    frozen, aliases = frozen_nodes(graph, context), StorageAliases(graph, context)
    matches: list[_Convolution] = []
    claimed: set[Node] = set()
    for node in graph.nodes:
        match = _match(node, graph.fakes, context, frozen, aliases, claimed)
        if match is not None:
            matches.append(match)
            claimed |= {match.node, *match.absorbed}
    if not matches:
        return graph
    copy = GraphCopy(graph)
    for match in sorted(matches, key=lambda match: graph.nodes.index(match.end)):
        _replace(copy, match)
    return copy.finish()


def _match(
    node: Node,
    fakes: NodeValues,
    context: FxPassContext,
    frozen: Collection[Node],
    aliases: StorageAliases,
    claimed: Collection[Node],
) -> _Convolution | None:
    if node.target is not _aten.convolution.default or str(node.target) in context.extern_operators or node.kwargs:
        return None
    arguments: Any = node.args
    image, bias, transposed = arguments[0], arguments[2], arguments[6]
    weight = _frozen_operand(arguments[1], frozen)
    if transposed or weight is None or (bias is not None and bias not in frozen):
        return None
    if not _is_supported([fakes.get(item) for item in (node, image, weight)], context):
        return None
    if aliases.is_mutated(image) or aliases.is_mutated(node):
        return None
    norm, epsilon, absorbed = _batch_norm(node, frozen, context)
    end = absorbed[-1] if absorbed else node
    residual, position = _residual(end, fakes, aliases, context, claimed)
    if position is not None:
        absorbed, end = (*absorbed, position), position
    activation, user = _activation(end, context)
    absorbed += () if user is None else (user,)
    return _Convolution(node, image, weight, bias, norm, epsilon, residual, activation, absorbed)


_ACTIVATIONS: Mapping[tuple[object, ...], str] = {
    (_aten.relu.default,): "relu",
    (_aten.hardtanh.default, 0, 6): "relu6",
    (_aten.clamp.default, 0, 6): "relu6",
    (_aten.hardswish.default,): "hardswish",
    (_aten.silu.default,): "silu",
    (_aten.sigmoid.default,): "sigmoid",
}
"""The library's activations: an operator and its arguments after the tensor."""


def _activation(node: Node, context: FxPassContext) -> tuple[str, Node | None]:
    """Returns the activation of a node's tensor that is its only use, and its node; or "none"."""
    user = _only_user(node)
    if user is None or user.kwargs or user.args[0] is not node or str(user.target) in context.extern_operators:
        return "none", None
    numbers = user.args[1:]
    if not all(isinstance(item, int | float) for item in numbers):
        return "none", None
    name = _ACTIVATIONS.get((user.target, *numbers), "none")
    return name, None if name == "none" else user


def _frozen_operand(node: Node, frozen: Collection[Node]) -> Node | None:
    """Returns the frozen tensor that a node is, or is a channels-last copy of."""
    if node.target is _aten.clone.default and isinstance(node.args[0], Node):
        node = node.args[0]
    return node if node in frozen else None


def _is_supported(values: list[Any], context: FxPassContext) -> bool:
    """Whether result, image and weight are images on a device whose library has a layout for them.

    Number and lengths of the images may be symbolic. Not in CUDA graphs: a replay would not see that a weight was
    written.
    """
    for value in values:
        if not isinstance(value, FakeTensor) or value.ndim != 4 or type(value.shape[1]) is not int:
            return False
        spec = context.options.device_specs().get(value.device.type)
        if spec is None or value.dtype not in spec.convolutions.prepacked_dtypes or value.dtype != values[0].dtype:
            return False
        if context.options.cuda_graphs and spec.supports_graph_capture:
            return False
        if any(type(size) is int and size == 0 for size in value.shape[1:]):
            return False
    return all(type(size) is int for size in values[-1].shape)


def _batch_norm(
    node: Node, frozen: Collection[Node], context: FxPassContext
) -> tuple[tuple[Node, ...], float, tuple[Node, ...]]:
    """Returns the parameters, epsilon and nodes of the batch norm that is a convolution's only reader."""
    norm = _only_user(node)
    if norm is None or norm.target is not _BATCH_NORM or norm.args[0] is not node or norm.kwargs:
        return (), 0.0, ()
    if str(_BATCH_NORM) in context.extern_operators:
        return (), 0.0, ()
    arguments: Any = norm.args
    parameters, result = arguments[1:5], _only_user(norm)
    if any(item not in frozen for item in parameters) or result is None or result.target is not operator.getitem:
        return (), 0.0, ()
    return tuple(parameters), float(arguments[6]), (norm, result)


def _residual(
    node: Node, fakes: NodeValues, aliases: StorageAliases, context: FxPassContext, claimed: Collection[Node]
) -> tuple[Node | None, Node | None]:
    """Returns the tensor that is added to a node's, its only use, and the node of the sum."""
    total = _only_user(node)
    if total is None or total.target is not _aten.add.Tensor or total.kwargs or total in claimed:
        return None, None
    if str(total.target) in context.extern_operators or len(total.args) != 2:
        return None, None
    other = total.args[1] if total.args[0] is node else total.args[0]
    fake, result = fakes.get(other) if isinstance(other, Node) else None, fakes[node]
    if other is node or not isinstance(fake, FakeTensor) or not isinstance(other, Node):
        return None, None
    if fake.dtype != result.dtype or fake.device != result.device or not same_layout(fake, result):
        return None, None
    return (None, None) if aliases.is_mutated(other) else (other, total)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _replace(copy: GraphCopy, match: _Convolution) -> None:
    env, end = copy.node_map, match.end
    arguments: Any = match.node.args
    stride, padding, dilation, _, _, groups = arguments[3:]
    optional = [None if item is None else env[item] for item in (match.bias, match.residual)]
    norm, fake = [env[item] for item in match.norm], copy.fakes[env[end]]
    operands = (
        env[match.image], env[match.weight], optional[0], norm, match.epsilon, stride, padding, dilation, groups,
        optional[1], match.activation, copy.size_arguments(env[end], fake.stride()),
    )  # fmt: skip
    target = torch.ops.fxwrap.frozen_convolution.default
    call = copy.call(env[end], target, operands, f"{match.node.name}_frozen", fake=fake)
    erased = [item for item in (match.node, *match.absorbed) if item is not end]
    copy.substitute(end, call, "fused", erased=erased)
