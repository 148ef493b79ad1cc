"""What cannot be planned or does not fit: clear errors, and nothing corrupted; and nothing leaks where a call fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap.compile import CompileResult, emit
from fxwrap.errors import OptionError, PlanningError
from fxwrap.lines import Alloc, Free, Pool, Return
from fxwrap.memory_planning import apply_plan, check_plan, plan_from_json, plan_memory, plan_to_json
from fxwrap.options import EMITTERS
from fxwrap.torch_compat import allocation_trace, quiet_profiler
from fxwrap.wrapper_ir import Block, Program, TensorType, Value
from tests.memory_planning.programs import RULES, cache_line, parsed
from tests.support.long_form import sample_size

CHAIN = parsed(RULES["allocations_of_one_device_share_a_pool"])
STACKED = parsed(RULES["sizes_without_a_common_factor_are_stacked"])


def _allocating(*sizes: Any) -> Program:
    value = Value("a", TensorType.contiguous(torch.float32, sizes, torch.device("cpu")))
    return Program("p", (), Block((), (Alloc(value), Free(value), Return(()))))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((-3, 4), "%a has -48 bytes, which is no valid size"), ((2**40, 2**40), "%a has .* which is no valid size")],
)
def test_oversized_allocations(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        plan_memory(_allocating(*sizes), alignment=cache_line)


@pytest.mark.parametrize("rows", [-1, 2**60])
def test_oversized_symbolic_allocations(rows: int) -> None:
    with pytest.raises(PlanningError, match=r"%\w+ has \d+\*s0 = -?\d+ bytes, which is no valid size"):
        plan_memory(STACKED, alignment=cache_line, hints={"s0": rows})


def test_an_estimated_size_is_not_an_error() -> None:
    text = "program @p(%x: borrowed f32[8]@cpu) {\n" + "".join(
        f"  u{number} = symbol.item(%n{number}) range=(0, 100)\n" for number in range(6)
    )
    text = text.replace("%x: borrowed f32[8]@cpu", ", ".join(f"%n{number}: borrowed i64[]@cpu" for number in range(6)))
    text += "  %a = memory.alloc() : f32[u0, u1, u2, u3, u4, u5]@cpu\n  memory.free(%a)\n  control.return()\n}\n"
    assert plan_memory(parsed(text), alignment=cache_line).body.pools == ()


@pytest.mark.parametrize("alignment", [0, -64, 48])
def test_an_alignment_is_a_power_of_two(alignment: int) -> None:
    with pytest.raises(PlanningError, match=f"the alignment on cpu is {alignment}; it must be a power of two"):
        plan_memory(CHAIN, alignment=lambda device: alignment)


@pytest.mark.parametrize("slack", [-0.1, 2, True, "much"])
def test_slack_is_a_fraction_of_the_peak(slack: Any) -> None:
    with pytest.raises(OptionError, match=r"option 'memory_slack' (takes|is) a number"):
        fxwrap.Options(memory_slack=slack)
    with pytest.raises(OptionError, match=r"option 'overlap_memory_slack' (takes|is) a number"):
        fxwrap.Options(overlap_memory_slack=slack)
    if slack == -0.1:
        with pytest.raises(PlanningError, match=r"slack must be a fraction of the peak, 0 or more, not -0\.1"):
            plan_memory(CHAIN, alignment=cache_line, slack=slack)


def _edited(change: Callable[[dict[str, Any]], None]) -> str:
    content = json.loads(plan_to_json(plan_memory(CHAIN, alignment=cache_line, algorithm="greedy_by_size")))
    change(content["blocks"][0]["pools"][0])
    return json.dumps(content)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "overlap": (lambda pool: [item.update(offset=0) for item in pool["memory"]], "%b at bytes 0 to 64 .* overlaps %a"),
    "outside": (lambda pool: pool["memory"][0].update(offset=4096), "bytes 4096 to 4160 .* exceeds the pool's 128"),
    "negative": (lambda pool: pool["memory"][0].update(offset=-64), "bytes -64 to 0 .* exceeds the pool's 128"),
    "unaligned": (lambda pool: pool.update(size=512) or pool["memory"][0].update(offset=130), "not aligned to 64"),
    "short_lived": (lambda pool: pool.update(lines=[0, 3]), "is live in lines .*, beyond the live range of the pool"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan_is_checked(name: str) -> None:
    change, message = EDITS[name]
    with pytest.raises(PlanningError, match=message):
        check_plan(plan_from_json(_edited(change)), alignment=cache_line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid memory plan: JSONDecodeError"),
        ("[]", "invalid memory plan: TypeError"),
        ('{"format": 7, "blocks": []}', "the plan has format 7; this version reads 1"),
        (_edited(lambda pool: pool.pop("lines")), "invalid memory plan: KeyError: 'lines'"),
        (_edited(lambda pool: pool.update(size="s0 +")), "invalid memory plan: ParseError"),
        (_edited(lambda pool: pool.update(size=1.5)), "a size must be a number or an expression, not 1.5"),
        (_edited(lambda pool: pool.update(device="moon")), "invalid memory plan: RuntimeError"),
    ],
)
def test_invalid_plan_json(text: str, message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        plan_from_json(text)


def test_a_plan_for_another_program_is_rejected() -> None:
    plan = plan_memory(CHAIN, alignment=cache_line)
    with pytest.raises(PlanningError, match=r"belongs to another program: .* line \d+ of \^body does not allocate"):
        apply_plan(STACKED, plan)


def test_an_unknown_planner_is_rejected() -> None:
    with pytest.raises(OptionError, match="option 'memory_planning' takes 'default', 'none', 'reuse', 'auto'"):
        fxwrap.Options(memory_planning="best")


# --- no memory left -------------------------------------------------------------------------------------------------


def _chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.softmax(x @ w, -1).cumsum(0) + x
    return x.sum() * torch.ones(4096)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_out_of_memory_error_names_bytes_and_line(emitter: str) -> None:
    """A pool larger than any machine's memory simulates a full device."""
    options = fxwrap.Options(emitter=emitter, memory_planning="auto")
    graph = make_fx(_chain)(torch.randn(64, 64), torch.randn(64, 64))
    compiled = fxwrap.compile_graph(graph, [torch.randn(64, 64)] * 2, options=options)
    pools = [line for line in compiled.program.body.lines if isinstance(line, Pool)]
    assert pools and compiled.plan is not None
    huge = compiled.program.replace(body=Block((), tuple([_enlarged(line) for line in compiled.program.body.lines])))
    stages = (*compiled.stages[:-1], fxwrap.Stage("plan_memory", huge))
    failing = fxwrap.Compiled(CompileResult(stages, options, emit(huge, emitter), plan=compiled.plan))
    message = (
        rf"(?s)memory.*@program needs {compiled.plan.body.peak:,} bytes at its peak, line \d+: `.*`, including pools"
    )
    with pytest.raises(RuntimeError, match=message):
        failing(torch.randn(64, 64), torch.randn(64, 64))


