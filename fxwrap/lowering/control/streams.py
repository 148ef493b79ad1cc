"""The user's streams: the stream of each node, and the events that a graph records and waits for.

Dynamo stores the stream of a node in `meta["custom"]["stream"]`, and turns a model's use of events into calls of
`torch.ops.streams`. Both name streams and events by their index in a table of Dynamo's
(`torch_compat.external_stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.errors import GraphError
from fxwrap.fx_passes.model_source import location_of
from fxwrap.fx_passes.stream_calls import stream_call, stream_number
from fxwrap.lines import RecordEvent, WaitEvent
from fxwrap.torch_compat import OpOverload, external_object_number, external_stream, operator_name
from fxwrap.wrapper_ir import LineBase, OpaqueType, Origin, Value, stream_device

_RECORD, _WAIT, _WAIT_AND_KEEP, _WAIT_STREAM = "record_event", "wait_event", "sync_dealloc", "wait_stream"


class StreamPlan:
    """The streams of one graph's nodes, by position, and the waits for each recorded event.

    A stream segment is a stream between two calls about events; its nodes may be computed together.
    """

    def __init__(self, nodes: Sequence[Node], specs: Mapping[str, DeviceSpec], fakes: Mapping[Node, object]) -> None:
        self._specs = specs
        self._segments: list[tuple[int, int]] = []
        self._waits: dict[Node, list[Node]] = {}
        devices = [item.device for node in nodes for item in _tensors(fakes.get(node))]
        self.device = next((device for device in devices if self.has_streams(device)), None)
        recorded: dict[int, Node] = {}
        epoch = 0
        for node in nodes:
            self._segments.append((stream_number(node), epoch))
            call = stream_call(node)
            if not call:
                continue
            epoch += 1
            if call == _RECORD:
                recorded[_table_index(node, 0)] = node
                self._waits[node] = []
            elif call in (_WAIT, _WAIT_AND_KEEP) and _table_index(node, 0) in recorded:
                self._waits[recorded[_table_index(node, 0)]].append(node)

    def segment(self, position: int) -> tuple[int, int]:
        """Returns the stream of the node at a position, and the number of event calls before it."""
        return self._segments[position]

    def stream(self, position: int) -> int:
        """Returns the stream of the node at a position, 0 for the current stream."""
        return self._segments[position][0]

    def waits(self, record: Node) -> Sequence[Node]:
        """Returns the calls of the graph that wait for a recorded event."""
        return self._waits[record]

    def has_streams(self, device: torch.device) -> bool:
        """Whether work on a device is queued on streams."""
        spec = self._specs.get(device.type)
        return spec is None or spec.supports_streams

    def assign_stream(self, line: LineBase, number: int) -> LineBase:
        """Returns a line on a stream, if the line runs on a stream of that device."""
        if number == 0:
            return line
        device = stream_device(line)
        if device is None or not self.has_streams(device) or not line.has_stream:
            return line
        stream = external_stream(number)
        if stream is not None and stream.device != device:
            return line
        return line.replace(stream=number)

    def device_of(self, number: int) -> str:
        """Returns the device of a stream."""
        stream = external_stream(number)
        return str(self.device if stream is None else stream.device)


class StreamTracker:
    """The streams that use each root, and the events recorded so far, while the lines of a graph are emitted."""

    def __init__(self, plan: StreamPlan) -> None:
        self.plan = plan
        self._events: dict[Node, Value] = {}
        self._streams_of_root: dict[str, set[int]] = {}

    def record_use(self, roots: Sequence[str], line: LineBase) -> None:
        """Records that a line uses the memory of these roots."""
        for root in roots:
            self._streams_of_root.setdefault(root, set()).add(line.stream)

    def is_used_on_other_stream(self, root: str, number: int) -> bool:
        """Whether another stream uses a root's memory: overwriting it would have to wait for that stream."""
        return bool(self._streams_of_root.get(root, set()) - {number})

    def lines(self, node: Node, unique: Callable[[str], str], origin: Origin) -> list[LineBase] | None:
        """Returns the lines of a call about streams, or None for one that stays an extern call.

        Raises GraphError for a call that changes the current stream.
        """
        call, plan = stream_call(node), self.plan
        if call in ("fork", "join"):
            reason = "it changes the current stream, which lines cannot express"
            raise GraphError(node.name, reason, "Use `with torch.cuda.stream(...)`", location_of(node))
        if call.startswith("synchronize"):
            return None  # the host waits, also where the graph has no work on a device with streams
        if plan.device is None:
            return []
        if call == _RECORD:
            event, number = external_object_number(_table_index(node, 0)), external_object_number(_table_index(node, 1))
            return self._record_lines(node, event, number, unique, origin)
        if call in (_WAIT, _WAIT_AND_KEEP) and node in self._events:
            number = external_object_number(_table_index(node, 1))
            return [WaitEvent(self._events.pop(node), plan.device_of(number), number, origin=origin)]
        if call == _WAIT_STREAM:
            waiting, awaited = [external_object_number(_table_index(node, index)) for index in (0, 1)]
            value = Value(unique(node.name), _EVENT)
            record = RecordEvent(value, plan.device_of(awaited), awaited, origin=origin)
            return [record, WaitEvent(value, plan.device_of(waiting), waiting, origin=origin)]
        return None

    def _record_lines(
        self, node: Node, event: int, number: int, unique: Callable[[str], str], origin: Origin
    ) -> list[LineBase]:
        """Returns one record for each wait of the graph; the first one records the model's own event."""
        lines: list[LineBase] = []
        for wait in self.plan.waits(node) or (None,):
            value = Value(unique(node.name), _EVENT)
            lines.append(RecordEvent(value, self.plan.device_of(number), number, 0 if lines else event, origin=origin))
            if wait is not None:
                self._events[wait] = value
        return lines


_EVENT = OpaqueType("Event")
_EMITTED_GUARDS = frozenset({"enter_device", "exit_device"})
_STREAM_OPERATORS = _EMITTED_GUARDS | {"record_event", "wait_event", "record_stream"}


def stream_plan(
    nodes: Sequence[Node], specs: Mapping[str, DeviceSpec], fakes: Mapping[Node, object]
) -> StreamPlan | None:
    """Returns the streams of a graph's nodes, or None for a graph that uses none."""
    if any(stream_call(node) or stream_number(node) for node in nodes):
        return StreamPlan(nodes, specs, fakes)
    return None


def is_emitted_guard(node: Node) -> bool:
    """Returns whether a node is a device guard of an emitted graph; the last pass inserts new ones.

    Raises GraphError for calls about streams in emitted graphs: a line cannot express their extent.
    """
    target = node.target
    if (
        not isinstance(target, OpOverload)
        or target.namespace != "fxwrap"
        or operator_name(target) not in _STREAM_OPERATORS
    ):
        return False
    if operator_name(target) in _EMITTED_GUARDS and (*node.args, 0)[1] == 0:
        return True
    reason = "it refers to streams of an emitted graph"
    raise GraphError(node.name, reason, "Import the graph with fxwrap.from_fx", location_of(node))


def _table_index(node: Node, index: int) -> int:
    """Returns an argument of a call about streams: the table index of a stream or an event."""
    table_index = node.args[index]
    assert isinstance(table_index, int)
    return table_index


def _tensors(fake: object) -> list[torch.Tensor]:
    items = fake if isinstance(fake, tuple | list) else (fake,)
    return [item for item in items if isinstance(item, torch.Tensor)]
