"""The fuzzer runs every kind of graph, reports a failure by its seed, and goes on after a process that dies."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.fuzz import SHARES, VARIANTS, Subject, fuzz, run_case


@pytest.mark.parametrize("kind", SHARES)
def test_every_kind_of_graph_runs(kind: str) -> None:
    subjects = [Subject(seed, [kind]) for seed in range(40)]
    pairs = [(case, subject) for subject in subjects for case in subject.cases if case.kernels == "abacus"]
    assert sum([run_case(case, subject) for case, subject in pairs[:6]]) >= 6


def test_a_seed_determines_the_case() -> None:
    one, other = Subject(7, list(SHARES)), Subject(7, list(SHARES))
    assert one.cases == other.cases and str(one.graph) == str(other.graph)


def test_the_run_goes_on_after_a_process_that_dies() -> None:
    outcomes = fuzz(first=1, count=4, jobs=1, seconds=600, kinds=["static"])
    first, _ = next(outcomes)
    for process in multiprocessing.active_children():
        process.kill()
    rest = list(outcomes)
    assert {first.seed, *[case.seed for case, _ in rest]} == {1, 2, 3, 4}
    assert len([case for case, _ in rest if case.seed != first.seed]) == 3 * VARIANTS["static"]
