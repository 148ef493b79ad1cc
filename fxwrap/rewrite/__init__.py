"""Rewriting: patterns over a program's lines and over emitted FX graphs. `docs/rewriting.md` is the guide."""

from fxwrap.matching import (
    Operation,
    Pattern,
    TypePattern,
    Wildcard,
    anything,
    call,
    computed,
    computes,
    launch,
    line,
    number,
    one_of,
    tensor,
    tensors,
    view,
    with_operands_anywhere,
)
from fxwrap.options import PASS_POINTS, Pass, register_pass, registered_pass
from fxwrap.rewrite.builder import LineBuilder
from fxwrap.rewrite.engine import MatchFailure, ReplacementFunction, RewriteResult, Skip, find, rewrite, rewrite_pass
from fxwrap.rewrite.graphs import GraphMatch, KernelNode, kernel_node, kernel_nodes, kernel_of, replace_in_graph
from fxwrap.rewrite.program_split import ProgramSplit, split
from fxwrap.rewrite.replacement import Match

__all__ = [
    "PASS_POINTS",
    "GraphMatch",
    "KernelNode",
    "LineBuilder",
    "Match",
    "MatchFailure",
    "Operation",
    "Pass",
    "Pattern",
    "ProgramSplit",
    "ReplacementFunction",
    "RewriteResult",
    "Skip",
    "TypePattern",
    "Wildcard",
    "anything",
    "call",
    "computed",
    "computes",
    "find",
    "kernel_node",
    "kernel_nodes",
    "kernel_of",
    "launch",
    "line",
    "number",
    "one_of",
    "register_pass",
    "registered_pass",
    "replace_in_graph",
    "rewrite",
    "rewrite_pass",
    "split",
    "tensor",
    "tensors",
    "view",
    "with_operands_anywhere",
]
