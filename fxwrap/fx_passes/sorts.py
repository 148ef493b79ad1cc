"""Sorts of integers, as those of the experts of tokens: by counting, or by keys of few bits.

A radix sort on GPUs goes over all bits of its keys, a byte at a time, and each of its steps is a launch or several. The
position of one of few elements among the sorted ones takes less time to count: the number of elements that are less, or
equal and before it. These positions are the inverse of the sort's order, so that calls which invert it go away. Longer
tensors whose range is known are sorted by narrow keys: indices of a `topk` over 64 experts have 8 bits, not 64.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.graph_copy import GraphCopy, storages_of
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues, PreparedGraph, Target
from fxwrap.fx_passes.storage_aliases import written_storages
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
SORTS = frozenset({_aten.sort.default, _aten.sort.stable})
"""Operators whose results are sorted elements and their order."""

_COUNTING = frozenset({
    _aten.arange.default, _aten.ge.Tensor, _aten.gt.Tensor, _aten.index.Tensor, _aten.index_put.default,
    _aten.le.Tensor, _aten.lt.Tensor, _aten.sum.dim_IntList, _aten.where.self,
})  # fmt: skip
"""Operators that count positions. One that no kernel computes would store a truth value for each pair of elements."""

_VIEWS = frozenset({
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.slice.Tensor, _aten.select.int,
    _aten.squeeze.dim, _aten.unsqueeze.default, _aten.transpose.int, _aten.permute.default,
    _aten.t.default, _aten.expand.default,
})  # fmt: skip
"""Views, whose elements are those of their first operand."""

_KEYS = (torch.uint8, torch.int16, torch.int32)
"""Dtypes of keys, the narrowest one first."""

_WIDE_KEY = 4
"""The bytes of keys of which twice as many are counted: a library sorts narrower ones in less time."""

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def narrowest_key(largest: int, dtype: torch.dtype) -> torch.dtype:
    """Returns the narrowest dtype of integers up to `largest`, or `dtype`: a radix sort reads each byte of its keys."""
    return next((key for key in _KEYS if largest <= torch.iinfo(key).max and key.itemsize < dtype.itemsize), dtype)


def is_order(node: Node) -> bool:
    """Whether a node is the order of sorted elements."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    return isinstance(source, Node) and source.target in SORTS


def written_positions(node: Node) -> tuple[Node, int] | None:
    """Returns the indices at which a call writes 0, 1, 2 and so on into a tensor, and the count of these numbers."""
    match node.target, node.args:
        case _aten.index_put.default, (Node(), [Node() as indices], Node() as values, *rest) if not any(rest):
            pass
        case _aten.scatter.src, (Node(), 0 | -1, Node() as indices, Node() as values):
            pass
        case _:
            return None
    match values.target, values.args:
        case _aten.arange.default, (int() as count,):
            return indices, count
        case _aten.arange.start | _aten.arange.start_step, (0, int() as count) | (0, int() as count, 1):
            return indices, count
        case _:
            return None


def rewrite_sorts(graph: PreparedGraph, context: FxPassContext) -> PreparedGraph:
    """Returns a graph whose sorts of few integers count, and whose others of a known small range have narrow keys.

    Both only on massively parallel devices.
    """
    forms = {node: form for node in graph.nodes if (form := _form(node, graph.fakes, context)) is not None}
    written = written_storages(graph.nodes, graph.fakes) if forms else frozenset()
    forms = {
        node: form.with_range(written.isdisjoint(storages_of(graph.fakes[node.args[0]])))  # type: ignore[index]
        for node, form in forms.items()
    }
    forms = {node: form for node, form in forms.items() if form.is_counted or form.key is not form.dtype}
    if not forms:
        return graph
    rewrite = _SortRewrite(graph, forms, written)
    for node, form in forms.items():
        if form.is_counted:
            rewrite.count(node)
        else:
            rewrite.narrow(node)
    return rewrite.copy.finish()


@dataclass(frozen=True)
class _SortForm:
    """How a sort of integers of a dtype is computed: by which keys, and whether it counts; `descending` as torch's."""

    dtype: torch.dtype
    key: torch.dtype
    is_counted: bool
    descending: bool

    def with_range(self, holds: bool) -> _SortForm:
        """Returns the form for keys whose known range `holds`, or does not because the graph writes them."""
        return self if holds else replace(self, key=self.dtype)


