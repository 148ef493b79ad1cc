"""Passes over graphs, before lowering and after emission: what they leave is linted, and run on fake tensors.

Only what changed is run: nodes that are new, that call something else, or whose operands are other than before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxwrap.converters.from_fx import from_fx
from fxwrap.errors import GraphError, PassError, ReadBackError
from fxwrap.lowering import GraphSource, check_graph, fake_values
from fxwrap.pass_spec import Pass
from fxwrap.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    fresh_fake_mode,
    lacks_fake_rule,
    on_fake_tensors,
    without_fake_mode,
)
from fxwrap.wrapper_ir import Program


def run_source_passes(
    passes: Sequence[Pass], source: GraphSource, example_inputs: Sequence[Any] | None, *, check: bool = True
) -> GraphSource:
    """Returns what passes make of a graph that is to be lowered. They get a copy; the graph itself is left as it is.

    Raises PassError, which names the pass, the node and the reason, and has the texts of both graphs.
    """
    if not passes:
        return source
    graph = source.graph_module
    changed = GraphModule(graph, copy.deepcopy(graph.graph))
    known: Mapping[Node, Any] = fake_values(changed, example_inputs)
    for item in passes:
        run = _Run(item, changed, known)
        changed = run.after_pass(changed)
        known = run.check(changed) if check else fake_values(changed, example_inputs)
    return replace(source, graph_module=changed)


def run_emitted_pass(item: Pass, graph_module: GraphModule, *, check: bool = True) -> tuple[GraphModule, Program]:
    """Returns what a pass makes of an emitted graph, which it may change in place, and the program that this says.

    Raises PassError, as `run_source_passes`; also for a graph that cannot be read back.
    """
    known = {node: node.meta.get("val") for node in graph_module.graph.nodes}
    run = _Run(item, graph_module, known)
    after = run.after_pass(graph_module)
    if check:
        run.check(after)
    if "fxwrap" not in after.meta:  # another module: it launches the same kernels
        after.meta["fxwrap"] = graph_module.meta.get("fxwrap", {})
    after.recompile()
    return after, run.read_back(after)


@dataclass(frozen=True)
class _Shape:
    """What a node was before a pass: what it calls, on what."""

    target: Any
    args: Any
    kwargs: Any


class _Run:
    """One run of a pass: the graph before it, and the checks of the one after it."""

    def __init__(self, item: Pass, graph_module: GraphModule, known: Mapping[Node, Any]) -> None:
        self.item = item
        self.known = known
        self.nodes = {node: _Shape(node.target, node.args, node.kwargs) for node in graph_module.graph.nodes}
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.names = [str(node.target) for node in self.inputs]
        self.outputs = _outputs(graph_module)
        self.fake_mode = _mode(known.values())
        self.has_metadata = all("val" in node.meta for node in self.inputs)
        self._before = str(graph_module.graph)
        self.after: GraphModule | None = None

    def error(self, reason: str, where: str = "") -> PassError:
        """Returns the error, with both graphs as text."""
        after = "" if self.after is None else str(self.after.graph)
        return PassError(self.item.name, self.item.at, reason, where, self._before, after)

    def _fail(self, node: Node | None, reason: str) -> NoReturn:
        raise self.error(reason, f"> {node.format_node()}" if node is not None else "")

    def after_pass(self, graph_module: GraphModule) -> GraphModule:
        """Runs the pass; returns what it gives, or the graph where it gives nothing."""
        try:
            given = self.item.run(graph_module)
        except Exception as error:  # whatever a pass of somebody else's raises
            raise self.error(f"it raised {type(error).__name__}: {error}") from error
        found = graph_module if given is None else given
        if not isinstance(found, GraphModule):
            raise self.error(f"it returned a {type(found).__name__}, not a GraphModule")
        self.after = found
        return found

    def read_back(self, after: GraphModule) -> Program:
        """Returns the program that an emitted graph says."""
        try:
            return from_fx(after)
        except ReadBackError as error:
            named = [node for node in after.graph.nodes if node.name == error.node]
            self._fail(named[0] if named else None, f"it cannot be read back as a program: {error}")

    def check(self, after: GraphModule) -> dict[Node, Any]:
        """Returns the fake value of each node. Raises PassError for the first thing that is wrong."""
        self._check_structure(after)
        placeholders = after.graph.find_nodes(op="placeholder")
        if [str(node.target) for node in placeholders] != self.names:
            names = ", ".join([str(node.target) for node in placeholders])
            raise self.error(f"it changed the graph's inputs: ({', '.join(self.names)}) became ({names})")
        values = dict(zip(placeholders, [self.known[node] for node in self.inputs], strict=True))
        changed: set[Node] = set()
        with without_fake_mode():
            for node in after.graph.nodes:
                self._evaluate(node, after, values, changed)
        self._check_outputs(after, values)
        return values

    def _check_structure(self, after: GraphModule) -> None:
        nodes = set(after.graph.nodes)
        for node in after.graph.nodes:
            for operand in node.all_input_nodes:
                if operand not in nodes:
                    self._fail(node, f"node '{node.name}' uses '{operand.name}', which is no longer in the graph")
        try:
            after.graph.lint()
            check_graph(after)
        except GraphError as error:
            named = [node for node in after.graph.nodes if node.name == error.node]
            self._fail(named[0] if named else None, f"node '{error.node}': {error.reason}. {error.remedy}")
        except Exception as error:  # lint raises RuntimeError and others
            raise self.error(f"the graph is not well formed: {error}") from error

    def _evaluate(self, node: Node, after: GraphModule, values: dict[Node, Any], changed: set[Node]) -> None:
        """Finds a node's fake value: as it was, or by running it where it is new or reads something else."""
        if node.op in ("placeholder", "output"):
            return
        shape = self.nodes.get(node)
        same = shape is not None and (node.target, node.args, node.kwargs) == (shape.target, shape.args, shape.kwargs)
        if same and not any(operand in changed for operand in node.all_input_nodes):
            values[node] = self.known.get(node)
            return
        found = self._attribute(node, after) if node.op == "get_attr" else self._call(node, values)
        values[node] = found
        if self.has_metadata:
            node.meta["val"] = found
        if shape is None or not _alike(found, self.known.get(node)):
            changed.add(node)

    def _attribute(self, node: Node, after: GraphModule) -> Any:
        found: Any = after
        for part in str(node.target).split("."):
            found = getattr(found, part, None)
        if found is None:
            self._fail(node, f"node '{node.name}' names the attribute {node.target}, which the module does not have")
        return self.fake_mode.from_tensor(found, static_shapes=True) if isinstance(found, torch.Tensor) else found

    def _call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        try:
            with on_fake_tensors(self.fake_mode):
                return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # whatever an operator raises for what it does not take
            if lacks_fake_rule(error):
                reason = "has no rule for fake tensors, so nothing says what it gives; register one with torch.library"
                self._fail(node, f"node '{node.name}': {node.target} {reason}")
            first, _, _ = str(error).partition("\n")
            self._fail(node, f"node '{node.name}': {node.target} fails on these inputs: {first}")

    def _check_outputs(self, after: GraphModule, values: Mapping[Node, Any]) -> None:
        before, now = self.outputs, _outputs(after)
        if len(before) != len(now):
            raise self.error(f"it gives {len(now)} results where the graph gave {len(before)}")
        for position, (old, new) in enumerate(zip(before, now)):
            was = self.known.get(old) if isinstance(old, Node) else old
            value = values[new] if isinstance(new, Node) else new
            if not _alike(was, value):
                node = new if isinstance(new, Node) else None
                self._fail(node, f"result {position} was {_described(was)} and is {_described(value)}")


def _outputs(graph_module: GraphModule) -> list[Any]:
    (output,) = graph_module.graph.find_nodes(op="output")
    given = output.args[0]
    return list(given) if isinstance(given, tuple | list) else [given]


def _mode(values: Any) -> FakeTensorMode:
    found = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    return found if found is not None else fresh_fake_mode()


def _alike(first: Any, second: Any) -> bool:
    """Whether two fake values are the same to who reads them: dtype, device, sizes and strides, as far as known."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (
            first.dtype == second.dtype and first.device == second.device and first.dim() == second.dim()
            and all(map(_same_number, first.shape, second.shape))
            and all(map(_same_step, first.shape, first.stride(), second.stride()))
        )  # fmt: skip
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_alike, first, second))
    return isinstance(first, torch.Tensor) == isinstance(second, torch.Tensor)


def _same_number(first: Any, second: Any) -> bool:
    return not (type(first) is int and type(second) is int) or first == second


def _same_step(size: Any, first: Any, second: Any) -> bool:
    return (type(size) is int and size < 2) or _same_number(first, second)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes, strides = ", ".join(map(str, value.shape)), ", ".join(map(str, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes} | {strides}] on {value.device}"
