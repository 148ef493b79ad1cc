"""Decompositions in the joint graph of training, before it is partitioned into forward and backward.

torch's partitioner recomputes cheap operators in the backward instead of saving their results. It does not know that
some composite operators are cheap: it saves the float32 result of a log softmax, although that is a subtraction from
logits that are saved anyway. It does not compress either: it saves the indices of a max pooling as int64, although the
offset within the window fits in a byte, and the float32 softmax of bfloat16 elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.fx_passes.attention.flex import drop_unread_block_lists
from fxwrap.fx_passes.attention.recognize import recognize_attention_in_joint_graph
from fxwrap.fx_passes.cse import common_subexpressions
from fxwrap.fx_passes.experts.loops import group_expert_loops_in_joint_graph
from fxwrap.fx_passes.graph_copy import CallResults, can_propagate_fake, run_on_fakes, storages_of
from fxwrap.fx_passes.matmuls.rewrites import is_outer_product
from fxwrap.fx_passes.permuted_sums import gather_permuted_sums
from fxwrap.fx_passes.prepared_graph import Target
from fxwrap.fx_passes.source import inline_subgraph_calls
from fxwrap.fx_passes.training.compared_maxima import save_compared_elements
from fxwrap.fx_passes.training.joint_backward import operators_of_options
from fxwrap.fx_passes.training.joint_graph_builder import JointGraphBuilder
from fxwrap.fx_passes.training.known_indices import compute_known_indices
from fxwrap.fx_passes.training.pooling_offsets import save_window_offsets
from fxwrap.fx_passes.training.recomputed_dropout import recompute_dropout
from fxwrap.fx_passes.training.recomputed_norms import recompute_norms
from fxwrap.fx_passes.training.separable_sums import separate_sums
from fxwrap.fx_passes.training.unread_operands import drop_unread_operands
from fxwrap.loop_ir import HALF_PRECISION
from fxwrap.options import Options, Step, enabled_steps
from fxwrap.torch_compat import FakeTensor, min_cut_partitioner, storage_identity, without_fake_mode

_aten = torch.ops.aten


def partitioner(options: Options) -> Callable[..., object]:
    """Returns the partitioner of the options, or torch's min-cut partitioner after `JOINT_GRAPH_PASSES`."""
    if options.partitioner is not None:
        return options.partitioner

    def partition(joint: GraphModule, *arguments: object, **keywords: object) -> object:
        # AOTAutograd partitions with its fake mode active, in which each tensor that a pass creates takes a dispatch.
        with without_fake_mode():
            for step in enabled_steps(JOINT_GRAPH_PASSES, options):
                joint = step.run(joint, options)
        return min_cut_partitioner(_FUSIBLE, _RECOMPUTABLE, _VIEWS)(joint, *arguments, **keywords)

    return partition


def decompose_for_recomputation(joint: GraphModule, options: Options) -> GraphModule:
    """Decomposes operators whose results are cheap to recompute, in place; returns the graph.

    Operators that the options preserve, lower or decompose, and nodes without fake values, stay.
    """
    return _decompose(joint, options, _DECOMPOSITIONS)


def decompose_wide_softmax(joint: GraphModule, options: Options) -> GraphModule:
    """Decomposes softmaxes in float32 of elements in half precision, in place; returns the graph.

    The backward computes them again from the elements and two numbers a row, which are half as large. It follows
    `recognize_attention`, which needs the operator.
    """
    return _decompose(joint, options, _SOFTMAX_DECOMPOSITIONS)


def _decompose(
    joint: GraphModule, options: Options, decompositions: Mapping[Target, Callable[..., Node | None]]
) -> GraphModule:
    excluded = operators_of_options(options)
    row_sums: dict[Node, Node] = {}
    results = CallResults()
    specs = options.device_specs()
    returned = joint.graph.output_node().all_input_nodes
    replaced: list[FakeTensor] = []
    for node in list(joint.graph.nodes):
        if node.target is operator.getitem and str(node.args[0].target) not in excluded:
            if (computed := _norm_result(joint.graph, node, results)) is not None:
                replaced.append(node.meta["val"])
                node.replace_all_uses_with(computed)
                joint.graph.erase_node(node)
            continue
        if node.target is _aten.detach.default and node not in returned:
            # Nothing records gradients here, and the partitioner does not know that detach is a view.
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
            continue
        decomposition = decompositions.get(node.target)
        if decomposition is None or str(node.target) in excluded or not _is_plain(node):
            continue
        spec = specs.get(node.meta["val"].device.type)
        builder = JointGraphBuilder(joint.graph, node, results, row_sums, spec is not None and spec.massively_parallel)
        result = decomposition(builder, *node.args)
        result = None if result is None else builder.with_strides(result)
        if result is not None:
            replaced.append(node.meta["val"])
            node.replace_all_uses_with(result)
            joint.graph.erase_node(node)
    _update_views(joint.graph, {storage_identity(fake) for fake in replaced})
    return joint


