"""Frozen convolutions: batch norms folded into their weights, which stay in the library's layout.

In inference a batch norm multiplies and shifts each channel by numbers that depend on parameters and statistics alone,
so the convolution before it can do that. The library then also adds a residual and takes the positive part of its
accumulators.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, same_layout
from fxwrap.fx_passes.prepacked_weights import frozen_nodes
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
    relu: bool
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
    relu = _relu(end, context)
    absorbed += () if relu is None else (relu,)
    return _Convolution(node, image, weight, bias, norm, epsilon, residual, relu is not None, absorbed)


def _relu(node: Node, context: FxPassContext) -> Node | None:
    """Returns the node of the positive part of a node's tensor, its only use."""
    user = _only_user(node)
    is_relu = user is not None and user.target is _aten.relu.default
    return user if is_relu and "aten.relu.default" not in context.extern_operators else None


def _frozen_operand(node: Node, frozen: Collection[Node]) -> Node | None:
    """Returns the frozen tensor that a node is, or is a channels-last copy of."""
    if node.target is _aten.clone.default and isinstance(node.args[0], Node):
        node = node.args[0]
    return node if node in frozen else None


def _is_supported(values: list[Any], context: FxPassContext) -> bool:
    """Whether result, image and weight are images on a device whose library has a layout for them.

    Their number may be symbolic: the layout is that for all batches of images of these lengths. Not in CUDA graphs: a
    replay would not see that a weight was written.
    """
    for value in values:
        if not isinstance(value, FakeTensor) or value.ndim != 4 or not _has_static_images(value):
            return False
        spec = context.options.device_specs().get(value.device.type)
        if spec is None or value.dtype not in spec.convolutions.prepacked_dtypes or value.dtype != values[0].dtype:
            return False
        if context.options.cuda_graphs and spec.supports_graph_capture:
            return False
    return all(0 not in value.shape[1:] for value in values)


def _has_static_images(fake: FakeTensor) -> bool:
    return all(type(number) is int for number in (*fake.shape[1:], *fake.stride()))


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
        optional[1], match.relu, list(fake.stride()),
    )  # fmt: skip
    target = torch.ops.fxwrap.frozen_convolution.default
    call = copy.call(env[end], target, operands, f"{match.node.name}_frozen", fake=fake)
    erased = [item for item in (match.node, *match.absorbed) if item is not end]
    copy.substitute(end, call, "fused", erased=erased)
