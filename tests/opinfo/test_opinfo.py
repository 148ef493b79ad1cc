"""A subset of the sweep over torch's operator database: some operators of each module of rules, few calls each.

The calls of a module form one program, so that a test runs the C++ compiler once or twice. `sweep.py` runs all.
"""

from __future__ import annotations

import pkgutil
import re
from itertools import islice

import pytest
import torch

from fxwrap import Options
from fxwrap.lowering import rules
from tests.conftest import NO_EXPECTTEST

pytest.importorskip("expecttest", reason=NO_EXPECTTEST)  # before the imports below need it

from tests.opinfo.batch import FAILED, PASSED, REJECTED_BY_EAGER, Verdicts, run_and_compare
from tests.opinfo.calls import Call, cases
from tests.opinfo.comparison import difference
from tests.opinfo.records import Record
from tests.opinfo.table import page, replace_summary
from tests.opinfo.workers import Setting, run_sweep

CALLS = {torch.float32: 2, torch.int64: 1}

FUNCTIONS = {
    "pointwise": "abs atan2 erfinv exp digamma eq fmax lgamma log1p logaddexp nn_functional_gelu sign xlogy round",
    "activations": "nn_functional_glu nn_functional_hardshrink nn_functional_hardtanh nn_functional_threshold",
    "arithmetic": "add addcdiv clamp div_floor_rounding fmod logical_and nextafter pow remainder",
    "norms: batches": "nn_functional_batch_norm nn_functional_instance_norm",
    "copies": "masked_fill where clone item",
    "creation": "arange eye full_like linspace",
    "softmax: losses": "nn_functional_cross_entropy nn_functional_nll_loss",
    "functions": "ldexp nan_to_num polygamma_polygamma_n_1",
    "indexing": "gather index_select nn_functional_embedding take take_along_dim",
    "matmuls": "mm bmm addmm baddbmm mv addmv",
    "norms": "nn_functional_group_norm nn_functional_layer_norm nn_functional_rms_norm",
    "pointwise_losses": "nn_functional_binary_cross_entropy nn_functional_huber_loss nn_functional_mse_loss",
    "pooling": "nn_functional_adaptive_avg_pool2d nn_functional_avg_pool2d nn_functional_max_pool2d",
    "rearrange": "cat nn_functional_pad_reflect nn_functional_pad_constant select_scatter stack tril",
    "reductions": "amax all argmin count_nonzero linalg_vector_norm mean std_mean sum prod var",
    "reductions: scans": "cummax cumsum logcumsumexp",
    "indexing: writes": "index_add index_copy index_put scatter_add scatter_reduce_amax scatter",
    "softmax": "log_softmax logsumexp masked_softmax softmax_with_dtype",
    "views": "as_strided diagonal expand flip permute repeat reshape roll unfold split view_as",
}
"""Operators of the database that use each module of rules, whose name is the first word."""

GRADIENTS = {
    "norms": "nn_functional_layer_norm nn_functional_rms_norm nn_functional_group_norm",
    "losses": "nn_functional_cross_entropy nn_functional_binary_cross_entropy nn_functional_smooth_l1_loss",
    "rows": "softmax log_softmax cumsum prod var amax",
    "moved": "cat gather index_select nn_functional_embedding nn_functional_pad_constant tril unfold",
    "pointwise": "nn_functional_gelu nn_functional_silu atan2 clamp nn_functional_glu nn_functional_avg_pool2d",
}

IN_PLACE = "add cumsum index_copy masked_fill sigmoid tril"

CALLED = {
    "arithmetic": "div.Tensor_mode fmod.Tensor remainder.Tensor",  # integers raise for a zero divisor
    "copies": "_local_scalar_dense.default",
    "functions": "polygamma.default",
    "matmuls": "mm.default bmm.default addmm.default baddbmm.default mv.default addmv.default",  # of integers
    "pointwise_losses": "binary_cross_entropy.default",  # raises for values outside [0, 1]
    "pooling": "avg_pool2d.default",
    "indexing: writes": "index_put.default index_add.default scatter.reduce scatter_add.default scatter_reduce.two",
    "views": "as_strided.default",
    "gradients of moved": "embedding_dense_backward.default index_add.default scatter_add.default",
    "gradients of pointwise": "avg_pool2d_backward.default empty_like.default",
}
"""Operators of these graphs that may be called. Atomic additions are not deterministic."""


def calls_of(names: str, form: str = "function") -> list[Call]:
    """Returns the first calls of operators, for each dtype that they support."""
    known = {case.name: case for case in cases(form=form)}
    unknown = set(names.split()) - set(known)
    assert not unknown, f"torch's database has no {unknown}"
    calls: list[Call] = []
    for case in cases(tuple(CALLS) if form == "function" else (torch.float32,), form):
        if case.name in names.split():
            calls += islice(case.calls(), CALLS[case.dtype])
    return calls


