"""The smallest part of a graph that still fails."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.debugging.graph_code import graph_code, random_tensor
from fxwrap.debugging.references import run_graph
from fxwrap.debugging.repro import Failure
from fxwrap.errors import ReproError
from fxwrap.fx_passes import GraphSource

Fails = Callable[[Failure], bool]
"""Whether a smaller graph still fails in the same way."""


@dataclass
class Minifier:
    """Shrinks a failure: its nodes, its outputs and its sizes. `tries` counts the graphs that were tried."""

    fails: Fails
    tries: int = 0

    def shrink(self, failure: Failure, first_nodes: Sequence[str] = ()) -> Failure:
        """Returns the smallest part of a graph that fails; `first_nodes` are tried first.

        Raises ReproError if the graph cannot be run operator by operator, or its part does not fail.
        """
        failure = self._shrink_nodes(failure, first_nodes)
        return self._shrink_sizes(failure)

    def _still_fails(self, failure: Failure) -> bool:
        self.tries += 1
        try:
            return self.fails(failure)
        except Exception:  # noqa: BLE001  another error is another failure
            return False

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _shrink_nodes(self, failure: Failure, first_nodes: Sequence[str]) -> Failure:
        parts = _Parts(failure)
        nodes = [node.name for node in parts.calls]
        best: Failure | None = None
        for candidate in _candidates(nodes, first_nodes):
            part = parts.part(candidate)
            if part is not None and self._still_fails(part):
                nodes, best = candidate, part
                break
        if best is None:
            raise ReproError("the graph does not fail with the values of this run; sizes may have to be symbolic")
        size = len(nodes) // 2
        while size:
            for start in range(max(0, len(nodes) - size), -1, -size):
                rest = nodes[:start] + nodes[start + size :]
                part = parts.part(rest) if rest else None
                if part is not None and self._still_fails(part):
                    nodes, best = rest, part
            size //= 2
        for output in nodes:
            part = parts.part(nodes, [output])
            if part is not None and self._still_fails(part):
                return part
        return best

    # --- sizes ------------------------------------------------------------------------------------------------------

    def _shrink_sizes(self, failure: Failure) -> Failure:
        sizes = {size for item in _tensors(failure.inputs) for size in item.shape if size > 1}
        for size in sorted(sizes, reverse=True):
            for smaller in _smaller(size):
                resized = _resized(failure, size, smaller)
                if resized is not None and self._still_fails(resized):
                    failure = resized
                    break
        return failure


def _candidates(nodes: Sequence[str], first: Sequence[str]) -> Iterator[list[str]]:
    """Yields sets of nodes, the smallest first: each of the first nodes, all of them, and the whole graph."""
    chosen = [name for name in nodes if name in first]
    yield from ([name] for name in chosen)
    if len(chosen) > 1:
        yield chosen
    yield list(nodes)


def _smaller(size: int) -> Iterator[int]:
    yield from [candidate for candidate in (1, 2, 3, 4, 8) if candidate < size]
    while (size := size // 2) > 8:
        yield size


class _Parts:
    """Parts of a graph; the values that enter a part are those of one run of the graph."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        module = failure.graph_module
        inputs = failure.inputs if failure.inputs is not None else example_values(module)
        run = run_graph(GraphSource(module, "graph"), inputs)
        self.results = {name: run.result(name) for name in run.results}
        self.calls = [node for node in module.graph.nodes if node.op == "call_function"]

    def part(self, names: Collection[str], outputs: Collection[str] = ()) -> Failure | None:
        """Returns the failure of a part of the graph; None if an operand is neither a tensor nor a number.

        `outputs` names the outputs, by default all results that the part does not use itself.
        """
        nodes = self._with_items(frozenset(names))
        operands = dict.fromkeys([item for node in nodes for item in node.all_input_nodes if item not in nodes])
        graph, env, members = Graph(), dict[Node, Any](), dict[str, Any]()
        tensors = [item for item in operands if isinstance(self.results.get(item.name), Tensor)]
        for item in tensors:
            env[item] = graph.placeholder(item.name)
        for item in operands:
            value = self.results.get(item.name)
            if isinstance(value, GraphModule):
                members[str(item.target)] = value
                env[item] = graph.get_attr(str(item.target))
            elif isinstance(value, bool | int | float | complex | str):
                env[item] = value
            elif item not in env:
                return None
        for node in nodes:
            arguments = map_arg((node.args, node.kwargs), lambda item: env[item])
            assert callable(node.target)
            env[node] = copied = graph.call_function(node.target, *arguments)
            copied.meta |= {key: item for key, item in node.meta.items() if key in ("stack_trace", "nn_module_stack")}
        chosen = [node for node in nodes if node.name in outputs]
        chosen = chosen or [node for node in nodes if not any(user in nodes for user in node.users)]
        returned = tuple([env[node] for node in chosen if isinstance(self.results.get(node.name), Tensor)])
        if not returned:
            return None
        graph.output(returned)
        graph.eliminate_dead_code()
        unused = {item.name for item in graph.find_nodes(op="placeholder") if not item.users}
        for placeholder in graph.find_nodes(op="placeholder"):
            if not placeholder.users:
                graph.erase_node(placeholder)
        values = [self.results[item.name] for item in tensors if str(env[item]) not in unused]
        return replace(self.failure, graph_module=GraphModule(members, graph), inputs=values)

    def _with_items(self, names: Collection[str]) -> list[Node]:
        """Returns nodes in order, with the items of the tuples that they compute, and no items of other tuples."""
        chosen: dict[Node, None] = {}
        for node in self.calls:
            if node.target is operator.getitem:
                if node.args[0] in chosen:
                    chosen[node] = None
            elif node.name in names:
                chosen[node] = None
        return list(chosen)


def example_values(graph_module: GraphModule) -> list[object]:
    """Returns random inputs of a graph whose placeholders have fake values; symbols have the values of their hints."""
    code = graph_code(graph_module, None)
    scope: dict[str, Any] = {"torch": torch, "random_tensor": random_tensor}
    exec(code.functions[code.functions.index("def inputs(") :], scope)
    return list(scope["inputs"](**code.symbols))


def _tensors(inputs: Sequence[object] | None) -> list[Tensor]:
    return [item for item in inputs or () if isinstance(item, Tensor)]


def _resized(failure: Failure, size: int, smaller: int) -> Failure | None:
    """Returns the failure with a smaller size in place of another, in inputs and arguments; None if it does not run."""

    def resize(item: object) -> object:
        return smaller if type(item) is int and item == size else item

    def resize_all(item: Any) -> Any:
        if isinstance(item, tuple | list):
            return type(item)([resize_all(part) for part in item])
        return resize(item)

    inputs: list[object] = []
    for item in failure.inputs or ():
        if isinstance(item, Tensor):
            for dim in range(item.dim()):
                item = item.narrow(dim, 0, smaller) if item.shape[dim] == size else item
            dense = torch.empty_like(item)
            inputs.append(dense.copy_(item))
        else:
            inputs.append(resize(item))
    graph = copy.deepcopy(failure.graph_module.graph)
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = tuple([resize_all(item) for item in node.args])
            node.kwargs = {key: resize_all(item) for key, item in node.kwargs.items()}
    module = GraphModule(failure.graph_module, graph)
    try:
        run_graph(GraphSource(module, "graph"), inputs, nodes=())
    except Exception:  # noqa: BLE001  these sizes do not fit together
        return None
    return replace(failure, graph_module=module, inputs=inputs)
