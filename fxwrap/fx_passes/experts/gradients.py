"""Sums of gradients over experts, as autograd writes them: the gradients of each expert, added one after the other.

A gradient of a token is zero but for the rows of the expert, a gradient of stacked weights but for its slice. Sums over
experts may have other summands in between, as the gradients of other layers that read the same tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import is_sum, same_layout
from fxwrap.fx_passes.prepared_graph import NodeValues

_LINEAR_VIEWS = frozenset({"alias", "permute", "squeeze", "t", "to_copy", "transpose", "unsqueeze", "view"})
"""Operators of which a sum of results is the result of the sum."""


@dataclass(frozen=True)
class ExpertGradient:
    """One gradient of each expert. `nodes` has the call of each body; `views` are the first one's views, in order."""

    nodes: tuple[Node, ...]
    views: tuple[Node, ...] = ()


@dataclass(frozen=True)
class GradientSum:
    """A sum of gradients of experts and of other tensors.

    Fields:
        root: the call that returns the sum, or that stacks the gradients of all experts.
        gradients: the gradients of experts.
        others: the other summands.
        inner_nodes: the additions and views below the root.
    """

    root: Node
    gradients: Sequence[ExpertGradient]
    others: Sequence[Node] = ()
    inner_nodes: Sequence[Node] = ()


def stacks_of(bodies: Sequence[Mapping[Node, int]]) -> list[Node]:
    """Returns the calls that stack one tensor of each body, in order."""
    users = {user: None for node in bodies[0] for user in node.users if name_of(user) == "stack"}
    return [user for user in users if _stacks(user, bodies)]


def _stacks(stack: Node, bodies: Sequence[Mapping[Node, int]]) -> bool:
    operands: Any = stack.args[0]
    if len(operands) != len(bodies) or not all(item in body for item, body in zip(operands, bodies, strict=True)):
        return False
    return len({body[item] for item, body in zip(operands, bodies, strict=True)}) == 1


def gradient_sums(
    gradients: Sequence[Sequence[Node]], stacks: Sequence[Node], fakes: NodeValues
) -> list[GradientSum] | None:
    """Returns the sums of the gradients of each body; None if one is read but by its sum over the experts."""
    sums = [GradientSum(stack, [ExpertGradient(tuple(stack.args[0]))]) for stack in stacks]  # type: ignore[arg-type]
    paths = [_Paths(nodes, fakes) for nodes in zip(*gradients, strict=True)]
    if not all(path.root is not None for path in paths):
        return None
    while paths:
        # A root below another one's is a part of that sum.
        last = next(path for path in paths if not any(path.root in other.below for other in paths))
        members = _members(last, paths)
        paths = [path for path in paths if path not in members]
        sums.append(_merged(last, members))
    return sums


def _members(last: _Paths, paths: Sequence[_Paths]) -> list[_Paths]:
    """Returns the gradients whose sums are the last one's, or parts of it."""
    members: list[_Paths] = []
    roots = {last.root}
    while len(further := [path for path in paths if path.root in roots]) > len(members):
        members = further
        roots |= {node for path in members for node in path.below}
    return members


class _Paths:
    """The ways of one gradient of each expert to their sum, which is `root`; None if there is none."""

    def __init__(self, nodes: Sequence[Node], fakes: NodeValues) -> None:
        views = [_views_of(node) for node in nodes]
        self.gradient = ExpertGradient(tuple(nodes), tuple(views[0]))
        self.views = [view for chain in views for view in chain]
        self.leaves = [chain[-1] if chain else node for node, chain in zip(nodes, views, strict=True)]
        chains = [_additions(leaf, fakes) for leaf in self.leaves]
        common = [node for node in chains[0] if all(node in chain for chain in chains)]
        same_views = all(_calls(chain) == _calls(views[0]) for chain in views)
        same_layouts = all(same_layout(fakes[leaf], fakes[self.leaves[0]]) for leaf in self.leaves)
        self.root = common[0] if common and same_views and same_layouts else None
        self.below = {node for chain in chains for node in _until(chain, self.root)}


def _merged(last: _Paths, members: Sequence[_Paths]) -> GradientSum:
    root = last.root
    assert root is not None
    leaves = {leaf for path in members for leaf in path.leaves}
    additions = {root, *[node for path in members for node in path.below]} | {path.root for path in members}
    operands = [item for node in additions if node is not None for item in node.all_input_nodes]
    others = [item for item in operands if item not in leaves and item not in additions]
    inner = [node for node in additions if node is not None and node is not root]
    views = [view for path in members for view in path.views]
    return GradientSum(root, [path.gradient for path in members], others, [*inner, *views])


def _views_of(node: Node) -> list[Node]:
    """Returns the views of a gradient, each of the one before it, that are its only readers."""
    views: list[Node] = []
    while len(node.users) == 1:
        (node,) = node.users
        if name_of(node) not in _LINEAR_VIEWS or len(node.all_input_nodes) > 1:
            break
        views.append(node)
    return views


def _calls(views: Sequence[Node]) -> list[tuple[Any, ...]]:
    return [(view.target, view.args[1:], view.kwargs) for view in views]


def _additions(leaf: Node, fakes: NodeValues) -> list[Node]:
    """Returns the additions of a tensor, each of the result of the one before it, that alone read it."""
    chain: list[Node] = []
    node = leaf
    while len(node.users) == 1:
        (user,) = node.users
        if not is_sum(user, fakes) or len(user.all_input_nodes) != 2:
            break
        chain.append(user)
        node = user
    return chain


def _until(chain: Sequence[Node], root: Node | None) -> Collection[Node]:
    """Returns the calls of a chain before the root."""
    return chain[: chain.index(root)] if root in chain else ()