class _SortRewrite:
    """A copy of a graph in which sorts are replaced."""

    def __init__(self, graph: PreparedGraph, forms: Mapping[Node, _SortForm], written: Collection[int]) -> None:
        self.copy = GraphCopy(graph)
        self._forms, self._fakes, self._written = forms, graph.fakes, written
        self._inverses = set[Node]()

    def narrow(self, node: Node) -> None:
        """Makes the keys of a sort narrow."""
        before, name = self.copy.node_map[node], f"{node.name}_narrow"
        operand, *arguments = before.args
        keys = self.copy.call(before, _aten._to_copy.default, (operand,), name, {"dtype": self._forms[node].key})
        ordered = self.copy.call(before, node.target, (keys, *arguments), name, before.kwargs)
        for user in node.users:
            part = self.copy.call(before, operator.getitem, (ordered, user.args[1]), name)
            if user.args[1] == 0:
                dtype = self._forms[node].dtype
                part = self.copy.call(before, _aten._to_copy.default, (part,), name, {"dtype": dtype})
            self.copy.substitute(user, part, "fused")
        self.copy.erase(node)

    def count(self, node: Node) -> None:
        """Computes the positions of elements among the sorted ones, and from these the sort's results."""
        users = [user for user in node.users if user not in self._inverses]
        self.copy.erase(node)
        if not users:
            return
        before = self.copy.node_map[node]
        operand, fake = before.args[0], self._fakes[node.args[0]]  # type: ignore[index]
        call = partial(self._call, before)
        counted = self._are_before(before, operand, self._forms[node], fake)
        positions = call(_aten.sum.dim_IntList, counted, [1], dtype=torch.int32)
        positions = call(_aten._to_copy.default, positions, dtype=torch.int64)
        numbers = call(_aten.arange.default, len(fake), dtype=torch.int64, device=fake.device)
        order = call(_aten.index_put.default, call(_aten.empty_like.default, positions), [positions], numbers)
        for user in users:
            if user.args[1] == 0:
                self.copy.substitute(user, call(_aten.index.Tensor, operand, [order]), "fused")
            else:
                self._replace_inverse(user, positions)
                self.copy.substitute(user, order, "fused")

    def _are_before(self, before: Node, operand: Any, form: _SortForm, fake: torch.Tensor) -> Node:
        """Returns for each element whether each other one is before it among the sorted ones."""
        call = partial(self._call, before)
        keys = operand if form.key is form.dtype else call(_aten._to_copy.default, operand, dtype=form.key)
        places = call(_aten.arange.default, len(fake), dtype=torch.int32, device=fake.device)
        own, others = self._pairs(before, keys)
        place, others_place = self._pairs(before, places)
        strictly, or_equal = (_aten.gt, _aten.ge) if form.descending else (_aten.lt, _aten.le)
        alternatives = call(or_equal.Tensor, others, own), call(strictly.Tensor, others, own)
        return call(_aten.where.self, call(_aten.lt.Tensor, others_place, place), *alternatives)

    def _pairs(self, before: Node, vector: Node) -> tuple[Node, Node]:
        """Returns a vector as columns, and as rows."""
        columns, rows = [self._call(before, _aten.unsqueeze.default, vector, dim) for dim in (1, 0)]
        return columns, rows

    def _call(self, before: Node, target: Target, *arguments: Any, **keywords: Any) -> Node:
        return self.copy.call(before, target, arguments, f"{before.name}_counted", keywords)

    def _replace_inverse(self, order: Node, positions: Node) -> None:
        """Replaces the first inverse of an order by the positions, unless the graph writes into it."""
        count = len(self._fakes[order])
        inverses = [user for user in order.users if written_positions(user) == (order, count)]
        sorts = [user for user in order.users if user in self._forms and not self._forms[user].descending]
        inverses += [part for item in sorts for part in item.users if is_order(part)]
        for inverse in inverses[:1]:
            fake = self._fakes[inverse]
            is_whole = fake.dtype is torch.int64 and list(fake.shape) == [count]
            if is_whole and storages_of(fake).isdisjoint(self._written):
                self.copy.substitute(inverse, positions, "fused")
                self._inverses.add(inverse)


def _form(node: Node, fakes: NodeValues, context: FxPassContext) -> _SortForm | None:
    """Returns how a sort of integers is computed on a massively parallel device; else None."""
    operand = node.args[0] if node.target in SORTS and str(node.target) not in context.extern_operators else None
    fake = fakes.get(operand) if isinstance(operand, Node) else None
    if not isinstance(fake, FakeTensor) or fake.dtype not in _INTEGERS:
        return None
    spec = context.options.device_specs().get(fake.device.type)
    if spec is None or not spec.massively_parallel or any(user.target is not operator.getitem for user in node.users):
        return None
    bound = _bound(operand, fakes)  # type: ignore[arg-type]
    key = fake.dtype if bound is None else narrowest_key(bound - 1, fake.dtype)
    count = fake.shape[0] if fake.ndim == 1 and type(fake.shape[0]) is int else 0
    is_short = 0 < count <= spec.counted_sort_elements // (1 if key.itemsize >= _WIDE_KEY else 2)
    names = {str(target) for target in _COUNTING}
    is_fused = names <= {*context.fused_operators} and names.isdisjoint(context.extern_operators)
    is_counted = is_short and is_fused and not torch.are_deterministic_algorithms_enabled()
    return _SortForm(fake.dtype, key, is_counted, _is_descending(node))


def _is_descending(node: Node) -> bool:
    """Whether a sort's largest elements are first."""
    positional = node.args[2:]  # those of `sort.stable` are keywords
    return bool(positional[0] if positional else node.kwargs.get("descending", False))


def _bound(node: Node, fakes: NodeValues) -> int | None:
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
