"""Attention written as its formula, found by data flow: softmax(scores) @ value, scores = f(query @ key).

The search starts at each softmax over the last dimension. Upwards, the scores are one matmul and operators of single
elements around it: scale, bias, mask, casts. Downwards, the weights reach the left operand of a matmul. Between them
are only operators that keep the order of elements, such as views that split or merge leading dimensions, and
transpositions of rows and keys: transposed scores are a matmul of keys and queries, whose softmax is over the last
dimension but one, and transposed weights are the right operand of a matmul. Each intermediate result has no other
reader, so that nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.backward import UnsupportedBackwardError, find_backward
from fxwrap.fx_passes.attention.nodes import (
    ALIASES,
    ELEMENTWISE,
    element_count,
    is_cast,
    is_finite,
    is_last_dimension,
    is_row_logsumexp,
    is_tensor,
    moves_matrices,
    row_reduction,
    scales,
    sizes_of,
    transposes_matrices,
)
from fxwrap.fx_passes.attention.parts import AttentionFormula, Dropout
from fxwrap.fx_passes.attention.sinks import Sink
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import OpOverload

_aten = torch.ops.aten

_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten.baddbmm.default})


@dataclass(frozen=True)
class NearMiss:
    """A softmax between two matmuls that is not recognised as attention, and why."""

    softmax: Node
    reason: str


def find_attention(nodes: Sequence[Node], fakes: NodeValues) -> tuple[list[AttentionFormula], list[NearMiss]]:
    """Returns the attention formulas of a graph, and what nearly is one."""
    formulas: list[AttentionFormula] = []
    missed: list[NearMiss] = []
    for node in nodes:
        softmax = _softmax_ending_at(node, fakes)
        if softmax is None:
            continue
        result = _Search(softmax.without_sink(fakes), fakes).result()
        if isinstance(result, AttentionFormula):
            formulas.append(result)
        elif result is not None:
            missed.append(NearMiss(node, result))
    return formulas, missed


# --- softmax ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Softmax:
    """A softmax over the last dimension: its scores, the nodes that compute it, the last of which has the weights.

    With a sink, its logits are concatenated to the scores, and the weights have a column for them. A transposed one is
    over the last dimension but one.
    """

    operand: Node
    nodes: tuple[Node, ...]
    zeroes_fully_masked_rows: bool = False
    sink: Sink | None = None
    is_transposed: bool = False

    def without_sink(self, fakes: NodeValues) -> _Softmax:
        """Returns the softmax of the scores to which the logits of a sink are concatenated, if they are."""
        if self.is_transposed:
            return self
        node, nodes = self.operand, list[Node]()
        while is_tensor(node, fakes) and (is_cast(node, fakes) or name_of(node) in ALIASES):
            nodes.insert(0, node)
            node = node.args[0]  # type: ignore[assignment]
        sink = Sink.of(node, fakes)
        if sink is None:
            return self
        return replace(self, operand=sink.scores, nodes=(sink.concatenation, *nodes, *self.nodes), sink=sink)


def _softmax_ending_at(node: Node, fakes: NodeValues) -> _Softmax | None:
    """Returns the softmax whose weights a node computes."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not is_tensor(node, fakes):
        return None
    name, rank = name_of(node), fakes[node].ndim
    if name in ("softmax", "safe_softmax"):
        arguments: Any = node.args
        if rank < 2 or arguments[1] not in (-2, -1, rank - 2, rank - 1):
            return None
        is_transposed = not is_last_dimension(arguments[1], rank)
        return _Softmax(arguments[0], (node,), name == "safe_softmax", is_transposed=is_transposed)
    match name:
        case "div" if rank >= 2:
            return _normalised_exponentials(node, fakes)
        case "exp" if rank >= 2:
            return _shifted_exponentials(node, ("logsumexp",), fakes)
        case _:
            return None


