"""The fuzzer runs every kind of graph, reports a failure by its seed, and goes on after a process that dies."""

from __future__ import annotations

import itertools
import multiprocessing

import pytest
from hypothesis import assume
from hypothesis import strategies as st

import tests.fuzz as fuzzer
from tests.fuzz import SHARES, VARIANTS, Subject, fuzz, run_case
from tests.support.fuzzing import drawn_example


@pytest.mark.parametrize("kind", SHARES)
def test_every_kind_of_graph_runs(kind: str) -> None:
    subjects = map(Subject, range(40), itertools.repeat([kind]))
    pairs = ((case, subject) for subject in subjects for case in subject.cases if case.kernels == "abacus")
    assert sum([run_case(case, subject).runs for case, subject in itertools.islice(pairs, 6)]) >= 6


def test_a_seed_determines_the_case() -> None:
    one, other = Subject(7, list(SHARES)), Subject(7, list(SHARES))
    assert one.cases == other.cases and str(one.graph) == str(other.graph)


def test_discarded_cases_are_counted_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(*_: object, **__: object) -> None:
        raise AssertionError("a difference")

    monkeypatch.setattr(fuzzer, "_check", differ)
    monkeypatch.setattr(fuzzer, "_fails_in_torch", lambda *_: True)
    counts, subject = fuzzer.Counts(), Subject(7, ["training"])
    counts.add(subject.cases[0], run_case(subject.cases[0], subject))
    assert counts.discarded == {("training", "aot_eager has the same results, which are not eager's"): 1}
    assert counts.discarded_seeds == {key: [7] for key in counts.discarded}
    assert str(counts) == "1 graphs, 1 compiles, 0 runs, 0 failures, 1 discarded"


def test_rejected_graphs_are_counted() -> None:
    attempts = iter([False, False, True])

    @st.composite
    def strategy(draw: st.DrawFn) -> int:
        assume(next(attempts))
        return draw(st.integers(0, 9))

    assert drawn_example(strategy(), seed=1).rejected == {"an assumption of the strategy fails": 2}

    @st.composite
    def large(draw: st.DrawFn) -> bytes:
        return draw(st.binary(min_size=3000)) if draw(st.booleans()) else draw(st.binary(min_size=50_000))

    counts = [drawn_example(large(), seed).rejected for seed in range(8)]
    assert {reason for item in counts for reason in item} == {"it takes more random numbers than Hypothesis has"}


def test_the_run_goes_on_after_a_process_that_dies() -> None:
    outcomes = fuzz(first=1, count=2, jobs=1, seconds=600, kinds=["static"])
    first, _ = next(outcomes)
    for process in multiprocessing.active_children():
        process.kill()
    rest = list(outcomes)
    assert {first.seed, *[case.seed for case, _ in rest]} == {1, 2}
    assert len([case for case, _ in rest if case.seed != first.seed]) == VARIANTS["static"]