def eliminate_common_subexpressions(joint: GraphModule, _options: Options) -> GraphModule:
    """Makes each pure call once (CSE), in place; returns the graph."""
    joint.graph.eliminate_dead_code()
    nodes = list(joint.graph.nodes)
    fakes = {node: node.meta.get("val") for node in nodes}
    replaced: set[int] = set()
    for node, first in common_subexpressions(nodes, fakes, saves_results=True).items():
        read = {storage for operand in node.all_input_nodes for storage in storages_of(operand.meta.get("val"))}
        replaced |= storages_of(fakes[node]) - read
        node.replace_all_uses_with(first)
        joint.graph.erase_node(node)
    _update_views(joint.graph, replaced)
    return joint


def _update_views(graph: Graph, replaced: Set[int]) -> None:
    """Gives views of replaced results, by the identities of their storages, fake values in those of the new results.

    AOTAutograd donates a saved tensor to the backward if its fake value shares its storage with no output.
    """
    for node in graph.nodes if replaced else ():
        fake = node.meta.get("val")
        if isinstance(fake, FakeTensor) and storage_identity(fake) in replaced and can_propagate_fake(node):
            fakes = {operand: operand.meta["val"] for operand in node.all_input_nodes}
            node.meta = {**node.meta, "val": run_on_fakes(node, fakes, fake)}


def _is_plain(node: Node) -> bool:
    """Whether a call has positional arguments only, and fake values that are not empty."""
    fakes = [operand.meta.get("val") for operand in (node, *node.all_input_nodes)]
    if node.kwargs or not all(isinstance(fake, FakeTensor) for fake in fakes):
        return False
    result: FakeTensor = node.meta["val"]
    return result.ndim > 0 and all(type(size) is not int or size > 0 for size in result.shape)


def _log_softmax(builder: JointGraphBuilder, x: Node, dim: int, _half_to_float: bool) -> Node:
    shifted, _, total = _exponentials(builder, x, dim)
    return builder.result(builder.call(_aten.sub.Tensor, shifted, builder.call(_aten.log.default, total)))


def _exponentials(builder: JointGraphBuilder, x: Node, dim: int) -> tuple[Node, Node, Node]:
    """Returns the elements minus their largest one along a dimension, the exponentials of these, and their sum."""
    x = builder.upcast(x)
    shifted = builder.call(_aten.sub.Tensor, x, builder.call(_aten.amax.default, x, [dim], True))
    exponentials = builder.call(_aten.exp.default, shifted)
    return shifted, exponentials, builder.call(_aten.sum.dim_IntList, exponentials, [dim], True)


def _wide_softmax(builder: JointGraphBuilder, x: Node, dim: int, half_to_float: bool) -> Node | None:
    """A softmax in float32 of elements in half precision, whose backward reads it."""
    is_cast = x.target is _aten._to_copy.default and x.all_input_nodes[0].meta["val"].dtype in HALF_PRECISION
    is_wide = (half_to_float or is_cast) and builder.replaced.dtype == torch.float32
    if not (is_wide and builder.has_softmax_backward):
        return None
    _, exponentials, total = _exponentials(builder, x, dim)
    return builder.result(builder.call(_aten.div.Tensor, exponentials, total))


def _log_softmax_backward(
    builder: JointGraphBuilder, gradient: Node, output: Node, dim: int, _dtype: torch.dtype
) -> Node:
    row_sum = builder.row_sums.get(gradient) if dim in (1, -1) else None
    gradient = builder.upcast(gradient)
    if row_sum is None:
        row_sum = builder.call(_aten.sum.dim_IntList, gradient, [dim], True)
    else:
        row_sum = builder.upcast(row_sum)
    weighted = builder.call(_aten.mul.Tensor, builder.call(_aten.exp.default, builder.upcast(output)), row_sum)
    return builder.result(builder.call(_aten.sub.Tensor, gradient, weighted))


