"""Tensor parallel and sharded models with captured collectives beside the same programs without CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from fxwrap.compile.backend import make_backend
from fxwrap.lines import CallFunction, StartCollective
from fxwrap.runtime.graph_capture.cuda_graphs import CudaGraphCapturer
from fxwrap.wrapper_ir import Program
from tests.distributed.cases import COLUMNS_AND_ROWS, WORLD_SIZE, Mlp, simple_fsdp
from tests.distributed.overlap_rank import OVERLAPPED, SameBits
from tests.support.long_form import LONG

CALLS = 5

BLOCKS = 4 if LONG else 2
"""Blocks of each model."""


class Decoder(nn.Module):
    """Tensor parallel blocks that read a cache, which each call mutates."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(BLOCKS)])
        self.register_buffer("cache", torch.zeros(2, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        cache = self.get_buffer("cache")
        cache.mul_(0.5).add_(x)
        for block in self.blocks:
            cache = cache + block(cache)
        return cache


def _tensor_parallel() -> nn.Module:
    model = Decoder()
    mesh = init_device_mesh(torch.get_default_device().type, (WORLD_SIZE,))
    for block in model.blocks:
        parallelize_module(block, mesh, COLUMNS_AND_ROWS)
    return model


def _sharded() -> nn.Module:
    mesh = init_device_mesh(torch.get_default_device().type, (WORLD_SIZE,))
    return simple_fsdp(nn.Sequential(*[Mlp() for _ in range(BLOCKS)]), mesh)


class ReplayCounter:
    """The number of captured graphs and their replays."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def capture(self, capturer: CudaGraphCapturer, run: Any, pool: object) -> tuple[Callable[[], None], Any]:
        replay, results = _CAPTURE(capturer, run, pool)
        self.recorded += 1

        def counted() -> None:
            self.replayed += 1
            replay()

        return counted, results


_CAPTURE = CudaGraphCapturer.capture


@contextmanager
def counted_replays() -> Iterator[ReplayCounter]:
    """Counts captures and replays on GPUs inside a `with` block."""
    counter = ReplayCounter()

    def capture(capturer: CudaGraphCapturer, run: Any, pool: object) -> tuple[Callable[[], None], Any]:
        return counter.capture(capturer, run, pool)

    with patch.object(CudaGraphCapturer, "capture", capture):
        yield counter


def check_captured_collectives(counter: Any) -> None:
    """All collectives are captured and replayed; results, gradients and caches have the bits of eager collectives.

    `counter` has the numbers of captured graphs and of replays, `recorded` and `replayed`.
    """
    more = [(_tensor_parallel, True)] if LONG else []
    for build, trains in ((_tensor_parallel, False), *more, (_sharded, True)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = build()
        SameBits.programs.clear()
        backend = make_backend(OVERLAPPED.replace(cuda_graphs=True), SameBits)
        compiled, before = torch.compile(model, backend=backend, fullgraph=True), counter.replayed
        for _ in range(CALLS):
            x = torch.randn(2, 4, 8) + (torch.distributed.get_rank() if build is _sharded else 0)
            with torch.set_grad_enabled(trains):
                result = compiled(x)
            if trains:
                result.square().mean().backward()
                model.zero_grad(set_to_none=True)
            del result
        functions = [_captured_functions(program) for _, program in SameBits.programs]
        assert all(functions), SameBits.programs
        assert counter.replayed - before == (CALLS - 1) * sum(functions), (counter.replayed, before, functions)
    torch._dynamo.reset()
    gc.collect()


def _captured_functions(program: Program) -> int:
    """Returns the number of captured functions of a program, none of whose collectives is outside of them."""
    assert not any(isinstance(line, StartCollective) for line in program.body.lines), program
    assert any(isinstance(line, StartCollective) for line in program.lines()), program
    return sum(isinstance(line, CallFunction) and line.max_captures > 0 for line in program.body.lines)
