"""Fake values: what each node of a graph would give, without computing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from fxwrap.errors import FxwrapError, GraphError
from fxwrap.lowering.graph_copy import items_of
from fxwrap.lowering.source import check_desugared, location_of
from fxwrap.lowering.streams import stream_call
from fxwrap.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    detect_fake_mode,
    fresh_fake_mode,
    in_fake_mode,
    is_composite,
    lacks_fake_rule,
    storage_identity,
    tree_map,
)
from fxwrap.wrapper_ir.operators import operator_facts


def fake_values(graph_module: GraphModule, example_inputs: Sequence[Any] | None) -> dict[Node, Any]:
    """Returns each node's fake value: its `meta["val"]`, or found by running the graph on fake tensors.

    Raises GraphError when neither metadata nor example inputs say what the inputs are, or when a node fails.
    """
    nodes = list(graph_module.graph.nodes)
    calls = [node for node in nodes if node.op in ("placeholder", "call_function")]
    if all(_has_fake(node) or stream_call(node) for node in calls):
        return _with_views_on_their_bases(nodes, _in_one_mode(nodes))
    placeholders = [node for node in nodes if node.op == "placeholder"]
    if example_inputs is None:
        example_inputs = [node.meta.get("val") for node in placeholders]
    if len(example_inputs) != len(placeholders):
        raise GraphError(
            "", f"the graph has {len(placeholders)} inputs but {len(example_inputs)} examples were given",
            "Give one example for each placeholder",
        )  # fmt: skip
    return _propagate(graph_module, placeholders, example_inputs)


def _in_one_mode(nodes: Sequence[Node]) -> dict[Node, Any]:
    """Returns the nodes' metadata, all of one mode: values of several can take no part in one call.

    Where make_fx ran on real tensors each has a mode of its own; all but one are made anew.
    """
    values = {node: node.meta.get("val") for node in nodes}
    fakes = [item for value in values.values() for item in items_of(value) if isinstance(item, FakeTensor)]
    modes = list({id(fake.fake_mode): fake.fake_mode for fake in fakes}.values())
    if len(modes) <= 1:
        return values
    # Sizes that are symbols stay in their mode.
    mode = next((mode for mode in modes if mode.shape_env is not None), modes[0])

    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor) or value.fake_mode is mode:
            return value
        with in_fake_mode(mode):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return {node: tree_map(moved, value) for node, value in values.items()}


def _with_views_on_their_bases(nodes: Sequence[Node], given: Mapping[Node, Any]) -> dict[Node, Any]:
    """Returns the nodes' metadata, with views made anew whose metadata is on another storage than their base's.

    What a call writes and gives back is the operand itself.

    make_fx over real tensors records unrelated tensors, without offsets; merged nodes leave views of their twins.
    """
    values: dict[Node, Any] = {}
    for node in nodes:
        value = _given_back(node, values, given[node])
        base = _viewed(node, values)
        if base is not None:
            first = value[0] if isinstance(value, tuple | list) and value else value
            if isinstance(first, FakeTensor) and storage_identity(first) != storage_identity(base):
                arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
                with in_fake_mode(base.fake_mode):
                    value = node.target(*arguments, **keywords)  # type: ignore[operator]
        values[node] = value
    return values


def _given_back(node: Node, values: Mapping[Node, Any], value: Any) -> Any:
    """Returns the operand that a node writes and gives back, where its layout is that of the node, else `value`."""
    if not isinstance(node.target, OpOverload) or not isinstance(value, FakeTensor):
        return value
    operands = operator_facts(node.target).returned_operands(node.args, tuple(node.kwargs.items()))
    operand = operands[0] if operands else None
    found = values.get(operand) if isinstance(operand, Node) else None
    same = isinstance(found, FakeTensor) and found.shape == value.shape and found.stride() == value.stride()
    return found if same else value


def _viewed(node: Node, values: Mapping[Node, Any]) -> FakeTensor | None:
    """Returns the fake tensor that a node's results are views of by its schema, if they are views."""
    if not isinstance(node.target, OpOverload):
        return None
    facts = operator_facts(node.target)
    if facts.aliased is None or is_composite(node.target) or facts.written or facts.aliased >= len(node.args):
        return None
    base = node.args[facts.aliased]
    found = values.get(base) if isinstance(base, Node) else None
    return found if isinstance(found, FakeTensor) else None


def _has_fake(node: Node) -> bool:
    value = node.meta.get("val", _MISSING)
    if value is _MISSING:
        return False
    return all(isinstance(item, FakeTensor) or not isinstance(item, torch.Tensor) for item in items_of(value))


_MISSING = object()


def _propagate(graph_module: GraphModule, placeholders: list[Node], inputs: Sequence[Any]) -> dict[Node, Any]:
    mode = detect_fake_mode(inputs) or fresh_fake_mode()
    fakes = []
    for node, example in zip(placeholders, inputs, strict=True):
        check_desugared(node.name, example)
        if isinstance(example, torch.Tensor) and not isinstance(example, FakeTensor):
            example = mode.from_tensor(example, static_shapes=True)
        fakes.append(example)
    recorder = _Recorder(graph_module, mode)
    # Some operators are refused for inputs that need gradients, which nobody asks for here.
    with in_fake_mode(mode), torch.no_grad():
        recorder.run(*fakes)
    return recorder.values


class _Recorder(Interpreter):
    """Runs a graph on fake tensors and keeps what each node gave; the graph's own metadata is left alone."""

    def __init__(self, graph_module: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.mode = mode
        self.values: dict[Node, Any] = {}
        self.attributes: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        try:
            # Operators about streams give nothing, and torch 2.11 has no rule for some of them, or a wrong one.
            value = None if stream_call(n) else super().run_node(n)
        except FxwrapError:
            raise
        except Exception as error:
            reason, remedy = f"{n.target} fails on these inputs: {error}", "Correct the call, or the inputs it gets"
            if isinstance(n.target, OpOverload) and lacks_fake_rule(error):
                name = n.target._schema.name
                reason = f"the operator {name} has no rule for fake tensors, so nothing says what it gives"
                remedy = f"Register a function that makes empty results, with torch.library.register_fake({name!r})"
            raise GraphError(n.name, reason, remedy, location_of(n)) from error
        self.values[n] = value
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self.attributes:
            value = super().get_attr(target, args, kwargs)
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                value = self.mode.from_tensor(value, static_shapes=True)
            self.attributes[target] = value
        return self.attributes[target]
