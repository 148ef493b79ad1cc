"""Configurations that fit the shared memory of a multiprocessor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from fxwrap.caching import bounded_cache
from fxwrap.devices import DeviceSpec
from fxwrap.loop_ir import ScheduleError

log = logging.getLogger("fxwrap.kernels")

C = TypeVar("C")


def fitting(
    candidates: Sequence[C], shared_bytes: Callable[[C], int], smaller: Callable[[C], C | None], spec: DeviceSpec
) -> list[C]:
    """Returns the candidates whose programs fit a device's shared memory, else the first one, made smaller.

    `shared_bytes` returns an upper bound of a program's shared memory, `smaller` a configuration that needs less, None
    for the smallest. One line in the log "fxwrap.kernels" names a default that does not fit, and what replaces it.
    Raises ScheduleError where the smallest one does not fit either.
    """
    limit, first = spec.shared_memory_bytes, candidates[0]
    fit = [item for item in candidates if shared_bytes(item) <= limit]
    if fit and fit[0] == first:
        return fit
    needed = f"{first} needs {shared_bytes(first)} bytes of shared memory, and {spec.device_type} has {limit}"
    chosen: C | None = fit[0] if fit else smaller(first)
    while chosen is not None and shared_bytes(chosen) > limit:
        chosen = smaller(chosen)
    if chosen is None:
        _log_once(f"{needed}: no configuration of the kernel fits")
        raise ScheduleError(f"no configuration fits {limit} bytes of shared memory: {needed}")
    _log_once(f"{needed}: {chosen} replaces it")
    return fit or [chosen]


@bounded_cache(1024)
def _log_once(text: str) -> None:
    """Logs a choice once: a kernel's configurations are asked for by planning, printing and autotuning."""
    log.info("%s", text)
