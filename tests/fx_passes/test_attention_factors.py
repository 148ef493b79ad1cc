"""Attention whose weights are multiplied by factors after the softmax, or replaced by zeros where a mask says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.fx_passes import prepare_graph
from fxwrap.printers.triton import print_triton
from tests.fx_passes.test_attention_backward import KERNELS, _launched, _step
from tests.fx_passes.test_attention_backward import OPTIONS as TRAINING
from tests.fx_passes.test_recognize_attention import OPTIONS
from tests.lowering.planned_programs import check_graph, compared_with_evaluator, plan, printed_launch
from tests.printers.test_triton_printer_compile import compiled as compiled_for_gpu
from tests.support.agreement import assert_as_exact

BATCH, HEADS, WIDTH = 2, 3, 4

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
    "booleans": lambda q, k, v, m, f: (m * _weights(q, k)) @ v,
    "infinity": _filled(-math.inf),
    "where": lambda q, k, v, m, f: torch.where(m, 0.0, _weights(q, k)) @ v,
    "zeros": lambda q, k, v, m, f: torch.where(m, _weights(q, k), torch.zeros((), dtype=q.dtype)) @ v,
}  # fmt: skip


def _operands(dtype: torch.dtype = torch.float32, rows: int = 5, keys: int = 7, width: int = WIDTH) -> list[Tensor]:
    """Returns queries, keys, values, a mask that hides all keys of one batch, and factors."""
    sizes = [(BATCH, HEADS, length, width) for length in (rows, keys, keys)]
    mask = torch.rand(BATCH, 1, 1, keys) < 0.4
    mask[0, ..., 2], mask[1] = False, True
    return [*[torch.randn(size).to(dtype) for size in sizes], mask, torch.randn(1, HEADS, rows, keys).to(dtype)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel(form: str, dtype: torch.dtype) -> None:
    function, inputs = FORMS[form], _operands(dtype)
    planned = plan(make_fx(function)(*inputs), inputs, OPTIONS)
    assert _launched(planned) == ["flex_attention_0"]
    (result,) = planned.run([item.clone() for item in inputs])
    exact = function(*[item.double() if item.is_floating_point() else item for item in inputs])
    assert_as_exact(result, function(*inputs), exact, slack=1e-6)


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


def _other_factor(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """A backward that multiplies the gradient of the weights by other numbers than the forward."""
    weights = _weights(query, key)
    grad = torch.ops.aten._softmax_backward_data((gradient @ value.mT) * factor.exp(), weights, -1, weights.dtype)
    return (weights * factor) @ value, grad @ key


def test_other_backwards_stay() -> None:
    query, key, value, _, factor = _operands()
    inputs = [torch.randn_like(query), query, key, value, factor]
    planned = plan(make_fx(_other_factor)(*inputs), inputs, TRAINING)
    assert not _launched(planned)
    torch.testing.assert_close(planned.run([item.clone() for item in inputs]), [*_other_factor(*inputs)])


@pytest.mark.parametrize("form", ["large", "matrix"])
def test_kernels_compile_for_gpus(form: str) -> None:
    inputs = _operands(torch.bfloat16, rows=64, keys=64, width=16)
    step, inputs = _step(FORMS[form]), [torch.randn_like(inputs[0]), *inputs]
    planned = plan(make_fx(step)(*inputs), inputs, TRAINING.replace(cpu_kernels="triton"))
    kernels = {kernel.name: kernel for kernel in planned.program.kernels}
    for name in ("flex_attention_0", "flex_attention_grad_query_0", "flex_attention_grad_key_value_0"):
        assert "tt.dot" in compiled_for_gpu(print_triton(kernels[name].loop_ir)).asm["ttir"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "rows", "is_trained"),
    [("large", 512, False), ("matrix", 1, False), ("infinity", 512, True), ("matrix", 512, True)],
)
def test_on_a_gpu(form: str, rows: int, is_trained: bool) -> None:
    """In a kernel of whole rows, one that is split over keys, and with a backward."""
    inputs = [item.cuda() for item in _operands(torch.bfloat16, rows=rows, keys=512, width=64)]
    function = FORMS[form]
    if is_trained:
        inputs, function = [torch.randn_like(inputs[0]), *inputs], _step(FORMS[form])
    torch.compiler.reset()
    results = torch.compile(function, backend="fxwrap", fullgraph=not is_trained)(*inputs)
    doubles = [item.double() if item.is_floating_point() else item for item in inputs]
    pairs = zip(results, function(*doubles), strict=True) if is_trained else [(results, function(*doubles))]
    for actual, expected in pairs:
        assert (actual.double() - expected).norm() <= 1e-2 * expected.norm()


SCALED: Mapping[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "product": (lambda score: score * 0.3, 0.3), "quotient": (lambda score: score / 4, 0.25),
    "twice": (lambda score: (score * 0.5).float() * 0.6, 0.3),
    "clamped": (lambda score: (score * 0.3).clamp(-1, 1), 0.3),
    "masked": (lambda score: (score * 0.3).masked_fill(torch.arange(7) > 4, -1e9) * 0.5, 0.3),
    "plain": (lambda score: score, 1.0), "clamped before": (lambda score: score.clamp(-1, 1) * 0.3, 1.0),
    "shifted": (lambda score: (score + 1) * 0.3, 1.0),
}  # fmt: skip
"""Functions of scores, with the scale that kernels multiply sums of gradients by, instead of each score's gradient."""


@pytest.mark.parametrize("form", SCALED)
def test_scales_of_gradients(form: str) -> None:
    """The backward's scale is the kernel's where it multiplies the gradient last, and the scores first."""
    modify, scale = SCALED[form]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(modify(query @ key.mT), -1).to(value.dtype) @ value

    operands = [torch.randn(BATCH, HEADS, size, WIDTH) for size in (5, 7, 7)]
    inputs, step = [torch.randn(BATCH, HEADS, 5, WIDTH), *operands], _step(attend)
    graph = make_fx(step)(*inputs)
    prepared = prepare_graph(graph, inputs, TRAINING)
    (backward,) = [node for node in prepared.nodes if "flex_attention_backward" in str(node.target)]
    assert backward.args[10] == pytest.approx(scale)
    results = check_graph(graph, inputs, TRAINING).run([item.clone() for item in inputs])
    for result, exact in zip(results, step(*[item.double() for item in inputs]), strict=True):
        assert (result.double() - exact).norm() <= 1e-5 * exact.norm()
