"""Nodes about random numbers, devices, checks and profilers read back, and writes at computed places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fxwrap.converters import from_fx_calls
from fxwrap.converters.from_fx_reader import Reader, Table, failure, origin_of
from fxwrap.lines import (
    SCATTER_OPERATORS,
    CheckLayout,
    EnterDevice,
    EnterRange,
    ExchangeState,
    ExitDevice,
    ExitRange,
    Free,
    IndexPut,
    Mutate,
    RecordEvent,
    RestoreState,
    SaveState,
    Scatter,
    WaitCollective,
    WaitEvent,
)
from fxwrap.torch_compat import operator_overload
from fxwrap.wrapper_ir import GENERATOR, OpaqueType, TensorType, Value

_ATEN, _OURS = torch.ops.aten, torch.ops.fxwrap
_TWO = "aten.scatter_reduce_.two"


# --- random numbers and devices ---------------------------------------------------------------------------------------


def _save_state(reader: Reader, node: Node) -> None:
    device = str(reader.argument(node, node.args[0]))
    line = reader.hint(node, SaveState)
    if line is not None and line.device == device:
        type_ = line.result.type
    else:
        (given,) = reader.shared.rules.results(_OURS.random_state.default, (torch.device(device),), ())
        type_ = given.type
    value = reader.value(node.name, type_)
    reader.make(SaveState(value, device, origin=origin_of(node)), node, value)


def _restore_state(reader: Reader, node: Node) -> None:
    state, device = reader.tensor(node, node.args[0]), str(reader.argument(node, node.args[1]))
    _only(reader, node, RestoreState(state, device, origin=origin_of(node)))


def _exchange_state(reader: Reader, node: Node) -> None:
    generator, device = reader.argument(node, node.args[0]), str(reader.argument(node, node.args[1]))
    if not isinstance(generator, Value) or generator.type != GENERATOR:
        raise failure(node, "what it exchanges states with is no generator", "Pass an input that stands for one")
    _only(reader, node, ExchangeState(generator, device, origin=origin_of(node)))


def _only(reader: Reader, node: Node, line: Any) -> None:
    """Adds the line of a node that gives nothing."""
    reader.emit(line, node)
    reader.env[node] = None


def _enter_device(reader: Reader, node: Node) -> None:
    device, stream = _device_and_stream(reader, node, node.args)
    _only(reader, node, EnterDevice(device, stream, origin=origin_of(node)))
    reader.entered.append((device, stream))


def _exit_device(reader: Reader, node: Node) -> None:
    device, stream = _device_and_stream(reader, node, node.args)
    if reader.entered:  # where none is, the verifier says so
        reader.entered.pop()
    _only(reader, node, ExitDevice(device, stream, origin=origin_of(node)))


def _device_and_stream(reader: Reader, node: Node, arguments: Sequence[Any]) -> tuple[str, int]:
    device, stream = [*[reader.argument(node, item) for item in arguments], 0][:2]
    return str(device), int(stream)


def _record_event(reader: Reader, node: Node) -> None:
    device, stream = _device_and_stream(reader, node, node.args)
    event = int(reader.argument(node, node.args[2])) if len(node.args) > 2 else 0
    value = reader.value(node.name, OpaqueType("Event"))
    reader.make(RecordEvent(value, device, stream, event, origin=origin_of(node)), node, value)


def _wait_event(reader: Reader, node: Node) -> None:
    event = reader.argument(node, node.args[0])
    if not isinstance(event, Value) or not isinstance(event.type, OpaqueType):
        raise failure(node, "what it waits for is no event", "Pass the node that records it")
    device, stream = _device_and_stream(reader, node, node.args[1:])
    reader.take(node, event)
    _only(reader, node, WaitEvent(event, device, stream, origin=origin_of(node)))


def _record_stream(reader: Reader, node: Node) -> None:
    """Reads the release of memory that waits for a stream."""
    root = reader.tensor(node, node.args[0])
    stream = _device_and_stream(reader, node, node.args[1:])[1]
    reader.take(node, root)
    _only(reader, node, Free(root, stream, origin=origin_of(node)))


# --- notes and checks -------------------------------------------------------------------------------------------------


def _enter_range(reader: Reader, node: Node) -> None:
    name = str(node.args[0])
    reader.emit(EnterRange(name, origin=origin_of(node)), node)
    reader.env[node] = name


def _exit_range(reader: Reader, node: Node) -> None:
    name = reader.argument(node, node.args[0])
    if not isinstance(name, str):
        raise failure(node, "it closes a range that no node of this graph opened", "Pass the node that opens the range")
    _only(reader, node, ExitRange(name, origin=origin_of(node)))


def _check_layout(reader: Reader, node: Node) -> None:
    tensor = reader.tensor(node, node.args[0])
    name, dtype, sizes, strides, device, alignment = (reader.argument(node, item) for item in node.args[1:])
    type_ = TensorType(dtype, sizes, strides, torch.device(device))
    line = reader.hint(node, CheckLayout)
    if line is not None:
        wanted = line.expected
        same = (wanted.dtype, wanted.sizes, wanted.strides, wanted.device) == (dtype, sizes, strides, type_.device)
        type_ = wanted if same else type_
        name = line.name if name == (line.name or line.tensor.name) else name
    _only(reader, node, CheckLayout(tensor, type_, name, alignment, origin=origin_of(node)))


def wait(reader: Reader, node: Node) -> None:
    """Reads the wait for a collective."""
    pending = reader.tensor(node, node.args[0])
    line = reader.hint(node, WaitCollective)
    group = line.group if line is not None else reader.groups.get(reader.root_of[pending.name], "")
    value = reader.value(node.name, pending.type)
    reader.make(WaitCollective(value, pending, group, origin=origin_of(node)), node, value)


# --- writes at computed places ----------------------------------------------------------------------------------------


def find_filled(reader: Reader) -> None:
    """Finds the tensors of one number that only stand for a number which a scatter writes."""
    for node in reader.module.graph.find_nodes(op="call_function", target=operator_overload(_TWO)):
        source = node.args[3] if len(node.args) > 3 else None
        if isinstance(source, Node) and source.target is _ATEN.full_like.default and len(source.users) == 1:
            if source.args[0] is node.args[2] and set(source.kwargs) <= {"dtype"}:
                reader.absorbed.add(source)


def _scatter(reader: Reader, node: Node) -> None:
    if reader.hint(node, Mutate) is not None or len(node.args) < 4:
        from_fx_calls.call(reader, node)
        return
    target, index = reader.tensor(node, node.args[0]), reader.tensor(node, node.args[2])
    dim, item = reader.argument(node, node.args[1]), node.args[3]
    reduce = str(node.kwargs.get("reduce", ""))
    include: Any = True
    if len(node.args) > 4:
        reduce, include = str(node.args[4]), node.kwargs.get("include_self", True)
    if isinstance(item, Node) and item in reader.absorbed:
        item = item.args[1]
    source = reader.argument(node, item)
    if reduce not in SCATTER_OPERATORS:
        raise failure(node, f"scatter has no reduction '{reduce}'", f"Name one of {', '.join(SCATTER_OPERATORS)}")
    line = Scatter(target, index, source, dim, reduce, bool(include), origin=origin_of(node))
    reader.emit(line, node)
    reader.env[node] = target


def _index_put(reader: Reader, node: Node) -> None:
    if reader.hint(node, Mutate) is not None or node.kwargs:
        from_fx_calls.call(reader, node)
        return
    target, values = reader.tensor(node, node.args[0]), reader.tensor(node, node.args[2])
    indices = reader.argument(node, node.args[1])
    accumulate = bool(node.args[3]) if len(node.args) > 3 else False
    if not all(item is None or isinstance(item, Value) for item in indices):
        raise failure(node, "an index is no tensor", "Pass a tensor or None for each dimension")
    reader.emit(IndexPut(target, indices, values, accumulate, origin=origin_of(node)), node)
    reader.env[node] = target


_SCATTERS = {name for pair in SCATTER_OPERATORS.values() for name in pair if name}

WORLD: Table = {
    _OURS.random_state.default: _save_state,
    _OURS.set_random_state.default: _restore_state,
    _OURS.exchange_random_state.default: _exchange_state,
    _OURS.enter_device.default: _enter_device,
    _OURS.exit_device.default: _exit_device,
    _OURS.record_event.default: _record_event,
    _OURS.wait_event.default: _wait_event,
    _OURS.record_stream.default: _record_stream,
    _OURS.check_layout.default: _check_layout,
    torch.ops.profiler._record_function_enter_new.default: _enter_range,
    torch.ops.profiler._record_function_exit._RecordFunction: _exit_range,
    _ATEN.index_put_.default: _index_put,
    **dict.fromkeys([operator_overload(name) for name in sorted(_SCATTERS)], _scatter),
}
"""The operators of `_c10d_functional` are there only where torch has distributed computing: `wait` reads those."""