def _activation_backward(builder: JointGraphBuilder, gradient: Node, output: Node, is_tanh: bool) -> Node | None:
    """Multiplies the gradient by the slope: 1 - y*y for y = tanh(x), y * (1 - y) for y = sigmoid(x).

    The gradient of a complex number is multiplied by the slope's conjugate: a kernel has neither.
    """
    if gradient.meta["val"].is_complex():
        return None
    output = builder.upcast(output)
    if is_tanh:
        slope = builder.one_minus(builder.call(_aten.mul.Tensor, output, output))
    else:
        slope = builder.call(_aten.mul.Tensor, output, builder.one_minus(output))
    return builder.result(builder.call(_aten.mul.Tensor, builder.upcast(gradient), slope))


def _threshold_backward(builder: JointGraphBuilder, gradient: Node, output: Node, threshold: float) -> Node | None:
    """Which elements are zero is a byte for each, which may be saved instead of a wider result of a relu.

    Results that the graph returns, and inputs of relus, are in memory anyway: there a mask would be more to store, and
    takes fewer bytes to write and read again only than an input of more than `_MASK_BYTES`.
    """
    operand = output.args[0] if output.target is _aten.relu.default else None
    while isinstance(operand, Node) and operand.target in _ELEMENT_COPIES:
        operand = operand.args[0]
    fake = gradient.meta["val"]
    is_input = isinstance(operand, Node) and operand.op == "placeholder" and fake.dtype.itemsize <= _MASK_BYTES
    if is_input or any(user.op == "output" for user in output.users):
        return None
    zero = builder.call(_aten.full.default, [], 0.0, dtype=fake.dtype, device=fake.device)
    is_below = builder.call(_aten.le.Scalar, output, threshold)
    return builder.result(builder.call(_aten.where.self, is_below, zero, gradient))


_MASK_BYTES = 2
"""The bytes of an element of a mask that the forward writes and the backward reads."""

_ELEMENT_COPIES: frozenset[Target] = frozenset({
    _aten._to_copy.default, _aten.view.default, _aten.permute.default, _aten.transpose.int, _aten.t.default,
    _aten.clone.default, _aten.pixel_shuffle.default,
})  # fmt: skip
"""Views and copies of all elements."""


def _nll_loss_backward(
    builder: JointGraphBuilder, gradient: Node, scores: Node, target: Node, weight: Node | None, reduction: int,
    ignore_index: int, total_weight: Node,
) -> Node | None:  # fmt: skip
    """A row's gradient is one number at its class, so the backward needs no scores."""
    fake = scores.meta["val"]
    if weight is not None or fake.ndim != 2:
        return None
    value = builder.upcast(gradient)
    if reduction == _MEAN:
        value = builder.call(_aten.div.Tensor, value, builder.upcast(total_weight))
    elif reduction == _NONE:
        value = builder.call(_aten.unsqueeze.default, value, 1)
    target = builder.call(_aten.unsqueeze.default, target, 1)
    zero = builder.call(_aten.full.default, [], 0.0, dtype=value.meta["val"].dtype, device=fake.device)
    is_counted = builder.call(_aten.ne.Scalar, target, ignore_index)
    value = builder.call(_aten.where.self, is_counted, builder.call(_aten.neg.default, value), zero)
    classes = builder.call(_aten.arange.default, fake.shape[1], dtype=torch.int64, device=fake.device)
    is_target = builder.call(_aten.eq.Tensor, classes, target)
    result = builder.result(builder.call(_aten.where.self, is_target, value, zero))
    builder.row_sums[result] = builder.result(value)
    return result


_NONE, _MEAN = 0, 1


def _outer_product(builder: JointGraphBuilder, left: Node, right: Node) -> Node | None:
    """A matmul over one term is a multiplication, which is cheap to recompute."""
    is_outer = is_outer_product(left.meta["val"], right.meta["val"], builder.replaced)
    return builder.call(_aten.mul.Tensor, left, right) if is_outer else None


def _repeated_cat(builder: JointGraphBuilder, tensors: Sequence[Node], dim: int = 0) -> Node | None:
    """A concatenation of one tensor with itself is an expanded copy, which torch's partitioner recomputes."""
    shape, result = tensors[0].meta["val"].shape, builder.replaced
    if len({*tensors}) > 1 or not all(type(size) is int for size in shape) or not result.is_contiguous():
        return None
    dim %= len(shape)
    repeated = builder.call(_aten.unsqueeze.default, tensors[0], dim)
    repeated = builder.call(_aten.expand.default, repeated, [*shape[:dim], len(tensors), *shape[dim:]])
    copied = builder.call(_aten.clone.default, repeated, memory_format=torch.contiguous_format)
    return builder.call(_aten.view.default, copied, list(result.shape))


