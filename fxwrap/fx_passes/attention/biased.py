"""Attention of a library with a bias becomes, with its backward, calls of FlexAttention and its backward.

A library's kernels of attention with a bias write the gradient of each score with the bias expanded to all batches and
heads, and are slower than those without a bias. Bias and maxima are buffers of the calls. If the bias is trained, the
gradients of scores are a matrix that the backward's kernel stores; else the bias is a mask.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.devices import ROW_ALIGNMENT, DeviceSpec
from fxwrap.fx_passes.attention.flex import has_attention_kernel
from fxwrap.fx_passes.attention.flex_formulas import RELATIVE_LOGSUMEXP, result_fakes, single_block
from fxwrap.fx_passes.attention.library_calls import is_readable, without_broadcasts
from fxwrap.fx_passes.attention.nodes import ALIASES, without_aliases
from fxwrap.fx_passes.attention.score_gradients import biased_score_gradients
from fxwrap.fx_passes.attention.scores import biased_score_functions
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import GraphCopy, is_contiguous
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph, Target
from fxwrap.torch_compat import (
    arguments_by_name,
    flex_attention_backward_operator,
    flex_attention_operator,
    flex_scatter_operator,
    in_fake_mode,
)

_aten = torch.ops.aten

_FORWARDS: Mapping[Target, Target] = {
    backward.default: forward.default
    for forward, backward in (
        (_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_efficient_attention_backward),
        (_aten._scaled_dot_product_cudnn_attention, _aten._scaled_dot_product_cudnn_attention_backward),
    )
}
"""The libraries' attention with a bias, by its backward. cuDNN has no gradient of a bias."""
_GRAD_BIAS = 3
"""The position of the gradient of the bias in the results of a backward."""


@dataclass(frozen=True)
class _Call:
    """A library's attention and its backward, as nodes of a graph.

    Fields:
        forward, backward: the calls.
        arguments: those of the backward, by parameter name.
        outputs: the nodes of the forward's output.
        statistics: those of its other results, which only the backward reads.
        gradients: the nodes of the backward's results, by position.
    """

    forward: Node
    backward: Node
    arguments: dict[str, Any]
    outputs: tuple[Node, ...]
    statistics: tuple[Node, ...]
    gradients: dict[int, Node]

    @classmethod
    def of(cls, backward: Node) -> _Call | None:
        """Returns the call of a backward with a bias and without dropout; None for other nodes."""
        target = _FORWARDS.get(backward.target)
        if target is None:
            return None
        arguments = arguments_by_name(backward)
        forward = _source(arguments["out"])
        if forward is None or forward.target is not target or arguments["attn_bias"] is None:
            return None
        same = ("query", "key", "value", "attn_bias", "dropout_p", "is_causal", "scale")
        of_forward = {"dropout_p": 0.0, **arguments_by_name(forward)}
        if any(without_aliases(of_forward.get(name)) is not without_aliases(arguments.get(name)) for name in same[:4]):
            return None
        if of_forward["dropout_p"] != 0 or of_forward.get("is_causal") or arguments.get("is_causal"):
            return None
        results = [user for user in forward.users if user.target is operator.getitem]
        statistics = [user for user in results if user.args[1] != 0]
        is_own = all(item is backward or (name_of(item) in ALIASES and {*item.users} <= {backward})
                     for user in statistics for item in user.users)  # fmt: skip
        gradients: dict[int, Node] = {user.args[1]: user for user in backward.users if user.users}  # type: ignore[misc]
        if not is_own or len(results) != len(forward.users) or not gradients:
            return None
        outputs = tuple([user for user in results if user.args[1] == 0])
        return cls(forward, backward, arguments, outputs, tuple(statistics), gradients)

    @property
    def grad_bias(self) -> Node | None:
        """The gradient of the bias, if it is trained."""
        return self.gradients.get(_GRAD_BIAS)

    @property
    def grad_output(self) -> Node:
        """The gradient of the output."""
        node: Node = self.arguments.get("grad_out") or self.arguments["grad_out_"]
        return node

    @property
    def operands(self) -> tuple[Node, Node, Node]:
        """Queries, keys and values, (batch, heads, rows or keys, width)."""
        query, key, value = [self.arguments[name] for name in ("query", "key", "value")]
        return query, key, value


def _source(result: Any) -> Node | None:
    """Returns the call whose first result a node is."""
    result = without_aliases(result)
    is_first = isinstance(result, Node) and result.target is operator.getitem and result.args[1] == 0
    return result.args[0] if is_first else None


