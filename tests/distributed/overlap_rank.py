"""One rank: programs with bucketed and overlapped collectives beside the same programs without, bit for bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import emit
from fxwrap.compile.backend import make_backend
from fxwrap.errors import RankError
from fxwrap.fused_communication import CommunicationFusion
from fxwrap.lines import ExternCall, PoolSlice, StartCollective
from fxwrap.options import EMITTERS, Options
from fxwrap.wrapper_ir import Program
from tests.distributed.cases import WORLD_SIZE, Mlp, init_mesh, simple_fsdp
from tests.distributed.processes import run_checks
from tests.distributed.random_programs import RandomProgram
from tests.runtime.cuda_graphs.cpu_graph_capturer import cpu_with_graph_capture
from tests.support.gloo import worker_count
from tests.support.long_form import LONG, sample_size
from tests.support.symmetric_memory import operators_on_cpu, supported

C10D = torch.ops._c10d_functional

PLAIN = Options(bucket_collectives=False, overlap_collectives=False, compile_cache=False, fuse=False)
OVERLAPPED = Options(compile_cache=False, fuse=False)


class SameBits:
    """A compiled graph that each call runs with and without buckets and overlap, and compares bit for bit."""

    programs: ClassVar[list[list[Program]]] = []
    """The programs of each graph: without them, with them, and of `others`."""
    others: ClassVar[Mapping[str, Any]] = {}
    """Other options of one more program of each graph, if any."""

    def __init__(self, graph: Any, inputs: Any, *, options: Options, **arguments: Any) -> None:
        variants = [PLAIN, options, *([options.replace(**self.others)] if self.others else [])]
        self.compiled = [fxwrap.compile_graph(graph, inputs, options=item, **arguments) for item in variants]
        self.program = self.compiled[1].program
        self.programs.append([item.program for item in self.compiled])

    def boxed(self, inputs: list[Any]) -> Any:
        copies = [[item.clone() if isinstance(item, Tensor) else item for item in inputs] for _ in self.compiled]
        expected = self.compiled[0].boxed(copies[0])
        outputs = self.compiled[1].boxed(inputs)
        for actual in (outputs, *[item.boxed(copied) for item, copied in zip(self.compiled[2:], copies[2:])]):
            for one, other in zip(actual, expected, strict=True):
                assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
        return outputs


class SameBitsInPools(SameBits):
    """Also with memory pools."""

    others: ClassVar[Mapping[str, Any]] = {"memory_planning": "auto"}


def starts(program: Program) -> int:
    """Returns the number of collectives of a program."""
    return sum(isinstance(line, StartCollective) for line in program.lines())


def check_buckets(blocks: int) -> None:
    """Of so many sharded blocks in training, whose programs are those of `SameBits`: 5 times fewer collectives."""
    assert [starts(before) for before, *_ in SameBits.programs] == [6 * blocks, 6 * blocks]
    for _, *after in SameBits.programs:
        assert all(1 <= starts(program) <= 6 * blocks // 5 for program in after), [*map(starts, after)]


def check_fsdp(rank: int) -> None:
    """A model of many blocks; `check_captures` has one of few."""
    blocks = 12
    model = simple_fsdp(nn.Sequential(*[Mlp() for _ in range(blocks)]), init_mesh())
    SameBits.programs.clear()
    compiled = torch.compile(model, backend=make_backend(OVERLAPPED, SameBitsInPools), fullgraph=True)
    compiled(torch.randn(2, 4, 8) + rank).square().mean().backward()
    check_buckets(blocks)


def reduced(reduction: str, *sizes: int) -> GraphModule:
    """Returns a graph that reduces one tensor of each size."""

    def function(*tensors: Tensor) -> list[Tensor]:
        return [C10D.wait_tensor(C10D.all_reduce(item.sin(), reduction, "0")) for item in tensors]

    return make_fx(function, tracing_mode="fake")(*[torch.rand(size) for size in sizes])


def check_agreement(rank: int) -> None:
    """Ranks whose programs differ get an error instead of waiting for each other; also with cached programs."""
    os.environ["FXWRAP_COMPILE_CACHE"] = "1"
    for number, name in enumerate(("operator", "sizes", "count", "cached")):
        reduction, sizes = "sum", [8 + number, 4]
        if rank == 1:
            match name:
                case "operator" | "cached":
                    reduction = "max"
                case "sizes":
                    sizes[1] = 5
                case _:
                    sizes.append(3)
        options = Options(emitter=EMITTERS[number], bucket_collectives=False, compile_cache=name == "cached")
        graph, inputs = reduced(reduction, *sizes), [torch.rand(size) for size in sizes]
        compiled = fxwrap.compile_graph(graph, inputs, options=options)
        if name == "cached":
            compiled = fxwrap.compile_graph(graph, inputs, options=options)
            assert compiled.cached
        try:
            compiled(*inputs)
        except RankError as error:
            line = {"operator": 1, "sizes": 2, "count": 3, "cached": 1}[name]
            assert f"number {line} is " in str(error) and "on rank 0 and " in str(error), str(error)
        else:
            raise AssertionError(f"{name}: the ranks agree")
        torch.distributed.barrier()


def check_compiled_alone(rank: int) -> None:
    """One rank may compile a program again, without the other."""
    graph, inputs = reduced("min", 6, 4), [torch.rand(6), torch.rand(4)]
    compiled = fxwrap.compile_graph(graph, inputs, options=PLAIN)
    expected = compiled(*inputs)
    if rank == 1:
        compiled = fxwrap.compile_graph(graph, inputs, options=PLAIN.replace(emitter="cpp", verify=False))
    for one, other in zip(compiled(*inputs), expected, strict=True):
        assert torch.equal(one, other)


def exchanged(rank: int, x: Tensor) -> tuple[Tensor, ...]:
    """Sends and receives one by one, and works in between; waits for the received tensor through its buffer."""
    sent, received = x * 2, torch.empty_like(x)
    start = C10D.isend(sent, 1 - rank, 0, "0")
    C10D.irecv(received, 1 - rank, 0, "0")
    beside = (sent + 1).sin()  # the last reader of the tensor that is sent
    C10D.wait_tensor(received)
    C10D.wait_tensor(start)
    return beside, received + 1


def batch(rank: int, x: Tensor) -> tuple[Tensor, ...]:
    """Two messages each way, received in another order than they are awaited; one twice."""
    sent, received = [x * 2, x - 1], [torch.empty_like(x), torch.empty_like(x)]
    operations = ["isend", "irecv", "isend", "irecv"]
    tensors = [sent[0], received[0], sent[1], received[1]]
    results = C10D.batch_p2p_ops(operations, [1 - rank] * 4, [0, 0, 1, 1], tensors, "0")
    beside = C10D.wait_tensor(C10D.all_reduce(x, "sum", "0"))
    ready = [C10D.wait_tensor(results[index]) for index in (3, 0, 1, 2, 1)]
    return beside * ready[0] + ready[2], ready[4].cos()


def without_waits(rank: int, x: Tensor) -> tuple[Tensor, ...]:
    """The graph waits for nothing and overwrites both buffers."""
    sent, received = x * 2, torch.empty_like(x)
    C10D.batch_p2p_ops(["isend", "irecv"], [1 - rank] * 2, [0, 0], [sent, received], "0")
    beside = x.exp()
    sent.add_(1)
    received.mul_(3)
    return beside, sent, received


def in_a_branch(rank: int, x: Tensor) -> tuple[Tensor, ...]:
    """A block waits for a message that was started outside of it."""
    received = torch.empty_like(x)
    _, pending = C10D.batch_p2p_ops(["isend", "irecv"], [1 - rank] * 2, [0, 0], [x * 2, received], "0")
    branches = (lambda y: C10D.wait_tensor(y) + 1, lambda y: C10D.wait_tensor(y) - 1)
    return (torch.cond(x.sum() > 0, *branches, (pending,)),)


def check_point_to_point(rank: int) -> None:
    """Messages between two ranks are lines in every emitter, with pools, as the functions state them.

    torch 2.11 has no operators for them.
    """
    if not hasattr(C10D, "isend"):
        return
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(rank))
    other = torch.rand(4, 4, generator=torch.Generator().manual_seed(1 - rank))
    expected: Mapping[Any, Sequence[Tensor]] = {
        exchanged: ((x * 2 + 1).sin(), other * 2 + 1),
        batch: ((x + other) * (other - 1) + other * 2, (other * 2).cos()),
        without_waits: (x.exp(), x * 2 + 1, other * 2 * 3),
        in_a_branch: (other * 2 + 1,),
    }
    for function, wanted in expected.items():
        graph = make_fx(lambda x: function(rank, x), tracing_mode="fake")(x)  # noqa: B023
        for fuse, planning in ((False, "auto"), (True, "reuse")):
            options = Options(emitter="fx", fuse=fuse, memory_planning=planning, compile_cache=False)
            compiled = fxwrap.compile_graph(graph, (x,), options=options)
            program, fakes = compiled.program, compiled.fake_inputs
            assert not any(isinstance(line, ExternCall) and "_c10d" in line.target for line in program.lines())
            assert fxwrap.parse(str(program)) == program
            outputs = [compiled(x), fxwrap.run(fxwrap.verify(fxwrap.from_fx(compiled.graph_module)), [x])]
            outputs += [emit(program, name, fakes).boxed([x]) for name in EMITTERS if name != "fx"]
            for output in outputs:
                torch.testing.assert_close(list(output), list(wanted), msg=lambda text: f"{function}: {text}")  # noqa: B023


def sequence_parallel(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """A block whose rows each rank has a part of; the sequence is the second dimension."""
    whole = C10D.wait_tensor(C10D.all_gather_into_tensor(x, WORLD_SIZE, "0"))
    hidden = torch.cat(whole.split(x.shape[0]), 1) @ up
    parts = torch.cat((hidden.relu() @ down).split(x.shape[1], 1))
    summed = C10D.wait_tensor(C10D.reduce_scatter_tensor(parts, "sum", WORLD_SIZE, "0"))
    first = C10D.wait_tensor(C10D.all_gather_into_tensor(summed.flatten(0, 1), WORLD_SIZE, "0")) @ up
    return summed, C10D.wait_tensor(C10D.reduce_scatter_tensor(first @ down, "avg", WORLD_SIZE, "0"))


def check_fused_communication(rank: int) -> None:
    """Fused operators return what collectives and matmuls do, in every emitter."""
    shared = torch.Generator().manual_seed(0)
    up, down = torch.rand(8, 6, generator=shared), torch.rand(6, 8, generator=shared)
    inputs = [torch.rand(3, 4, 8) + rank, up, down]
    graph = make_fx(sequence_parallel, tracing_mode="fake")(*inputs)
    expected = sequence_parallel(*inputs)
    fusion = CommunicationFusion(decline=supported)
    assert len(fusion.fuse(graph).fused) == 4
    with operators_on_cpu():
        options = Options(compile_cache=False, passes=[fusion])
        compiled = fxwrap.compile_graph(graph, inputs, options=options)
        assert starts(compiled.program) == 0
        for emitter in EMITTERS:
            outputs = emit(compiled.program, emitter, compiled.fake_inputs).boxed([*inputs])
            torch.testing.assert_close(list(outputs), list(expected))


def sharded(weights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Two layers that gather their weights, and scatter what would be gradients of them."""
    size, group = torch.distributed.get_world_size(), torch.distributed.group.WORLD.group_name
    scattered = []
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        gathered = [C10D.wait_tensor(C10D.all_gather_into_tensor(item, size, group)) for item in (first, second)]
        x = (x @ gathered[0]).relu() @ gathered[1].t()
        pending = C10D.reduce_scatter_tensor_coalesced([x.t() @ x, x.t().contiguous() * 2], "sum", size, group)
        scattered += [C10D.wait_tensor(item) for item in pending]
    return x, *[item + 1 for item in scattered]


