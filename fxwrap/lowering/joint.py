"""The joint graph of training, before it is cut into forward and backward.

What the cut saves for the backward is chosen by torch's partitioner, which computes a tensor again where that is cheap.
It knows so of additions and exponentials, not of operators made of them: a log softmax that is one operator is saved,
in float32 and as large as all logits, although it is a subtraction from logits that are there anyway. Nor does it know
what can be said in fewer bytes: where a maximum was is eight, and one if only its place in its window is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.lowering.graph_copy import run_on_fakes
from fxwrap.lowering.products import is_outer_product
from fxwrap.lowering.rules.pooling import of_each_dimension
from fxwrap.lowering.stream_calls import unwrapped
from fxwrap.options import Options
from fxwrap.torch_compat import FakeTensor, min_cut_partition

_aten = torch.ops.aten
_HALF = frozenset({torch.float16, torch.bfloat16})


def partitioner(options: Options) -> Callable[..., Any]:
    """Returns what cuts the joint graph: the options' partitioner, or torch's, which is shown what may be repeated."""
    if options.partitioner is not None:
        return options.partitioner

    def partition(joint: GraphModule, *arguments: Any, **keywords: Any) -> Any:
        joint = unwrapped(joint)
        take_apart(joint, options)
        return min_cut_partition()(joint, *arguments, **keywords)

    return partition


def take_apart(joint: GraphModule, options: Options) -> None:
    """Changes a joint graph: operators whose results are cheap to compute again become what they are made of.

    Operators that the options keep, or have a decomposition of their own for, and nodes without fake values, stay.
    """
    kept = {*options.keep, *options.lowerings, *map(str, options.decompositions or ())}
    sums: dict[Node, Node] = {}
    specs = options.device_specs()
    output = next(node for node in reversed(joint.graph.nodes) if node.op == "output")
    for node in list(joint.graph.nodes):
        if node.target is _aten.detach.default and node not in output.all_input_nodes:
            # what autograd keeps: nobody records gradients here, and the partitioner does not know that it is a view
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
            continue
        parts = _PARTS.get(node.target)
        if parts is None or str(node.target) in kept or not _is_plain(node):
            continue
        spec = specs.get(node.meta["val"].device.type)
        made = parts(_Maker(joint.graph, node, sums, gathers=spec is not None and spec.wide), *node.args)
        if made is not None:
            node.replace_all_uses_with(made)
            joint.graph.erase_node(node)
    joint.recompile()


def _is_plain(node: Node) -> bool:
    """Whether a call has fake values and no empty tensor, and all of its arguments by position."""
    tensors: list[Any] = [operand.meta.get("val") for operand in (node, *node.all_input_nodes)]
    if node.kwargs or not all(isinstance(item, FakeTensor) for item in tensors):
        return False
    return tensors[0].ndim > 0 and all(type(size) is not int or size > 0 for size in tensors[0].shape)


class _Maker:
    """Puts calls in front of a node, with its metadata and fake values of their own.

    `replaced` is the node's fake value; `gathers` says whether backwards of pools look for their gradients on its
    device; `sums` holds what the rows of some matrices add up to, where that is known without adding.
    """

    def __init__(self, graph: Graph, node: Node, sums: dict[Node, Node], gathers: bool) -> None:
        self._graph = graph
        self._node = node
        self.replaced: FakeTensor = node.meta["val"]
        self.sums = sums
        self.gathers = gathers

    def call(self, target: Callable[..., Any], *arguments: Any, **keywords: Any) -> Node:
        """Returns the node of a new call."""
        with self._graph.inserting_before(self._node):
            made = self._graph.call_function(target, arguments, keywords)
        fakes = {operand: operand.meta["val"] for operand in made.all_input_nodes}
        made.meta = {**self._node.meta, "val": run_on_fakes(made, fakes, self.replaced)}
        return made

    def cast(self, operand: Node, dtype: torch.dtype) -> Node:
        """Returns an operand in a dtype."""
        same = operand.meta["val"].dtype == dtype
        return operand if same else self.call(_aten._to_copy.default, operand, dtype=dtype)

    def exact(self, operand: Node) -> Node:
        """Returns an operand in the dtype that operators compute in."""
        return self.cast(operand, torch.float32) if operand.meta["val"].dtype in _HALF else operand

    def relaid(self, place: Node, row: int, other: int) -> Node:
        """Returns where what has a place among rows of a length is among rows of another."""
        down = self.call(_aten.div.Tensor_mode, place, row, rounding_mode="floor")
        across = self.call(_aten.remainder.Scalar, place, row)
        return self.call(_aten.add.Tensor, self.call(_aten.mul.Tensor, down, other), across)

    def one_less(self, value: Node) -> Node:
        """Returns 1 - value."""
        return self.call(_aten.add.Tensor, self.call(_aten.neg.default, value), 1)

    def result(self, value: Node) -> Node:
        """Returns a value in the dtype of the node."""
        return self.cast(value, self.replaced.dtype)


def _log_softmax(maker: _Maker, x: Node, dim: int, _half_to_float: bool) -> Node:
    x = maker.exact(x)
    shifted = maker.call(_aten.sub.Tensor, x, maker.call(_aten.amax.default, x, [dim], True))
    total = maker.call(_aten.sum.dim_IntList, maker.call(_aten.exp.default, shifted), [dim], True)
    return maker.result(maker.call(_aten.sub.Tensor, shifted, maker.call(_aten.log.default, total)))


def _log_softmax_backward(maker: _Maker, gradient: Node, output: Node, dim: int, _dtype: torch.dtype) -> Node:
    known = maker.sums.get(gradient) if dim in (1, -1) else None
    gradient = maker.exact(gradient)
    total = maker.call(_aten.sum.dim_IntList, gradient, [dim], True) if known is None else maker.exact(known)
    weighted = maker.call(_aten.mul.Tensor, maker.call(_aten.exp.default, maker.exact(output)), total)
    return maker.result(maker.call(_aten.sub.Tensor, gradient, weighted))


def _tanh_backward(maker: _Maker, gradient: Node, output: Node) -> Node:
    output = maker.exact(output)
    slope = maker.one_less(maker.call(_aten.mul.Tensor, output, output))
    return maker.result(maker.call(_aten.mul.Tensor, maker.exact(gradient), slope))


def _sigmoid_backward(maker: _Maker, gradient: Node, output: Node) -> Node:
    output = maker.exact(output)
    slope = maker.call(_aten.mul.Tensor, output, maker.one_less(output))
    return maker.result(maker.call(_aten.mul.Tensor, maker.exact(gradient), slope))


def _loss_backward(
    maker: _Maker, gradient: Node, scores: Node, target: Node, weight: Node | None, reduction: int, ignored: int,
    total: Node,
) -> Node | None:  # fmt: skip
    """A row's gradient is a number at its class, which no scores are needed for."""
    fake = scores.meta["val"]
    if weight is not None or fake.ndim != 2:
        return None
    number = maker.exact(gradient)
    if reduction == _MEAN:
        number = maker.call(_aten.div.Tensor, number, maker.exact(total))
    elif reduction == _NONE:
        number = maker.call(_aten.unsqueeze.default, number, 1)
    target = maker.call(_aten.unsqueeze.default, target, 1)
    zero = maker.call(_aten.full.default, [], 0.0, dtype=number.meta["val"].dtype, device=fake.device)
    counted = maker.call(_aten.ne.Scalar, target, ignored)
    number = maker.call(_aten.where.self, counted, maker.call(_aten.neg.default, number), zero)
    classes = maker.call(_aten.arange.default, fake.shape[1], dtype=torch.int64, device=fake.device)
    chosen = maker.call(_aten.eq.Tensor, classes, target)
    found = maker.result(maker.call(_aten.where.self, chosen, number, zero))
    maker.sums[found] = maker.result(number)
    return found


