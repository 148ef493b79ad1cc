"""The cost model of collectives in parts: times of a graph's nodes by the capabilities of their devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import Node

from fxwrap.devices import DeviceSpec
from fxwrap.fused_communication.part_graph import Region, is_move
from fxwrap.fused_communication.split_dimensions import ATTENTION, MATMULS, is_pointwise, tensor_of
from fxwrap.fx_passes.graph_copy import bytes_of, items_of, size_hint

_REDUCE = torch.ops._c10d_functional.all_reduce.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_MEMORY_SPEED = 8
"""The ratio of a memory's bandwidth to that of collectives, on devices that do not state it."""

_OPERATIONS_PER_BYTE = 256
"""The operations of a matmul while memory moves one byte, on devices that do not state them."""

_PART_SPEED = 0.9
"""The speed of a matmul of a part beside a collective: it has fewer tiles, and the collective needs processors too."""

_LAUNCH_S = 2e-6
"""The time of a small kernel."""


class GraphTimes:
    """Times of the nodes of a graph in seconds; 0 on devices whose speed is not known.

    Operators that fuse count as one read and one write of their result, since their operands often are in registers.
    """

    def __init__(self, nodes: Sequence[Node], specs: Mapping[str, DeviceSpec]) -> None:
        self.nodes = nodes
        self.specs = specs
        self.seconds = {node: self._seconds(node) for node in nodes}

    @cached_property
    def total(self) -> float:
        """The time of all nodes one after the other."""
        return sum(self.seconds.values()) or 1.0

    @cached_property
    def _computing(self) -> float:
        return self._compute(self.nodes)

    def decline(self, wait: Node) -> str:
        """Returns why an all_reduce, by its wait, cannot gain from parts; "" if it may."""
        (start,) = wait.all_input_nodes
        seconds = self.seconds[start]
        if not seconds:
            return "the speed of the device's collectives is not known"
        before = _reachable(start, lambda node: node.all_input_nodes)
        beside = self._computing - self._compute(before) - self._compute(_reachable(start, lambda node: node.users))
        if beside >= seconds:
            return f"other matmuls of {beside * 1e6:.0f} us can run beside its {seconds * 1e6:.0f} us"
        return ""

    def _compute(self, nodes: Iterable[Node]) -> float:
        return sum([self.seconds[node] for node in nodes if node.target in MATMULS or node.target in ATTENTION])

    def copy_seconds(self, node: Node) -> float:
        """Returns the time of a copy of a node's tensor."""
        tensor = tensor_of(node)
        spec = None if tensor is None else self.specs.get(tensor.device.type)
        return 2 * bytes_of(tensor) / _memory_speed(spec) if tensor is not None and spec is not None else 0.0

    def _seconds(self, node: Node) -> float:
        tensor = next((item for item in items_of(node.meta.get("val")) if isinstance(item, Tensor)), None)
        spec = None if tensor is None or node.op != "call_function" else self.specs.get(tensor.device.type)
        if tensor is None or spec is None or not spec.collective_bytes_per_s or is_move(node) or node.target is _WAIT:
            return 0.0
        if node.target is _REDUCE:
            return spec.collective_latency_s + 2 * bytes_of(tensor) / spec.collective_bytes_per_s
        memory = _memory_speed(spec)
        moved = bytes_of(tensor) * (2 if is_pointwise(node) else 1) / memory
        speed = dict(spec.matmul_flops_per_s).get(tensor.dtype, _OPERATIONS_PER_BYTE * memory)
        return max(moved, _operations(node) / speed)


def _memory_speed(spec: DeviceSpec) -> float:
    return spec.memory_bytes_per_s or _MEMORY_SPEED * spec.collective_bytes_per_s


def _operations(node: Node) -> float:
    """Returns the multiplications and additions of a matmul or of attention, 0 for other calls."""
    operands = [item for item in map(tensor_of, node.all_input_nodes) if item is not None]
    if node.target in MATMULS:
        result = tensor_of(node)
        assert result is not None
        return 2.0 * result.numel() * size_hint(operands[-1].shape[-2])
    if node.target in ATTENTION:
        query, key = operands[:2]
        return 4.0 * query.numel() * size_hint(key.shape[-2])
    return 0.0


def _reachable(node: Node, neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Returns the nodes that are reached from a node by one or more steps."""
    known, pending = set[Node](), [*neighbours(node)]
    while pending:
        item = pending.pop()
        if item not in known:
            known.add(item)
            pending += neighbours(item)
    return known


@dataclass
class Segment:
    """The nodes of a region up to a collective: times of the whole and of one part, and of the collective, in seconds.

    The last segment has no collective.
    """

    whole: float = 0.0
    part: float = 0.0
    collective: float = 0.0
    part_collective: float = 0.0


def segments_of(nodes: Sequence[Node], region: Region, stored: Collection[Node], times: GraphTimes) -> list[Segment]:
    """Returns the segments of a region, in order."""
    segments = [Segment()]
    for node in nodes:
        if node not in region.dimensions:
            continue
        segment, seconds = segments[-1], times.seconds[node]
        if node.target is _REDUCE:
            spec = times.specs[node.meta["val"].device.type]
            latency = spec.collective_latency_s
            segment.collective = seconds
            segment.part_collective = latency + (seconds - latency) / region.parts
            segments.append(Segment())
            continue
        is_matmul = node.target in MATMULS or node.target in ATTENTION
        segment.whole += seconds
        segment.part += seconds / region.parts / (_PART_SPEED if is_matmul else 1.0) + (_LAUNCH_S if is_matmul else 0.0)
        if node in stored and node.target not in MATMULS and not is_pointwise(node):
            segment.part += times.copy_seconds(node) / region.parts
    return segments


def sequential_seconds(segments: Sequence[Segment]) -> float:
    """Returns the time of segments one after the other, each with its collective."""
    return sum([item.whole + item.collective for item in segments])


def pipelined_seconds(segments: Sequence[Segment], parts: int) -> float:
    """Returns the time of segments in parts: a part waits for its collective only."""
    now, link = 0.0, 0.0  # when the device, and the link, have nothing more to do
    ready = [0.0] * parts
    for segment in segments:
        for number in range(parts):
            now = max(now, ready[number]) + segment.part
            if segment.collective:
                link = ready[number] = max(now, link) + segment.part_collective
    return max([now, *ready])
