"""Single operators of a graph, lowered and evaluated alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from fxwrap.debugging.agreement import compare_results
from fxwrap.debugging.evaluating_interpreter import LoopInterpreter
from fxwrap.debugging.references import GraphNode, GraphRun
from fxwrap.lowering import lower
from fxwrap.options import Options
from fxwrap.torch_compat import OpOverload, tree_leaves


def is_lowered_wrong(item: GraphNode, options: Options, eager: GraphRun, exact: GraphRun, occurrence: int) -> bool:
    """Whether an operator alone, lowered and evaluated on eager's operands, differs from eager's result.

    `occurrence` numbers the runs of an operator in a block. False for nodes whose operands are not recorded, and where
    the operator alone cannot be lowered.
    """
    node = item.node
    if not isinstance(node.target, OpOverload):
        return False
    operands = {operand: eager.result(item.scope + operand.name, occurrence) for operand in node.all_input_nodes}
    if any(operand is None for operand in operands.values()):
        return False
    graph = Graph()
    placeholders = {operand: graph.placeholder(operand.name) for operand in operands}
    call = graph.call_function(node.target, *map_arg((node.args, node.kwargs), placeholders.__getitem__))
    graph.output((call,))
    inputs: list[Any] = list(operands.values())
    try:
        program = lower(GraphModule({}, graph), inputs, options=options)
        with torch.no_grad():
            results = LoopInterpreter(program).run(list(inputs))
    except Exception:  # noqa: BLE001  it may need its neighbours, and then tells nothing
        return False
    expected, truths = (tree_leaves(run.result(item.name, occurrence)) for run in (eager, exact))
    triples = [parts for parts in zip(results, expected, truths) if all(isinstance(part, Tensor) for part in parts)]
    return any(a.numel() == b.numel() and not compare_results(a, b, c, _REDUCED).holds for a, b, c in triples)


_REDUCED = 4096
"""The number of reduced elements that is assumed for any operator."""
