"""Attention in a graph, as nodes: its formula, the dropout of its weights, and its backward."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.sinks import Sink

_aten = torch.ops.aten


@dataclass(frozen=True)
class GroupSums:
    """The sums of gradients of repeated heads of keys and values over the query heads of each group.

    Fields:
        group: the number of query heads of a group.
        grad_key, grad_value: the sums, (batch, key heads, keys, width), perhaps with a dimension 2 of size 1; None
            where the gradient is unused.
        inner: the nodes from the matmuls to the sums, without these.
    """

    group: int
    grad_key: Node | None
    grad_value: Node | None
    inner: frozenset[Node]


@dataclass(frozen=True)
class AttentionBackward:
    """The backward of attention, as nodes of a graph.

    Fields:
        grad_output: the gradient of the matmul of weights and values, as the backward's matmuls read it.
        grad_scores: the nodes from the softmax's backward to the gradient of the matmul of queries and keys, both
            included.
        grad_query, grad_key, grad_value: the gradients of the operands of the formula's matmuls; None where unused.
        matrices: the nodes of `grad_scores` that others read too, such as sums that are the gradients of a bias.
        inner: the nodes of the backward, without gradients of operands. Only the backward reads them, but for
            `matrices`.
        group_sums: sums of the gradients of keys and values, if they alone read these.
        transposed: the gradients of operands that have columns first, as that of transposed keys; and the nodes that
            compute gradients of scores that have keys as rows.
        grad_sink: the gradient of the logits of a sink; None where unused.
        logsumexp: the gradient of the log-sum-exp of each row, with the node of `grad_scores` that adds its product
            with the weights; None where unused.
    """

    grad_output: Node
    grad_scores: tuple[Node, ...]
    grad_query: Node | None
    grad_key: Node | None
    grad_value: Node | None
    matrices: tuple[Node, ...]
    inner: frozenset[Node]
    transposed: frozenset[Node]
    group_sums: GroupSums | None = None
    grad_sink: Node | None = None
    logsumexp: tuple[Node, Node] | None = None

    @property
    def results(self) -> tuple[Node, ...]:
        """The nodes that others read: gradients of operands, and of scores."""
        gradients = (self.grad_query, self.grad_key, self.grad_value, self.grad_sink)
        return (*[node for node in gradients if node is not None], *self.matrices)

    @property
    def group(self) -> int:
        """The number of query heads whose gradients of keys and values are summed."""
        return 1 if self.group_sums is None else self.group_sums.group

    def of_key_heads(self) -> AttentionBackward:
        """Returns the backward whose gradients of keys and values are the sums over groups, without repeated heads."""
        sums = self.group_sums
        if sums is None:
            return self
        inner = self.inner | sums.inner
        return replace(self, grad_key=sums.grad_key, grad_value=sums.grad_value, inner=inner, group_sums=None)


@dataclass(frozen=True)
class Dropout:
    """A call that drops some weights.

    Fields:
        node: the call of `native_dropout`.
        output, mask: its results: the other weights times `scale`, and which ones these are.
    """

    node: Node
    output: Node
    mask: Node

    @classmethod
    def of(cls, node: Node) -> Dropout | None:
        """Returns the parts of a call of `native_dropout` in training, both results of which are read."""
        if node.target is not _aten.native_dropout.default or node.args[2] is not True or not 0 < node.args[1] < 1:  # type: ignore[operator]
            return None
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        return cls(node, results[0], results[1]) if {*results} == {0, 1} and len(node.users) == 2 else None

    @property
    def weights(self) -> Node:
        """The weights before."""
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def scale(self) -> float:
        """The factor of weights that stay."""
        return 1.0 / self.kept_probability

    @property
    def kept_probability(self) -> float:
        """The probability that a weight stays."""
        probability: Any = self.node.args[1]
        return 1.0 - probability  # type: ignore[no-any-return]


@dataclass(frozen=True)
class AttentionFormula:
    """Attention, as nodes of a graph.

    Fields:
        scores: the nodes from the matmul of queries and transposed keys to the operand of the softmax, both included.
        softmax: the node of the weights.
        passed: the nodes between `softmax` and `output`: views, casts, dropout, and factors of weights.
        output: the matmul of weights and values.
        inner: the nodes between `query_key` and `output`, which only they read.
        zeroes_fully_masked_rows: whether the weights of a row are 0 where all its scores are minus infinity, not NaN.
        transposed: the nodes of scores, weights and their gradients that have keys as rows. If `query_key` is one,
            queries are its right operand.
        dropout: the call that drops some weights, or None; only with a backward.
        sink: the logits that are concatenated to the scores before the softmax, or None.
        logsumexp: the log-sum-exp of each row of the scores, which others read, or None.
        backward: the backward in the same graph, or None.
    """

    scores: tuple[Node, ...]
    softmax: Node
    passed: tuple[Node, ...]
    output: Node
    inner: tuple[Node, ...]
    zeroes_fully_masked_rows: bool
    transposed: frozenset[Node]
    dropout: Dropout | None
    sink: Sink | None
    logsumexp: Node | None
    backward: AttentionBackward | None = None

    @property
    def query_key(self) -> Node:
        """The matmul of queries and transposed keys."""
        return self.scores[0]

    @property
    def weights(self) -> Node:
        """The operand of `output`, a view, a cast or a product of the weights."""
        return (self.softmax, *self.passed)[-1]

    @property
    def is_output_transposed(self) -> bool:
        """Whether `output` is the matmul of transposed values and transposed weights."""
        return self.weights in self.transposed
