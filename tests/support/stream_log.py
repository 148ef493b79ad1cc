"""A device in the place of the CPU that has streams: it writes down, in order, what programs do with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from fxwrap import devices
from fxwrap.devices import CPU
from fxwrap.runtime.devices import CPU_RUNTIME

SPEC = replace(CPU, supports_streams=True)


class StreamLog:
    """What was done, as short texts: "enter 1", "leave 1", "record 1", "wait 0 for 1", "keep for 1"."""

    def __init__(self) -> None:
        self.done: list[str] = []

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self.done.append(f"enter {name}")
        try:
            yield
        finally:
            self.done.append(f"leave {name}")

    def _guard(self, device: torch.device) -> AbstractContextManager[None]:
        return self._within(str(device))

    def _stream(self, _device: torch.device, number: int) -> AbstractContextManager[None]:
        return self._within(str(number))

    def _record(self, _device: torch.device, stream: int, event: int) -> Any:
        self.done.append(f"record {stream}" + (f" as {event}" if event else ""))
        return f"{stream}"

    def _wait(self, event: Any, _device: torch.device, stream: int) -> None:
        self.done.append(f"wait {stream} for {event}")

    def _keep(self, tensor: torch.Tensor, _device: torch.device, stream: int) -> None:
        self.done.append(f"keep for {stream}")

    def registered(self) -> AbstractContextManager[None]:
        """Registers the device until the end of a `with` block."""
        runtime = replace(
            CPU_RUNTIME, guard=self._guard, stream=self._stream, record_event=self._record, wait_event=self._wait,
            record_stream=self._keep,
        )  # fmt: skip
        return devices.scoped_registration(SPEC, runtime=runtime)
