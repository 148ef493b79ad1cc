"""The choice between a generated matmul and the library's, timed with the operators that are fused with it.

A region is the part of a graph that one kernel with matmuls computes. It is compiled twice, with its matmuls as a
kernel and as library calls beside the kernels of the other operators, and both programs are run in turn.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.devices import CUDA
from fxwrap.lines import Launch
from fxwrap.loop_ir import FLOAT8
from fxwrap.lowering.rules import MATMUL_RULES
from fxwrap.runtime.native import cpu_description
from fxwrap.tuning.task import argument_set_count
from fxwrap.wrapper_ir import Program, Value

MIN_GAIN = 0.03
"""The relative gain over the library that a generated matmul must have, beyond the spread of the samples."""

_ROUNDS = 9
_MAX_CALLS = 16
_CPU_CACHE_BYTES = 64 << 20


RegionProgram: TypeAlias = Callable[..., object]
RegionInputs: TypeAlias = Sequence[Sequence[torch.Tensor]]
RegionTimer: TypeAlias = Callable[[Sequence[RegionProgram], RegionInputs], list[list[float]]]
"""Returns, for each program, samples of the seconds of a call; the programs run in turn on sets of inputs."""


@dataclass(frozen=True)
class MatmulRegion:
    """Equal launches of a kernel with matmuls: `nodes` are those of the first launch, `matmuls` those of all launches.

    `kernel` is the hash of the kernel.
    """

    kernel: str
    nodes: tuple[str, ...]
    matmuls: frozenset[str]


def matmul_regions(program: Program, graph: Graph) -> list[MatmulRegion]:
    """Returns the regions of the kernels with matmuls of a program that was lowered from a graph, in order."""
    hashes = {kernel.name: kernel.hash for kernel in program.kernels}
    names = {node.name for node in graph.nodes if node.op == "call_function" and str(node.target) in MATMUL_RULES}
    regions: dict[str, MatmulRegion] = {}
    computed: set[tuple[str, ...]] = set()
    for line in program.lines():
        if not isinstance(line, Launch) or line.origin is None or names.isdisjoint(line.origin.nodes):
            continue
        if not _reads_numbers(line):
            continue  # it counts the rows of groups
        if line.origin.nodes in computed:
            continue  # it combines parts of rows that another launch has reduced
        computed.add(line.origin.nodes)
        matmuls = frozenset(names.intersection(line.origin.nodes))
        key = hashes[line.kernel]
        first = regions.get(key)
        nodes, known = (line.origin.nodes, frozenset[str]()) if first is None else (first.nodes, first.matmuls)
        regions[key] = MatmulRegion(key, nodes, known | matmuls)
    return list(regions.values())


def _reads_numbers(line: Launch) -> bool:
    """Whether a launch reads a floating-point tensor, as each matmul does."""
    tensors = [item.tensor_type for item in line.arguments if isinstance(item, Value)]
    return any(item.dtype.is_floating_point for item in tensors)


def region_graph(graph: Graph, fakes: Callable[[Node], object], names: Collection[str]) -> GraphModule | None:
    """Returns the part of a graph that computes the named nodes, as a graph whose inputs are what it reads.

    Views between the nodes are part of it. None if it reads anything but tensors of static sizes, or a node is missing.
    """
    nodes = list(graph.nodes)
    chosen = {node for node in nodes if node.name in names and node.op == "call_function"}
    if len(chosen) != len(set(names)):
        return None
    chosen |= _between(nodes, chosen)
    part = Graph()
    copies: dict[Node, Node] = {}
    read = [item for node in nodes if node in chosen for item in node.all_input_nodes]
    inputs = dict.fromkeys([item for item in read if item not in chosen])
    for node in inputs:
        fake = fakes(node)
        if not isinstance(fake, torch.Tensor) or not _is_static(fake):
            return None
        copies[node] = part.placeholder(node.name)
        copies[node].meta["val"] = fake
    for node in nodes:
        if node in chosen:
            copies[node] = part.node_copy(node, copies.__getitem__)
            copies[node].meta = {"val": fakes(node)}
    if not inputs:
        return None
    outputs = [node for node in nodes if node in chosen and any(user not in chosen for user in node.users)]
    part.output(tuple([copies[node] for node in outputs]))
    return GraphModule({}, part)


def _between(nodes: Sequence[Node], chosen: Collection[Node]) -> set[Node]:
    """Returns the nodes that depend on chosen ones, and that chosen ones depend on."""
    after = set(chosen)
    for node in nodes:
        if any(item in after for item in node.all_input_nodes):
            after.add(node)
    before = set(chosen)
    for node in reversed(nodes):
        if any(user in before for user in node.users):
            before.add(node)
    return {node for node in after & before if node.op == "call_function"}


def _is_static(fake: torch.Tensor) -> bool:
    return all(type(size) is int for size in (*fake.shape, *fake.stride(), fake.storage_offset()))


def region_inputs(part: GraphModule) -> list[list[torch.Tensor]]:
    """Returns sets of random inputs of a region, in more copies than fit the cache."""
    fakes = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
    needed = sum(_extent(fake) * fake.dtype.itemsize for fake in fakes)
    device = fakes[0].device
    if device.type == CUDA.device_type:
        cache, free = torch.cuda.get_device_properties(device).L2_cache_size, torch.cuda.mem_get_info(device)[0]
    else:
        cache, free = _CPU_CACHE_BYTES, 4 * _CPU_CACHE_BYTES + 4 * needed
    first = [_random(fake) for fake in fakes]
    for node, ends in _group_ends(part).items():
        first[[*part.graph.find_nodes(op="placeholder")].index(node)].copy_(ends)
    count = argument_set_count(needed, cache, free)
    return [first, *[[torch.clone(item) for item in first] for _ in range(count - 1)]]


def _group_ends(part: GraphModule) -> dict[Node, torch.Tensor]:
    """Returns the ends of groups of equal size, for the inputs that have the ends of a grouped matmul's groups."""
    ends: dict[Node, torch.Tensor] = {}
    for node in part.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default):
        left, offsets = node.args[0], node.args[2] if len(node.args) > 2 else None
        if isinstance(offsets, Node) and offsets.op == "placeholder":
            count, rows = offsets.meta["val"].shape[0], left.meta["val"].shape[0]
            ends[offsets] = torch.arange(1, count + 1) * rows // count
    return ends


