"""The cost model of `schedule_simulation.py`: the times of a program's lines on GPUs of several hosts.

Matmuls and attention take their operations, everything else its bytes; collectives take latency and bandwidth of NVLink
within a host of 8 GPUs, and of the network between hosts. Compute lines run one after the other. The collectives of a
group do, too, beside them; those of several groups share the links equally. A start waits for the compute lines before
it, and a wait for its collective.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from fxwrap.devices import CUDA, DeviceSpec
from fxwrap.lines import ExternCall, Launch, StartCollective, WaitCollective
from fxwrap.torch_compat import process_group
from fxwrap.wrapper_ir import LineBase, Program, TensorType, Value, defined, used

HOST = 8
"""The GPUs of a host."""


@dataclass(frozen=True)
class Cluster:
    """Speeds of H100 hosts: operations and bytes per second of a GPU, bytes per second and seconds of collectives."""

    ranks: int
    operations: float = 990e12 * 0.65
    memory: float = 3.3e12 * 0.8
    nvlink: float = 450e9 * 0.8
    network: float = 8 * 50e9 * 0.85
    """Of the eight network cards of a host, which a ring uses together."""

    def bandwidth(self, ranks: Sequence[int]) -> float:
        """Returns the bytes per second of the larger side of a collective of some ranks."""
        return (self.nvlink if _hosts(ranks) == 1 else self.network) * len(ranks) / (len(ranks) - 1)

    def latency(self, ranks: Sequence[int]) -> float:
        """Returns the seconds of a collective of few bytes: steps over NVLink, then a tree over hosts."""
        return 15e-6 + 6e-6 * math.ceil(math.log2(_hosts(ranks)))

    def spec(self) -> DeviceSpec:
        """Returns the capabilities of a GPU for the CPU's fake tensors, with the collectives of this cluster."""
        ranks = range(self.ranks)
        collectives = dataclasses.replace(
            CUDA.collectives, latency_s=self.latency(ranks), bytes_per_s=self.bandwidth(ranks)
        )
        return dataclasses.replace(
            CUDA, device_type="cpu", supports_multiple_devices=False, supports_streams=False, memory_spaces=("",),
            collectives=collectives,
        )  # fmt: skip


def _hosts(ranks: Sequence[int]) -> int:
    return len({rank // HOST for rank in ranks})


def line_seconds(line: LineBase, cluster: Cluster) -> float:
    """Returns the time of a line in seconds; that of a start is the time of its collective, whose group exists."""
    match line:
        case StartCollective():
            ranks = dist.get_process_group_ranks(process_group(line.group))
            if len(ranks) == 1:
                return 0.0
            operands = {value.name: value for value in used(line)}.values()  # some are read and written
            sizes = [sum(_bytes(values)) for values in (operands, defined(line))]
            passes = 2 if "all_reduce" in line.operator else 1  # a reduce_scatter, then an all_gather
            return cluster.latency(ranks) + passes * max(sizes) / cluster.bandwidth(ranks)
        case ExternCall(target=target) if target.startswith("aten.empty"):
            return 0.0
        case ExternCall():
            traffic = sum(_bytes([*used(line), *defined(line)])) / cluster.memory
            return max(_operations(line) / cluster.operations, traffic)
        case Launch():
            return sum(_bytes([*used(line), *line.outs])) / cluster.memory
        case _:
            return 0.0


def _bytes(values: Iterable[Value]) -> list[int]:
    return [int(item.type.storage_bytes) for item in values if isinstance(item.type, TensorType)]


def _operations(line: ExternCall) -> float:
    """Returns the multiplications and additions of a matmul or of causal attention, 0 for other calls."""
    tensors = [item.tensor_type for item in used(line) if isinstance(item.type, TensorType)]
    if line.target.startswith(("aten.mm.", "aten.addmm.")):
        one, other = tensors[-2:] if not line.outs else tensors[-3:-1]
        return 2.0 * math.prod(map(int, one.sizes)) * int(other.sizes[1])
    if "scaled_dot_product" in line.target:
        query = next(item for item in tensors if len(item.sizes) == 4)
        batch, heads, length, head = map(int, query.sizes)
        return (2.5 if "backward" in line.target else 1.0) * 2 * batch * heads * length * length * head
    return 0.0


@dataclass(frozen=True)
class Exposed:
    """A wait that takes time: its collective, the seconds of both, and the compute lines beside the collective."""

    start: StartCollective
    waited: float
    seconds: float
    beside: Sequence[LineBase]


@dataclass(frozen=True)
class Simulated:
    """The times of a program in seconds: of all compute lines, of all collectives, and from begin to end."""

    compute: float
    communication: float
    total: float
    collectives: int
    exposed: Sequence[Exposed] = ()


def simulate(program: Program, cluster: Cluster) -> Simulated:
    """Returns the times of a program whose process groups exist."""
    links, now, lines = _Links(), 0.0, list[LineBase]()
    started: dict[str, tuple[StartCollective, int, int, float]] = {}  # by the name of the result
    exposed: list[Exposed] = []
    compute = communication = 0.0
    collectives = 0
    for line in program.body.lines:
        seconds = line_seconds(line, cluster)
        if isinstance(line, StartCollective):
            item = line, links.start(line.group, seconds), len(lines), seconds
            communication += seconds
            collectives += 1
            started |= dict.fromkeys([value.name for value in defined(line)], item)
        elif isinstance(line, WaitCollective):
            start, number, first, seconds = started[line.pending.name]
            end = links.wait(number)
            if end > now:
                exposed.append(Exposed(start, end - now, seconds, lines[first:]))
            now = max(now, end)
        elif seconds:
            lines.append(line)
            now += seconds
            compute += seconds
            links.run_until(now)
    return Simulated(compute, communication, max(now, links.finish()), collectives, exposed)


@dataclass
class _Links:
    """Collectives in flight: the first ones of all groups share the links. Times are in seconds."""

    now: float = 0.0
    queues: dict[str, list[int]] = field(default_factory=dict)
    left: list[float] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)

    def start(self, group: str, seconds: float) -> int:
        """Queues a collective that takes so long alone; returns its number."""
        self.queues.setdefault(group, []).append(len(self.left))
        self.left.append(seconds)
        return len(self.left) - 1

    def run_until(self, time: float) -> None:
        """Lets collectives run until a time."""
        while self.now < time and self._running():
            self._advance(time)
        self.now = max(self.now, time)

    def wait(self, number: int) -> float:
        """Returns the end of a collective, which is now or later if it runs; then that is now."""
        while number not in self.ends:
            self._advance(math.inf)
        return self.ends[number]

    def finish(self) -> float:
        """Returns the end of all collectives."""
        while self._running():
            self._advance(math.inf)
        return max(self.ends.values(), default=0.0)

    def _running(self) -> list[int]:
        return [queue[0] for queue in self.queues.values() if queue]

    def _advance(self, time: float) -> None:
        """Lets collectives run until a time, or until the next one ends."""
        running = self._running()
        step = min(min([self.left[number] for number in running]) * len(running), time - self.now)
        self.now += step
        for number in running:
            self.left[number] -= step / len(running)
        for queue in self.queues.values():
            if queue and self.left[queue[0]] <= 1e-12:
                self.ends[queue.pop(0)] = self.now
