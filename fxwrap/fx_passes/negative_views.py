"""Removal of negative views, as `imag` of a conjugate is one: kernels read memory, whose numbers lack the sign.

Each view with a negative bit becomes the same view of the memory without the bit; what reads it negates it first.
Calls whose results have other strides for operands with a conjugate bit get operands with the bit, as in the trace.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.errors import GraphError
from fxwrap.fx_passes.effects import attribute_of, mutated_operands
from fxwrap.fx_passes.graph_copy import GraphCopy, can_propagate_fake, items_of, run_on_fakes, same_strides, storages_of
from fxwrap.fx_passes.model_source import location_of
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph
from fxwrap.torch_compat import FakeTensor, negated_view

_aten = torch.ops.aten
_NEGATIVE_VIEW = _aten._neg_view.default


def resolve_negative_views(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph whose kernels read no tensor with a negative bit.

    Inputs have no negative or conjugate bit: the entry of a program resolves it, also where the graph was traced for
    inputs with the bit; calls whose strides depend on it get conjugates with the bit. Results of the graph keep theirs.
    """
    conjugates = {node: views for node in graph.nodes if (views := _conjugate_views(node))}
    resolved = _resolved_conjugates(graph)
    if not (conjugates or resolved) and not any(
        node.target is _NEGATIVE_VIEW or _is_negative_constant(node, graph) for node in graph.nodes
    ):
        return graph
    editor = _Editor(graph)
    for node in graph.nodes:
        if node in conjugates:
            editor.resolve_conjugate(node, *conjugates[node])
        elif _needs_conjugate_bits(node, resolved, graph.fakes):
            editor.restore_conjugates(node, resolved)
        editor.add(node)
    return editor.copy.finish()


def _is_negative_constant(node: Node, graph: PreparedGraph) -> bool:
    payload = graph.constants.get(node.name) if node.op == "placeholder" else None
    payload = attribute_of(node) if node.op == "get_attr" else payload
    return isinstance(payload, torch.Tensor) and payload.is_neg()


def _conjugate_views(node: Node) -> list[Node]:
    """Returns, for a real view of the conjugate of an input, the input and its views down to the conjugate; else [].

    A real view rejects tensors with a conjugate bit: the graph was traced for an input with the bit.
    """
    base: Any = node.args[0] if node.target is _aten.view_as_real.default else None
    views: list[Node] = []
    while isinstance(base, Node) and base.op == "call_function" and base.args:
        views.insert(0, base)
        base = base.args[0]
    is_conjugate = sum(view.target is _aten._conj.default for view in views) % 2 == 1
    return [base, *views] if is_conjugate and isinstance(base, Node) and base.op == "placeholder" else []


def _resolved_conjugates(graph: PreparedGraph) -> set[Node]:
    """Returns the inputs that had the conjugate bit when the graph was traced, and their views with the bit."""
    result = set[Node]()
    for node in graph.nodes:
        fake = graph.fakes.get(node)
        is_input = node.op == "placeholder" and node.name not in graph.constants
        is_view = node.target is not _aten._conj.default and any(
            operand in result and storages_of(fake) & storages_of(graph.fakes[operand])
            for operand in node.all_input_nodes
        )
        if (is_input or is_view) and isinstance(fake, FakeTensor) and fake.is_conj():
            result.add(node)
    return result


def _needs_conjugate_bits(node: Node, resolved: Collection[Node], fakes: NodeValues) -> bool:
    """Whether the strides of a call's results depend on the conjugate bits of its operands, as those of solvers do."""
    operands = [operand for operand in node.all_input_nodes if operand in resolved]
    if not operands or node in resolved or not can_propagate_fake(node) or mutated_operands(node, fakes):
        return False
    expected = items_of(fakes.get(node))
    plain = {operand: fakes[operand] for operand in node.all_input_nodes}
    plain |= {operand: fakes[operand].conj_physical() for operand in operands}
    results = items_of(run_on_fakes(node, plain))
    pairs = zip(expected, results, strict=True)
    return any(isinstance(item, FakeTensor) and not same_strides(item, result) for item, result in pairs)


