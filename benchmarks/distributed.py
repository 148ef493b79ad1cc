"""Training steps of GPT-2 on several ranks: compiled by fxwrap beside eager and, on GPUs, TorchInductor.

    python benchmarks/distributed.py --ranks 2                       # Gloo: simple_fsdp beside FSDP2, and TP
    python benchmarks/distributed.py --ranks 4 --device cuda --bf16 --record # NCCL: beside TorchInductor

Each rank is a process. Sides are timed in interleaved rounds on the same ranks; a round is one step between barriers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.results import Report, add_record_option

Step = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A block of GPT-2; `heads` are those of this rank."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.projection = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        query, key, value = [
            layer(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 with random weights, without dropout; returns the loss."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(chosen.vocabulary, chosen.width)
        self.positions = nn.Embedding(chosen.length, chosen.width)
        self.blocks = nn.ModuleList([Block(chosen.width, chosen.heads) for _ in range(chosen.layers)])
        self.norm = nn.LayerNorm(chosen.width)
        self.head = nn.Linear(chosen.width, chosen.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


# --- parallelism ------------------------------------------------------------------------------------------------------


def fsdp2(model: Gpt2, mesh: DeviceMesh) -> nn.Module:
    """Shards blocks with hooks, as eager code does."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def simple_fsdp(model: Gpt2, mesh: DeviceMesh) -> nn.Module:
    """Shards parameters by parametrisation, so that their collectives are in the graph."""
    for module in list(model.modules()):
        names = list(dict(module.named_parameters(recurse=False)))
        for name in names:
            shard = distribute_tensor(module.get_parameter(name).detach(), mesh, [Shard(0)])
            module._parameters[name] = nn.Parameter(shard)
        getters = {name: property(partial(_gathered, name)) for name in names}
        module.__class__ = type(f"Fsdp{type(module).__name__}", (type(module),), getters)
    return model


def _gathered(name: str, module: nn.Module) -> Tensor:
    parameter: Any = module._parameters[name]
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def tensor_parallel(model: Gpt2, mesh: DeviceMesh) -> nn.Module:
    """Splits attention by heads, and the MLP by columns and rows."""
    plan = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, {**plan, "projection": RowwiseParallel(), "down": RowwiseParallel()})
    return model


def train_step(model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer) -> Step:
    """Returns a step of training with `forward`, the model or compiled from it."""

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = forward(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sides(chosen: argparse.Namespace, mesh: DeviceMesh, tokens: Tensor) -> Mapping[str, Mapping[str, Step]]:
    """Returns the steps by parallelism and side; the first side is the one that others are compared with."""

    def build(shard: Callable[[Gpt2, DeviceMesh], nn.Module], backend: str = "", whole: bool = False) -> Step:
        torch.manual_seed(0)
        with torch.device(chosen.device):
            model = shard(Gpt2(chosen).to(chosen.dtype), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        forward = torch.compile(model, backend=backend) if backend else model
        step = train_step(model, forward, optimizer)
        return fxwrap.compile_step(step, (tokens,)) if whole else step

    gpu = chosen.device.type == "cuda"
    if gpu:
        torch._inductor.config.reorder_for_compute_comm_overlap = True
    result = {}
    for name, eager, compiled in (("FSDP", fsdp2, simple_fsdp), ("TP", tensor_parallel, tensor_parallel)):
        result[name] = {"eager": build(eager)}
        if gpu:
            result[name]["inductor"] = build(compiled, "inductor")
        result[name] |= {"fxwrap": build(compiled, "fxwrap"), "fxwrap step": build(compiled, whole=True)}
    return result


# --- measurement ------------------------------------------------------------------------------------------------------


def seconds(step: Step, tokens: Tensor) -> float:
    """Returns the time of a step on the slowest rank."""
    _synchronise(tokens)
    dist.barrier()
    start = time.perf_counter()
    step(tokens)
    _synchronise(tokens)
    elapsed = torch.tensor([time.perf_counter() - start], device=tokens.device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _synchronise(tokens: Tensor) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize()


def communication(step: Step, tokens: Tensor) -> tuple[int, float]:
    """Returns the number of collectives of a step, and the seconds that this rank's threads spend in them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if tokens.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step(tokens)
        _synchronise(tokens)
    prefix = "ncclDevKernel" if tokens.is_cuda else "gloo:"
    events = [event for event in profile.events() if event.name.startswith(prefix)]
    total = sum([event.device_time if tokens.is_cuda else event.cpu_time for event in events])
    return len(events), total / 1e6


def peak_bytes(step: Step, tokens: Tensor) -> float | None:
    """Returns the peak memory of a step in MB, on GPUs."""
    if not tokens.is_cuda:
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(tokens)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def run_rank(rank: int, chosen: argparse.Namespace, store: str) -> None:
    """Measures all sides on one rank; rank 0 prints."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // chosen.ranks))
    if chosen.device.type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if chosen.device.type == "cuda" else "gloo", store=dist.FileStore(store, chosen.ranks), rank=rank,  # type: ignore[attr-defined]
        world_size=chosen.ranks, timeout=timedelta(minutes=10),
    )  # fmt: skip
    mesh = init_device_mesh(chosen.device.type, (chosen.ranks,))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(chosen.vocabulary, (chosen.batch, chosen.length), generator=generator).to(chosen.device)
    report = Report(f"distributed-{chosen.device.type}-{chosen.ranks}", chosen, chosen.device) if rank == 0 else None
    for name, steps in sides(chosen, mesh, tokens).items():
        for step in steps.values():
            for _ in range(3):
                step(tokens)
        times: dict[str, list[float]] = {side: [] for side in steps}
        for _ in range(chosen.rounds):
            for side, step in steps.items():
                times[side].append(seconds(step, tokens))
        base = statistics.median(times["inductor" if "inductor" in times else "eager"])
        for side, step in steps.items():
            count, busy = communication(step, tokens)
            peak = peak_bytes(step, tokens)
            median = statistics.median(times[side])
            row: dict[str, str | int | float | None] = {
                "parallelism": name, "side": side, "ms": round(1e3 * median, 2), "ratio": round(median / base, 3),
                "collectives": count, "ms in collectives": round(1e3 * busy, 2),
                "peak, MB": None if peak is None else round(peak, 1),
            }  # fmt: skip
            if report is not None:
                report.add(row, {"seconds": times[side]})
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--bf16", action="store_true")
    add_record_option(parser)
    chosen = parser.parse_args()
    chosen.dtype = torch.bfloat16 if chosen.bf16 else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (chosen, f"{folder}/store"), nprocs=chosen.ranks)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
