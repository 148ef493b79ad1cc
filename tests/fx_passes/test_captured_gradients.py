"""Gradients of tensors that FlexAttention's `score_mod` captures, in the kernels of its backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxwrap
from fxwrap.compile.backend import make_backend
from fxwrap.lines import ExternCall, Launch
from fxwrap.lowering import NodeCoverage

BATCH, HEADS, KEY_HEADS, ROWS, KEYS, WIDTH = 2, 3, 1, 21, 35, 8
Score = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Some numbers saturate the softmax of wide heads, whose gradient then has a large relative error."""
    torch.manual_seed(0)


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes).to(dtype).requires_grad_()


def shifted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Leaves rows without keys, and whole blocks."""
    return q - k >= h * 4 - 16


def operands(width: int = WIDTH) -> list[Tensor]:
    sizes = (BATCH, HEADS, ROWS, width), (BATCH, KEY_HEADS, KEYS, width), (BATCH, KEY_HEADS, KEYS, width)
    return [torch.randn(size) for size in sizes]


def formula(q: Tensor, k: Tensor, v: Tensor, score_mod: Score, mask_mod: Score | None) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of attention in the operands' dtype; the output is 0 in rows without keys."""
    k, v = [item.repeat_interleave(q.shape[1] // k.shape[1], 1) for item in (k, v)]
    b, h, m, n = [torch.arange(size) for size in (*q.shape[:3], k.shape[2])]
    indices = b[:, None, None, None], h[:, None, None], m[:, None], n
    scores = score_mod(q @ k.mT * 0.25, *indices)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*indices), scores, -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - torch.where(total == -math.inf, 0.0, total)) @ v, total.squeeze(-1)


def check(
    make_score: Callable[..., Score], captured: Sequence[Tensor], *, mask_mod: Score | None = None,
    trains_operands: bool = False, width: int = WIDTH, **options: Any,
) -> tuple[list[str], list[NodeCoverage]]:  # fmt: skip
    """Compares gradients with those of the formula in float64; returns kernels and coverage of the backward.

    `make_score` returns the `score_mod` of captured tensors.
    """
    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    inputs = [item.requires_grad_(trains_operands) for item in operands(width)]
    leaves = [*(inputs if trains_operands else []), *captured]
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, None, HEADS, ROWS, KEYS, device="cpu", BLOCK_SIZE=16).as_tuple()
    score_mod = make_score(*captured)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if mask is None:
            return flex_attention(q, k, v, score_mod, scale=0.25, enable_gqa=True)
        return torch.ops.higher_order.flex_attention(q, k, v, score_mod, mask, 0.25, {})[0]

    torch.compiler.reset()
    backend = make_backend(fxwrap.Options(**options), compile_with)
    out = torch.compile(attention, backend=backend, fullgraph=True)(*inputs, mask)
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weights).sum(), leaves)
    doubles = [item.detach().double().requires_grad_() for item in leaves]
    references = dict(zip(leaves, doubles, strict=True))
    expected, _ = formula(
        *[references.get(item, item.double()) for item in inputs], make_score(*[references[item] for item in captured]),
        mask_mod,
    )  # fmt: skip
    for result, reference in zip(gradients, torch.autograd.grad((expected * weights).sum(), doubles), strict=True):
        assert result.dtype is leaves[0].dtype or result.dtype is torch.bfloat16
        error = (result.double() - reference).norm() / reference.norm()
        assert error < (1e-2 if result.dtype is torch.bfloat16 else 2e-5), (result.shape, error)
    program = compiles[-1]
    return [kernel.name for kernel in program.program.kernels], list(program.coverage)


def biased(slopes: Tensor, relative: Tensor, cap: Tensor, table: Tensor, keys: Tensor) -> Score:
    """Tensors by head, distance, head and row, and key; a number; two reads of one tensor, one below zero."""
    groups = torch.arange(KEYS) // 7

    def score_mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        capped = torch.tanh(score * slopes[h] / cap) * cap
        return capped + relative[m - n + KEYS] + relative[groups[n] - 9] + (table.exp() * 2)[h, groups[n], 0] + keys[n]

    return score_mod


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_kernels(language: str) -> None:
    """One kernel computes the gradient of queries and those of all captured tensors."""
    captured = [leaf(HEADS), leaf(ROWS + KEYS), leaf(), leaf(HEADS, 8, 1, dtype=torch.bfloat16), leaf(KEYS)]
    kernels, coverage = check(biased, captured, mask_mod=shifted, trains_operands=True, cpu_kernels=language)
    assert {"flex_attention_grad_query_0", "flex_attention_grad_key_value_0"} <= set(kernels)
    (item,) = [item for item in coverage if item.node == "flex_attention_backward"]
    assert (item.kind, item.reason) == ("fused", "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_operands_without_gradients(language: str) -> None:
    """A kernel with sums over scores alone, and without masks."""

    def make(bias: Tensor) -> Score:
        return lambda score, b, h, m, n: score + bias[h, n - m + ROWS]

    kernels, _ = check(make, [leaf(HEADS, ROWS + KEYS)], cpu_kernels=language)
    assert "flex_attention_grad_captured_0" in kernels
    assert not any("grad_query" in name or "grad_key" in name for name in kernels)


def test_calls_without_a_block_mask_compute_no_lists_of_blocks() -> None:
    """torch computes those of query blocks for the backward, with a sort of one element."""
    programs: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> fxwrap.Compiled:
        programs.append(fxwrap.compile_graph(*arguments, **keywords))
        return programs[-1]

    slopes, inputs = leaf(HEADS), operands()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, m, n: s + slopes[h] * (n - m), enable_gqa=True)

    torch.compiler.reset()
    out = torch.compile(attention, backend=make_backend(fxwrap.Options(), compile_with), fullgraph=True)(*inputs)
    torch.autograd.grad(out.sum(), slopes)
    forward, backward = [list(item.program.lines()) for item in programs]
    assert [line.kernel for line in forward if isinstance(line, Launch)] == ["flex_attention_0"]
    assert not [line.target for line in (*forward, *backward) if isinstance(line, ExternCall)]