class _Editor:
    """Edits a copy of a graph. `memory` has the memory without the bit of each node with a negative bit."""

    def __init__(self, graph: PreparedGraph) -> None:
        self.graph = graph
        self.copy = GraphCopy(graph)
        self.memory: dict[Node, Node] = {}

    def add(self, node: Node) -> None:
        """Edits the copy of a node, after those of its operands."""
        operands = [item for item in node.all_input_nodes if item in self.memory]
        if _is_negative_constant(node, self.graph):
            self._remove_bit(node)
        elif node.target is _NEGATIVE_VIEW:
            operand: Any = node.args[0]
            memory = self.memory.get(operand, self.copy.node_map[operand])
            self.copy.substitute(node, memory)
            if operand not in self.memory:
                self.memory[node] = memory
        elif operands and self._is_view(node, operands[0]):
            own = self.memory[node] = self.copy.node_map[node]
            self.copy.fakes[own] = own.meta["val"] = run_on_fakes(own, self.copy.fakes)
        elif operands:
            self._negate_operands(node)

    def resolve_conjugate(self, node: Node, source: Node, *views: Node) -> None:
        """Lets a real view read a copy of an input that has the conjugate bit."""
        fakes, call = self.copy.fakes, self.copy.node_map[node]
        physical = self.copy.call(call, _aten._conj_physical.default, (self.copy.node_map[source],), "physical")
        written = {item for item in self.graph.nodes for item in mutated_operands(item, self.graph.fakes)}
        through_views = any(mutated_operands(item, self.graph.fakes) for item in views) or any(
            storages_of(self.graph.fakes[item]) & storages_of(self.graph.fakes[node])
            for item in written if item.op != "placeholder"
        )  # fmt: skip
        if through_views or not same_strides(fakes[physical], self.graph.fakes[source]):
            reason = "it is a real view, written or strided, of an input that had a conjugate bit when it was traced"
            remedy = "Trace the graph with a plain input: call resolve_conj"
            raise GraphError(node.name, reason, remedy, location_of(node))
        view = self.copy.call(call, _aten._conj.default, (physical,), "conjugate")
        for item in views:
            arguments, keywords = map_arg((item.args[1:], item.kwargs), self.copy.node_map.__getitem__)
            view = self.copy.call(call, item.target, (view, *arguments), item.name, keywords)
        call.replace_input_with(self.copy.node_map[views[-1]], view)
        fakes[call] = call.meta["val"] = run_on_fakes(call, fakes)

    def restore_conjugates(self, node: Node, resolved: Collection[Node]) -> None:
        """Lets a call read conjugates of copies, with the bit, in place of operands whose bit the entry resolves."""
        call = self.copy.node_map[node]
        for operand in [item for item in node.all_input_nodes if item in resolved]:
            own = self.copy.node_map[operand]
            physical = self.copy.call(call, _aten._conj_physical.default, (own,), "physical")
            call.replace_input_with(own, self.copy.call(call, _aten._conj.default, (physical,), "conjugate"))

    def _remove_bit(self, node: Node) -> None:
        own = self.copy.node_map[node]
        users = [*own.users]
        plain = self._negative_view(own.next, own)
        for user in users:
            user.replace_input_with(own, plain)
        self.memory[node] = plain

    def _is_view(self, node: Node, operand: Node) -> bool:
        fakes = self.graph.fakes
        shares = storages_of(fakes.get(node)) & storages_of(fakes[operand])
        return bool(shares) and can_propagate_fake(node) and not mutated_operands(node, fakes)

    def _negate_operands(self, node: Node) -> None:
        """Passes negated copies to a call, and copies its writes back; the output returns negative views."""
        call = self.copy.node_map[node]
        copies = {}
        for item in node.all_input_nodes:
            memory = self.memory.get(item)
            if memory is not None:
                negated = self._negative_view(call, memory) if node.op == "output" else self._negated(call, memory)
                copies[memory] = negated
        call.args, call.kwargs = map_arg((call.args, call.kwargs), lambda item: copies.get(item, item))
        for item in mutated_operands(node, self.graph.fakes):
            memory, after = self.memory.get(item), call.next
            if memory is not None:
                returned = self._negated(after, copies[memory])
                self.copy.call(after, _aten.copy_.default, (memory, returned), item.name, fake=self.copy.fakes[memory])
                if storages_of(self.graph.fakes.get(node)) & storages_of(self.graph.fakes[item]):
                    call.replace_all_uses_with(memory)
                    self.memory[node] = memory

    def _negated(self, before: Node, memory: Node) -> Node:
        fake = torch.neg(self.copy.fakes[memory])
        return self.copy.call(before, _aten.neg.default, (memory,), memory.name, fake=fake)

    def _negative_view(self, before: Node, memory: Node) -> Node:
        fake = negated_view(self.copy.fakes[memory])
        return self.copy.call(before, _NEGATIVE_VIEW, (memory,), memory.name, fake=fake)