def check_pooled_buckets(device: torch.device) -> None:
    """Buckets write slices of pools, also several at a time, in every emitter; results have the same bits."""
    generator = torch.Generator(device).manual_seed(torch.distributed.get_rank())
    size = 8 // torch.distributed.get_world_size()
    weights = [torch.randn(size, 6, generator=generator, device=device) for _ in range(4)]
    x = torch.randn(16, 8, generator=generator, device=device)
    graph = make_fx(lambda *inputs: sharded(inputs[:-1], inputs[-1]), tracing_mode="fake")(*weights, x)
    expected = fxwrap.compile_graph(graph, (*weights, x), options=PLAIN)(*weights, x)
    compiled = fxwrap.compile_graph(graph, (*weights, x), options=OVERLAPPED.replace(memory_planning="auto"))
    program = compiled.program
    slices = {line.result.name for line in program.lines() if isinstance(line, PoolSlice)}
    collectives = [line for line in program.lines() if isinstance(line, StartCollective)]
    operators = [line.operator for line in collectives]
    assert "fxwrap.all_gather_into_tensors.default" in operators, program
    assert "fxwrap.reduce_scatter_into_tensors.default" in operators, program
    assert slices.intersection([value.name for line in collectives for value in line.writes]), program
    for emitter in EMITTERS:
        emitted = emit(program, emitter, compiled.fake_inputs)
        for _ in range(3):
            for one, other in zip(emitted.boxed([*weights, x]), expected, strict=True):
                assert torch.equal(one, other), emitter


