"""The operands of attention formulas as (batch, heads, rows or keys, width), without copies.

The operands of a matmul are (products, rows, width) and (products, width, keys), for which models merge batch and
heads. A kernel reads any strides, so its operands are the tensors before that merge: before copies, transpositions of
keys, repetitions of key heads, and factors, by which the scores are multiplied instead. Queries and keys that are cast
from the dtype of the values to float32 are read before that cast: kernels compute scores in float32, where products of
half-precision numbers are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.grouped_queries import repeated_heads
from fxwrap.fx_passes.attention.nodes import folded_number, is_cast, keeps_order, sizes_of, swaps_last_two
from fxwrap.fx_passes.attention.parts import AttentionFormula
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import GraphCopy
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.loop_ir import HALF_PRECISION
from fxwrap.torch_compat import FakeTensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class ScoreFactor:
    """A factor of the scores, or a divisor: a number, or a tensor of rank 0."""

    value: Any
    divides: bool


@dataclass(frozen=True)
class OperandStage:
    """A tensor that an operand of a matmul is a copy, a view or a multiple of.

    Fields:
        node: the tensor; its last two dimensions are rows (or keys) and width, in any order.
        width_dim: the dimension of the width, -1 or -2.
        group: the number of query heads that share each of its heads.
        factors: what its elements are multiplied by.
    """

    node: Node
    width_dim: int
    group: int = 1
    factors: tuple[ScoreFactor, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it has the operand's elements, in the same order but for a transposition."""
        return self.group == 1 and not self.factors


