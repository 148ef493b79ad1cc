"""Rewriting: patterns over a program's lines, and over the FX graphs that programs become.

`docs/rewriting.md` is the guide.
"""

from fxwrap.matching import (
    Operation,
    Pattern,
    TypePattern,
    Wildcard,
    anything,
    call,
    computes,
    launch,
    line,
    number,
    one_of,
    reading,
    tensor,
    tensors,
    view,
)
from fxwrap.pass_spec import POINTS, Pass, register_pass, registered_pass
from fxwrap.rewrite.builder import LineBuilder
from fxwrap.rewrite.engine import Refusal, Rewritten, Skip, find, rewrite, rewriting
from fxwrap.rewrite.graphs import GraphMatch, replace_in_graph
from fxwrap.rewrite.kernel_nodes import KernelNode, kernel_node, kernel_nodes, kernel_of
from fxwrap.rewrite.match import Match
from fxwrap.rewrite.parts import Parts, split

__all__ = [
    "POINTS",
    "GraphMatch",
    "KernelNode",
    "LineBuilder",
    "Match",
    "Operation",
    "Parts",
    "Pass",
    "Pattern",
    "Refusal",
    "Rewritten",
    "Skip",
    "TypePattern",
    "Wildcard",
    "anything",
    "call",
    "computes",
    "find",
    "kernel_node",
    "kernel_nodes",
    "kernel_of",
    "launch",
    "line",
    "number",
    "one_of",
    "reading",
    "register_pass",
    "registered_pass",
    "replace_in_graph",
    "rewrite",
    "rewriting",
    "split",
    "tensor",
    "tensors",
    "view",
]
