"""A graph run operator by operator, in its own dtypes and in float64, with the results of each node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from fxwrap.debugging.copies import copy_inputs
from fxwrap.debugging.dispatch_modes import Float64Mode, infer_random_dtype
from fxwrap.debugging.value_store import ValueStore
from fxwrap.fx_passes import GraphSource
from fxwrap.fx_passes.effects import attribute_of, operator_label
from fxwrap.torch_compat import HigherOrderOperator, OpOverload, tree_leaves
from fxwrap.wrapper_ir import operator_schema

_SLICED: Mapping[str, int] = {"scan": 2, "map_impl": 1}
"""Operators that run their graph for each slice of tensors, with the position of these among the arguments."""

_ASSOCIATIVE = "associative_scan"
"""The operator whose graph eager mode runs in the order of a tree, and a program from element to element."""

_BLOCK_OPERATORS = frozenset(
    {"cond", "while_loop", "while_loop_stack_output", "invoke_subgraph", _ASSOCIATIVE, *_SLICED}
)
"""Operators with graphs whose runs are recorded, in the order in which a program runs the lines of its blocks."""


_UNNAMED = "?."
"""The scope of blocks whose nodes have no names of their own."""


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph or of a graph that it contains; `scope` precedes its name in the origins of lines."""

    node: Node
    scope: str

    @property
    def name(self) -> str:
        """The name of the node in the origins of lines."""
        return self.scope + self.node.name

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the nodes that it reads."""
        return tuple([self.scope + item.name for item in self.node.all_input_nodes])


def graph_nodes(graph_module: GraphModule) -> dict[str, GraphNode]:
    """Returns the nodes of a graph and of its blocks by the names that the lowering gives them.

    A function that several operators call has the names of the first call. Graphs that several other operators run are
    left out, since their lines have equal names.
    """
    nodes: dict[str, GraphNode] = {}
    functions: set[int] = set()
    runs: Counter[Graph] = Counter()

    def add(module: GraphModule, scope: str) -> None:
        for node in module.graph.nodes:
            item = GraphNode(node, scope)
            nodes[item.name] = item
            for target, block in _blocks(node):
                if operator_label(node.target) != "invoke_subgraph":
                    runs[block.graph] += 1
                elif id(block) in functions:
                    continue
                functions.add(id(block))
                add(block, f"{scope}{target}.")

    add(graph_module, "")
    return {name: item for name, item in nodes.items() if runs[item.node.graph] < 2}


def _blocks(node: Node) -> list[tuple[str, GraphModule]]:
    """Returns the graphs that a node runs, with the names of the attributes that hold them."""
    if not isinstance(node.target, HigherOrderOperator) or operator_label(node.target) not in _BLOCK_OPERATORS:
        return []
    attributes = [item for item in node.args if isinstance(item, Node) and item.op == "get_attr"]
    pairs = [(str(item.target), attribute_of(item)) for item in attributes]
    return [(target, module) for target, module in pairs if isinstance(module, GraphModule)]


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph.

    `results` are those of the recorded nodes, as `store` keeps them, one for each time that a node ran: nodes of blocks
    may run any number of times. `shapes` are the shapes of all nodes' tensors; `operands` the nodes that each node
    reads; `outputs` the flat outputs; `inputs` the inputs after the run.
    """

    results: Mapping[str, Sequence[object]]
    store: ValueStore
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    operands: Mapping[str, tuple[str, ...]]
    outputs: tuple[object, ...]
    inputs: tuple[object, ...]

    def result(self, node: str, occurrence: int = 0) -> Any:
        """Returns a node's result: a tensor, a number, or a tuple of these; None if it was not recorded."""
        results = self.results.get(node, ())
        return self.store.load(results[occurrence]) if occurrence < len(results) else None

    def tensor(self, node: str, position: int, occurrence: int = 0) -> Tensor | None:
        """Returns one of a node's results, None if it is no tensor or was not recorded."""
        results = self.results.get(node, ())
        result = results[occurrence] if occurrence < len(results) else None
        if isinstance(result, tuple | list):
            result = result[position] if position < len(result) else None
        result = self.store.load(result)
        return result if isinstance(result, Tensor) else None


@dataclass
class _Recording:
    """What a run records: all results that fit into the memory of `store`, and beyond it those of `needed` nodes.

    `nodes` limits the nodes, None means all; `writes` is whether later nodes may write results, which are then copied.
    """

    store: ValueStore
    nodes: Collection[str] | None
    needed: Collection[str]
    writes: bool
    results: dict[str, list[object]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    operands: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, item: GraphNode, result: object) -> None:
        """Records the result of a node."""
        name = item.name
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.shapes[name] = tuple([tuple(leaf.shape) for leaf in tensors])
        self.operands[name] = item.operands
        if item.node.op == "output" or (self.nodes is not None and name not in self.nodes):
            return
        if name in self.needed or not self.store.is_full(result):
            stored = self.store.add(copy_inputs(result) if self.writes else result)
            self.results.setdefault(name, []).append(stored)


