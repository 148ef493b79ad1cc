"""Fake-tensor propagation: the fake value of each node of a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Argument, Target

from fxwrap.errors import CallError, FxwrapError, GraphError
from fxwrap.fx_passes.graph_copy import items_of, layout_text, run_on_fakes, same_layout
from fxwrap.fx_passes.layout_changes import changes_layout
from fxwrap.fx_passes.model_source import location_of
from fxwrap.fx_passes.prepared_graph import NodeValues
from fxwrap.fx_passes.stream_calls import stream_call
from fxwrap.inference import eager_error, explain_fake_call
from fxwrap.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    detect_fake_mode,
    fresh_fake_mode,
    in_fake_mode,
    infer_despite_reads,
    is_composite,
    is_data_dependent_error,
    is_desugared,
    rename_unbacked,
    storage_identity,
    torch_schema,
    tree_map,
    without_library_guards,
)
from fxwrap.wrapper_ir.operators import operator_schema


def fake_values(graph_module: GraphModule, example_inputs: Sequence[object] | None) -> dict[Node, Any]:
    """Returns each node's fake value: its `meta["val"]`, or the result of running the graph on fake tensors.

    The example inputs are those that `check_example_inputs` accepts. Raises GraphError if neither they nor metadata
    describe the inputs, if a node fails, and if one gives a tensor another layout in place.
    """
    values = _values_of(graph_module, example_inputs)
    _check_layouts_stay(values)
    return values


def _values_of(graph_module: GraphModule, example_inputs: Sequence[object] | None) -> dict[Node, Any]:
    nodes = list(graph_module.graph.nodes)
    calls = [node for node in nodes if node.op in ("placeholder", "call_function")]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    examples = dict(zip(placeholders, example_inputs or (), strict=False))
    expanded = any(_is_expanded(node.meta.get("val")) and not _is_expanded(item) for node, item in examples.items())
    if not expanded and all(_has_fake(node) or stream_call(node) for node in calls):
        return _rebase_views(nodes, _with_conjugate_bits(_unify_fake_modes(nodes), examples))
    if example_inputs is None:
        example_inputs = [node.meta.get("val") for node in placeholders]
    return _propagate(graph_module, placeholders, example_inputs)


def _check_layouts_stay(values: NodeValues) -> None:
    """Raises GraphError for a node that gives its operand another layout in place: a node's layout is that of a tensor.

    `replace_layout_changes` has replaced those that a view describes, except on inputs, whose caller would see them.
    """
    for node, value in values.items():
        operand = node.args[0] if node.args and changes_layout(node) else None
        former = values.get(operand) if isinstance(operand, Node) else None
        if not isinstance(former, FakeTensor) or not isinstance(value, FakeTensor):
            continue
        if not same_layout(former, value) or storage_identity(former) != storage_identity(value):
            reason = f"{node.target} changes the layout of '{operand}' in place"
            raise GraphError(node.name, reason, "Use an operator that returns a view or a copy", location_of(node))


def check_example_inputs(graph_module: GraphModule, example_inputs: Sequence[object] | None) -> None:
    """Raises GraphError unless there are no example inputs, or one for each placeholder, and of its kind.

    Where the placeholder has a fake value, a tensor is of its dtype and dimensions, and is no number.
    Others are not compared: a size may be an expression, an opaque value any object.
    """
    if example_inputs is None:
        return
    remedy = "Pass a sequence with one example input for each placeholder"
    examples: object = example_inputs
    if not isinstance(examples, Sequence):
        reason = f"example_inputs is an object of type {type(examples).__name__}, not a sequence"
        raise GraphError("", reason, remedy)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if len(example_inputs) != len(placeholders):
        reason = f"the graph has {len(placeholders)} inputs, but there are {len(example_inputs)} example inputs"
        raise GraphError("", reason, remedy)
    for node, example in zip(placeholders, example_inputs, strict=True):
        traced, passed = _kind(node.meta.get("val")), _kind(example)
        if traced and passed and traced != passed:
            reason = f"it is {traced}, and its example input is {passed}"
            raise GraphError(node.name, reason, "Pass an example of the kind with which the graph was traced")


def _kind(value: object) -> str:
    """Returns the kind of an example input, which its placeholder's fake value has too; "" for other objects."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} with {value.dim()} dimensions"
    return "a number" if isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool) else ""


