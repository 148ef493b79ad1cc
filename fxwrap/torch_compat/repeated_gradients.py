"""Repeated calls of a trace with gradients: the nodes of their backwards are copied too.

The first call of a kind runs on operands that are detached from the trace's autograd graph, so that its part of the
backward can be traced alone, once for each layout of gradients that arrives. In the autograd graph each call of the
kind is one node, which copies that part. The gradients of an operand that a call reads several times leave the node one
by one: they are added in the same order as without copies.

Why: the autograd engine below `torch.autograd.grad` has no public name, and the tracer notes each call of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.autograd.graph import Node as GradientNode
from torch.autograd.graph import _engine_run_backward
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fxwrap.torch_compat.trace_templates import (
    Mark,
    NotRepeatableError,
    Storages,
    Template,
    TracedTensor,
    TraceRecorder,
)


class _Edge(NamedTuple):
    """Where a gradient of an operand leaves the autograd graph of a call: a result of a node."""

    node: GradientNode
    position: int
    operand: int


class DifferentiableCall:
    """A traced call, some of whose results have gradients.

    Fields:
        results: the results of the recorded call, in an autograd graph of their own; some are its operands.
        outputs: those of `results` with gradients, each once.
        edges: the gradients of operands, in the order in which the backward computes them.
        first: the call that was recorded.
        template: its nodes; None if they cannot be copied.
        backwards: the nodes of its backward, by the description of the gradients that arrive.
    """

    def __init__(
        self, recorder: TraceRecorder, operands: Sequence[TracedTensor], leaves: Sequence[FunctionalTensor], result: Any
    ) -> None:
        self.recorder = recorder
        self.results, self._spec = tree_flatten(result)
        self.outputs = list({id(item): item for item in self.results if item.grad_fn is not None}.values())
        self._leaves = tuple([leaf for leaf in leaves if leaf.requires_grad])
        self._operands = {id(leaf): position for position, leaf in enumerate(leaves)}
        self.edges = sorted(_edges(self.outputs, self._operands), key=_order_in_backward)
        self._gradients: dict[tuple[GradientNode, int], FunctionalTensor | None] = {}
        for node in {edge.node for edge in self.edges}:
            node.register_hook(partial(self._note_gradients, node))
        self.first = Occurrence(self, operands)
        self.template: Template | None = None
        self.backwards: dict[Any, Template] = {}

    def _note_gradients(self, node: GradientNode, gradients: Sequence[Any], _outputs: object) -> None:
        self._gradients.update({(node, position): gradient for position, gradient in enumerate(gradients)})

    def record(self, mark: Mark) -> None:
        """Reads the nodes of the recorded call, those of the trace after a mark."""
        first, recorder = self.first, self.recorder
        first.recorded = recorder.nodes_since(mark)
        try:
            results = [
                recorder.traced_tensor(item).node if operand is None else first.operands[operand].node
                for item, operand in self._results_with_operands()
            ]
            self.template = recorder.template(mark, first.nodes, results, first.storages, keeps_all=True)
        except NotRepeatableError:
            return
        first.nodes = [*first.nodes, *[step.node for step in self.template.steps]]

    def _results_with_operands(self) -> list[tuple[FunctionalTensor, int | None]]:
        """Returns the results, those that are operands with their positions."""
        return [(item, self._operands.get(id(item))) for item in self.results]

    def call(self, occurrence: Occurrence) -> Any:
        """Returns the results of a call, which is one node of the autograd graph of the trace."""
        tracer, operands = self.recorder.tracer, occurrence.operands
        inputs = [operands[edge.operand].functional(tracer) for edge in self.edges]
        outputs = _Backward.apply(occurrence, *inputs)  # type: ignore[no-untyped-call]
        by_id = dict(zip(map(id, self.outputs), outputs, strict=True))
        results: list[object] = []
        for position, (item, operand) in enumerate(self._results_with_operands()):
            if operand is not None:
                results.append(operands[operand].functional(tracer))
            else:
                results.append(by_id[id(item)] if id(item) in by_id else occurrence.result(position))
        return tree_unflatten(results, self._spec)

    def gradients(self, tangents: Sequence[FunctionalTensor | None]) -> list[FunctionalTensor | None]:
        """Traces the backward of the recorded call; returns the gradients of `edges`, None where there is none."""
        self._gradients.clear()
        pairs = [pair for pair in zip(self.outputs, tangents, strict=True) if pair[1] is not None]
        outputs, arrived = zip(*pairs, strict=True)
        keeps_graph, creates_graph, allows_unused = True, False, True
        _engine_run_backward(
            outputs, arrived, keeps_graph, creates_graph, self._leaves, allows_unused, accumulate_grad=False
        )
        gradients = [self._gradients.get((edge.node, edge.position)) for edge in self.edges]
        self._gradients.clear()
        return gradients


class Occurrence:
    """A call in the trace: its operands, the nodes of operands and of the call, and the storages of both.

    Fields:
        recorded: the nodes of the trace that belong to the call that was recorded.
    """

    def __init__(self, call: DifferentiableCall, operands: Sequence[TracedTensor]) -> None:
        self.call, self.operands = call, operands
        self.nodes = [item.node for item in operands]
        self.storages = Storages()
        self.storages.add([item.fake for item in operands], "operand")
        self.recorded: Sequence[Node] = ()
        self._tensors: dict[Node, TracedTensor] = {}

    @property
    def is_first(self) -> bool:
        """Whether it is the call that was recorded."""
        return self.call.first is self

    def outputs(self) -> Iterator[FunctionalTensor]:
        """Traces the call; yields its results with gradients, which are none of an autograd graph."""
        call, recorder = self.call, self.call.recorder
        if self.is_first:
            number = _get_sequence_nr() - 1  # of this node, by which torch finds the forward of a backward's nodes
            for node in self.recorded:
                if "seq_nr" in node.meta:
                    node.meta["seq_nr"] = number
            for item in call.outputs:
                yield FunctionalTensor.to_functional(torch._from_functional_tensor(item.elem))
            return
        assert call.template is not None, "calls without a template are not repeated"
        copies = dict(zip(call.template.sources, self.nodes, strict=True))
        self._tensors = recorder.copy(call.template, copies, self.storages)
        self.nodes = [copies[node] for node in call.first.nodes]
        for output in call.outputs:
            position = next(index for index, item in enumerate(call.results) if item is output)
            yield self._copied(position).functional(recorder.tracer)

    def result(self, position: int) -> TracedTensor | FunctionalTensor:
        """Returns a result without gradients that is no operand."""
        item: FunctionalTensor = self.call.results[position]
        return item if self.is_first else self._copied(position)

    def _copied(self, position: int) -> TracedTensor:
        node = None if self.call.template is None else self.call.template.results[position]
        assert node is not None, "calls without a template are not repeated"
        return self._tensors[node]

    def gradients(self, tangents: Sequence[FunctionalTensor | None]) -> list[FunctionalTensor | None]:
        """Returns the gradients of the call's edges; copies the nodes of an equal backward, if there is one."""
        call, arrived = self.call, list[TracedTensor]()
        key = None if call.template is None else self._key(tangents, arrived)
        template = None if key is None else call.backwards.get(key)
        if template is None:
            return self._record_gradients(tangents, key, arrived)
        self.storages.add([item.fake for item in arrived], "tangent")
        copies = dict(zip(template.sources, [*self.nodes, *[item.node for item in arrived]], strict=True))
        tensors = dict(zip(template.sources[len(self.nodes) :], arrived, strict=True))
        tensors |= call.recorder.copy(template, copies, self.storages)
        tracer = call.recorder.tracer
        return [None if node is None else tensors[node].functional(tracer) for node in template.results]

    def _key(self, tangents: Sequence[FunctionalTensor | None], arrived: list[TracedTensor]) -> Any:
        """Returns the description of gradients, and appends them; None for gradients that cannot be described."""
        recorder = self.call.recorder
        try:
            key = tuple([recorder.key(item, arrived) for item in tangents])
        except NotRepeatableError:
            return None
        return key, *[self.storages.number(item.fake) for item in arrived]

    def _record_gradients(
        self, tangents: Sequence[FunctionalTensor | None], key: Any, arrived: Sequence[TracedTensor]
    ) -> list[FunctionalTensor | None]:
        call, recorder = self.call, self.call.recorder
        mark = recorder.mark()
        gradients = call.gradients(tangents)
        if not self.is_first:
            self._redirect(recorder.nodes_since(mark))
        if key is None:
            return gradients
        sources = [*self.nodes, *[item.node for item in arrived]]
        self.storages.add([item.fake for item in arrived], "tangent")
        try:
            results = [None if item is None else recorder.traced_tensor(item).node for item in gradients]
            template = recorder.template(mark, sources, results, self.storages, keeps_all=False)
        except NotRepeatableError:
            return gradients
        if {*template.results}.isdisjoint(self.nodes):
            call.backwards[key] = template
        return gradients

    def _redirect(self, nodes: Sequence[Node]) -> None:
        """Lets nodes of a backward read this call instead of the recorded one, with views of its storages as values.

        Gradients are no such views, since they are linear in those that arrive.
        """
        first = self.call.first
        copies = dict(zip(first.nodes, self.nodes, strict=True))

        def own(fake: FakeTensor) -> FakeTensor:
            number = first.storages.number(fake)
            return fake if number is None else self.storages.fake_like(fake, number)

        with disable_proxy_modes_tracing():
            for node in nodes:
                node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda item: copies.get(item, item))
                if "val" in node.meta:
                    node.meta["val"] = tree_map_only(FakeTensor, own, node.meta["val"])


