"""Attention with dropout in training: kernels read a mask of the random numbers that eager draws with the seed."""

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
from torch.nn import functional as F

import fxwrap
from fxwrap.fx_passes.attention.flex_formulas import WEIGHT_MOD, FlexAttention
from fxwrap.fx_passes.training.joint_graph import JOINT_GRAPH_PASSES
from tests.fx_passes.test_attention_backward import ANY_SIZE, OPTIONS, _compiled, _launches
from tests.lowering.planned_programs import compared_with_evaluator, plan, printed_launch

BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 3, 9, 7, 4


def _dropped(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.dropout(torch.softmax(query @ key.mT / 2 + bias, -1), 0.3) @ value


def _upcast(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """As models in half precision compute it, with shared key heads."""
    key, value = [item.repeat_interleave(HEADS, 1) for item in (key[:, :1], value[:, :1])]
    scores = query @ key.mT + bias
    return F.dropout(torch.softmax(scores.float(), -1).to(value.dtype), 0.5) @ value


def _operands(dtype: torch.dtype) -> list[Tensor]:
    sizes = [(BATCH, HEADS, length, WIDTH) for length in (ROWS, KEYS, KEYS)]
    return [torch.randn(size).to(dtype) for size in (*sizes, (HEADS, ROWS, KEYS))]


def _step(function: Callable[..., Tensor], operands: list[Tensor]) -> list[Tensor]:
    """Returns output and gradients with a seed, and numbers that are drawn afterwards."""
    torch.manual_seed(3)
    leaves = [item.clone().requires_grad_() for item in operands]
    output = function(*leaves)
    output.sin().sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach(), *[item.grad for item in leaves if item.grad is not None], torch.rand(2)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "dtype", "emitter"),
    [
        (_dropped, torch.float32, "python"), (_dropped, torch.float32, "cpp"), (_dropped, torch.float64, "fx"),
        (_upcast, torch.float32, "interpreter"), (_upcast, torch.bfloat16, "interpreter"),
    ],
)  # fmt: skip
def test_compiled(function: Callable[..., Tensor], dtype: torch.dtype, emitter: str) -> None:
    """Results and gradients are eager's with the same seed, and so are later random numbers."""
    operands = _operands(dtype)
    run, programs = _compiled(function, emitter=emitter)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-6
    for actual, eager in zip(_step(run, operands), _step(function, operands), strict=True):
        assert (actual - eager).norm() <= tolerance * eager.norm()
    assert _launches(programs) == [1, 1]
    assert not any("bmm" in text.split("kernel @")[0] for text in programs)