_NONE, _MEAN = 0, 1


def _outer_product(maker: _Maker, left: Node, right: Node) -> Node | None:
    """A column times a row is a multiplication, which may be done again."""
    operands = left.meta["val"], right.meta["val"]
    return maker.call(_aten.mul.Tensor, left, right) if is_outer_product(*operands, maker.replaced) else None


def _repeated(maker: _Maker, tensors: list[Node], dim: int = 0) -> Node | None:
    """The same tensor put side by side, which torch's partitioner would save; a copy it computes again."""
    shape, found = tensors[0].meta["val"].shape, maker.replaced
    if len({*tensors}) > 1 or not all(type(size) is int for size in shape) or not found.is_contiguous():
        return None
    dim %= len(shape)
    repeated = maker.call(_aten.unsqueeze.default, tensors[0], dim)
    repeated = maker.call(_aten.expand.default, repeated, [*shape[:dim], len(tensors), *shape[dim:]])
    copied = maker.call(_aten.clone.default, repeated, memory_format=torch.contiguous_format)
    return maker.call(_aten.view.default, copied, list(found.shape))


def _max_pool_backward(
    maker: _Maker, gradient: Node, x: Node, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, positions: Node,
) -> Node | None:  # fmt: skip
    """Where maxima are in their plane follows from where they are in their windows, which a byte can say."""
    row = x.meta["val"].shape[-1]
    counts = gradient.meta["val"].shape[-2:]
    options = (kernel, stride or kernel, padding, dilation)
    (height, width), steps, pads, dilations = [of_each_dimension(option, 2) for option in options]
    known = all(type(size) is int for size in (row, *counts)) and {*dilations} == {1}
    if not maker.gathers or not known or width > row or height * width > _IN_A_BYTE:
        return None
    down, across = [
        maker.call(_aten.arange.start_step, -pad, count * step - pad, step, device=x.meta["val"].device)
        for count, step, pad in zip(counts, steps, pads, strict=True)
    ]
    down = maker.call(_aten.mul.Tensor, maker.call(_aten.unsqueeze.default, down, 1), row)
    first = maker.call(_aten.add.Tensor, down, across)  # of each window, which may be in the padding
    place = maker.relaid(maker.call(_aten.sub.Tensor, positions, first), row, width)
    place = maker.cast(maker.cast(place, torch.int8), torch.int64)
    found = maker.call(_aten.add.Tensor, first, maker.relaid(place, width, row))
    given = gradient, x, kernel, stride, padding, dilation, ceil_mode, found
    return maker.call(_aten.max_pool2d_with_indices_backward.default, *given)


_IN_A_BYTE = 128


_PARTS: Mapping[Any, Callable[..., Node | None]] = {
    _aten._log_softmax.default: _log_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.nll_loss_backward.default: _loss_backward,
    _aten.tanh_backward.default: _tanh_backward,
    _aten.sigmoid_backward.default: _sigmoid_backward,
    _aten.mm.default: _outer_product,
    _aten.bmm.default: _outer_product,
    _aten.cat.default: _repeated,
    _aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
}
"""Operators that are taken apart: they are cheap, or seem to need what is large. None where one stays."""
