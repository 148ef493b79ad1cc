"""Attention of a library with a bias in training: forward and backward become FlexAttention's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fxwrap
from fxwrap.devices import CPU, CUDA
from fxwrap.fx_passes.attention.recognize import recognize_attention_in_joint_graph
from tests.fx_passes.test_attention_backward import ANY_SIZE, KERNELS, OPTIONS, _double, _launched
from tests.lowering.planned_programs import plan
from tests.support.agreement import assert_as_exact

BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 3, 9, 8, 4
_aten = torch.ops.aten
_LIBRARY = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
)


def _inputs(*bias: int) -> list[Tensor]:
    """Returns the output's gradient, operands and bias, one row of which is minus infinity, another one the lowest."""
    random = torch.Generator().manual_seed(0)
    grad, query = [torch.randn(BATCH, ROWS, HEADS, WIDTH, generator=random).transpose(1, 2) for _ in range(2)]
    key, value = [torch.randn(BATCH, HEADS, KEYS, WIDTH, generator=random) for _ in range(2)]
    values = torch.randn(*bias, generator=random)
    values[..., 3:4, :], values[..., 5:6, :] = -torch.inf, torch.finfo(torch.float32).min
    return [grad, query, key, value, values]


def _trained(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *,
    needed: tuple[bool, ...] = (True, True, True, True), dropout: float = 0.0, causal: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns the output and gradients as autograd calls the library."""
    wide = bias.expand(*query.shape[:3], key.shape[2])
    forward, backward = _LIBRARY
    out, *statistics = forward(query, key, value, wide, True, dropout, causal, scale=0.3)
    saved = [out.detach(), statistics[0].detach(), *statistics[1:]]
    grads = backward(grad, query, key, value, wide, *saved, dropout, needed, causal, scale=0.3)
    of_bias = [grads[3].sum_to_size(bias.shape) * 1.5] if needed[3] else []
    return (out, *[item for item, is_needed in zip(grads, needed[:3], strict=False) if is_needed], *of_bias)


def _traced(function: Callable[..., Any], inputs: list[Tensor]) -> GraphModule:
    mode = FakeTensorMode()
    with mode:
        return make_fx(lambda *items: function(*items))(*[mode.from_tensor(item) for item in inputs])


NO_BACKWARD = dataclasses.replace(CPU, attention=dataclasses.replace(CPU.attention, streaming_backward_sizes=()))
MASKED = OPTIONS.replace(
    devices=(
        dataclasses.replace(
            ANY_SIZE, attention=dataclasses.replace(ANY_SIZE.attention, streaming_mask_rows=((torch.float32, 9),))
        ),
    )
)
"""Masks without gradient of up to 9 rows and keys are those of kernels, too."""


def _eager(grad: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    leaves = [item.detach().requires_grad_() for item in operands]
    bias = leaves[3].expand(*leaves[0].shape[:3], KEYS)
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*leaves[:3], attn_mask=bias, scale=0.3)
    *of_operands, of_bias = torch.autograd.grad(out, leaves, grad)
    return (out, *of_operands, of_bias * 1.5)


@pytest.mark.parametrize("bias", [(1, HEADS, ROWS, KEYS), (BATCH, 1, ROWS, KEYS), (BATCH, HEADS, ROWS, KEYS)])
def test_gradients(bias: tuple[int, ...]) -> None:
    """Fully masked rows are zero, as those of the library are; layouts are the library's."""
    inputs = _inputs(*bias)
    graph = _traced(_trained, inputs)
    planned = plan(graph, inputs, OPTIONS)
    assert sorted(set(_launched(planned))) == sorted(KERNELS)
    results = planned.run([item.clone() for item in inputs])
    fakes: Any = graph.graph.output_node().args[0]
    for result, node, plain, exact in zip(results, fakes, _eager(*inputs), _eager(*_double(inputs)), strict=True):
        assert_as_exact(result, plain, exact, slack=1e-6)
        assert result.stride() == node.meta["val"].stride()


@pytest.mark.parametrize("bias", [(BATCH, 1, 1, KEYS), (1, 1, ROWS, KEYS)])
def test_masks_without_gradient(bias: tuple[int, ...]) -> None:
    """The backward stores no matrix of gradients. Some columns, or a row, are masked everywhere."""
    inputs = _inputs(*bias)
    if bias[2] == 1:
        inputs[4] = torch.where(torch.arange(KEYS) % 3 == 1, -torch.inf, 0.0).expand(bias).contiguous()
    needed = (True, True, True, False)
    planned = plan(_traced(lambda *items: _trained(*items, needed=needed), inputs), inputs, MASKED)
    assert sorted(set(_launched(planned))) == sorted(KERNELS)
    results = planned.run([item.clone() for item in inputs])
    for result, plain, exact in zip(results, _eager(*inputs), _eager(*_double(inputs)), strict=False):
        assert_as_exact(result, plain, exact, slack=1e-6)


@pytest.mark.parametrize(("rows", "keys"), [(10, 8), (8, 12), (9, 7)])
def test_long_and_unaligned_masks_stay(rows: int, keys: int) -> None:
    sizes = [(BATCH, HEADS, length, WIDTH) for length in (rows, rows, keys, keys)] + [(1, 1, rows, keys)]
    joint = _traced(lambda *items: _trained(*items, needed=(True, True, True, False)), [torch.randn(s) for s in sizes])
    assert recognize_attention_in_joint_graph(joint, MASKED) is joint


def test_unused_gradients() -> None:
    """Frozen keys need no gradient."""
    inputs = _inputs(1, HEADS, ROWS, KEYS)
    planned = plan(_traced(lambda *items: _trained(*items, needed=(True, False, False, True)), inputs), inputs, OPTIONS)
    assert "flex_attention_grad_key_value_0" not in _launched(planned)
    out, grad_query, grad_bias = planned.run([item.clone() for item in inputs])
    expected = _eager(*inputs)
    for result, reference in zip((out, grad_query, grad_bias), (*expected[:2], expected[4]), strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({"needed": (True, True, True, False)}, OPTIONS), ({"dropout": 0.5}, OPTIONS), ({"causal": True}, OPTIONS),
        ({}, OPTIONS.replace(preserve_ops=("aten.scaled_dot_product_attention.default",))),
        ({}, OPTIONS.replace(devices=(NO_BACKWARD,))),
    ],
)  # fmt: skip
def test_calls_that_stay(keywords: dict[str, Any], options: fxwrap.Options) -> None:
    """A mask beyond the device's sizes, dropout, a causal mask, an option, and devices that are not measured."""
    joint = _traced(lambda *items: _trained(*items, **keywords), _inputs(1, HEADS, ROWS, KEYS))
    assert recognize_attention_in_joint_graph(joint, options) is joint


