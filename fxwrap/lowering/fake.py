"""Fake values: what each node of a graph would give, without computing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from fxwrap.errors import FxwrapError, GraphError
from fxwrap.lowering.source import check_desugared, location_of
from fxwrap.torch_compat import FakeTensor, FakeTensorMode, detect_fake_mode, storage_identity


def fake_values(graph_module: GraphModule, example_inputs: Sequence[Any] | None) -> dict[Node, Any]:
    """Returns each node's fake value: its `meta["val"]`, or found by running the graph on fake tensors.

    Raises GraphError when neither metadata nor example inputs say what the inputs are, or when a node fails.
    """
    nodes = list(graph_module.graph.nodes)
    calls = [node for node in nodes if node.op in ("placeholder", "call_function")]
    if all(_has_fake(node) for node in calls) and all(_shares_storage(node) for node in calls):
        return {node: node.meta.get("val") for node in nodes}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    if example_inputs is None:
        example_inputs = [node.meta.get("val") for node in placeholders]
    if len(example_inputs) != len(placeholders):
        raise GraphError(
            "", f"the graph has {len(placeholders)} inputs but {len(example_inputs)} examples were given",
            "Give one example for each placeholder",
        )  # fmt: skip
    return _propagate(graph_module, placeholders, example_inputs)


def _has_fake(node: Node) -> bool:
    value = node.meta.get("val", _MISSING)
    if value is _MISSING:
        return False
    items = value if isinstance(value, tuple | list) else (value,)
    return all(isinstance(item, FakeTensor) or not isinstance(item, torch.Tensor) for item in items)


def _shares_storage(node: Node) -> bool:
    """Whether a view's metadata shares the storage of its base's, as it does unless make_fx traced real tensors."""
    if node.target not in _VIEWS:
        return True
    base = node.args[0].meta["val"]  # type: ignore[union-attr]
    return storage_identity(node.meta["val"]) == storage_identity(base)


_VIEWS = frozenset(
    {
        torch.ops.aten.view.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int,
        torch.ops.aten.permute.default, torch.ops.aten.unsqueeze.default, torch.ops.aten.slice.Tensor,
        torch.ops.aten.select.int, torch.ops.aten.expand.default,
    }
)  # fmt: skip

_MISSING = object()


def _propagate(graph_module: GraphModule, placeholders: list[Node], inputs: Sequence[Any]) -> dict[Node, Any]:
    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = []
    for node, example in zip(placeholders, inputs, strict=True):
        check_desugared(node.name, example)
        if isinstance(example, torch.Tensor) and not isinstance(example, FakeTensor):
            example = mode.from_tensor(example, static_shapes=True)
        fakes.append(example)
    recorder = _Recorder(graph_module, mode)
    with mode:
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
            value = super().run_node(n)
        except FxwrapError:
            raise
        except Exception as error:
            reason = f"{n.target} fails on these inputs: {error}"
            raise GraphError(n.name, reason, "Correct the call, or the inputs it gets", location_of(n)) from error
        self.values[n] = value
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self.attributes:
            value = super().get_attr(target, args, kwargs)
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                value = self.mode.from_tensor(value, static_shapes=True)
            self.attributes[target] = value
        return self.attributes[target]
