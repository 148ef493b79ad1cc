"""FlexAttention with symbolic numbers of heads, which no kernel computes: its formulas vectorise the functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask

from fxwrap.fx_passes.vectorised_calls import VectorisedCalls

BATCH, ROWS, KEYS, WIDTH = 2, 21, 35, 8


def shifted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Leaves rows without keys."""
    return q - k >= h * 4 - 16


def block_mask(rows: int, keys: int) -> tuple[Any, ...]:
    """Returns a mask of blocks of so many rows and keys, all of which are visited."""
    counts = (1, 1, -(-ROWS // rows), -(-KEYS // keys))
    visited = torch.arange(counts[3], dtype=torch.int32).expand(counts).contiguous()
    number = torch.full(counts[:3], counts[3], dtype=torch.int32)
    sizes = (rows, keys)
    mask = BlockMask.from_kv_blocks(number, visited, BLOCK_SIZE=sizes, mask_mod=shifted, seq_lengths=(ROWS, KEYS))
    return mask.as_tuple()


def operands(heads: int, dynamic: tuple[int, ...]) -> list[Tensor]:
    sizes = [(BATCH, heads, length, WIDTH) for length in (ROWS, KEYS, KEYS)]
    tensors = [torch.randn(size).requires_grad_() for size in sizes]
    for item in tensors:
        for dim in dynamic:
            torch._dynamo.mark_dynamic(item, dim)
    return tensors


def formula(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, *captured: Any) -> Tensor:
    """Returns the output, which is 0 in rows without keys."""
    indices = [torch.arange(size) for size in (*q.shape[:3], k.shape[2])]
    at = indices[0][:, None, None, None], indices[1][:, None, None], indices[2][:, None], indices[3]
    scores = torch.where(shifted(*at), score_mod(*captured)(q @ k.mT * 0.25, *at), -math.inf)
    return scores.softmax(-1).nan_to_num() @ v


def test_numbers_as_indices_and_captured_sizes() -> None:
    """Forward and backward: an index is a number or a captured scalar, and a captured size scales scores."""

    def make(table: Tensor, size: int, column: Tensor) -> Any:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            return score * (size - 1) / size + table[h, 1] * (n - m) / table.shape[0] + table[0, column]

        return score_mod

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, *captured: Any) -> Any:
        return torch.ops.higher_order.flex_attention(q, k, v, make(*captured), mask, 0.25, {})[0]

    torch.compiler.reset()
    compiled = torch.compile(attention, backend="fxwrap", fullgraph=True)
    for heads in (3, 5):
        inputs, table = operands(heads, dynamic=(1,)), torch.randn(heads, 4).requires_grad_()
        torch._dynamo.mark_dynamic(table, 0)
        captured = table, heads + 3, torch.tensor(2)
        out = compiled(*inputs, block_mask(16, 16), *captured)
        weights = torch.randn_like(out)
        results = out, *torch.autograd.grad((out * weights).sum(), [*inputs, table])
        doubles = [item.detach().double().requires_grad_() for item in (*inputs, table)]
        expected = formula(*doubles[:3], make, doubles[3], *captured[1:])
        references = expected, *torch.autograd.grad((expected * weights).sum(), doubles)
        for result, reference in zip(results, references, strict=True):
            torch.testing.assert_close(result, reference.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "keys"), [(1 << 30, 16), pytest.param(16, 1 << 30, marks=pytest.mark.long)])
def test_blocks_beyond_the_sequences(rows: int, keys: int) -> None:
    """A row loop over blocks larger than symbolic lengths computes only as many rows and keys as there are."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
        return torch.ops.higher_order.flex_attention(q, k, v, lambda s, *_: s, mask, 0.25, {})[0]

    torch.compiler.reset()
    inputs = operands(3, dynamic=(1, 2))
    with torch.no_grad():
        compiled = torch.compile(attention, backend="fxwrap", fullgraph=True)
        out = compiled(*inputs, block_mask(rows, keys))
        torch.testing.assert_close(out, formula(*inputs, lambda: lambda s, *_: s), rtol=1e-4, atol=1e-4)


def test_promotion_of_symbolic_numbers() -> None:
    """Numbers that become tensors have the dtype to which torch promotes numbers."""

    def run(x: Tensor, table: Tensor) -> list[Tensor]:
        size = table.shape[0]
        functions = (
            lambda item: torch.ops.aten.mul.Tensor(item.half(), size),
            lambda item: torch.ops.aten.add.Tensor(item, size),
            lambda item: torch.ops.aten.mul.Tensor(item, size / 2),
        )
        with VectorisedCalls():
            return [torch.vmap(function)(x) for function in functions]

    inputs = torch.arange(3, dtype=torch.int32), torch.randn(7)
    graph = make_fx(run, tracing_mode="symbolic")(*inputs)
    for result, reference in zip(graph(*inputs), (inputs[0].half() * 7, inputs[0] + 7, inputs[0] * 3.5), strict=True):
        torch.testing.assert_close(result, reference)
        assert result.dtype is reference.dtype
