"""Attention whose weights are multiplied by factors after the softmax, or replaced by zeros where a mask says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.fx_passes.test_attention_backward import KERNELS, _launched, _step
from tests.fx_passes.test_attention_backward import OPTIONS as TRAINING
from tests.fx_passes.test_recognize_attention import OPTIONS
from tests.lowering.planned_programs import check_graph, compared_with_evaluator, plan, printed_launch

BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 3, 5, 7, 4

Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _weights(query: Tensor, key: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT * 0.5, -1)


def _filled(number: float) -> Form:
    """As speech models write it (ESPnet, NeMo): padding has no weight, also in rows that have nothing else."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
        scores = (query @ key.mT * 0.5).masked_fill(mask, number)
        return torch.softmax(scores, -1).masked_fill(mask, 0.0) @ value

    return attend


def _relative(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    """With a bias that is another matmul, whose rows are shifted."""
    bias = torch.nn.functional.pad(query @ factor[0, 0, :WIDTH], (1, 0))[..., 1:]
    scores = (query @ key.mT + bias).masked_fill(mask, -1e4)
    return torch.softmax(scores, -1).masked_fill(mask, 0.0) @ value


FORMS: Mapping[str, Form] = {
    "lowest": _filled(torch.finfo(torch.bfloat16).min), "large": _filled(-1e4), "relative": _relative,
    "heads": lambda q, k, v, m, f: _weights(q, k) * f[:, :1, :1] @ v,
    "matrix": lambda q, k, v, m, f: (f * _weights(q, k)) @ v,
    "quotient": lambda q, k, v, m, f: (_weights(q, k) / (f.abs() + 1) * 0.75) @ v,
    "dropped": lambda q, k, v, m, f: (_weights(q, k) * f).masked_fill(m, 0) @ v,
}  # fmt: skip
UNTRAINED: Mapping[str, Form] = {
    "infinity": _filled(-math.inf),
    "where": lambda q, k, v, m, f: torch.where(m, 0.0, _weights(q, k)) @ v,
    "zeros": lambda q, k, v, m, f: torch.where(m, _weights(q, k), torch.zeros((), dtype=q.dtype)) @ v,
}


def _operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns queries, keys, values, a mask that hides all keys of one batch, and factors."""
    sizes = [(BATCH, HEADS, length, WIDTH) for length in (ROWS, KEYS, KEYS)]
    mask = torch.rand(BATCH, 1, 1, KEYS) < 0.4
    mask[0, ..., 2], mask[1] = False, True
    return [*[torch.randn(size).to(dtype) for size in sizes], mask, torch.randn(1, HEADS, ROWS, KEYS).to(dtype)]


@pytest.mark.parametrize("form", {**FORMS, **UNTRAINED})
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel(form: str, dtype: torch.dtype) -> None:
    function, inputs = {**FORMS, **UNTRAINED}[form], _operands(dtype)
    planned = plan(make_fx(function)(*inputs), inputs, OPTIONS)
    assert _launched(planned) == ["flex_attention_0"]
    (result,) = planned.run([item.clone() for item in inputs])
    exact = function(*[item.double() if item.is_floating_point() else item for item in inputs])
    errors = [float((item.double() - exact).norm()) for item in (result, function(*inputs))]
    assert errors[0] <= 1.2 * errors[1] + 1e-6 * float(exact.norm())


@pytest.mark.parametrize("form", FORMS)
def test_training(form: str) -> None:
    inputs = _operands()
    inputs = [torch.randn_like(FORMS[form](*inputs)), *inputs]
    step = _step(FORMS[form])
    planned = check_graph(make_fx(step)(*inputs), inputs, TRAINING)
    assert sorted(set(_launched(planned))) == sorted(KERNELS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_printed_kernels(language: str) -> None:
    inputs = _operands()
    planned = [plan(make_fx(FORMS[form])(*inputs), inputs, OPTIONS) for form in ("lowest", "matrix")]
    compared = compared_with_evaluator(printed_launch(planned, language))
    for item in planned:
        item.run([item.clone() for item in inputs], compared)


def _of_infinite_bias(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    """Weights of a row whose bias is minus infinity are NaN where the mask is false."""
    scores = (query @ key.mT + factor).masked_fill(mask, -math.inf)
    return torch.softmax(scores, -1).masked_fill(mask, 0.0) @ value


def _of_other_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    scores = (query @ key.mT).masked_fill(mask, -math.inf)
    return torch.softmax(scores, -1).masked_fill(factor > 0, 0.0) @ value


def _added(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    return (_weights(query, key) + factor) @ value


def _filled_with_ones(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    return _weights(query, key).masked_fill(mask, 1.0) @ value


def _squared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    weights = _weights(query, key)
    return (weights * weights) @ value


def _divided(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    return (factor / _weights(query, key)) @ value


@pytest.mark.parametrize(
    "function", [_of_infinite_bias, _of_other_mask, _added, _filled_with_ones, _squared, _divided]
)  # fmt: skip
def test_other_forms_stay(function: Form) -> None:
    inputs = _operands()
    planned = plan(make_fx(function)(*inputs), inputs, OPTIONS)
    assert not _launched(planned)
    torch.testing.assert_close(planned.run([item.clone() for item in inputs])[0], function(*inputs), equal_nan=True)


@pytest.mark.parametrize("form", UNTRAINED)
def test_training_of_other_forms(form: str) -> None:
    """They are right, and stay: a kernel's backward would multiply weights that are NaN by zero."""
    inputs = _operands()
    inputs = [torch.randn_like(UNTRAINED[form](*inputs)), *inputs]
    step = _step(UNTRAINED[form])
    planned = plan(make_fx(step)(*inputs), inputs, TRAINING)
    assert not _launched(planned)
    torch.testing.assert_close(planned.run([item.clone() for item in inputs]), [*step(*inputs)], equal_nan=True)
