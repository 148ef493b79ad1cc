"""Rewrites of matmuls that autotuning chooses match by match: by timing each in the part of the graph around it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fxwrap.fx_passes.matmuls.accumulated import accumulate_matmuls, accumulations
from fxwrap.fx_passes.matmuls.epilogues import fuse_gelu_matmuls, gelu_matmuls
from fxwrap.fx_passes.prepared_graph import FxPassContext, PreparedGraph


class RewriteMatch(Protocol):
    """A match of a rewrite."""

    @property
    def name(self) -> str:
        """The name of a node by which the match is chosen."""

    @property
    def names(self) -> Collection[str]:
        """The names of the nodes that must be timed together."""


@dataclass(frozen=True)
class TimedRewrite:
    """A pass that rewrites the chosen ones of its matches.

    Fields:
        name: the name of the pass.
        matches: returns the matches in a graph.
        rewrite: returns the graph with the matches of these names rewritten.
    """

    name: str
    matches: Callable[[PreparedGraph, FxPassContext], Sequence[RewriteMatch]]
    rewrite: Callable[[PreparedGraph, FxPassContext, Collection[str]], PreparedGraph]


TIMED_REWRITES = (
    TimedRewrite("accumulate_matmuls", accumulations, accumulate_matmuls),
    TimedRewrite("fuse_gelu_matmuls", gelu_matmuls, fuse_gelu_matmuls),
)
