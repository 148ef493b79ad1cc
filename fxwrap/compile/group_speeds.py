"""Latency and bandwidth of process groups, measured once: the sizes of buckets follow from them.

A group's ranks meet in its store when each of them compiles its first graph with a collective of the group. If all of
them come in time with the same graph, they measure together, or take the numbers that the lowest rank's cache folder
has of such a group. The lowest rank publishes the numbers, so all ranks compile with the same ones. Otherwise all of
them use those of the device.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from fxwrap.options import Options
from fxwrap.runtime.cache_folder import cache_folders, read_cache_file, write_cache_file, write_to_cache
from fxwrap.torch_compat import OpOverload, ProcessGroup, group_store, process_group

log = logging.getLogger("fxwrap.collectives")

MEASURE_ENV = "FXWRAP_MEASURE_GROUPS"
"""The environment variable that turns the measurement on, with "1" on all ranks."""

WAIT_S = 10.0
"""The seconds that a rank waits for the others."""

_LARGE_BYTES: Mapping[str, int] = {"cpu": 4 << 20, "cuda": 64 << 20}
"""The bytes of a large all_gather's result, by device type."""

_REPEATS = 8
_DEFAULT = "device"
_MEASURE = "measure"


@dataclass(frozen=True)
class GroupSpeed:
    """The seconds that a small collective takes, and the bytes of a large one's larger side per second."""

    latency_s: float
    bytes_per_s: float

    def text(self) -> str:
        """Returns the numbers as text, which `parse` reads."""
        return f"{self.latency_s!r},{self.bytes_per_s!r}"

    @classmethod
    def parse(cls, text: str) -> GroupSpeed | None:
        """Returns the numbers of a text, None for other texts."""
        try:
            latency, speed = map(float, text.split(","))
        except ValueError:
            return None
        return cls(latency, speed) if latency > 0 and speed > 0 else None


_known: weakref.WeakKeyDictionary[ProcessGroup, GroupSpeed | None] = weakref.WeakKeyDictionary()
"""The measured groups of this process; None for those whose ranks did not meet."""


def with_group_speeds(options: Options, graph: GraphModule | ExportedProgram) -> Options:
    """Returns the options with the speeds of the process groups that a graph's collectives name.

    They are unchanged unless FXWRAP_MEASURE_GROUPS is 1, without buckets, and where they have speeds already.
    """
    if os.environ.get(MEASURE_ENV) != "1":
        return options
    if not options.bucket_collectives or options.collective_speeds is not None:
        return options
    module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    calls = [node for node in module.graph.nodes if _is_collective(node)]
    if not calls:
        return options
    names = sorted({str(item) for node in calls for item in (*node.args, *node.kwargs.values()) if type(item) is str})
    measured = {name: speed for name in names if (speed := _speed_of(name, module)) is not None}
    speeds = {name: (speed.latency_s, speed.bytes_per_s) for name, speed in measured.items()}
    return options.replace(collective_speeds=speeds) if speeds else options


def _is_collective(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional"


def _speed_of(name: str, module: GraphModule) -> GroupSpeed | None:
    group = process_group(name)
    if group is None or group.size() == 1:
        return None
    if group not in _known:
        store = group_store(group, "fxwrap/group_speed")
        _known[group] = None if store is None else _Meeting(store, group).speed(_fingerprint(module))
        log.info("group '%s': %s", name, _known[group] or "the speed of the device")
    return _known[group]


def _fingerprint(module: GraphModule) -> str:
    """Returns a text that is equal on ranks which compile the same graph."""
    targets = "\n".join([f"{node.op} {node.target}" for node in module.graph.nodes if node.op == "call_function"])
    return hashlib.sha256(targets.encode()).hexdigest()


@dataclass(frozen=True)
class _Meeting:
    """The ranks of a group in its store."""

    store: Any
    group: ProcessGroup

    def speed(self, fingerprint: str) -> GroupSpeed | None:
        """Returns the same speed on all ranks; None if one of them does not come, or compiles another graph."""
        rank, size = self.group.rank(), self.group.size()
        own = f"{fingerprint} {socket.gethostname()}"
        self.store.set(f"rank {rank}", own)
        verdict = self._decide(size) if rank == 0 else self._read_verdict()
        if verdict == _DEFAULT:
            return None
        if verdict != _MEASURE:
            return GroupSpeed.parse(verdict)
        measured = measure(self.group)
        if rank == 0:
            self.store.set("speed", measured.text())
            _write_cached(self._kind(size), measured)
        return GroupSpeed.parse(self.store.get("speed").decode())

    def _decide(self, size: int) -> str:
        """Returns the verdict of the lowest rank: numbers, or to measure, or to use those of the device."""
        try:
            self.store.wait([f"rank {other}" for other in range(size)], timedelta(seconds=WAIT_S))
        except RuntimeError:  # the time is over
            return self._settle(_DEFAULT)
        prints = {self.store.get(f"rank {other}").decode().partition(" ")[0] for other in range(size)}
        if len(prints) > 1:
            return self._settle(_DEFAULT)
        cached = _read_cached(self._kind(size))
        return self._settle(_MEASURE if cached is None else cached.text())

    def _read_verdict(self) -> str:
        try:
            self.store.wait(["verdict"], timedelta(seconds=2 * WAIT_S))
        except RuntimeError:  # the lowest rank compiles no such graph
            return self._settle(_DEFAULT)
        return str(self.store.get("verdict").decode())

    def _settle(self, verdict: str) -> str:
        """Sets the verdict unless another rank has; returns the one that holds."""
        return str(self.store.compare_set("verdict", "", verdict).decode())

    def _kind(self, size: int) -> str:
        """Returns a text for groups that have equal speeds: device, backend, ranks, hosts, torch."""
        hosts = {self.store.get(f"rank {rank}").decode().partition(" ")[2] for rank in range(size)}
        device = _device(self.group)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        text = f"{name} {dist.get_backend(self.group)} {size} {len(hosts)} {torch.__version__}"
        return hashlib.sha256(text.encode()).hexdigest()


# --- the measurement --------------------------------------------------------------------------------------------------


def measure(group: ProcessGroup) -> GroupSpeed:
    """Returns the speed of a group: a collective call of all its ranks, of some milliseconds."""
    device, size, operators = _device(group), group.size(), torch.ops._c10d_functional
    small = torch.zeros(1, device=device)
    latency = _fastest(lambda: dist.all_reduce(small, group=group), device)
    part = torch.zeros(_LARGE_BYTES.get(device.type, 4 << 20) // (4 * size), device=device)

    def gather() -> object:
        return operators.wait_tensor(operators.all_gather_into_tensor(part, size, group.group_name))

    seconds = _fastest(gather, device)
    return GroupSpeed(_rounded(latency), _rounded(4 * part.numel() * size / max(seconds - latency, seconds / 10)))


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the fastest of several runs, since other load only adds time."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _rounded(number: float) -> float:
    return float(f"{number:.1e}")


def _device(group: ProcessGroup) -> torch.device:
    """Returns the device of a group's collectives on this rank."""
    if dist.get_backend(group) == "gloo" or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# --- the cache folder -------------------------------------------------------------------------------------------------


def _read_cached(kind: str) -> GroupSpeed | None:
    for folder in cache_folders():
        content = read_cache_file(folder / "group_speeds" / kind)
        if content is not None:
            return GroupSpeed.parse(content.decode("ascii", "replace"))
    return None


def _write_cached(kind: str, speed: GroupSpeed) -> None:
    write_to_cache(lambda folder: write_cache_file(folder, f"group_speeds/{kind}", speed.text().encode()))
