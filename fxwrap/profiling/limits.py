"""The limits of a device: those of its `DeviceSpec`, else measured by a copy and by matmuls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fxwrap.devices import registered_spec

_COPY_BYTES = 1 << 27
_MATMUL_SIZES = {True: 4096, False: 768}
"""The rows of a measured matmul: many on massively parallel devices."""

_ROUNDS = 7


@dataclass
class DeviceLimits:
    """The bytes and operations per second that a device reaches; measured once, at their first use."""

    device: torch.device
    _bandwidth: float = 0.0
    _flops: dict[torch.dtype, float] = field(default_factory=dict)

    @property
    def bytes_per_s(self) -> float:
        """Bytes read and written per second."""
        if not self._bandwidth:
            spec = registered_spec(self.device.type)
            stated = 0.0 if spec is None else spec.memory_bytes_per_s
            self._bandwidth = stated or self._measured_bandwidth()
        return self._bandwidth

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Returns the floating-point operations per second of matmuls in a dtype; 0 where the device has none."""
        if dtype not in self._flops:
            spec = registered_spec(self.device.type)
            stated = {} if spec is None else dict(spec.matmuls.flops_per_s)
            self._flops[dtype] = stated.get(dtype, 0.0) or self._measured_flops(dtype)
        return self._flops[dtype]

    @property
    def measured_flops(self) -> dict[str, float]:
        """The operations per second that `flops_per_s` returned so far, by dtype."""
        return {str(dtype).removeprefix("torch."): rate for dtype, rate in self._flops.items()}

    def _measured_bandwidth(self) -> float:
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * _COPY_BYTES / self._seconds(lambda: target.copy_(source))

    def _measured_flops(self, dtype: torch.dtype) -> float:
        spec = registered_spec(self.device.type)
        rows = _MATMUL_SIZES[spec is not None and spec.massively_parallel]
        try:
            matrix = torch.ones(rows, rows, dtype=dtype, device=self.device)
            out = torch.empty_like(matrix)
            return 2 * rows**3 / self._seconds(lambda: torch.mm(matrix, matrix, out=out))
        except RuntimeError:  # torch has no matmul in this dtype
            return 0.0

    def _seconds(self, run: Callable[[], object]) -> float:
        """Returns the shortest seconds of a run, without other load on the machine as far as possible."""
        shortest = float("inf")
        for _ in range(_ROUNDS):
            self._synchronise()
            start = time.perf_counter()
            run()
            self._synchronise()
            shortest = min(shortest, time.perf_counter() - start)
        return shortest

    def _synchronise(self) -> None:
        if queues_work(self.device):
            torch.accelerator.synchronize(self.device)


def queues_work(device: torch.device) -> bool:
    """Whether a device runs calls later than the host makes them."""
    spec = registered_spec(device.type)
    return spec is not None and spec.supports_streams


_limits: dict[torch.device, DeviceLimits] = {}


def device_limits(device: torch.device) -> DeviceLimits:
    """Returns the limits of a device, which are measured once in a process."""
    return _limits.setdefault(device, DeviceLimits(device))