class _Backward(torch.autograd.Function):
    """The node of a call in the autograd graph of a trace; it has an operand for each gradient."""

    @staticmethod
    def forward(ctx: Any, occurrence: Occurrence, *_operands: FunctionalTensor) -> tuple[FunctionalTensor, ...]:
        ctx.occurrence = occurrence
        ctx.set_materialize_grads(False)
        return tuple(occurrence.outputs())

    @staticmethod
    def backward(ctx: Any, *gradients: FunctionalTensor | None) -> Any:
        if all(item is None for item in gradients):
            return (None, *[None for _ in ctx.occurrence.call.edges])
        return (None, *ctx.occurrence.gradients(gradients))


def record_differentiable(
    recorder: TraceRecorder, operands: Sequence[TracedTensor], arguments: Any, keywords: Any, call: Callable[..., Any]
) -> tuple[DifferentiableCall | None, Any]:
    """Traces a call on detached operands; returns it, None if no gradient flows through it, and its results."""
    mark, tracer = recorder.mark(), recorder.tracer
    leaves = [_detached(item, tracer) if item.requires_grad else item.functional(tracer) for item in operands]
    by_node = {item.node: leaf for item, leaf in zip(operands, leaves, strict=True)}

    def leaf_of(item: TracedTensor | FunctionalTensor) -> FunctionalTensor:
        return by_node[(item if isinstance(item, TracedTensor) else recorder.traced_tensor(item)).node]

    result = call(*tree_map_only((TracedTensor, FunctionalTensor), leaf_of, (arguments, keywords)))
    items, spec = tree_flatten(result)
    if not any(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in items):
        originals = {id(leaf): item.functional(tracer) for item, leaf in zip(operands, leaves, strict=True)}
        return None, tree_unflatten([originals.get(id(item), item) for item in items], spec)
    recorded = DifferentiableCall(recorder, operands, leaves, result)
    recorded.record(mark)
    return recorded, recorded.call(recorded.first)


def _detached(operand: TracedTensor, tracer: Any) -> FunctionalTensor:
    """Returns an operand without its history, which needs a gradient."""
    with disable_proxy_modes_tracing():
        fake = Storages({0: operand.fake.untyped_storage()}).fake_like(operand.fake, 0)
    leaf = TracedTensor(fake, operand.node, operand.layout).functional(tracer)
    leaf.requires_grad_()
    return leaf


def _order_in_backward(edge: _Edge) -> tuple[int, int]:
    """Orders edges as the engine does, which runs the nodes of later operations first."""
    return -edge.node._sequence_nr(), edge.position


def _edges(outputs: Sequence[torch.Tensor], operands: Mapping[int, int]) -> Iterator[_Edge]:
    """Yields the gradients of operands, by identity, in the autograd graph of a call."""
    seen = {item.grad_fn for item in outputs if item.grad_fn is not None}
    pending = list(seen)
    while pending:
        node = pending.pop()
        for position, (function, _) in enumerate(node.next_functions):
            variable = getattr(function, "variable", None)
            if variable is not None:
                yield _Edge(node, position, operands[id(variable)])
            elif function is not None and function not in seen:
                seen.add(function)
                pending.append(function)
