"""The fuzzer runs every kind of graph, reports a failure by its seed, and goes on after a process that dies."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.fuzz import SHARES, Case, fuzz, run_case


@pytest.mark.parametrize("kind", SHARES)
def test_every_kind_of_graph_runs(kind: str) -> None:
    cases = [Case.draw(seed, [kind]) for seed in range(40)]
    assert sum(map(run_case, [case for case in cases if case.kernels == "abacus"][:4])) >= 4


def test_a_seed_determines_the_case() -> None:
    one, other = Case.draw(7, list(SHARES)), Case.draw(7, list(SHARES))
    assert one == other and str(one.graph()) == str(other.graph())


def test_the_run_goes_on_after_a_process_that_dies() -> None:
    outcomes = fuzz(first=1, count=4, jobs=1, seconds=600, kinds=["static"])
    first, _ = next(outcomes)
    for process in multiprocessing.active_children():
        process.kill()
    rest = list(outcomes)
    assert {first.seed, *[case.seed for case, _ in rest]} == {1, 2, 3, 4}
