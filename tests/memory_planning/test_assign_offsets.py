"""Offsets for buffers: never an overlap, never below the bound, and MiniMalloc's problems within their capacity."""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.packings import KINDS, packed_problem
from fxwrap.errors import OptionError, PlanningError
from fxwrap.memory_planning import Assignment, assign_offsets
from fxwrap.memory_planning.assignment import ALGORITHMS, HEURISTICS
from fxwrap.memory_planning.blocks import APPROXIMATE, EXACT, Blocks
from fxwrap.memory_planning.explore import SearchLimits, SearchStatus
from fxwrap.memory_planning.greedy import greedy_by_duration, greedy_by_size, max_live_bytes, peak_of, squeaky_wheel
from fxwrap.memory_planning.native_search import native_search
from fxwrap.memory_planning.placement import Placement, Subproblem, in_sections
from fxwrap.memory_planning.search import search
from fxwrap.memory_planning.sweep import SweepOptions

DATA = Path(__file__).resolve().parent.parent / "data" / "minimalloc"
CAPACITY = 1048576

Buffer = tuple[int, int, int]


def live_range(first: int, length: int, size: int) -> Buffer:
    return first, first + length, size


BUFFER = st.builds(live_range, st.integers(-20, 20), st.integers(1, 12), st.integers(0, 200))
BUFFERS = st.lists(BUFFER, max_size=30)
FEW_BUFFERS = st.lists(st.builds(live_range, st.integers(0, 5), st.integers(1, 3), st.integers(1, 4)), max_size=5)


