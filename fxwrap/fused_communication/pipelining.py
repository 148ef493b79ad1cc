"""The pass that splits a batch in parts, so that one part's all_reduce runs beside another part's matmuls."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from fxwrap.devices import DEVICE_SPECS, DeviceSpec, registered_spec
from fxwrap.fused_communication.part_graph import Region, graph_in_parts, stored_nodes
from fxwrap.fused_communication.part_times import GraphTimes, pipelined_seconds, segments_of, sequential_seconds
from fxwrap.fused_communication.split_dimensions import (
    ATTENTION,
    MATMULS,
    SplitOperands,
    Unsplittable,
    sizes_of,
    split_operands,
    tensor_of,
)
from fxwrap.fx_passes.graph_copy import storages_of, written_storages
from fxwrap.options import FX_BEFORE_LOWERING, PassPoint

log = logging.getLogger("fxwrap.fused_communication")

_VERSION = "1"
_REDUCE = torch.ops._c10d_functional.all_reduce.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class UnsplitCollective:
    """An all_reduce that runs as a whole, by its name in the graph, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class PipelinedCollectives:
    """The result of the pass.

    Fields:
        graph_module: the graph with parts, the argument itself if there are none.
        split: the names of all_reduces that run in parts.
        unsplit: the other ones.
        gain: the expected fraction of the graph's time that the parts save; 0 if there are none.
    """

    graph_module: GraphModule
    split: tuple[str, ...]
    unsplit: tuple[UnsplitCollective, ...]
    gain: float = 0.0

    def report(self) -> str:
        """Returns the all_reduces in parts, and each other one with the reason, as text."""
        lines = [f"{len(self.split)} all_reduces in parts, {len(self.unsplit)} whole, expected gain {self.gain:.1%}"]
        lines += [f"in parts: {name}" for name in self.split]
        return "\n".join([*lines, *[f"whole: {item.name}\n    {item.reason}" for item in self.unsplit]])


@dataclass(frozen=True)
class CollectivePipelining:
    """A pass that computes the operators around all_reduces in parts of the batch, or of the tokens.

    `Options(passes=[CollectivePipelining()])` turns it on. While the all_reduce of one part is in flight, the matmuls
    of another part run: in the forward of tensor parallelism nothing else can. All_reduces beside which other matmuls
    can run, as in the backward, stay whole. Ranks decide from the graph and the device's capabilities alone.

    Fields:
        parts: the number of parts, at least 2.
        least_gain: the least fraction of the graph's time that parts must save by the cost model.
    """

    parts: int = 2
    least_gain: float = 0.03

    at: ClassVar[PassPoint] = FX_BEFORE_LOWERING

    def __post_init__(self) -> None:
        if self.parts < 2:
            raise ValueError(f"CollectivePipelining has at least 2 parts, not {self.parts}")

    @property
    def key(self) -> str:
        """Identifies the pass to caches."""
        return f"{_VERSION}/{self.parts}/{self.least_gain}"

    def __call__(self, graph_module: GraphModule) -> GraphModule:
        """Returns the graph with parts; logs the report to `fxwrap.fused_communication`."""
        result = self.pipeline(graph_module)
        if result.split or result.unsplit:
            log.info("%s", result.report())
        return result.graph_module

    def pipeline(self, graph_module: GraphModule) -> PipelinedCollectives:
        """Returns the graph with parts, and the report. The argument, whose nodes have fake values, is not changed."""
        nodes = list(graph_module.graph.nodes)
        waits = [node for node in nodes if node.target is _WAIT and _starts(node)]
        if not waits:
            return PipelinedCollectives(graph_module, (), ())
        times = GraphTimes(nodes, _specs(waits))
        growth = _Growth(nodes, self.parts)
        unsplit = list[UnsplitCollective]()
        for wait in waits:
            reason = times.decline(wait) or growth.decline(wait)
            if reason:
                unsplit.append(UnsplitCollective(str(wait.args[0]), reason))
        return self._decided(graph_module, growth, times, unsplit)

    def _decided(
        self, graph_module: GraphModule, growth: _Growth, times: GraphTimes, unsplit: list[UnsplitCollective]
    ) -> PipelinedCollectives:
        """Returns the graph with the parts of the region that was found, if they are faster."""
        region = growth.region()
        starts = [node for node in region.dimensions if node.target is _REDUCE]
        nodes = list(graph_module.graph.nodes)
        reason, gain = "", 0.0
        stored = set[Node]()
        if starts:
            try:
                stored = stored_nodes(nodes, region)
            except Unsplittable as error:
                reason = error.reason
            segments = segments_of(nodes, region, stored, times)
            gain = (sequential_seconds(segments) - pipelined_seconds(segments, self.parts)) / times.total
            if not reason and gain < self.least_gain:
                reason = f"parts save {gain:.1%} of the graph's time, and at least {self.least_gain:.1%} is expected"
        if not starts or reason:
            unsplit += [UnsplitCollective(node.name, reason) for node in starts]
            return PipelinedCollectives(graph_module, (), tuple(unsplit))
        module = graph_in_parts(graph_module, region, stored)
        return PipelinedCollectives(module, tuple([node.name for node in starts]), tuple(unsplit), gain)