@dataclass(frozen=True)
class AttentionOperands:
    """Operands of a formula.

    Fields:
        query, key, value: the tensors that a kernel reads.
        batch, heads: the sizes into which the first dimension of the matmuls is split.
    """

    query: OperandStage
    key: OperandStage
    value: OperandStage
    batch: Any
    heads: Any

    @property
    def factors(self) -> tuple[ScoreFactor, ...]:
        """The factors of the scores."""
        return (*self.query.factors, *self.key.factors)

    def score_sizes(self, fakes: NodeValues) -> tuple[Any, Any, Any]:
        """Returns the numbers of batches, heads and rows."""
        fake = fakes[self.query.node]
        rows = fake.shape[-2 if self.query.width_dim == -1 else -1]
        if fake.ndim == 4:
            return (*fake.shape[:2], rows)
        return (fake.shape[0] // self.heads if fake.ndim == 3 else 1, self.heads, rows)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The tensors that the kernel reads, without those of biases and masks."""
        tensors = [item.value for item in self.factors if isinstance(item.value, Node)]
        return (self.query.node, self.key.node, self.value.node, *tensors)


def attention_operands(formula: AttentionFormula, fakes: NodeValues) -> AttentionOperands:
    """Returns the operands of a formula, as close to their origin as a kernel can read them.

    Those of a formula with a backward are the elements of its matmuls' operands, of which that computes gradients, or
    those that are repeated for groups of query heads, over which it sums gradients.
    """
    factors = [_stages(formula.query_key.args[-2], -1, fakes), _stages(formula.query_key.args[-1], -2, fakes)]
    query, key = reversed(factors) if formula.query_key in formula.transposed else factors
    query = [item for item in query if item.group == 1]
    values = (formula.output.args[0], -2) if formula.is_output_transposed else (formula.output.args[1], -1)
    value = [item for item in _stages(*values, fakes) if not item.factors]
    backward = formula.backward
    if backward is None:
        query, key = _in_dtype(fakes[value[0].node].dtype, query, key, fakes)
    else:
        query, key, value = [
            [item for item in stages if item.is_plain or (item.group == backward.group and not item.factors)]
            for stages in (query, key, value)
        ]
    products = sizes_of(formula.query_key, fakes)[:-2]
    leading: tuple[Any, Any] = (products[0] if products else 1, 1)
    split = next((item for stages in (query, value, key) for item in stages if fakes[item.node].ndim == 4), None)
    if split is not None:
        batch, heads = sizes_of(split.node, fakes)[:2]
        leading = (batch, heads * split.group)
    chosen = [_choose(stages, leading, fakes) for stages in (query, key, value)]
    if chosen[1].group != chosen[2].group:
        ungrouped = [[item for item in stages if item.group == 1] for stages in (query, key, value)]
        chosen = [_choose(stages, leading, fakes) for stages in ungrouped]
    return AttentionOperands(chosen[0], chosen[1], chosen[2], *leading)


def _in_dtype(
    dtype: torch.dtype, query: list[OperandStage], key: list[OperandStage], fakes: NodeValues
) -> tuple[list[OperandStage], list[OperandStage]]:
    """Returns the stages of a dtype if both operands have some after they are continued before their casts."""
    narrow = []
    for stages in (query, key):
        source = _before_cast(stages[-1], dtype, fakes)
        continued = [*stages, *([] if source is None else _continued(source, fakes))]
        fitting = [item for item in continued if fakes[item.node].dtype == dtype]
        narrow.append([item for item in fitting if item.group == 1 or stages is key])
    return (narrow[0], narrow[1]) if all(narrow) else (query, key)


def _before_cast(stage: OperandStage, dtype: torch.dtype, fakes: NodeValues) -> OperandStage | None:
    """Returns the tensor of half precision that a tensor in float32 is cast from, if it has that dtype."""
    source = stage.node.args[0] if is_cast(stage.node, fakes) else None
    if not isinstance(source, Node) or dtype not in HALF_PRECISION:
        return None
    before, after = fakes[source], fakes[stage.node]
    is_exact = before.dtype == dtype and after.dtype == torch.float32 and before.device == after.device
    return replace(stage, node=source) if is_exact else None


def plain_stage(node: Node, width_dim: int, operands: AttentionOperands, fakes: NodeValues) -> OperandStage:
    """Returns the tensor (batch, heads, rows, width) whose elements an operand of another matmul has, if any."""
    stages = [item for item in _stages(node, width_dim, fakes) if item.is_plain]
    return _choose(stages, (operands.batch, operands.heads), fakes)


def _choose(stages: Sequence[OperandStage], leading: tuple[Any, Any], fakes: NodeValues) -> OperandStage:
    """Returns the last stage with these leading dimensions, if possible with contiguous rows; else the first one."""
    fitting = [item for item in stages if _leading_sizes(item, fakes) == leading]
    contiguous = [item for item in fitting if _has_contiguous_rows(item, fakes)]
    return contiguous[-1] if contiguous else fitting[-1] if fitting else stages[0]


def _leading_sizes(stage: OperandStage, fakes: NodeValues) -> tuple[Any, ...]:
    sizes = sizes_of(stage.node, fakes)
    return (sizes[0], sizes[1] * stage.group) if len(sizes) == 4 else ()


def _has_contiguous_rows(stage: OperandStage, fakes: NodeValues) -> bool:
    stride = fakes[stage.node].stride()[stage.width_dim]
    return type(stride) is int and stride == 1


def _stages(node: Any, width_dim: int, fakes: NodeValues) -> list[OperandStage]:
    """Returns an operand of a matmul, and the tensors that it is computed from without arithmetic but factors."""
    return _continued(OperandStage(node, width_dim), fakes)


def _continued(stage: OperandStage, fakes: NodeValues) -> list[OperandStage]:
    """Returns a stage, and those before it."""
    stages = [stage]
    while (before := _before(stages[-1], fakes)) is not None:
        stages.append(before)
    return stages


def _before(stage: OperandStage, fakes: NodeValues) -> OperandStage | None:
    node = stage.node
    if node.op != "call_function" or not isinstance(fakes.get(node), FakeTensor):
        return None
    if stage.group == 1:
        repeated = _unrepeated(node, fakes)
        if repeated is not None and stage.width_dim == -1:
            base, group = repeated
            return replace(stage, node=base, group=group)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not isinstance(fakes.get(source), FakeTensor):
        return None
    if keeps_order(node, fakes) and _same_matrices(node, source, fakes):
        return replace(stage, node=source)
    if swaps_last_two(node, fakes):
        return replace(stage, node=source, width_dim=-3 - stage.width_dim)
    factor = _factor(node, source, fakes)
    return None if factor is None else replace(stage, node=source, factors=(*stage.factors, factor))


def _unrepeated(node: Node, fakes: NodeValues) -> tuple[Node, int] | None:
    """Returns the tensor (batch, key heads, keys, width) whose heads a node repeats, and how often."""

    def sizes(item: Any) -> list[Any] | None:
        return sizes_of(item, fakes) if isinstance(item, Node) and isinstance(fakes.get(item), FakeTensor) else None

    repeated = repeated_heads(node, sizes)
    if repeated is None:
        return None
    base, _, group = repeated
    if fakes[base].ndim == 4:
        return base, group
    arguments: Any = base.args
    is_unsqueezed = name_of(base) == "unsqueeze" and arguments[1] in (2, -3)
    return (arguments[0], group) if is_unsqueezed else None


def _same_matrices(node: Node, source: Node, fakes: NodeValues) -> bool:
    return sizes_of(node, fakes)[-2:] == sizes_of(source, fakes)[-2:]


def _factor(node: Node, source: Node, fakes: NodeValues) -> ScoreFactor | None:
    """Returns the factor of a multiplication or division by a number or a tensor of rank 0."""
    name = name_of(node)
    if name not in ("mul", "div") or node.kwargs or len(node.args) != 2:
        return None
    value = node.args[1]
    is_scalar = type(value) in (int, float)
    if isinstance(value, Node) and isinstance(fakes.get(value), FakeTensor):
        is_near = fakes[value].device == fakes[node].device or folded_number(value, fakes) is not None
        is_scalar = fakes[value].ndim == 0 and is_near
    if not is_scalar or fakes[source].dtype != fakes[node].dtype or not fakes[node].dtype.is_floating_point:
        return None
    return ScoreFactor(value, name == "div")


def kernel_operand(copy: GraphCopy, before: Node, stage: OperandStage, operands: AttentionOperands, name: str) -> Node:
    """Returns an operand as (batch, heads, rows or keys, width): a view, inserted before a node of the copy."""
    node = copy.node_map[stage.node]
    if stage.width_dim == -2:
        node = copy.call(before, _aten.transpose.int, (node, -2, -1), name)
    fake = copy.fakes[node]
    if fake.ndim == 4:
        return node
    if fake.ndim == 2:
        node = copy.call(before, _aten.unsqueeze.default, (node, 0), name)
    if operands.heads == 1:
        return copy.call(before, _aten.unsqueeze.default, (node, 1), name)
    sizes = [fake.shape[0] // operands.heads, operands.heads, *fake.shape[1:]]
    return copy.call(before, _aten.view.default, (node, copy.size_arguments(before, sizes)), name)
