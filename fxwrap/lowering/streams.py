"""Streams that a model uses itself: which stream each node is on, and the events that its graph records and waits for.

Dynamo says the stream of a node in `meta["custom"]["stream"]`, and makes calls of `torch.ops.streams` of what a model
does with events. Both name streams and events by their place in a table of Dynamo's (`torch_compat.external_stream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from fxwrap.device_spec import DeviceSpec
from fxwrap.errors import GraphError
from fxwrap.lines import RecordEvent, WaitEvent
from fxwrap.lowering.source import location_of
from fxwrap.torch_compat import OpOverload, external_number, external_stream
from fxwrap.wrapper_ir import LineBase, OpaqueType, Value, stream_device

_RECORD, _WAIT, _WAIT_AND_KEEP, _WAIT_STREAM = "record_event", "wait_event", "sync_dealloc", "wait_stream"


class StreamPlan:
    """The streams of one graph's nodes, by position, and which waits are for which records.

    Nodes of one lane, a stream between two calls about events, may be computed together.
    """

    def __init__(self, nodes: Sequence[Node], specs: Mapping[str, DeviceSpec], fakes: Mapping[Node, Any]) -> None:
        self.specs = specs
        self.numbers: list[int] = []
        self.events: dict[Node, Value] = {}  # what a wait is for, once that is recorded
        self._lanes: list[tuple[int, int]] = []
        self._touched: dict[str, set[int]] = {}  # by root: the streams of lines that use it
        self._waits: dict[Node, list[Node]] = {}
        devices = [item.device for node in nodes for item in _tensors(fakes.get(node))]
        self.device = next((device for device in devices if self.has_streams(device)), None)
        recorded: dict[int, Node] = {}
        epoch = 0
        for node in nodes:
            self.numbers.append(stream_number(node))
            self._lanes.append((self.numbers[-1], epoch))
            call = stream_call(node)
            if not call:
                continue
            epoch += 1
            if call == _RECORD:
                recorded[_place(node, 0)] = node
                self._waits[node] = []
            elif call in (_WAIT, _WAIT_AND_KEEP) and _place(node, 0) in recorded:
                self._waits[recorded[_place(node, 0)]].append(node)

    def lane(self, position: int) -> tuple[int, int]:
        """Returns the lane of the node at a position."""
        return self._lanes[position]

    def has_streams(self, device: torch.device) -> bool:
        """Whether work on a device is queued on streams."""
        spec = self.specs.get(device.type)
        return spec is None or spec.streams

    def on_stream(self, line: LineBase, number: int) -> LineBase:
        """Returns a line on a stream, if it is one that runs there: a stream is of one device."""
        if number == 0:
            return line
        device = stream_device(line)
        if device is None or not self.has_streams(device) or not hasattr(line, "stream"):
            return line
        given = external_stream(number)
        if given is not None and given.device != device:
            return line
        return cast(LineBase, line.replace(stream=number))

    def touch(self, roots: Sequence[str], line: LineBase) -> None:
        """Records that a line uses memory."""
        for root in roots:
            self._touched.setdefault(root, set()).add(getattr(line, "stream", 0))

    def is_touched_elsewhere(self, root: str, number: int) -> bool:
        """Whether memory is used on another stream, which may be at it: to overwrite it would be to wait for that."""
        return bool(self._touched.get(root, set()) - {number})

    def lines(self, node: Node, unique: Any, origin: Any) -> list[LineBase] | None:
        """Returns the lines of a call about streams; None for one that is called as it is.

        Raises GraphError for a call that changes the current stream.
        """
        call, device = stream_call(node), self.device
        if call in ("fork", "join"):
            reason = "it changes the current stream in a way that lines do not say"
            raise GraphError(node.name, reason, "Use `with torch.cuda.stream(...)`", location_of(node))
        if call.startswith("synchronize"):
            return None  # the host itself waits, also where a graph has no work on a device with streams
        if device is None:
            return []
        if call == _RECORD:
            event, number = external_number(_place(node, 0)), external_number(_place(node, 1))
            return self._recorded(node, event, number, unique, origin)
        if call in (_WAIT, _WAIT_AND_KEEP) and node in self.events:
            number = external_number(_place(node, 1))
            return [WaitEvent(self.events.pop(node), self._device_of(number), number, origin=origin)]
        if call == _WAIT_STREAM:
            waiting, waited_for = [external_number(_place(node, index)) for index in (0, 1)]
            value = Value(unique(node.name), _EVENT)
            record = RecordEvent(value, self._device_of(waited_for), waited_for, origin=origin)
            return [record, WaitEvent(value, self._device_of(waiting), waiting, origin=origin)]
        return None

    def _recorded(self, node: Node, event: int, number: int, unique: Any, origin: Any) -> list[LineBase]:
        """Returns a record for each wait of the graph's for it; the first is of the model's own event."""
        lines: list[LineBase] = []
        waits: list[Node | None] = [*self._waits[node]]
        for wait in waits or [None]:
            value = Value(unique(node.name), _EVENT)
            own = 0 if lines else event
            lines.append(RecordEvent(value, self._device_of(number), number, own, origin=origin))
            if wait is not None:
                self.events[wait] = value
        return lines

    def _device_of(self, number: int) -> str:
        given = external_stream(number)
        return str(self.device if given is None else given.device)


_EVENT = OpaqueType("Event")
_OWN_GUARDS = frozenset({"enter_device", "exit_device"})
_SYNCHRONIZING = frozenset({"synchronize", "synchronize_device"})
"""Operators of fxwrap's that stand for what torch 2.11 has none for."""
_OWN = _OWN_GUARDS | {"record_event", "wait_event", "record_stream"}


def stream_plan(
    nodes: Sequence[Node], specs: Mapping[str, DeviceSpec], fakes: Mapping[Node, Any]
) -> StreamPlan | None:
    """Returns the streams of a graph's nodes; None for a graph that uses none."""
    if any(stream_call(node) or stream_number(node) for node in nodes):
        return StreamPlan(nodes, specs, fakes)
    return None


def stream_call(node: Node) -> str:
    """Returns the name of the operator about streams that a node calls; "" for any other node."""
    target = node.target
    if not isinstance(target, OpOverload):
        return ""
    own = target.namespace == "fxwrap" and target._opname in _SYNCHRONIZING
    return target._opname if own or target.namespace == "streams" else ""


def is_own_guard(node: Node) -> bool:
    """Returns whether a node is a device guard of an emitted graph's, which the last pass places anew.

    Raises GraphError for what emitted graphs do with streams: a line could not say which calls it is about.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "fxwrap" or target._opname not in _OWN:
        return False
    if target._opname in _OWN_GUARDS and (*node.args, 0)[1] == 0:
        return True
    reason = "it is about streams of an emitted graph"
    raise GraphError(node.name, reason, "Read the graph back with fxwrap.from_fx", location_of(node))


def stream_number(node: Node) -> int:
    """Returns the number of the stream that a node is on, 0 for the current one."""
    custom = node.meta.get("custom")
    place = custom.get("stream") if isinstance(custom, dict) else None
    return external_number(place) if type(place) is int and node.op == "call_function" else 0


def _place(node: Node, index: int) -> int:
    """Returns an argument of a call about streams: the place of a stream or an event."""
    place = node.args[index]
    assert isinstance(place, int)
    return place


def _tensors(fake: Any) -> list[torch.Tensor]:
    items = fake if isinstance(fake, tuple | list) else (fake,)
    return [item for item in items if isinstance(item, torch.Tensor)]
