"""A graph run operator by operator, in its own dtypes and in float64, with the result of each node."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from fxwrap.debugging.copies import copy_inputs
from fxwrap.debugging.dispatch_modes import Float64Mode, infer_random_dtype
from fxwrap.fx_passes import GraphSource
from fxwrap.torch_compat import OpOverload, tree_leaves
from fxwrap.wrapper_ir import operator_schema

NodeResults = Mapping[str, object]
"""The results of nodes by name: tensors, numbers, or tuples of these."""


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph.

    `results` are those of the recorded nodes; `shapes` the shapes of all nodes' tensors; `operands` the nodes that each
    node reads; `outputs` the flat outputs; `inputs` the inputs after the run.
    """

    results: NodeResults
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    operands: Mapping[str, tuple[str, ...]]
    outputs: tuple[object, ...]
    inputs: tuple[object, ...]

    def tensor(self, node: str, position: int) -> Tensor | None:
        """Returns one of a node's results, None if it is no tensor or was not recorded."""
        result = self.results.get(node)
        if isinstance(result, tuple | list):
            result = result[position] if position < len(result) else None
        return result if isinstance(result, Tensor) else None


def run_graph(
    source: GraphSource, inputs: Sequence[object], *, nodes: Collection[str] | None = None, in_float64: bool = False
) -> GraphRun:
    """Runs a graph on copies of its flat inputs, node by node.

    With `in_float64`, all operators run in float64 and complex128. Tensors of the graph's own that it writes keep their
    contents. `nodes` names the nodes whose results are recorded, None for all.

    Raises the error of the operator that fails.
    """
    constants = dict(source.constants)
    copies, owned = copy_inputs((list(inputs), constants), to_float64=in_float64)
    queue = iter(copies)
    placeholders = source.graph_module.graph.find_nodes(op="placeholder")
    arguments = [owned[node.name] if node.name in owned else next(queue) for node in placeholders]
    runner = _Runner(source, nodes)
    tensors = [leaf for leaf in [*tree_leaves(inputs), *constants.values()] if isinstance(leaf, Tensor)]
    mode = Float64Mode(infer_random_dtype(tensors)) if in_float64 else nullcontext()
    with torch.no_grad(), mode:
        outputs = runner.run(*arguments, enable_io_processing=False)
    return GraphRun(runner.recorded, runner.shapes, runner.operands, tuple(flat_outputs(outputs)), tuple(copies))


class _Runner(Interpreter):
    """Runs a graph and records results; those that a later node may write are copied."""

    def __init__(self, source: GraphSource, nodes: Collection[str] | None) -> None:
        super().__init__(source.graph_module)
        self.recorded: dict[str, object] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.operands: dict[str, tuple[str, ...]] = {}
        self._nodes = nodes
        self._writes = any(_writes(node) for node in source.graph_module.graph.nodes)
        self._attributes: dict[str, object] = {}

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        self.shapes[node.name] = tuple([tuple(item.shape) for item in tree_leaves(result) if isinstance(item, Tensor)])
        self.operands[node.name] = tuple([item.name for item in node.all_input_nodes])
        if node.op != "output" and (self._nodes is None or node.name in self._nodes):
            self.recorded[node.name] = copy_inputs(result) if self._writes else result
        return result

    def fetch_attr(self, target: str) -> Any:
        """Returns an attribute of the graph, a copy of a tensor that the graph may write."""
        attribute = super().fetch_attr(target)
        if not self._writes or not isinstance(attribute, Tensor):
            return attribute
        return self._attributes.setdefault(target, copy_inputs(attribute))


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(operator_schema(node.target).mutated_arguments)


def flat_outputs(outputs: object) -> list[object]:
    """Returns the flat outputs of a graph, None included, as those of its program."""
    return [leaf for item in outputs for leaf in flat_outputs(item)] if isinstance(outputs, tuple | list) else [outputs]


def reduced_elements(run: GraphRun, name: str) -> int:
    """Returns how many elements of its operands, at most, each element of a node's result reduces."""
    operands = [shape for operand in run.operands.get(name, ()) for shape in run.shapes.get(operand, ())]
    count = max([1, *[math.prod(shape) for shape in run.shapes.get(name, ())[:1]]])
    return max([1, *[max(max(shape, default=1), math.prod(shape) // count) for shape in operands]])
