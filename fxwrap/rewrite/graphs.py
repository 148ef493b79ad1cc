"""Patterns over emitted FX graphs, matched by torch.fx's SubgraphMatcher on the graph's data flow.

In an emitted graph a kernel writes memory, and later nodes read the memory: a matcher that follows arguments misses the
dependence. The matcher therefore runs on a copy of the graph in which a launch returns the tensors that it writes;
matches are replaced in the graph itself.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, Proxy, symbolic_trace
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher

from fxwrap.converters.from_fx.kernel_table import registered_definition
from fxwrap.converters.fx.metadata import node_metadata, other_metadata
from fxwrap.errors import RewriteError
from fxwrap.fx_passes.effects import storage_of
from fxwrap.inference import call_on_fakes, lists_to_tuples
from fxwrap.matching import full_name, known_operator, merge_origins, operands_by_role, result_order
from fxwrap.runtime import kernel_table
from fxwrap.torch_compat import (
    FakeTensor,
    OpOverload,
    arguments_by_name,
    triton_kernel_at,
    triton_launch,
    triton_launch_functional,
)
from fxwrap.wrapper_ir import (
    KernelCalls,
    KernelDefinition,
    LaunchOperand,
    Origin,
    UnreadOperand,
    launched_calls,
    leaves,
    map_leaves,
    operator_schema,
)

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty_strided.default, torch.ops.fxwrap.reuse.default,
        torch.ops.fxwrap.pool_slice.default, torch.ops.fxwrap.workspace.default,
        torch.ops.fxwrap.allocate_symmetric.default,
    }
)  # fmt: skip
"""The operators that return uninitialised memory."""

_CPP_LAUNCHES = frozenset({torch.ops.fxwrap.cpp_kernel.default, torch.ops.fxwrap.cpp_kernel_functional.default})
_FUNCTIONAL_LAUNCHES = frozenset({torch.ops.fxwrap.cpp_kernel_functional.default, triton_launch_functional})


@dataclass(frozen=True)
class GraphMatch:
    """A match in a graph: the names of its nodes, and why it was not replaced ("" if it was)."""

    nodes: tuple[str, ...]
    failure_reason: str = ""


def replace_in_graph(
    graph_module: GraphModule,
    pattern: Callable[..., object],
    replacement: Callable[..., object],
    *,
    where: Callable[[dict[str, Node]], bool] | None = None,
) -> list[GraphMatch]:
    """Replaces each match of a pattern in an emitted graph, in place, and compiles the graph's code again.

    Both functions take the same arguments, as for `torch.fx.replace_pattern`, and are traced symbolically. In `pattern`
    a `kernel_node(*operators)` matches a launch. A match is not replaced if memory that it reads is written between its
    nodes, if one of its nodes has another effect, or if a kernel writes memory that other nodes share.

    Args:
        graph_module: the result of `to_fx`, in any form, or a graph of ATen operators.
        pattern: a function of tensors.
        replacement: a function of the same tensors that returns the same results.
        where: a condition on the nodes of the pattern's arguments, by name.

    Returns the matches in the order of the graph, with the reason for those that were not replaced. Raises RewriteError
    for a replacement with another dtype, shape or device.
    """
    pattern_graph, traced_replacement = symbolic_trace(pattern).graph, symbolic_trace(replacement)
    flow = _GraphDataFlow(graph_module)
    matcher = SubgraphMatcher(pattern_graph)
    names = [str(node.target) for node in pattern_graph.find_nodes(op="placeholder")]
    results = []
    for match in sorted(matcher.match(flow.graph), key=lambda item: flow.last(item)):
        nodes = flow.matched_nodes(match)
        reason = flow.conflict(match)
        arguments = dict(zip(names, [flow.original(node) for node in match.placeholder_nodes], strict=True))
        if not reason and where is not None and not where(arguments):
            reason = "the condition does not hold"
        results.append(GraphMatch(tuple([node.name for node in nodes]), reason))
        if not reason:
            flow.replace(match, traced_replacement, list(arguments.values()))
    graph_module.recompile()
    return results


@dataclass
class _GraphDataFlow:
    """The data flow of a graph as a second graph. `positions` are those of the nodes of the graph itself."""

    module: GraphModule
    graph: Graph = field(default_factory=Graph)
    positions: dict[Node, int] = field(default_factory=dict)
    sources: dict[Node, Node] = field(default_factory=dict)  # nodes of the copy -> original nodes
    memory_nodes: dict[Node, Node] = field(default_factory=dict)  # nodes of the copy -> the nodes that hold the result
    writes: list[tuple[int, int]] = field(default_factory=list)  # position, storage

    def __post_init__(self) -> None:
        nodes = list(self.module.graph.nodes)
        self.positions = {node: index for index, node in enumerate(nodes)}
        shared: dict[int, int] = {}
        for node in nodes:
            storage = storage_of(node)
            if storage is not None:
                shared[storage] = shared.get(storage, 0) + 1
        content: dict[Node, Node] = {}
        for node in nodes:
            kernel = kernel_of(node) if node.op == "call_function" else None
            if kernel is not None and kernel.is_functional:
                self._functional_launch(kernel, content)
            elif kernel is not None and all(shared.get(storage_of(out) or 0) == 1 for out in kernel.outs):
                self._launch(kernel, content)
            elif node not in content:
                self._copy(node, content)
        self.graph.owning_module = self.module

    def _copy(self, node: Node, content: dict[Node, Node]) -> None:
        copy = self.graph.node_copy(node, lambda operand: content[operand])
        self.sources[copy] = node
        self.memory_nodes[copy] = node
        content[node] = copy
        written = _written(node)
        returns_it = len(written) == 1 and isinstance(node.meta.get("val"), torch.Tensor)  # an in-place operator
        for index, operand in enumerate(written):
            self._record_write(node, operand)
            content[operand] = copy if returns_it else self._written_item(copy, index, operand)

    def _written_item(self, copy: Node, index: int, operand: Node) -> Node:
        """Returns a node for the content of an operand that a node writes and does not return."""
        part = self.graph.call_function(operator.getitem, (copy, index))
        self.sources[part] = self.sources[copy]
        self.memory_nodes[part] = operand
        return part

    def _launch(self, kernel: KernelNode, content: dict[Node, Node]) -> None:
        copy = self.graph.call_function(*_target_and_operands(kernel, content))
        self.sources[copy] = kernel.node
        content[kernel.node] = copy
        for index, out in enumerate(kernel.outs):
            self._record_write(kernel.node, out)
            if len(kernel.outs) > 1:
                content[out] = self._written_item(copy, kernel.result_number(index), out)
            else:
                self.memory_nodes[copy] = out
                content[out] = copy

    def _functional_launch(self, kernel: KernelNode, content: dict[Node, Node]) -> None:
        """Adds a launch that returns its results, which are items of the node."""
        copy = content[kernel.node] = self.graph.call_function(*_target_and_operands(kernel, content))
        self.sources[copy] = kernel.node
        keys = list(kernel.node.meta["val"])  # of a dict, else positions are the keys
        for item in kernel.outs:
            if len(keys) > 1:
                index = keys.index(item.args[1]) if isinstance(item.args[1], str) else item.args[1]
                content[item] = self._written_item(copy, kernel.result_number(index), item)  # type: ignore[arg-type]
            else:
                self.memory_nodes[copy] = item
                content[item] = copy

    def _record_write(self, node: Node, operand: Node) -> None:
        storage = storage_of(operand)
        if storage is not None:
            self.writes.append((self.positions[node], storage))

    # --- matches ----------------------------------------------------------------------------------------------------

    def original(self, item: object) -> Any:
        """Returns the node of the graph that holds the result of a node of the copy; a literal is itself."""
        return self.memory_nodes.get(item, item) if isinstance(item, Node) else item

    def matched_nodes(self, match: InternalMatch) -> list[Node]:
        """Returns the nodes of the graph that a match replaces, in order."""
        nodes = [self.sources[node] for pn, node in match.nodes_map.items() if pn.op not in ("placeholder", "output")]
        return sorted(dict.fromkeys(nodes), key=self.positions.__getitem__)

    def last(self, match: InternalMatch) -> int:
        """Returns the position of a match's last node."""
        return self.positions[self.matched_nodes(match)[-1]]

    def conflict(self, match: InternalMatch) -> str:
        """Returns why a match cannot be replaced at its last node, or ""."""
        nodes = self.matched_nodes(match)
        first, last = self.positions[nodes[0]], self.positions[nodes[-1]]
        own = {self.positions[node] for node in nodes}
        for node in nodes:
            if kernel_of(node) is None and (node.is_impure() or _written(node)):
                return f"'{node.name}' has an effect"
        read = {storage_of(operand) for node in nodes for operand in node.all_input_nodes}
        for index, storage in self.writes:
            if first < index < last and index not in own and storage in read:
                return "memory that it reads is written between its nodes"
        for node in match.returning_nodes:
            holder = self.original(node)
            start = self.positions[self.sources[node]]
            used = [user for user in holder.users if start < self.positions.get(user, last + 1) < last]
            if any(user not in nodes for user in used):
                return f"'{holder.name}' is used before the last node of the match"
        return ""

    def replace(self, match: InternalMatch, replacement: GraphModule, operands: Sequence[Node]) -> None:
        """Inserts the replacement at a match's last node."""
        nodes, graph = self.matched_nodes(match), self.module.graph
        placeholders = replacement.graph.find_nodes(op="placeholder")
        before = set(graph.nodes)
        operands_of = {node: node.all_input_nodes for node in nodes}
        with graph.inserting_before(nodes[-1]):
            values = dict(zip(placeholders, operands, strict=True))
            output: Any = graph.graph_copy(replacement.graph, values)
        results: list[Node] = list(output) if isinstance(output, tuple | list) else [output]
        origin = merge_origins([_imported_origin(node) for node in nodes])
        stream = nodes[-1].meta.get("stream", 0)
        for node in graph.nodes:
            if node not in before:
                self.positions[node] = self.positions[nodes[-1]]
                _propagate_fake(node)
                node.meta |= node_metadata(node.meta.get("val"), origin, stream)
        for old, new in zip(match.returning_nodes, results, strict=True):
            self._replace_uses(old, new, nodes)
        for node in reversed(nodes):
            kernel = kernel_of(node) if node.op == "call_function" else None
            for item in kernel.outs if kernel is not None and kernel.is_functional else ():
                if not item.users:
                    graph.erase_node(item)
            if not node.users:
                graph.erase_node(node)
        remaining = set(graph.nodes)
        for out in dict.fromkeys([operand for node in nodes for operand in operands_of[node]]):
            if out in remaining and not out.users and out.target in _ALLOCATIONS:
                graph.erase_node(out)

    def _replace_uses(self, old: Node, new: Node, nodes: Sequence[Node]) -> None:
        """Replaces the readers of a match's result; the content of memory that others share is copied."""
        holder, index = self.original(old), self.positions[self.sources[old]]
        before, after = _describe(holder.meta.get("val")), _describe(new.meta.get("val"))
        if before != after:
            raise RewriteError(f"'{holder.name}' is {before}, but the replacement is {after}")
        if holder.op != "call_function" and old.target is not holder.target:
            with self.module.graph.inserting_before(nodes[-1]):
                copied = self.module.graph.call_function(torch.ops.aten.copy_.default, (holder, new))
            self.positions[copied] = self.positions[nodes[-1]]
            _propagate_fake(copied)
            copied.meta |= node_metadata(
                copied.meta.get("val"), new.meta.get("fxwrap_origin"), new.meta.get("stream", 0)
            )
            return
        holder.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and self._is_later(user, index))
        for item, node in list(self.memory_nodes.items()):
            if node is holder and self.positions[self.sources[item]] >= index:
                self.memory_nodes[item] = new

    def _is_later(self, user: Node, index: int) -> bool:
        return self.positions.get(user, -1) > index


