"""The fuzzer runs every kind of graph, reports a failure by its seed, and goes on after a process that dies."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

import tests.fuzz as fuzzer
from tests.fuzz import SHARES, VARIANTS, Case, CaseResult, Subject, fuzz, run_case
from tests.support.fuzzing import Failure, Task, drawn_example, run_seeds
from tests.support.long_form import long_only

LONG = ("layers in training", "experts", "norms", "optimizers", "attention in training")


@pytest.mark.parametrize("kind", [long_only(kind) if kind in LONG else kind for kind in SHARES])
def test_every_kind_of_graph_runs(kind: str) -> None:
    subjects = map(Subject, range(40), itertools.repeat([kind]))
    pairs = ((case, subject) for subject in subjects for case in subject.cases if case.kernels == "abacus")
    count = 2 * VARIANTS[kind]  # Dynamo traces each graph of training
    assert sum([run_case(case, subject).runs for case, subject in itertools.islice(pairs, count)]) >= count


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
    assert str(counts) == "1 graphs, 1 compiles, 0 runs, 0 refused, 0 failures, 1 discarded"


def test_the_ledger_adds_runs_up_and_refuses_seeds_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzzer, "result_path", lambda *_: tmp_path / "fuzz.json")
    monkeypatch.setattr(fuzzer, "LEDGER_SECONDS", 0)  # a run that is killed has a row too
    failure = Failure("a difference")

    def run(seed: int, *outcomes: CaseResult | Failure) -> int:
        cases = [Case("static", seed + number, 0, "python", "abacus", {}) for number in range(len(outcomes))]
        monkeypatch.setattr(fuzzer, "fuzz", lambda *_: iter(zip(cases, outcomes)))
        monkeypatch.setattr(sys, "argv", ["fuzz", "--seed", str(seed), "--graphs", "9", "--record"])
        return fuzzer.main()

    assert run(100, CaseResult(20, errors=2), CaseResult(discarded={"torch fails": 1})) == 0
    assert run(200, CaseResult(8), failure) == 1
    assert "4 graphs, 4 compiles, 28 runs, 1 failures of 2 recorded runs" in capsys.readouterr().out
    recorded = json.loads((tmp_path / "fuzz.json").read_text())
    assert recorded["script"] == "tests/fuzz.py"
    rows = [(row["first seed"], row["last seed"], row["runs"]) for row in recorded["rows"]]
    assert rows == [(100, 101, 20), (200, 201, 8)]
    assert recorded["raw"][1]["kinds"][0]["seeds of failures"] == [201]
    with pytest.raises(SystemExit):
        run(195, CaseResult(8))
    assert "the ledger has seeds 200 to 201" in capsys.readouterr().err


def test_special_values_are_drawn() -> None:
    assert len(Subject(7, ["static"]).inputs) == fuzzer.FRESH_RUNS + fuzzer.SPECIAL_RUNS
    numbers = fuzzer._with_special_values(torch.ones(300), (math.nan, -math.inf))
    assert {str(item) for item in numbers.tolist()} == {"1.0", "nan", "-inf"}


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


@dataclass(frozen=True)
class OneCase:
    """A subject of one case."""

    seed: int

    @property
    def cases(self) -> list[Case]:
        return [Case("static", self.seed, 0, "python", "abacus", {})]


def hang_or_die(case: Case, _: OneCase) -> CaseResult:
    if case.seed == 1:
        time.sleep(600)
    if case.seed == 2:
        os._exit(3)
    return CaseResult(1)


def test_the_run_goes_on_after_a_case_that_hangs_and_one_whose_process_dies() -> None:
    outcomes = [result for _, result in run_seeds(Task(OneCase, hang_or_die, limit=2), 1, 3, 1, 600)]
    assert "no result after 2 s" in outcomes[0].text and "in hang_or_die" in outcomes[0].text
    assert outcomes[1:] == [Failure("the process ended with status 3"), CaseResult(1)]


@pytest.mark.long
def test_the_run_goes_on_after_a_process_that_dies() -> None:
    outcomes = fuzz(first=1, count=2, jobs=1, seconds=600, kinds=["static"])
    first, _ = next(outcomes)
    for process in multiprocessing.active_children():
        process.kill()
    rest = list(outcomes)
    assert {first.seed, *[case.seed for case, _ in rest]} == {1, 2}
    assert len([case for case, _ in rest if case.seed != first.seed]) == VARIANTS["static"]
