"""Loops over experts as models write them: for each expert, the calls on the rows that a condition selects.

A loop over experts is unrolled in a graph. The body of an expert begins with `nonzero` of its condition, or with an
index that is the condition. Its last call adds the rows to a result, or writes them into it. The bodies of all experts
are the same calls, on slices of the same stacked weights.

In a joint graph of training, the backward of an expert belongs to its body, since it reads the same rows. It ends with
gradients, which the graph sums over experts.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxwrap.fx_passes.attention.nodes import element_count, is_tensor
from fxwrap.fx_passes.effects import has_effect, name_of
from fxwrap.fx_passes.experts.conditions import ExpertCondition, expert_condition
from fxwrap.fx_passes.experts.gradients import GradientSum, gradient_sums, stacks_of
from fxwrap.fx_passes.graph_copy import expression_of, expressions_of, items_of
from fxwrap.fx_passes.prepared_graph import NodeValues, PreparedGraph

_TERMINALS = frozenset({"index_add", "index_put", "scatter_add"})
"""Operators that add rows to the result of a loop, or write them into it."""
_COMPARISONS = frozenset({"sym_size", "ge", "le", "eq"})


@dataclass
class ExpertBody:
    """The calls on the rows of one expert.

    Fields:
        condition: the condition that selects the rows.
        nodes: the calls whose results have the rows, in order.
        guards: calls that compute with the number of rows alone.
        terminal: the call that adds the rows to a tensor, or writes them into it.
        gradients: calls that return gradients, which are zero but for the expert's rows, or but for its slice.
        rows: the symbols that count the rows.
        is_valid: whether the calls are those of a loop.
        reads_base: whether the tensor before the loop, to which these rows are added first, is what all experts read.
    """

    condition: ExpertCondition
    nodes: dict[Node, int] = field(default_factory=dict)
    guards: list[Node] = field(default_factory=list)
    terminal: Node | None = None
    gradients: list[Node] = field(default_factory=list)
    rows: set[sympy.Basic] = field(default_factory=set)
    is_valid: bool = True
    reads_base: bool = False

    @property
    def result(self) -> Node:
        """The tensor to which the rows are added."""
        assert self.terminal is not None
        return self.terminal.args[0]  # type: ignore[return-value]

    def reads_result(self, node: Node, item: object) -> bool:
        """Whether an operand of a call is the result of the earlier experts."""
        return item is self.result and (node is self.terminal or not self.reads_base)

    def outer_users(self, node: Node, stacks: Collection[Node]) -> list[Node]:
        """Returns the readers of a call that are neither of the body nor stack gradients of all experts."""
        inner = (self.terminal, *self.gradients, *stacks)
        return [user for user in node.users if user not in self.nodes and user not in self.guards and user not in inner]


@dataclass(frozen=True)
class ExpertResult:
    """A result of each expert that something else reads, such as the gradient of its own weight.

    Fields:
        nodes: the call of each body, whose result has no rows.
        users: its readers outside of the bodies.
    """

    nodes: tuple[Node, ...]
    users: Sequence[Node]


@dataclass(frozen=True)
class ExpertLoop:
    """A loop over experts.

    Fields:
        bodies: the body of each expert.
        order: the numbers of the experts in the order in which they change the result.
        externals: for an operand of the first body from outside, the operand of each body in its place.
        gradients: the sums of gradients over the experts.
        results: what else is read of each expert.
    """

    bodies: Sequence[ExpertBody]
    order: Sequence[int]
    externals: Mapping[Node, tuple[Node, ...]]
    gradients: Sequence[GradientSum] = ()
    results: Sequence[ExpertResult] = ()

    @property
    def indices(self) -> Node:
        """The tensor of the numbers of experts."""
        return self.bodies[0].condition.indices

    @property
    def base(self) -> Node:
        """The tensor to which the first expert's rows are added."""
        return self.bodies[self.order[0]].result

    @property
    def last_call(self) -> Node:
        """The call by which the first body changes the result."""
        assert self.bodies[0].terminal is not None
        return self.bodies[0].terminal

    @property
    def result(self) -> Node:
        """The call that returns the result of the loop."""
        terminal = self.bodies[self.order[-1]].terminal
        assert terminal is not None
        return terminal

    def inner_nodes(self) -> list[Node]:
        """Returns the calls that the loop consists of, but that of its result."""
        inner = [node for body in self.bodies for node in (*body.nodes, *body.guards, *body.gradients)]
        return inner + [body.terminal for body in self.bodies if body.terminal not in (None, self.result)]


def expert_loops(graph: PreparedGraph) -> list[ExpertLoop]:
    """Returns the loops over experts of a graph."""
    collector = _Collector(graph.fakes)
    for node in graph.nodes:
        if node.op == "call_function":
            collector.add(node)
    loops = [_match_loop(bodies, graph.fakes) for bodies in collector.bodies.values()]
    return [loop for loop in loops if loop is not None]