def _target_and_operands(kernel: KernelNode, content: Mapping[Node, Node]) -> tuple[KernelTarget, tuple[Any, ...]]:
    """Returns the target of a launch, and the contents of the operands of its operators, by role.

    A launch of which they are unknown has a target that no pattern has.
    """
    calls = kernel.calls
    operands = [] if calls is None else operands_by_role(calls)
    unknown = False

    def operand(leaf: object) -> object:
        nonlocal unknown
        if not isinstance(leaf, LaunchOperand):
            unknown |= isinstance(leaf, UnreadOperand)
            return leaf
        node = (kernel.initial if leaf.is_out else kernel.ins)[leaf.position]
        unknown |= leaf.is_base or node is None
        return leaf if node is None else content[node]

    bound = tuple([map_leaves(item, operand) for item in operands])
    if calls is None or unknown:
        return KernelTarget(()), tuple([content[item] for item in kernel.ins])
    return KernelTarget(calls.operators), bound


def _imported_origin(node: Node) -> Origin:
    """Returns the origin of a node with its present metadata of other tools."""
    return dataclasses.replace(node.meta.get("fxwrap_origin") or Origin(), metadata=(("", other_metadata(node)),))


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor" if value is not None else "nothing"
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def _written(node: Node) -> list[Node]:
    """Returns the operands that a node mutates, by its schema or as the outputs of its kernel."""
    if not isinstance(node.target, OpOverload):
        kernel = kernel_of(node) if node.op == "call_function" else None
        return [] if kernel is None or kernel.is_functional else list(kernel.outs)
    schema = operator_schema(node.target)
    operands = [schema.operand(name, node.args, tuple(node.kwargs.items())) for name in schema.mutated_arguments]
    return [item for item in leaves(lists_to_tuples(operands)) if isinstance(item, Node)]


