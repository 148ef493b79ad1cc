"""Sorts of small integers, as those of the experts of tokens, with keys of as few bits as these need.

A radix sort on GPUs goes over all bits of its keys, a byte at a time: indices of a `topk` over 64 experts have 8 bits,
not 64.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, storages_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph
from fxwrap.fx_passes.storage_aliases import written_storages
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
SORTS = frozenset({_aten.sort.default, _aten.sort.stable})
"""Operators whose results are sorted elements and their order."""

_VIEWS = frozenset({
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.slice.Tensor, _aten.select.int,
    _aten.squeeze.dim, _aten.unsqueeze.default, _aten.transpose.int, _aten.permute.default,
    _aten.t.default, _aten.expand.default,
})  # fmt: skip
"""Views, whose elements are those of their first operand."""

_KEYS = (torch.uint8, torch.int16, torch.int32)
"""Dtypes of keys, the narrowest one first."""


def narrowest_key(largest: int, dtype: torch.dtype) -> torch.dtype:
    """Returns the narrowest dtype of integers up to `largest`, or `dtype`: a radix sort reads each byte of its keys."""
    return next((key for key in _KEYS if largest <= torch.iinfo(key).max and key.itemsize < dtype.itemsize), dtype)


def narrow_sorts(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph whose sorts of integers of a known small range have narrow keys on massively parallel devices."""
    keys = {node: key for node in graph.nodes if (key := _key(node, graph.fakes, context)) is not None}
    written = written_storages(graph.nodes, graph.fakes) if keys else frozenset()
    keys = {node: key for node, key in keys.items() if written.isdisjoint(storages_of(graph.fakes[node.args[0]]))}  # type: ignore[index]
    if not keys:
        return graph
    copy = GraphCopy(graph)
    for node, key in keys.items():
        before, name = copy.node_map[node], f"{node.name}_narrow"
        operand, *arguments = before.args
        cast = copy.call(before, _aten._to_copy.default, (operand,), name, {"dtype": key})
        ordered = copy.call(before, node.target, (cast, *arguments), name, before.kwargs)
        for user in list(node.users):
            part = copy.call(before, operator.getitem, (ordered, user.args[1]), name)
            if user.args[1] == 0:
                part = copy.call(before, _aten._to_copy.default, (part,), name, {"dtype": graph.fakes[user].dtype})
            copy.substitute(user, part, "fused")
        copy.erase(node)
    return copy.finish()


def _key(node: Node, fakes: NodeValues, context: FxPassContext) -> torch.dtype | None:
    """Returns the dtype of the keys of a sort of wider integers whose range is known; else None."""
    operand = node.args[0] if node.target in SORTS and str(node.target) not in context.extern_operators else None
    fake = fakes.get(operand) if isinstance(operand, Node) else None
    if not isinstance(fake, FakeTensor) or fake.dtype.is_floating_point or fake.dtype.is_complex:
        return None
    spec = context.options.device_specs().get(fake.device.type)
    count = _count(operand, fakes) if spec is not None and spec.massively_parallel else None  # type: ignore[arg-type]
    if count is None or any(user.target is not operator.getitem for user in node.users):
        return None
    key = narrowest_key(count - 1, fake.dtype)
    return None if key is fake.dtype else key


def _count(node: Node, fakes: NodeValues) -> int | None:
    """Returns a number that all elements of a tensor are below, none of them negative; None if it is unknown."""
    while node.target in _VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    if not isinstance(source, Node) or source.target is not _aten.topk.default:
        return None
    operand, _, *rest = source.args
    fake = fakes.get(operand) if isinstance(operand, Node) else None
    dim = rest[0] if rest else source.kwargs.get("dim", -1)
    size = fake.shape[dim] if isinstance(fake, FakeTensor) and isinstance(dim, int) and fake.ndim else None
    return size if type(size) is int else None
