"""Masks of symbolic sizes that say nothing are dropped; others stay."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxwrap
from fxwrap.fx_passes.attention.masks import find_mask_rewrites
from fxwrap.options import Options
from tests.fx_passes.test_recognize_attention import ANY_SIZE


def _ones(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool)


def _zeros(rows: int, keys: int) -> Tensor:
    return torch.zeros(1, 1, rows, keys)


def _length(rows: int, keys: int) -> Tensor:
    return (torch.arange(keys) < keys)[None, :].expand(rows, keys)


def _triangle_beyond(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - 1)


def _triangle_below(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).triu(1 - rows)


def _padding(rows: int, keys: int) -> Tensor:
    """The additive mask of a model that got no padding."""
    return (1.0 - torch.ones(1, 1, rows, keys)) * torch.finfo(torch.float32).min


def _filled(rows: int, keys: int) -> Tensor:
    seen = torch.arange(keys)[None, :] >= 0
    return torch.zeros(rows, keys).masked_fill(~seen, -math.inf)


def _chosen(rows: int, keys: int) -> Tensor:
    seen = (torch.arange(rows)[:, None] <= rows) & (torch.arange(keys)[None, :] != keys)
    return torch.where(seen, 0.0, -math.inf)


EMPTY = (_ones, _zeros, _length, _triangle_beyond, _triangle_below, _padding, _filled, _chosen)


def _causal(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril()


def _without_last(rows: int, keys: int) -> Tensor:
    return (torch.arange(keys) < keys - 1)[None, :].expand(rows, keys)


def _almost_beyond(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - 2)


def _written(rows: int, keys: int) -> Tensor:
    mask = torch.ones(rows, keys, dtype=torch.bool)
    mask[:, 1] = False
    return mask


def _constant(rows: int, keys: int) -> Tensor:
    """It adds the same to each score, which a softmax does not see, but that is no mask."""
    return torch.ones(rows, keys)


MEANINGFUL = (_causal, _without_last, _almost_beyond, _written, _constant)


def _operands(rows: int, keys: int) -> list[Tensor]:
    tensors = [torch.randn(2, 3, length, 8) for length in (rows, keys, keys)]
    for item in tensors:
        torch._dynamo.mark_dynamic(item, 2)
    return tensors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", (*EMPTY, *MEANINGFUL), ids=lambda function: function.__name__)
def test_library_attention(mask: Callable[[int, int], Tensor]) -> None:
    """A call of the library's attention loses the mask, and stays right for other sizes."""
    rewrites: list[list[str]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = mask(query.shape[2], key.shape[2])
        return F.scaled_dot_product_attention(query, key, value, seen) @ query.new_ones(8, 2)

    def backend(graph_module: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        rewrites.append([str(item) for item in find_mask_rewrites(graph_module.graph, Options()).values()])
        return graph_module.forward

    torch.compile(attend, backend=backend, fullgraph=True)(*_operands(5, 7))
    assert rewrites == [["all_true"] if mask in EMPTY else []]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", (*EMPTY, _causal, _without_last), ids=lambda function: function.__name__)
def test_formulas(mask: Callable[[int, int], Tensor]) -> None:
    """The kernel of attention written as its formula reads and computes no such mask."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen, scores = mask(query.shape[2], key.shape[2]), query @ key.mT
        scores = scores.masked_fill(~seen, -math.inf) if seen.dtype is torch.bool else scores + seen
        return torch.softmax(scores, -1) @ value

    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    compiled = torch.compile(attend, backend="fxwrap", options={"devices": [ANY_SIZE], "passes": (keep,)})
    for rows, keys in ((5, 7), (9, 4)):
        inputs = _operands(rows, keys)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    (program,) = programs
    sources = [str(item.source) for item in program.kernels if "attention" in item.name]
    operators = re.findall(r"// aten\.(\w+)", "".join(sources))
    assert len(sources) == 1
    assert bool(operators) == (mask not in EMPTY)