def _propagate_fake(node: Node) -> None:
    """Sets the fake value of a new node, if its operands have fake values."""
    operands = [item.meta.get("val") for item in node.all_input_nodes]
    mode = next((item.fake_mode for item in operands if isinstance(item, FakeTensor)), None)
    if node.op != "call_function" or mode is None:
        return
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda item: item.meta.get("val"))
    node.meta["val"] = call_on_fakes(mode, node.target, args, kwargs)  # type: ignore[arg-type]


@dataclass(frozen=True)
class KernelNode:
    """A node that launches a kernel.

    `operators` are the ATen operators that the kernel computes, in order ("aten.add.Tensor", "aten.gelu"), and `calls`
    their calls, if these are known; `ins` and `outs` are the nodes of the tensors that it reads and writes. In a
    functional graph, `outs` are the results that are used, items of the node, and `copied` the tensors with copies of
    which they begin; `initial` has one of these, or None, for each output.
    """

    node: Node
    kernel: KernelDefinition
    operators: tuple[str, ...]
    ins: tuple[Node, ...]
    outs: tuple[Node, ...]
    copied: tuple[Node, ...] = ()
    initial: tuple[Node | None, ...] = ()
    calls: KernelCalls | None = None

    def result_number(self, position: int) -> int:
        """Returns the position of an output among the results of the operators."""
        return position if self.calls is None else result_order(self.calls).index(position)

    @property
    def is_functional(self) -> bool:
        """Whether the node returns what the kernel writes."""
        return self.node.target in _FUNCTIONAL_LAUNCHES


