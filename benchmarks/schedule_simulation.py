"""Simulates training steps on 8 to 4,096 ranks, before and after bucketing and overlap.

The graph is traced with fake process groups of that size, and the passes of a compile bucket and overlap it. It is that
of Llama 70B layers with sharded parameters or, with `--parallelism`, a whole step of a model of `distributed.py`. Both
programs have combo kernels. The cost model is that of `schedule_costs.py`.

    python -m benchmarks.schedule_simulation [--ranks 8 64] [--layers 24] [--tokens 4096 1024] [--slack 0.0] [--record]
    python -m benchmarks.schedule_simulation --parallelism TP FSDP+TP --ranks 4 8 --layers 8 --tokens 4096 --exposed

A step is forward, backward and the update of AdamW. Prints for each size the number of collectives and of launches, the
compute and communication time, the time of the step before and after, its ratio to the lower bound max(compute,
communication), and the peak memory without inputs. `--exposed` also prints the collectives that the step waits for, the
longest waits first, with the lines beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxwrap
from benchmarks.distributed import train_step
from benchmarks.distributed_models import MODELS, PARALLELISMS
from benchmarks.results import Report, add_record_option
from benchmarks.schedule_costs import Cluster, Exposed, Simulated, simulate
from fxwrap.devices import DeviceSpec
from fxwrap.lines import ExternCall, Launch
from fxwrap.options import Options
from fxwrap.passes import fold_views
from fxwrap.passes.bucket_collectives import bucket_collectives
from fxwrap.passes.coalesce_copies import coalesce_program_copies
from fxwrap.passes.combo_kernels import combine_kernels
from fxwrap.passes.overlap_collectives import overlap_collectives
from fxwrap.training.state import create_optimizer_state, find_state
from fxwrap.training.trace import trace_step
from fxwrap.wrapper_ir import LineBase, Program, defined, live_bytes

C10D = torch.ops._c10d_functional
LENGTH = 1024
"""The tokens of a sequence of a model."""


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


def model_graph(name: str, model: argparse.Namespace) -> GraphModule:
    """Returns a whole step of Llama with a form of parallelism as one graph, with the ranks of the current group.

    Nothing is computed, and the memory of parameters is never written.
    """
    parallelism, ranks = PARALLELISMS[name], torch.distributed.get_world_size()
    inner = parallelism.inner
    sizes, names = ((ranks,), ("data",)) if inner == 1 else ((ranks // inner, inner), ("data", "model"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with torch.device("meta"):
        whole: nn.Module = MODELS["llama"](model).to(torch.bfloat16)
    sharded = parallelism.compiled(whole, mesh).to_empty(device="cpu")
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in sharded.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    step = train_step(sharded, torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-3))
    create_optimizer_state(find_state(step))
    tokens = torch.zeros(model.batch, LENGTH, dtype=torch.int64)
    return trace_step(step, find_state(step), (tokens,), Options(), None).graph


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A program before and after the passes: simulated times, launches, and peak memory without inputs in bytes."""

    before: Simulated
    after: Simulated
    launches_before: int
    launches_after: int
    peak_before: int
    peak_after: int

    @property
    def bound(self) -> float:
        """The lower bound of the step in seconds."""
        return max(self.before.compute, self.after.communication)


def compare(cluster: Cluster, trace: Callable[[], GraphModule], slack: float = 0.0) -> Comparison:
    """Returns the times of a step with and without the passes. No process group may exist.

    `trace` is called with a default group of the cluster's ranks, and returns the graph of the step.
    """
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=cluster.ranks)
    try:
        spec = cluster.spec()
        lowered = fxwrap.lower(trace(), options=Options(devices=(spec,), layout="preserve", cpu_kernels="triton"))
        program = fold_views(coalesce_program_copies(lowered))
        overlapped = overlap_collectives(bucket_collectives(program, {"cpu": spec}), slack=slack)
        programs = [_combined(item, spec) for item in (program, overlapped)]
        before, after = [simulate(item, cluster) for item in programs]
    finally:
        torch.distributed.destroy_process_group()
    launches = [sum(isinstance(line, Launch) for line in item.body.lines) for item in programs]
    peaks = [live_bytes(item, include_inputs=False).peak for item in programs]
    return Comparison(before, after, *launches, *peaks)


def _combined(program: Program, spec: DeviceSpec) -> Program:
    return fxwrap.verify(combine_kernels(program, {"cpu": spec}))


def row(comparison: Comparison, ranks: int, tokens: int) -> dict[str, str | int | float | None]:
    """Returns the row of one size; times are in ms."""
    before, after, bound = comparison.before, comparison.after, comparison.bound
    return {
        "ranks": ranks, "tokens": tokens, "collectives before": before.collectives, "after": after.collectives,
        "launches before": comparison.launches_before, "launches": comparison.launches_after,
        "compute": round(before.compute * 1e3, 1), "communication": round(after.communication * 1e3, 1),
        "step before": round(before.total * 1e3, 1), "step": round(after.total * 1e3, 1),
        "exposed": round((after.total - before.compute) / after.total, 3),
        "/ bound before": round(before.total / bound, 3), "/ bound": round(after.total / bound, 3),
        "peak before, GiB": round(comparison.peak_before / 2**30, 2),
        "peak, GiB": round(comparison.peak_after / 2**30, 2),
    }  # fmt: skip


def exposed_text(item: Exposed) -> str:
    """Returns a line of text about a wait, with the lines beside its collective."""
    results = ", ".join([value.name for value in defined(item.start)])
    beside = ", ".join([_line_name(line) for line in item.beside]) or "nothing"
    operator = item.start.operator.removeprefix("_c10d_functional.").removesuffix(".default")
    return f"  {item.waited * 1e6:.0f} of {item.seconds * 1e6:.0f} us: {operator} -> {results}, beside {beside}"


def _line_name(line: LineBase) -> str:
    if isinstance(line, Launch):
        return line.kernel
    return line.target if isinstance(line, ExternCall) else type(line).__name__


def main() -> None:
    """Adds a row for each form of parallelism, number of ranks and tokens."""
    parser = argparse.ArgumentParser(description="Simulates overlap of communication and computation.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024], help="of each rank's batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--slack", type=float, default=0.0)
    parser.add_argument("--parallelism", choices=PARALLELISMS, nargs="+", help="of Llama with layers of the 8B shape")
    parser.add_argument("--exposed", action="store_true", help="print the waits that take time")
    add_record_option(parser)
    chosen = parser.parse_args()
    report = Report("schedule_simulation", chosen, note="times of a cost model, in ms")
    for name in chosen.parallelism or [None]:
        for tokens in chosen.tokens:
            trace = partial(training_graph, Shape(), chosen.layers, tokens)
            if name is not None:
                model = argparse.Namespace(
                    layers=chosen.layers, width=4096, hidden=14336, heads=32, key_heads=8, vocabulary=32000,
                    batch=tokens // LENGTH,
                )  # fmt: skip
                trace = partial(model_graph, name, model)
            for ranks in chosen.ranks:
                comparison = compare(Cluster(ranks), trace, chosen.slack)
                parallelism = {} if name is None else {"parallelism": name}
                report.add({**parallelism, **row(comparison, ranks, tokens)})
                waits = sorted(comparison.after.exposed, key=lambda item: -item.waited) if chosen.exposed else []
                print("\n".join(map(exposed_text, waits)), end="\n" if waits else "", flush=True)


if __name__ == "__main__":
    main()
