"""Simulates training steps of Llama 70B layers with sharded parameters on 8 to 4,096 ranks, before and after overlap.

The graph is traced with a fake process group of that size, and the passes of a compile bucket and overlap it. A cost
model gives each line its time: matmuls and attention by their operations, everything else by its bytes, collectives by
latency and bandwidth of NVLink within a host of 8 GPUs, and of the network between hosts. Collectives run one after the
other beside the compute lines; a start waits for the compute lines before it, and a wait for its collective.

    python -m benchmarks.schedule_simulation [--ranks 8 64] [--layers 24] [--tokens 4096 1024] [--slack 0.0] [--record]

A step is forward, backward and the update of AdamW. Prints for each size the number of collectives, the compute and
communication time, the time of the step before and after, its ratio to the lower bound max(compute, communication),
and the peak memory without inputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxwrap
from benchmarks.results import Report, add_record_option
from fxwrap.devices import CPU, CUDA, DeviceSpec
from fxwrap.lines import ExternCall, Launch, StartCollective, WaitCollective
from fxwrap.options import Options
from fxwrap.passes.bucket_collectives import bucket_collectives
from fxwrap.passes.overlap_collectives import overlap_collectives
from fxwrap.wrapper_ir import LineBase, Program, TensorType, Value, defined, live_bytes, used

C10D = torch.ops._c10d_functional
HOST = 8
"""The GPUs of a host."""


@dataclass(frozen=True)
class Cluster:
    """Speeds of H100 hosts: operations and bytes per second of a GPU, bytes per second and seconds of collectives."""

    ranks: int
    operations: float = 990e12 * 0.65
    memory: float = 3.3e12 * 0.8
    nvlink: float = 450e9 * 0.8
    network: float = 8 * 50e9 * 0.85
    """Of the eight network cards of a host, which a ring uses together."""

    @property
    def bandwidth(self) -> float:
        """Bytes of a collective's larger side per second."""
        return (self.nvlink if self.ranks <= HOST else self.network) * self.ranks / (self.ranks - 1)

    @property
    def latency(self) -> float:
        """Seconds of a collective of few bytes: steps over NVLink, then a tree over hosts."""
        return 15e-6 + 6e-6 * math.ceil(math.log2(max(self.ranks / HOST, 1)))

    def spec(self) -> DeviceSpec:
        """Returns the CPU, whose fake tensors stand for the GPU's, with the collectives of this cluster."""
        return dataclasses.replace(
            CPU, collective_latency_s=self.latency, collective_bytes_per_s=self.bandwidth,
            coalesced_collectives=CUDA.coalesced_collectives,
        )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's layers."""

    width: int = 8192
    hidden: int = 28672
    heads: int = 64
    key_heads: int = 8


# --- the graph --------------------------------------------------------------------------------------------------------


def _gather(shard: Tensor, columns: int) -> Tensor:
    size = torch.distributed.get_world_size()
    return C10D.wait_tensor(C10D.all_gather_into_tensor(shard, size, "0")).view(-1, columns)


def _scatter(gradient: Tensor) -> Tensor:
    size = torch.distributed.get_world_size()
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(gradient.reshape(-1), "avg", size, "0"))