def run_graph(
    source: GraphSource,
    inputs: Sequence[object],
    *,
    nodes: Collection[str] | None = None,
    needed: Collection[str] = (),
    memory_bytes: float = math.inf,
    in_float64: bool = False,
) -> GraphRun:
    """Runs a graph on copies of its flat inputs, node by node.

    With `in_float64`, all operators run in float64 and complex128. Tensors of the graph's own that it writes keep their
    contents. `nodes` names the nodes whose results are recorded, None for all. Results of at most `memory_bytes` bytes
    are in memory; those of `needed` nodes beyond are in a temporary file, others are not recorded.

    Raises the error of the operator that fails, and CompareError if the folder for temporary files is full.
    """
    constants = dict(source.constants)
    copies, owned = copy_inputs((list(inputs), constants), to_float64=in_float64)
    queue = iter(copies)
    placeholders = source.graph_module.graph.find_nodes(op="placeholder")
    arguments = [owned[node.name] if node.name in owned else next(queue) for node in placeholders]
    all_nodes = graph_nodes(source.graph_module)
    writes = any(_writes(item.node) for item in all_nodes.values())
    recording = _Recording(ValueStore(memory_bytes), nodes, frozenset(nodes or ()) | frozenset(needed), writes)
    scopes = {item.node.graph: item.scope for item in all_nodes.values()}
    runner = _Runner(source.graph_module, scopes, recording)
    tensors = [leaf for leaf in [*tree_leaves(inputs), *constants.values()] if isinstance(leaf, Tensor)]
    mode = Float64Mode(infer_random_dtype(tensors)) if in_float64 else nullcontext()
    with torch.no_grad(), mode:
        outputs = runner.run(*arguments, enable_io_processing=False)
    return GraphRun(
        recording.results, recording.store, recording.shapes, recording.operands, tuple(flat_outputs(outputs)),
        tuple(copies),
    )  # fmt: skip


class _Runner(Interpreter):
    """Runs a graph and records results; those that a later node may write are copied."""

    def __init__(self, module: GraphModule, scopes: Mapping[Graph, str], recording: _Recording) -> None:
        super().__init__(module)
        self.recording = recording
        self._scopes = scopes
        self._scope = scopes.get(module.graph, _UNNAMED)
        self._attributes: dict[str, object] = {}

    def run_node(self, node: Node) -> Any:
        result = self._run_blocks(node) if _blocks(node) else super().run_node(node)
        self.recording.add(GraphNode(node, self._scope), result)
        return result

    def _run_blocks(self, node: Node) -> Any:
        """Runs an operator on graphs, whose results are recorded too."""
        arguments, keywords = self.fetch_args_kwargs_from_env(node)
        if operator_label(node.target) == _ASSOCIATIVE:  # type: ignore[arg-type]
            self._record_in_order(*arguments)
            return node.target(*arguments, **keywords)  # type: ignore[operator]
        blocks = [self._block(item) if isinstance(item, GraphModule) else item for item in arguments]
        result = node.target(*blocks, **keywords)  # type: ignore[operator]
        for block in blocks:
            if isinstance(block, _Block):
                block.record_runs(_iterations(node, arguments))
        return result

    def _record_in_order(self, combine: GraphModule, scanned: Sequence[Tensor], extra: Sequence[object] = ()) -> None:
        """Runs the combine function from the second element on, as programs do, and records its results."""
        block = self._block(combine)
        last: Sequence[object] = [tensor[0] for tensor in scanned if tensor.shape[0]]
        for position in range(1, scanned[0].shape[0]):
            last = block(*last, *[tensor[position] for tensor in scanned], *extra)  # type: ignore[assignment]
        block.record_runs(None)

    def _block(self, module: GraphModule) -> _Block:
        return _Block(self, module)

    def of_block(self, module: GraphModule) -> _Runner:
        """Returns the runner of a block."""
        return _Runner(module, self._scopes, self.recording)

    def fetch_attr(self, target: str) -> Any:
        """Returns an attribute of the graph, a copy of a tensor that the graph may write."""
        attribute = super().fetch_attr(target)
        if not self.recording.writes or not isinstance(attribute, Tensor):
            return attribute
        return self._attributes.setdefault(target, copy_inputs(attribute))


class _Block:
    """A graph that an operator runs any number of times; the results of each run are recorded separately."""

    def __init__(self, outer: _Runner, module: GraphModule) -> None:
        self._outer = outer.recording
        self._runner = outer.of_block(module)
        self._runs: list[dict[str, list[object]]] = []

    def __call__(self, *operands: object) -> object:
        recording = self._runner.recording = replace(self._outer, results={})
        self._runs.append(recording.results)
        return self._runner.run(*operands, enable_io_processing=False)

    def record_runs(self, count: int | None) -> None:
        """Adds the results of the last `count` runs, None for all, to those of the enclosing graph."""
        for results in self._runs if count is None else self._runs[len(self._runs) - count :]:
            for name, items in results.items():
                self._outer.results.setdefault(name, []).extend(items)


def _iterations(node: Node, arguments: Sequence[Any]) -> int | None:
    """Returns how often a loop over the slices of tensors runs its graph, None for other operators.

    Eager mode may run the graph once more, to learn the sizes of its results.
    """
    label = operator_label(node.target)  # type: ignore[arg-type]
    if label not in _SLICED:
        return None
    return int(arguments[_SLICED[label]][0].shape[0])


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
