"""Golden files of memory planning: a program, its plan, and the program that follows it; one rule each."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxwrap.memory_planning import (
    MemoryOwner,
    apply_plan,
    check_plan,
    plan_from_json,
    plan_memory,
    plan_table,
    plan_to_json,
    program_live_ranges,
)
from fxwrap.wrapper_ir import live_bytes, verify
from tests.memory_planning.programs import RULES, cache_line, one, parsed, with_terms
from tests.support.golden import check_golden, sections

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("rule", RULES)
def test_golden(rule: str, update_golden: bool) -> None:
    program = verify(parsed(RULES[rule]))
    plan = plan_memory(program, alignment=cache_line, algorithm="greedy_by_size")
    planned = verify(apply_plan(program, plan))
    texts = [("input", str(program)), ("plan", plan_table(plan)), ("after plan_memory", str(planned))]
    check_golden(GOLDEN / f"{rule}.txt", sections(texts), update_golden)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_every_golden_file_has_a_rule() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_planned_peaks_match_the_programs(rule: str) -> None:
    """Without alignment, the lower bound is the peak of the program, and the peak that of the planned program."""
    program = parsed(RULES[rule])
    values = {"s0": 5, "u0": 7}
    plan = plan_memory(program, alignment=one, hints=values)
    check_plan(plan, alignment=one, values=values)
    assert plan.body.lower_bound == live_bytes(program, values).peak
    assert plan.body.peak == live_bytes(apply_plan(program, plan), with_terms(plan, values)).peak


def _lifetimes(rule: str) -> dict[str, tuple[tuple[str, ...], MemoryOwner]]:
    return {item.name: (item.names, item.owner) for item in program_live_ranges(parsed(RULES[rule]))}


def test_a_donated_input_and_its_reuse_share_one_live_range() -> None:
    lifetimes = _lifetimes("donated_inputs_and_their_reuse_are_not_pooled")
    assert lifetimes["x"] == (("x", "r"), MemoryOwner.CALLER)
    assert lifetimes["k"] == (("k",), MemoryOwner.CALLER)
    assert lifetimes["a"] == (("a",), MemoryOwner.PROGRAM)


def test_live_ranges_end_at_the_last_view() -> None:
    program = parsed(RULES["views_and_in_place_writes_belong_to_their_root"])
    ranges = {item.name: (item.first, item.end) for item in program_live_ranges(program)}
    assert ranges["a"] == (0, 10) and ranges["b"] == (5, 11) and ranges["x"] == (0, len(program.body.lines))


def test_buffers_in_flight_are_live_until_the_wait() -> None:
    program = parsed(RULES["memory_of_collectives_is_reused_after_the_wait"])
    ranges = {item.name: (item.first, item.end) for item in program_live_ranges(program)}
    assert ranges["a"] == (0, 7) and ranges["sum"] == (2, 10)


def test_slack_reduces_pools_within_its_bound() -> None:
    """Two pools around the tight moment become one that is there throughout."""
    program = parsed(RULES["pools_are_split_around_the_peak"])
    for slack, pools in ((0.0, 2), (0.2, 2), (0.5, 1)):
        plan = plan_memory(program, alignment=cache_line, slack=slack)
        assert len(plan.body.pools) == pools
        assert plan.body.peak <= plan.body.lower_bound * (1 + slack)
        verify(apply_plan(program, plan))
