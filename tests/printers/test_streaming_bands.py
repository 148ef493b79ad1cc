"""Bands of heads, which are the default where rows visit different numbers of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.loop_ir import find_streaming_reduction
from fxwrap.printers.triton import StreamingConfiguration, print_triton
from fxwrap.printers.triton.streaming_configuration import streaming_configurations
from fxwrap.torch_compat import FakeTensorMode
from tests.fx_passes.test_attention_backward import OPTIONS
from tests.lowering.planned_programs import plan

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k < 100) | (q >= k)


def _window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k <= 256)


def _documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q // 300 == k // 300) & (q >= k)


def _all(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0


def _default(mask: Mask, heads: int = 16, length: int = 4096, width: int = 128) -> StreamingConfiguration:
    """Returns the default configuration of attention with a block mask in bfloat16."""
    count = length // 128
    with FakeTensorMode():
        inputs = [torch.empty(1, heads, length, width, dtype=torch.bfloat16) for _ in range(3)]
        lists = [torch.empty(1, 1, *size, dtype=torch.int32) for size in 4 * [(count,), (count, count)]]

    def attention(query: Tensor, key: Tensor, value: Tensor, *lists: Tensor) -> Tensor:
        block_mask = (length, length, *lists, 128, 128, mask)
        operator = torch.ops.higher_order.flex_attention
        result: Tensor = operator(query, key, value, lambda score, *_: score, block_mask, width**-0.5, {})[0]
        return result

    graph = make_fx(attention)(*inputs, *lists)
    (kernel,) = plan(graph, [*inputs, *lists]).kernels.values()
    return streaming_configurations(kernel, int)[0]


@pytest.mark.parametrize(
    ("mask", "band"), [(_causal, 8), (_prefix, 8), (_window, 1), (_documents, 1), (_all, 1)],
    ids=lambda item: getattr(item, "__name__", str(item)).strip("_"),
)  # fmt: skip
def test_masks(mask: Mask, band: int) -> None:
    """A mask with a limit on the other side of each row, or none at all, lets all rows visit about as much."""
    assert _default(mask).band == band


def test_sizes() -> None:
    """A band has the heads whose programs run beside each other; few or short programs need none."""
    assert _default(_causal, length=16384).band == 2
    assert _default(_causal, heads=4).band == 1
    assert _default(_causal, heads=256, length=1024, width=64).band == 1


def _hidden_later(row: Tensor, key: Tensor) -> Tensor:
    return key > row


def _hidden_earlier(row: Tensor, key: Tensor) -> Tensor:
    return key < row


def _hidden_beyond_prefix(row: Tensor, key: Tensor) -> Tensor:
    return (key > row) & (key >= 100)


def _hidden_beyond_window(row: Tensor, key: Tensor) -> Tensor:
    return (key > row) | (key < row - 256)


def _hidden_padding(row: Tensor, key: Tensor) -> Tensor:
    return key >= row * 0 + 4000


@pytest.mark.parametrize(
    ("hidden", "band", "counts_down"),
    [(_hidden_later, 8, [True, True, False]), (_hidden_earlier, 8, [False, False, True]),
     (_hidden_beyond_prefix, 8, [True, True, False]), (_hidden_beyond_window, 1, [True, True, True]),
     (_hidden_padding, 1, [False, False, False])],
    ids=lambda item: getattr(item, "__name__", str(item)).strip("_"),
)  # fmt: skip
def test_formulas(hidden: Callable[[Tensor, Tensor], Tensor], band: int, counts_down: list[bool]) -> None:
    """Attention written as its formula, and its gradients, whose masks are bounds; long rows are first."""
    with FakeTensorMode() as mode:
        inputs = [torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16) for _ in range(4)]

    def step(gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [item.detach().requires_grad_() for item in tensors]
        query, key, value = leaves
        position = torch.arange(4096)
        scores = (query @ key.mT).masked_fill(hidden(position[:, None], position), -math.inf)
        output = torch.softmax(scores.float(), -1).to(value.dtype) @ value
        return (output.detach(), *torch.autograd.grad(output, leaves, gradient))

    with mode:
        graph = make_fx(step)(*inputs)
    kernels = plan(graph, inputs, OPTIONS).kernels.values()
    streaming = [item for item in kernels if find_streaming_reduction(item)]
    configurations = [streaming_configurations(item, int)[0] for item in streaming]
    assert [item.band for item in configurations] == 3 * [band]
    printed = [print_triton(*pair).source for pair in zip(streaming, configurations, strict=True)]
    assert ["num_programs(0) - 1" in source for source in printed] == counts_down