def replace_biased_attention(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which attention of a library with a bias, and its backward, are calls of FlexAttention.

    They are replaced where a device's kernels are faster, and have static sizes.
    """
    calls = [call for node in graph.nodes if (call := _Call.of(node)) is not None]
    calls = [call for call in calls if _is_faster(call, graph.fakes, context)]
    if not calls:
        return graph
    copy = GraphCopy(graph)
    for call in calls:
        _replace(copy, call, graph.fakes)
    return copy.finish()


def _is_faster(call: _Call, fakes: NodeValues, context: FxPassContext) -> bool:
    """Whether a device's kernels compute a call, and are measured to be faster."""
    preserved = {str(call.forward.target), str(call.backward.target), "aten.scaled_dot_product_attention.default"}
    query, key, value = tensors = [fakes[item] for item in call.operands]
    spec = context.options.device_specs().get(query.device.type)
    if spec is None or flex_scatter_operator() is None or not preserved.isdisjoint(context.extern_operators):
        return False
    if not is_readable(fakes[call.arguments["attn_bias"]], query) or query.shape[1] != key.shape[1]:
        return False
    gradient = call.grad_bias
    if gradient is None and not _is_short_mask(query, key, spec):
        return False
    if (
        gradient is not None
        and not is_contiguous(fakes[gradient])
        and any(user.op == "output" for user in gradient.users)
    ):
        return False  # rows of the library's are padded
    sizes = [size for item in tensors for size in item.shape]
    least = dict(spec.attention.streaming_backward_sizes).get(query.dtype)
    widths = [query.shape[3], value.shape[3]]
    return (
        all(type(size) is int for size in sizes)
        and least is not None
        and min(query.shape[2], key.shape[2]) >= least
        and max(widths) <= spec.attention.streaming_bias_width
        and has_attention_kernel(tensors, widths, context.options)
    )


def _is_short_mask(query: torch.Tensor, key: torch.Tensor, spec: DeviceSpec) -> bool:
    """Whether kernels are faster with a mask without gradient: of few rows and keys, whose rows are aligned."""
    rows, keys = query.shape[2], key.shape[2]
    most = dict(spec.attention.streaming_mask_rows).get(query.dtype, 0)
    is_static = type(rows) is int and type(keys) is int
    return is_static and max(rows, keys) <= most and keys * query.dtype.itemsize % ROW_ALIGNMENT == 0


def _replace(copy: GraphCopy, call: _Call, fakes: NodeValues) -> None:
    """Replaces a call, whose results keep their layouts."""
    before, name = copy.node_map[call.forward], f"{call.forward.name}_attention"
    operands = [copy.node_map[item] for item in call.operands]
    node: Node = call.arguments["attn_bias"]
    bias = without_broadcasts(copy, before, copy.node_map[node], name)
    query, scale = copy.fakes[operands[0]], call.arguments.get("scale")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    score_mod, mask_mod = biased_score_functions(query, copy.fakes[bias])
    keys = fakes[call.operands[1]].shape[2]
    dtype = None if call.grad_bias is None else fakes[node].dtype
    relative, joint = biased_score_gradients(query, copy.fakes[bias], keys, dtype)
    options = {"BACKEND": "FLASH", RELATIVE_LOGSUMEXP: True}  # the unit of maxima is that of scores

    functions = {"scores": score_mod, "mask": mask_mod}
    modules = {key: copy.attribute(before, f"{name}_{key}", module) for key, module in functions.items()}
    results = result_fakes(fakes[call.outputs[0]])
    arguments = (*operands, modules["scores"], single_block(modules["mask"]), scale, options, (bias,), ())
    forward = copy.call(before, flex_attention_operator(), arguments, name, fake=results)
    output, total, maxima = [copy.element(before, forward, position, name) for position in range(3)]

    before, name = copy.node_map[call.backward], f"{name}_backward"
    functions = {"scores": relative, "joint": joint, "mask": mask_mod}
    modules = {key: copy.attribute(before, f"{name}_{key}", module) for key, module in functions.items()}
    gradient = copy.node_map[call.grad_output]
    arguments = (*operands, output, total, gradient, None, modules["scores"], modules["joint"],
                 single_block(modules["mask"]), scale, options, (bias, maxima), ())  # fmt: skip
    matrices: tuple[Any, ...] = () if dtype is None else (joint.graph.output_node().args[0][-1].meta["val"],)  # type: ignore[index, union-attr]
    gradients = (*_operand_gradients(call, copy, operands), matrices)
    backward = copy.call(before, flex_attention_backward_operator(), arguments, name, fake=gradients)
    _substitute_results(copy, call, output, backward, name)


def _substitute_results(copy: GraphCopy, call: _Call, output: Node, backward: Node, name: str) -> None:
    """Replaces the results of a library's calls by those of FlexAttention's, and erases the calls."""
    before = copy.node_map[call.backward]
    of_statistics = [user for item in call.statistics for user in item.users if user is not call.backward]
    unused = [user for user in call.backward.users if user not in call.gradients.values()]
    for position, user in call.gradients.items():
        result = copy.element(before, backward, position, name)
        if position == _GRAD_BIAS:
            result = copy.element(before, result, 0, name)
        copy.substitute(user, result, "fused")
    for item in call.outputs:
        copy.substitute(item, output, "fused")
    for item in (*unused, call.backward, *of_statistics, *call.statistics, call.forward):
        copy.erase(item)


def _operand_gradients(call: _Call, copy: GraphCopy, operands: list[Node]) -> list[Any]:
    """Returns the fake values of the gradients of queries, keys and values, in the layouts of the library's."""
    results = []
    with in_fake_mode(copy.fakes[operands[0]].fake_mode):
        for position, operand in enumerate(operands):
            like = copy.fakes[operand]
            user = call.gradients.get(position)
            strides = like.stride() if user is None else copy.fakes[copy.node_map[user]].stride()
            results.append(like.new_empty_strided(like.shape, strides))
    return results
