"""The backward of attention written as its formula, found by data flow in a graph that holds forward and backward.

The search starts at the backward of the softmax. Upwards, the gradient of the weights is the matmul of the output's
gradient and transposed values. Downwards, operators of single elements lead to the gradient of the scores' matmul,
whose readers are the matmuls that compute the gradients of queries and keys. The gradient of values is the matmul of
transposed weights and the output's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.nodes import (
    ALIASES,
    ELEMENTWISE,
    element_count,
    is_cast,
    is_last_dimension,
    is_tensor,
    is_zero,
    keeps_order,
    moves_matrices,
    scales,
    sizes_of,
    swaps_last_two,
    transposes_matrices,
    without_aliases,
)
from fxwrap.fx_passes.attention.parts import AttentionBackward, AttentionFormula, GroupSums
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.prepared_graph import NodeValues

_aten = torch.ops.aten

_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default})


class UnsupportedBackwardError(Exception):
    """A backward that is none of attention alone; the message is the reason."""


def find_backward(forward: AttentionFormula, fakes: NodeValues) -> AttentionBackward | None:
    """Returns the backward of a formula; None if the graph has none. Raises UnsupportedBackwardError."""
    return _Search(forward, fakes).result()


class _Search:
    """The search of one backward.

    Fields:
        inner, transposed: those of the `AttentionBackward`, so far.
        grad_sink, grad_logsumexp: the gradients of a sink's logits and of the log-sum-exp, if the search has passed
            them.
    """

    def __init__(self, forward: AttentionFormula, fakes: NodeValues) -> None:
        self.forward = forward
        self.fakes = fakes
        self.inner: set[Node] = set()
        self.transposed: set[Node] = set()
        self.grad_sink: Node | None = None
        self.grad_logsumexp: tuple[Node, Node] | None = None

    def result(self) -> AttentionBackward | None:
        forward = self.forward
        weights = self._aliases(forward.softmax)
        starts = [
            user for node in weights for user in node.users
            if user.target is _aten._softmax_backward_data.default and user.args[1] is node
        ]  # fmt: skip
        if not starts:
            return None
        start, rank = starts[0], self.fakes[starts[0]].ndim
        dim = -2 if forward.softmax in forward.transposed else -1
        if len(starts) > 1 or start.args[2] not in (dim, rank + dim):
            raise UnsupportedBackwardError("its weights have several gradients")
        if forward.transposed and forward.sink is not None:
            raise UnsupportedBackwardError("its scores are transposed, and have a sink")
        grad_output = self._grad_output(start)
        path = self._grad_scores(start)
        grad_query, grad_key = self._grad_factors(path[-1])
        grad_value = self._grad_value(grad_output)
        self.inner |= {*weights[1:], *path}
        gradients = grad_query, grad_key, grad_value
        own = {*self.inner, *[node for node in (*gradients, self.grad_sink) if node is not None]}
        read_again = {node for node in self.inner if not own.issuperset(node.users)}
        if not read_again.issubset(path):
            raise UnsupportedBackwardError("a value that its backward computes from scores is read again")
        matrices = tuple([node for node in path if node in read_again])
        sums = self._group_sums(grad_key, grad_value)
        inner = frozenset(self.inner)
        return AttentionBackward(
            grad_output, tuple(path), *gradients, matrices, inner, frozenset(self.transposed), sums, self.grad_sink,
            self.grad_logsumexp,
        )  # fmt: skip

    def _aliases(self, node: Node) -> list[Node]:
        """Returns a node and what aliases it without a change of shape."""
        result = [node]
        for item in result:
            result.extend([user for user in item.users if name_of(user) in ALIASES])
        return result

    def _is_swapped(self, node: object, of: object) -> bool:
        """Whether a node transposes the last two dimensions of another one, or is what that one transposes."""
        pairs = [(without_aliases(node), without_aliases(of)), (without_aliases(of), without_aliases(node))]
        return any(
            isinstance(one, Node) and swaps_last_two(one, self.fakes) and without_aliases(one.args[0]) is other
            for one, other in pairs
        )

    def _grad_output(self, start: Node) -> Node:
        """Returns the gradient of the output that the matmul reads that computes the gradient of weights."""
        node: Any = start.args[0]
        is_transposed = self.forward.softmax in self.forward.transposed
        is_output_transposed = self.forward.is_output_transposed
        is_dropped, sink, scaled = self.forward.dropout is None, self.forward.sink, self._scaled_weights()
        while node.target not in _PRODUCTS:
            self.inner.add(node)
            if sink is not None and sink.pads_scores(node, self.fakes):
                node = node.args[0]
                continue
            if scaled and (operand := self._scaled_by(node, *scaled[0])) is not None:
                node = operand
                scaled.pop(0)
                continue
            factor = self._dropout_factor(node)
            if factor is not None:
                node, is_dropped = node.args[0], True
                self.inner |= factor
                continue
            is_transposed ^= transposes_matrices(node, self.fakes)
            if not is_tensor(node, self.fakes) or not (is_cast(node, self.fakes) or moves_matrices(node, self.fakes)):
                raise UnsupportedBackwardError("the gradient of its weights is no matmul")
            node = node.args[0]
        self.inner.add(node)
        if not is_dropped or scaled:
            raise UnsupportedBackwardError("the gradient of its weights has no dropout or factor")
        own = 1 if is_output_transposed else 0  # the operand of the output that weights are
        if is_transposed != is_output_transposed or not self._is_swapped(
            node.args[1 - own], self.forward.output.args[1 - own]
        ):
            raise UnsupportedBackwardError("the gradient of its weights is another matmul")
        return node.args[own]  # type: ignore[no-any-return]

    def _scaled_weights(self) -> list[tuple[Node, Node]]:
        """Returns the calls that multiply weights by factors, in order, with the weights before them."""
        weights = (self.forward.softmax, *self.forward.passed)
        pairs = zip(self.forward.passed, weights, strict=False)
        return [(node, before) for node, before in pairs if scales(node, before, self.fakes)]

    def _scaled_by(self, node: Node, scaled: Node, weights: Node) -> Node | None:
        """Returns the gradient that a call multiplies by the factors of weights; None for other calls."""
        arguments, factors = list(node.args), [item for item in scaled.args if item is not weights]
        if node.target is not scaled.target or len(arguments) != len(scaled.args):
            return None
        position = 0 if name_of(node) == "mul" else scaled.args.index(weights)  # autograd's product has it first
        operand: Any = arguments.pop(position)
        is_same = all(
            one == other or (is_zero(one, self.fakes) and is_zero(other, self.fakes))
            for one, other in zip(arguments, factors, strict=True)
        )
        return operand if is_same and scales(node, operand, self.fakes) else None

    def _dropout_factor(self, node: Node) -> set[Node] | None:
        """Returns the nodes of the factor of a gradient of dropped weights: the mask's, times the scale."""
        dropout, name = self.forward.dropout, name_of(node)
        if dropout is None or name not in ("mul", "native_dropout_backward"):
            return None
        if name == "native_dropout_backward":
            return set() if node.args[1] is dropout.mask and self._is_scale(node.args[2]) else None
        product: Any = node.args[1]
        if not isinstance(product, Node) or name_of(product) != "mul" or not self._is_scale(product.args[1]):
            return None
        cast: Any = product.args[0]
        is_mask = isinstance(cast, Node) and name_of(cast) == "to_copy" and cast.args[0] is dropout.mask
        return {product, cast} if is_mask else None

    def _is_scale(self, number: object) -> bool:
        dropout = self.forward.dropout
        return dropout is not None and isinstance(number, float) and math.isclose(number, dropout.scale, rel_tol=1e-6)

    def _grad_value(self, grad_output: Node) -> Node | None:
        """Returns the matmul of transposed weights and the output's gradient, or the transposed one."""
        weights, is_transposed = self.forward.weights, self.forward.is_output_transposed
        swapped = [
            (user, {user, alias}) for alias in self._aliases(weights) for user in alias.users
            if self._is_swapped(user, alias)
        ]  # fmt: skip
        if swaps_last_two(weights, self.fakes):
            swapped.append((weights.args[0], set()))  # type: ignore[arg-type]
        for node, inner in swapped:
            operands = (grad_output, node) if is_transposed else (node, grad_output)
            products = [user for user in node.users if user.target in _PRODUCTS and user.args == operands]
            if len(products) == 1:
                self.inner |= inner - {weights}
                self.transposed |= {*products} if is_transposed else set()
                return products[0]
        return None

    def _grad_scores(self, start: Node) -> list[Node]:
        """Returns the nodes from the softmax's backward to the gradient that matmuls of queries and keys read."""
        path, is_transposed = self._path_to_factors([start], {start}), self.forward.softmax in self.forward.transposed
        self.transposed |= {start} if is_transposed else set()
        if path is None:
            raise UnsupportedBackwardError("the gradient of its scores reaches no matmul of queries and keys")
        for node, following in pairwise(path):
            of_logsumexp = self._logsumexp_gradient(following, node)
            if of_logsumexp is not None:
                self.grad_logsumexp = of_logsumexp, following
            before = set(self.inner)
            self._add_sides(following, node, path)
            is_transposed ^= transposes_matrices(following, self.fakes)
            self.transposed |= {following, *(self.inner - before)} if is_transposed else set()
        if is_transposed != (self.forward.query_key in self.forward.transposed):
            raise UnsupportedBackwardError("the gradient of its scores is transposed")
        return path

    def _path_to_factors(self, path: list[Node], seen: set[Node]) -> list[Node] | None:
        """Returns the nodes that continue a path to one that a matmul with a factor of the scores reads, with it."""
        node = path[-1]
        if any(self._is_factor_gradient(user, node) for user in node.users):
            return path
        following = self._scores_of_sink(node) or [user for user in node.users if self._passes(user, node)]
        for user in following if len(path) <= _MAX_LENGTH else ():
            if user not in seen:
                seen.add(user)
                longer = self._path_to_factors([*path, user], seen)
                if longer is not None:
                    return longer
        return None

    def _is_factor_gradient(self, user: Node, gradient: Node) -> bool:
        """Whether a node is the matmul of a gradient of the scores and one of their factors."""
        factors = self.forward.query_key.args[-2:]
        return user.target in _PRODUCTS and any(
            user.args[side] is gradient and self._is_swapped(user.args[1 - side], factors[1 - side]) for side in (0, 1)
        )

    def _logsumexp_gradient(self, node: Node, gradient: Node) -> Node | None:
        """Returns the gradient g of the log-sum-exp l of rows of scores s in `gradient + g * exp(s - l)`."""
        total = self.forward.logsumexp
        if total is None or name_of(node) != "add" or node.kwargs or self.grad_logsumexp is not None:
            return None
        products: list[Any] = [item for item in node.all_input_nodes if item is not gradient and name_of(item) == "mul"]
        pairs = [(product, *pair) for product in products for pair in (product.args[:2], product.args[1::-1])]
        for product, exponential, result in pairs:
            nodes = self._exponential(exponential, total)
            if nodes:
                self.inner |= {product, *nodes}
                return result  # type: ignore[no-any-return]
        return None

    def _exponential(self, node: object, total: Node) -> list[Node]:
        """Returns the nodes of exp(s - l) for a log-sum-exp l of rows of s, without s and l; none for other nodes."""
        difference: Any = node.args[0] if isinstance(node, Node) and name_of(node) == "exp" else None
        if not isinstance(difference, Node) or name_of(difference) != "sub" or difference.kwargs:
            return []
        nodes: list[Any] = [node, difference]
        for operand, origin in zip(difference.args, (total.args[0], total), strict=True):
            item: Any = operand
            while item is not origin:
                if not is_tensor(item, self.fakes):
                    return []
                is_added = name_of(item) == "unsqueeze" and is_last_dimension(item.args[1], self.fakes[item].ndim)
                if name_of(item) not in ALIASES and not (is_added and origin is total):
                    return []
                nodes.append(item)
                item = item.args[0]
        return nodes

    def _scores_of_sink(self, node: Node) -> list[Node]:
        """Returns the gradient of scores in that of scores and the logits of a sink, whose gradient is noted."""
        sink, fakes = self.forward.sink, self.fakes
        if sink is None:
            return []
        self.grad_sink = next((user for user in node.users if sink.selects_logits(user, fakes)), self.grad_sink)
        return [user for user in node.users if sink.selects_scores(user, fakes)]

    def _passes(self, user: Node, node: Node) -> bool:
        """Whether an operator of single elements, a cast or a view passes a gradient on."""
        fakes = self.fakes
        if not is_tensor(user, fakes):
            return False
        if moves_matrices(user, fakes):
            return True
        same_size = element_count(user, fakes) == element_count(node, fakes)
        return name_of(user) in ELEMENTWISE and same_size and fakes[user].dtype.is_floating_point

    def _add_sides(self, node: Node, before: Node, path: Sequence[Node]) -> None:
        """Adds the operands of a node besides the path, as far as they are computed from scores or from the path."""
        for item in node.all_input_nodes:
            if item is not before:
                self._is_side({*self.forward.scores, *path}, item, 0)

    def _is_side(self, sources: Set[Node], node: Node, depth: int) -> bool:
        if node in sources:
            return True
        if depth > _MAX_LENGTH or not is_tensor(node, self.fakes):
            return False
        is_passed = keeps_order(node, self.fakes) or name_of(node) in ELEMENTWISE
        computed = [self._is_side(sources, item, depth + 1) for item in node.all_input_nodes] if is_passed else []
        if not any(computed):
            return False
        self.inner.add(node)
        return True

    def _grad_factors(self, grad: Node) -> tuple[Node | None, Node | None]:
        """Returns the gradients of queries and keys, of which that of the matmul's right operand is transposed."""
        factors = [user for user in grad.users if self._is_factor_gradient(user, grad)]
        grad_left, grad_right = [next((user for user in factors if user.args[side] is grad), None) for side in (0, 1)]
        self.transposed |= {grad_right} if grad_right is not None else set()
        return (grad_right, grad_left) if self.forward.query_key in self.forward.transposed else (grad_left, grad_right)

    def _group_sums(self, grad_key: Node | None, grad_value: Node | None) -> GroupSums | None:
        """Returns the sums of gradients of repeated heads; None if a gradient is read otherwise."""
        used = [node for node in (grad_key, grad_value) if node is not None]
        chains = [chain for node in used if (chain := self._group_sum(node, node in self.transposed)) is not None]
        if len(chains) != len(used) or not chains:
            return None
        groups = {sizes_of(chain[-2], self.fakes)[2] for chain in chains}
        group = groups.pop()
        if groups or type(group) is not int:
            return None
        of_node = {chain[0]: chain[-1] for chain in chains}
        inner = frozenset([node for chain in chains for node in chain[:-1]])
        of_key, of_value = [None if node is None else of_node[node] for node in (grad_key, grad_value)]
        return GroupSums(group, of_key, of_value, inner)

    def _group_sum(self, gradient: Node, is_transposed: bool) -> list[Node] | None:
        """Returns the nodes from a gradient to its sum over dimension 2 of (batch, key heads, group, keys, width)."""
        chain = [gradient]
        while len(chain) < _MAX_LENGTH and len(chain[-1].users) == 1:
            node = chain[-1]
            (user,) = node.users
            if not is_tensor(user, self.fakes):
                return None
            chain.append(user)
            if name_of(user) == "sum":
                is_whole = self.fakes[node].ndim == 5 and user.args[1:2] in (([2],), ([-3],)) and not user.kwargs
                return chain if is_whole and not is_transposed else None
            if swaps_last_two(user, self.fakes):
                is_transposed = not is_transposed
            elif not keeps_order(user, self.fakes) or self._last_two(user) != self._last_two(node):
                return None
        return None

    def _last_two(self, node: Node) -> list[Any]:
        return sizes_of(node, self.fakes)[-2:]


_MAX_LENGTH = 24
"""The largest number of operators between the softmax's backward and matmuls."""