def _starts(wait: Node) -> bool:
    start = wait.args[0]
    return isinstance(start, Node) and start.target is _REDUCE


def _specs(waits: Iterable[Node]) -> Mapping[str, DeviceSpec]:
    """Returns the capabilities of the devices of some tensors."""
    types = {tensor.device.type for node in waits if (tensor := tensor_of(node)) is not None}
    known = {spec.device_type: spec for spec in DEVICE_SPECS}
    specs = {name: registered_spec(name) or known.get(name) for name in types}
    return {name: spec for name, spec in specs.items() if spec is not None}


@dataclass
class _Growth:
    """Regions that grow from results of all_reduces to the operators before them.

    Fields:
        nodes: those of the graph.
        parts: the number of parts.
        dimensions, operands: those of the region so far.
        written: the storages that the graph writes, whose tensors stay whole.
    """

    nodes: Sequence[Node]
    parts: int
    dimensions: dict[Node, int] = field(default_factory=dict)
    operands: dict[Node, SplitOperands] = field(default_factory=dict)
    written: set[int] = field(init=False)
    fakes: Mapping[Node, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.fakes = {node: node.meta.get("val") for node in self.nodes}
        self.written = written_storages(self.nodes, self.fakes)

    def decline(self, wait: Node) -> str:
        """Adds an all_reduce, by its wait, and the operators before it to the region; returns why not, or ""."""
        (start,) = wait.all_input_nodes
        if len(start.users) != 1:
            return "its result is awaited more than once"
        if wait in self.dimensions:
            return ""
        try:
            dimension = self._dimension(wait)
            operands = {node: self._operands(node, dimension) for node in (wait, start)}
            (operand,) = operands[start]
            self._operands(operand, dimension)
        except Unsplittable as error:
            return error.reason
        self._grow(wait, dimension)
        return ""

    def _dimension(self, wait: Node) -> int:
        """Returns the first dimension with more than one element."""
        sizes = sizes_of(wait)
        for position, size in enumerate(sizes):
            if size > 1:
                if size % self.parts:
                    raise Unsplittable(f"{size} elements are no {self.parts} equal parts")
                return position
        raise Unsplittable("it has one element")

    def _operands(self, node: Node, dimension: int) -> SplitOperands:
        if node.op != "call_function":
            raise Unsplittable(f"'{node.name}' is an input")
        if not self.written.isdisjoint(storages_of(self.fakes[node])):
            raise Unsplittable(f"'{node.name}' is written")
        operands = split_operands(node, dimension, self.parts)
        if not operands:
            raise Unsplittable(f"'{node.name}' has no operand with the dimension")
        return operands

    def _grow(self, wait: Node, dimension: int) -> None:
        pending = [(wait, dimension)]
        while pending:
            node, dimension = pending.pop()
            if node in self.dimensions:
                continue  # where a node reads another dimension, it reads a slice of the whole
            try:
                operands = self._operands(node, dimension)
            except Unsplittable:
                continue  # a slice of it is read
            self.dimensions[node], self.operands[node] = dimension, operands
            pending += operands.items()
            if not isinstance(self.fakes[node], torch.Tensor):
                pending += [(user, dimension) for user in node.users]

    def region(self) -> Region:
        """Returns the region without operators at its begin that are no matmuls: nothing would run beside them."""
        remaining = dict[Node, int]()
        for node in self.nodes:
            if node not in self.dimensions:
                continue
            operands = self.operands[node]
            is_first = all(operand not in remaining for operand in operands)
            if is_first and node.target not in MATMULS and node.target not in ATTENTION and node.target is not _REDUCE:
                continue
            remaining[node] = self.dimensions[node]
        return Region(self.parts, remaining, {node: self.operands[node] for node in remaining})