def test_a_gradient_that_is_returned_with_padded_rows_stays() -> None:
    def returned(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        saved = _LIBRARY[0](query, key, value, bias, True)
        return _LIBRARY[1](grad, query, key, value, bias, *saved, 0.0, (True, True, True, True))[3]

    joint = _traced(returned, _inputs(BATCH, HEADS, ROWS, KEYS))
    assert recognize_attention_in_joint_graph(joint, OPTIONS) is joint


@pytest.mark.parametrize(
    ("width", "length", "trains_bias", "is_replaced"),
    [(64, 64, True, True), (128, 64, True, False), (64, 512, False, True), (64, 520, False, False),
     (128, 64, False, False)],
)  # fmt: skip
def test_joint_graphs_for_gpus(width: int, length: int, trains_bias: bool, is_replaced: bool) -> None:
    assert CUDA.attention.streaming_bias_width == 64
    sizes = [(BATCH, HEADS, length, width)] * 4 + [(1, HEADS, length, length)]
    with FakeTensorMode():
        inputs = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        joint = make_fx(lambda *items: _trained(*items, needed=(True, True, True, trains_bias)))(*inputs)
    joint = recognize_attention_in_joint_graph(joint, fxwrap.Options())
    targets = [node.target for node in joint.graph.nodes]
    assert [target in targets for target in _LIBRARY] == [not is_replaced] * 2
    names = [str(target) for target in targets]
    assert [name in names for name in ("flex_attention", "flex_attention_backward")] == [is_replaced] * 2


@pytest.mark.parametrize(("width", "is_replaced"), [(64, True), (128, True), (192, False)])
def test_formulas_for_gpus(width: int, is_replaced: bool) -> None:
    """Heads of 128 are trained by kernels, although a library's call with a bias stays."""

    def trained(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        weights = torch.softmax(torch.bmm(query, key.mT) * 0.125, -1)
        of_weights = torch.bmm(gradient, value.mT)
        scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype) * 0.125
        gradients = torch.bmm(scores, key), torch.bmm(query.mT, scores), torch.bmm(weights.mT, gradient)
        return (torch.bmm(weights, value), *gradients)

    with FakeTensorMode():
        inputs = [torch.empty(HEADS, 256, width, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        joint = make_fx(trained)(*inputs)
    joint = recognize_attention_in_joint_graph(joint, fxwrap.Options())
    names = [str(node.target) for node in joint.graph.nodes]
    assert [name in names for name in ("flex_attention", "flex_attention_backward")] == [is_replaced] * 2


def _masked_by_cudnn(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Returns the output and gradients as autograd calls cuDNN, which has no gradient of a mask."""
    wide = mask.expand(*query.shape[:3], key.shape[2])
    out, total, *sequences, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, wide, True, scale=0.3
    )
    saved = (out.detach(), total, seed, offset, wide, *sequences)
    backward = _aten._scaled_dot_product_cudnn_attention_backward.default
    return (out, *backward(grad, query, key, value, *saved, 0.0, False, scale=0.3))


@pytest.mark.parametrize(("length", "is_replaced"), [(512, True), (520, False)])
def test_masks_that_cudnn_adds(length: int, is_replaced: bool) -> None:
    """It is torch's choice on some GPUs; the layouts of the results stay."""
    with FakeTensorMode():
        operands = [torch.empty(BATCH, length, HEADS, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        inputs = [*[item.transpose(1, 2) for item in operands], operands[0].new_empty(BATCH, 1, 1, length)]
        before = make_fx(_masked_by_cudnn)(*inputs)
    layouts = [node.meta["val"].stride() for node in before.graph.output_node().args[0]]  # type: ignore[union-attr]
    joint = recognize_attention_in_joint_graph(before, fxwrap.Options())
    names = [str(node.target) for node in joint.graph.nodes]
    assert ("flex_attention_backward" in names) == is_replaced == ("flex_attention" in names)
    assert any(name.startswith("aten._scaled_dot_product_cudnn") for name in names) != is_replaced
    results: Any = joint.graph.output_node().args[0]
    assert [node.meta["val"].stride() for node in results] == layouts
