"""Calls of Dynamo's graph that need not run where only the metadata of inputs and outputs is asked for.

AOTAutograd runs Dynamo's graph on fake tensors to learn which inputs are written, which outputs share memory and which
need gradients. Dynamo has run the same calls: the example value of a node is its result. So a call whose result has
memory of its own is replaced by that result, and what only such calls read is not run at all.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import Target

from fxwrap.fx_passes.effects import attribute_of, fake_of, mutated_operands
from fxwrap.torch_compat import (
    FUNCTION_MODULES,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    is_described_by_layout,
    is_plain_fake,
    is_written,
    log_api_usage,
    set_autocast_functions,
    set_grad_enabled,
    storage_identity,
    tree_leaves,
)

_STATE_FUNCTIONS = (set_grad_enabled, *set_autocast_functions)

_Number = int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool


@dataclass(frozen=True)
class KnownResults:
    """How to run a graph of Dynamo for the metadata of its inputs and outputs.

    Fields:
        executed: the nodes that run.
        known: the nodes that an executed one reads and whose example values are their results.
        repeatable: calls without effects of which the graph writes neither operands nor results.
        modes: calls that change how the following ones run.
    """

    executed: frozenset[Node]
    known: frozenset[Node]
    repeatable: frozenset[Node]
    modes: frozenset[Node]


def find_known_results(graph: Graph, mode: FakeTensorMode) -> KnownResults | None:
    """Returns which calls of a Dynamo graph run for its metadata; None if all must.

    All must run if a value is no plain fake tensor with symbols of `mode`, if a size depends on data, or if the graph
    calls something that is neither an operator nor a function of torch's that depends on its operands alone.
    """
    nodes = list(graph.nodes)
    calls = [node for node in nodes if node.op.startswith("call_")]
    if any(node.op == "call_module" or node.meta.get("unbacked_bindings") for node in calls):
        return None
    if not all(_is_understood(node) for node in calls):
        return None
    values = {node: _value_of(node) for node in nodes if node.op != "output"}
    tensors: dict[Node, list[Any]] = {
        node: [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for node, value in values.items()
    }
    if not all(is_plain_fake(item, mode) for items in tensors.values() for item in items):
        return None
    return _Planner(nodes, values, tensors).plan()


def _value_of(node: Node) -> Any:
    """Returns the example value of a node; the attribute where it has none, as a nested graph."""
    return attribute_of(node) if node.op == "get_attr" and "example_value" not in node.meta else fake_of(node)


def _is_understood(node: Node) -> bool:
    """Whether a call's result depends on its operands and on the modes of gradients and autocast alone."""
    target = node.target
    if node.op == "call_method" or isinstance(target, OpOverload | HigherOrderOperator):
        return True
    if target in _STATE_FUNCTIONS or target in (getattr, log_api_usage):
        return True
    name = getattr(target, "__name__", "")
    return any(getattr(module, name, None) is target for module in FUNCTION_MODULES)


def _must_run(node: Node, value: object) -> bool:
    """Whether a call may do something besides returning a result and writing operands."""
    target = node.target
    if _may_check_errors(target) or value is None:
        return True
    if isinstance(target, OpOverload):
        return target.namespace not in ("aten", "prims")
    return isinstance(target, HigherOrderOperator) or target in _STATE_FUNCTIONS


def _may_check_errors(target: Target) -> bool:
    """Whether an operator, function or method may check the success of a factorisation.

    Since torch 2.12 that check is an effect, whose tokens AOTAutograd counts where it collects metadata.
    """
    function = target.overloadpacket if isinstance(target, OpOverload) else target
    name = function if isinstance(function, str) else str(getattr(function, "__name__", ""))
    return name.removeprefix("linalg_") in _CHECKING


_CHECKING = frozenset({
    "cholesky", "inv", "inv_ex", "cholesky_ex", "inverse", "ldl_factor", "ldl_factor_ex", "lu_factor", "lu_factor_ex",
    "matrix_power", "solve", "solve_ex", "tensorinv", "tensorsolve",
})  # fmt: skip


def _may_change_modes(node: Node, value: object) -> bool:
    """Whether a call may change how the following ones run: one without a result, and no operator."""
    is_other = isinstance(node.target, OpOverload | HigherOrderOperator) or node.target is log_api_usage
    return node.op == "call_function" and not is_other and _must_run(node, value)


def _written_operands(node: Node) -> Sequence[Node]:
    """Returns the operands that a call writes, by its name, schema and arguments, or more of them."""
    target, operands = node.target, node.all_input_nodes
    if isinstance(target, HigherOrderOperator):
        return operands
    name = str(target) if isinstance(target, str | OpOverload) else str(getattr(target, "__name__", ""))
    if "batch_norm" in name or "instance_norm" in name:
        return _written_statistics(node, name)
    if isinstance(target, OpOverload):
        return mutated_operands(node, {})
    if "out" in node.kwargs or (name.startswith("_") and name.endswith("_")):
        return operands
    is_in_place = target in _IN_PLACE_OPERATORS or name.endswith("_") or _has_flag(node, "inplace")
    return operands[:1] if is_in_place else ()


