"""One rank: trains a Llama with tensor and sequence parallelism with and without fused communication."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.distributed_models import Llama, tensor_and_sequence_parallel
from fxwrap.compile.backend import make_backend
from fxwrap.fused_communication import CommunicationFusion, enable_symmetric_memory, symmetric_memory_decline
from fxwrap.options import Options
from tests.distributed.processes import run_checks
from tests.distributed.rank import EveryEmitter
from tests.support.symmetric_memory import operators_on_cpu, supported

SIZES = {"layers": 1, "width": 64, "hidden": 128, "heads": 8, "key_heads": 4}
BATCH = {"vocabulary": 128, "length": 16, "batch": 2}


class Reports(logging.Handler):
    """The first line of each report of the pass: how many collectives are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().partition("\n")[0])


def trained(backend: Callable[..., Any] | None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Returns the losses of two steps, in eager mode without a backend, and the gradients of the second one on this
    rank."""
    torch.manual_seed(0)
    sizes = argparse.Namespace(**SIZES, **BATCH, ranks=dist.get_world_size())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device(device):
        model = tensor_and_sequence_parallel(Llama(sizes).to(dtype), mesh)
    for parameter in model.parameters():
        dist.broadcast(parameter.to_local() if isinstance(parameter, DTensor) else parameter.data, 0)
    tokens = torch.randint(BATCH["vocabulary"], (BATCH["batch"], BATCH["length"])).to(device)
    forward = model if backend is None else torch.compile(model, backend=backend)
    results = []
    for _ in range(2):
        model.zero_grad()
        loss = forward(tokens)
        loss.backward()
        results.append(loss.detach())
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return results + [item.to_local() if isinstance(item, DTensor) else item for item in gradients]


def check_training(device: torch.device) -> None:
    """Losses and gradients are those of eager mode; the pass fuses all collectives but the first of the backward."""
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    expected = trained(None, device, dtype)
    if is_gpu:
        enable_symmetric_memory(dist.group.WORLD.group_name)
    reports, logger = Reports(), logging.getLogger("fxwrap.fused_communication")
    logger.addHandler(reports)
    logger.setLevel(logging.INFO)
    fusion = CommunicationFusion(decline=symmetric_memory_decline if is_gpu else supported, one_shot_bytes=0)
    options = Options(passes=[fusion], compile_cache=False)
    with nullcontext() if is_gpu else operators_on_cpu():
        have = trained(make_backend(options) if is_gpu else make_backend(options, EveryEmitter), device, dtype)
    fused = sorted({int(line.partition(" ")[0]) for line in reports.lines})
    # torch 2.11, which the machines with GPUs have, breaks the graph of a training step with DTensors.
    assert fused[-1] >= 3 if is_gpu else fused == [4, 5], reports.lines
    for number, (one, other) in enumerate(zip(have, expected, strict=True)):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < (5e-2 if is_gpu else 1e-4), (number, error)


def main(arguments: Sequence[str]) -> None:
    """Runs the check on Gloo: `rank.py RANK STORE`."""
    torch.set_num_threads(1)
    run_checks(arguments, {"training": lambda: check_training(torch.device("cpu"))}, timeout_s=180)


if __name__ == "__main__":
    main(sys.argv[1:])
