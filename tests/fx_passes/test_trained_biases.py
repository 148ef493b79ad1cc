"""Attention of a library whose bias is trained: forward and backward become FlexAttention's kernels."""

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
from fxwrap.fx_passes.recognize_attention import recognize_attention_in_joint_graph
from tests.fx_passes.test_attention_backward import KERNELS, OPTIONS, _double, _launched
from tests.lowering.planned_programs import plan

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
    values[..., 3, :], values[..., 5, :] = -torch.inf, torch.finfo(torch.float32).min
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
        errors = [float((item.double() - exact).norm()) for item in (result, plain)]
        assert errors[0] <= 1.2 * errors[1] + 1e-6 * float(exact.norm())
        assert result.stride() == node.meta["val"].stride()


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
        ({}, OPTIONS.replace(devices=(dataclasses.replace(CPU, streaming_attention_backward_sizes=()),))),
    ],
)  # fmt: skip
def test_calls_that_stay(keywords: dict[str, Any], options: fxwrap.Options) -> None:
    """A bias without gradient, dropout, a causal mask, an option, and devices that are not measured."""
    joint = _traced(lambda *items: _trained(*items, **keywords), _inputs(1, HEADS, ROWS, KEYS))
    assert recognize_attention_in_joint_graph(joint, options) is joint


def test_a_gradient_that_is_returned_with_padded_rows_stays() -> None:
    def returned(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        saved = _LIBRARY[0](query, key, value, bias, True)
        return _LIBRARY[1](grad, query, key, value, bias, *saved, 0.0, (True, True, True, True))[3]

    joint = _traced(returned, _inputs(BATCH, HEADS, ROWS, KEYS))
    assert recognize_attention_in_joint_graph(joint, OPTIONS) is joint


@pytest.mark.parametrize(("width", "is_replaced"), [(CUDA.streaming_attention_backward_width, True), (128, False)])
def test_joint_graphs_for_gpus(width: int, is_replaced: bool) -> None:
    sizes = [(BATCH, HEADS, 64, width)] * 4 + [(1, HEADS, 64, 64)]
    with FakeTensorMode():
        inputs = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        joint = make_fx(lambda *items: _trained(*items))(*inputs)
    joint = recognize_attention_in_joint_graph(joint, fxwrap.Options())
    targets = [node.target for node in joint.graph.nodes]
    assert [target in targets for target in _LIBRARY] == [not is_replaced] * 2
    names = [str(target) for target in targets]
    assert [name in names for name in ("flex_attention", "flex_attention_backward")] == [is_replaced] * 2
