"""Latency and bandwidth of process groups, measured once: the sizes of buckets follow from them.

A compile measures nothing and waits for no rank, since other ranks may compile the same graph later, or load it from a
cache. The ranks of a group measure when they first run a program with collectives of it, after they agreed that they
call the same ones: all of them are there, and call collectives of the group next. The lowest rank decides whether to
measure, and publishes the numbers in the group's store and in its cache folder.

A compile takes the numbers that are published or cached then. The first rank to compile a graph decides for all of
them, in the store, so that all have the same buckets.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fxwrap.runtime.cache_folder import cache_folders, read_cache_file, write_cache_file, write_to_cache
from fxwrap.torch_compat import ProcessGroup, group_store

log = logging.getLogger("fxwrap.collectives")

MEASURE_ENV = "FXWRAP_MEASURE_GROUPS"
"""The environment variable that turns measurements off, with "0" on all ranks."""

_LARGE_BYTES: Mapping[str, int] = {"cpu": 4 << 20, "cuda": 64 << 20}
"""The bytes of a large all_gather's result, by device type."""

_REPEATS = 4
_CALLS = 4
"""How many collectives run one after the other. A single one mostly waits for its launch and the end of its kernel."""

_LEAST_LATENCY_S = 1e-6

_MOST_BYTES = 2.0**62
"""The most bytes that a group transfers in the time of its latency: a damaged file may have any numbers."""

_DEVICE = "device"
_STORE = "fxwrap/group_speed"


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
        return cls(latency, speed) if latency > 0 and speed > 0 and latency * speed < _MOST_BYTES else None


_unmeasured: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""The groups for which a compile of this process had no numbers."""


def chosen_speed(group: ProcessGroup, graph: str) -> GroupSpeed | None:
    """Returns the speed with which all ranks of a group compile a graph; None is that of the device.

    Args:
        group: the process group.
        graph: a text that is equal on ranks that compile the same collectives.

    Takes a few requests to the group's store, and waits for no rank.
    """
    store = group_store(group, _STORE)
    if store is None or group.size() == 1:
        return None
    own = _published(store) or _read_cached(_kind(group))
    if own is None:
        _unmeasured.add(group)
    chosen = store.compare_set(f"graph {graph}", "", _DEVICE if own is None else own.text()).decode()
    log.debug("group '%s', graph %s: %s", group.group_name, graph[:8], chosen)
    return GroupSpeed.parse(chosen)


def wants_measurement(group: ProcessGroup) -> bool:
    """Returns whether a compile of this process had no numbers of a group; not while a CUDA graph is captured."""
    if os.environ.get(MEASURE_ENV) == "0" or group not in _unmeasured:
        return False
    return not (_device(group).type == "cuda" and torch.cuda.is_current_stream_capturing())


def measure_group(group: ProcessGroup) -> None:
    """Measures a group, for later compiles and jobs. All ranks must call it, between the same collectives."""
    measured = measure(group)
    store = group_store(group, _STORE)
    if group.rank() == 0:
        store.set("speed", measured.text())
        _write_cached(_kind(group), measured)
        log.info("group '%s': %s", group.group_name, measured)


def _published(store: Any) -> GroupSpeed | None:
    return GroupSpeed.parse(store.get("speed").decode()) if store.check(["speed"]) else None


def _kind(group: ProcessGroup) -> str:
    """Returns a text for groups that have equal speeds: device, backend, ranks, hosts, torch."""
    device, local = _device(group), os.environ.get("LOCAL_WORLD_SIZE", "")
    hosts = [rank // int(local) if local.isdigit() else 0 for rank in dist.get_process_group_ranks(group)]
    host = "" if local.isdigit() else socket.gethostname()  # where jobs do not say which ranks share a host
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = f"{name} {dist.get_backend(group)} {group.size()} {len(set(hosts))} {host} {torch.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


# --- the measurement --------------------------------------------------------------------------------------------------


def measure(group: ProcessGroup) -> GroupSpeed:
    """Returns the speed of a group: a collective call of all its ranks, of some milliseconds."""
    device, size, operators = _device(group), group.size(), torch.ops._c10d_functional
    small = torch.zeros(1, device=device)
    part = torch.zeros(_LARGE_BYTES.get(device.type, 4 << 20) // (4 * size), device=device)

    def reduce() -> object:
        return operators.wait_tensor(operators.all_reduce_(small, "sum", group.group_name))

    def gather() -> object:
        return operators.wait_tensor(operators.all_gather_into_tensor(part, size, group.group_name))

    large_s = _fastest(_CALLS * [gather], device) / _CALLS
    if device.type == "cpu":
        small_s = _fastest(_CALLS * [reduce], device) / _CALLS
    else:  # launched while large ones run, since a launch from Python takes longer than the collective
        small_s = _fastest(_CALLS * [gather] + _CALLS * [reduce], device) / _CALLS - large_s
    return speed_of(max(small_s, _LEAST_LATENCY_S), large_s, 4 * part.numel() * size)


def speed_of(small_s: float, large_s: float, large_bytes: int) -> GroupSpeed:
    """Returns the speed of a group from the seconds of a small collective and of one of some bytes.

    The latency is at most half of the large collective's time: otherwise their difference is noise, and a bandwidth
    from it, which may be any number, would allow buckets of any size.
    """
    return GroupSpeed(_rounded(small_s), _rounded(large_bytes / max(large_s - small_s, large_s / 2)))


def _fastest(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Returns the seconds of the fastest of several runs of a sequence, since other load only adds time."""
    times = []
    for _ in range(_REPEATS):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for call in calls:
            call()
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