def _extent(fake: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True) if size)


def _random(fake: torch.Tensor) -> torch.Tensor:
    """Returns random floats, and zeros, which are valid indices, in other dtypes."""
    flat = torch.zeros(_extent(fake), dtype=fake.dtype, device=fake.device)
    if fake.dtype in FLOAT8:
        flat.copy_(2 * torch.rand(flat.shape, device=flat.device) - 1)
    elif fake.dtype.is_floating_point:
        flat.uniform_(-1, 1)
    return flat.as_strided(fake.shape, fake.stride())


def is_faster(samples: Sequence[float], library: Sequence[float]) -> bool:
    """Whether a generated kernel is faster than the library by more than `MIN_GAIN`, in most pairs of samples."""
    if not samples or not library:
        return False
    ratio = statistics.median([mine / theirs for mine, theirs in zip(samples, library, strict=True)])
    return ratio * (1 + MIN_GAIN) <= 1


def time_alternatives(programs: Sequence[RegionProgram], inputs: RegionInputs) -> list[list[float]]:
    """Returns samples of the seconds of a call of each program; the programs run in turn.

    On a CUDA device, each sample is the replay of a CUDA graph of calls with all sets of inputs.
    """
    device = inputs[0][0].device
    count = min(max(len(inputs), 4), _MAX_CALLS)
    if device.type != CUDA.device_type:
        return _time_calls(programs, inputs, count)
    with torch.cuda.device(device):
        return _time_captured(programs, inputs, count)


def _time_calls(programs: Sequence[RegionProgram], inputs: RegionInputs, count: int) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in programs]
    for program in programs:
        program(*inputs[0])
    for number in range(_ROUNDS):
        for position in _rotated(len(programs), number):
            start = time.perf_counter()
            for call in range(max(count // 4, 1)):
                programs[position](*inputs[(number + call) % len(inputs)])
            samples[position].append((time.perf_counter() - start) / max(count // 4, 1))
    return samples


def _rotated(count: int, number: int) -> Iterable[int]:
    return [(position + number) % count for position in range(count)]


def _time_captured(programs: Sequence[RegionProgram], inputs: RegionInputs, count: int) -> list[list[float]]:
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graphs = []
    with torch.cuda.stream(stream):
        for program in programs:
            program(*inputs[0])
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for call in range(count):
                    program(*inputs[call % len(inputs)])
            graphs.append(graph)
        samples: list[list[float]] = [[] for _ in programs]
        for number in range(-1, _ROUNDS):
            for position in _rotated(len(programs), number):
                seconds = _replay_seconds(graphs[position], stream)
                if number >= 0:  # the first round warms up
                    samples[position].append(seconds / count)
    return samples


def _replay_seconds(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    events: list[torch.cuda.Event] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    graph.replay()
    events[1].record()
    stream.synchronize()
    return float(events[0].elapsed_time(events[1])) / 1000


def region_key(region: MatmulRegion, part: GraphModule, environment: Sequence[str]) -> str:
    """Returns the key of a region's record: a hash of its kernel, its graph, its inputs and the environment."""
    inputs = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
    shapes = [(tuple(item.shape), item.stride(), str(item.dtype), str(item.device)) for item in inputs]
    targets = [str(node.target) for node in part.graph.nodes if node.op == "call_function"]
    content = (region.kernel, shapes, targets, *environment)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def region_device(part: GraphModule) -> str:
    """Returns the name of the device of a region; for a CPU, with the number of threads."""
    device = part.graph.find_nodes(op="placeholder")[0].meta["val"].device
    if device.type == CUDA.device_type:
        return torch.cuda.get_device_name(device)
    return f"{cpu_description()} {torch.get_num_threads()} threads"


def median_seconds(samples: Sequence[float]) -> float:
    """Returns the median of samples, infinite for none."""
    return statistics.median(samples) if samples else math.inf