def kernel_of(node: Node) -> KernelNode | None:
    """Returns the launch of a node of an emitted graph; None for a node that launches no kernel of fxwrap."""
    if node.target in _CPP_LAUNCHES:
        arguments = arguments_by_name(node)
        kernel = _definition(node, str(arguments["kernel"]))
        return None if kernel is None else _kernel_node(node, kernel, arguments["ins"], arguments["outs"])
    if node.target is triton_launch or node.target is triton_launch_functional:
        return _triton(node)
    return None


def _kernel_node(node: Node, kernel: KernelDefinition, ins: Sequence[Node], outs: Sequence[Node | None]) -> KernelNode:
    origin = node.meta.get("fxwrap_origin")
    calls = launched_calls(origin)
    if calls is not None:
        operators = _without_default(calls.operators)
    else:
        operators = tuple(origin.operators) if origin is not None else ()
    tensors = tuple([out for out in outs if out is not None])
    if node.target not in _FUNCTIONAL_LAUNCHES:
        return KernelNode(node, kernel, operators, tuple(ins), tensors, (), tensors, calls)
    items = tuple([user for user in node.users if user.target is operator.getitem])
    copied = tuple([item for item in tensors if item.target not in _ALLOCATIONS])
    return KernelNode(node, kernel, operators, tuple(ins), items, copied, tuple(outs), calls)