def _norm_result(graph: Graph, result: Node, results: CallResults) -> Node | None:
    """Returns a result of a batch norm in training or a group norm, computed from its statistics; None if it stays.

    The backward of an activation then computes normalized elements again from the norm's input, which is saved anyway.
    """
    arguments: Any = result.args
    norm, position = arguments
    is_group_norm, training = norm.target is _aten.native_group_norm.default, _TRAINING_ARGUMENTS.get(norm.target)
    if not is_group_norm and (training is None or not norm.args[training]):
        return None
    x, weight, bias = norm.args[:3]
    if not all(isinstance(item.meta.get("val"), FakeTensor) for item in (x, result)) or x.meta["val"].ndim < 2:
        return None
    if is_group_norm and type(x.meta["val"].shape[1]) is not int:
        return None  # how many channels a group has is known at run time only
    builder = JointGraphBuilder(graph, result, results, {}, False)
    if is_group_norm and result.meta["val"].dtype in HALF_PRECISION:
        statistics = _float32_group_statistics(builder, norm)
    else:
        statistics = [builder.call(operator.getitem, norm, number) for number in (1, 2)] if position == 0 else None
    if statistics is None or position > 2:
        return None
    if position != 0:
        return builder.result(statistics[position - 1])
    mean, rstd = [(_per_sample_channel if is_group_norm else _per_channel)(builder, x, item) for item in statistics]
    value = builder.call(_aten.sub.Tensor, builder.upcast(x), mean)
    value = builder.call(_aten.mul.Tensor, value, rstd)
    if weight is not None:
        value = builder.call(_aten.mul.Tensor, value, _per_channel(builder, x, weight))
    if bias is not None:
        value = builder.call(_aten.add.Tensor, value, _per_channel(builder, x, bias))
    return builder.with_strides(builder.result(value))


def _per_channel(builder: JointGraphBuilder, x: Node, item: Node) -> Node:
    """Returns a number for each channel in a shape that broadcasts to x."""
    return builder.call(_aten.view.default, builder.upcast(item), [-1, *[1] * (x.meta["val"].ndim - 2)])


def _per_sample_channel(builder: JointGraphBuilder, x: Node, item: Node) -> Node:
    """Returns a number for each group of channels of each sample in a shape that broadcasts to x."""
    samples, channels, *spatial = x.meta["val"].shape
    width = channels // item.meta["val"].shape[1]
    repeated = builder.call(_aten.expand.default, builder.call(_aten.unsqueeze.default, item, 2), [-1, -1, width])
    copied = builder.call(_aten.clone.default, repeated, memory_format=torch.contiguous_format)
    sizes = [samples if type(samples) is int else -1, channels, *[1] * len(spatial)]
    return builder.call(_aten.view.default, copied, sizes)


