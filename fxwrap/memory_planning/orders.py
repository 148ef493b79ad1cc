"""Sets of orders in which chosen leaves are consecutive: PQ-trees (Booth and Lueker, 1976), as immutable values.

The children of a P-node have any order; those of a Q-node have theirs, or the reverse. Leaves are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

FREEDOM_UNIT = 1024
"""`freedom` of e = 2.718... orders."""

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Node:
    """A P-node, or a Q-node with three children or more."""

    is_ordered: bool
    children: tuple[Tree, ...]


Tree: TypeAlias = "int | Node"


@dataclass(frozen=True)
class Gathered:
    """A tree in which leaves are consecutive, and a possible order of these.

    The order is reversed unless the leaf `anchor` lies on the side `is_anchor_left` of them; -1 for either order.
    """

    tree: Tree
    order: tuple[int, ...]
    anchor: int
    is_anchor_left: bool


def node_of(children: list[Tree], is_ordered: bool = False) -> Tree:
    """Returns a node, which is its child if there is only one."""
    return children[0] if len(children) == 1 else Node(is_ordered and len(children) > 2, tuple(children))


def leaves(*trees: Tree) -> list[int]:
    """Returns the leaves in one of the orders."""
    ordered: list[int] = []
    for tree in trees:
        ordered += leaves(*tree.children) if isinstance(tree, Node) else [tree]
    return ordered


def gather(tree: Tree, chosen: Set[int], replacement: Tree | None) -> Gathered | None:
    """Makes the chosen leaves consecutive, and replaces them unless there is no replacement; None if they cannot be."""
    if _is_full(tree, chosen):
        return Gathered(tree if replacement is None else replacement, tuple(leaves(tree)), -1, False)
    assert isinstance(tree, Node)
    children = tree.children
    touched = [position for position, child in enumerate(children) if not _is_empty(child, chosen)]
    begin, end = touched[0], touched[-1] + 1
    if len(touched) == 1:
        inner = gather(children[begin], chosen, replacement)
        if inner is None:
            return None
        whole = node_of([*children[:begin], inner.tree, *children[end:]], tree.is_ordered)
        return Gathered(whole, inner.order, inner.anchor, inner.is_anchor_left)
    parts = (
        _parts_of_ordered(list(children), begin, end, chosen)
        if tree.is_ordered
        else _parts_of_unordered(children, chosen)
    )
    if parts is None:
        return None
    left, middle, right = parts.left, parts.middle, parts.right
    anchor = leaves(left[-1])[0] if left else leaves(right[0])[0] if right else -1
    inside = node_of([*left, *(middle if replacement is None else [replacement]), *right], is_ordered=True)
    return Gathered(node_of([*parts.outside, inside]), tuple(leaves(*middle)), anchor, bool(left))


class _Parts(NamedTuple):
    """Trees with the chosen leaves alone, in the middle of others in order, and trees `outside` in any order."""

    left: list[Tree]
    middle: list[Tree]
    right: list[Tree]
    outside: list[Tree]


def _parts_of_ordered(children: list[Tree], begin: int, end: int, chosen: Set[int]) -> _Parts | None:
    """Returns the parts of a Q-node, whose children from `begin` to before `end` have chosen leaves."""
    inner = children[begin + 1 : end - 1]
    first, last = _linear(children[begin], chosen), _linear(children[end - 1], chosen)
    if first is None or last is None or not all(_is_full(child, chosen) for child in inner):
        return None
    left, right = [*children[:begin], *first[0]], [*last[0][::-1], *children[end:]]
    return _Parts(left, [*first[1], *inner, *last[1][::-1]], right, [])


def _parts_of_unordered(children: Sequence[Tree], chosen: Set[int]) -> _Parts | None:
    """Returns the parts of a P-node, of whose children at most two have both chosen and other leaves."""
    outside = [child for child in children if _is_empty(child, chosen)]
    full = [child for child in children if _is_full(child, chosen)]
    mixed = [child for child in children if not _is_empty(child, chosen) and not _is_full(child, chosen)]
    halves = [pair for child in mixed if (pair := _linear(child, chosen)) is not None]
    if len(mixed) > 2 or len(halves) < len(mixed):
        return None
    left, first = halves[0] if halves else ([], [])
    right, last = halves[1] if len(halves) > 1 else ([], [])
    return _Parts(left, [*first, *([node_of(full)] if full else []), *last[::-1]], right[::-1], outside)


def freedom(tree: Tree) -> int:
    """Returns the logarithm of the number of orders, rounded."""
    if not isinstance(tree, Node):
        return 0
    own = _LOG_2 if tree.is_ordered else sum(map(_rounded_log, range(2, len(tree.children) + 1)))
    return own + sum(map(freedom, tree.children))


def digest(tree: Tree, leaf_digest: Callable[[int], int]) -> int:
    """Returns 64 bits that are equal for trees with equal orders, but for leaves with equal digests."""
    if not isinstance(tree, Node):
        return leaf_digest(tree)
    parts = [digest(child, leaf_digest) for child in tree.children]
    if not tree.is_ordered:
        return mix(len(parts) + sum(map(mix, parts)))
    return min(_sequence_digest(parts), _sequence_digest(parts[::-1]))


def mix(value: int) -> int:
    """Returns 64 bits that depend on all bits of a value; from SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _sequence_digest(parts: list[int]) -> int:
    value = 0
    for part in parts:
        value = mix(value ^ part) + 1
    return value & _MASK


def _linear(tree: Tree, chosen: Set[int]) -> tuple[list[Tree], list[Tree]] | None:
    """Returns children of a Q-node, in which the chosen leaves come last: the others and these; None if they cannot."""
    if _is_full(tree, chosen):
        return [], [tree]
    if _is_empty(tree, chosen):
        return [tree], []
    assert isinstance(tree, Node)
    children = list(tree.children)
    if tree.is_ordered:
        if _is_full(children[0], chosen) or _is_empty(children[-1], chosen):
            children.reverse()
    else:
        empty: list[Tree] = [child for child in children if _is_empty(child, chosen)]
        full: list[Tree] = [child for child in children if _is_full(child, chosen)]
        partial = [child for child in children if not _is_full(child, chosen) and not _is_empty(child, chosen)]
        children = [*([node_of(empty)] if empty else []), *partial, *([node_of(full)] if full else [])]
    before: list[Tree] = []
    after: list[Tree] = []
    for child in children:
        if after and not _is_full(child, chosen):
            return None
        halves = _linear(child, chosen)
        if halves is None:
            return None
        before += halves[0]
        after += halves[1]
    return before, after


def _is_full(tree: Tree, chosen: Set[int]) -> bool:
    return all(_is_full(child, chosen) for child in tree.children) if isinstance(tree, Node) else tree in chosen


def _is_empty(tree: Tree, chosen: Set[int]) -> bool:
    return all(_is_empty(child, chosen) for child in tree.children) if isinstance(tree, Node) else tree not in chosen


def _rounded_log(value: int) -> int:
    return round(FREEDOM_UNIT * math.log(value))


_LOG_2 = _rounded_log(2)
