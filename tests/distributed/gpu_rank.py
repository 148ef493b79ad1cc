"""One rank on a GPU: fused and captured communication; prints each result as a line of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.fused_communication import CommunicationFusion, enable_symmetric_memory
from fxwrap.options import EMITTERS, Options
from tests.distributed.captured_collectives import check_captured_collectives, counted_replays
from tests.distributed.overlap_rank import check_pooled_buckets
from tests.distributed.processes import run_checks
from tests.fused_communication.rank import check_training

C10D = torch.ops._c10d_functional


def sequence_parallel(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """A block whose rows each rank has a part of."""
    size, group = dist.get_world_size(), dist.group.WORLD.group_name
    hidden = C10D.wait_tensor(C10D.all_gather_into_tensor(x, size, group)) @ up
    return hidden, C10D.wait_tensor(C10D.reduce_scatter_tensor(hidden.relu() @ down, "sum", size, group))


def check_fused_communication() -> None:
    """torch's operators over symmetric memory return what collectives and matmuls do."""
    enable_symmetric_memory(dist.group.WORLD.group_name)
    generator = torch.Generator("cuda").manual_seed(0)
    up, down = (torch.randn(sizes, generator=generator).bfloat16() / 32 for sizes in ((1024, 2048), (2048, 1024)))
    inputs = [torch.randn(256, 1024).bfloat16(), up, down]
    graph = make_fx(sequence_parallel, tracing_mode="fake")(*inputs)
    fusion = CommunicationFusion()
    assert len(fusion.fuse(graph).fused) == 2, fusion.fuse(graph).report()
    expected = [item.float() for item in sequence_parallel(*inputs)]
    for emitter in EMITTERS:
        options = Options(emitter=emitter, compile_cache=False, passes=[fusion])
        outputs = fxwrap.compile_graph(graph, inputs, options=options)(*inputs)
        for have, wanted in zip(outputs, expected, strict=True):
            error = (have.float() - wanted).norm() / wanted.norm()
            assert error < 1e-2, (emitter, error)


def reduced_twice(x: Tensor, weight: Tensor) -> Tensor:
    """Two small all_reduces with a matmul between them, as tensor-parallel decoding has them."""
    group = dist.group.WORLD.group_name
    y = C10D.wait_tensor(C10D.all_reduce(x * 2, "sum", group))
    result: Tensor = C10D.wait_tensor(C10D.all_reduce((y @ weight).relu(), "sum", group)) + y
    return result


def check_one_shot_all_reduce() -> None:
    """Small all_reduces over symmetric memory return the sums, in every emitter and in replayed CUDA graphs."""
    enable_symmetric_memory(dist.group.WORLD.group_name)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    weight = (torch.randn(512, 512, generator=generator) / 32).bfloat16()
    graph = make_fx(reduced_twice, tracing_mode="fake")(torch.randn(2, 512).bfloat16(), weight)
    for emitter in EMITTERS:
        for cuda_graphs in (False, True) if emitter in ("python", "cpp") else (False,):
            options = Options(
                emitter=emitter, compile_cache=False, passes=[CommunicationFusion()], cuda_graphs=cuda_graphs
            )
            example = torch.randn(2, 512, generator=generator).bfloat16()
            compiled = fxwrap.compile_graph(graph, [example, weight], options=options)
            assert str(compiled.program).count("one_shot_all_reduce") == 2, compiled.program
            for _ in range(5):
                x = torch.randn(2, 512, generator=generator).bfloat16()
                (have,), wanted = compiled(x, weight), reduced_twice(x, weight).float()
                error = (have.float() - wanted).norm() / wanted.norm()
                assert error < 1e-2, (emitter, cuda_graphs, error)


def check_cuda_graphs() -> None:
    """CUDA graphs contain NCCL's collectives."""
    with counted_replays() as counter:
        check_captured_collectives(counter)


CHECKS: Mapping[str, Callable[[], None]] = {
    "captured_collectives": check_cuda_graphs,
    "pooled_buckets": lambda: check_pooled_buckets(torch.device("cuda", torch.cuda.current_device())),
    "fused_communication": check_fused_communication,
    "one_shot_all_reduce": check_one_shot_all_reduce,
    "fused_training": lambda: check_training(torch.device("cuda", torch.cuda.current_device())),
}


def main(arguments: Sequence[str]) -> None:
    """Runs checks: `gpu_rank.py RANK STORE WORLD_SIZE CHECKS...`."""
    rank, world = int(arguments[0]), int(arguments[2])
    torch.cuda.set_device(rank)
    torch.set_default_device(torch.device("cuda", rank))
    checks = {name: CHECKS[name] for name in arguments[3:]}
    run_checks(arguments, checks, world, backend="nccl", timeout_s=300)


if __name__ == "__main__":
    main(sys.argv[1:])
