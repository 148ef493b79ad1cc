"""Attention in training whose bias or mask needs a gradient, or whose key heads are shared by groups of queries."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from tests.fx_passes.test_attention_backward import (
    KERNELS,
    OPTIONS,
    _compiled,
    _double,
    _gradient_and,
    _launched,
    _launches,
    _step,
    check_model,
)
from tests.fx_passes.test_recognize_attention import BATCH, _deberta, _swin, _t5
from tests.lowering.planned_programs import check_graph
from tests.support.agreement import assert_as_exact

HEADS, ROWS, KEYS, WIDTH, GROUP = 6, 9, 7, 4, 3


def _operands(*bias: int, key_heads: int = HEADS) -> list[Tensor]:
    random = torch.Generator().manual_seed(len(bias))
    sizes = [(BATCH, HEADS, ROWS, WIDTH), *[(BATCH, key_heads, KEYS, WIDTH)] * 2]
    return [torch.randn(size, generator=random) for size in (*sizes, *([bias] if bias else []))]


def _biased(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT / 2 + bias, -1) @ value


def _floored(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a maximum selects the gradient, or a half of it: it is read twice."""
    scores = torch.maximum(query @ key.mT / 2 + bias, torch.tensor(-0.25))
    return torch.softmax(scores, -1) @ value


