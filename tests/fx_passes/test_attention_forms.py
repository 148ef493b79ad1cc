"""Attention in the forms in which models write it: softmax by hand, products by `einsum` in any order of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.fx_passes.test_attention_backward import OPTIONS as TRAINING
from tests.fx_passes.test_attention_backward import _compiled, _launches, _step
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


def _image(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(batch, channel, position), as in convolutional networks: values are left operands."""
    query, key, value = [item[:, 0].mT for item in (query, key, value)]
    weights = torch.softmax(torch.bmm(query.permute(0, 2, 1), key) * 0.5, 2)
    return torch.bmm(value, weights.permute(0, 2, 1)).view(BATCH, WIDTH, 1, ROWS)


def _einsum_of_images(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = [item[:, 0].mT for item in (query, key, value)]
    weights = torch.softmax(torch.einsum("bci,bcj->bij", query, key), -1)
    return torch.einsum("bij,bcj->bci", weights, value)


FORMS: Mapping[str, Form] = {
    "maxima with positions": lambda q, k, v: _maxima(q @ k.mT * 0.5) @ v,
    "unsqueezed statistics": lambda q, k, v: _unsqueezed(q @ k.mT * 0.5) @ v,
    "detached maxima": lambda q, k, v: _detached(q @ k.mT * 0.5) @ v,
    "log-sum-exp": lambda q, k, v: _logsumexp(q @ k.mT * 0.5) @ v,
    "einsum": _einsum,
    "permuted twice": _permuted_twice,
    "softmax of columns": lambda q, k, v: v.mT @ torch.softmax(k @ q.mT * 0.5, -2),
    "transposed softmax of columns": lambda q, k, v: torch.softmax(k @ q.mT * 0.5, 2).transpose(-1, -2) @ v,
    "one row": lambda q, k, v: v.mT @ torch.softmax(q[:, :, :1] @ k.mT, -1).mT,
    "one key": lambda q, k, v: v[:, :, :1].mT @ torch.softmax(q @ k[:, :, :1].mT, -1).mT,
    "image": _image,
    "einsum of images": _einsum_of_images,
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


@pytest.mark.parametrize(
    "form", ["softmax of columns", "transposed softmax of columns", "permuted twice", "image", "einsum of images"]
)
def test_training_of_transposed_matrices(form: str) -> None:
    inputs = _operands()
    gradient = torch.randn_like(FORMS[form](*inputs))
    planned = check_graph(make_fx(_step(FORMS[form]))(gradient, *inputs), [gradient, *inputs], TRAINING)
    assert "flex_attention_grad_query_0" in planned.launches
    assert not planned.calls


def _dropped_image(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(torch.bmm(key, query.mT) * 0.5, 1)
    return torch.bmm(value.mT, torch.nn.functional.dropout(weights, 0.3)).view(BATCH, WIDTH, 3, 3)


def test_compiled_training_of_square_matrices() -> None:
    """Sizes do not tell which matrices are transposed."""
    inputs = [torch.randn(BATCH, 9, WIDTH) for _ in range(3)]
    gradient = torch.randn(BATCH, WIDTH, 3, 3)
    run, programs = _compiled(_dropped_image)
    results = []
    for function in (run, _dropped_image):
        torch.manual_seed(3)
        results.append(_step(function)(gradient, *inputs))
    for actual, eager in zip(*results, strict=True):
        assert (actual - eager).norm() <= 3e-6 * eager.norm()
    assert _launches(programs) == [1, 1]


def _positions(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT
    maxima, positions = scores.max(-1, keepdim=True)
    exponentials = torch.exp(scores - maxima)
    return exponentials / exponentials.sum(-1, keepdim=True) @ value, positions


def _of_columns(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    exponentials = torch.exp(scores - scores.amax(-2, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True) @ value


def _columns_of_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The sum of weights over queries is one, not that over keys."""
    return torch.softmax(query @ key.mT, -2) @ value


def _transposed_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A transposition of other matrices than those of rows and keys."""
    weights = torch.softmax(query[..., :4, :] @ key[..., :6, :].mT, -1)
    blocks = weights.reshape(BATCH, HEADS, 6, 4).mT.reshape(BATCH, HEADS, 6, 4).mT.reshape(BATCH, HEADS, 4, 6)
    return blocks @ value[..., :6, :]


def _of_others(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    return torch.exp(scores - torch.logsumexp(scores * 2, -1, keepdim=True)) @ value


@pytest.mark.parametrize("function", [_positions, _of_columns, _of_others, _columns_of_rows, _transposed_blocks])
def test_other_forms_stay(function: Callable[..., Tensor]) -> None:
    inputs = _operands()
    planned = check_graph(make_fx(function)(*inputs), inputs, OPTIONS)
    assert not any(name.startswith("flex_attention") for name in planned.launches)
