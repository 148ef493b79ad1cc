"""Attention in the forms in which models write it: softmax by hand, products by `einsum` in any order of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.fx_passes.test_attention_backward import OPTIONS as TRAINING
from tests.fx_passes.test_attention_backward import _step
from tests.fx_passes.test_recognize_attention import OPTIONS
from tests.lowering.planned_programs import check_graph

BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 3, 5, 7, 4

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def _maxima(scores: Tensor) -> Tensor:
    exponentials = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return exponentials / exponentials.sum(-1, keepdim=True)


def _unsqueezed(scores: Tensor) -> Tensor:
    exponentials = (scores - scores.amax(-1).unsqueeze(-1)).exp()
    return exponentials / exponentials.sum(-1)[..., None]


def _detached(scores: Tensor) -> Tensor:
    exponentials = torch.exp(scores - scores.max(-1)[0].detach().unsqueeze(-1))
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def _logsumexp(scores: Tensor) -> Tensor:
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))


def _einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(batch, position, head, width), as it stands in models that were ported from JAX."""
    query, key, value = [item.transpose(1, 2) for item in (query, key, value)]
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", query, key) * 0.5, -1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def _permuted_twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.permute(2, 3, 0, 1).permute(2, 3, 1, 0), -1)
    return weights.permute(3, 2, 1, 0).transpose(0, 3).transpose(1, 2) @ value


FORMS: Mapping[str, Form] = {
    "maxima with positions": lambda q, k, v: _maxima(q @ k.mT * 0.5) @ v,
    "unsqueezed statistics": lambda q, k, v: _unsqueezed(q @ k.mT * 0.5) @ v,
    "detached maxima": lambda q, k, v: _detached(q @ k.mT * 0.5) @ v,
    "log-sum-exp": lambda q, k, v: _logsumexp(q @ k.mT * 0.5) @ v,
    "einsum": _einsum,
    "permuted twice": _permuted_twice,
}


def _operands() -> list[Tensor]:
    return [torch.randn(BATCH, HEADS, length, WIDTH) for length in (ROWS, KEYS, KEYS)]


@pytest.mark.parametrize("form", FORMS)
def test_one_kernel(form: str) -> None:
    inputs = _operands()
    planned = check_graph(make_fx(FORMS[form])(*inputs), inputs, OPTIONS)
    assert planned.launches == ["flex_attention_0"]
    assert not planned.calls


def test_training_with_einsum() -> None:
    inputs = _operands()
    gradient = torch.randn(BATCH, ROWS, HEADS, WIDTH)
    graph = make_fx(_step(_einsum))(gradient, *inputs)
    planned = check_graph(graph, [gradient, *inputs], TRAINING)
    assert "flex_attention_grad_query_0" in planned.launches
    assert not planned.calls


def _positions(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT
    maxima, positions = scores.max(-1, keepdim=True)
    exponentials = torch.exp(scores - maxima)
    return exponentials / exponentials.sum(-1, keepdim=True) @ value, positions


def _of_columns(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    exponentials = torch.exp(scores - scores.amax(-2, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True) @ value


def _of_others(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    return torch.exp(scores - torch.logsumexp(scores * 2, -1, keepdim=True)) @ value


@pytest.mark.parametrize("function", [_positions, _of_columns, _of_others])
def test_other_forms_stay(function: Callable[..., Tensor]) -> None:
    inputs = _operands()
    planned = check_graph(make_fx(function)(*inputs), inputs, OPTIONS)
    assert not any(name.startswith("flex_attention") for name in planned.launches)
