"""Pointwise convolutions: each window is one element, so that they are matmuls of channels.

GPU libraries compute groups of channels by kernels that reach a small part of the speed of a matmul, and copy sequences
whose channels are adjacent in memory. A batch of matmuls reads both as they are. Other sequences gain nothing, unless
their rows are not aligned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import ROW_ALIGNMENT, DeviceSpec
from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous, size_hint
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.loop_ir import HALF_PRECISION
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_MIN_CHANNELS = 16
"""The fewest channels of a group: with fewer, a convolution is bound by memory."""


@dataclass(frozen=True)
class _PointwiseConvolution:
    """A convolution of windows of one element, or its backward.

    Fields:
        node: the call.
        image, weight: the operands, of sizes (batch, channels, length) and (outputs, channels / groups, 1).
        bias: a number for each output channel, or None.
        gradient: that of the result, in the backward.
        groups: the number of groups of channels.
    """

    node: Node
    image: Node
    weight: Node
    bias: Node | None
    gradient: Node | None
    groups: int


def rewrite_pointwise_convolutions(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which pointwise convolutions of sequences, and their backwards, are batches of matmuls."""
    specs = context.options.device_specs()
    targets = {target for target in (_FORWARD, _BACKWARD) if str(target) not in context.extern_operators}
    calls = [node for node in graph.nodes if node.target in targets]
    matches = [match for node in calls if (match := _match(node, graph.fakes, specs)) is not None]
    if not matches:
        return graph
    copy = GraphCopy(graph)
    for match in matches:
        writer = _MatmulWriter(copy, match)
        if match.gradient is None:
            copy.substitute(match.node, writer.result(), "fused")
            continue
        for user in match.node.users:
            position: Any = user.args[1]
            if user.users:
                copy.substitute(user, writer.gradients()[position](), "fused")
            else:
                copy.erase(user)
        copy.erase(match.node)
    return copy.finish()