class _Collector:
    """Collects the bodies of experts from the nodes of a graph, in order. `bodies` has them by indices and number."""

    def __init__(self, fakes: NodeValues) -> None:
        self._fakes = fakes
        self._owners: dict[Node, ExpertBody] = {}
        self.bodies: dict[Node, dict[int, ExpertBody]] = {}

    def add(self, node: Node) -> None:
        """Adds a call to the body of the expert whose rows it reads, if it reads some."""
        owners = {id(body): body for item in node.all_input_nodes if (body := self._owners.get(item)) is not None}
        condition = self._selection(node)
        if condition is not None:
            body = self.bodies.setdefault(condition.indices, {}).setdefault(condition.number, ExpertBody(condition))
            body.is_valid = body.is_valid and body.condition.axes == condition.axes
            owners[id(body)] = body
        if len(owners) == 1:
            (body,) = owners.values()
            self._add_to(body, node, selects=condition is not None)

    def _selection(self, node: Node) -> ExpertCondition | None:
        """Returns the condition by which a call selects rows, if any."""
        match name_of(node), node.args:
            case "nonzero", (Node() as mask,):
                return expert_condition(mask, self._fakes)
            case (("index" | "index_put"), (_, [Node() as mask], *_)) if is_tensor(mask, self._fakes):
                return expert_condition(mask, self._fakes) if self._fakes[mask].dtype is torch.bool else None
            case _:
                return None

    def _add_to(self, body: ExpertBody, node: Node, *, selects: bool) -> None:
        """Adds a call to a body, whose rows it may select."""
        fake, name = self._fakes.get(node), name_of(node)
        if self._is_gradient(body, node):
            body.gradients.append(node)
            return
        if name in _TERMINALS:
            body.is_valid = body.is_valid and body.terminal is None
            body.terminal = node
            return
        if not selects and self._is_outside(body, node):
            return
        self._owners[node] = body
        if not isinstance(fake, torch.Tensor | tuple | list):
            body.guards.append(node)
            body.is_valid = body.is_valid and self._is_trivial(body, node)
            return
        if selects and isinstance(fake, torch.Tensor):
            body.rows.add(expression_of(fake.shape[0]))
        body.nodes[node] = len(body.nodes)

    def _is_gradient(self, body: ExpertBody, node: Node) -> bool:
        """Whether a call adds rows to zeros of the body's own, or returns the gradient of the base of a slice."""
        if name_of(node) == "select_backward":
            return not depends_on_rows(self._fakes[node], body)
        return name_of(node) in _TERMINALS and node.args[0] in body.nodes

    def _is_outside(self, body: ExpertBody, node: Node) -> bool:
        """Whether a call reads results of an expert without rows, such as gradients, with other tensors, or writes."""
        tensors = [item for item in node.all_input_nodes if is_tensor(item, self._fakes)]
        fakes = [self._fakes[item] for item in (node, *tensors) if item in self._fakes]
        if not tensors or any(depends_on_rows(fake, body) for fake in fakes):
            return False
        return has_effect(node) or not all(item in body.nodes for item in tensors)

    def _is_trivial(self, body: ExpertBody, node: Node) -> bool:
        """Whether a call asserts that the number of rows is from 0 to the number of indices, which is always true."""
        if name_of(node) in _COMPARISONS:
            return True
        if name_of(node) == "sym_numel":
            return expression_of(self._fakes[node]) in body.rows
        condition = node.args[0] if name_of(node) == "assert_scalar" else None
        if not isinstance(condition, Node) or not isinstance(self._fakes[condition], torch.SymBool):
            return False
        asserted: Any = expression_of(self._fakes[condition])
        bound = element_count(body.condition.indices, self._fakes)
        match asserted:
            case sympy.Ge(lhs=rows, rhs=sympy.Integer() as least) if rows in body.rows:
                return bool(least <= 0)
            case sympy.Le(lhs=rows, rhs=most) if rows in body.rows:
                return bool(most == bound or (most.is_Integer and isinstance(bound, int) and most >= bound))
            case sympy.Eq(lhs=one, rhs=other):
                return one in body.rows and other in body.rows
            case _:
                return False


def _match_loop(bodies: Mapping[int, ExpertBody], fakes: NodeValues) -> ExpertLoop | None:
    """Returns the loop that consists of the bodies of all experts, if they are equal."""
    if len(bodies) < 2 or set(bodies) != set(range(len(bodies))):
        return None
    ordered = [bodies[number] for number in range(len(bodies))]
    stacks = stacks_of([body.nodes for body in ordered])
    if not all(body.is_valid and body.terminal is not None for body in ordered):
        return None
    order = _order(ordered)
    if order is None:
        return None
    descriptions = [_Description(body, fakes) for body in ordered]
    if not _are_equal(descriptions):
        ordered[order[0]].reads_base = True
        descriptions[order[0]] = _Description(ordered[order[0]], fakes)
    if not _are_equal(descriptions):
        return None
    externals: dict[Node, tuple[Node, ...]] = {}
    for operands in zip(*[item.externals for item in descriptions], strict=True):
        if externals.setdefault(operands[0], operands) != operands:
            return None
    gradients = gradient_sums([body.gradients for body in ordered], stacks, fakes)
    results = _results(ordered, stacks, fakes)
    if gradients is None or results is None:
        return None
    return ExpertLoop(ordered, order, externals, gradients, results)


