"""Capture and replay of CUDA graphs through torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from fxwrap.torch_compat import (
    clear_cublas_workspaces,
    end_allocate_to_pool,
    is_caching_allocator_enabled,
    is_nccl_group,
)

_CAPTURE_LOCK = threading.Lock()
"""torch allows one capture at a time per process."""


class CudaGraphCapturer:
    """Captures work on one GPU as CUDA graphs.

    torch manages the default generator: each replay continues its sequence, like eager calls. Other threads may use the
    GPU during a capture, which only fails by operations of this thread.
    """

    def __init__(
        self, device: torch.device, is_allocator_enabled: Callable[[], bool] = is_caching_allocator_enabled
    ) -> None:
        self.device = device
        self._is_allocator_enabled = is_allocator_enabled
        self._capture_stream: torch.cuda.Stream | None = None

    def pool(self) -> object:
        """Returns the handle of a new private pool of torch's caching allocator."""
        return torch.cuda.graph_pool_handle()

    def capture(
        self, run: Callable[[], Sequence[torch.Tensor]], pool: object
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Captures the work that `run` launches, on a side stream.

        Raises:
            RuntimeError: torch's caching allocator is off, or the capture failed. Errors of `run` propagate.
        """
        if not self._is_allocator_enabled():
            # Otherwise the capture fails, and torch aborts the process when it frees the allocations.
            raise RuntimeError(
                "torch's caching allocator is off, and CUDA graphs cannot allocate without it: call "
                "torch.cuda.memory.caching_allocator_enable() and unset PYTORCH_NO_CUDA_MEMORY_CACHING, or compile "
                "with cuda_graphs=False"
            )
        graph = torch.cuda.CUDAGraph()
        with _CAPTURE_LOCK, torch.cuda.device(self.device):
            if self._capture_stream is None:
                self._capture_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            # Library workspaces allocated during the capture belong to the pool: no other code may use them.
            clear_cublas_workspaces()
            try:
                with torch.cuda.stream(self._capture_stream):
                    results = self._capture(graph, run, pool)
            finally:
                clear_cublas_workspaces()
        return graph.replay, results

    def _capture(
        self, graph: torch.cuda.CUDAGraph, run: Callable[[], Sequence[torch.Tensor]], pool: Any
    ) -> Sequence[torch.Tensor]:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            results = run()
        except BaseException:
            with suppress(RuntimeError):  # it only reports the previous failure
                self._end(graph, pool)
            raise
        self._end(graph, pool)
        return results

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Ends a capture. After a failure, an empty capture restores the state of torch's allocator and generator."""
        try:
            graph.capture_end()
        except RuntimeError:
            end_allocate_to_pool(pool, self.device)
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)  # torch warns about empty graphs
            other.capture_end()
            raise

    def can_capture(self) -> bool:
        """Whether no capture is in progress on the current stream."""
        return not torch.cuda.is_current_stream_capturing()

    def can_capture_collectives(self, groups: Sequence[str]) -> bool:
        """Whether all groups communicate through NCCL on this device.

        With buffer registration (NCCL_GRAPH_REGISTER=1), ranks exchange addresses during a capture, and a rank that
        captures would wait for others that run eagerly or replay. It is turned off unless the variable is set: the
        kernels of a captured collective are then those of an eager one, and each rank may decide for itself.
        """
        if not all(is_nccl_group(name, self.device) for name in groups):
            return False
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # NCCL reads it at the first capture
        return True

    def stream(self) -> int:
        """Returns the handle of the device's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def wait_for_stream(self, stream: int) -> None:
        """Makes the device's current stream wait for another, by its handle."""
        other = torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(self.device).wait_stream(other)

    def synchronize(self) -> None:
        """Waits for all work of the device."""
        torch.cuda.synchronize(self.device)