def _is_expanded(value: object) -> bool:
    """Whether elements of a tensor share memory by a stride of 0: at most the first value that a loop carries does."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    pairs = zip(value.shape, value.stride())
    return any(type(stride) is int and stride == 0 and (type(size) is not int or size != 1) for size, stride in pairs)


def _unify_fake_modes(nodes: Sequence[Node]) -> dict[Node, Any]:
    """Returns the nodes' metadata in one fake mode, as a call of an operator needs.

    make_fx over real tensors creates a mode for each of them.
    """
    values = {node: node.meta.get("val") for node in nodes}
    fakes = [item for value in values.values() for item in items_of(value) if isinstance(item, FakeTensor)]
    modes = list({id(fake.fake_mode): fake.fake_mode for fake in fakes}.values())
    if len(modes) <= 1:
        return values
    # Symbolic sizes stay in their mode.
    mode = next((mode for mode in modes if mode.shape_env is not None), modes[0])
    return {node: in_one_mode(value, mode) for node, value in values.items()}


def in_one_mode(tree: object, mode: FakeTensorMode) -> Any:
    """Returns a nested structure with its fake tensors in one fake mode; those of another one get new storages."""

    def convert(value: object) -> object:
        if not isinstance(value, FakeTensor) or value.fake_mode is mode:
            return value
        with in_fake_mode(mode):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return tree_map(convert, tree)


def _with_conjugate_bits(values: NodeValues, examples: NodeValues) -> NodeValues:
    """Returns the nodes' metadata with the conjugate bits of example inputs, which make_fx over real tensors loses."""
    lost = {
        node: values[node].conj() for node, example in examples.items()
        if isinstance(example, torch.Tensor) and example.is_conj()
        and isinstance(values[node], FakeTensor) and not values[node].is_conj()
    }  # fmt: skip
    return {**values, **lost}


def _rebase_views(nodes: Sequence[Node], metadata: NodeValues) -> dict[Node, Any]:
    """Returns the nodes' metadata, with views recomputed that do not share their base's storage in the metadata.

    make_fx over real tensors records unrelated tensors without offsets; deduplicated nodes leave views of removed ones.
    """
    values: dict[Node, object] = {}
    for node in nodes:
        if node.target is operator.getitem:  # one of several views: its base is not an argument of the node
            values[node] = values[node.args[0]][node.args[1]]  # type: ignore[index]
            continue
        value = _returned_operand(node, values, metadata[node])
        base = _view_base(node, values)
        if base is not None:
            first = value[0] if isinstance(value, tuple | list) and value else value
            if isinstance(first, FakeTensor) and storage_identity(first) != storage_identity(base):
                value = _view(node, values, base)
        values[node] = value
    return values


def _view(node: Node, values: NodeValues, base: FakeTensor) -> object:
    """Returns the result of a call on fakes. Raises GraphError for a view at an offset that depends on data."""
    try:
        return run_on_fakes(node, values, base)
    except Exception as error:
        if not is_data_dependent_error(error):
            raise
        failure = explain_fake_call(node.target, error)
        raise GraphError(node.name, failure.reason, failure.remedy, location_of(node)) from error


def _returned_operand(node: Node, values: NodeValues, value: object) -> object:
    """Returns the operand that a mutating call returns if its layout equals the call's, else `value`."""
    if not isinstance(node.target, OpOverload) or not isinstance(value, FakeTensor):
        return value
    operands = operator_schema(node.target).returned_operands(node.args, tuple(node.kwargs.items()))
    operand = operands[0] if operands else None
    fake = values.get(operand) if isinstance(operand, Node) else None
    is_same = isinstance(fake, FakeTensor) and fake.shape == value.shape and fake.stride() == value.stride()
    return fake if is_same else value


