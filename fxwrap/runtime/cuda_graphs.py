"""CUDA graphs by torch: how `replay` records and replays on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from fxwrap.torch_compat import caches_memory, clear_cublas_workspaces, stop_allocating_to

_CAPTURE = threading.Lock()
"""torch allows one capture at a time in a process."""


class CudaGraphs:
    """Records work on one GPU as CUDA graphs.

    torch keeps the state of the default random number generator: each replay draws on from where the generator is, as
    the calls themselves would. Capture fails only by what this thread does, so other threads may work meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None

    def pool(self) -> Any:
        """Returns the handle of a new private pool of torch's caching allocator."""
        return torch.cuda.graph_pool_handle()

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]], pool: Any
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Captures what `run` launches on a side stream.

        Raises:
            RuntimeError: torch's caching allocator is off, or a capture failed. What `run` raises is raised as it is.
        """
        if not caches_memory():
            # Begun all the same, a capture fails, and torch ends the process while it frees what was allocated.
            what = "torch's caching allocator is off, and without it nothing can be allocated in a CUDA graph: call "
            what += "torch.cuda.memory.caching_allocator_enable() and unset PYTORCH_NO_CUDA_MEMORY_CACHING, or compile "
            raise RuntimeError(f"{what}with cuda_graphs=False")
        graph = torch.cuda.CUDAGraph()
        with _CAPTURE, torch.cuda.device(self.device):
            if self._side is None:
                self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            # A library's workspace that is made within is in the pool, so nobody else may go on using it.
            clear_cublas_workspaces()
            try:
                with torch.cuda.stream(self._side):
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
            with suppress(RuntimeError):  # which only says that something failed before
                self._end(graph, pool)
            raise
        self._end(graph, pool)
        return results

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Ends a capture. One that fails leaves torch half-way, and is followed by one that does not.

        Otherwise the pool would stay the one that is allocated from, and the generator would wait for the end.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            stop_allocating_to(pool, self.device)
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)  # torch warns of a graph that is empty
            other.capture_end()
            raise

    def is_ready(self) -> bool:
        """Whether the current stream is not being captured already."""
        return not torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        """Returns the handle of the device's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def follow(self, stream: int) -> None:
        """Makes the device's current stream wait for another, by its handle."""
        other = torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(self.device).wait_stream(other)

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        torch.cuda.synchronize(self.device)
