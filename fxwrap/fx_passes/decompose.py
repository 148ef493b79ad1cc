"""Decomposition of operators by a table, and of composite ones, which torch defines by calls of others.

Graphs that were traced after dispatch, as those of AOTAutograd, have no composite operators. Graphs that are written by
hand, exported or traced before dispatch call `linear`, `to`, `layer_norm` or `scaled_dot_product_attention`. Each such
call is traced alone on its fake operands, and its trace takes its place: other nodes keep their names and metadata.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fxwrap.fx_passes.decompositions import Decomposition
from fxwrap.fx_passes.effects import attribute_of
from fxwrap.fx_passes.graph_copy import CallResults, items_of, layout_text
from fxwrap.fx_passes.layout_changes import changes_layout, replace_layout_changes
from fxwrap.fx_passes.prepared_graph import FxPassContext, NodeValues
from fxwrap.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    OpOverload,
    TreeSpec,
    has_device_kernel,
    in_dispatched_fake_mode,
    in_fake_mode,
    in_tracing_fake_mode,
    is_composite,
    is_data_dependent_error,
    name_unbacked_as,
    symbol_expression,
    tree_flatten,
    tree_unflatten,
    without_library_guards,
    without_logged_errors,
)

log = logging.getLogger("fxwrap.compile")


def may_be_decomposed(node: Node, context: FxPassContext) -> bool:
    """Whether a node calls an operator of the options' table, or a composite one, on a device without its kernel."""
    target = node.target
    if not isinstance(target, OpOverload) or str(target) in context.extern_operators:
        return False
    return target in context.decompositions or (
        str(target) not in _UNCHANGED and is_composite(target) and not changes_layout(node)
    )


_UNCHANGED = frozenset({"aten.sym_size.int", "aten.sym_stride.int", "aten.sym_is_contiguous.default"})
"""Composite operators whose results are expressions of symbols."""

_LIBRARY_CHOICES = frozenset({
    "aten.scaled_dot_product_attention", "aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu",
})  # fmt: skip
"""Composite operators that choose a library's kernel, if the library of the operands' device is here."""

_MOST_NODES = 512
"""The longest decomposition of a composite operator: recurrent layers over many steps would take minutes to compile."""


def decompose(graph_module: GraphModule, fakes: NodeValues, context: FxPassContext) -> GraphModule:
    """Returns the graph with calls of the options' table, and those that the dispatcher decomposes, decomposed.

    The graph itself if none is. Nested graphs are not changed. Nodes of the result have their fake value as metadata. A
    composite call whose decomposition reads elements, or cannot be traced on fake operands, stays a call.
    """
    candidates = [node for node in graph_module.graph.nodes if may_be_decomposed(node, context)]
    decomposed = frozenset([
        node for node in candidates if node.target in context.decompositions or not _has_kernel(node, fakes)
    ])  # fmt: skip
    return _Decomposer(graph_module, fakes, context.decompositions).run(decomposed) if decomposed else graph_module


@dataclass(frozen=True)
class _Call:
    """A call of an operator, by its flat arguments.

    Fields:
        leaves, spec: arguments and keyword arguments.
        operands: the distinct tensors and symbolic numbers among them: nodes, or numbers that no node has.
        values: the fake value of each operand.
        positions: the operand of each leaf, None for literals.
    """

    target: OpOverload
    leaves: tuple[Any, ...]
    spec: TreeSpec
    operands: tuple[Any, ...]
    values: tuple[Any, ...]
    positions: tuple[int | None, ...]

    @classmethod
    def of(cls, target: OpOverload, arguments: Any, fakes: NodeValues) -> _Call:
        """Returns a call of arguments and keyword arguments with nodes among them."""
        leaves, spec = tree_flatten(arguments)
        operands: list[Any] = []
        values: list[Any] = []
        position_of: dict[int, int] = {}
        positions: list[int | None] = []
        for leaf in leaves:
            if not isinstance(leaf, Node | torch.SymInt | torch.SymFloat | torch.SymBool):
                positions.append(None)
                continue
            value = fakes[leaf] if isinstance(leaf, Node) else leaf
            if id(value) not in position_of:
                position_of[id(value)] = len(operands)
                operands.append(leaf)
                values.append(value)
            positions.append(position_of[id(value)])
        return cls(target, tuple(leaves), spec, tuple(operands), tuple(values), tuple(positions))

    @property
    def tensors(self) -> list[FakeTensor]:
        """The fake tensors among the operands."""
        return [value for value in self.values if isinstance(value, FakeTensor)]

    @property
    def text(self) -> str | None:
        """The operator, literals and layouts of operands as a text; None if a layout is symbolic."""
        layouts = [_layout_text(value) for value in self.values]
        if None in layouts:
            return None
        leaves = [leaf if position is None else f"%{position}" for leaf, position in zip(self.leaves, self.positions)]
        return f"{self.target} {self.spec} {leaves} {layouts}"

    def __call__(self, *operands: Any) -> Any:
        """Calls the operator on values of the operands."""
        leaves = [leaf if position is None else operands[position]
                  for leaf, position in zip(self.leaves, self.positions)]  # fmt: skip
        arguments, keywords = tree_unflatten(leaves, self.spec)
        return self.target(*arguments, **keywords)


