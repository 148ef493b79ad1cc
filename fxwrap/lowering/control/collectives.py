"""Collectives: the start and the wait of a collective become lines, between which other work may run.

This requires that each result of the start is waited for exactly once, in the same graph, and has no other use. Other
calls of these operators stay extern calls.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Node

from fxwrap.torch_compat import OpOverload, operator_name
from fxwrap.wrapper_ir.operators import operator_schema

_NAMESPACE = "_c10d_functional"
_WAIT = "wait_tensor"


def starts_collective(node: Node) -> bool:
    """Returns whether a node starts a collective that another node of the graph waits for."""
    if not _is_call(node) or _is_wait(node) or node.kwargs:
        return False
    assert isinstance(node.target, OpOverload)
    schema = operator_schema(node.target)
    if schema.mutated_arguments or "group_name" not in schema.argument_names:
        return False
    return _is_waited_for(node) or _all_are_waited_for(node)


def pending_collective(node: Node) -> Node | None:
    """Returns the start that a node waits for, or None if it waits for none in this graph."""
    if not _is_wait(node) or not isinstance(node.args[0], Node):
        return None
    started = node.args[0]
    if started.target is operator.getitem and isinstance(started.args[0], Node):
        started = started.args[0]
    return started if starts_collective(started) else None


def group_of(node: Node) -> str:
    """Returns the name of a collective's process group."""
    assert isinstance(node.target, OpOverload)
    return str(node.args[operator_schema(node.target).argument_names.index("group_name")])


def in_flight_operands(node: Node) -> Sequence[Node]:
    """Returns the operands of the collective that a node waits for, which it uses until then."""
    started = pending_collective(node)
    return () if started is None else started.all_input_nodes


def _is_call(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == _NAMESPACE


def _is_wait(node: Node) -> bool:
    return _is_call(node) and operator_name(node.target) == _WAIT  # type: ignore[arg-type]


def _is_waited_for(node: Node) -> bool:
    users = list(node.users)
    return len(users) == 1 and _is_wait(users[0])


def _all_are_waited_for(node: Node) -> bool:
    if not all(user.target is operator.getitem and _is_waited_for(user) for user in node.users):
        return False
    items, val = [user.args[1] for user in node.users], node.meta.get("val")
    return isinstance(val, list | tuple) and sorted(map(str, items)) == sorted(map(str, range(len(val))))
