"""Training steps of GPT-2 and Llama on several ranks: compiled by fxwrap beside eager and, on GPUs, TorchInductor.

    python benchmarks/distributed.py --ranks 2                       # Gloo: simple_fsdp beside FSDP2, and TP
    python benchmarks/distributed.py --ranks 4 --device cuda --bf16 --record # NCCL: beside TorchInductor
    python benchmarks/distributed.py --ranks 2 --device cuda --bf16 --model decoding-llama # one token, no gradients
    python benchmarks/distributed.py --ranks 2 --device cuda --bf16 --parallelism TP+SP # fused communication

Gloo's groups have one worker thread for all sides, since torch's two corrupt the heap (docs/distributed.md).

Each rank is a process. A side is timed in interleaved rounds with the base, TorchInductor or else eager, on the same
ranks; a round is one step of each between barriers, and the ratio is the median of the rounds' ratios. A row is printed
as soon as its side is measured; progress goes to the standard error.

Exposed communication is the time in which a rank communicates and does not compute. On CPUs, it is the time of the step
minus that of the same step whose process group copies locally instead of communicating (torch's fake group), each in
its fastest round, since other load only adds time. On GPUs, it is the time of the kernels of NCCL and of symmetric
memory in a profile of several steps while no other kernel runs, on the rank that has most of it. Such a kernel also
waits for slower ranks, whose start the profiler delays: of each, only the last part counts, as long as the shortest one
of all ranks. "Unbucketed" is the number of collectives of the model that a side compiles, run in eager.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import fxwrap
from benchmarks.distributed_models import MODELS, PARALLELISMS, DecodingLlama, Parallelism, randomise
from benchmarks.measure_kernels import peak_of
from benchmarks.results import Report, add_record_option
from fxwrap.compile.backend import make_backend
from fxwrap.fused_communication import CommunicationFusion, enable_symmetric_memory
from fxwrap.options import Options
from tests.support.gloo import use_one_worker

Step = Callable[[Tensor], Tensor]
DECODING = "decoding-llama"
SYMMETRIC = "fxwrap symmetric"
"""fxwrap with collectives over symmetric memory, fused with matmuls where they can be."""

SIDES = ("eager", "inductor", "fxwrap", SYMMETRIC, "fxwrap step")
START = time.perf_counter()
_PROFILED_STEPS = 5
_MARKER = "spin_kernel"
"""A part of the name of the kernel of `torch.cuda._sleep`."""

_COMMUNICATION = ("ncclDevKernel", "Memcpy PtoP", "barrier_kernel", "shot_all_reduce")
"""Parts of the names of kernels that communicate: those of NCCL, and of symmetric memory."""


def progress(text: str) -> None:
    """Prints a phase and the seconds since the start, on rank 0."""
    if dist.get_rank() == 0:
        print(f"[{time.perf_counter() - START:7.1f} s] {text}", file=sys.stderr, flush=True)


# --- sides ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The command line, the batch, and the models of one parallelism, which all compiled sides share."""

    chosen: argparse.Namespace
    tokens: Tensor
    name: str
    models: dict[tuple[bool, bool], tuple[nn.Module, torch.optim.Optimizer]] = field(default_factory=dict)
    unbucketed: dict[bool, int] = field(default_factory=dict)

    @property
    def parallelism(self) -> Parallelism:
        """The parallelism of the job."""
        return PARALLELISMS[self.name]

    def has(self, side: str) -> bool:
        """Whether a side differs from the others: collectives can be fused with matmuls."""
        return side != SYMMETRIC or "TP" in self.name

    def step(self, side: str, is_local: bool = False) -> Step:
        """Returns the step of a side; with `is_local`, its collectives copy on each rank."""
        model, optimizer = self._model(side == "eager", is_local)
        forward: Any = model
        if side in ("inductor", "fxwrap"):
            forward = torch.compile(model, backend=side, mode=self.chosen.mode)
        elif side == SYMMETRIC:
            options = Options.from_mapping({"passes": [CommunicationFusion()]}, self.chosen.mode)
            forward = torch.compile(model, backend=make_backend(options))
        step = torch.no_grad()(forward) if isinstance(model, DecodingLlama) else train_step(forward, optimizer)
        if side != "fxwrap step":
            return step
        return fxwrap.compile_step(step, (self.tokens,), options=Options.from_mapping({}, self.chosen.mode))

    def unbucketed_collectives(self, side: str) -> int:
        """Returns the number of collectives of a side's model in eager."""
        is_eager = side == "eager"
        if is_eager not in self.unbucketed:
            model, optimizer = self._model(is_eager, is_local=False)
            step = torch.no_grad()(model) if isinstance(model, DecodingLlama) else train_step(model, optimizer)
            self.unbucketed[is_eager], _ = profiled(step, self.tokens, count=1)
        return self.unbucketed[is_eager]

    def _model(self, is_eager: bool, is_local: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        key = (is_eager, is_local)
        if key not in self.models:
            self.models[key] = self._build_model(*key)
        return self.models[key]

    def _build_model(self, is_eager: bool, is_local: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        shard = self.parallelism.eager if is_eager else self.parallelism.compiled
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.chosen.dtype)  # no copy of the parameters in float32
        try:
            with torch.device(self.tokens.device):
                model = shard(MODELS[self.chosen.model](self.chosen), self._mesh(is_local))
        finally:
            torch.set_default_dtype(default)
        if is_local:
            randomise(model)
        # Updates of many tensors in one operator do not mix tensors and DTensors.
        groups: dict[bool, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        return model, torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-3)

    def _mesh(self, is_local: bool) -> DeviceMesh:
        ranks, inner = self.chosen.ranks, self.parallelism.inner
        sizes, names = ((ranks,), ("data",)) if inner == 1 else ((ranks // inner, inner), ("data", "model"))
        override: Any = dict.fromkeys(names, "fake") if is_local else None
        mesh = init_device_mesh(self.tokens.device.type, sizes, mesh_dim_names=names, backend_override=override)
        if SYMMETRIC in self.chosen.sides:
            for name in names:
                enable_symmetric_memory(mesh.get_group(name).group_name)
        return mesh


def train_step(forward: Any, optimizer: torch.optim.Optimizer) -> Step:
    """Returns a step of training with `forward`, a model or compiled from it."""

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = forward(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def enable_inductor_overlap() -> None:
    """Turns TorchInductor's bucketing and overlap of collectives on."""
    options = torch._inductor.config.aten_distributed_optimizations
    options.enable_overlap_scheduling = True
    options.collective_bucketing = True
    options.insert_overlap_deps = True


# --- measurement ------------------------------------------------------------------------------------------------------


def warm(step: Step, tokens: Tensor, name: str) -> None:
    """Runs a step three times; the first time compiles it."""
    for number in range(3):
        start = time.perf_counter()
        step(tokens)
        _synchronise(tokens)
        progress(f"{name}: call {number + 1} took {time.perf_counter() - start:.1f} s")


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


def on_all_ranks(value: float, tokens: Tensor) -> list[float]:
    """Returns the values of a number on all ranks."""
    own = torch.tensor([value], dtype=torch.float64, device=tokens.device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [float(part) for part in parts]


def _synchronise(tokens: Tensor) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize()


def profiled(step: Step, tokens: Tensor, count: int = _PROFILED_STEPS) -> tuple[int, float]:
    """Returns the number of collectives of a step, and on GPUs the seconds of exposed communication of this rank.

    On GPUs both are the mean of `count` steps in sequence. A step, a barrier and a marker precede them in the profile:
    the start of a profiler delays ranks differently, and a collective that waits for another rank would count as
    exposed. Operators are not recorded, since that delays the host, and takes long to read.
    """
    if not tokens.is_cuda:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(tokens)
        return len([event for event in profile.events() if event.name.startswith("gloo:")]), 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(tokens)
        _synchronise(tokens)
        dist.barrier()
        torch.cuda._sleep(1000)
        _synchronise(tokens)
        for _ in range(count):
            step(tokens)
        _synchronise(tokens)
    device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    kernels = [event for event in profile.events() if event.device_type == device and not event.is_user_annotation]
    begin = max([event.time_range.end for event in kernels if _MARKER in event.name])
    kernels = [event for event in kernels if event.time_range.start >= begin]
    collectives = [event for event in kernels if any(name in event.name for name in _COMMUNICATION)]
    others = [event for event in kernels if not any(name in event.name for name in ("nccl", *_COMMUNICATION))]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in collectives]
    covers = [(event.time_range.start, event.time_range.end) for event in others]
    return round(len(spans) / count), uncovered(without_waits(spans, tokens), covers) / 1e6 / count


def without_waits(spans: Iterable[tuple[str, float, float]], tokens: Tensor) -> list[tuple[float, float]]:
    """Returns the ends of the spans of collectives, as long as the shortest span of the same collective of any rank.

    Each span has the name of its kernel. The kernels of one name are matched in the order of their starts: those of
    several groups run beside each other, in an order that differs between ranks. Ranks whose profiles have different
    numbers of collectives return whole spans.
    """
    ordered = sorted(spans)
    counts = on_all_ranks(len(ordered), tokens)
    if len({*counts}) > 1:
        return [(start, end) for _, start, end in ordered]
    shortest = torch.tensor([end - start for _, start, end in ordered], device=tokens.device, dtype=torch.float64)
    dist.all_reduce(shortest, dist.ReduceOp.MIN)
    return [(end - duration, end) for (_, _, end), duration in zip(ordered, shortest.tolist(), strict=True)]


def uncovered(intervals: Iterable[tuple[float, float]], covers: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals outside of the union of covers."""
    covered = list(covers)
    return _union([*intervals, *covered]) - _union(covered)


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


@dataclass(frozen=True)
class Side:
    """A step with its name and, on CPUs, the step whose collectives are local."""

    name: str
    step: Step
    local: Step | None


def build(job: Job, name: str) -> Side:
    """Builds and warms a side."""
    step = job.step(name)
    progress(f"{job.name}, {name}: built")
    warm(step, job.tokens, f"{job.name}, {name}")
    if job.tokens.is_cuda:
        return Side(name, step, None)
    local = job.step(name, is_local=True)
    warm(local, job.tokens, f"{job.name}, {name}, local")
    return Side(name, step, local)


def measure(job: Job, side: Side, base: Side, report: Report | None) -> None:
    """Times a side beside the base and adds its row."""
    steps = {"side": side.step}
    if side is not base:
        steps["base"] = base.step
    if side.local is not None:
        steps["local"] = side.local
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(job.chosen.rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, job.tokens))
    progress(f"{job.name}, {side.name}: timed")
    count, exposed = profiled(side.step, job.tokens)
    exposed_by_rank = on_all_ranks(exposed, job.tokens)
    exposed = max(exposed_by_rank)
    if "local" in times:
        exposed = min(times["side"]) - min(times["local"])
    peak = peak_of(partial(side.step, job.tokens), job.tokens.device)[1] / 1e6 if job.tokens.is_cuda else None
    median = statistics.median(times["side"])
    base_times = times.get("base", times["side"])
    ratio = statistics.median([one / other for one, other in zip(times["side"], base_times, strict=True)])
    row: dict[str, str | int | float | None] = {
        "parallelism": job.name, "side": side.name, "ms": round(1e3 * median, 2), f"/ {base.name}": round(ratio, 3),
        "collectives": count, "unbucketed": job.unbucketed_collectives(side.name),
        "exposed, ms": round(1e3 * exposed, 2), "exposed": round(exposed / median, 3),
        "peak, MB": None if peak is None else round(peak, 1),
    }  # fmt: skip
    if report is not None:
        report.add(row, {"seconds": times, "exposed by rank": exposed_by_rank})


def measure_sides(job: Job, names: Sequence[str], report: Report | None) -> None:
    """Measures the sides of one parallelism, one after the other beside the base, whose row comes first."""
    base = build(job, "inductor" if "inductor" in names else names[0])
    measure(job, base, base, report)
    for name in names:
        if name == base.name or not job.has(name):
            continue
        measure(job, build(job, name), base, report)
        gc.collect()


def run_rank(rank: int, chosen: argparse.Namespace, store: str) -> None:
    """Measures all sides on one rank; rank 0 prints."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // chosen.ranks))
    torch.set_flush_denormal(True)  # a group that does not communicate leaves gradients as memory was
    is_gpu = chosen.device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(rank)
    else:
        use_one_worker()
    dist.init_process_group(
        "nccl" if is_gpu else "gloo", store=dist.FileStore(store, chosen.ranks), rank=rank,  # type: ignore[attr-defined]
        world_size=chosen.ranks, timeout=timedelta(minutes=10),
        device_id=torch.device("cuda", rank) if is_gpu else None,
    )  # fmt: skip
    dist.barrier()
    progress(f"{chosen.ranks} ranks are there")
    if "inductor" in chosen.sides:
        enable_inductor_overlap()
    generator = torch.Generator().manual_seed(0)
    length = 1 if chosen.model == DECODING else chosen.length
    tokens = torch.randint(chosen.vocabulary, (chosen.batch, length), generator=generator)
    tokens = tokens.to(f"cuda:{rank}" if is_gpu else "cpu")
    kind = "decoding-" if chosen.model == DECODING else ""
    name = f"distributed-{kind}{chosen.device.type}-{chosen.ranks}"
    report = Report(name, chosen, chosen.device) if rank == 0 else None
    for parallelism in chosen.parallelism:
        measure_sides(Job(chosen, tokens, parallelism), chosen.sides, report)
        torch._dynamo.reset()
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--parallelism", choices=PARALLELISMS, nargs="+", help="FSDP and TP; TP for decoding")
    parser.add_argument("--mode", help="torch.compile's, such as reduce-overhead")
    parser.add_argument(
        "--sides", choices=SIDES, nargs="+", help="all, those with TorchInductor and symmetric memory on GPUs only"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=448, help="the width of Llama's MLP")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key-heads", type=int, default=4, help="Llama's heads of keys and values")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--bf16", action="store_true")
    add_record_option(parser)
    chosen = parser.parse_args()
    chosen.dtype = torch.bfloat16 if chosen.bf16 else torch.float32
    if chosen.parallelism is None:
        chosen.parallelism = ["TP"] if chosen.model == DECODING else ["FSDP", "TP"]
    if chosen.sides is None:
        chosen.sides = [side for side in SIDES if side not in ("inductor", SYMMETRIC) or chosen.device.type == "cuda"]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (chosen, f"{folder}/store"), nprocs=chosen.ranks)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
