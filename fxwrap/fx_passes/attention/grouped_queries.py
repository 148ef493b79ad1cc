"""Grouped-query attention of one query without copies of the keys, before torch selects an attention kernel.

Models with fewer heads of keys than of queries repeat each key head for the queries of its group, since most kernels
need equal numbers. In decoding, which has one query row in each head, that copies both caches in each layer. There the
heads of a group are rows of one head instead: attention of (batch, heads, 1, width) to repeated keys is attention of
(batch, key heads, group, width) to the keys themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.fx_passes.attention.masks import (
    LAYOUT_PROPAGATING,
    attention_arguments,
    has_unobservable_layout,
    is_attention,
    may_mutate,
    set_attention_arguments,
)
from fxwrap.fx_passes.effects import fake_of, name_of, storage_of
from fxwrap.fx_passes.graph_copy import expressions_of
from fxwrap.options import Options
from fxwrap.torch_compat import copy_dynamo_graph, copy_dynamo_module

_aten = torch.ops.aten

SizesOf: TypeAlias = Callable[[Any], "list[Any] | None"]

_COPIES = frozenset({"clone", "contiguous"})
_RESHAPES = frozenset({"flatten", "reshape", "unsafe_view", "view"})
_VIEWS = LAYOUT_PROPAGATING | {"unflatten", "unsafe_view", "view"}
"""Operators that accept the layout of one row, which is that of (batch, heads, width) before and after the rewrite."""

_REPETITIONS = frozenset({"expand", "repeat_interleave"})


@dataclass(frozen=True)
class QueryGroups:
    """An attention call with groups of query heads.

    `keys` and `values` are (batch, key heads, length, width), or have another dimension 2 of size 1, which the model
    expands.
    """

    keys: Node
    values: Node
    key_heads: int
    group: int


def pack_query_groups(graph_module: GraphModule, options: Options) -> GraphModule:
    """Returns a Dynamo graph whose attention of one query row does not repeat heads of keys and values.

    Attention with dropout, with `is_causal`, or with an observable layout of its result, is not changed. Returns the
    graph itself if there is nothing to rewrite.
    """
    if not find_query_groups(graph_module.graph, options):
        return graph_module
    graph, _ = copy_dynamo_graph(graph_module.graph)
    rewrite_query_groups(find_query_groups(graph, options))
    return copy_dynamo_module(graph_module, graph)


def find_query_groups(graph: Graph, options: Options) -> dict[Node, QueryGroups]:
    """Returns the attention calls that are rewritten."""
    if not options.fuse or "aten.scaled_dot_product_attention.default" in options.preserve_ops:
        return {}
    nodes = list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    result = {}
    for node in nodes:
        group = _query_groups(node) if is_attention(node) else None
        if group is None or not has_unobservable_layout(node, _VIEWS):
            continue
        start = min(position[group.keys], position[group.values])
        if not _writes_any(nodes[start : position[node]], group):
            result[node] = group
    return result


def rewrite_query_groups(groups: Mapping[Node, QueryGroups]) -> None:
    """Applies the result of `find_query_groups` to its graph, in place."""
    for node, group in groups.items():
        graph, arguments = node.graph, attention_arguments(node)
        sizes = (group.key_heads, group.group)
        with graph.inserting_before(node):
            arguments["query"] = _heads_as_rows(graph, arguments["query"], sizes)
            arguments |= {"key": _unrepeated(graph, group.keys), "value": _unrepeated(graph, group.values)}
            arguments.pop("enable_gqa", None)
            mask = arguments.get("attn_mask")
            if isinstance(mask, Node) and fake_of(mask).ndim == 4 and fake_of(mask).shape[1] != 1:
                arguments["attn_mask"] = _heads_as_rows(graph, mask, sizes)
        set_attention_arguments(node, arguments)
        with graph.inserting_after(node):
            rows = graph.call_function(_aten.unsqueeze.default, (node, 3))
        with graph.inserting_after(rows):
            heads = graph.call_function(_aten.flatten.using_ints, (rows, 1, 2))
        node.replace_all_uses_with(heads, delete_user_cb=lambda user, rows=rows: user is not rows)  # type: ignore[misc]


def _writes_any(nodes: Sequence[Node], group: QueryGroups) -> bool:
    """Whether a node may write keys or values: their repetition had copied the content before."""
    storages = {storage_of(group.keys), storage_of(group.values)}
    return any(
        may_mutate(node) and not storages.isdisjoint(map(storage_of, node.all_input_nodes))
        for node in nodes
        if node.op not in ("placeholder", "get_attr")
    )


def _unrepeated(graph: Graph, tensor: Node) -> Node:
    return tensor if fake_of(tensor).ndim == 4 else graph.call_function(_aten.select.int, (tensor, 2, 0))


def _heads_as_rows(graph: Graph, tensor: Node, sizes: tuple[int, int]) -> Node:
    """Adds the view (batch, key heads, group, width) of a tensor (batch, heads, 1, width)."""
    split = graph.call_function(_aten.unflatten.int, (tensor, 1, sizes))
    return graph.call_function(_aten.select.int, (split, 3, 0))


def _query_groups(node: Node) -> QueryGroups | None:
    """Returns the groups of an attention call of one query row, None for other calls."""
    arguments = attention_arguments(node)
    query, mask = fake_of(arguments["query"]), arguments.get("attn_mask")
    if arguments.get("is_causal", False) is not False:
        return None
    if arguments.get("dropout_p", 0.0) != 0 or not isinstance(query, torch.Tensor) or query.ndim != 4:
        return None
    heads, rows = query.shape[1:3]
    if type(heads) is not int or type(rows) is not int or rows != 1:
        return None
    shares_heads = arguments.get("enable_gqa", False) is True
    tensors = [arguments[name] for name in ("key", "value")]
    keys, values = [_shared(item, heads) if shares_heads else repeated_heads(item) for item in tensors]
    if keys is None or values is None or not _is_mask_of_heads(mask, heads):
        return None
    key_heads, group = keys[1:]
    if values[1:] != keys[1:] or key_heads * group != heads:
        return None
    return QueryGroups(keys[0], values[0], key_heads, group)


def _is_mask_of_heads(mask: Any, heads: int) -> bool:
    """Whether a mask is the same for all heads, or has one row for each head."""
    if mask is None:
        return True
    fake = fake_of(mask) if isinstance(mask, Node) else None
    if not isinstance(fake, torch.Tensor) or fake.ndim < 2 or fake.ndim > 4:
        return False
    if type(fake.shape[-2]) is not int or fake.shape[-2] != 1:
        return False
    own = 1 if fake.ndim < 3 else fake.shape[-3]
    return type(own) is int and (own == 1 or (fake.ndim == 4 and own == heads))


def _shared(node: Any, query_heads: int) -> tuple[Node, int, int] | None:
    """Returns a tensor with fewer heads than the query, its heads and the queries of each; None for other nodes."""
    fake = fake_of(node) if isinstance(node, Node) else None
    heads = fake.shape[1] if isinstance(fake, torch.Tensor) and fake.ndim == 4 else None
    if type(heads) is not int or heads == 0 or query_heads % heads or heads == query_heads:
        return None
    return node, heads, query_heads // heads


def repeated_heads(node: Any, sizes_of: SizesOf | None = None) -> tuple[Node, int, int] | None:
    """Returns the tensor whose heads a node repeats, the heads and the repetitions; None for other nodes.

    `sizes_of` returns a node's sizes as expressions, or None; by default those of the metadata.
    """
    sizes_of = sizes_of or _sizes
    merged = sizes_of(node)
    while isinstance(node, Node) and node.args and name_of(node) in _COPIES | _RESHAPES:
        node = node.args[0]
    base = node.args[0] if isinstance(node, Node) and node.args and name_of(node) in _REPETITIONS else None
    one, repeated = sizes_of(base), sizes_of(node)
    if merged is None or one is None or repeated is None or len(merged) != 4 or not isinstance(base, Node):
        return None
    heads, total = one[1], merged[1]
    if type(heads) is not int or type(total) is not int or heads == 0 or total % heads or total == heads:
        return None
    group = total // heads
    if name_of(node) == "expand":
        is_repetition = len(one) == 5 and one[2] == 1 and repeated == [*one[:2], group, *one[3:]]
    else:  # sizes alone do not tell which dimension is repeated, and how
        arguments = dict(zip(("repeats", "dim"), node.args[1:])) | node.kwargs
        is_repetition = len(one) == 4 and arguments.get("repeats") == group and arguments.get("dim") in (1, -3)
        is_repetition = is_repetition and repeated == merged
    rest = one[3:] if len(one) == 5 else one[2:]
    return (base, heads, group) if is_repetition and merged == [one[0], total, *rest] else None


def _sizes(node: Any) -> list[Any] | None:
    """Returns the sizes of a node's tensor as expressions; None for other nodes."""
    fake = fake_of(node) if isinstance(node, Node) else None
    return expressions_of(fake.shape) if isinstance(fake, torch.Tensor) else None
