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
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from fxwrap.devices import CUDA
from fxwrap.lines import Launch
from fxwrap.loop_ir import FLOAT8
from fxwrap.lowering.graph_definitions import library_family
from fxwrap.runtime.native import cpu_description
from fxwrap.tuning.task import argument_set_count
from fxwrap.wrapper_ir import Program, TensorType, Value

MIN_GAIN = 0.03
"""The relative gain over the library that a generated matmul must have, in most pairs of samples."""

_ROUNDS = 9
_MAX_CALLS = 16
_CPU_CACHE_BYTES = 64 << 20


RegionProgram: TypeAlias = Callable[..., object]
RegionInputs: TypeAlias = Sequence[Sequence[torch.Tensor]]
RegionTimer: TypeAlias = Callable[[Sequence[RegionProgram], RegionInputs], list[list[float]]]
"""Returns, for each program, samples of the seconds of a call; the programs run in turn on sets of inputs."""


@dataclass(frozen=True)
class MatmulRegion:
    """Equal groups of launches with matmuls, and the kernels of other operators that a choice between forms changes.

    `nodes` are those of the first group, `matmuls` those of all groups; `kernel` has the hashes of its kernels.
    `internal` are nodes of the first group that its launches compute but do not store: others compute them again.
    """

    kernel: str
    nodes: tuple[str, ...]
    matmuls: frozenset[str]
    internal: frozenset[str] = frozenset()


def matmul_regions(program: Program, graph: Graph, library: Program | None = None) -> list[MatmulRegion]:
    """Returns the regions of the kernels with matmuls of a program that was lowered from a graph, in order.

    `library` is the program in which these matmuls are library calls. Its kernels that compute nodes of a region are
    part of it with all their nodes, since a program in which the matmul is a kernel computes these otherwise.
    """
    names = {
        node.name for node in graph.nodes if node.op == "call_function" and library_family(str(node.target)) == "matmul"
    }
    others = [] if library is None else [(_kernels(library, [item]), _nodes([item])) for item in _launches(library)]
    regions: dict[str, MatmulRegion] = {}
    for group in _launch_groups(program):
        own = _nodes(group)
        matmuls = frozenset(names.intersection(own))
        if not matmuls:
            continue
        replaced = [(kernel, nodes) for kernel, nodes in others if not own.keys().isdisjoint(nodes)]
        key = " ".join([_kernels(program, group), *[kernel for kernel, _ in replaced]])
        nodes = tuple(dict.fromkeys([*own, *[node for _, items in replaced for node in items]]))
        stored = {node for line in group if line.origin is not None for node, _ in line.origin.results}
        first = regions.get(key, MatmulRegion(key, nodes, frozenset(), frozenset(own.keys() - stored)))
        regions[key] = replace(first, matmuls=first.matmuls | matmuls)
    return list(regions.values())


def _kernels(program: Program, launches: Sequence[Launch]) -> str:
    """Returns the hashes of launched kernels, as text."""
    return "+".join([program.kernel(line.kernel).hash for line in launches])


def _launches(program: Program) -> list[Launch]:
    return [line for line in program.lines() if isinstance(line, Launch) and line.origin is not None]


def _nodes(launches: Iterable[Launch]) -> dict[str, None]:
    """Returns the nodes that launches compute, in order."""
    return {node: None for line in launches if line.origin is not None for node in line.origin.nodes}


def _launch_groups(program: Program) -> list[list[Launch]]:
    """Returns launches, together where one reads values of another that are no node's results: parts of sums.

    Launches that count the rows of groups, for all matmuls of these, are left out.
    """
    groups: list[list[Launch]] = []
    group_of: dict[Value, list[Launch]] = {}
    for line in filter(_reads_numbers, _launches(program)):
        read = [group_of[item] for item in line.arguments if isinstance(item, Value) and item in group_of]
        merged = [item for number, item in enumerate(read) if all(item is not other for other in read[:number])]
        group = [*[launch for item in merged for launch in item], line]
        if merged:
            groups = [item for item in groups if all(item is not other for other in merged)]
            group_of |= {value: group for value, item in group_of.items() if any(item is other for other in merged)}
        groups.append(group)
        assert line.origin is not None, "a launch of a graph's node"
        results = zip(line.outs, line.origin.results, strict=False)
        group_of |= {value: group for value, (node, _) in results if not node}
    return groups


def _reads_numbers(line: Launch) -> bool:
    """Whether a launch reads a floating-point tensor, as each matmul does."""
    tensors = [item.tensor_type for item in line.arguments if isinstance(item, Value)]
    return any(item.dtype.is_floating_point for item in tensors)