class _ShardedLinear(torch.autograd.Function):
    """A linear layer whose weight is gathered in the forward, and again in the backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, shard: Tensor) -> Tensor:
        context.save_for_backward(x, shard)
        return x @ _gather(shard, x.shape[-1]).t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, shard = context.saved_tensors
        return gradient @ _gather(shard, x.shape[-1]), _scatter(gradient.t() @ x)


class _ShardedNorm(torch.autograd.Function):
    """RMSNorm with a sharded weight."""

    @staticmethod
    def forward(context: Any, x: Tensor, shard: Tensor) -> Tensor:
        context.save_for_backward(x, shard)
        return torch.rms_norm(x, x.shape[-1:], _gather(shard, x.shape[-1])[0])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, shard = context.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), _gather(shard, x.shape[-1])[0].requires_grad_()
            normed = torch.rms_norm(x, x.shape[-1:], weight)
        of_x, of_weight = torch.autograd.grad(normed, (x, weight), gradient)
        return of_x, _scatter(of_weight)


def layer(shape: Shape, x: Tensor, shards: list[Tensor]) -> Tensor:
    """Returns the result of one layer for tokens of shape (tokens, width)."""
    attention_norm, q, k, v, o, norm, gate, up, down = shards
    head = shape.width // shape.heads
    normed = _ShardedNorm.apply(x, attention_norm)

    def heads(weight: Tensor, count: int) -> Tensor:
        projected = _ShardedLinear.apply(normed, weight).view(1, x.shape[0], count, head).transpose(1, 2)
        return projected.repeat_interleave(shape.heads // count, 1)

    queries, keys, values = heads(q, shape.heads), heads(k, shape.key_heads), heads(v, shape.key_heads)
    attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    x = x + _ShardedLinear.apply(attended.transpose(1, 2).reshape(x.shape), o)
    normed = _ShardedNorm.apply(x, norm)
    inner = torch.nn.functional.silu(_ShardedLinear.apply(normed, gate)) * _ShardedLinear.apply(normed, up)
    return x + _ShardedLinear.apply(inner, down)


def _update(parameters: Sequence[Tensor], gradients: Sequence[Tensor], state: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Updates parameters in place, as AdamW does."""
    with torch.no_grad():
        for parameter, gradient, (mean, square) in zip(parameters, gradients, state, strict=True):
            new_mean, new_square = mean.lerp(gradient, 0.1), square * 0.95 + gradient * gradient * 0.05
            mean.copy_(new_mean)
            square.copy_(new_square)
            parameter.copy_(parameter * (1 - 1e-4) - 1e-3 * new_mean / (new_square.sqrt() + 1e-8))