def _enlarged(line: Any) -> Any:
    if not isinstance(line, Pool):
        return line
    type_ = line.result.tensor_type
    return Pool(Value(line.result.name, TensorType(torch.uint8, (2**55,), (1,), type_.device)))


# --- nothing leaks --------------------------------------------------------------------------------------------------


def _live_after(run: Callable[[], None], calls: int) -> int:
    """Returns the bytes that are allocated and not freed after some calls, by the allocator's own reports."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with quiet_profiler(), torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        for _ in range(calls):
            run()
    record = list(allocation_trace(profile))
    assert len(record) >= 2 * calls  # memory was allocated and freed in each call
    return sum(record)


@pytest.mark.parametrize(
    ("emitter", "planning"), [("python", "reuse"), ("interpreter", "reuse"), ("cpp", "auto"), ("fx", "auto")]
)
def test_a_failing_call_leaks_nothing(emitter: str, planning: str) -> None:
    """An index out of range fails in the kernel of the gather, after other kernels and calls have run."""

    def function(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
        y = torch.softmax(x @ w, -1).cumsum(0) + x
        return (y.sort(0)[0][index] @ w).cumsum(0) @ w

    inputs = (torch.randn(16, 16), torch.randn(16, 16), torch.tensor([1, 3]))
    options = fxwrap.Options(emitter=emitter, memory_planning=planning)
    compiled = fxwrap.compile_graph(make_fx(function)(*inputs), list(inputs), options=options)
    torch.testing.assert_close(compiled(*inputs), (function(*inputs),))
    wrong = (*inputs[:2], torch.tensor([1, 99]))

    def fail() -> None:
        with pytest.raises(IndexError):
            compiled(*wrong)

    fail()
    assert _live_after(fail, sample_size(1000, part=5)) == 0
