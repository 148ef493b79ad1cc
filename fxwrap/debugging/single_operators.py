"""Single operators of a graph, lowered and evaluated alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.debugging.agreement import compare_results
from fxwrap.debugging.evaluating_interpreter import LoopInterpreter
from fxwrap.debugging.references import GraphRun
from fxwrap.lowering import lower
from fxwrap.options import Options
from fxwrap.torch_compat import OpOverload, tree_leaves


def is_lowered_wrong(node: Node, options: Options, eager: GraphRun, exact: GraphRun) -> bool:
    """Whether an operator alone, lowered and evaluated on eager's operands, differs from eager's result.

    False for nodes whose operands are not recorded, and where the operator alone cannot be lowered.
    """
    if not isinstance(node.target, OpOverload):
        return False
    operands = {item: eager.results.get(item.name) for item in node.all_input_nodes}
    if any(item is None for item in operands.values()):
        return False
    graph = Graph()
    placeholders = {item: graph.placeholder(item.name) for item in operands}
    call = graph.call_function(node.target, *map_arg((node.args, node.kwargs), lambda item: placeholders[item]))
    graph.output((call,))
    inputs: list[Any] = list(operands.values())
    try:
        program = lower(GraphModule({}, graph), inputs, options=options)
        with torch.no_grad():
            results = LoopInterpreter(program).run(list(inputs))
    except Exception:  # noqa: BLE001  it may need its neighbours, and then tells nothing
        return False
    wanted, truths = tree_leaves(eager.results.get(node.name)), tree_leaves(exact.results.get(node.name))
    triples = [item for item in zip(results, wanted, truths) if all(isinstance(part, Tensor) for part in item)]
    return any(a.numel() == b.numel() and not compare_results(a, b, c, _REDUCED).holds for a, b, c in triples)


_REDUCED = 4096
"""The number of reduced elements that is assumed for any operator."""
