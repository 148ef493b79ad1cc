"""Triton kernels of attention compute masks of positions in the blocks only that are partly masked."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.fx_passes.attention import score_gradients
from fxwrap.loop_ir import Kernel, evaluate_kernel, find_streaming_reduction
from fxwrap.printers.triton import print_triton
from fxwrap.printers.triton.streaming_configuration import streaming_configurations
from fxwrap.runtime.kernels import load_kernel
from tests.fx_passes.test_attention_backward import OPTIONS as TRAINED
from tests.fx_passes.test_recognize_attention import OPTIONS
from tests.lowering.planned_programs import Planned, plan, printed_launch
from tests.printers.test_triton_printer_compile import compiled as compiled_for_gpu
from tests.support.agreement import assert_as_exact

# Five blocks of 32 keys: in the last rows of a window one is excluded, two are partly masked and one is not.
BATCH, HEADS, WIDTH, WINDOW = 2, 1, 16, 70

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _positions(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])


def _causal(number: float, is_window: bool = False) -> Attention:
    """Adds a number to scores of later keys, as transformers' models do."""

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        row, column = _positions(query, key)
        seen = (column <= row) & (column > row - WINDOW) if is_window else column <= row
        mask = torch.where(seen, 0.0, number).to(query.dtype)
        return torch.softmax((query @ key.mT * 0.25 + mask).float(), -1).to(value.dtype) @ value

    return attend


def _filled(number: float) -> Attention:
    """Fills scores with a number beyond the length of a sequence, which may be 0."""

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(key.shape[2]) >= lengths[:, None, None, None]
        return torch.softmax((query @ key.mT * 0.25).masked_fill(padding, number), -1) @ value

    return attend


def _upcast(number: float) -> Attention:
    """Adds a mask in memory to scores in float32; some rows are masked alone."""

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        row, column = _positions(query, key)
        padding = torch.where(column < lengths[:, None, None, None], 0.0, number)
        scores = (query @ key.mT).float() * 0.25 + padding + torch.where(column <= row, 0.0, number / 2)
        return torch.softmax(scores, -1).to(value.dtype) @ value

    return attend