_IN_PLACE_OPERATORS = frozenset({
    operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift, operator.iconcat,
})  # fmt: skip


def _written_statistics(node: Node, name: str) -> Sequence[Node]:
    """Returns the running statistics that a normalisation writes, which schemas of torch do not tell."""
    if name not in ("batch_norm", "instance_norm"):
        return node.all_input_nodes
    if len(node.args) > 5:
        is_function = node.target in (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)
        statistics = node.args[1:3] if is_function else node.args[3:5]
        return [item for item in statistics if isinstance(item, Node) and node.args[5] is not False]
    return node.all_input_nodes


def _has_flag(node: Node, name: str) -> bool:
    """Whether a call of a Python function has a flag of a name that is set."""
    code = getattr(node.target, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return bool(dict(zip(names, node.args), **node.kwargs).get(name))


class _Planner:
    def __init__(
        self, nodes: Sequence[Node], values: Mapping[Node, Any], tensors: Mapping[Node, Sequence[FakeTensor]]
    ) -> None:
        self.nodes, self.values, self.tensors = nodes, values, tensors
        self.storages = {node: [storage_identity(item) for item in items] for node, items in tensors.items()}
        self.outer: set[int] = set()  # storages of inputs and attributes
        self.first: dict[int, Node] = {}  # by storage
        self.touching: dict[int, list[Node]] = {}  # by storage, the nodes that read or return it
        for node in nodes:
            own = self.storages.get(node, ())
            for storage in own:
                self.first.setdefault(storage, node)
            if not node.op.startswith("call_"):
                self.outer.update(own)
            for storage in {*own, *self._read(node)}:
                self.touching.setdefault(storage, []).append(node)
        versions = {storage for node, items in tensors.items() for item, storage in zip(items, self.storages[node])
                    if is_written(item)}  # fmt: skip
        self.writers: dict[int, list[Node]] = {}  # by written storage
        for node in nodes:
            for operand in _written_operands(node) if node.op.startswith("call_") else ():
                for storage in self.storages[operand]:
                    self.writers.setdefault(storage, []).append(node)
        self.writers.update({storage: self.touching[storage] for storage in versions & self.outer})
        # Written, by calls whose names do not tell, or that are replaced by functions with results.
        self.changed = {storage: self.touching[storage] for storage in versions - self.writers.keys()}

    def plan(self) -> KnownResults:
        """Returns the nodes that run: outputs, effects and writes of inputs, and what they read."""
        executed: set[Node] = set()
        known: set[Node] = set()
        pending = [node for node in self.nodes if self._is_root(node)]
        pending += [node for storage, writers in self.writers.items() if storage in self.outer for node in writers]
        while pending:
            node = pending.pop()
            if node in executed or node in known:
                continue
            if self._is_known(node):
                known.add(node)
                continue
            executed.add(node)
            pending += node.all_input_nodes
            for storage in {*self.storages.get(node, ()), *self._read(node)}:
                pending += (*self.writers.get(storage, ()), *self.changed.get(storage, ()))
        modes = frozenset([node for node in self.nodes if _may_change_modes(node, self.values.get(node))])
        repeatable = frozenset(filter(self._is_repeatable, self.nodes))
        if any(node.target is set_grad_enabled for node in modes):
            repeatable = frozenset()
        return KnownResults(frozenset(executed), frozenset(known), repeatable, modes)

    def _is_repeatable(self, node: Node) -> bool:
        """Whether a call without effects has tensors as results, and nothing writes them or its operands."""
        if self._is_root(node) or node.target is getattr:
            return False
        if not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(self.values[node])):
            return False
        touched = {*self.storages[node], *self._read(node)}
        return touched.isdisjoint(self.writers) and touched.isdisjoint(self.changed)

    def _read(self, node: Node) -> set[int]:
        """Returns the storages of a node's operands."""
        return {storage for operand in node.all_input_nodes for storage in self.storages[operand]}

    def _is_root(self, node: Node) -> bool:
        return not node.op.startswith("call_") or _must_run(node, self.values[node])

    def _is_known(self, node: Node) -> bool:
        """Whether the example value of a call is its result: numbers, or tensors with memory that nothing writes."""
        if self._is_root(node):
            return False
        own = self.storages[node]
        leaves = tree_leaves(self.values[node])
        if not all(isinstance(leaf, _Number | None) or is_described_by_layout(leaf) for leaf in leaves):
            return False
        if len({*own}) != len(own) or not (self.writers.keys() | self.changed.keys()).isdisjoint(own):
            return False
        if any(self.first[storage] is not node for storage in own):
            return False
        return not any(node in self.writers.get(storage, ()) for storage in self._read(node))
