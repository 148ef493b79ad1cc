"""The native search takes the steps of the Python search, which remains where there is no compiler."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.packings import KINDS, packed_problem
from fxwrap.errors import NativeBuildError
from fxwrap.memory_planning import assign_offsets
from fxwrap.memory_planning.blocks import APPROXIMATE, EXACT, Blocks
from fxwrap.memory_planning.explore import SearchLimits, SearchStatus
from fxwrap.memory_planning.greedy import Buffer, max_live_bytes
from fxwrap.memory_planning.native_search import NativeBlocks, NativeSearch, native_search
from fxwrap.memory_planning.placement import in_sections
from fxwrap.memory_planning.search import PythonSearch, search
from fxwrap.memory_planning.sweep import SweepOptions, sweep
from fxwrap.runtime.native import planning
from tests.memory_planning.test_assign_offsets import BUFFER, CAPACITY, read_problem


@pytest.fixture(scope="module")
def native() -> NativeSearch:
    search = native_search()
    assert search is not None, "these tests need a C++ compiler"
    return search


def limits(steps: int) -> SearchLimits:
    return SearchLimits(steps, time.monotonic() + 600)


@given(buffers=st.lists(BUFFER.filter(lambda buffer: buffer[2] > 0), min_size=1, max_size=25), spare=st.integers(0, 20))
def test_small_problems_have_equal_results(native: NativeSearch, buffers: list[Buffer], spare: int) -> None:
    capacity = max_live_bytes(buffers) + spare
    results = [search(buffers, capacity, limits(300), functions) for functions in (PythonSearch(), native)]
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_dense_problems_have_equal_results(native: NativeSearch, kind: str) -> None:
    problem = packed_problem(KINDS[kind], 150, seed=11)
    results = [
        search(problem.buffers, problem.capacity, limits(600), functions) for functions in (PythonSearch(), native)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("tolerances", (EXACT, APPROXIMATE, (0.3,)))
@pytest.mark.parametrize("kind", ("few times and sizes", "gaps", "shrunk"))
def test_blocks_are_equal(native: NativeSearch, kind: str, tolerances: tuple[float, ...]) -> None:
    problem = packed_problem(KINDS[kind], 120, seed=12)
    buffers = in_sections(problem.buffers)
    blocks = native.merge(buffers, problem.capacity, tolerances)
    reference = Blocks(buffers, problem.capacity, tolerances)
    assert isinstance(blocks, NativeBlocks)
    for _ in range(4):
        assert (blocks.buffers, blocks.steps, blocks.has_blocks) == (
            reference.buffers, reference.steps, reference.has_blocks,
        )  # fmt: skip
        offsets = list(range(len(blocks.buffers)))
        assert blocks.expand(offsets) == reference.expand(offsets)
        blocks.improve(400)
        reference.improve(400)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *itertools.product(("unaligned", "few times and sizes", "pinwheels"), (SweepOptions(1), SweepOptions(3))),
        *itertools.product(("pinwheels", "shrunk", "gaps"), (SweepOptions(2, 40), SweepOptions(3, 128))),
    ],
)
def test_sweeps_are_equal(native: NativeSearch, kind: str, options: SweepOptions) -> None:
    problem = packed_problem(KINDS[kind], 120, seed=13)
    unit = problem.alignment
    buffers = in_sections([(first, last, -(-size // unit) * unit) for first, last, size in problem.buffers])
    results = [run(buffers, problem.capacity, options, limits(10**6)) for run in (sweep, native.sweep)]
    assert results[0] == results[1]
    assert results[0].steps > 50


def test_sparse_problems_have_equal_results(native: NativeSearch) -> None:
    buffers = read_problem("F")
    results = [search(buffers, CAPACITY, limits(100), functions) for functions in (PythonSearch(), native)]
    assert results[0] == results[1]
    assert results[0].outcome is SearchStatus.LIMIT_REACHED and results[0].steps == 100


def test_numbers_near_64_bits_have_equal_results(native: NativeSearch) -> None:
    buffers = [(0, 2, 2**61), (1, 3, 2**60 - 1), (2, 4, 2**61 + 1)]
    results = [search(buffers, 2**62, limits(300), functions) for functions in (PythonSearch(), native)]
    assert results[0] == results[1]
    assert results[0].outcome is SearchStatus.SOLVED


def test_deadline_stops_the_native_search(native: NativeSearch) -> None:
    result = search(read_problem("F"), CAPACITY, SearchLimits(10**9, time.monotonic() - 1), native)
    assert result.outcome is SearchStatus.LIMIT_REACHED


def test_plans_are_the_same_without_a_compiler(native: NativeSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NativeBuildError("no C++ compiler found")

    buffers = packed_problem(KINDS["shrunk"], 120, seed=1).buffers
    expected = assign_offsets(buffers)
    assert expected.algorithm == "search"
    monkeypatch.setattr(planning, "find_planner", fail)
    monkeypatch.setattr(planning, "build_planner", fail)
    with _forgotten_library():
        assert native_search() is None
        assert assign_offsets(buffers) == expected


def test_searches_with_a_time_limit_and_of_many_buffers_compile_the_library(
    native: NativeSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of compiling is no part of the limit."""
    buffers = packed_problem(KINDS["shrunk"], 120, seed=1).buffers
    expected, library, builds, clock = assign_offsets(buffers), planning.build_planner(), list[None](), time.monotonic

    def build() -> Path:
        builds.append(None)
        return library

    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600 * len(builds))

    monkeypatch.setattr(planning, "find_planner", lambda: None)
    monkeypatch.setattr(planning, "build_planner", build)
    with _forgotten_library():
        assert assign_offsets(buffers) == expected and not builds
        assert assign_offsets(buffers, capacity=expected.peak).peak <= expected.peak and len(builds) == 1
    with _forgotten_library():
        assert assign_offsets(packed_problem(KINDS["shrunk"], 150, seed=1).buffers).peak and len(builds) == 2


@contextmanager
def _forgotten_library() -> Iterator[None]:
    planning.load_planner.cache_clear()
    try:
        yield
    finally:
        planning.load_planner.cache_clear()