def _normalised_exponentials(node: Node, fakes: NodeValues) -> _Softmax | None:
    """Returns e / sum(e) of e = exp(x - max(x))."""
    weights, divisor = node.args[:2]
    total = row_reduction(divisor, ("sum",), fakes)
    if total is None or total[0] is not weights or name_of(total[0]) != "exp":
        return None
    shifted = _shifted_exponentials(total[0], ("amax", "max"), fakes)
    return None if shifted is None else replace(shifted, nodes=(*shifted.nodes, *total[1], node))


def _shifted_exponentials(node: Node, reductions: Sequence[str], fakes: NodeValues) -> _Softmax | None:
    """Returns exp(x - y) for a reduction y of the rows of x."""
    difference = node.args[0]
    if not isinstance(difference, Node) or name_of(difference) != "sub" or difference.kwargs:
        return None
    operand, shift = difference.args
    reduced = row_reduction(shift, reductions, fakes)
    if reduced is None or reduced[0] is not operand:
        return None
    return _Softmax(reduced[0], (*reduced[1], difference, node))


# --- data flow --------------------------------------------------------------------------------------------------------


class _Search:
    """The search of attention around one softmax."""

    def __init__(self, softmax: _Softmax, fakes: NodeValues) -> None:
        self.softmax = softmax
        self.fakes = fakes
        self.weights = softmax.nodes[-1]

    def result(self) -> AttentionFormula | str | None:
        """Returns the formula; the reason why a softmax between matmuls is none; None for other softmaxes."""
        formula = self._forward()
        if not isinstance(formula, AttentionFormula):
            return formula
        try:
            backward = find_backward(formula, self.fakes)
        except UnsupportedBackwardError as error:
            return str(error)
        if backward is not None:
            formula = replace(formula, backward=backward, transposed=formula.transposed | backward.transposed)
        return self._decline_reason(formula) or formula

    def _forward(self) -> AttentionFormula | str | None:
        """Returns the formula without a backward; a reason or None as `result` does."""
        scores = self._path(self.softmax.operand, 0)
        below = self._below() if scores is not None else None
        if scores is None or below is None:
            return None
        passed, output = below
        if isinstance(output, str):
            return output
        transposed = self._transposed(scores, passed)
        if transposed is None:
            return "its scores are reshaped across rows and keys"
        dropout = next((item for node in passed if (item := Dropout.of(node)) is not None), None)
        if dropout is not None and dropout.output in transposed:
            transposed |= {dropout.mask}
        zeroes = self._zeroes_fully_masked_rows(scores, passed)
        if zeroes is None:
            return "it replaces weights of rows that may be NaN"
        formula = AttentionFormula(
            scores=tuple(scores),
            softmax=self.weights,
            passed=passed,
            output=output,
            inner=(*scores[1:], *self.softmax.nodes, *passed),
            zeroes_fully_masked_rows=zeroes,
            transposed=transposed,
            dropout=dropout,
            sink=self.softmax.sink,
            logsumexp=self._logsumexp(scores),
        )
        if output.args[1 if formula.is_output_transposed else 0] is not formula.weights:
            return "its weights are no left operand of a matmul"
        return formula

    def _decline_reason(self, formula: AttentionFormula) -> str | None:
        """Returns the reason why no kernel can compute a formula; None if one can."""
        backward, dropout = formula.backward, formula.dropout
        if dropout is not None and backward is None:
            return DROPOUT
        if backward is not None and backward.transposed and 1 in self._last_two(self.softmax.operand):
            return "its scores are transposed vectors, and it has a backward"
        nodes = [formula.query_key, *formula.inner, *([dropout.mask] if dropout is not None else [])]
        readers = {*nodes, formula.output, formula.logsumexp}
        readers |= {*backward.inner, *backward.results} if backward is not None else set()
        for node in nodes:
            if not readers.issuperset(node.users):
                return "its weights are read again" if node in self.softmax.nodes else "its scores are read again"
        if formula.zeroes_fully_masked_rows and formula.sink is not None:
            return "its sink is that of a safe softmax"
        return None

    def _logsumexp(self, scores: Sequence[Node]) -> Node | None:
        """Returns the log-sum-exp of rows of the scores that the softmax reads; None if the graph has none."""
        for node in reversed(scores) if self.softmax.sink is None and not self.softmax.is_transposed else ():
            for user in node.users:
                if user not in self.softmax.nodes and is_row_logsumexp(user, self.fakes):
                    return user
            if not is_cast(node, self.fakes) and name_of(node) not in ALIASES:
                break
        return None

    def _zeroes_fully_masked_rows(self, scores: Sequence[Node], passed: Sequence[Node]) -> bool | None:
        """Whether weights of fully masked rows are 0, not NaN; None where a mask replaces some of these that are NaN.

        A mask that fills scores with minus infinity, and weights with zeros, leaves no NaN.
        """
        safe = self.softmax.zeroes_fully_masked_rows
        masks = [item for node in passed if name_of(node) in ("masked_fill", "where") for item in node.args[:2]]
        if not masks:
            return safe
        last = scores[-1]
        is_filled = name_of(last) == "masked_fill" and bool(last.args[2] == -math.inf) and last.args[1] in masks
        finite = scores[:-1] if is_filled else scores
        if self.softmax.sink is not None or not all(is_finite(node, self.fakes) for node in finite):
            return None
        return safe or is_filled

    def _transposed(self, scores: Sequence[Node], passed: Sequence[Node]) -> frozenset[Node] | None:
        """Returns the nodes of scores and weights that have keys as rows; None where other matrices are transposed."""
        rows, keys = self._last_two(self.softmax.operand)[:: -1 if self.softmax.is_transposed else 1]
        is_vector = 1 in (rows, keys) and rows != keys  # whose transposition keeps the order of its elements
        if is_vector:
            tensors = [item for item in (*scores, *passed) if is_tensor(item, self.fakes)]  # and no call of dropout
            result = {item for item in tensors if self._last_two(item) == (keys, rows)}
        else:
            result, moved = self._orientations(scores, passed)
            for node, is_transposed in moved.items():
                sizes = tuple([size for size in sizes_of(node, self.fakes) if size != 1])
                if sizes[-2:] != ((keys, rows) if is_transposed else (rows, keys)):
                    return None
        fixed = self._fixed_shapes(scores, passed)
        is_fixed = all(self._last_two(node) == ((keys, rows) if node in result else (rows, keys)) for node in fixed)
        return frozenset(result) if is_fixed else None

    def _orientations(self, scores: Sequence[Node], passed: Sequence[Node]) -> tuple[set[Node], dict[Node, bool]]:
        """Returns the nodes with keys as rows, by transpositions between them and the softmax, and these calls.

        Each call comes with whether its result has keys as rows.
        """
        result, moved = set[Node](), dict[Node, bool]()
        is_transposed = self.softmax.is_transposed
        for node in reversed(scores):
            result |= {node} if is_transposed else set()
            if transposes_matrices(node, self.fakes):
                moved[node] = is_transposed
                is_transposed = not is_transposed
        is_transposed = self.softmax.is_transposed
        for node in (self.weights, *passed):
            if node is not self.weights and transposes_matrices(node, self.fakes):
                is_transposed = not is_transposed
                moved[node] = is_transposed
            result |= {node} if is_transposed else set()
        return result, moved

    def _fixed_shapes(self, scores: Sequence[Node], passed: Sequence[Node]) -> list[Node]:
        """Returns the nodes that must have rows and keys as their last dimensions."""
        dropout = {item.output for node in passed if (item := Dropout.of(node)) is not None}
        combining = [node for node in (*scores[1:], *passed) if len(node.all_input_nodes) > 1 and node not in dropout]
        return [scores[0], *combining, (self.weights, *passed)[-1]]

    def _last_two(self, node: Node) -> tuple[object, ...]:
        return tuple(sizes_of(node, self.fakes)[-2:])

    def _path(self, node: object, depth: int) -> list[Node] | None:
        """Returns the nodes from a matmul to a node of the scores."""
        if not isinstance(node, Node) or not is_tensor(node, self.fakes) or depth > _MAX_DEPTH:
            return None
        if node.target in _PRODUCTS:
            return [node]
        operands: Sequence[Any] = ()
        if moves_matrices(node, self.fakes):
            operands = node.args[:1]
        elif isinstance(node.target, OpOverload) and name_of(node) in ELEMENTWISE:
            size = element_count(node, self.fakes)
            arguments: Any = node.args
            operands = [
                item for item in arguments
                if is_tensor(item, self.fakes) and self.fakes[item].dtype.is_floating_point
                and element_count(item, self.fakes) == size
            ]  # fmt: skip
        for operand in operands:
            path = self._path(operand, depth + 1)
            if path is not None:
                return [*path, node]
        return None

    def _below(self) -> tuple[tuple[Node, ...], Node | str] | None:
        """Returns the nodes between the weights and the matmul with values, and that matmul or why there is none."""
        return self._product_after(self.weights, ())

    def _product_after(self, node: Node, passed: tuple[Node, ...]) -> tuple[tuple[Node, ...], Node | str] | None:
        users = [user for user in node.users if user.op != "output"]
        moved = [item for item in passed if transposes_matrices(item, self.fakes)]
        own = (self.softmax.is_transposed + len(moved)) % 2  # transposed weights are a right operand
        products = [user for user in users if user.target in _PRODUCTS]
        product = next((user for user in products if user.args[own] is node), products[0] if products else None)
        transposes = [user for user in users if transposes_matrices(user, self.fakes)]
        if product is not None and (product.args[own] is node or not transposes):  # a backward reads weights, too
            is_operand = product.target is not _aten.baddbmm.default and product.args[0] is not product.args[1]
            return passed, product if is_operand else "its weights are no left operand of a matmul"
        dropout = next((item for user in users if (item := Dropout.of(user)) is not None), None)
        if dropout is not None:
            return self._product_after(dropout.output, (*passed, dropout.node, dropout.output))
        if any(_drops_out(user, node) for user in users):
            return passed, DROPOUT
        for user in users:
            passes = moves_matrices(user, self.fakes) or is_cast(user, self.fakes) or self._drops_sink(user, passed)
            passes |= scales(user, node, self.fakes)
            is_near = len(passed) < _MAX_DEPTH
            result = self._product_after(user, (*passed, user)) if passes and is_near else None
            if result is not None:
                return result
        return None

    def _drops_sink(self, node: Node, passed: Sequence[Node]) -> bool:
        """Whether a call drops the weights of a sink, before a dropout."""
        sink = self.softmax.sink
        is_first = not any(Dropout.of(item) for item in passed)
        return sink is not None and is_first and sink.selects_scores(node, self.fakes)


DROPOUT = "its weights have dropout"
"""The reason why attention with dropout stays: no kernel reads its mask, or the formula is faster."""

_RANDOM = frozenset({"bernoulli", "native_dropout", "rand", "rand_like", "uniform"})


def _drops_out(node: Node, weights: Node) -> bool:
    """Whether a call multiplies weights by random numbers, or drops some of them."""
    if name_of(node) in ("dropout", "native_dropout"):
        return True
    noise = [item for item in node.all_input_nodes if item is not weights] if name_of(node) in ("mul", "where") else []
    for _ in range(_MAX_NOISE_OPERATORS):
        if any(name_of(item) in _RANDOM for item in noise):
            return True
        noise = [operand for item in noise for operand in item.all_input_nodes]
    return False


_MAX_NOISE_OPERATORS = 4
"""The largest number of operators between random numbers and the factor of weights."""

_MAX_DEPTH = 24
"""The largest number of operators between scores and softmax."""