def _biased(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """ALiBi, below a causal mask."""
    row, column = _positions(query, key)
    scores = query @ key.mT * 0.25 + ((column - row) * 0.125).to(query.dtype)
    return torch.softmax(scores.masked_fill(column > row, -math.inf), -1) @ value


def _prefix(number: float) -> Attention:
    """Rows see the keys before them, and those of a prefix."""

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        row, column = _positions(query, key)
        is_hidden = (column > row) & (column >= 70)
        return torch.softmax((query @ key.mT * 0.25).masked_fill(is_hidden, number), -1) @ value

    return attend


def _zeroed(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """The same condition masks scores and weights."""
    row, column = _positions(query, key)
    scores = (query @ key.mT * 0.25).masked_fill(column > row, -1e4)
    return torch.softmax(scores, -1).masked_fill(column > row, 0.0) @ value


def _padded(is_window: bool) -> Attention:
    """Adds the lowest number to scores of later keys, and of keys before the first one: some rows are masked whole."""

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        row, column = _positions(query, key)
        seen = (column <= row) & (column > row - WINDOW) if is_window else column <= row
        seen = seen & (column >= lengths[:, None, None, None])
        scores = (query @ key.mT).float() * 0.25 + torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        return torch.softmax(scores, -1).to(value.dtype) @ value

    return attend


FORMS = {
    "lowest": _causal(torch.finfo(torch.float16).min), "large": _causal(-1e4), "infinity": _causal(-math.inf),
    "window": _causal(-1e4, True), "band": _causal(-math.inf, True), "filled": _filled(-1e4), "biased": _biased,
    "zeroed": _zeroed, "upcast": _upcast(torch.finfo(torch.float32).min), "padded": _padded(False),
    "padded band": _padded(True), "prefix": _prefix(-math.inf), "large prefix": _prefix(-1e4),
}  # fmt: skip
LOWEST = ("upcast", "padded", "padded band")
"""Forms whose kernels visit masked blocks only where some row has no other keys."""


def _operands(keys: int, dtype: torch.dtype) -> list[Tensor]:
    tensors = [torch.randn(BATCH, HEADS, length, WIDTH).to(dtype) for length in (keys, keys, keys)]
    return [*tensors, torch.tensor([keys * 2 // 3, 0])]


def _kernel(planned: Planned) -> Kernel:
    (kernel,) = planned.kernels.values()
    return kernel


def _run_in_blocks(kernel: Kernel, buffers: dict[str, Tensor], **fields: Any) -> str:
    """Runs a kernel in Triton's interpreter, with blocks of 32 keys and other fields of a configuration."""
    (configuration, *_) = streaming_configurations(kernel, int, interpreted=True)
    printed = print_triton(kernel, dataclasses.replace(configuration, key_block=32, **fields))
    launcher = load_kernel("triton", printed.source, printed.signature, printed.options)
    launcher(tuple(map(int, printed.grid)), *[buffers[item.name] for item in (*kernel.inputs, *kernel.outputs)])
    return printed.source


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("keys", "branches"), [(160, True), (136, True), (160, False), (136, False)])
def test_blocks(form: str, keys: int, branches: bool) -> None:
    """Half precision in the units of each block."""
    inputs = _operands(keys, torch.float16)
    planned = plan(make_fx(FORMS[form])(*inputs), inputs, OPTIONS)

    def run(kernel: Kernel, buffers: dict[str, Tensor], numbers: dict[str, int]) -> None:
        source = _run_in_blocks(kernel, buffers, branches=branches, half_products=True)
        assert source.count("strictest") >= 2
        assert source.count("for step in ") == (1 if branches else 2) + (form in LOWEST)

    (result,) = planned.run([item.clone() for item in inputs], run)
    eager, exact = [FORMS[form](*[*map(cast, inputs[:3]), inputs[3]]) for cast in (Tensor.half, Tensor.double)]
    assert_as_exact(result, eager, exact, slack=1e-4)


@pytest.mark.parametrize("form", ["padded", "padded band"])
@pytest.mark.parametrize("language", ["triton", "cpp"])
def test_masked_blocks_are_read_for_rows_without_other_keys_only(form: str, language: str) -> None:
    """Masked keys and values are NaN: rows that see none of them have no NaN."""
    query, key, value, _ = _operands(256, torch.float32)
    inputs = [query, key, value, torch.tensor([0, 64])]
    planned = plan(make_fx(FORMS[form])(*inputs), inputs, OPTIONS)
    key[:, :, 192:], value[:, :, 192:] = torch.nan, torch.nan

    def run(kernel: Kernel, buffers: dict[str, Tensor], numbers: dict[str, int]) -> None:
        if language == "cpp":
            printed_launch([planned], "cpp")(kernel, buffers, numbers)
        else:
            _run_in_blocks(kernel, buffers, row_block=32)

    (result,) = planned.run([item.clone() for item in inputs], run)
    exact = FORMS[form](*[item[:, :, :192].double() for item in inputs[:3]], inputs[3])
    torch.testing.assert_close(result[0, :, :192].double(), exact[0], rtol=1e-5, atol=1e-5)
    assert result[1, :, :64].isnan().all()  # rows that see no key: all keys have equal weights
    torch.testing.assert_close(result[1, :, 64:192].double(), exact[1, :, 64:], rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["infinity", "band", "biased", "padded", "padded band", "prefix"])
@pytest.mark.parametrize(("keys", "group"), [(160, 1), (136, 1), (136, 2)])
def test_gradients(form: str, keys: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of queries, and of keys, whose heads have several heads of queries: blocks of both ends are masked.

    The lowest number bounds keys beside the least maximum of a head's rows; some rows are masked whole.
    """
    monkeypatch.setattr(score_gradients, "_LONG", 1)
    query, *others = _operands(keys, torch.float32)
    inputs = [torch.randn(BATCH, HEADS * group, keys, WIDTH), query.repeat_interleave(group, 1), *others]

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        repeated = [item.repeat_interleave(group, 1) if group > 1 else item for item in (key, value)]
        return FORMS[form](query, *repeated, lengths)

    def step(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        leaves = [item.detach().requires_grad_() for item in (query, key, value)]
        output = attend(*leaves, lengths)
        return (output.detach(), *torch.autograd.grad(output, leaves, gradient))

    planned = plan(make_fx(step)(*inputs), inputs, TRAINED)
    sources: list[str] = []

    def run(kernel: Kernel, buffers: dict[str, Tensor], numbers: dict[str, int]) -> None:
        if find_streaming_reduction(kernel) is None:
            evaluate_kernel(kernel, buffers)
        else:
            sources.append(_run_in_blocks(kernel, buffers, branches=False, row_block=32))

    results = planned.run([item.clone() for item in inputs], run)
    assert [source.count("for step in ") for source in sources] == [2 + (form in LOWEST), 2, 2]
    exact = step(*[item.double() if item.is_floating_point() else item for item in inputs])
    for result, expected in zip(results, exact, strict=True):
        assert (result.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("form", ["infinity", "biased", "padded", "prefix"])
def test_gradients_in_half_precision(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of whole blocks take one fused multiply-add before the exponential; masked rows stay exact."""
    monkeypatch.setattr(score_gradients, "_LONG", 1)
    inputs = [torch.randn(BATCH, HEADS, 136, WIDTH).to(torch.float16), *_operands(136, torch.float16)]

    def step(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        leaves = [item.detach().requires_grad_() for item in (query, key, value)]
        output = FORMS[form](*leaves, lengths)
        return (output.detach(), *torch.autograd.grad(output, leaves, gradient))

    planned, sources = plan(make_fx(step)(*inputs), inputs, TRAINED), list[str]()

    def run(kernel: Kernel, buffers: dict[str, Tensor], numbers: dict[str, int]) -> None:
        if find_streaming_reduction(kernel) is None:
            evaluate_kernel(kernel, buffers)
        else:
            sources.append(_run_in_blocks(kernel, buffers, branches=False, row_block=32, half_products=True))

    results = planned.run([item.clone() for item in inputs], run)
    loops = [part for source in sources[1:] for part in source.split("for step in ")[1:]]
    fused = [False, True, False, False] if form == "padded" else [True] * 4  # of partial and full blocks
    assert ["-1.4426950408889634 + (" in part for part in loops] == fused
    exact = step(*[item.double() if item.is_floating_point() else item for item in inputs])
    for result, eager, expected in zip(results, step(*inputs), exact, strict=True):
        assert_as_exact(result, eager, expected, slack=1e-4)


@pytest.mark.parametrize("axis", [-2, -1])
def test_lowest_numbers_of_rows_or_keys_in_memory(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows of queries, or keys, have bfloat16's lowest number, which no other unit can hold."""
    monkeypatch.setattr(score_gradients, "_LONG", 1)
    gradient, *others = [torch.randn(BATCH, HEADS, 128, WIDTH).to(torch.bfloat16) for _ in range(4)]
    is_padding = torch.arange(128) >= torch.tensor([85, 0])[:, None, None, None]
    mask = torch.where(is_padding, torch.finfo(torch.bfloat16).min, 0.0).to(torch.bfloat16).transpose(-1, axis)
    inputs = [gradient, *others, mask.contiguous()]

    def step(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        leaves = [item.detach().requires_grad_() for item in (query, key, value)]
        scores = leaves[0] @ leaves[1].mT * 0.25 + mask
        output = torch.softmax(scores.float(), -1).to(value.dtype) @ leaves[2]
        return (output.detach(), *torch.autograd.grad(output, leaves, gradient))

    planned = plan(make_fx(step)(*inputs), inputs, TRAINED)

    def run(kernel: Kernel, buffers: dict[str, Tensor], numbers: dict[str, int]) -> None:
        if find_streaming_reduction(kernel) is None:
            evaluate_kernel(kernel, buffers)
        else:
            _run_in_blocks(kernel, buffers, branches=False, row_block=32, half_products=True)

    results = planned.run([item.clone() for item in inputs], run)
    for result, eager, exact in zip(results, step(*inputs), step(*[item.double() for item in inputs]), strict=True):
        assert_as_exact(result, eager, exact)


@pytest.mark.parametrize(("form", "count"), [("lowest", 1), ("window", 2), ("filled", 1), ("zeroed", 1)])
def test_masks(form: str, count: int) -> None:
    """A mask of numbers is no bound: rows of such scores alone have weights."""
    inputs = _operands(128, torch.float16)
    kernel = _kernel(plan(make_fx(FORMS[form])(*inputs), inputs, OPTIONS))
    parts = find_streaming_reduction(kernel)
    assert parts is not None and (len(parts.masks), parts.bounds) == (count, ())


@pytest.mark.parametrize("form", ["window", "padded", "biased"])
def test_gpus(form: str) -> None:
    """A bias takes registers: then partly masked blocks are a loop, not a branch."""
    inputs = _operands(512, torch.bfloat16)
    kernel = _kernel(plan(make_fx(FORMS[form])(*inputs), inputs, OPTIONS))
    source = print_triton(kernel)
    assert bool(re.search(r"if \(first_key", source.source)) == (form != "biased")
    assert "tt.dot" in compiled_for_gpu(source).asm["ttir"]


@pytest.mark.gpu
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("form", ["lowest", "upcast"])
def test_fully_masked_rows_on_a_gpu(form: str, is_trained: bool) -> None:
    """Weights are equal where all scores are the lowest number, which no other unit can hold."""
    query, key, value = [torch.randn(BATCH, HEADS, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    padding = torch.arange(512, device="cuda") >= torch.tensor([300, 0], device="cuda")[:, None, None, None]
    lowest = torch.finfo(torch.bfloat16).min
    mask = torch.where(padding, lowest, 0.0).to(query.dtype)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * 0.125
        if form == "lowest":
            return torch.softmax(scores.masked_fill(padding, lowest), -1) @ value
        return torch.softmax((scores + mask).float(), -1).to(value.dtype) @ value.to(value.dtype)

    def step(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [item.detach().requires_grad_() for item in tensors]
        output = function(*leaves)
        return (output.detach(), *(torch.autograd.grad(output, leaves, output.detach()) if is_trained else ()))

    torch.compiler.reset()
    actual = step(torch.compile(attend, backend="fxwrap", fullgraph=True), query, key, value)
    for result, exact in zip(actual, step(attend, query.double(), key.double(), value.double()), strict=True):
        assert (result.double() - exact).norm() <= 1e-2 * exact.norm()