def training_graph(shape: Shape, layers: int, tokens: int) -> GraphModule:
    """Returns forward, backward and update of some layers as one graph, with the ranks of the current group."""
    ranks = torch.distributed.get_world_size()
    key_width = shape.width // shape.heads * shape.key_heads
    rows = [shape.width, key_width, key_width, shape.width, shape.hidden, shape.hidden, shape.width]
    columns = [shape.width] * 6 + [shape.hidden]

    def shards() -> list[Tensor]:
        weights = [torch.empty(n * m // ranks, dtype=torch.bfloat16) for n, m in zip(rows, columns, strict=True)]
        norms = [torch.empty(shape.width // ranks, dtype=torch.bfloat16) for _ in range(2)]
        return [norms[0], *weights[:4], norms[1], *weights[4:]]

    def step(x: Tensor, parameters: list[Tensor], state: list[tuple[Tensor, Tensor]]) -> Tensor:
        leaves = [item.detach().requires_grad_() for item in parameters]
        for number in range(layers):
            x = layer(shape, x, leaves[9 * number : 9 * number + 9])
        loss = x.float().square().mean()
        _update(parameters, torch.autograd.grad(loss, leaves), state)
        return loss.detach()

    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [item for _ in range(layers) for item in shards()]
        state = [(torch.empty_like(item), torch.empty_like(item)) for item in parameters]
        return make_fx(step, tracing_mode="real")(
            torch.empty(tokens, shape.width, dtype=torch.bfloat16), parameters, state
        )


# --- the cost model ---------------------------------------------------------------------------------------------------


def line_seconds(line: LineBase, cluster: Cluster) -> float:
    """Returns the time of a line in seconds; that of a start is the time of its collective."""
    match line:
        case StartCollective():
            sizes = [sum(_bytes(values)) for values in (used(line), defined(line))]
            return cluster.latency + max(sizes) / cluster.bandwidth
        case ExternCall():
            traffic = sum(_bytes([*used(line), *defined(line)])) / cluster.memory
            return max(_operations(line) / cluster.operations, traffic)
        case Launch():
            return sum(_bytes([*used(line), *line.outs])) / cluster.memory
        case _:
            return 0.0


def _bytes(values: Iterable[Value]) -> list[int]:
    return [int(item.type.storage_bytes) for item in values if isinstance(item.type, TensorType)]


def _operations(line: ExternCall) -> float:
    """Returns the multiplications and additions of a matmul or of causal attention, 0 for other calls."""
    tensors = [item.tensor_type for item in used(line) if isinstance(item.type, TensorType)]
    if line.target.startswith(("aten.mm.", "aten.addmm.")):
        one, other = tensors[-2:] if not line.outs else tensors[-3:-1]
        return 2.0 * math.prod(map(int, one.sizes)) * int(other.sizes[1])
    if "scaled_dot_product" in line.target:
        query = next(item for item in tensors if len(item.sizes) == 4)
        batch, heads, length, head = map(int, query.sizes)
        return (2.5 if "backward" in line.target else 1.0) * 2 * batch * heads * length * length * head
    return 0.0


@dataclass(frozen=True)
class Simulated:
    """The times of a program in seconds: of all compute lines, of all collectives, and from begin to end."""

    compute: float
    communication: float
    total: float
    collectives: int


def simulate(program: Program, cluster: Cluster) -> Simulated:
    """Returns the times of a program: collectives run in order beside compute lines, which run in order."""
    compute = communication = now = free = 0.0
    ready: dict[str, float] = {}
    collectives = 0
    for line in program.body.lines:
        seconds = line_seconds(line, cluster)
        if isinstance(line, StartCollective):
            free = max(free, now) + seconds
            communication += seconds
            collectives += 1
            ready |= dict.fromkeys([value.name for value in defined(line)], free)
        elif isinstance(line, WaitCollective):
            now = max(now, ready[line.pending.name])
        else:
            now += seconds
            compute += seconds
    return Simulated(compute, communication, max(now, free), collectives)


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A program before and after the passes: simulated times, and peak memory without inputs in bytes."""

    before: Simulated
    after: Simulated
    peak_before: int
    peak_after: int

    @property
    def bound(self) -> float:
        """The lower bound of the step in seconds."""
        return max(self.before.compute, self.after.communication)


def compare(cluster: Cluster, shape: Shape, layers: int, tokens: int, slack: float = 0.0) -> Comparison:
    """Returns the times of a training step with and without the passes. No process group may exist."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=cluster.ranks)
    try:
        graph, spec = training_graph(shape, layers, tokens), cluster.spec()
        program = fxwrap.lower(graph, options=Options(devices=(spec,), layout="preserve"))
        overlapped = overlap_collectives(bucket_collectives(program, {"cpu": spec}), slack=slack)
        fxwrap.verify(overlapped)
    finally:
        torch.distributed.destroy_process_group()
    peaks = [live_bytes(item, include_inputs=False).peak for item in (program, overlapped)]
    return Comparison(simulate(program, cluster), simulate(overlapped, cluster), *peaks)


def row(comparison: Comparison, ranks: int, tokens: int) -> dict[str, str | int | float | None]:
    """Returns the row of one size; times are in ms."""
    before, after, bound = comparison.before, comparison.after, comparison.bound
    return {
        "ranks": ranks, "tokens": tokens, "collectives before": before.collectives, "after": after.collectives,
        "compute": round(before.compute * 1e3, 1), "communication": round(after.communication * 1e3, 1),
        "step before": round(before.total * 1e3, 1), "step": round(after.total * 1e3, 1),
        "exposed": round((after.total - before.compute) / after.total, 3),
        "/ bound before": round(before.total / bound, 3), "/ bound": round(after.total / bound, 3),
        "peak before, GiB": round(comparison.peak_before / 2**30, 2),
        "peak, GiB": round(comparison.peak_after / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    """Adds a row for each number of ranks and tokens."""
    parser = argparse.ArgumentParser(description="Simulates overlap of communication and computation.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--slack", type=float, default=0.0)
    add_record_option(parser)
    chosen = parser.parse_args()
    report = Report("schedule_simulation", chosen, note="times of a cost model, in ms")
    for tokens in chosen.tokens:
        for ranks in chosen.ranks:
            comparison = compare(Cluster(ranks), Shape(), chosen.layers, tokens, chosen.slack)
            report.add(row(comparison, ranks, tokens))


if __name__ == "__main__":
    main()