@pytest.mark.parametrize(("function", "dtype"), [(_dropped, torch.float32), (_upcast, torch.bfloat16)])
def test_graphs_of_make_fx(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Their dropout is a product with random numbers, which forward and backward share."""
    operands = _operands(dtype)

    def step(*operands: Tensor) -> list[Tensor]:
        leaves = [item.detach().requires_grad_() for item in operands]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)]

    graph = make_fx(step)(*operands)
    assert "bernoulli_" in str(graph.code)
    planned = plan(graph, operands, OPTIONS)
    assert "flex_attention_grad_query_0" in planned.launches
    assert not any("bmm" in call for call in planned.calls)
    torch.manual_seed(3)
    results = [*planned.run([item.clone() for item in operands]), torch.rand(2)]
    torch.manual_seed(3)
    expected = [*step(*operands), torch.rand(2)]
    for actual, eager in zip(results, expected, strict=True):
        assert (actual - eager).norm() <= (2e-2 if dtype is torch.bfloat16 else 2e-6) * eager.norm()


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
def test_one_query_row(is_transposed: bool) -> None:
    """A token that attends to patches. Its scores may be a column."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        scores = (key @ query.mT).mT if is_transposed else query @ key.mT
        return F.dropout(torch.softmax(scores + bias, -1), 0.25) @ value

    operands = [torch.randn(BATCH, HEADS, length, WIDTH) for length in (1, KEYS, KEYS)]
    operands.append(torch.randn(HEADS, 1, KEYS))
    run, _ = _compiled(attend)
    for actual, eager in zip(_step(run, operands), _step(attend, operands), strict=True):
        torch.testing.assert_close(actual, eager)


def test_off_where_it_is_not_measured() -> None:
    spec = dataclasses.replace(ANY_SIZE, attention=dataclasses.replace(ANY_SIZE.attention, streaming_dropout_sizes=()))
    run, programs = _compiled(_dropped, spec)
    operands = _operands(torch.float32)
    torch.testing.assert_close(_step(run, operands), _step(_dropped, operands))
    assert _launches(programs) == [0, 0]


def _graph_for_gpus(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Returns the output and gradients by the operators that autograd calls, which a machine without GPU lacks."""
    key, aten = key.mT, torch.ops.aten
    weights = aten._softmax(torch.bmm(query, key).float(), -1, False)
    dropped, mask = aten.native_dropout(weights.to(query.dtype), 0.1, True)
    output, of_value = torch.bmm(dropped, value), torch.bmm(dropped.mT, grad)
    of_weights = aten.native_dropout_backward(torch.bmm(grad, value.mT), mask, 1 / 0.9).float()
    of_scores = aten._softmax_backward_data(of_weights, weights, -1, torch.float32).to(query.dtype)
    return output, torch.bmm(of_scores, key.mT), torch.bmm(query.mT, of_scores), of_value


@pytest.mark.parametrize(("length", "is_replaced"), [(512, True), (128, False)])
def test_masks_on_gpus(length: int, is_replaced: bool) -> None:
    """`native_dropout` draws the mask with eager's numbers from a tensor that nothing computes."""
    with FakeTensorMode():
        inputs = [torch.empty(6, length, 32, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        graph = make_fx(_graph_for_gpus)(*inputs)
    text = str(fxwrap.lower(graph, inputs))
    assert text.count("aten.native_dropout.default(") == 1
    assert ("flex_attention_grad_key_value" in text) == is_replaced
    assert ("aten.empty.memory_format(" in text) == is_replaced


def test_printed_kernels() -> None:
    """The kernels of each language have the evaluator's results."""
    joints: list[GraphModule] = []

    def partition(joint: GraphModule, *arguments: object, **keywords: object) -> Any:
        for step in JOINT_GRAPH_PASSES:
            joint = step.run(joint, OPTIONS)
        joints.append(joint)
        raise NotImplementedError

    torch._dynamo.reset()
    run = torch.compile(_dropped, backend="fxwrap", options={"devices": [ANY_SIZE], "partitioner": partition})
    with pytest.raises(Exception, match="NotImplementedError"):
        run(*[item.requires_grad_() for item in _operands(torch.float32)])
    (joint,) = joints
    inputs = [torch.randn(tuple(node.meta["val"].shape)) for node in joint.graph.find_nodes(op="placeholder")]
    planned = plan(joint, inputs, OPTIONS)
    assert "flex_attention_grad_query_0" in planned.launches
    for language in ("cpp", "triton"):
        compared = compared_with_evaluator(printed_launch([planned], language))

        planned.run([item.clone() for item in inputs], compared)


def test_formulas() -> None:
    """Where no kernel computes attention, factors of weights are those of the whole matrix."""
    query, key, value, bias = [item.double() for item in _operands(torch.float32)]
    mask, whole = torch.rand(BATCH, HEADS, ROWS, KEYS) < 0.7, 1 << 30
    attention = FlexAttention.from_arguments(
        query, key, value, lambda score, b, h, m, n: score + bias[h, m, n],
        (*[None] * 10, whole, whole, lambda b, h, m, n: m >= 0), 0.5,
        {WEIGHT_MOD: lambda b, h, m, n: torch.where(mask[b, h, m, n], 2.0, 0.0)},
    )  # fmt: skip
    leaves = [item.clone().requires_grad_() for item in (query, key, value)]
    exact = (torch.softmax(leaves[0] @ leaves[1].mT / 2 + bias, -1) * mask * 2) @ leaves[2]
    out, total, _ = attention.attend(query, key, value, attention.everything())
    torch.testing.assert_close(out, exact.detach())
    gradient = torch.randn_like(out)

    def joint(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None

    results = attention.gradients(out, total, gradient, None, joint, 0)
    torch.testing.assert_close(results[:3], torch.autograd.grad(exact, leaves, gradient))
