"""Bounds of the keys that attention written as its formula visits, from masks of positions in its scores.

Masked scores are minus infinity, or have a large negative number. The number is no mask by itself: a row of such scores
alone has equal weights. Weights of masked scores are zero beside a number far above: a sink's logit or, in a backward,
the maximum of the row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.elements import ScalarGraph
from fxwrap.fx_passes.effects import name_of

_aten = torch.ops.aten

_LOWEST = torch.finfo(torch.float16).min
"""The largest number that masks scores."""

_FARTHEST = 4
"""A reference is far above a number if it is above a fourth of it."""

_OPPOSITES = {
    _aten.lt.Tensor: _aten.ge.Tensor, _aten.ge.Tensor: _aten.lt.Tensor, _aten.gt.Tensor: _aten.le.Tensor,
    _aten.le.Tensor: _aten.gt.Tensor, _aten.lt.Scalar: _aten.ge.Scalar, _aten.ge.Scalar: _aten.lt.Scalar,
    _aten.gt.Scalar: _aten.le.Scalar, _aten.le.Scalar: _aten.gt.Scalar,
}  # fmt: skip
"""The opposites of comparisons that bound keys."""

_Comparison: TypeAlias = tuple[Any, tuple[Any, ...]]
"""The operator of a comparison, with its operands."""

_CONJUNCTIONS, _DISJUNCTIONS = ("bitwise_and", "logical_and"), ("bitwise_or", "logical_or")


def key_bounds(graph: ScalarGraph, score: Node, reference: Node | None) -> Iterator[Node]:
    """Yields comparisons of positions without any of which the weight of a score is zero, as new calls of its graph.

    The reference is no larger than the largest of a row's scores and its sink's logit.
    """
    for condition, holds, number in _masks(score):
        if number != -torch.inf and reference is None:
            continue
        for comparisons in _alternatives(graph, condition, holds):
            calls = [graph.call(target, *operands) for target, operands in comparisons]
            bound = functools.reduce(partial(graph.call, _aten.logical_or.default), calls)
            if number != -torch.inf:
                is_far = graph.call(_aten.gt.Scalar, reference, number / _FARTHEST)
                bound = graph.call(_aten.logical_or.default, bound, graph.call(_aten.logical_not.default, is_far))
            yield bound


def needs_reference(graph: ScalarGraph, score: Node) -> bool:
    """Whether a score has bounds beside a reference only."""
    masks = [(condition, holds) for condition, holds, number in _masks(score) if number != -torch.inf]
    return any(True for condition, holds in masks for _ in _alternatives(graph, condition, holds))


def _masks(score: Node) -> Iterator[tuple[Node, bool, float]]:
    """Yields conditions, with the value that they have for unmasked scores, and the number of masked ones."""
    arguments: Any = score.args
    match name_of(score):
        case "add":
            for operand in arguments:
                if isinstance(operand, Node):
                    yield from _masks(operand)
        case "to_copy":
            yield from _masks(arguments[0])
        case "where":
            condition, one, other = arguments
            for inside, number, holds in ((one, _number(other), True), (other, _number(one), False)):
                if number is not None and number <= _LOWEST:
                    yield condition, holds, number
                    yield from _masks(inside) if isinstance(inside, Node) else ()
        case "masked_fill":
            inside, condition, value = arguments
            number = _number(value)
            if number is not None and number <= _LOWEST:
                yield condition, False, number
                yield from _masks(inside)
        case _:
            pass


def _number(item: Any) -> float | None:
    """Returns a number, or that of a constant scalar."""
    value = item.args[1] if isinstance(item, Node) and name_of(item) == "full" else item
    return float(value) if isinstance(value, int | float) else None


def _alternatives(graph: ScalarGraph, condition: Node, holds: bool) -> Iterator[tuple[_Comparison, ...]]:
    """Yields comparisons of integers, one of which has to hold where a condition has a value."""
    name, arguments = name_of(condition), condition.args
    if name in (_CONJUNCTIONS if holds else _DISJUNCTIONS):
        for operand in condition.all_input_nodes:
            yield from _alternatives(graph, operand, holds)
    elif name in (_DISJUNCTIONS if holds else _CONJUNCTIONS):
        for parts in itertools.product(*[_alternatives(graph, item, holds) for item in condition.all_input_nodes]):
            yield tuple([comparison for part in parts for comparison in part])
    elif name in ("logical_not", "bitwise_not"):
        yield from _alternatives(graph, arguments[0], not holds)  # type: ignore[arg-type]
    elif condition.target in _OPPOSITES:
        if not any(graph.scalars[item].is_floating_point() for item in condition.all_input_nodes):
            yield (((condition.target if holds else _OPPOSITES[condition.target]), arguments),)
