"""Removal of negative views, as `imag` of a conjugate is one: kernels read memory, whose numbers lack the sign.

Each view with a negative bit becomes the same view of the memory without the bit; what reads it negates it first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxwrap.errors import GraphError
from fxwrap.fx_passes.effects import attribute_of, mutated_operands
from fxwrap.fx_passes.graph_copy import GraphCopy, can_propagate_fake, run_on_fakes, storages_of, written_storages
from fxwrap.fx_passes.prepared_graph import PreparedGraph
from fxwrap.fx_passes.source import location_of
from fxwrap.torch_compat import negated_view

_aten = torch.ops.aten
_NEGATIVE_VIEW = _aten._neg_view.default


def resolve_negative_views(graph: PreparedGraph) -> PreparedGraph:
    """Returns a graph whose kernels read no tensor with a negative bit.

    Inputs have no negative or conjugate bit: the entry of a program resolves it, also where the graph was traced for
    inputs with the bit. Results of the graph keep theirs.
    """
    conjugate = {node for node in graph.nodes if _reads_conjugate(node)}
    if not conjugate and not any(_is_source(node, graph) for node in graph.nodes):
        return graph
    editor = _Editor(graph)
    for node in graph.nodes:
        if node in conjugate:
            editor.resolve_conjugate(node)
        editor.add(node)
    return editor.copy.finish()


def _is_source(node: Node, graph: PreparedGraph) -> bool:
    return node.target is _NEGATIVE_VIEW or _is_negative_constant(node, graph)


def _is_negative_constant(node: Node, graph: PreparedGraph) -> bool:
    payload = graph.constants.get(node.name) if node.op == "placeholder" else None
    payload = attribute_of(node) if node.op == "get_attr" else payload
    return isinstance(payload, torch.Tensor) and payload.is_neg()


def _reads_conjugate(node: Node) -> bool:
    """Whether a call that rejects tensors with a conjugate bit reads the conjugate of an input.

    It was traced for an input with the bit, whose conjugate has none.
    """
    base: Any = node.args[0] if node.target is _aten.view_as_real.default else None
    is_conjugate = False
    while isinstance(base, Node) and base.op == "call_function":
        is_conjugate ^= base.target is _aten._conj.default
        base = base.args[0] if base.args else None
    return is_conjugate and base.op == "placeholder"


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

    def resolve_conjugate(self, node: Node) -> None:
        """Resolves the conjugate bit of a node's operand, by a copy."""
        if storages_of(self.graph.fakes[node]) & written_storages(self.graph.nodes, self.graph.fakes):
            reason = "it is a real view, which is written, of an input that had a conjugate bit when it was traced"
            raise GraphError(
                node.name, reason, "Trace the graph with a plain input: call resolve_conj", location_of(node)
            )
        before, operand = self.copy.node_map[node], node.args[0]
        mapped = self.copy.node_map[operand]  # type: ignore[index]
        conjugate = self.copy.call(before, _aten._conj.default, (mapped,), "conjugate")
        physical = self.copy.call(before, _aten._conj_physical.default, (conjugate,), "resolved")  # CSE removes clones
        before.replace_input_with(mapped, physical)

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
        """Passes negated copies to a call, and copies what it writes back; the output returns negative views."""
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