def _library(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """A call with a mask that needs a gradient: torch computes its formula."""
    return scaled_dot_product_attention(query, key, value, attn_mask=bias)


def _gathered(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    """Disentangled attention: products of queries and relative positions are gathered; `gather` adds their gradient."""
    distance = torch.arange(ROWS)[:, None] - torch.arange(KEYS) + KEYS - 1
    bias = torch.gather(query @ table.mT, -1, distance.expand(BATCH, HEADS, -1, -1))
    return torch.softmax((query @ key.mT + bias) / 3, -1) @ value


def _tabled(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    """A bias by distance and head, whose keys are not neighbours in memory."""
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2]) + key.shape[2] - 1
    return torch.softmax(query @ key.mT + table[distance].permute(2, 0, 1), -1) @ value


def _expanded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = [item[:, :, None].expand(-1, -1, GROUP, -1, -1).flatten(1, 2) for item in (key, value)]
    return torch.softmax(query @ key.mT / 2, -1) @ value


def _repeated(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Other layouts, and a bias of query heads."""
    key, value = [item.transpose(2, 3).contiguous().mT.repeat_interleave(GROUP, 1) for item in (key, value)]
    return (torch.softmax(query @ key.transpose(-1, -2) + bias, -1) @ value).transpose(1, 2)


def _check(function: Callable[..., Tensor], operands: list[Tensor], emitter: str = "python") -> list[str]:
    """Compares a traced step with float64 and eager, and a compiled one; returns the programs of the latter."""
    inputs, count = _gradient_and(operands, function), len(operands)
    step = _step(function, range(count))
    planned = check_graph(make_fx(step)(*inputs), inputs, OPTIONS)
    assert sorted(set(_launched(planned))) == sorted(KERNELS)
    exact, eager = step(*_double(inputs)), step(*inputs)
    run, programs = _compiled(function, emitter=emitter)
    for results in (planned.run([item.clone() for item in inputs]), _step(run, range(count))(*inputs)):
        for actual, plain, reference in zip(results, eager, exact, strict=True):
            assert_as_exact(actual, plain, reference, slack=2e-7)
    assert _launches(programs) == [1, 1]
    return programs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "operands", "emitter"),
    [
        (_biased, _operands(HEADS, ROWS, KEYS), "cpp"),
        (_floored, _operands(HEADS, ROWS, KEYS), "interpreter"),
        (_biased, _operands(BATCH, HEADS, ROWS, KEYS), "fx"),
        (_biased, _operands(BATCH, 1, 1, KEYS), "interpreter"),
        (_library, _operands(BATCH, 1, ROWS, KEYS), "python"),
        (_gathered, _operands(BATCH, HEADS, ROWS + KEYS, WIDTH), "interpreter"),
        (_tabled, _operands(ROWS + KEYS, HEADS), "interpreter"),
    ],
)
def test_bias_gradients(function: Callable[..., Tensor], operands: list[Tensor], emitter: str) -> None:
    """A kernel stores the gradient of each score once, without zeros before and without atomic additions."""
    *_, backward = _check(function, operands, emitter)
    assert "@zeros" not in backward
    assert "add_atomically" not in backward
    if function is not _gathered:
        assert "bmm" not in backward.split("kernel @")[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "operands"), [(_expanded, _operands(key_heads=2)), (_repeated, _operands(HEADS, 1, KEYS, key_heads=2))]
)
def test_grouped_keys(function: Callable[..., Tensor], operands: list[Tensor]) -> None:
    """The kernel sums gradients over the query heads of a group: nothing has the repeated keys' size."""
    programs = _check(function, operands)
    for text in programs:
        assert not re.search(rf"\[{BATCH}, {HEADS}, {KEYS}, {WIDTH}\]|\[{BATCH * HEADS}, {KEYS}, {WIDTH}\]", text)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [_biased, _tabled])
def test_symbolic_lengths(function: Callable[..., Tensor]) -> None:
    run, programs = _compiled(function, emitter="interpreter")
    for batch, rows, keys in ((2, 9, 7), (3, 5, 8)):
        sizes = [(batch, HEADS, rows, WIDTH), *[(batch, HEADS, keys, WIDTH)] * 2]
        bias = (HEADS, rows, keys) if function is _biased else (64, HEADS)
        inputs = [torch.randn(size).requires_grad_() for size in (*sizes, bias)]
        for item in inputs[:3]:
            torch._dynamo.mark_dynamic(item, 0)
            torch._dynamo.mark_dynamic(item, 2)
        if function is _biased:
            torch._dynamo.mark_dynamic(inputs[3], 1)
            torch._dynamo.mark_dynamic(inputs[3], 2)
        output, expected = run(*inputs), function(*inputs)
        gradient = torch.randn(output.shape)
        torch.testing.assert_close(output, expected)
        results, references = [torch.autograd.grad(item, inputs, gradient) for item in (output, expected)]
        torch.testing.assert_close(results, references, rtol=1e-4, atol=1e-5)
    assert _launches(programs) == [1, 1]


def test_a_bias_of_two_layers() -> None:
    """The gradients of both layers' scores are added before they reach a matmul of queries and keys."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        bias = bias.expand(BATCH, -1, -1, -1)
        attended = torch.softmax(query @ key.mT / 2 + bias, -1) @ value
        return torch.softmax(attended @ key.mT / 2 + bias, -1) @ value

    inputs = _gradient_and(_operands(HEADS, ROWS, KEYS), attend)
    planned = check_graph(make_fx(_step(attend, range(4)))(*inputs), inputs, OPTIONS)
    assert len([name for name in _launched(planned) if name.startswith("flex_attention_grad_query")]) == 2


def test_repeated_keys_that_are_read_again() -> None:
    """Where something else reads the repeated keys, kernels compute gradients of these."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key = key[:, :, None].expand(-1, -1, GROUP, -1, -1).flatten(1, 2)
        value = value[:, :, None].expand(-1, -1, GROUP, -1, -1).flatten(1, 2)
        return torch.softmax(query @ key.mT / 2, -1) @ value + value.square().sum(2, keepdim=True)

    _check(attend, _operands(key_heads=2))


@pytest.mark.long  # the functions above have the same formulas
@pytest.mark.parametrize("make_model", [_t5, _swin, _deberta], ids=lambda function: function.__name__.strip("_"))
def test_models(make_model: Callable[[], tuple[nn.Module, dict[str, Tensor], int]]) -> None:
    """Relative positions, a table of windows, and disentangled scores are trained."""
    torch.manual_seed(0)
    model, inputs, count = make_model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    check_model(model, inputs, count)
