"""Attention of few query rows becomes a kernel that is split over keys: a call of FlexAttention.

The kernels of libraries give each head one program, which reads all keys in sequence: one token occupies a small part
of a large GPU. Lowering splits such calls over keys (`lowering/attention.py`). On devices with few threads, libraries
pack keys as for many rows, and read those that a mask hides.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.devices import DeviceSpec
from fxwrap.fx_passes.attention.elements import UnsupportedScoresError, read_buffer
from fxwrap.fx_passes.attention.flex import has_attention_kernel
from fxwrap.fx_passes.attention.flex_formulas import result_fakes, single_block
from fxwrap.fx_passes.attention.library_calls import (
    bias_of,
    hidden_number,
    is_readable,
    library_arguments,
    without_broadcasts,
)
from fxwrap.fx_passes.attention.scores import biased_score_functions, computed_bias_functions
from fxwrap.fx_passes.graph_copy import GraphCopy, size_hint
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import written_storages
from fxwrap.torch_compat import FakeTensor, flex_attention_operator

_aten = torch.ops.aten

_MAX_ROWS = 16
"""The largest number of query rows: those of one block of a dot."""

_MULTIPROCESSORS_PER_MATRIX = 2
"""With fewer multiprocessors for each pair of batch and key head, which are a program each, these occupy a GPU."""


def split_decoding_attention(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph in which attention of few query rows to many keys is a call of FlexAttention.

    Calls with dropout, with `is_causal`, or whose log-sum-exp is used stay.
    """
    calls = {
        node: arguments for node in graph.nodes
        if (arguments := library_arguments(node)) and _is_split(node, arguments, graph.fakes, context)
    }  # fmt: skip
    if not calls:
        return graph
    copy, written = GraphCopy(graph), set[int]()
    for node in graph.nodes:
        if node in calls:
            _replace(copy, node, calls[node], graph.fakes, written)
        written |= written_storages([node], graph.fakes)
    return copy.finish()


def _is_split(node: Node, arguments: Mapping[str, Any], fakes: NodeValues, context: FxPassContext) -> bool:
    """Whether a call is one of few rows that a kernel computes in parts."""
    preserved = {str(node.target), "aten.scaled_dot_product_attention.default"}
    if not preserved.isdisjoint(context.extern_operators):
        return False
    if arguments.get("dropout_p", 0.0) != 0 or arguments.get("is_causal", False) is not False:
        return False
    results = [user for user in node.users if user.target is not operator.getitem or user.users]
    if not results or any(user.target is not operator.getitem or user.args[1] != 0 for user in results):
        return False
    operands = [fakes[arguments[name]] for name in ("query", "key", "value")]
    query, key, value = operands
    spec = context.options.device_specs().get(query.device.type)
    bias = bias_of(arguments)
    if spec is None or (bias is not None and not is_readable(fakes[bias], query)):
        return False
    has_kernel = has_attention_kernel(operands, [query.shape[3], value.shape[3]], context.options)
    return has_kernel and has_few_rows(query, key, spec)


def has_few_rows(query: FakeTensor, key: FakeTensor, spec: DeviceSpec) -> bool:
    """Whether queries (batch, heads, rows, width) are so few for their keys that a kernel is split over these."""
    heads, rows, key_heads = query.shape[1], query.shape[2], key.shape[1]
    if not all(type(size) is int for size in (heads, rows, key_heads)) or heads % key_heads:
        return False
    if spec.massively_parallel:
        matrices = size_hint(query.shape[0]) * key_heads
        is_few = rows <= _MAX_ROWS and matrices * _MULTIPROCESSORS_PER_MATRIX <= spec.multiprocessors
    else:
        is_few = heads // key_heads * rows <= dict(spec.attention.decoding_rows).get(query.dtype, 0)
    return is_few and size_hint(key.shape[2]) >= spec.attention.decoding_keys


def _replace(
    copy: GraphCopy, node: Node, arguments: Mapping[str, Any], fakes: NodeValues, written: Set[int]
) -> None:  # fmt: skip
    """Replaces a call, whose output keeps its layout; before it, the graph writes the storages `written`."""
    before, name = copy.node_map[node], f"{node.name}_split"
    query, key, value = [copy.node_map[arguments[item]] for item in ("query", "key", "value")]
    fake = copy.fakes[query]
    functions, buffers, of_mask = _score_functions(copy, node, (fake, bias_of(arguments)), fakes, written)
    names = ("scores", "mask")
    score_mod, mask_mod = [
        copy.attribute(before, f"{name}_{item}", module) for item, module in zip(names, functions, strict=True)
    ]
    scale = arguments.get("scale")
    if scale is None:
        scale = fake.shape[3] ** -0.5
    operands: tuple[object, ...] = (query, key, value, score_mod, single_block(mask_mod), scale, {}, buffers, of_mask)
    call = copy.call(before, flex_attention_operator(), operands, name, fake=result_fakes(copy.fakes[before][0]))
    output = copy.element(before, call, 0, name)
    for user in node.users:
        copy.substitute(user, output, "fused", (node,))


def _score_functions(
    copy: GraphCopy, node: Node, scores: tuple[FakeTensor, Node | None], fakes: NodeValues, written: Set[int]
) -> tuple[tuple[GraphModule, GraphModule], tuple[Node, ...], tuple[Node, ...]]:
    """Returns `score_mod` and `mask_mod` of a call, and the tensors that each reads; `scores` are its query and bias.

    A bias is computed where that reads no more than the bias: so kernels know which keys a mask of positions excludes,
    and several calls need no tensor that all of them read but the largest elements of rows.
    """
    (query, bias), before, name = scores, copy.node_map[node], f"{node.name}_split"
    if bias is None:
        return biased_score_functions(query, None), (), ()
    try:
        functions = computed_bias_functions(query, bias, fakes, written, hidden_number(node, fakes))
    except UnsupportedScoresError:
        buffer = without_broadcasts(copy, before, copy.node_map[bias], name)
        return biased_score_functions(query, copy.fakes[buffer]), (buffer,), ()
    modules = functions.score_mod, functions.mask_mod
    buffers = tuple([read_buffer(copy, before, item, query.shape[1], name) for item in functions.reads])
    if not functions.reads_least:
        return modules, buffers, ()
    buffers = (*buffers, _least_of_rows(copy, before, bias, name))
    return modules, buffers, buffers


def _least_of_rows(copy: GraphCopy, before: Node, bias: Node, name: str) -> Node:
    """Returns the least of the largest elements of rows of a bias, in the dimensions that are left and differ.

    All rows have the same bound of keys then, at which kernels end exactly.
    """
    rows = without_broadcasts(copy, before, copy.node_map[bias], name)
    least = copy.call(before, _aten.amax.default, (rows, [-1]), name)
    if copy.fakes[least].shape[-1] != 1:
        least = copy.call(before, _aten.amin.default, (least, [-1], True), name)
    for dim, size in reversed([*enumerate(copy.fakes[least].shape)]):
        if type(size) is int and size == 1:
            least = copy.call(before, _aten.select.int, (least, dim, 0), name)
    return least