def _triton(node: Node) -> KernelNode | None:
    try:
        kernel_hash = getattr(triton_kernel_at(node.kwargs["kernel_idx"]), "fxwrap_hash", None)  # type: ignore[arg-type]
    except (AssertionError, KeyError):
        kernel_hash = node.meta.get("fxwrap_kernel")
    kernel = None if kernel_hash is None else _definition(node, str(kernel_hash))
    if kernel is None:
        return None
    arguments: Any = node.kwargs["kwargs"]
    nodes = [item for item in arguments.values() if isinstance(item, Node)]
    tensors = [item for item in nodes if isinstance(item.meta.get("val"), torch.Tensor)]
    split = len(tensors) - kernel_table.get_registered_kernel(kernel.hash).outs
    return _kernel_node(node, kernel, tensors[:split], tensors[split:])


def _definition(node: Node, kernel_hash: str) -> KernelDefinition | None:
    """Returns the definition with a content hash: that of the graph, or else of the process."""
    metadata = getattr(node.graph.owning_module, "meta", None) or {}
    kernels: dict[str, KernelDefinition] = metadata.get("fxwrap", {}).get("kernels", {})
    return kernels.get(kernel_hash) or registered_definition(kernel_hash)


def kernel_nodes(graph_module: GraphModule, *operators: str, exactly: bool = True) -> Iterator[KernelNode]:
    """Yields the launches of an emitted graph, in order: all, or those that compute these ATen operators.

    With `exactly`, these and no others, in this order; otherwise at least these.
    """
    selected = _without_default(operators)
    for node in graph_module.graph.nodes:
        kernel = kernel_of(node)
        if kernel is None:
            continue
        if not selected or (kernel.operators == selected if exactly else set(selected) <= set(kernel.operators)):
            yield kernel


def _without_default(operators: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([name.removesuffix(".default") for name in operators])


@dataclass(frozen=True)
class KernelTarget:
    """The target of a kernel launch in patterns and in the graphs that they are matched with.

    Targets with the same operators are equal. A call on the proxies of a pattern returns the tensor that the kernel
    writes, or one `[i]` for each, in the order of the operators.
    """

    operators: tuple[str, ...]

    def __call__(self, *operands: object) -> Proxy:
        """Adds the launch to a traced pattern; the operands are those of the operators, by role."""
        proxy = next((item for item in operands if isinstance(item, Proxy)), None)
        if proxy is None:
            raise RewriteError("kernel_node(...) is for functions that are patterns: call it on their arguments")
        launch: Proxy = proxy.tracer.create_proxy("call_function", self, operands, {})
        return launch

    @property
    def __name__(self) -> str:
        return "kernel_node"


def kernel_node(*operators: str) -> KernelTarget:
    """Returns the pattern of a kernel that computes these ATen operators and no others, views included, in this order.

    Call it on the operands of the operators in order, numbers included, without those that the kernel computes and
    those that have the default of the schema, as for `launch(computes(...))`. `kernel_nodes` lists the launches of a
    graph.
    """
    names = tuple(map(full_name, operators))
    for name in names:
        known_operator(name)
    return KernelTarget(names)
