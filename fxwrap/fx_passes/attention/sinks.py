"""Sinks of attention: logits concatenated to the scores before a softmax, whose weights are dropped after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.nodes import is_last_dimension, is_tensor, sizes_of
from fxwrap.fx_passes.effects import name_of
from fxwrap.fx_passes.graph_copy import expression_of
from fxwrap.fx_passes.prepared_graph import NodeValues


@dataclass(frozen=True)
class Sink:
    """A column of logits beside the scores of a softmax.

    Fields:
        logits: (..., rows, 1).
        scores: (..., rows, keys).
        concatenation: the call that concatenates both along the last dimension.
        is_first: whether the logits come before the scores.
    """

    logits: Node
    scores: Node
    concatenation: Node
    is_first: bool

    @classmethod
    def of(cls, node: object, fakes: NodeValues) -> Sink | None:
        """Returns the sink of a concatenation; None for other nodes."""
        if not isinstance(node, Node) or name_of(node) != "cat" or not is_tensor(node, fakes):
            return None
        arguments: Any = [*node.args, 0]
        tensors, dim = arguments[:2]
        if len(tensors) != 2:
            return None
        if not all(is_tensor(item, fakes) for item in tensors) or not is_last_dimension(dim, fakes[node].ndim):
            return None
        for logits, scores in (tensors[::-1], tensors):
            if sizes_of(logits, fakes)[-1] == 1:
                return cls(logits, scores, node, logits is tensors[0])
        return None

    def selects_scores(self, node: Node, fakes: NodeValues) -> bool:
        """Whether a call returns the columns of the scores of a tensor with those of the concatenation."""
        return self._selects(node, fakes, self.scores, 1 if self.is_first else 0)

    def selects_logits(self, node: Node, fakes: NodeValues) -> bool:
        """Whether a call returns the column of the logits of a tensor with the columns of the concatenation."""
        start = 0 if self.is_first else sizes_of(self.scores, fakes)[-1]
        return self._selects(node, fakes, self.logits, start)

    def _selects(self, node: Node, fakes: NodeValues, like: Node, first: Any) -> bool:
        if name_of(node) != "slice" or not is_tensor(node, fakes):
            return False
        arguments: Any = [*node.args, *(None, 0, None, None, 1)[len(node.args) :]]
        source, dim, start, _, step = arguments
        if not is_tensor(source, fakes) or not is_last_dimension(dim, fakes[node].ndim) or step != 1:
            return False
        whole, selected = self._columns(self.concatenation, fakes), self._columns(like, fakes)
        columns = self._columns(source, fakes), self._columns(node, fakes)
        return columns == (whole, selected) and bool(_number(start or 0, fakes) == first)

    def pads_scores(self, node: Node, fakes: NodeValues) -> bool:
        """Whether a call appends a column of zeros for the logits to one for each score."""
        if not is_tensor(node, fakes) or not is_tensor(node.args[0], fakes):
            return False
        arguments: Any = node.args
        whole, scores = [self._columns(item, fakes) for item in (self.concatenation, self.scores)]
        if self._columns(node, fakes) != whole or self._columns(arguments[0], fakes) != scores:
            return False
        match name_of(node), arguments:
            case "slice_backward", (_, _, dim, start, _, 1):
                first = 1 if self.is_first else 0
                return is_last_dimension(dim, fakes[node].ndim) and _number(start, fakes) == first
            case "constant_pad_nd", (_, [left, right], *value):
                return (left, right) == ((1, 0) if self.is_first else (0, 1)) and value in ([], [0], [0.0])
            case _:
                return False

    def _columns(self, node: Node, fakes: NodeValues) -> Any:
        return sizes_of(node, fakes)[-1]


def _number(item: Any, fakes: NodeValues) -> Any:
    """Returns an int or an expression that an argument is."""
    value: Any = fakes.get(item) if isinstance(item, Node) else item
    return expression_of(value) if isinstance(value, torch.SymInt) else value
