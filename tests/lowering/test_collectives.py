"""Collectives of a graph become lines: other work runs until their wait, and their operands stay until then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # the rules for fake tensors of its operators
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.lines import ExternCall, Free, Launch, StartCollective, WaitCollective
from fxwrap.options import EMITTERS, Options
from fxwrap.wrapper_ir import Program

C10D = torch.ops._c10d_functional


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    """A process group of this process alone; its name."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD.group_name
    torch.distributed.destroy_process_group()


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


def test_collectives_without_one_wait_are_extern_calls() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pending = C10D.all_reduce(x, "sum", "0")
        return C10D.wait_tensor(pending), C10D.wait_tensor(pending)

    def never(x: torch.Tensor) -> torch.Tensor:
        return C10D.all_reduce(x, "sum", "0")

    x = torch.rand(8)
    for function in (twice, never):
        program = fxwrap.verify(fxwrap.lower(graph_of(function, x), (x,)))
        assert not any(isinstance(line, StartCollective | WaitCollective) for line in program.lines())


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
