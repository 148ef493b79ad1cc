"""A fixed part of the sweep over torch's operator database: some operators of every module of rules, few calls each.

The calls of a module are one program, so that the C++ compiler is started once or twice a test. `sweep.py` runs all.
"""

from __future__ import annotations

import pkgutil
from itertools import islice

import pytest
import torch

from fxwrap import Options
from fxwrap.lowering import rules
from tests.conftest import NO_EXPECTTEST

pytest.importorskip("expecttest", reason=NO_EXPECTTEST)  # before what follows imports it

from tests.opinfo.batch import FAILED, PASSED, REFUSED, Verdicts, judged
from tests.opinfo.calls import Call, cases
from tests.opinfo.judge import difference

CALLS = {torch.float32: 2, torch.int64: 1}

FUNCTIONS = {
    "pointwise": "abs atan2 erfinv exp digamma eq fmax lgamma log1p logaddexp nn_functional_gelu sign xlogy round",
    "activations": "nn_functional_glu nn_functional_hardshrink nn_functional_hardtanh nn_functional_threshold",
    "arithmetic": "add addcdiv clamp div_floor_rounding fmod logical_and nextafter pow remainder",
    "batch_norm": "nn_functional_batch_norm nn_functional_instance_norm",
    "copies": "masked_fill where clone item",
    "creation": "arange eye full_like linspace",
    "cross_entropy": "nn_functional_cross_entropy nn_functional_nll_loss",
    "functions": "ldexp nan_to_num polygamma_polygamma_n_1",
    "indexing": "gather index_select nn_functional_embedding take take_along_dim",
    "norms": "nn_functional_group_norm nn_functional_layer_norm nn_functional_rms_norm",
    "pointwise_losses": "nn_functional_binary_cross_entropy nn_functional_huber_loss nn_functional_mse_loss",
    "pooling": "nn_functional_adaptive_avg_pool2d nn_functional_avg_pool2d nn_functional_max_pool2d",
    "rearrange": "cat nn_functional_pad_reflect nn_functional_pad_constant select_scatter stack tril",
    "reductions": "amax all argmin count_nonzero linalg_vector_norm mean std_mean sum prod var",
    "scans": "cummax cumsum logcumsumexp",
    "scatter": "index_add index_copy index_put scatter_add scatter_reduce_amax scatter",
    "softmax": "log_softmax logsumexp masked_softmax softmax_with_dtype",
    "views": "as_strided diagonal expand flip permute repeat reshape roll unfold split view_as",
}
"""For each module of rules, operators of the database that reach it."""

GRADIENTS = {
    "norms": "nn_functional_layer_norm nn_functional_rms_norm nn_functional_group_norm",
    "losses": "nn_functional_cross_entropy nn_functional_binary_cross_entropy nn_functional_smooth_l1_loss",
    "rows": "softmax log_softmax cumsum prod var amax",
    "moved": "cat gather index_select nn_functional_embedding nn_functional_pad_constant tril unfold",
    "pointwise": "nn_functional_gelu nn_functional_silu atan2 clamp nn_functional_glu nn_functional_avg_pool2d",
}

IN_PLACE = "add cumsum index_copy masked_fill sigmoid tril"

CALLED = {
    "arithmetic": "div.Tensor_mode fmod.Tensor remainder.Tensor",  # of integers: they raise where the divisor is 0
    "copies": "_local_scalar_dense.default",
    "functions": "polygamma.default",
    "pointwise_losses": "binary_cross_entropy.default",  # it raises for what is no probability
    "pooling": "avg_pool2d.default",
    "scatter": "index_put.default index_add.default scatter.reduce scatter_add.default scatter_reduce.two",
    "views": "as_strided.default",
    "gradients of moved": "embedding_dense_backward.default index_add.default scatter_add.default",
    "gradients of pointwise": "avg_pool2d_backward.default empty_like.default",
}
"""What of these operators' graphs may be called rather than fused. Atomic additions give other sums in each run."""


def calls_of(names: str, form: str = "function") -> list[Call]:
    """Returns the first calls of operators, with each dtype that they take."""
    wanted = {case.name: case for case in cases(form=form)}
    unknown = set(names.split()) - set(wanted)
    assert not unknown, f"torch's database has no {unknown}"
    found: list[Call] = []
    for case in cases(tuple(CALLS) if form == "function" else (torch.float32,), form):
        if case.name in names.split():
            found += islice(case.calls(), CALLS[case.dtype])
    return found


def assert_agrees(found: Verdicts, called: str) -> None:
    """Fails unless every call is compiled and agrees with eager, fused but for the operators that are called."""
    failed = [f"{verdict.word}: ({verdict.call}) {verdict.seen}" for verdict in found.calls if verdict.word != PASSED]
    assert not failed, "\n".join(failed)
    assert set(found.called) <= {f"aten.{name}" for name in called.split()}
    assert found.kinds["fused"] + found.kinds["view"] > 0


@pytest.mark.parametrize("module", FUNCTIONS)
def test_operators(module: str) -> None:
    assert_agrees(judged(calls_of(FUNCTIONS[module]), Options(fallback="error")), CALLED.get(module, ""))


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients(kind: str) -> None:
    found = judged(calls_of(GRADIENTS[kind], "gradient"), Options(fallback="error"))
    assert_agrees(found, CALLED.get(f"gradients of {kind}", ""))


def test_methods_that_write_their_operand() -> None:
    calls = calls_of(IN_PLACE, "inplace")
    found = judged(calls, Options(fallback="error"))
    found.calls = [verdict for verdict in found.calls if verdict.word != REFUSED]  # operands too small for the result
    assert len(found.calls) > len(calls) // 2
    assert_agrees(found, "")


def test_every_module_of_rules_has_operators() -> None:
    modules = {module.name for module in pkgutil.iter_modules(rules.__path__)}
    assert modules - {"normalization", "positions", "registry", "rows"} == set(FUNCTIONS)  # these serve the others


def test_a_wrong_rule_is_found() -> None:
    wrong = Options(fallback="error", decompositions={torch.ops.aten.exp.default: lambda x: x.expm1()})
    words = {verdict.word for verdict in judged(calls_of("exp"), wrong).calls}
    assert FAILED in words


@pytest.mark.parametrize(
    ("found", "eager", "text"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), "NaN elsewhere"),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, torch.inf]), "infinite elsewhere"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "not equal"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), "relative error"),
        (torch.ones(2, 3), torch.ones(3, 2).t(), "strides"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float64"),
        (1, 1.0, "eager has 1.0"),
    ],
)
def test_differences_are_seen(found: object, eager: object, text: str) -> None:
    seen = difference([found], [eager], None)
    assert seen is not None
    assert text in seen