def _float32_group_statistics(builder: JointGraphBuilder, norm: Node) -> list[Node] | None:
    """Returns the mean and 1 / std of a group norm of half precision in float32; its own results are rounded."""
    arguments: Any = norm.args
    x, epsilon, groups = arguments[0], arguments[7], arguments[6]
    samples, channels, *spatial = x.meta["val"].shape
    if not all(type(size) is int for size in spatial):
        return None
    sizes = [samples if type(samples) is int else -1, groups, channels // groups, *spatial]
    rows = builder.call(_aten.view.default, builder.upcast(x), sizes)
    moments = builder.call(_aten.var_mean.correction, rows, [*range(2, len(sizes))], correction=0)
    variance, mean = [builder.call(operator.getitem, moments, number) for number in (0, 1)]
    return [mean, builder.call(_aten.rsqrt.default, builder.call(_aten.add.Tensor, variance, epsilon))]


_TRAINING_ARGUMENTS: Mapping[Target, int] = {
    _aten._native_batch_norm_legit_functional.default: 5, _aten._native_batch_norm_legit.no_stats: 3,
}  # fmt: skip
"""Batch norms whose results are the normalized elements, the mean and 1 / std, with the position of `training`."""

_FUSIBLE = frozenset({
    _aten.native_batch_norm_backward, _aten.native_layer_norm_backward, _aten.native_group_norm_backward,
    _aten._softmax_backward_data, _aten.hardswish_backward, _aten.hardsigmoid_backward, _aten.hardtanh_backward,
    _aten.elu_backward, _aten.leaky_relu_backward, _aten.linalg_vector_norm,
    _aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm, _aten._native_batch_norm_legit,
    _aten._softmax, _aten.nll_loss_forward, _aten.nll_loss2d_forward,
    _aten.mish_backward, _aten.softplus_backward, _aten.hardshrink_backward, _aten.softshrink_backward,
    _aten.log_sigmoid_forward, _aten.log_sigmoid_backward, _aten.glu_backward, _aten._prelu_kernel_backward,
    _aten.mse_loss, _aten.mse_loss_backward, _aten.smooth_l1_loss, _aten.smooth_l1_loss_backward,
    _aten.huber_loss, _aten.huber_loss_backward, _aten.soft_margin_loss, _aten.soft_margin_loss_backward,
})  # fmt: skip
"""Operators whose kernels compute operands too, beside those that torch's partitioner knows."""

_RECOMPUTABLE = frozenset({
    _aten.hardswish, _aten.roll, _aten.flip, _aten.tril, _aten.pixel_shuffle, _aten.pixel_unshuffle,
    _aten.constant_pad_nd,
})  # fmt: skip
"""Pointwise operators, and those that move elements, beside those that torch's partitioner knows."""

_VIEWS = frozenset({_aten.transpose, _aten.unbind, _aten.split_with_sizes})
"""Views that TorchInductor decomposes into those that torch's partitioner knows."""


_DECOMPOSITIONS: Mapping[Target, Callable[..., Node | None]] = {
    _aten._log_softmax.default: _log_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.tanh_backward.default: partial(_activation_backward, is_tanh=True),
    _aten.sigmoid_backward.default: partial(_activation_backward, is_tanh=False),
    _aten.threshold_backward.default: _threshold_backward,
    _aten.mm.default: _outer_product,
    _aten.bmm.default: _outer_product,
    _aten.cat.default: _repeated_cat,
    _aten.max_pool2d_with_indices_backward.default: save_window_offsets,
    _aten.max_pool3d_with_indices_backward.default: save_window_offsets,
}
"""Decompositions; one that returns None leaves the call as it is."""

_SOFTMAX_DECOMPOSITIONS: Mapping[Target, Callable[..., Node | None]] = {_aten._softmax.default: _wide_softmax}

JOINT_GRAPH_PASSES: tuple[Step[GraphModule, Options], ...] = (
    Step("inline_subgraph_calls", "inline the graphs of operators that only call them (control_deps, invoke_quant)",
         lambda joint, _options: inline_subgraph_calls(joint)),
    Step("drop_unread_block_lists", "let FlexAttention without a block mask read no lists of blocks",
         lambda joint, _options: drop_unread_block_lists(joint)),
    Step("decompose_for_recomputation", "decompose operators that are cheap to recompute in the backward",
         decompose_for_recomputation),
    Step("recognize_attention", "turn attention written as its formula, and its backward, into kernels",
         recognize_attention_in_joint_graph, "fuse"),
    Step("group_expert_loops", "turn loops over experts, and their backward, into grouped matmuls on sorted rows",
         group_expert_loops_in_joint_graph, "fuse"),
    Step("gather_permuted_sums", "turn sums of rows at the places of a permutation into gathers",
         gather_permuted_sums, "fuse"),
    Step("decompose_wide_softmax", "decompose softmaxes in float32 whose operands are in half precision",
         decompose_wide_softmax),
    Step("recompute_dropout", "compute dropouts again in the backward, from their masks", recompute_dropout),
    Step("recompute_norms", "compute layer norms again in kernels of the backward", recompute_norms),
    Step("eliminate_common_subexpressions", "make equal pure calls once (CSE), in forward and backward",
         eliminate_common_subexpressions),
    Step("save_compared_elements", "save elements that the backward compares with their maximum",
         lambda joint, _options: save_compared_elements(joint)),
    Step("separate_sums", "add values at indices along several dimensions one dimension after the other",
         separate_sums, "fuse"),
    Step("compute_known_indices", "compute indices again, if they depend on no input, where values are added at them",
         lambda joint, _options: compute_known_indices(joint)),
    Step("drop_unread_operands", "save no operand of which the backward reads only the shape", drop_unread_operands),
)  # fmt: skip
"""The passes over the joint graph of training, before torch's partitioner. They do not run with `partitioner`."""