def read_problem(name: str) -> list[Buffer]:
    with (DATA / f"{name}.{CAPACITY}.csv").open(newline="") as file:
        return [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


def overlaps(buffers: list[Buffer], offsets: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs of buffers that share both an instant and a byte."""
    overlaps = []
    for one, (first, last, size) in enumerate(buffers):
        for other in range(one):
            other_first, other_last, other_size = buffers[other]
            alive = first < other_last and other_first < last
            if alive and offsets[one] < offsets[other] + other_size and offsets[other] < offsets[one] + size:
                overlaps.append((other, one))
    return overlaps


def assert_valid(buffers: list[Buffer], result: Assignment, alignment: int = 1) -> None:
    aligned = [(first, last, -(-size // alignment) * alignment) for first, last, size in buffers]
    assert len(result.offsets) == len(buffers)
    assert overlaps(aligned, result.offsets) == []
    assert all(offset >= 0 and offset % alignment == 0 for offset in result.offsets)
    assert result.peak == max((o + size for o, (_, _, size) in zip(result.offsets, aligned) if size), default=0)
    live = [sum(size for a, b, size in aligned if a <= first < b) for first, _, _ in aligned]
    assert result.lower_bound == max(live, default=0) <= result.peak


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(buffers=BUFFERS, alignment=st.sampled_from((1, 2, 16, 64)))
def test_buffers_that_live_together_never_overlap(algorithm: str, buffers: list[Buffer], alignment: int) -> None:
    result = assign_offsets(buffers, alignment=alignment, algorithm=algorithm, time_limit_s=0.1)
    assert_valid(buffers, result, alignment)


@given(buffers=BUFFERS)
def test_auto_is_never_worse_than_a_greedy_algorithm(buffers: list[Buffer]) -> None:
    best = min(assign_offsets(buffers, algorithm=name).peak for name in HEURISTICS)
    assert assign_offsets(buffers).peak <= best


@given(buffers=BUFFERS)
def test_equal_buffers_give_equal_offsets(buffers: list[Buffer]) -> None:
    assert assign_offsets(buffers) == assign_offsets(list(buffers))


def can_fit(buffers: list[Buffer], capacity: int) -> bool:
    """By trying every offset of every buffer, in the order of time."""
    ordered = sorted(buffers)

    def place(index: int, placed: list[tuple[int, int, int]]) -> bool:
        if index == len(ordered):
            return True
        first, last, size = ordered[index]
        live = [item for item in placed if item[0] > first]  # (last, offset, end)
        for offset in range(capacity - size + 1):
            if all(offset >= end or offset + size <= start for _, start, end in live):
                if place(index + 1, [*live, (last, offset, offset + size)]):
                    return True
        return False

    return place(0, [])


@given(buffers=FEW_BUFFERS, spare=st.integers(0, 2))
def test_search_finds_a_plan_exactly_where_there_is_one(buffers: list[Buffer], spare: int) -> None:
    capacity = assign_offsets(buffers, algorithm="best_fit").lower_bound + spare
    result = search(buffers, capacity, SearchLimits(100_000, time.monotonic() + 600))
    assert result.outcome is (SearchStatus.SOLVED if can_fit(buffers, capacity) else SearchStatus.INFEASIBLE)


# Eleven buffers of which at most 6 bytes live at once, and which need 7.
WASTEFUL = [
    (0, 1, 1), (0, 4, 1), (1, 2, 2), (1, 2, 3), (2, 3, 4), (2, 6, 1),
    (3, 5, 1), (3, 7, 3), (4, 5, 1), (5, 6, 2), (6, 7, 3),
]  # fmt: skip


def test_search_proves_that_the_lower_bound_cannot_be_reached() -> None:
    assert not can_fit(WASTEFUL, 6)
    result = search(WASTEFUL, 6, SearchLimits(1_000, time.monotonic() + 600))
    assert result.outcome is SearchStatus.INFEASIBLE and result.steps < 1_000
    result = assign_offsets(WASTEFUL)
    assert (result.peak, result.lower_bound) == (7, 6)


def test_disjoint_time_ranges_are_searched_separately() -> None:
    one = search(WASTEFUL, 7, SearchLimits(1_000, time.monotonic() + 600))
    apart = WASTEFUL + [(first + 10, last + 10, size) for first, last, size in WASTEFUL]
    both = search(apart, 7, SearchLimits(1_000, time.monotonic() + 600))
    assert both.offsets == one.offsets * 2
    assert both.steps == one.steps * 2


@pytest.mark.parametrize("name", "ABCDEF")
@pytest.mark.parametrize("algorithm", ("auto", "search"))
def test_minimalloc_problem_fits(name: str, algorithm: str) -> None:
    buffers = read_problem(name)
    # A limit of steps decides in the search; this one of time is only for a machine that is very busy.
    result = assign_offsets(buffers, capacity=CAPACITY, algorithm=algorithm, time_limit_s=600)
    assert_valid(buffers, result)
    assert result.algorithm == "search" and result.peak <= CAPACITY


@pytest.mark.parametrize("name", "ABCDEF")
def test_greedy_algorithms_do_not_solve_minimalloc_problems(name: str) -> None:
    """They are why there is a search: should one of them suffice, these problems test nothing."""
    buffers = read_problem(name)
    assert min(assign_offsets(buffers, algorithm=algorithm).peak for algorithm in HEURISTICS) > 1.1 * CAPACITY


def test_search_takes_the_same_steps_on_every_run() -> None:
    buffers = read_problem("B")
    limits = SearchLimits(10_000, time.monotonic() + 600)
    assert search(buffers, CAPACITY, limits) == search(buffers, CAPACITY, limits)


def test_search_stops_at_its_step_limit() -> None:
    result = search(read_problem("F"), CAPACITY, SearchLimits(50, time.monotonic() + 600))
    assert (result.outcome, result.offsets, result.steps) == (SearchStatus.LIMIT_REACHED, (), 50)


def test_search_stops_at_its_deadline_and_returns_the_greedy_plan() -> None:
    result = assign_offsets(read_problem("F"), algorithm="search", time_limit_s=0)
    assert result.algorithm in HEURISTICS


def test_bounds_rise_to_the_next_end_at_once() -> None:
    """Two small buffers, which can only lie on a large one, do not raise each other byte by byte."""
    placement = Placement(Subproblem.of([(0, 1, 1), (0, 1, 1), (0, 1, 10**6)], 10**6 + 2))
    assert placement.start()
    assert placement.postpone(0)
    assert placement.bound == [10**6, 10**6, 0]
    assert len(placement.trail) < 20


def test_auto_counts_steps_instead_of_seconds() -> None:
    buffers = read_problem("F")
    assert assign_offsets(buffers, time_limit_s=0) == assign_offsets(buffers)
    assert assign_offsets(buffers).algorithm == "search"


@pytest.mark.parametrize("count", (500, 2_000))
@pytest.mark.parametrize("kind", ("straight cuts", "pinwheels", "long live ranges", "short live ranges"))
def test_full_rectangles_are_packed_at_their_known_optimum(kind: str, count: int) -> None:
    problem = packed_problem(KINDS[kind], count, seed=count)
    result = assign_offsets(problem.buffers, capacity=problem.capacity, time_limit_s=600)
    assert_valid(problem.buffers, result)
    assert result.peak == result.lower_bound == problem.capacity


@pytest.mark.parametrize("kind", KINDS)
def test_packed_problems_are_full(kind: str) -> None:
    problem = packed_problem(KINDS[kind], 200, seed=7)
    result = assign_offsets(problem.buffers, alignment=problem.alignment)
    assert_valid(problem.buffers, result, problem.alignment)
    assert result.lower_bound == problem.capacity


def assert_blocks_are_packed(buffers: list[Buffer], blocks: Blocks, capacity: int) -> None:
    """Blocks fit the capacity at each time, and their offsets give valid ones of the buffers."""
    assert max_live_bytes(blocks.buffers) <= capacity
    placed = assign_offsets(blocks.buffers, algorithm="greedy_by_size")
    offsets = blocks.expand(placed.offsets)
    assert overlaps(buffers, tuple(offsets)) == []
    assert peak_of(buffers, offsets) <= placed.peak


@given(buffers=st.lists(BUFFER.filter(lambda buffer: buffer[2] > 0), min_size=1, max_size=30),
       spare=st.integers(0, 40), tolerances=st.sampled_from((EXACT, APPROXIMATE, (0.3,))))  # fmt: skip
def test_offsets_of_blocks_are_offsets_of_their_buffers(
    buffers: list[Buffer], spare: int, tolerances: tuple[float, ...]
) -> None:
    capacity = max_live_bytes(buffers) + spare
    blocks = Blocks(in_sections(buffers), capacity, tolerances)
    assert_blocks_are_packed(buffers, blocks, capacity)
    blocks.improve(100)
    assert_blocks_are_packed(buffers, blocks, capacity)


def test_buffers_that_take_over_memory_are_one_block() -> None:
    buffers = [(0, 2, 8), (2, 4, 5), (2, 5, 3), (4, 5, 5)]
    assert Blocks(in_sections(buffers), 8, EXACT).buffers == [(0, 3, 8)]


def test_blocks_of_similar_sizes_are_padded_only_where_bytes_are_free() -> None:
    buffers = [(0, 2, 1000), (2, 4, 990), (0, 2, 50), (2, 4, 50)]
    assert Blocks(in_sections(buffers), 1050, APPROXIMATE).buffers == [(0, 2, 1050)]
    assert len(Blocks(in_sections(buffers), 1050, EXACT).buffers) == 3
    full = [*buffers, (2, 4, 10)]
    assert Blocks(in_sections(full), 1050, APPROXIMATE).buffers == [(0, 2, 1050)]
    tight = [(0, 2, 1000), (2, 4, 990), (0, 2, 50), (2, 4, 60)]  # equal at each time, in no pairs
    merged = Blocks(in_sections(tight), 1050, APPROXIMATE).buffers
    assert max_live_bytes(merged) == 1050


@pytest.mark.parametrize("kind", ("few times and sizes", "shrunk"))
def test_splitting_and_merging_again_leaves_fewer_blocks(kind: str) -> None:
    problem = packed_problem(KINDS[kind], 250, seed=1)
    blocks = Blocks(in_sections(problem.buffers), problem.capacity, APPROXIMATE)
    before = len(blocks.buffers)
    blocks.improve(3_000)
    assert len(blocks.buffers) <= 0.8 * before
    assert_blocks_are_packed(problem.buffers, blocks, problem.capacity)


def test_blocks_are_the_same_on_every_run() -> None:
    problem = packed_problem(KINDS["gaps"], 120, seed=2)
    merged = [Blocks(in_sections(problem.buffers), problem.capacity, APPROXIMATE) for _ in range(2)]
    for blocks in merged:
        blocks.improve(1_000)
    assert merged[0].buffers == merged[1].buffers and merged[0].steps == merged[1].steps


@pytest.mark.parametrize(("kind", "count"), [("shrunk", 250), ("unaligned", 500), ("few times", 500)])
def test_packings_with_similar_sizes_or_few_times_are_solved(kind: str, count: int) -> None:
    problem = packed_problem(KINDS[kind], count, seed=100)
    result = assign_offsets(
        problem.buffers, alignment=problem.alignment, capacity=problem.capacity, time_limit_s=600
    )  # fmt: skip
    assert_valid(problem.buffers, result, problem.alignment)
    assert result.peak == problem.capacity


def training(count: int) -> list[Buffer]:
    """Every fourth buffer lives to the end."""
    generator = random.Random(count)
    return [
        live_range(step, count + 1 - step if step % 4 == 0 else generator.randrange(1, 4), generator.randrange(1, 999))
        for step in range(count)
    ]


def test_many_buffers_saved_to_the_end_are_packed_near_the_bound() -> None:
    result = assign_offsets(training(20_000))
    assert result.algorithm == "best_fit"
    assert result.peak <= 1.01 * result.lower_bound


@pytest.mark.parametrize("algorithm", (greedy_by_size, greedy_by_duration))
def test_cached_neighbours_equal_recomputed_ones(algorithm: Callable[..., list[int]]) -> None:
    buffers = training(300)
    assert algorithm(buffers, max_stored_pairs=0) == algorithm(buffers)


def test_squeaky_wheel_improves_the_order_of_greedy_by_duration() -> None:
    """Buffers of a training step whose sizes repeat: the greedy placement is above the bound, a better order is not."""
    generator = random.Random(1)
    sizes = [generator.randrange(1, 4096) for _ in range(20)]
    buffers = [(step, 201 if step % 4 == 0 else step + 1 + generator.choice((1, 1, 1, 2, 2, 3, 6)),
                generator.choice(sizes)) for step in range(200)]  # fmt: skip
    bound = max_live_bytes(buffers)
    assert peak_of(buffers, greedy_by_duration(buffers)) > bound
    assert peak_of(buffers, squeaky_wheel(buffers)) == bound
    assert assign_offsets(buffers).peak == bound


def test_saved_activations_stack_in_order_of_last_use() -> None:
    buffers = [(0, 9, 10), (0, 2, 5), (1, 9, 7), (2, 3, 9), (3, 9, 4)]
    result = assign_offsets(buffers, algorithm="best_fit")
    assert result.peak == result.lower_bound == 26


def test_no_buffers() -> None:
    assert assign_offsets([]) == Assignment((), 0, 0, "greedy_by_size")


def test_empty_buffers_take_no_space() -> None:
    result = assign_offsets([(0, 4, 0), (0, 4, 8), (1, 2, 0), (1, 3, 8)], alignment=16)
    assert result.offsets[0] == result.offsets[2] == 0
    assert sorted((result.offsets[1], result.offsets[3])) == [0, 16]
    assert result.peak == result.lower_bound == 32


def test_live_range_ends_are_exclusive() -> None:
    assert assign_offsets([(0, 2, 8), (2, 4, 8)]).peak == 8


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([(0, 1, 4), (0, 1, -4)], r"buffer 1 has the negative size -4"),
        ([(3, 3, 4)], r"buffer 0 is live from 3 to 3, which is empty"),
        ([(3, 2, 0)], r"buffer 0 is live from 3 to 2, which is empty"),
        ([(0, 1, 2**63)], r"buffer 0 has 9223372036854775808 bytes, which exceeds 64 bits"),
        ([(0, 2, 2**62), (1, 3, 2**62)], r"9223372036854775808 bytes are live at once, which exceeds 64 bits"),
        ([(0, 1.5, 4)], r"buffer 0 is \(0, 1.5, 4\); it must be three integers"),
        ([(0, 1)], r"buffer 0 is \(0, 1\); it must be three integers"),
    ],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_invalid_buffers_are_rejected(buffers: list[Buffer], message: str, algorithm: str) -> None:
    with pytest.raises(PlanningError, match=message):
        assign_offsets(buffers, algorithm=algorithm)


@pytest.mark.parametrize("alignment", (0, -8, 3, 24, 2.0))
def test_an_alignment_is_a_power_of_two(alignment: int) -> None:
    with pytest.raises(PlanningError, match="alignment must be a power of two, not"):
        assign_offsets([(0, 1, 4)], alignment=alignment)


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(OptionError, match=r"algorithm must be one of greedy_by_size, .*, auto, not 'best'"):
        assign_offsets([], algorithm="best")
    with pytest.raises(OptionError, match="time_limit_s must be 0 or more seconds, not -1"):
        assign_offsets([], time_limit_s=-1)
    with pytest.raises(PlanningError, match="capacity must be 0 or more bytes, not -1"):
        assign_offsets([], capacity=-1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_insufficient_capacity_error_names_the_needed_bytes(algorithm: str) -> None:
    message = "needs 12 bytes and the capacity is 11; 12 bytes are live at once"
    with pytest.raises(PlanningError, match=message) as caught:
        assign_offsets([(0, 2, 8), (1, 3, 4)], capacity=11, algorithm=algorithm)
    assert (caught.value.needed, caught.value.lower_bound) == (12, 12)


def test_insufficient_capacity_error_distinguishes_unproven_cases() -> None:
    with pytest.raises(PlanningError, match="a longer time limit may find") as caught:
        assign_offsets(read_problem("A"), capacity=CAPACITY, algorithm="greedy_by_size")
    assert caught.value.needed > CAPACITY == caught.value.lower_bound


@pytest.mark.parametrize(
    ("kind", "count", "tolerance"), [("unaligned", 2_000, 0), ("pinwheels", 500, 0), ("shrunk", 500, 32)]
)
def test_sweep_packs_problems_with_few_free_bytes(kind: str, count: int, tolerance: int) -> None:
    problem = packed_problem(KINDS[kind], count, seed=101)
    unit = problem.alignment
    buffers = in_sections([(first, last, -(-size // unit) * unit) for first, last, size in problem.buffers])
    functions = native_search()
    assert functions is not None, "this test needs a C++ compiler"
    result = functions.sweep(
        buffers, problem.capacity, SweepOptions(8, tolerance), SearchLimits(1_000_000, time.monotonic() + 600)
    )
    assert result.outcome is SearchStatus.SOLVED
    assert peak_of(buffers, result.offsets) == problem.capacity
    assert overlaps(buffers, result.offsets) == []
