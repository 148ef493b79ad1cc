"""The scores of attention formulas and their gradients as functions of one score, for FlexAttention's backward.

The gradient of a score is computed by the operators of the graph's own backward, so it is what the graph computes even
where that is no derivative. The backward computes weights again from the scores less the maximum of their row, and from
the log-sum-exp of these: so they are exact where all scores of a row are a large negative number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.attention.elements import Coordinate, ScalarGraph, UnsupportedScoresError
from fxwrap.fx_passes.attention.key_bounds import needs_reference
from fxwrap.fx_passes.attention.nodes import ELEMENTWISE, is_cast
from fxwrap.fx_passes.attention.operands import AttentionOperands
from fxwrap.fx_passes.attention.parts import AttentionBackward, AttentionFormula
from fxwrap.fx_passes.attention.scores import BiasedScores, ScoreFunctionBuilder, ScoreFunctions
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import size_hint
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import FakeTensor, flex_scatter_operator, in_fake_mode

_aten = torch.ops.aten

_LONG = 512
"""Rows and keys from which bounds save more than a kernel costs."""


@dataclass(frozen=True)
class ScoreGradients:
    """The functions of a formula and of its backward as graphs on scalars.

    Fields:
        forward: the functions of the forward, and what all functions read. The others read the maxima, too, which are
            the last buffer.
        relative_score_mod: the score less the maximum of its row.
        joint: the gradient of the score before `score_mod`, from that of the modified score; None for each index, and
            the matrices of gradients that others read.
        backward_weight_mod: the factor of weights in the backward, 0 for dropped ones; None without factors.
        backward_mask_mod: the bounds of keys in the backward, which are those of the forward without `reads_least`.
        reads_least: whether these bounds read the least maximum of the rows of each head, as their last buffer.
    """

    forward: ScoreFunctions
    relative_score_mod: GraphModule
    joint: GraphModule
    backward_weight_mod: GraphModule | None
    backward_mask_mod: GraphModule
    reads_least: bool

    @property
    def matrices(self) -> tuple[FakeTensor, ...]:
        """The fake values of the matrices."""
        results: Any = self.joint.graph.output_node().args[0]
        return tuple([item.meta["val"] for item in results[1:] if item is not None])


def score_gradients(
    formula: AttentionFormula, operands: AttentionOperands, fakes: NodeValues, written: Set[int]
) -> ScoreGradients:
    """Returns the functions of a formula with a backward. Raises UnsupportedScoresError."""
    assert formula.backward is not None
    return _Builder(formula, operands, fakes, written).gradients(formula.backward)


def biased_score_gradients(
    query: FakeTensor, bias: FakeTensor, keys: int, dtype: torch.dtype | None
) -> tuple[GraphModule, GraphModule]:
    """Returns the functions of a backward of scores to which a bias is added, with bias and maxima as buffers.

    These are the score less the maximum of its row, 0 where that is minus infinity, and the gradient of the score
    with None for each index and a matrix of gradients of the bias in a dtype, unless that is None. All sizes are
    static.
    """
    return _BiasedGradients(query).relative(bias), _BiasedGradients(query).joint(bias, keys, dtype)


def _less_maximum(graph: ScalarGraph, score: Node, maxima: Node, zeroes_fully_masked_rows: bool) -> Node:
    """Returns a score less the maximum of its row.

    That of a fully masked row is minus infinity if the weights of such rows are 0, and NaN otherwise.
    """
    indices = [graph.indices[name] for name in ("batch", "head", "row")]
    maximum = graph.call(_aten.index.Tensor, maxima, indices)
    if zeroes_fully_masked_rows:
        is_masked = graph.call(_aten.eq.Scalar, maximum, -math.inf)
        maximum = graph.call(_aten.masked_fill.Scalar, maximum, is_masked, 0.0)
    return graph.call(_aten.sub.Tensor, score, maximum)


class _BiasedGradients(BiasedScores):
    def relative(self, bias: FakeTensor) -> GraphModule:
        """Returns the graph of the score less the maximum."""
        value, maxima = self.biased(bias), self._maxima()
        module, _ = self.finish_graph(_less_maximum(self, value, maxima, zeroes_fully_masked_rows=True))
        return module

    def joint(self, bias: FakeTensor, keys: int, dtype: torch.dtype | None) -> GraphModule:
        """Returns the graph of the gradient, and of its matrix in a dtype."""
        gradient = self.placeholder("gradient", self.dtype)
        self.placeholder("bias", bias)
        self._maxima()
        if dtype is None:
            self.graph.output((gradient, *[None] * len(self.indices)))
            return GraphModule({}, self.graph)
        scatter = flex_scatter_operator()
        assert scatter is not None
        value = gradient if dtype == self.dtype else self.call(_aten._to_copy.default, gradient, dtype=dtype)
        matrix = self.call(scatter, [*self.like.shape[:3], keys], [*self.indices.values()], value)
        self.graph.output((gradient, *[None] * len(self.indices), matrix))
        return GraphModule({}, self.graph)

    def _maxima(self) -> Node:
        with in_fake_mode(self.mode):
            fake: FakeTensor = torch.empty(self.like.shape[:3], dtype=self.dtype, device=self.device)  # type: ignore[assignment]
        return self.placeholder("maxima", fake)


class _Builder(ScoreFunctionBuilder):
    def gradients(self, backward: AttentionBackward) -> ScoreGradients:
        """Returns the functions; all are parts of one graph."""
        scales = self._scales(backward)
        self.folds_scale = bool(scales)
        self.inner = backward.inner
        start = self.placeholder("gradient", self.dtype)
        passed = self.modified_score()
        self.folds_scale = False
        value = passed[self.formula.scores[-1]]
        first, *following = backward.grad_scores
        passed[first] = gradient = start
        for node in following:
            if node in scales:  # the kernel multiplies gradients of queries and keys
                passed[node] = gradient
                continue
            if backward.logsumexp is None or node is not backward.logsumexp[1]:  # the kernel adds that gradient
                for item in node.all_input_nodes:
                    self._add_side(item, passed)
                gradient = self.step(node, gradient, passed)
            passed[node] = gradient
        factor, sink = self.weight_factor(), self.sink_logit()
        maxima, least = self._statistic("maxima", 3), None
        if sink is None and self._is_long() and needs_reference(self, value):
            least = self._statistic("least", 2)
        relative = _less_maximum(self, value, maxima, self.formula.zeroes_fully_masked_rows)
        empty = [None] * len(self.indices)
        matrices = [self._matrix(passed[node], self.fakes[node].dtype, maxima) for node in backward.matrices]
        of_backward = () if least is None else (least,)
        of_indices = (self.score, start, maxima, *of_backward)
        score_mod = self.part([value], (start, maxima, *of_backward))
        relative_score_mod = self.part([relative], (start, *of_backward))
        joint, mask_mod = self.part([gradient, *empty, *matrices], of_backward), self.mask_mod(value, sink, of_indices)
        weight_mods = [self.optional_part(factor, unread) for unread in (of_indices, (self.score, start, *of_backward))]
        sink_mod, reads = self.optional_part(sink, of_indices), self.read_tensors
        forward = ScoreFunctions(score_mod, mask_mod, self.scale, reads, sink_mod, weight_mods[0])
        if least is not None:
            reference = self.call(_aten.index.Tensor, least, [self.indices["batch"], self.indices["head"]])
            mask_mod = self.mask_mod(value, reference, (self.score, start, maxima))
        return ScoreGradients(forward, relative_score_mod, joint, weight_mods[1], mask_mod, least is not None)

    def _scales(self, backward: AttentionBackward) -> tuple[Node, ...]:
        """Returns the operators that multiply the gradient by the scale of the scores last; none where others read it.

        The scores are multiplied by the same scale first, and the backward reads only what follows.
        """
        formula = self.formula
        if self.operands.factors or formula.query_key.target is _aten.baddbmm.default:
            return ()
        first, last = self._leading_scales(formula.scores[1:]), self._leading_scales(backward.grad_scores[:0:-1])
        if not first or math.prod(first.values()) != math.prod(last.values()):
            return ()
        raw = {*formula.scores[: formula.scores.index([*first][-1])]}
        own = {*backward.inner, *backward.grad_scores}
        scaled = backward.grad_scores[backward.grad_scores.index([*last][-1]) :]
        is_read = any(not own.isdisjoint(node.users) for node in raw) or not {*backward.matrices}.isdisjoint(scaled)
        return () if is_read else tuple(last)

    def _leading_scales(self, nodes: Sequence[Node]) -> dict[Node, float]:
        """Returns the first operators that multiply by finite numbers, with these; views and casts may be between."""
        scales = dict[Node, float]()
        for node in nodes:
            number: Any = node.args[1] if name_of(node) in ("mul", "div") and len(node.args) == 2 else None
            if type(number) in (int, float) and math.isfinite(number) and number != 0 and not node.kwargs:
                scales[node] = 1 / number if name_of(node) == "div" else number
            elif name_of(node) in ELEMENTWISE and not is_cast(node, self.fakes):
                break
        return scales

    def _is_long(self) -> bool:
        """Whether bounds of keys that depend on maxima save more than the kernel costs that reduces these."""
        sizes = self.fakes[self.formula.query_key].shape[-2:]
        return min(map(size_hint, sizes)) >= _LONG

    def _matrix(self, value: Node, dtype: torch.dtype, maxima: Node) -> Node:
        """Returns a tensor of (batch, heads, rows, keys) with a value of each score, in a dtype."""
        scatter = flex_scatter_operator()
        if scatter is None:
            raise UnsupportedScoresError("torch has no operator for gradients of its scores")
        leading = [self._size(size, maxima, dim) for dim, size in enumerate(self.scalars[maxima].shape)]
        sizes = [*leading, self._key_count()]
        return self.call(scatter, sizes, [*self.indices.values()], self._cast(value, dtype))

    def _size(self, size: Any, buffer: Node, dim: int) -> Any:
        """Returns a size that is a number, or that of a buffer."""
        return size if type(size) is int else self.call(_aten.sym_size.int, buffer, dim)

    def _key_count(self) -> Any:
        """Returns the number of keys, that of a buffer if it is symbolic."""
        product = self.formula.query_key
        size = self.fakes[product].shape[-2 if product in self.formula.transposed else -1]
        of_keys = [
            buffer for (_, coordinates), buffer in self.reads.items() if coordinates[-1:] == (Coordinate("key"),)
        ]
        if type(size) is not int and not of_keys:
            raise UnsupportedScoresError("a gradient of its scores, whose number of keys is symbolic, is read again")
        return size if type(size) is int else self._size(size, of_keys[0], self.scalars[of_keys[0]].ndim - 1)

    def _add_side(self, node: Node, passed: dict[Node, Node]) -> None:
        """Computes another value than the gradient that depends on the score."""
        if node in passed or node not in self.inner:
            return
        for item in node.all_input_nodes:
            self._add_side(item, passed)
        source = next(item for item in node.all_input_nodes if item in passed)
        passed[node] = self.step(node, passed[source], passed)

    def _statistic(self, name: str, rank: int) -> Node:
        """Adds a last buffer of numbers of (batch, heads, rows), or of the first `rank` of these."""
        sizes = self.operands.score_sizes(self.fakes)[:rank]
        with in_fake_mode(self.mode):
            fake: FakeTensor = torch.empty(sizes, dtype=self.dtype, device=self.device)  # type: ignore[assignment]
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        if first is None:
            return self.placeholder(name, fake)
        with self.graph.inserting_before(first):
            return self.placeholder(name, fake)