def _match(node: Node, fakes: NodeValues, specs: Mapping[str, DeviceSpec]) -> _PointwiseConvolution | None:
    arguments: Any = node.args
    bias = gradient = None
    if node.target is _FORWARD:
        image, weight, bias, stride, padding, _, transposed, _, groups = arguments
        results = [fakes[node]]
    else:
        gradient, image, weight, _, stride, padding, _, transposed, _, groups, needed = arguments
        if any(user.target is not operator.getitem or (user.users and not needed[user.args[1]]) for user in node.users):
            return None
        results = [fakes[user] for user in node.users if user.users and user.args[1] == 0]
    fake, filters = fakes.get(image), fakes.get(weight)
    if not isinstance(fake, FakeTensor) or not isinstance(filters, FakeTensor) or transposed:
        return None
    spec = specs.get(fake.device.type)
    if spec is None or fake.dtype not in spec.convolutions.pointwise_matmul_dtypes or fake.dtype is not filters.dtype:
        return None
    outputs, channels, *window = filters.shape
    is_pointwise = fake.ndim == filters.ndim == 3 and [*window, *stride] == [1, 1] and not any(padding)
    if not is_pointwise or not all(type(size) is int for size in (outputs, channels)):
        return None
    if min(outputs // groups, channels) < _MIN_CHANNELS or not all(map(_has_known_layout, results)):
        return None
    operands = [fakes[item] for item in (image, gradient) if item is not None]
    if groups == 1 and not _is_ragged(fake) and not any(map(_has_rows, operands)):
        return None
    return _PointwiseConvolution(node, image, weight, bias, gradient, groups)


def _has_known_layout(fake: FakeTensor) -> bool:
    return is_contiguous(fake) or _has_rows(fake)


class _MatmulWriter:
    """Writes the matmuls of one convolution before its node of the copy.

    A tensor whose channels are adjacent in memory has a row for each element: groups of its columns are a batch of
    matrices. Of one whose elements are adjacent, each group of channels of each item is a matrix.
    """

    def __init__(self, copy: GraphCopy, match: _PointwiseConvolution) -> None:
        self.copy, self.groups, self.before = copy, match.groups, copy.node_map[match.node]
        self.image, self.weight = copy.node_map[match.image], copy.node_map[match.weight]
        self.bias = None if match.bias is None else copy.node_map[match.bias]
        self.gradient = self.image if match.gradient is None else copy.node_map[match.gradient]
        self.items = copy.fakes[self.image].shape[0]
        self.is_one_item = type(self.items) is int and self.items == 1
        self.is_ragged = _is_ragged(copy.fakes[self.image])

    def result(self) -> Node:
        """Returns the convolution's result."""
        like = self.copy.fakes[self.before]
        result = self._product(self._matrices_of_weight(), self.image, like)
        if self.bias is None:
            return result
        return self._call(_aten.add.Tensor, result, self._view(self.bias, like.shape[1], 1))

    def gradients(self) -> tuple[Callable[[], Node], ...]:
        """Returns functions that write the gradients of the image, the weight and the bias."""
        return self._gradient_of_image, self._gradient_of_weight, self._gradient_of_bias

    def _gradient_of_image(self) -> Node:
        weight = self._transposed(self._matrices_of_weight())
        return self._product(weight, self.gradient, self.copy.fakes[self.before][0])

    def _gradient_of_weight(self) -> Node:
        outputs, channels, _ = self.copy.fakes[self.weight].shape
        if self._copies_rows():
            gradient, image = [self._matrices_of_rows(item) for item in (self.gradient, self.image)]
            product = self._call(_aten.bmm.default, gradient, self._transposed(image))
        else:
            product = self._sum_of_products(*[self._matrices_of_items(item) for item in (self.gradient, self.image)])
        return self._view(product, outputs, channels, 1)

    def _sum_of_products(self, gradient: Node, image: Node) -> Node:
        """Returns the sum over items of the products of two matrices for each group, which is rounded once."""
        outputs, channels, _ = self.copy.fakes[self.weight].shape
        dtype, operands = self.copy.fakes[gradient].dtype, (gradient, self._transposed(image))
        widens = dtype in HALF_PRECISION and not self.is_one_item
        if widens:
            products = self._call(_aten.bmm.dtype, *operands, torch.float32)
        else:
            products = self._call(_aten.bmm.default, *operands)
        total = self._call(_aten.sum.dim_IntList, self._view(products, self.items, outputs, channels), [0])
        return self._call(_aten._to_copy.default, total, dtype=dtype) if widens else total

    def _gradient_of_bias(self) -> Node:
        return self._call(_aten.sum.dim_IntList, self.gradient, [0, 2])

    def _copies_rows(self) -> bool:
        """Whether the gradient of the weight is one matmul over all elements: other layouts are copied for that.

        Else it is the sum of one for each item, for which layouts of rows are copied if they have groups.
        """
        if self.is_ragged:
            return True
        copied, others, products = 0, 0, self.copy.fakes[self.weight].numel()
        for node in (self.gradient, self.image):
            fake = self.copy.fakes[node]
            elements = fake.shape[1] * size_hint(fake.shape[2])
            copied += 0 if _has_rows(fake) else elements
            others += elements if _has_rows(fake) and self.groups > 1 else 0
        return bool(copied < others + products)

    def _product(self, weight: Node, operand: Node, like: FakeTensor) -> Node:
        """Returns the products of a matrix for each group and a tensor's elements, in the layout of `like`."""
        if self.is_ragged or (self.groups > 1 and _has_rows(self.copy.fakes[operand])):
            return self._product_of_rows(weight, operand, like)
        operand = self._matrices_of_items(operand)
        if not self.is_one_item:
            weight = self._call(_aten.unsqueeze.default, weight, 0)
            weight = self._sized(_aten.expand.default, weight, self.items, *self.copy.fakes[weight].shape[1:])
            rows, columns = self.copy.fakes[weight].shape[2:]
            weight = self._view(
                weight if self.groups == 1 else self._dense(weight), self.items * self.groups, rows, columns
            )
        return self._in_layout(self._view(self._call(_aten.bmm.default, weight, operand), *like.shape), like)

    def _product_of_rows(self, weight: Node, operand: Node, like: FakeTensor) -> Node:
        product = self._call(_aten.bmm.default, weight, self._matrices_of_rows(operand))
        items, outputs, length = like.shape
        product = self._view(product, self.groups, outputs // self.groups, items, length)
        if _has_rows(like):
            product = self._dense(self._call(_aten.permute.default, product, [2, 3, 0, 1]))
            return self._transposed(self._view(product, items, length, outputs))
        return self._view(self._dense(self._call(_aten.permute.default, product, [2, 0, 1, 3])), *like.shape)

    def _matrices_of_weight(self) -> Node:
        """Returns the weight as a matrix for each group."""
        outputs, channels, _ = self.copy.fakes[self.weight].shape
        return self._view(self._dense(self.weight), self.groups, outputs // self.groups, channels)

    def _matrices_of_items(self, node: Node) -> Node:
        """Returns a tensor (items, channels, length) as a matrix for each group of channels of each item."""
        if self.groups == 1:
            return node
        items, channels, length = self.copy.fakes[node].shape
        return self._view(self._dense(node), items * self.groups, channels // self.groups, length)

    def _matrices_of_rows(self, node: Node) -> Node:
        """Returns a tensor (items, channels, length) as a matrix (channels, items * length) for each group."""
        items, channels, length = self.copy.fakes[node].shape
        rows = self._dense(self._transposed(node))
        rows = self._view(rows, items * length, self.groups, channels // self.groups)
        return self._call(_aten.permute.default, rows, [1, 2, 0])

    def _in_layout(self, node: Node, like: FakeTensor) -> Node:
        return self._transposed(self._dense(self._transposed(node))) if _has_rows(like) else node

    def _transposed(self, node: Node) -> Node:
        return self._call(_aten.transpose.int, node, 1, 2)

    def _dense(self, node: Node) -> Node:
        if is_contiguous(self.copy.fakes[node]):
            return node
        return self._call(_aten.clone.default, node, memory_format=torch.contiguous_format)

    def _view(self, node: Node, *sizes: Any) -> Node:
        return self._sized(_aten.view.default, node, *sizes)

    def _sized(self, target: Any, node: Node, *sizes: Any) -> Node:
        return self._call(target, node, self.copy.size_arguments(self.before, sizes))

    def _call(self, target: Any, *arguments: Any, **keywords: Any) -> Node:
        return self.copy.call(self.before, target, arguments, f"{self.before.name}_matmul", keywords)


def _has_rows(fake: FakeTensor) -> bool:
    """Whether a tensor (items, channels, length) has a contiguous row of channels for each element."""
    return not is_contiguous(fake) and is_contiguous(fake.transpose(1, 2))


def _is_ragged(fake: FakeTensor) -> bool:
    """Whether libraries are slow with the elements of each item of a tensor, whose number is not aligned.

    That of the elements of all items is.
    """
    items, _, length = fake.shape
    aligned = ROW_ALIGNMENT // fake.dtype.itemsize
    return type(items) is type(length) is int and length % aligned != 0 and items * length % aligned == 0