def region_graph(
    graph: Graph, fakes: Callable[[Node], object], names: Collection[str], internal: Collection[str] = ()
) -> GraphModule | None:
    """Returns the part of a graph that computes the named nodes, as a graph whose inputs are the tensors that it reads.

    Views between the nodes are part of it. It returns what other nodes use, except `internal` nodes. None if it reads
    anything but tensors of static sizes, or a node is missing.
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
    used = [node for node in nodes if node in chosen and any(user not in chosen for user in node.users)]
    outputs = [node for node in used if node.name not in internal]
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
    nodes = part.graph.find_nodes(op="placeholder")
    first = random_tensors([_type_of(node) for node in nodes])
    for position, ends in group_ends(part.graph, lambda node: node.meta["val"]).items():
        first[position].copy_(ends)
    return input_sets(first)


def _type_of(node: Node) -> TensorType:
    """Returns the type of an input of a region, whose fake tensor is static."""
    fake = node.meta["val"]
    return TensorType(fake.dtype, tuple(fake.shape), fake.stride(), fake.device)


def input_sets(first: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns a set of inputs and copies of it, more than fit the cache."""
    needed, device = sum([item.untyped_storage().nbytes() for item in first]), first[0].device
    if device.type == CUDA.device_type:
        cache, free = torch.cuda.get_device_properties(device).L2_cache_size, torch.cuda.mem_get_info(device)[0]
    else:
        cache, free = _CPU_CACHE_BYTES, 4 * _CPU_CACHE_BYTES + 4 * needed
    count = argument_set_count(needed, cache, free)
    return [[*first], *[[torch.clone(item) for item in first] for _ in range(count - 1)]]


def group_ends(graph: Graph, fakes: Callable[[Node], Any]) -> dict[int, torch.Tensor]:
    """Returns the ends of groups of random rows, by the position of the input that has those of a grouped matmul.

    Groups of equal size would flatter kernels whose blocks of rows have just this size.
    """
    placeholders = graph.find_nodes(op="placeholder")
    ends: dict[int, torch.Tensor] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default):
        left, offsets = node.args[0], node.args[2] if len(node.args) > 2 else None
        if isinstance(offsets, Node) and offsets.op == "placeholder":
            count, rows = fakes(offsets).shape[0], fakes(left).shape[0]
            groups = torch.randint(count, (rows,), generator=torch.Generator().manual_seed(0))
            ends[placeholders.index(offsets)] = groups.bincount(minlength=count).cumsum(0)
    return ends


def preserved_random_state() -> AbstractContextManager[None]:
    """Restores the state of the random generators of the CPU and the current GPU afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices)


def random_tensors(types: Sequence[TensorType]) -> list[torch.Tensor]:
    """Returns tensors of static types: random floats, and zeros, which are valid indices, in other dtypes."""
    return [_random(item) for item in types]


def _random(item: TensorType) -> torch.Tensor:
    sizes, strides = [tuple(map(int, numbers)) for numbers in (item.sizes, item.strides)]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    flat = torch.zeros(extent, dtype=item.dtype, device=item.device)
    if item.dtype in FLOAT8:
        flat.copy_(2 * torch.rand(flat.shape, device=flat.device) - 1)
    elif item.dtype.is_floating_point:
        flat.uniform_(-1, 1)
    return flat.as_strided(sizes, strides)


def is_faster(samples: Sequence[float], others: Sequence[float], min_gain: float = MIN_GAIN) -> bool:
    """Whether a program is faster than another by at least `min_gain`, in three of four pairs of samples."""
    if not samples or not others:
        return False
    ratios = sorted([mine / theirs for mine, theirs in zip(samples, others, strict=True)])
    return ratios[3 * len(ratios) // 4] * (1 + min_gain) <= 1


def time_alternatives(programs: Sequence[RegionProgram], inputs: RegionInputs) -> list[list[float]]:
    """Returns samples of the seconds of a call of each program; the programs run in turn.

    On a CUDA device, each sample is the replay of a CUDA graph of calls with all sets of inputs, after a replay that is
    not timed: the program itself, not the one before it, determines cache, clock and power.
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
        for number in range(_ROUNDS):
            for position in _rotated(len(programs), number):
                samples[position].append(_replay_seconds(graphs[position], stream) / count)
    return samples


def _replay_seconds(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    events: list[torch.cuda.Event] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    graph.replay()
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
    results = [item.name for item in part.graph.output_node().all_input_nodes]
    returned = [number for number, node in enumerate(part.graph.nodes) if node.name in results]
    content = (region.kernel, shapes, targets, returned, *environment)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def region_device(part: GraphModule) -> torch.device:
    """Returns the device of a region."""
    device: torch.device = part.graph.find_nodes(op="placeholder")[0].meta["val"].device
    return device


def timed_device_name(device: torch.device) -> str:
    """Returns the name of a device in keys of records; for a CPU, with the number of threads."""
    if device.type == CUDA.device_type:
        return torch.cuda.get_device_name(device)
    return f"{cpu_description()} {torch.get_num_threads()} threads"


def median_seconds(samples: Sequence[float]) -> float:
    """Returns the median of samples, infinite for none."""
    return statistics.median(samples) if samples else math.inf