def check_waits_in_a_pool(rank: int) -> None:
    """A wait for one slice of a pool waits for no other collective in the pool, which rank 1 starts only after it."""
    groups = [torch.distributed.new_group() for _ in range(2)]
    x, pool = torch.arange(4.0) + rank, torch.zeros(64, dtype=torch.uint8)
    outs = [pool[offset : offset + 32].view(torch.float32) for offset in (0, 32)]

    def start(number: int) -> Tensor:
        name = groups[number].group_name
        (result,) = torch.ops.fxwrap.all_gather_into_tensors([x], WORLD_SIZE, name, [outs[number]])
        return result

    pending = [start(number) for number in range(2 - rank)]
    C10D.wait_tensor(pending[0])
    torch.distributed.barrier()
    if rank == 1:
        pending.append(start(1))
    C10D.wait_tensor(pending[1])
    for out in outs:
        assert torch.equal(out, torch.cat([torch.arange(4.0), torch.arange(4.0) + 1]))


def check_captures(rank: int) -> None:
    """Captured functions contain collectives, here those of Gloo with a capturer for the CPU, and in buckets."""
    from tests.distributed.captured_collectives import BLOCKS, check_captured_collectives  # it imports this module

    with cpu_with_graph_capture() as capturer:
        check_captured_collectives(capturer)
    check_buckets(BLOCKS)  # of the last model, which is sharded