def _layout_text(value: object) -> str | None:
    text = layout_text(value)
    return None if text is None or value.is_conj() or value.is_neg() else text  # type: ignore[attr-defined]


class _Decomposer:
    """Copies a graph, with some calls decomposed."""

    def __init__(self, source: GraphModule, fakes: NodeValues, table: Mapping[OpOverload, Decomposition]) -> None:
        self.source = source
        self.source_fakes = fakes
        self.table = table
        self.graph = Graph()
        self.node_map: dict[Node, Any] = {}
        self.fakes: dict[Node, Any] = {}
        self.numbers: dict[sympy.Basic, Node] = {}
        self.results = CallResults()
        self.traces: dict[str, GraphModule | None] = {}
        self.attributes: dict[str, object] = {}

    def run(self, decomposed: frozenset[Node]) -> GraphModule:
        """Returns the copy."""
        with torch.no_grad():
            for node in self.source.graph.nodes:
                if not (node in decomposed and self._decompose(node)):
                    self._copy(node)
        if not self.attributes:
            return LazyGraphModule(self.source, self.graph)
        owned = {str(node.target): attribute_of(node) for node in self.source.graph.find_nodes(op="get_attr")}
        return LazyGraphModule({**owned, **self.attributes}, self.graph)

    def _copy(self, node: Node) -> None:
        """Copies a node; an element of a decomposed call's results is no node of its own."""
        if node.target is operator.getitem and not isinstance(results := self.node_map[node.args[0]], Node):  # type: ignore[index]
            self.node_map[node] = results[node.args[1]]
            return
        copy = self.node_map[node] = self.graph.node_copy(node, self.node_map.__getitem__)
        if node in self.source_fakes:
            self._define(copy, self.source_fakes[node])
            if node.op != "output":
                copy.meta["val"] = self.source_fakes[node]

    def _decompose(self, node: Node) -> bool:
        """Writes the calls of a node's decomposition; returns whether there is one."""
        arguments = map_arg((node.args, node.kwargs), self.node_map.__getitem__)
        call = _Call.of(node.target, arguments, self.fakes)  # type: ignore[arg-type]
        text = call.text
        trace = self.traces[text] if text in self.traces else self._trace(node, call)
        if text is not None and (trace is None or not any(map(_defines_symbols, trace.graph.nodes))):
            self.traces[text] = trace
        if trace is None:
            return False
        self.node_map[node] = self._insert(node, trace, call)
        return True

    def _trace(self, node: Node, call: _Call) -> GraphModule | None:
        """Returns the graph of a call's decomposition, a function of its operands; None if the call stays."""
        tensors = call.tensors
        if not tensors or not all(isinstance(value, FakeTensor | torch.SymInt | torch.SymFloat | torch.SymBool)
                                  for value in call.values):  # fmt: skip
            return None
        if str(call.target).rpartition(".")[0] in _LIBRARY_CHOICES and not _is_present(tensors[0].device):
            log.debug("%s: stays a call, since its device is not here to choose a kernel", node.name)
            return None
        try:
            with without_logged_errors():
                trace = self._trace_on_fakes(call, tensors[0].fake_mode)
        except Exception as error:  # an operator's own
            if call.target in self.table:
                raise
            log.debug("%s: stays a call, since its decomposition cannot be traced: %s", node.name, error)
            return None
        if len(trace.graph.nodes) > _MOST_NODES:
            log.debug("%s: stays a call, since its decomposition has %d calls", node.name, len(trace.graph.nodes))
            return None
        for inner in trace.graph.nodes:
            if inner.target is call.target or changes_layout(inner):
                log.debug("%s: stays a call, since its decomposition calls %s", node.name, inner.target)
                return None
        if not name_unbacked_as(self.source_fakes[node], _result_of(trace)):
            log.debug("%s: stays a call, since its decomposition has other unbacked symbols", node.name)
            return None
        return trace

    def _trace_on_fakes(self, call: _Call, mode: FakeTensorMode) -> GraphModule:
        """Returns the graph of a call; numbers that it reads from tensors are unbacked symbols."""

        def trace() -> GraphModule:
            return replace_layout_changes(make_fx(call, dict(self.table))(*call.values))

        # As make_fx does: with symbolic sizes, torch's Python decompositions come first.
        scope = in_fake_mode if call.text is not None else in_dispatched_fake_mode
        try:
            with scope(mode), without_library_guards(mode, call.target):
                return trace()
        except Exception as error:
            if not is_data_dependent_error(error):
                raise
        with in_tracing_fake_mode(mode):
            return trace()

    def _insert(self, node: Node, trace: GraphModule, call: _Call) -> Any:
        """Inserts the calls of a trace, and returns its results: a node, a literal or a tree of these.

        The call that computes the only result, which may be one of several of its own, has the name of the node.
        """
        result: Any = trace.graph.output_node().args[0]
        is_element = isinstance(result, Node) and result.target is operator.getitem
        last = result.args[0] if is_element else result
        remaining = iter(call.operands)
        values: dict[Node, Any] = {}
        for inner in trace.graph.nodes:
            if inner.op == "placeholder":
                values[inner] = next(remaining)
            elif inner.op == "get_attr":
                values[inner] = self._attribute(f"{node.name}_{inner.target}", attribute_of(inner), call.tensors[0])
            elif inner.op == "call_function":
                name = node.name if inner is last else f"{node.name}_{inner.name}"
                known = self._number(inner.meta.get("val"))
                values[inner] = known or self._call(inner, values, name, node, call.tensors[0])
        return map_arg(result, values.__getitem__)

    def _call(self, inner: Node, values: Mapping[Node, Any], name: str, origin: Node, like: FakeTensor) -> Node:
        arguments: Any
        arguments, keywords = map_arg((inner.args, inner.kwargs), values.__getitem__)
        copy = self.graph.create_node("call_function", inner.target, arguments, keywords, name)
        copy.meta = {"original_aten": origin.target, **origin.meta}
        copy.meta.pop("tensor_meta", None)
        copy.meta.pop("unbacked_bindings", None)
        if _defines_symbols(inner):  # another call would have other symbols
            copy.meta["unbacked_bindings"] = inner.meta["unbacked_bindings"]
            fake = inner.meta["val"]
        else:
            fake = self.results.run(copy, self.fakes, like)
        copy.meta["val"] = fake
        self._define(copy, fake)
        return copy

    def _define(self, copy: Node, fake: object) -> None:
        """Records the fake value of a node of the copy."""
        self.fakes[copy] = fake
        if isinstance(fake, torch.SymInt):
            self.numbers.setdefault(symbol_expression(fake), copy)

    def _number(self, fake: object) -> Node | None:
        """Returns the node of a symbolic number, or a new one that reads it from the size of an input.

        Passes look for results with one reader, which their sizes should not count as.
        """
        if not isinstance(fake, torch.SymInt):
            return None
        number = symbol_expression(fake)
        if number not in self.numbers and number in self.input_sizes:
            size = self.graph.create_node("call_function", torch.ops.aten.sym_size.int, self.input_sizes[number])
            size.meta["val"] = fake
            self._define(size, fake)
        return self.numbers.get(number)

    @cached_property
    def input_sizes(self) -> Mapping[sympy.Basic, tuple[Node, int]]:
        """The input and dimension whose size a symbolic number is."""
        inputs = self.source.graph.find_nodes(op="placeholder")
        tensors = {node: fake for node in inputs if isinstance(fake := self.source_fakes[node], torch.Tensor)}
        sizes: list[tuple[Any, tuple[Node, int]]] = [
            (size, (self.node_map[node], dim)) for node, fake in tensors.items() for dim, size in enumerate(fake.shape)
        ]
        return {symbol_expression(size): place for size, place in sizes if isinstance(size, torch.SymInt)}

    def _attribute(self, name: str, payload: object, like: FakeTensor) -> Node:
        """Adds an attribute of the copy, and a node that reads it; `like` has the fake mode of tensors."""
        self.attributes[name] = payload
        attribute = self.graph.create_node("get_attr", name)
        if isinstance(payload, torch.Tensor) and not isinstance(payload, FakeTensor):
            payload = like.fake_mode.from_tensor(payload, static_shapes=True)
        self.fakes[attribute] = attribute.meta["val"] = payload
        return attribute


def _defines_symbols(node: Node) -> bool:
    """Whether the fake result of a traced call has new unbacked symbols."""
    return bool(node.meta.get("unbacked_bindings"))


def _result_of(trace: GraphModule) -> Any:
    """Returns the fake results of a traced graph, and its literals."""
    return map_arg(trace.graph.output_node().args[0], lambda node: node.meta.get("val"))


def _has_kernel(node: Node, fakes: NodeValues) -> bool:
    """Whether the dispatcher runs a kernel of the device of the first tensor instead of a composite decomposition."""
    operands = [item for operand in node.all_input_nodes for item in items_of(fakes[operand])]
    device = next((item.device for item in operands if isinstance(item, torch.Tensor)), None)
    return device is not None and has_device_kernel(node.target, device)  # type: ignore[arg-type]


def _is_present(device: torch.device) -> bool:
    """Whether tensors can be on a device in this process."""
    here = {torch.device("cpu").type}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device.type in (here if accelerator is None else {*here, accelerator.type})
