"""Collectives: a call that starts one and the call that waits for it become lines, between which other work may run.

That is so where each result of a call is waited for once, in the same graph, and used by nothing else; any other call
of these operators is called as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Node

from fxwrap.torch_compat import OpOverload
from fxwrap.wrapper_ir.operators import operator_facts

_NAMESPACE = "_c10d_functional"
_WAIT = "wait_tensor"


def starts_flight(node: Node) -> bool:
    """Returns whether a node starts a collective that another node of the graph waits for."""
    if not _is_call(node) or _is_wait(node) or node.kwargs:
        return False
    assert isinstance(node.target, OpOverload)
    facts = operator_facts(node.target)
    if facts.written or "group_name" not in facts.argument_names:
        return False
    return _is_waited_for(node) or _all_are_waited_for(node)


def flight_of(node: Node) -> Node | None:
    """Returns the node that started what a node waits for; None for a node that waits for nothing of the graph's."""
    if not _is_wait(node) or not isinstance(node.args[0], Node):
        return None
    started = node.args[0]
    if started.target is operator.getitem and isinstance(started.args[0], Node):
        started = started.args[0]
    return started if starts_flight(started) else None


def group_of(node: Node) -> str:
    """Returns the name of the process group that a collective is in."""
    assert isinstance(node.target, OpOverload)
    return str(node.args[operator_facts(node.target).argument_names.index("group_name")])


def borrowed(node: Node) -> Sequence[Node]:
    """Returns what the collective that a node waits for works on until then."""
    started = flight_of(node)
    return () if started is None else started.all_input_nodes


def _is_call(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == _NAMESPACE


def _is_wait(node: Node) -> bool:
    return _is_call(node) and getattr(node.target, "_opname", "") == _WAIT


def _is_waited_for(node: Node) -> bool:
    users = list(node.users)
    return len(users) == 1 and _is_wait(users[0])


def _all_are_waited_for(node: Node) -> bool:
    if not all(user.target is operator.getitem and _is_waited_for(user) for user in node.users):
        return False
    items, val = [user.args[1] for user in node.users], node.meta.get("val")
    return isinstance(val, list | tuple) and sorted(map(str, items)) == sorted(map(str, range(len(val))))
