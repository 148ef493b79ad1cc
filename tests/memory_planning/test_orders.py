"""PQ-trees stand for exactly the orders in which the chosen leaves are consecutive."""

from __future__ import annotations

import math
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from fxwrap.memory_planning.orders import FREEDOM_UNIT, Node, Tree, digest, freedom, gather, leaves, mix, node_of

COUNT = 5
LEAVES = tuple(range(COUNT))
SETS = st.lists(st.frozensets(st.sampled_from(LEAVES), min_size=2), max_size=4)


def orders_of(tree: Tree) -> set[tuple[int, ...]]:
    if not isinstance(tree, Node):
        return {(tree,)}
    parts = [orders_of(child) for child in tree.children]
    numbers = range(len(parts))
    ways = [tuple(numbers), tuple(numbers)[::-1]] if tree.is_ordered else list(permutations(numbers))
    orders: set[tuple[int, ...]] = set()
    for way in ways:
        joined: set[tuple[int, ...]] = {()}
        for number in way:
            joined = {(*before, *after) for before in joined for after in parts[number]}
        orders |= joined
    return orders


def is_consecutive(order: tuple[int, ...], chosen: frozenset[int]) -> bool:
    positions = [order.index(leaf) for leaf in chosen]
    return max(positions) - min(positions) == len(chosen) - 1


@given(sets=SETS)
def test_gathering_leaves_the_orders_with_consecutive_leaves(sets: list[frozenset[int]]) -> None:
    tree: Tree = node_of(list(LEAVES))
    expected = set(permutations(LEAVES))
    for chosen in sets:
        expected = {order for order in expected if is_consecutive(order, chosen)}
        gathered = gather(tree, chosen, None)
        assert (gathered is None) == (not expected)
        if gathered is None:
            return
        tree = gathered.tree
        assert orders_of(tree) == expected
        assert math.isclose(freedom(tree), FREEDOM_UNIT * math.log(len(expected)), abs_tol=COUNT)


@given(sets=SETS, last=st.frozensets(st.sampled_from(LEAVES), min_size=1))
def test_replaced_leaves_can_be_put_back(sets: list[frozenset[int]], last: frozenset[int]) -> None:
    """`order` and `anchor` give one of the orders before from any order after a replacement."""
    tree: Tree = node_of(list(LEAVES))
    for chosen in sets:
        gathered = gather(tree, chosen, None)
        tree = tree if gathered is None else gathered.tree
    replaced = gather(tree, last, COUNT)
    if replaced is None:
        return
    for order in orders_of(replaced.tree):
        position = order.index(COUNT)
        is_turned = replaced.anchor >= 0 and (order.index(replaced.anchor) < position) != replaced.is_anchor_left
        before = replaced.order[::-1] if is_turned else replaced.order
        assert (*order[:position], *before, *order[position + 1 :]) in orders_of(tree)


@given(sets=SETS)
def test_equal_digests_for_equal_orders(sets: list[frozenset[int]]) -> None:
    trees: list[Tree] = []
    for chosen_sets in (sets, sets[::-1]):
        tree: Tree = node_of(list(LEAVES))
        for chosen in chosen_sets:
            gathered = gather(tree, chosen, None)
            if gathered is None:
                return
            tree = gathered.tree
        trees.append(tree)
    assert digest(trees[0], mix) == digest(trees[1], mix)
    assert sorted(leaves(trees[0])) == list(LEAVES)