def check_one_worker(rank: int) -> None:
    """Each Gloo group has one worker: two of them corrupt the heap (`tests/support/gloo.py`)."""
    before = worker_count()
    groups = [torch.distributed.new_group() for _ in range(2)]
    for group in groups:
        torch.distributed.barrier(group)
    assert worker_count() - before == len(groups), (before, worker_count())


SENT_FROM_A_POOL = 1012
"""A seed whose program sends from a pool in which another collective is in flight: Gloo waited for ever."""


def check_random(rank: int, count: int, first: int = 0) -> None:
    """Random programs with buckets and overlap return the bits of the program without."""
    groups = ("0", torch.distributed.new_group().group_name)
    changed = 0
    for seed in (*range(first, first + count), SENT_FROM_A_POOL):
        random_program = RandomProgram(seed, groups)
        options, inputs, graph = random_program.options(), random_program.inputs(rank), random_program.graph()
        plain = options.replace(bucket_collectives=False, overlap_collectives=False)
        programs = [fxwrap.compile_graph(graph, inputs, options=item) for item in (plain, options)]
        changed += str(programs[0].program) != str(programs[1].program)
        expected, outputs = [compiled(*inputs) for compiled in programs]
        for one, other in zip(outputs, expected, strict=True):
            assert torch.equal(one, other), f"seed {seed}: {one} {other}"
    assert changed * 2 >= count, changed


CHECKS: Mapping[str, Callable[[int], None]] = {
    **({"fsdp": check_fsdp} if LONG else {}),
    "agreement": check_agreement,
    "compiled_alone": check_compiled_alone,
    "point_to_point": check_point_to_point,
    "fused_communication": check_fused_communication,
    "pooled_buckets": lambda rank: check_pooled_buckets(torch.device("cpu")),
    "waits_in_a_pool": check_waits_in_a_pool,
    "captures": check_captures,
    "one_worker": check_one_worker,
    "random": lambda rank: check_random(rank, sample_size(30)),
}


def main(arguments: Sequence[str]) -> None:
    """Runs the checks: `overlap_rank.py RANK STORE`; with `COUNT FIRST` random programs from a seed on only."""
    rank, checks = int(arguments[0]), CHECKS
    if len(arguments) > 2:
        count, first = map(int, arguments[2:])
        checks = {"random": lambda rank: check_random(rank, count, first)}
    run_checks(arguments, {name: partial(check, rank) for name, check in checks.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
