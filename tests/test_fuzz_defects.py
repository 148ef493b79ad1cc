"""The fuzzer reports planted defects of every kind, and accepts rounding: its comparison with eager is neither blind
nor too strict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.errors import VerifyError
from tests import fuzz
from tests.fuzz import Subject, run_case
from tests.support.agreement import Agreement
from tests.support.defects import DEFECTS, Defect
from tests.support.long_form import long_only
from tests.support.strategies.graphs import INDEXING, POINTWISE, VIEWS, _extremum, _sum, graphs

SEEDS = 60
"""Graphs, of which at least one must show each defect."""

STRATEGIES = {
    "float": graphs(),
    "integer": graphs(
        (POINTWISE, (_sum, _extremum), VIEWS, INDEXING), writes=0, sizes=(3, 5, 4), dtypes=(torch.int64,)
    ),
}


@cache
def _subject(graphs: str, seed: int) -> Subject:
    subject = Subject(seed, ["static"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fuzz.STRATEGIES, "static", STRATEGIES[graphs])
        assert subject.graph and subject.wanted
    return subject


def _reports(subjects: Iterator[Subject]) -> Iterator[str]:
    """Yields the differences from eager mode, and the programs that are not valid, that the fuzzer reports."""
    for subject in subjects:
        for case in subject.cases:
            if case.kernels != "abacus":
                continue
            try:
                run_case(case, subject)
            except AssertionError as error:
                if str(error.__cause__).startswith("result ") or isinstance(error.__cause__, VerifyError):
                    yield f"seed {subject.seed}: {error.__cause__}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_reported(defect: Defect) -> None:
    with defect.planted():
        assert next(_reports(_subject(defect.graphs, seed) for seed in range(SEEDS)), None)


@pytest.mark.parametrize("kind", ["dynamic", "control", "training", long_only("exported")])
def test_a_defect_is_reported_in_other_kinds_of_graphs(kind: str) -> None:
    (defect,) = [defect for defect in DEFECTS if defect.name == "float term dropped"]
    with defect.planted():
        assert next(_reports(Subject(seed, [kind]) for seed in range(SEEDS)), None)


def test_a_lowering_that_drops_an_operator_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the public option, and an in-place write that is dropped: the inputs are compared too."""

    def first_operand(builder: Any, node: torch.fx.Node) -> None:
        builder.env[node] = builder.env[node.args[0]]

    right = fuzz.Case.make_options
    for overload in ("aten.tanh.default", "aten.copy_.default", "aten.flip.default"):
        wrong = lambda case, name=overload: right(case).replace(lowerings={name: first_operand})  # noqa: E731
        monkeypatch.setattr(fuzz.Case, "make_options", wrong)
        assert next(_reports(_subject("float", seed) for seed in range(SEEDS)), None), overload


def test_graphs_without_a_defect_are_not_reported() -> None:
    for kind in STRATEGIES:
        assert list(_reports(_subject(kind, seed) for seed in range(6))) == []


# --- the rule -------------------------------------------------------------------------------------------------------


def _agreement(want: Tensor, exact: Sequence[float]) -> Agreement:
    return Agreement([want], lambda: [torch.tensor(exact, dtype=torch.float64)])


def test_a_small_element_beside_a_large_one_is_compared() -> None:
    want, exact = torch.tensor([1e7, 1.0]), [1e7, 1.0]
    assert _agreement(want, exact).holds(0, torch.tensor([1e7, 1.000001]))
    assert not _agreement(want, exact).holds(0, torch.tensor([1e7, 1.01]))


def test_an_error_may_be_as_large_as_that_of_eager_mode() -> None:
    """0.25 is left of terms that cancel; in eager mode 0.24."""
    agreement = _agreement(torch.tensor([0.24]), [0.25])
    assert agreement.holds(0, torch.tensor([0.27])) and agreement.holds(0, torch.tensor([0.25]))
    assert not agreement.holds(0, torch.tensor([0.30]))
    assert not agreement.holds(0, torch.tensor([torch.nan]))
    assert not _agreement(torch.tensor([torch.inf, 1.0]), [1e39, 1.0]).holds(0, torch.tensor([1e38, 1.0]))
    assert _agreement(torch.tensor([torch.inf, 1.0]), [1e38, 1.0]).holds(0, torch.tensor([1e38, 1.0]))


def test_float64_is_compared_as_such_unless_eager_mode_rounds_to_float32() -> None:
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert _agreement(third, [1 / 3]).holds(0, third + 1e-13)
    assert not _agreement(third, [1 / 3]).holds(0, third.float().double())
    assert _agreement(third.float().double(), [1 / 3]).holds(0, third)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_integers_and_truth_values_are_equal(dtype: torch.dtype) -> None:
    """No error of theirs is computed: torch does not subtract truth values."""
    want = torch.tensor([0, 1, 1], dtype=dtype)
    agreement = Agreement([want], lambda: pytest.fail("not needed"))
    assert agreement.holds(0, want.clone())
    assert not agreement.holds(0, torch.tensor([0, 1, 0], dtype=dtype))


def test_results_of_unknown_sizes_have_the_layout_of_fake_tensors() -> None:
    """The order of dimensions of equal strides depends on their sizes: eager mode's is (2, 1), for 4 rows."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.unfold(-1, 2, 1)[: x.sum().long().item()]
        return torch.where(x.sum() > 0, rows, 0.0), x + 1

    graph = make_fx(function, tracing_mode="symbolic")(torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0]))
    assert fuzz._eager_layouts(graph) == {1}


def test_dtypes_shapes_and_strides_are_compared() -> None:
    want = torch.ones(2, 3)
    agreement = Agreement([want], lambda: [want.double()])
    fuzz._check(agreement, [want.t().contiguous().t()])
    with pytest.raises(AssertionError, match=r"result 0: strides \(1, 2\)"):
        fuzz._check(agreement, [want.t().contiguous().t()], strides={0})
    with pytest.raises(AssertionError, match=r"result 0: torch\.float64"):
        fuzz._check(agreement, [want.double()])
    with pytest.raises(AssertionError, match=r"result 0: torch\.float32\[3, 2\]"):
        fuzz._check(agreement, [want.t()])
    with pytest.raises(AssertionError, match="2 results, not 1"):
        fuzz._check(agreement, [want, want])