def _view_base(node: Node, values: NodeValues) -> FakeTensor | None:
    """Returns the fake tensor that a node's results are, or may be, views of, by its schema; None if they are not.

    Composite operators may return a view. Symbolic metadata says whether they do.
    """
    if not isinstance(node.target, OpOverload):
        return None
    schema = operator_schema(node.target)
    if schema.replacement is not None:  # one that declares the view, as that of `_unsafe_view`
        schema = operator_schema(schema.replacement(node.target, node.args, tuple(node.kwargs.items()))[0])
    position = schema.aliased_argument
    if position is None or schema.mutated_arguments or position >= len(node.args):
        return None
    operand = node.args[position]
    base = values.get(operand) if isinstance(operand, Node) else None
    if is_composite(node.target) and layout_text(base) is None:
        return None
    return base if isinstance(base, FakeTensor) else None


def _has_fake(node: Node) -> bool:
    if isinstance(node.target, OpOverload) and not torch_schema(node.target).returns:
        return True  # traced assertions have no metadata
    items = items_of(node.meta["val"]) if "val" in node.meta else None
    return items is not None and all(
        isinstance(item, FakeTensor) or not isinstance(item, torch.Tensor) for item in items
    )


def _propagate(graph_module: GraphModule, placeholders: list[Node], inputs: Sequence[object]) -> dict[Node, Any]:
    mode = detect_fake_mode(inputs) or fresh_fake_mode()
    fakes = []
    for node, example in zip(placeholders, inputs, strict=True):
        check_desugared(node.name, example)
        if isinstance(example, torch.Tensor) and not isinstance(example, FakeTensor):
            example = mode.from_tensor(example, static_shapes=True)
        fakes.append(example)
    propagator = _FakePropagator(graph_module, mode)
    # Some operators reject inputs that require gradients.
    with in_fake_mode(mode), torch.no_grad():
        propagator.run(*fakes)
    return propagator.values


class _FakePropagator(Interpreter):
    """Runs a graph on fake tensors and records each node's value, without changing the graph's metadata."""

    def __init__(self, graph_module: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.mode = mode
        self.values: dict[Node, object] = {}
        self.attributes: dict[str, object] = {}

    def run_node(self, n: Node) -> object:
        if changes_layout(n):
            self._record_layout(n.args[0])
        try:
            # Stream operators return None; torch 2.11 has no fake rule for some of them, or a wrong one.
            with without_library_guards(self.mode, n.target):
                value = None if stream_call(n) else super().run_node(n)
            rename_unbacked(n, value)
        except FxwrapError:
            raise
        except Exception as error:
            raise self._failure(n, error) from error
        self.values[n] = value
        return value

    def _record_layout(self, operand: Argument) -> None:
        """Records the layout that an operand has before a call changes it in place."""
        if isinstance(operand, Node) and isinstance(value := self.values[operand], FakeTensor):
            self.values[operand] = value.detach()

    def _failure(self, node: Node, error: Exception) -> GraphError:
        """Returns the error of a node: a `CallError`, with eager mode's words, for operands that eager mode rejects."""
        failure = explain_fake_call(node.target, error)
        if failure.is_unknown:
            return GraphError(node.name, failure.reason, failure.remedy, location_of(node))
        eager = eager_error(node.target, *self.fetch_args_kwargs_from_env(node))
        reason = failure.reason if eager is None else explain_fake_call(node.target, eager).reason
        return CallError.of(eager or error)(node.name, reason, failure.remedy, location_of(node))

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> object:
        try:
            return super().call_function(target, args, kwargs)
        except Exception as error:  # noqa: BLE001 - an operator's own
            return infer_despite_reads(error, target, args, kwargs)  # type: ignore[arg-type]  # no text calls a function

    def get_attr(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> object:
        key = str(target)
        if key not in self.attributes:
            value = super().get_attr(target, args, kwargs)
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                value = self.mode.from_tensor(value, static_shapes=True)
            self.attributes[key] = value
        return self.attributes[key]


def check_desugared(name: str, value: object) -> None:
    """Raises GraphError for a tensor subclass that torch has not desugared into plain tensors."""
    if isinstance(value, torch.Tensor) and not is_desugared(value):
        reason = f"it is the tensor subclass {type(value).__name__}"
        remedy = "Compile through torch.compile, which desugars subclasses, or pass plain tensors"
        raise GraphError(name, reason, remedy)
