"""Attention whose log-sum-exp is read, too: sinks that scale the output, and attention that is merged from parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fxwrap
from tests.fx_passes.test_attention_backward import ANY_SIZE, OPTIONS, _compiled, _double, _launched, _launches, _step
from tests.fx_passes.test_recognize_attention import recognised
from tests.lowering.planned_programs import check_graph, compared_with_evaluator, plan, printed_launch
from tests.support.agreement import assert_as_exact

BATCH, HEADS, GROUP, WIDTH = 2, 4, 2, 8

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def _scores(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    return query @ key.repeat_interleave(GROUP, 1).mT * WIDTH**-0.5 + bias


def _weighted(scores: Tensor, value: Tensor) -> Tensor:
    return F.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value.repeat_interleave(GROUP, 1)


def _scaled(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    """As Granite's models do: a sink is a sigmoid that scales the output."""
    scores = _scores(query, key, bias)
    factor = (torch.logsumexp(scores, -1) - sinks.view(1, -1, 1)).float().sigmoid()
    return (_weighted(scores, value) * factor.unsqueeze(-1).to(value.dtype)).transpose(1, 2).contiguous()


def _shifted(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    """A sink is part of the log-sum-exp."""
    scores = _scores(query, key, bias)
    total = torch.logsumexp(scores, -1, keepdim=True)
    return _weighted(scores, value) * torch.exp(total - torch.logaddexp(total, sinks.view(-1, 1, 1)))


def _merged(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    """Two parts of the keys, each attended on its own."""
    parts = []
    for keys in (slice(0, 4), slice(4, None)):
        scores = _scores(query, key[:, :, keys], bias[..., keys])
        parts.append((_weighted(scores, value[:, :, keys]), torch.logsumexp(scores, -1, keepdim=True)))
    total = torch.logaddexp(parts[0][1], parts[1][1])
    first, second = [output * torch.exp(item - total) for output, item in parts]
    return first + second


def _operands(rows: int = 5, keys: int = 7, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns queries, keys, values, sinks, and a bias that hides all keys of a row."""
    sizes = [(BATCH, heads, length, WIDTH) for heads, length in ((HEADS, rows), (HEADS // GROUP, keys))]
    bias = torch.randn(BATCH, 1, rows, keys)
    bias[0, 0, 1] = torch.finfo(dtype).min
    bias[..., -1] = -math.inf
    tensors = [torch.randn(size) for size in (sizes[0], sizes[1], sizes[1], (HEADS,))]
    return [item.to(dtype) for item in (*tensors, bias)]


@pytest.mark.parametrize(("form", "kernels"), [(_scaled, 1), (_shifted, 1), (_merged, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels(form: Attention, kernels: int, dtype: torch.dtype) -> None:
    inputs = _operands(dtype=dtype)
    planned = plan(make_fx(form)(*inputs), inputs, OPTIONS)
    assert len(_launched(planned)) == kernels
    assert not planned.calls
    (result,) = planned.run([item.clone() for item in inputs])
    exact, eager = form(*_double(inputs)), form(*inputs)
    assert_as_exact(result, eager, exact, slack=1e-6)


@pytest.mark.parametrize("form", [_scaled, _shifted, _merged])
@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_training(form: Attention, emitter: str) -> None:
    """Gradients through the log-sum-exp are the kernel's, which its computation precedes.

    Eager's are those of weights of 1 where the log-sum-exp is rounded to the lowest number.
    """
    inputs = _operands()
    inputs[4][0, 0, 1] = 0.0
    run, programs = _compiled(form, emitter=emitter)
    trained = (0, 1, 2) if form is _merged else (0, 1, 2, 3)
    step = [_step(function, trained) for function in (run, form)]
    gradient = torch.randn(form(*inputs).shape)
    for actual, eager in zip(*[item(gradient, *inputs) for item in step], strict=True):
        assert (actual - eager).norm() <= 3e-6 * eager.norm()
    assert _launches(programs) == ([2, 2] if form is _merged else [1, 1])
    assert not any("bmm" in text.split("kernel @")[0] for text in programs)


def test_training_in_half_precision() -> None:
    """Errors of several inputs together: those of a sink's gradient, one number, may be near zero in eager mode."""
    step, planned, errors = _step(_scaled, (0, 1, 2, 3)), None, torch.zeros(2, 5, dtype=torch.float64)
    for seed in range(8):
        torch.manual_seed(seed)
        inputs = _operands(dtype=torch.bfloat16)
        inputs = [torch.randn_like(_scaled(*inputs)), *inputs]
        planned = planned or plan(make_fx(step)(*inputs), inputs, OPTIONS)
        exact = step(*_double(inputs))
        for side, results in enumerate((planned.run([item.clone() for item in inputs]), step(*inputs))):
            differences = [result.double() - item for result, item in zip(results, exact, strict=True)]
            errors[side] += torch.stack([item.norm() ** 2 for item in differences])
    assert planned is not None and "flex_attention_grad_query_0" in planned.launches
    assert (errors[0] <= errors[1]).all()


def _returned(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, bias)
    return _weighted(scores, value), torch.logsumexp(scores, -1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_printed_kernels(language: str) -> None:
    inputs = _operands()
    planned = check_graph(make_fx(_returned)(*inputs), inputs, OPTIONS)
    assert _launched(planned) == ["flex_attention_0"]
    planned.run([item.clone() for item in inputs], compared_with_evaluator(printed_launch([planned], language)))


class _Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        return _scaled(query, key, value, sinks, bias)


def test_symbolic_sizes() -> None:
    batch, rows = Dim("batch", min=2), Dim("rows", min=2)
    shapes = {"query": {0: batch, 2: rows}, "key": {0: batch}, "value": {0: batch}, "sinks": {},
              "bias": {0: batch, 2: rows}}  # fmt: skip
    compiled = fxwrap.compile_graph(
        export(_Attention(), tuple(_operands()), dynamic_shapes=shapes), options=fxwrap.Options(devices=(ANY_SIZE,))
    )
    assert recognised(compiled.coverage) == 1
    inputs = _operands(9)
    torch.testing.assert_close(compiled(*inputs), _scaled(*inputs))


# --- near misses ------------------------------------------------------------------------------------------------------


def _of_rows(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    scores = _scores(query, key, bias)
    return _weighted(scores, value) + torch.logsumexp(scores, -2)[..., :1, None]


def _of_other_scores(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    scores = _scores(query, key, bias)
    return _weighted(scores, value) * torch.logsumexp(scores * 2, -1, keepdim=True)


def _needed_before_values(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    scores = _scores(query, key, bias)
    return _weighted(scores, value * torch.logsumexp(scores, -1)[:, :1, :1, None])


def _noise(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    """Random numbers are drawn in the order of the calls."""
    scores = _scores(query, key, bias[..., :1])
    total = torch.logsumexp(scores, -1, keepdim=True)
    first = torch.rand_like(total)
    return _weighted(scores, torch.rand_like(value)) * total * first


@pytest.mark.parametrize("form", [_of_rows, _of_other_scores, _needed_before_values, _noise])
def test_near_misses(form: Attention) -> None:
    inputs = _operands()
    inputs[4] = torch.randn_like(inputs[4])
    planned = plan(make_fx(form)(*inputs), inputs, OPTIONS)
    assert not _launched(planned)
    torch.manual_seed(3)
    (result,) = planned.run([item.clone() for item in inputs])
    torch.manual_seed(3)
    torch.testing.assert_close(result, form(*inputs))
