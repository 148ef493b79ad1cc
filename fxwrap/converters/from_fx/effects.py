"""Import of nodes for random number generators, devices, checks and profiler ranges, and of scatters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.fx import Node

from fxwrap import lines
from fxwrap.converters.from_fx.calls import import_operator_call
from fxwrap.converters.from_fx.functional import copy_operand
from fxwrap.converters.from_fx.graph_importer import GraphImporter, NodeImporters
from fxwrap.converters.from_fx.nodes import failure
from fxwrap.inference import InferredResult
from fxwrap.torch_compat import functional_of_in_place, operator_overload
from fxwrap.wrapper_ir import GENERATOR, OpaqueType, TensorType, Value

_ATEN, _FXWRAP = torch.ops.aten, torch.ops.fxwrap
_SCATTER_REDUCE = "aten.scatter_reduce_.two"


# --- random numbers and devices ---------------------------------------------------------------------------------------


def _save_state(importer: GraphImporter, node: Node) -> None:
    device = str(importer.argument(node, node.args[0]))
    line = importer.original_line(node, lines.SaveRngState)
    if line is not None and line.device == device:
        type_ = line.result.type
    else:
        (state,) = importer.state.inference.results(_FXWRAP.random_state.default, (torch.device(device),), ())
        assert isinstance(state, InferredResult)
        type_ = state.type
    value = importer.value(node.name, type_)
    importer.emit_definition(lines.SaveRngState(value, device), node, value)


def _restore_state(importer: GraphImporter, node: Node) -> None:
    state, device = importer.tensor(node, node.args[0]), str(importer.argument(node, node.args[1]))
    importer.emit_without_result(lines.RestoreRngState(state, device), node)


def _exchange_state(importer: GraphImporter, node: Node) -> None:
    generator, device = importer.argument(node, node.args[0]), str(importer.argument(node, node.args[1]))
    if not isinstance(generator, Value) or generator.type != GENERATOR:
        raise failure(node, "its first operand is no generator", "Pass an input that is a generator")
    importer.emit_without_result(lines.ExchangeRngState(generator, device), node)


def _enter_device(importer: GraphImporter, node: Node) -> None:
    device, stream = _device_and_stream(importer, node, node.args)
    importer.emit_without_result(lines.EnterDevice(device, stream), node)
    importer.guard_stack.append((device, stream))


def _exit_device(importer: GraphImporter, node: Node) -> None:
    device, stream = _device_and_stream(importer, node, node.args)
    if importer.guard_stack:  # the verifier reports an exit without a guard
        importer.guard_stack.pop()
    importer.emit_without_result(lines.ExitDevice(device, stream), node)


def _device_and_stream(importer: GraphImporter, node: Node, arguments: Sequence[object]) -> tuple[str, int]:
    device, stream = [*[importer.argument(node, item) for item in arguments], 0][:2]
    return str(device), int(stream)


def _record_event(importer: GraphImporter, node: Node) -> None:
    device, stream = _device_and_stream(importer, node, node.args)
    event = int(importer.argument(node, node.args[2])) if len(node.args) > 2 else 0
    value = importer.value(node.name, OpaqueType("Event"))
    importer.emit_definition(lines.RecordEvent(value, device, stream, event), node, value)


def _wait_event(importer: GraphImporter, node: Node) -> None:
    event = importer.argument(node, node.args[0])
    if not isinstance(event, Value) or not isinstance(event.type, OpaqueType):
        raise failure(node, "its first operand is no event", "Pass the node that records the event")
    device, stream = _device_and_stream(importer, node, node.args[1:])
    importer.consume(node, event)
    importer.emit_without_result(lines.WaitEvent(event, device, stream), node)


def _record_stream(importer: GraphImporter, node: Node) -> None:
    """Imports the release of memory that waits for a stream; that of memory which is used later comes after it."""
    root = importer.tensor(node, node.args[0])
    _, stream = _device_and_stream(importer, node, node.args[1:])
    if importer.root_of[root.name] == root.name:
        importer.emit(lines.Free(root, stream), node)
    importer.env[node] = None


# --- ranges and checks ------------------------------------------------------------------------------------------------


def _enter_range(importer: GraphImporter, node: Node) -> None:
    name = str(node.args[0])
    importer.emit(lines.EnterRange(name), node)
    importer.env[node] = name


def _exit_range(importer: GraphImporter, node: Node) -> None:
    name = importer.argument(node, node.args[0])
    if not isinstance(name, str):
        raise failure(node, "it closes a range that no node of this graph opened", "Pass the node that opens the range")
    importer.emit_without_result(lines.ExitRange(name), node)


def _check_layout(importer: GraphImporter, node: Node) -> None:
    tensor = importer.tensor(node, node.args[0])
    name, dtype, sizes, strides, device, alignment = (importer.argument(node, item) for item in node.args[1:])
    type_ = TensorType(dtype, sizes, strides, torch.device(device))
    line = importer.original_line(node, lines.CheckLayout)
    if line is not None:
        before = line.expected
        same = (before.dtype, before.sizes, before.strides, before.device) == (dtype, sizes, strides, type_.device)
        type_ = before if same else type_
        name = line.name if name == (line.name or line.tensor.name) else name
    importer.emit_without_result(lines.CheckLayout(tensor, type_, name, alignment), node)


def import_wait(importer: GraphImporter, node: Node) -> None:
    """Imports the wait for a collective."""
    pending = importer.tensor(node, node.args[0])
    line = importer.original_line(node, lines.WaitCollective)
    group = line.group if line is not None else importer.groups.get(importer.root_of[pending.name], "")
    value = importer.value(node.name, pending.type)
    importer.emit_definition(lines.WaitCollective(value, pending, group), node, value)


# --- scatters ---------------------------------------------------------------------------------------------------------


def absorb_scatter_fills(importer: GraphImporter) -> None:
    """Finds the `full_like` nodes that only turn the number that a scatter writes into a tensor."""
    targets = (operator_overload(_SCATTER_REDUCE), functional_of_in_place(_SCATTER_REDUCE))
    nodes = [importer.module.graph.find_nodes(op="call_function", target=target) for target in targets]
    for node in itertools.chain(*nodes):
        source = node.args[3] if len(node.args) > 3 else None
        if isinstance(source, Node) and source.target is _ATEN.full_like.default and len(source.users) == 1:
            if source.args[0] is node.args[2] and set(source.kwargs) <= {"dtype"}:
                importer.absorbed.add(source)


def _scatter(importer: GraphImporter, node: Node) -> None:
    if importer.original_line(node, lines.Mutate) is not None or len(node.args) < 4:
        import_operator_call(importer, node)
        return
    if node.target in _FUNCTIONAL and importer.original_line(node, lines.ExternCall) is not None:
        import_operator_call(importer, node)
        return
    target, index = _written_operand(importer, node), importer.tensor(node, node.args[2])
    dim, item = importer.argument(node, node.args[1]), node.args[3]
    reduce, include_self = str(node.kwargs.get("reduce", "")), True
    if len(node.args) > 4:
        reduce, include_self = str(node.args[4]), bool(node.kwargs.get("include_self", True))
    if isinstance(item, Node) and item in importer.absorbed:
        item = item.args[1]
    source = importer.argument(node, item)
    if reduce not in lines.SCATTER_OPERATORS:
        raise failure(node, f"scatter has no reduction '{reduce}'", f"Use one of {', '.join(lines.SCATTER_OPERATORS)}")
    importer.emit(lines.Scatter(target, index, source, dim, reduce, include_self), node)
    importer.env[node] = target


def _index_put(importer: GraphImporter, node: Node) -> None:
    if importer.original_line(node, lines.Mutate) is not None or node.kwargs:
        import_operator_call(importer, node)
        return
    if node.target in _FUNCTIONAL and importer.original_line(node, lines.ExternCall) is not None:
        import_operator_call(importer, node)
        return
    target, values = _written_operand(importer, node), importer.tensor(node, node.args[2])
    indices = importer.argument(node, node.args[1])
    accumulate = bool(node.args[3]) if len(node.args) > 3 else False
    if not all(item is None or isinstance(item, Value) for item in indices):
        raise failure(node, "an index is no tensor", "Pass a tensor or None for each dimension")
    importer.emit(lines.IndexPut(target, indices, values, accumulate), node)
    importer.env[node] = target


def _written_operand(importer: GraphImporter, node: Node) -> Value:
    """Returns the tensor that a scatter writes: its first operand, of a functional one a copy of that."""
    operand = importer.tensor(node, node.args[0])
    return copy_operand(importer, node, operand) if node.target in _FUNCTIONAL else operand


_SCATTERS = {name for pair in lines.SCATTER_OPERATORS.values() for name in pair if name}

_FUNCTIONAL_SCATTERS = [functional_of_in_place(name) for name in sorted(_SCATTERS)]

_FUNCTIONAL = frozenset([_ATEN.index_put.default, *_FUNCTIONAL_SCATTERS])
"""The operators that write a copy of their first operand."""

# Without wait_tensor: torch registers `_c10d_functional` only where it has distributed computing.
EFFECTS: NodeImporters = {
    _FXWRAP.random_state.default: _save_state,
    _FXWRAP.set_random_state.default: _restore_state,
    _FXWRAP.exchange_random_state.default: _exchange_state,
    _FXWRAP.enter_device.default: _enter_device,
    _FXWRAP.exit_device.default: _exit_device,
    _FXWRAP.record_event.default: _record_event,
    _FXWRAP.wait_event.default: _wait_event,
    _FXWRAP.record_stream.default: _record_stream,
    _FXWRAP.check_layout.default: _check_layout,
    torch.ops.profiler._record_function_enter_new.default: _enter_range,
    torch.ops.profiler._record_function_exit._RecordFunction: _exit_range,
    _ATEN.index_put_.default: _index_put,
    _ATEN.index_put.default: _index_put,
    **dict.fromkeys([operator_overload(name) for name in sorted(_SCATTERS)], _scatter),
    **dict.fromkeys(_FUNCTIONAL_SCATTERS, _scatter),
}
