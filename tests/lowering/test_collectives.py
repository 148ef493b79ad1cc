"""Collectives of a graph become lines: other work runs until their wait, and their operands stay until then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch._C._distributed_c10d import _get_work_registry_size
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lines import ExternCall, Free, Launch, PoolSlice, StartCollective, WaitCollective
from fxwrap.options import EMITTERS, Options
from fxwrap.wrapper_ir import Program, live_bytes
from tests.support.jobs import single_rank_job
from tests.support.versions import is_before

C10D = torch.ops._c10d_functional


@pytest.fixture
def group() -> Iterator[str]:
    with single_rank_job() as name:
        yield name


def graph_of(function: Any, *inputs: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def steps(program: Program) -> list[str]:
    steps = []
    for line in program.body.lines:
        match line:
            case StartCollective():
                steps.append(f"start {line.group}")
            case WaitCollective():
                steps.append(f"wait {line.result.name}")
            case Launch():
                steps.append("launch")
            case ExternCall():
                steps.append(line.target.split(".")[1])
            case Free():
                steps.append(f"free {line.root.name}")
    return steps


def overlapping(group: str) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        t = x.exp()
        pending = C10D.all_reduce(t, "sum", group)
        beside = (x @ x).sin()
        ready = C10D.wait_tensor(pending)
        return ready + beside

    return function


def test_operands_live_until_the_wait_and_work_overlaps() -> None:
    x = torch.rand(8, 8)
    program = fxwrap.verify(fxwrap.lower(graph_of(overlapping("0"), x), (x,), options=Options(fuse=False)))
    assert steps(program) == [
        "exp", "start 0", "mm", "sin", "free mm", "wait wait_tensor", "free exp", "add", "free all_reduce",
        "free sin",
    ]  # fmt: skip
    fused = steps(fxwrap.verify(fxwrap.lower(graph_of(overlapping("0"), x), (x,))))
    assert fused.index("start 0") < fused.index("mm") < fused.index("wait wait_tensor") < fused.index("free exp")


def test_an_operand_is_not_overwritten_while_it_is_in_flight() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = x.exp()
        pending = C10D.all_reduce(t, "sum", "0")
        over = (t + 1).sin()  # the last reader of t before the wait; it must not be computed in t
        return C10D.wait_tensor(pending), over

    x = torch.rand(8, 8)
    fxwrap.verify(fxwrap.lower(graph_of(function, x), (x,)))


def twice(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pending = C10D.all_reduce(x.sin(), "sum", group)
    return C10D.wait_tensor(pending) + 1, C10D.wait_tensor(pending)


def never(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (C10D.all_reduce(x.sin(), "sum", group),)


def used_in_flight(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pending = C10D.all_reduce(x.sin(), "sum", group)
    return pending * 2, C10D.wait_tensor(pending)


def partly_awaited(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, _ = C10D.all_reduce_coalesced([x.sin(), x.cos()], "sum", group)
    return (C10D.wait_tensor(first),)


def awaited_together(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = C10D.wait_tensors(C10D.all_reduce_coalesced([x.sin(), x.cos()], "sum", group))
    return first + 1, second


def in_a_branch(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pending = C10D.all_reduce(x.sin(), "sum", group)
    branches = (lambda y: C10D.wait_tensor(y) + 1, lambda y: C10D.wait_tensor(y) - 1)
    return (torch.cond(x.sum() > 0, *branches, (pending,)),)


def of_an_input(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (C10D.wait_tensor(x) * 2,)


def in_place(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin()
    ready = C10D.wait_tensor(C10D.all_reduce_(y, "sum", group))
    return ready + y, y


def coalesced_in_place(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, z = x.sin(), x.cos()
    first, second = C10D.all_reduce_coalesced_([y, z], "sum", group)
    return C10D.wait_tensor(first) + C10D.wait_tensor(second), y, z


def into_a_buffer(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(x)
    ready = C10D.wait_tensor(C10D.all_gather_into_tensor_out(x.sin(), 1, group, out=out))
    return (ready + 1,)


def scattered_into_a_buffer(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(x)
    return (C10D.wait_tensor(C10D.reduce_scatter_tensor_out(x.sin(), "sum", 1, group, out=out)) + 1,)


def scattered(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = C10D.reduce_scatter_tensor_coalesced([x.sin(), x.cos()], "sum", 1, group)
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(x, "sum", 1, group)), C10D.wait_tensor(first) * C10D.wait_tensor(
        second
    )


def gathered(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = C10D.all_gather_into_tensor_coalesced([x.sin(), x.cos()], 1, group)
    return C10D.wait_tensor(first), C10D.wait_tensor(second)


def exchanged(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = x.shape[0]
    return (C10D.wait_tensor(C10D.all_to_all_single(x.sin(), [rows], [rows], group)),)


def transposed(x: torch.Tensor) -> torch.Tensor:
    y = x.t().sin()
    return y.contiguous() if is_before("2.12") else y  # torch's collectives refused other layouts


def broadcast(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (C10D.wait_tensor(C10D.broadcast(transposed(x), 0, group)) + 1,)  # its fake tensor is transposed, it is not


def coalesced_of_transposed(group: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = C10D.all_reduce_coalesced([transposed(x), x.cos()], "sum", group)
    return C10D.wait_tensor(first) + C10D.wait_tensor(second), C10D.wait_tensor(first)


FORMS = (
    twice, never, used_in_flight, partly_awaited, in_a_branch, of_an_input, in_place, coalesced_in_place,
    into_a_buffer, scattered_into_a_buffer, scattered, gathered, exchanged, broadcast, coalesced_of_transposed,
    *([] if is_before("2.15") else [awaited_together]),
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_each_form_of_collectives_is_lines_in_every_emitter(group: str, form: Any, tracing_mode: str) -> None:
    x = torch.rand(4, 4)
    expected = form(group, x.clone())
    graph = make_fx(lambda x: form(group, x), tracing_mode=tracing_mode)(x)
    for emitter in EMITTERS:
        options = Options(emitter=emitter, fuse=False, memory_planning="auto", compile_cache=False)
        compiled = fxwrap.compile_graph(graph, (x,), options=options)
        program = compiled.program
        assert not any(isinstance(line, ExternCall) and "_c10d" in line.target for line in program.lines())
        assert any(isinstance(line, WaitCollective) for line in program.lines())
        assert fxwrap.parse(str(program)) == program
        works = _get_work_registry_size()
        outputs = [compiled(x), fxwrap.run(program, [x])]
        if emitter == "fx":
            outputs.append(fxwrap.run(fxwrap.verify(fxwrap.from_fx(compiled.graph_module)), [x]))
        assert _get_work_registry_size() == works  # torch keeps the tensors of works that nothing waited for
        for output in outputs:
            torch.testing.assert_close(list(output), list(expected), rtol=0, atol=0)


def test_buffers_of_collectives_are_pooled_and_reused_after_the_wait(group: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = C10D.wait_tensor(C10D.all_gather_into_tensor(x @ x, 1, group)).tanh()
        return x

    x = torch.rand(8, 8)
    options = Options(memory_planning="auto", fuse=False, compile_cache=False)
    for variant in (*[{"emitter": emitter} for emitter in EMITTERS], {"check_memory": True}):
        compiled = fxwrap.compile_graph(graph_of(function, x), (x,), options=options.replace(**variant))
        starts = [line for line in compiled.program.lines() if isinstance(line, StartCollective)]
        slices = {line.result.name: line for line in compiled.program.lines() if isinstance(line, PoolSlice)}
        assert len(starts) == 3 and {start.operator for start in starts} == {"fxwrap.all_gather_into_tensors.default"}
        pools = [slices[start.writes[0].name].pool.name for start in starts if start.writes[0].name in slices]
        assert pools
        assert all([item.pool.name for item in slices.values()].count(pool) > 1 for pool in pools)
        torch.testing.assert_close(compiled(x)[0], function(x), rtol=0, atol=0)


def test_buckets_write_slices_of_pools_and_need_less_memory(group: str) -> None:
    """Each layer gathers two tensors and scatters two; pools hold all of them, one layer after the other."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            gathered = C10D.all_gather_into_tensor_coalesced([x @ x, x.sin()], 1, group)
            first, second = [C10D.wait_tensor(item) for item in gathered]
            scattered = C10D.reduce_scatter_tensor_coalesced([first @ second, second.cos()], "sum", 1, group)
            first, second = [C10D.wait_tensor(item) for item in scattered]
            x = (first * second).tanh()
        return x

    x, options = torch.rand(64, 64), Options(memory_planning="auto", fuse=False, compile_cache=False)
    for variant in (*[{"emitter": emitter} for emitter in EMITTERS], {"check_memory": True}):
        compiled = fxwrap.compile_graph(graph_of(function, x), (x,), options=options.replace(**variant))
        program = compiled.program
        slices = {line.result.name for line in program.lines() if isinstance(line, PoolSlice)}
        starts = [line for line in program.lines() if isinstance(line, StartCollective)]
        names = ["fxwrap.all_gather_into_tensors.default", "fxwrap.reduce_scatter_into_tensors.default"]
        assert [start.operator for start in starts] == names * 3
        assert sum([value.name in slices for start in starts for value in start.writes]) >= 10
        torch.testing.assert_close(compiled(x)[0], function(x), rtol=0, atol=0)
        assert fxwrap.parse(str(program)) == program
        unplanned = fxwrap.compile_graph(
            graph_of(function, x), (x,), options=options.replace(memory_planning="none", **variant)
        )
        assert live_bytes(program).peak <= live_bytes(unplanned.program).peak
        if compiled.graph_module is not None:
            again = fxwrap.verify(fxwrap.from_fx(compiled.graph_module))
            torch.testing.assert_close(fxwrap.run(again, [x])[0], function(x), rtol=0, atol=0)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_every_emitter_runs_collectives(group: str, emitter: str) -> None:
    x = torch.rand(8, 8)
    graph = graph_of(overlapping(group), x)
    compiled = fxwrap.compile_graph(graph, (x,), options=Options(emitter=emitter))
    assert sum(isinstance(line, StartCollective) for line in compiled.program.lines()) == 1
    torch.testing.assert_close(compiled(x)[0], x.exp() + (x @ x).sin())
    torch.testing.assert_close(fxwrap.run(compiled.program, [x])[0], x.exp() + (x @ x).sin())


def test_several_results_of_one_collective(group: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = C10D.all_reduce_coalesced([x.sin(), y.cos()], "sum", group)
        beside = x * y
        return C10D.wait_tensor(first) + C10D.wait_tensor(second) + beside

    x, y = torch.rand(8), torch.rand(8)
    compiled = fxwrap.compile_graph(graph_of(function, x, y), (x, y))
    assert sum(isinstance(line, WaitCollective) for line in compiled.program.lines()) == 2
    torch.testing.assert_close(compiled(x, y)[0], x.sin() + y.cos() + x * y)
    again = fxwrap.from_fx(compiled.graph_module)
    assert sum(isinstance(line, WaitCollective) for line in again.lines()) == 2