def _are_equal(descriptions: Sequence[_Description]) -> bool:
    return all(item.calls == descriptions[0].calls for item in descriptions)


def _results(bodies: Sequence[ExpertBody], stacks: Collection[Node], fakes: NodeValues) -> list[ExpertResult] | None:
    """Returns the results of each expert that something else reads; None if these have rows."""
    results = []
    for nodes in zip(*[body.nodes for body in bodies], strict=True):
        pairs = list(zip(bodies, nodes, strict=True))
        users = {user: None for body, node in pairs for user in body.outer_users(node, stacks)}
        if not users:
            continue
        if any(not is_tensor(node, fakes) or depends_on_rows(fakes[node], body) for body, node in pairs):
            return None
        results.append(ExpertResult(nodes, list(users)))
    guards = [(body, node) for body in bodies for node in body.guards]
    return None if any(body.outer_users(node, stacks) for body, node in guards) else results


def _order(bodies: Sequence[ExpertBody]) -> list[int] | None:
    """Returns the order in which bodies change the result, if each reads that of the one before it alone."""
    by_result = {body.result: number for number, body in enumerate(bodies)}
    terminals = {body.terminal for body in bodies}
    node: Node | None = next((result for result in by_result if result not in terminals), None)
    order: list[int] = []
    while node in by_result:
        number = by_result[node]
        body = bodies[number]
        if order and not all(user is body.terminal or user in body.nodes for user in node.users):
            return None
        order.append(number)
        node = body.terminal
    return order if len(order) == len(bodies) else None


class _Description:
    """The calls of a body, in terms that are equal for all experts, and its operands from outside, in order."""

    def __init__(self, body: ExpertBody, fakes: NodeValues) -> None:
        self._body, self._fakes = body, fakes
        self.externals: list[Node] = []
        assert body.terminal is not None
        self.calls = [self._call(node) for node in (*body.nodes, body.terminal, *body.gradients)]

    def _call(self, node: Node) -> Hashable:
        if name_of(node) == "select_backward" and node in self._body.gradients:
            *arguments, number = node.args
            return node.target, self._argument(arguments, node), number == self._body.condition.number or number
        return node.target, self._argument(node.args, node), self._argument(node.kwargs, node)

    def _argument(self, item: Any, node: Node) -> Hashable:
        """Returns an argument of a call."""
        body = self._body
        match item:
            case Node() if item in body.nodes:
                return "row", body.nodes[item]
            case Node() if item in body.guards:
                return "count", str(item.target)
            case Node() if body.reads_result(node, item):
                return "result"
            case Node():
                if self._is_condition(item):
                    return "condition"
                self.externals.append(item)
                return "external"
            case tuple() | list():
                return tuple([self._argument(part, node) for part in item])
            case dict():
                return tuple([(name, self._argument(part, node)) for name, part in sorted(item.items())])
            case torch.SymInt():
                expression = expression_of(item)
                return "rows" if expression in body.rows else expression
            case _:
                return type(item), str(item)

    def _is_condition(self, node: Node) -> bool:
        fake = self._fakes.get(node)
        if not isinstance(fake, torch.Tensor) or fake.is_floating_point():
            return False
        condition, own = expert_condition(node, self._fakes), self._body.condition
        return condition is not None and (condition.indices, condition.number) == (own.indices, own.number)


def row_dimension(node: Node, body: ExpertBody, fakes: NodeValues) -> int | None:
    """Returns the dimension of a tensor's rows, if one dimension counts them and no other size depends on them."""
    fake = fakes.get(node)
    if not isinstance(fake, torch.Tensor):
        return None
    sizes = expressions_of(fake.shape)
    dims = [dim for dim, size in enumerate(sizes) if size in body.rows]
    depends = [size for size in sizes if _depends(size, body)]
    return dims[0] if len(dims) == len(depends) == 1 else None


def depends_on_rows(fake: object, body: ExpertBody) -> bool:
    """Whether a size of a tensor, or of one of several, depends on the number of rows of an expert."""
    tensors = [item for item in items_of(fake) if isinstance(item, torch.Tensor)]
    return any(_depends(size, body) for tensor in tensors for size in expressions_of(tensor.shape))


def _depends(size: int | sympy.Expr, body: ExpertBody) -> bool:
    return isinstance(size, sympy.Basic) and not body.rows.isdisjoint(size.free_symbols)
