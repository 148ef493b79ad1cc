"""FlexAttention over paged caches: torch's PagedAttention, whose page tables the kernel reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fxwrap
from fxwrap.compile.backend import make_backend

BATCH, HEADS, KEY_HEADS, WIDTH, PAGE, PAGES, LENGTH = 3, 6, 2, 8, 16, 24, 64
LENGTHS = torch.tensor([37, LENGTH, 5])
SLOPES = torch.linspace(0.1, 0.6, HEADS)


def paged_caches(key: Tensor, value: Tensor) -> tuple[PagedAttention, Tensor, Tensor]:
    """Returns caches whose sequences are in random pages; other pages have NaN."""
    device = key.device
    paged = PagedAttention(PAGES, PAGE, BATCH, device=str(device))
    paged.empty_pages = torch.randperm(PAGES).tolist()
    for count in (LENGTHS // 2 + 1, LENGTHS):  # sequences grow in turn
        for batch in torch.randperm(BATCH):
            paged.reserve(batch.to(device), count[batch].to(device))
    shape = (1, KEY_HEADS, PAGES * PAGE, WIDTH)
    caches = [torch.full(shape, math.nan, dtype=key.dtype, device=device) for _ in range(2)]
    pages = paged.page_table[paged.page_table >= 0][:, None] * PAGE + torch.arange(PAGE, device=device)
    for cache in caches:
        cache[:, :, pages.flatten()] = 0
    for batch, length in enumerate(LENGTHS.tolist()):
        one, positions = slice(batch, batch + 1), torch.arange(length, device=device)[None]
        paged.assign(
            torch.tensor([batch], device=device), positions, key[one, :, :length], value[one, :, :length], *caches
        )
    return paged, *caches


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_a_decoding_step_is_one_kernel(language: str) -> None:
    """The kernel visits the pages of a sequence only; the lists of query blocks are not computed."""
    result, expected, compiled = decoding_step(fxwrap.Options(cpu_kernels=language), "cpu", torch.float32)
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=2e-6)
    names = [kernel.name for kernel in compiled.program.kernels]
    assert names[1:] == ["flex_attention_0"]  # after the one that reads the page table
    assert all(item.kind != "call" for item in compiled.coverage)


@pytest.mark.gpu
def test_a_decoding_step_on_a_gpu() -> None:
    result, expected, compiled = decoding_step(fxwrap.Options(), "cuda", torch.bfloat16)
    assert float((result.double() - expected).norm() / expected.norm()) < 8e-3
    assert "flex_attention_0" in [kernel.name for kernel in compiled.program.kernels]


def decoding_step(options: fxwrap.Options, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, fxwrap.Compiled]:
    """Returns the result of a step over paged caches with grouped heads and a linear bias, and that of float64."""
    last, slopes = (LENGTHS - 1).to(device), SLOPES.to(device)
    key, value = [torch.randn(BATCH, KEY_HEADS, LENGTH, WIDTH, dtype=dtype, device=device) for _ in range(2)]
    query = torch.randn(BATCH, HEADS, 1, WIDTH, dtype=dtype, device=device)
    paged, keys, values = paged_caches(key, value)
    logical = create_block_mask(
        lambda b, h, q, k: k <= last[b] + q, BATCH, None, 1, LENGTH, device=device, BLOCK_SIZE=(1, PAGE)
    )

    def step(query: Tensor, keys: Tensor, values: Tensor, logical: BlockMask, batches: Tensor, lengths: Tensor) -> Any:
        mask = paged.convert_logical_block_mask(logical, batches, lengths)
        score_mod = paged.get_score_mod(lambda s, b, h, q, k: s + slopes[h] * (k - last[b]), lengths)
        return flex_attention(query, keys, values, score_mod, mask, enable_gqa=True)

    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    torch.compiler.reset()
    inputs = query, keys, values, logical, torch.arange(BATCH, device=device), LENGTHS.to(device)
    result = torch.compile(step, backend=make_backend(options, compile_with), fullgraph=True)(*inputs)
    key, value = [item.repeat_interleave(HEADS // KEY_HEADS, 1).double() for item in (key, value)]
    distances = torch.arange(LENGTH, device=device) - last[:, None, None, None]
    scores = query.double() @ key.mT / math.sqrt(WIDTH) + slopes[:, None, None] * distances
    (compiled,) = compiles
    return result, scores.masked_fill(distances > 0, -math.inf).softmax(-1) @ value, compiled
