"""A graph capturer for the CPU: it reruns the captured function and overwrites as much memory as a GPU's graph may."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import fxwrap.devices
from fxwrap.devices import CPP, CPU
from fxwrap.printers import cpp_configurations
from fxwrap.runtime.devices import CPU_RUNTIME


class CpuGraphCapturer:
    """Runs the function again at each replay, on the operands of its capture.

    As on a GPU, nothing is computed during capture: results hold rubbish until the first replay. Temporary memory may
    overlap the results of later captures in the pool, so a replay first fills those with rubbish, held or not.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.waits = 0
        self.ready = True
        self.current = 1
        self.followed: list[int] = []
        self.fails: Exception | None = None
        self.captures_groups = True

    def pool(self) -> list[list[weakref.ref[torch.Tensor]]]:
        return []

    def capture(
        self, run: Callable[[], Sequence[torch.Tensor]], pool: list[list[weakref.ref[torch.Tensor]]]
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        if self.fails is not None:
            raise self.fails
        assert isinstance(run, partial)
        body, operands, numbers = run.args
        state = torch.get_rng_state()
        shapes = run.func(body, [_copy(item) for item in operands], numbers)
        torch.set_rng_state(state)
        results = [_poison(torch.empty_strided(item.shape, item.stride(), dtype=item.dtype)) for item in shapes]
        pool.append([weakref.ref(item) for item in results])
        position = len(pool)
        places = [_at_address(item) for item in operands]
        run = partial(_run_at, body, places, numbers)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for others in pool[position:]:
                for other in others:
                    tensor = other()
                    if tensor is not None:
                        _poison(tensor)
            for result, value in zip(results, run(), strict=True):
                result.copy_(value)

        return replay, results

    def can_capture(self) -> bool:
        return self.ready

    def can_capture_collectives(self, groups: Sequence[str]) -> bool:
        assert groups
        return self.captures_groups

    def stream(self) -> int:
        return self.current

    def wait_for_stream(self, stream: int) -> None:
        self.followed.append(stream)

    def synchronize(self) -> None:
        self.waits += 1


def _copy(item: Any) -> Any:
    """Returns zeros for an operand, so that capture writes nothing; memory of the graph may hold no valid index yet."""
    return item.clone().zero_() if isinstance(item, torch.Tensor) else item


def _at_address(item: Any) -> Any:
    """Returns a tensor at an operand's address, as a graph has it: it does not keep the memory alive."""
    if not isinstance(item, torch.Tensor) or not item.numel():
        return item
    length = item.dtype.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(item.shape, item.stride())))
    memory = (ctypes.c_byte * length).from_address(item.data_ptr())
    return torch.frombuffer(memory, dtype=item.dtype).as_strided(item.shape, item.stride())


def _run_at(body: Callable[..., Any], operands: list[Any], numbers: tuple[Any, ...]) -> Sequence[torch.Tensor]:
    result: Sequence[torch.Tensor] = body([*operands], *numbers)
    return result


def _poison(item: torch.Tensor) -> torch.Tensor:
    return item.fill_(float("nan")) if item.is_floating_point() else item.fill_(77)


@contextmanager
def cpu_with_graph_capture() -> Iterator[CpuGraphCapturer]:
    """Registers the CPU as a device with graph capture inside a `with` block; yields its capturer."""
    recorder = CpuGraphCapturer()
    runtime = replace(CPU_RUNTIME, graph_capturer=lambda _device: recorder)
    spec = replace(CPU, supports_graph_capture=True, collectives=replace(CPU.collectives, captured=True))
    with fxwrap.devices.scoped_registration(spec, printer=cpp_configurations, runtime=runtime, language=CPP):
        yield recorder
