"""The scores of attention formulas as functions of one score and its indices, as FlexAttention's kernels take them.

Each operator between the matmul and the softmax becomes the same operator on scalars. Elements of biases and masks are
read, or computed from the indices (`elements.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxwrap.fx_passes.attention.elements import (
    Coordinate,
    Coordinates,
    ElementGraph,
    ReadTensor,
    ScalarGraph,
    UnsupportedScoresError,
)
from fxwrap.fx_passes.attention.key_bounds import key_bounds, needs_reference
from fxwrap.fx_passes.attention.nodes import ELEMENTWISE, sizes_of
from fxwrap.fx_passes.attention.operands import AttentionOperands
from fxwrap.fx_passes.attention.parts import AttentionFormula
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten
_AND = _aten.logical_and.default


@dataclass(frozen=True)
class ScoreFunctions:
    """`score_mod` and `mask_mod` of a formula as graphs on scalars, and what `score_mod` reads, in order.

    `sink_mod` returns the logit of a row's sink, and `weight_mod` the factor of a weight; None without them. With
    `reads_least`, the least of the largest elements of rows of a bias is the last buffer.
    """

    score_mod: GraphModule
    mask_mod: GraphModule
    scale: float
    reads: tuple[ReadTensor, ...]
    sink_mod: GraphModule | None = None
    weight_mod: GraphModule | None = None
    reads_least: bool = False

    @property
    def only_scale(self) -> bool:
        """Whether the scores are products times the scale, without bias, mask, sink and factors of weights."""
        is_score = all(node.op in ("placeholder", "output") for node in self.score_mod.graph.nodes)
        return is_score and self.sink_mod is None and self.weight_mod is None


def score_functions(
    formula: AttentionFormula, operands: AttentionOperands, fakes: NodeValues, written: Set[int]
) -> ScoreFunctions:
    """Returns the functions of a formula; the graph writes the storages `written`. Raises UnsupportedScoresError."""
    return ScoreFunctionBuilder(formula, operands, fakes, written).build()


def computed_bias_functions(
    query: FakeTensor, bias: Node, fakes: NodeValues, written: Set[int], hidden: Node | None = None
) -> ScoreFunctions:
    """Returns the functions of scores to which a bias is added, which is computed from what takes no more memory.

    The bias has one dimension for each of the last of the score's indices. Until the scores are computed, the graph
    writes the storages `written`. `hidden` is a constant of the bias that is minus infinity. Other large negative
    numbers of the bias hide keys where each row has larger ones. Raises UnsupportedScoresError where the graph
    overwrites what the bias is computed from.
    """
    graph, fake = ElementGraph(query, fakes, written, query.shape[1]), fakes[bias]
    graph.numbers |= {} if hidden is None else {hidden: -math.inf}
    parts = [*graph.indices][len(graph.indices) - fake.ndim :]
    coordinates = tuple([
        None if size == 1 or (type(stride) is int and stride == 0) else Coordinate(part)
        for part, size, stride in zip(parts, sizes_of(bias, fakes), fake.stride(), strict=True)
    ])  # fmt: skip
    score = graph.call(_aten.add.Tensor, graph.score, graph.element(bias, coordinates))
    if not needs_reference(graph, score):
        return ScoreFunctions(*graph.finish_graph(score), 1.0, graph.read_tensors)
    least = graph.statistic(bias, (*coordinates[:-2], None, None))
    bounds = [*key_bounds(graph, score, least)]
    mask = functools.reduce(functools.partial(graph.call, _AND), bounds)
    modules = graph.part([score]), graph.part([mask], (graph.score,))
    return ScoreFunctions(*modules, 1.0, graph.read_tensors, reads_least=True)


def biased_score_functions(query: FakeTensor, bias: FakeTensor | None) -> tuple[GraphModule, GraphModule]:
    """Returns `score_mod` and `mask_mod` of scores to which a bias is added, which is the only buffer.

    The bias has one dimension for each of the last of the score's indices.
    """
    return BiasedScores(query).build(bias)


class BiasedScores(ScalarGraph):
    """A score to which a bias is added, whose dimensions with one element are read at 0."""

    def build(self, bias: FakeTensor | None) -> tuple[GraphModule, GraphModule]:
        """Returns `score_mod` and `mask_mod`."""
        return self.finish_graph(self.score if bias is None else self.biased(bias))

    def biased(self, bias: FakeTensor) -> Node:
        """Returns the score with an element of a bias, which is the next operand."""
        buffer = self.placeholder("bias", bias)
        used = [*self.indices.values()][len(self.indices) - bias.ndim :]
        zero = self.call(_aten.full.default, [], 0, dtype=torch.int32, device=self.device)
        indices = [zero if size == 1 else index for size, index in zip(bias.shape, used, strict=True)]
        element = self.call(_aten.index.Tensor, buffer, indices)
        return self.call(_aten.add.Tensor, self.score, element)


class ScoreFunctionBuilder(ElementGraph):
    """Builds the functions of a formula.

    `scale` is what products are multiplied by before; 1 without `folds_scale`.
    """

    def __init__(
        self, formula: AttentionFormula, operands: AttentionOperands, fakes: NodeValues, written: Set[int]
    ) -> None:
        super().__init__(fakes[formula.query_key], fakes, written, operands.heads)
        self.formula = formula
        self.operands = operands
        self.scale = 1.0
        self.folds_scale = True

    def build(self) -> ScoreFunctions:
        value = self.modified_score()[self.formula.scores[-1]]
        sink, factor = self.sink_logit(), self.weight_factor()
        mask_mod = self.mask_mod(value, sink, (self.score,))
        sink_mod, weight_mod = [self.optional_part(item, (self.score,)) for item in (sink, factor)]
        return ScoreFunctions(self.part([value]), mask_mod, self.scale, self.read_tensors, sink_mod, weight_mod)

    def weight_factor(self) -> Node | None:
        """Returns the product of the factors of a weight, dropout included; None without factors."""
        formula, dropout = self.formula, self.formula.dropout
        one = value = self.call(_aten.full.default, [], 1.0, dtype=self.dtype, device=self.device)
        passed = {formula.softmax: one}
        for node in formula.passed:
            if dropout is not None and node is dropout.output:
                mask = self._argument(dropout.mask, dropout.mask, self._coordinates(dropout.mask))
                factor = self.call(_aten.mul.Tensor, self._cast(mask, self.dtype), dropout.scale)
                value = factor if value is one else self.call(_aten.mul.Tensor, value, factor)
            elif dropout is None or node is not dropout.node:
                value = self.step(node, value, passed)
            passed[node] = value
        return None if value is one else value

    def mask_mod(self, value: Node, reference: Node | None, without: Sequence[Node]) -> GraphModule:
        """Returns the graph of bounds of keys beyond which weights of scores are zero, without some of the operands.

        Kernels do not visit these keys. `reference` is that of `key_bounds`.
        """
        bounds = [*key_bounds(self, value, reference)] or [self.true()]
        return self.part([functools.reduce(lambda one, other: self.call(_AND, one, other), bounds)], without)

    def sink_logit(self) -> Node | None:
        """Returns the logit of a row's sink; None without one."""
        if self.formula.sink is None:
            return None
        logits = self.formula.sink.logits
        return self.element(logits, self._coordinates(logits))

    def modified_score(self) -> dict[Node, Node]:
        """Returns the score after each operator of the formula."""
        value = self.score
        for factor in self.operands.factors:
            value = self._multiplied(value, factor.value, factor.divides)
        query_key = self.formula.query_key
        if query_key.target is _aten.baddbmm.default:
            value = self._added(value, query_key)
        passed = {query_key: value}
        for node in self.formula.scores[1:]:
            passed[node] = value = self.step(node, value, passed)
        return passed

    # --- the path of the scores -------------------------------------------------------------------------------------

    def _multiplied(self, value: Node, factor: Any, divides: bool) -> Node:
        number = self._constant(factor) if isinstance(factor, Node) else factor
        if number is not None and self.folds_scale and math.isfinite(number) and number != 0:
            factor = number
        if isinstance(factor, Node):
            target = _aten.div.Tensor if divides else _aten.mul.Tensor
            return self.call(target, value, self.element(factor, ()))
        self.scale = self.scale / factor if divides else self.scale * factor
        return value

    def _added(self, value: Node, product: Node) -> Node:
        """Returns the score of `baddbmm`: alpha * score + beta * bias."""
        alpha, beta = product.kwargs.get("alpha", 1), product.kwargs.get("beta", 1)
        if alpha != 1:
            value = self.call(_aten.mul.Tensor, value, alpha)
        if beta == 0:
            return value
        bias = self._argument(product.args[0], product, self._coordinates(product))
        return self.call(_aten.add.Tensor, value, bias, **({} if beta == 1 else {"alpha": beta}))

    def step(self, node: Node, value: Node, passed: dict[Node, Node]) -> Node:
        """Returns the score, or another value that is computed from it, after one operator."""
        name = name_of(node)
        if name not in ELEMENTWISE:
            return value  # a view
        if name == "to_copy":
            if not self.fakes[node].dtype.is_floating_point:
                raise UnsupportedScoresError("its scores are cast to integers")
            return value  # kernels compute in float32 or float64
        if value is self.score and self.folds_scale:
            number: Any = node.args[1] if name in ("mul", "div") and len(node.args) == 2 and not node.kwargs else None
            if type(number) in (int, float) and math.isfinite(number) and number != 0:
                return self._multiplied(value, number, name == "div")
        if self._changes_nothing(node, passed):
            return value
        coordinates = self._coordinates(node) if len(node.all_input_nodes) > 1 else ()
        operands: Any = node.args
        arguments = [passed[item] if item in passed else self._argument(item, node, coordinates) for item in operands]
        return self.call(node.target, *arguments, **self._keywords(node))

    def _changes_nothing(self, node: Node, passed: dict[Node, Node]) -> bool:
        """Whether an operator returns the score: it adds zeros, or its mask has one value."""
        numbers = [
            self._constant(item) if isinstance(item, Node) and item not in passed and self._is_tensor(item) else None
            for item in node.args
        ]
        match name_of(node), numbers:
            case "where", [True, None, _]:
                return node.args[1] in passed
            case "where", [False, _, None]:
                return node.args[2] in passed
            case "masked_fill", [None, False, *_]:
                return True
            case "add" | "sub", [None, 0] | [None, 0.0]:
                return True
            case "add", [0, None] | [0.0, None]:
                return not node.kwargs
            case _:
                return False

    def _coordinates(self, node: Node) -> Coordinates:
        """Returns the coordinates of the elements of a node of the scores."""
        sizes = sizes_of(node, self.fakes)
        leading = self._leading(sizes[:-2])
        last = [Coordinate("row"), Coordinate("key")]
        coordinates = (*leading, *(reversed(last) if node in self.formula.transposed else last))
        return tuple([None if size == 1 else item for size, item in zip(sizes, coordinates, strict=True)])

    def _leading(self, sizes: Sequence[Any]) -> list[Coordinate | None]:
        batch, heads = self.operands.batch, self.operands.heads
        for split in range(len(sizes) + 1):
            if _product(sizes[:split]) == batch and _product(sizes[split:]) == heads:
                return [*_parts("batch", sizes[:split]), *_parts("head", sizes[split:])]
        if len(sizes) == 1:
            return [Coordinate("product")]
        raise UnsupportedScoresError("its scores have other dimensions than batch and heads")


def _parts(part: str, sizes: Sequence[Any]) -> list[Coordinate | None]:
    """Returns the coordinates of the dimensions into which a part is split."""
    result: list[Coordinate | None] = []
    step: Any = 1
    meaningful = [dim for dim, size in enumerate(sizes) if size != 1]
    for dim, size in reversed(list(enumerate(sizes))):
        is_first = not meaningful or dim == meaningful[0]
        if size == 1:
            result.append(None)
            continue
        if not isinstance(step, int) or (not is_first and type(size) is not int):
            raise UnsupportedScoresError("its scores split batch or heads into symbolic sizes")
        result.append(Coordinate(part, step, None if is_first else size))
        step = step * size
    return result[::-1]


def _product(sizes: Sequence[Any]) -> Any:
    product: Any = 1
    for size in sizes:
        product = product * size
    return product