def test_sums_of_rows() -> None:
    """ALiBi's slopes: numbers of one element for all keys are summed before they are added to memory."""

    def make(slopes: Tensor) -> Score:
        return lambda score, b, h, m, n: score + slopes[h] * (n - m)

    kernels, _ = check(make, [leaf(HEADS)], mask_mod=shifted)
    assert "flex_attention_grad_captured_0" in kernels


@pytest.fixture
def deterministic_algorithms() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("masked", [False, True])
def test_each_score_has_its_own_element(masked: bool, deterministic_algorithms: None) -> None:
    """No atomic additions, which deterministic algorithms forbid; zeros before where blocks are not visited."""

    def make(bias: Tensor, half: Tensor) -> Score:
        return lambda score, b, h, m, n: score + bias[b, h, m, n] + half[h, b, n, m]

    captured = [leaf(BATCH, HEADS, ROWS, KEYS), leaf(HEADS, BATCH, KEYS, ROWS, dtype=torch.bfloat16)]
    kernels, _ = check(make, captured, trains_operands=masked, mask_mod=shifted if masked else None)
    assert ("flex_attention_grad_query_0" if masked else "flex_attention_grad_captured_0") in kernels
    assert any(name.startswith("zeros") for name in kernels) == masked


def test_deterministic_algorithms(deterministic_algorithms: None) -> None:
    def make(bias: Tensor) -> Score:
        return lambda score, b, h, m, n: score + bias[h] * n

    kernels, coverage = check(make, [leaf(HEADS)])
    assert not any("grad_captured" in name for name in kernels)
    reasons = [item.reason for item in coverage if item.node == "flex_attention_backward"]
    wanted = "no attention kernel: deterministic algorithms are enabled, and kernels write in any order"
    assert reasons == [wanted]


def test_a_form_without_kernel_says_why() -> None:
    def make(bias: Tensor) -> Score:
        return lambda score, b, h, m, n: score * bias[h]

    kernels, coverage = check(make, [leaf(HEADS)], width=520)
    assert not any("grad_captured" in name for name in kernels)
    (reason,) = [item.reason for item in coverage if item.node == "flex_attention_backward"]
    assert reason == "no attention kernel: its heads are wider than 512"


def test_indices_out_of_range() -> None:
    bias = leaf(KEYS)
    inputs = operands()
    compiled = torch.compile(flex_attention, backend="fxwrap", fullgraph=True)
    with pytest.raises(IndexError, match="an index is out of bounds for a dimension of size 35"):
        compiled(*inputs, score_mod=lambda s, b, h, m, n: s + bias[m + n], enable_gqa=True)


@pytest.mark.long  # dynamic lengths, and gradients of captured tables, have tests of their own
def test_dynamic_lengths() -> None:
    """One program of the forward and one of the backward serve several lengths, of captured tables, too."""
    compiles: list[fxwrap.Compiled] = []

    def compile_with(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(fxwrap.compile_graph(*arguments, **keywords))
        return compiles[-1]

    def make(table: Tensor) -> Score:
        return lambda score, b, h, m, n: score + table[h, n - m + table.shape[1] // 2]

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, table: Tensor) -> tuple[Tensor, Tensor]:
        out, total, _ = torch.ops.higher_order.flex_attention(q, k, v, make(table), mask, 0.25, {})
        return out, total * math.log(2)

    torch.compiler.reset()
    compiled = torch.compile(attention, backend=make_backend(fxwrap.Options(), compile_with), fullgraph=True)
    for length in (60, 77, 130):
        sizes = [(BATCH, heads, length, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        inputs = [leaf(*size) for size in sizes] + [leaf(HEADS, 2 * length)]
        mask = create_block_mask(shifted, None, HEADS, length, length, device="cpu", BLOCK_SIZE=16).as_tuple()
        for item in inputs:
            torch._dynamo.mark_dynamic(item, 1 if item.ndim == 2 else 2)
        for item in mask:
            if isinstance(item, Tensor):
                for dim in range(2, item.ndim):
                    torch._dynamo.mark_dynamic(item, dim)
        out, total = compiled(*inputs[:3], mask, inputs[3])
        weights = torch.randn_like(out), torch.randn_like(total)
        gradients = torch.autograd.grad((out * weights[0]).sum() + (total * weights[1]).sum(), inputs)
        doubles = [item.detach().double().requires_grad_() for item in inputs]
        expected, sums = formula(*doubles[:3], make(doubles[3]), shifted)
        references = torch.autograd.grad((expected * weights[0]).sum() + (sums * weights[1]).sum(), doubles)
        for result, reference in zip((out, total, *gradients), (expected, sums, *references), strict=True):
            torch.testing.assert_close(result, reference.float(), rtol=1e-4, atol=1e-4)
    assert len(compiles) <= 4  # the first length may be static
    assert any(kernel.name == "flex_attention_grad_query_0" for kernel in compiles[-1].program.kernels)