def assert_agrees(verdicts: Verdicts, called: str) -> None:
    """Fails unless every call is compiled and agrees with eager; only the operators in `called` may be called."""
    failed = [
        f"{verdict.word}: ({verdict.call}) {verdict.detail}" for verdict in verdicts.calls if verdict.word != PASSED
    ]
    assert not failed, "\n".join(failed)
    assert set(verdicts.called) <= {f"aten.{name}" for name in called.split()}
    assert verdicts.kinds["fused"] + verdicts.kinds["view"] > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("module", FUNCTIONS)
def test_operators(module: str) -> None:
    options = Options(fallback="error", matmul_kernels="generated")
    assert_agrees(run_and_compare(calls_of(FUNCTIONS[module]), options), CALLED.get(module, ""))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients(kind: str) -> None:
    verdicts = run_and_compare(calls_of(GRADIENTS[kind], "gradient"), Options(fallback="error"))
    assert_agrees(verdicts, CALLED.get(f"gradients of {kind}", ""))


def test_in_place_methods() -> None:
    calls = calls_of(IN_PLACE, "inplace")
    verdicts = run_and_compare(calls, Options(fallback="error"))
    verdicts.calls = [
        verdict for verdict in verdicts.calls if verdict.word != REJECTED_BY_EAGER
    ]  # operands too small for the result
    assert len(verdicts.calls) > len(calls) // 2
    assert_agrees(verdicts, "")


def test_the_sweep_runs_each_row_in_a_process() -> None:
    rows = [case for case in cases((torch.float32,)) if case.name in ("trunc", "neg")]
    setting = Setting(Options(fallback="error"), most=1)
    records = {record.name: record for record in run_sweep(rows, setting, jobs=1, timeout=600.0, limit=1200.0)}
    assert records.keys() == {"trunc", "neg"}
    assert all(record.verdicts == {PASSED: 1} and record.kinds == {"fused": 1} for record in records.values())


def test_every_rules_module_is_covered() -> None:
    modules = {module.name for module in pkgutil.iter_modules(rules.__path__)}
    serves_others = {
        "indexing_common", "known_indices", "normalization", "picked_columns", "private_sums", "registry",
        "windows",
    }  # fmt: skip
    only_for_gpus = {"grid_samples", "quantised_matmuls"}  # in the database; tests/lowering has those of CPUs
    only_of_gradients = {"embedding_gradients"}  # which GRADIENTS has
    only_by_traits = {"depthwise_convolutions"}  # which no device here has; tests/lowering/rules has a device of theirs
    of_functions = modules - serves_others - only_for_gpus - only_of_gradients - only_by_traits
    assert of_functions == {re.split(r"\W", name)[0] for name in FUNCTIONS}


def test_a_wrong_rule_is_detected() -> None:
    wrong = Options(fallback="error", decompositions={torch.ops.aten.exp.default: lambda x: x.expm1()})
    outcomes = {verdict.word for verdict in run_and_compare(calls_of("exp"), wrong).calls}
    assert FAILED in outcomes


@pytest.mark.parametrize(
    ("result", "eager", "text"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), "NaN at other elements"),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, torch.inf]), "infinite at other elements"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "not equal"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), "relative error"),
        (torch.ones(2, 3), torch.ones(3, 2).t(), "strides"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float64"),
        (1, 1.0, "eager has 1.0"),
    ],
)
def test_differences_are_detected(result: object, eager: object, text: str) -> None:
    detail = difference([result], [eager], None)
    assert detail is not None
    assert text in detail


def test_the_page_and_the_summary() -> None:
    common = ("function", "cpu", "torch 2.13, a CPU")
    records = [
        Record("add", "float32", *common, 9, 9, {PASSED: 9}, {}, {"fused": 9}, {}, 1.0),
        Record("mm", "float32", *common, 4, 2, {PASSED: 1, FAILED: 1}, {}, {"call": 2}, {"aten.mm.default": ""}, 1.0),
    ]
    assert "| mm | float32 | 2 of 4 | 0 | 0 | 2 | 1 passed; 1 failed | mm |" in page(records)
    document = replace_summary("before\n<!-- summary -->\nold\n<!-- end -->\nafter\n", records)
    row = "| Functions, on a CPU | 2 | float32 | 2 | 11 of 13 | 10 passed; 1 failed | torch 2.13, a CPU |"
    assert row in document.splitlines() and "old" not in document
    assert document.startswith("before\n") and document.endswith("<!-- end -->\nafter\n")
    assert replace_summary(document, records) == document
