"""Random programs come back from FX graphs: some of `tests.round_trips`, whose command runs more of them."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from fxwrap.wrapper_ir import uses_streams
from tests import round_trips
from tests.round_trips import FORMS, SOURCES, Subject, run_trip
from tests.support.long_form import sample_size
from tests.support.transforms import TRANSFORMS, Rejection, Transform

PROGRAMS, BATCH = sample_size(200), 20


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Torch warns of Triton kernels that it cannot read on a CPU, and of lists that it serialises."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def _subject(seed: int) -> Subject:
    """The program of a seed, for one form."""
    forms = list(FORMS)
    return Subject(seed, list(SOURCES), [forms[seed % len(forms)]])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, PROGRAMS, BATCH))
def test_programs_come_back(first: int) -> None:
    for subject in map(_subject, range(first, min(first + BATCH, PROGRAMS))):
        for trip in subject.cases:
            run_trip(trip, subject)


def test_a_seed_determines_the_trip() -> None:
    one, other = Subject(7, ["ir"], list(FORMS)), Subject(7, ["ir"], list(FORMS))
    assert one.cases == other.cases
    with round_trips.device_of(one.cases[0]):
        assert str(one.drawn("in_place").program) == str(other.drawn("in_place").program)


def test_the_suite_has_all_transforms_forms_and_emitters() -> None:
    trips = [trip for seed in range(PROGRAMS) for trip in _subject(seed).cases]
    assert {name for trip in trips for name in trip.transforms} == set(TRANSFORMS)
    assert {trip.form for trip in trips} == set(FORMS)
    assert {trip.emitter for trip in trips} == {"interpreter", "python", "fx", "cpp"}
    assert {trip.source for trip in trips} == set(SOURCES)


def test_programs_have_kernels_streams_blocks_and_symbols() -> None:
    features = Counter[str]()
    for seed in range(30):
        subject = Subject(seed, ["ir"], ["in_place"])
        with round_trips.device_of(subject.cases[0]):
            program = subject.drawn("in_place").program
        features.update(kernel.language for kernel in program.kernels)
        features["streams"] += uses_streams(program)
        features.update({line.opcode for line in program.lines()})
    languages = ("cpp", "triton", "user_triton")
    blocks = ("control.cond", "control.while", "control.scan", "control.map", "control.call")
    memory = ("extern.mutate", "memory.view", "memory.reuse", "memory.pool", "symbol.item")
    assert not [name for name in (*languages, *blocks, *memory, "streams") if not features[name]]


def _first_trip(**changes: object) -> tuple[round_trips.Trip, Subject]:
    subject = Subject(1, ["ir"], ["in_place"])
    return replace(subject.cases[0], emitter="interpreter", **changes), subject  # type: ignore[arg-type]


def test_a_transform_that_changes_results_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def negate(module: GraphModule, _inputs: object) -> GraphModule:
        output = module.graph.output_node()
        with module.graph.inserting_before(output):
            added = module.graph.call_function(
                torch.ops.aten.neg.default, (module.graph.find_nodes(op="placeholder")[0],)
            )
        output.args = ((added, *output.args[0][1:]),)  # type: ignore[index]
        module.recompile()
        return module

    monkeypatch.setitem(TRANSFORMS, "negate", Transform("negate", negate))
    trip, subject = _first_trip(transforms=("negate",))
    with pytest.raises(AssertionError, match=r"Trip\(seed=1") as caught:
        run_trip(trip, subject)
    assert "the graph, value 0" in str(caught.value.__cause__)


def test_a_transform_that_keeps_memory_alive_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(module: GraphModule, _inputs: object) -> GraphModule:
        with module.graph.inserting_after(module.graph.find_nodes(op="placeholder")[-1]):
            keywords = {"dtype": torch.float32, "device": torch.device("cpu")}
            memory = module.graph.call_function(torch.ops.aten.empty_strided.default, ([9, 9], [9, 1]), keywords)
        with module.graph.inserting_before(module.graph.output_node()):
            module.graph.call_function(torch.ops.aten.fill_.Scalar, (memory, 1.0))
        module.recompile()
        return module

    monkeypatch.setitem(TRANSFORMS, "allocate", Transform("allocate", allocate, TRANSFORMS["make_fx"].losses))
    trip, subject = _first_trip(transforms=("allocate",))
    with pytest.raises(AssertionError, match=r"Trip\(seed=1") as caught:
        run_trip(trip, subject)
    assert "peaks and lower bounds" in str(caught.value.__cause__)


def test_errors_that_torch_does_not_raise_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_module: GraphModule, _inputs: object) -> GraphModule:
        raise RuntimeError("broken")

    def rejecting(pattern: str, applies: bool) -> Transform:
        return Transform("fail", fail, rejections=(Rejection("", pattern, lambda _module, _match: applies),))

    trip, subject = _first_trip(transforms=("fail",))
    monkeypatch.setitem(TRANSFORMS, "fail", rejecting("RuntimeError: broken", True))
    assert run_trip(trip, subject)["fail rejected"] == 1
    for pattern, applies in (("RuntimeError: other", True), ("broken", True), ("RuntimeError: broken", False)):
        monkeypatch.setitem(TRANSFORMS, "fail", rejecting(pattern, applies))
        with pytest.raises(AssertionError, match=r"Trip\(seed=1"):
            run_trip(trip, subject)
