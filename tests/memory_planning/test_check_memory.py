"""Programs run with memory checks: valid plans pass, invalid ones fail, and no line reads stale bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.converters.interpreter import CheckedInterpreter
from fxwrap.errors import MemoryCheckError, PlanningError
from fxwrap.memory_planning import apply_plan, check_plan, plan_from_json, plan_memory, plan_to_json
from fxwrap.options import EMITTERS, Options
from fxwrap.wrapper_ir import Program
from tests.memory_planning.programs import RULES, cache_line, parsed
from tests.support.long_form import sample_size
from tests.support.samples import SAMPLES, Sample
from tests.support.strategies.programs import RandomProgram, random_programs
from tests.support.value_equality import assert_same

CHAIN = parsed(RULES["allocations_of_one_device_share_a_pool"])


def _moved(program: Program, name: str, other: str) -> Program:
    """The program with a plan in which somebody has moved a piece of memory to where another is."""
    content = json.loads(plan_to_json(plan_memory(program, alignment=cache_line)))
    (pool,) = content["blocks"][0]["pools"]
    items = {item["names"][0]: item for item in pool["memory"]}
    items[name]["offset"] = items[other]["offset"]
    plan = plan_from_json(json.dumps(content))
    for refuse in (lambda: check_plan(plan, alignment=cache_line), lambda: apply_plan(program, plan)):
        with pytest.raises(PlanningError, match=f"%{name} at bytes .* overlaps %a at bytes .* live at line"):
            refuse()
    return apply_plan(program, plan, check=False)


def test_overwriting_a_live_slice_raises_and_names_the_line() -> None:
    message = (
        r"line 3 of \^body, `%b = memory.pool_slice\(%pool_1\).* : f32\[16\]@cpu`: %b overlaps %a by 64 bytes, which "
        r"line 4 of \^body uses"
    )
    with pytest.raises(MemoryCheckError, match=message):
        CheckedInterpreter(_moved(CHAIN, "b", "a")).run([torch.randn(16)])


def test_a_correct_plan_passes_and_releases_all_memory() -> None:
    x = torch.randn(16)
    plan = plan_memory(CHAIN, alignment=cache_line)
    expected = fxwrap.run(CHAIN, [x])
    ran = CheckedInterpreter(apply_plan(CHAIN, plan))
    got = ran.run([x])
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert not ran.allocated and set(ran.live_allocations) <= {"x", "more", "y"}


def test_tensors_that_turn_out_to_be_empty_need_no_memory() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        rows = torch.repeat_interleave(x)
        both = torch.stack([rows, rows])
        positive = both > 0
        return positive, both[positive.any(1)], positive.sum()

    graph = make_fx(function, tracing_mode="symbolic")(torch.tensor([1, 2, 0]))
    options = Options(
        emitter="interpreter", check_memory=True, memory_planning="greedy_by_duration", reorder_for_peak_memory=True
    )
    compiled = fxwrap.compile_graph(graph, options=options)
    for counts in ([1, 2, 0], [0, 0, 0]):
        torch.testing.assert_close(compiled(torch.tensor(counts)), function(torch.tensor(counts)))


def test_an_undeclared_alias_is_detected() -> None:
    text = """
program @p(%x: borrowed f32[16]@cpu) {
  %y = extern.call @aten.contiguous.default(%x) : f32[16]@cpu
  control.return(%y)
}
"""
    with pytest.raises(MemoryCheckError, match=r"line 0 of .*: %y is a new root but overlaps the live %x"):
        CheckedInterpreter(parsed(text)).run([torch.randn(16)])


def test_unwritten_memory_is_detected() -> None:
    """Memory that no kernel has written reads as NaN, not as its earlier content."""
    text = """
program @p(%x: borrowed f32[8]@cpu) {
  %a = memory.alloc() : f32[16]@cpu
  %head = memory.view(%a) : f32[8]@cpu
  extern.mutate @aten.copy_.default(%head, %x) writes=(%head)
  %y = extern.call @aten.clone.default(%a) : f32[16]@cpu
  memory.free(%a)
  control.return(%y)
}
"""
    x = torch.randn(8)
    (y,) = CheckedInterpreter(parsed(text)).run([x])
    assert torch.equal(y[:8], x) and y[8:].isnan().all()


@settings(max_examples=sample_size(25), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=random_programs(most_steps=20))
def test_random_programs_pass_the_memory_check(case: RandomProgram) -> None:
    expected = fxwrap.run(case.program, case.inputs(seed=5))
    planned = apply_plan(case.program, plan_memory(case.program, alignment=cache_line))
    for program in (case.program, planned):
        got = CheckedInterpreter(program).run(case.inputs(seed=5))
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)


RUNNABLE = [sample for sample in SAMPLES.values() if sample.cpu_runnable]


@pytest.mark.parametrize("sample", RUNNABLE, ids=lambda sample: sample.name)
def test_samples_pass(sample: Sample) -> None:
    torch.manual_seed(0)
    expected = fxwrap.run(sample.program(), sample.inputs(seed=1))
    torch.manual_seed(0)
    got = CheckedInterpreter(sample.program()).run(sample.inputs(seed=1))
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


class Block(nn.Module):
    """Enough operators for pools in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.second(torch.softmax(self.first(x).cumsum(0), -1)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("emitter", EMITTERS)
def test_training_with_the_option(emitter: str) -> None:
    model, x = Block(), torch.randn(8, 32)
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    options: dict[str, Any] = {"emitter": emitter, "memory_planning": "auto", "check_memory": True}
    torch.compile(model, backend="fxwrap", options=options)(x).square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
