"""Attention with sinks: a logit of each head takes part in the softmax of a row, and has no value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

import fxwrap
from fxwrap.fx_passes import prepare_graph
from fxwrap.fx_passes.attention.flex import expand_declined_attention
from fxwrap.fx_passes.attention.flex_formulas import SINK_MOD, FlexAttention
from fxwrap.loop_ir import Kernel, find_streaming_reduction
from fxwrap.printers.triton import print_triton
from fxwrap.printers.triton.streaming_configuration import streaming_configurations
from tests.fx_passes.test_attention_backward import ANY_SIZE, OPTIONS, _compiled, _launches
from tests.lowering.planned_programs import check_graph, compared_with_evaluator, plan, printed_launch
from tests.printers.test_triton_printer_compile import compiled as compiled_for_gpu
from tests.support.agreement import assert_as_exact
from tests.support.versions import fails_before

BATCH, HEADS, GROUP, WIDTH, VALUE_WIDTH = 2, 4, 2, 8, 72
LOWEST = torch.finfo(torch.bfloat16).min

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _scores(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    return query @ key.repeat_interleave(GROUP, 1).mT * WIDTH**-0.5 + bias


def _attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor, dropout: float) -> Tensor:
    logits = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)
    scores = torch.cat([_scores(query, key, bias), logits], -1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = torch.softmax(scores, -1, dtype=scores.dtype)[..., :-1]
    weights = F.dropout(weights, dropout, training=dropout > 0).to(value.dtype)
    return (weights @ value.repeat_interleave(GROUP, 1)).transpose(1, 2).contiguous()


def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    """As GPT-OSS computes it, which subtracts the maximum so that half precision does not overflow."""
    return _attention(query, key, value, sinks, bias, 0.0)


def _dropped(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    return _attention(query, key, value, sinks, bias, 0.3)


def _operands(rows: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns queries, keys, values, sinks and a causal bias."""
    of_keys = [(BATCH, HEADS // GROUP, keys, width) for width in (WIDTH, VALUE_WIDTH)]
    sizes = [(BATCH, HEADS, rows, WIDTH), *of_keys, (HEADS,)]
    seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    bias = torch.where(seen, 0.0, torch.finfo(dtype).min / 2)[None, None]
    return [torch.randn(size).to(dtype) for size in sizes] + [bias.to(dtype)]


def _double(inputs: list[Tensor]) -> list[Tensor]:
    return [item.double() for item in inputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink", [0.0, 30.0, -30.0, -math.inf, math.inf, math.nan])
def test_fully_masked_rows_and_any_sink(sink: float, dtype: torch.dtype) -> None:
    """A row without keys is zero, as the weight of its sink is 1; where the sink is minus infinity too, it is NaN."""
    inputs = _operands(5, 7, dtype)
    inputs[3][:2] = sink
    inputs[4] = inputs[4].repeat(BATCH, 1, 1, 1)
    inputs[4][1, :, 2] = -math.inf
    (result,) = plan(make_fx(_attend)(*inputs), inputs, OPTIONS).run([item.clone() for item in inputs])
    exact, eager = _attend(*_double(inputs)), _attend(*inputs)
    assert torch.equal(result.isnan(), exact.isnan())
    assert_as_exact(result.nan_to_num(), eager.nan_to_num(), exact.nan_to_num(), slack=1e-6)


def test_kernel_of_sinks_alone() -> None:
    """Everything is one kernel, which reads the sinks as they are."""
    inputs = _operands(5, 7)
    planned = check_graph(make_fx(_attend)(*inputs), inputs, OPTIONS)
    assert planned.launches == ["flex_attention_0"]
    assert not planned.calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding(language: str, dtype: torch.dtype) -> None:
    """One row of many keys is split over keys; the kernel that combines the parts counts the sink."""
    inputs = _operands(1, 700, dtype)
    sizes = dataclasses.replace(ANY_SIZE.attention, streaming_sizes=())
    spec = dataclasses.replace(ANY_SIZE, massively_parallel=True, multiprocessors=132, attention=sizes)
    planned = plan(make_fx(_attend)(*inputs), inputs, OPTIONS.replace(devices=(spec,)))
    assert planned.launches == ["flex_attention_0", "flex_attention_parts_0"]
    (result,) = planned.run([item.clone() for item in inputs])
    exact, eager = _attend(*_double(inputs)), _attend(*inputs)
    assert_as_exact(result, eager, exact, slack=1e-6)
    planned.run([item.clone() for item in inputs], compared_with_evaluator(printed_launch([planned], language)))


def _step(function: Attention, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    leaves = [item.clone().requires_grad_() for item in inputs[:4]]
    output = function(*leaves, inputs[4])
    output.sin().sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach(), *[item.grad for item in leaves if item.grad is not None]]


@pytest.mark.parametrize("function", [_attend, _dropped])
@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_training(function: Attention, emitter: str) -> None:
    """Forward and backward are kernels, with eager's gradients, that of the sinks included, and its dropout."""
    inputs = _operands(9, 9)
    run, programs = _compiled(function, emitter=emitter)
    for actual, eager in zip(_step(run, inputs), _step(function, inputs), strict=True):
        assert (actual - eager).norm() <= 3e-6 * eager.norm()
    assert _launches(programs) == [1, 1]
    assert not any("bmm" in text.split("kernel @")[0] for text in programs)


def test_sinks_without_gradients() -> None:
    inputs = _operands(9, 9)
    run, programs = _compiled(lambda query, key, value: _attend(query, key, value, inputs[3], inputs[4]))
    leaves = [[item.clone().requires_grad_() for item in inputs[:3]] for _ in range(2)]
    run(*leaves[0]).sin().sum().backward()
    _attend(*leaves[1], *inputs[3:]).sin().sum().backward()  # type: ignore[no-untyped-call]
    for actual, eager in zip(*leaves, strict=True):
        torch.testing.assert_close(actual.grad, eager.grad)
    assert _launches(programs) == [1, 1]


def _windowed(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, lengths: Tensor) -> Tensor:
    """As transformers masks a window and padding: with the lowest number, from positions."""
    rows, keys = [torch.arange(item.shape[2]) for item in (query, key)]
    seen = (keys <= rows[:, None]) & (keys > rows[:, None] - 6)
    seen = seen & (keys < lengths[:, None, None, None])
    return _attend(query, key, value, sinks, torch.where(seen, 0.0, LOWEST).to(query.dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_bound_keys(language: str, dtype: torch.dtype) -> None:
    """Kernels visit no key that a mask of the lowest number hides, but in heads whose sink is no larger.

    There, a row without keys is the mean of all values.
    """
    inputs = [*_operands(40, 40, dtype)[:4], torch.tensor([17, 40])]
    inputs[3][1] = LOWEST
    inputs[3][2] = -math.inf
    graph = make_fx(_windowed)(*inputs)
    compiled = fxwrap.compile_graph(graph, inputs, options=fxwrap.Options(devices=(ANY_SIZE,)))
    (kernel,) = [item.loop_ir for item in compiled.program.kernels]
    assert isinstance(kernel, Kernel)
    parts = find_streaming_reduction(kernel)
    assert parts is not None
    assert [item.is_lower for item in parts.bounds] == [False, True, False]  # that of lengths, too
    planned = plan(graph, inputs, OPTIONS)
    (result,) = planned.run([item.clone() for item in inputs])
    exact, eager = _windowed(*_double(inputs[:4]), inputs[4]), _windowed(*inputs)
    assert_as_exact(result, eager, exact, slack=1e-6)
    planned.run([item.clone() for item in inputs], compared_with_evaluator(printed_launch([planned], language)))


def _causal(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, lengths: Tensor) -> Tensor:
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, query.shape[2], key.shape[2], "cpu", 128)
    score_mod: Callable[..., Tensor] = lambda score, b, h, q, k: score  # noqa: E731
    flex_attention = torch.ops.higher_order.flex_attention
    output: Tensor = flex_attention(query, key, value, score_mod, blocks.as_tuple(), WIDTH**-0.5, {})[0]
    return output


@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize(("function", "length"), [(_windowed, 40), (_causal, 300)])
def test_kernels_compile_for_gpus(function: Attention, length: int, branches: bool) -> None:
    """Tiles of keys and of columns have different sizes; in full blocks of a block mask, bounds do not hold.

    With branches a loop is over all blocks, else one is over partial blocks and one over full blocks.
    """
    inputs = [*_operands(length, length, torch.bfloat16)[:4], torch.tensor([17, 40])]
    compiled = fxwrap.compile_graph(make_fx(function)(*inputs), inputs, options=fxwrap.Options(devices=(ANY_SIZE,)))
    kernels = [item.loop_ir for item in compiled.program.kernels if item.name.startswith("flex_attention")]
    (kernel,) = kernels
    assert isinstance(kernel, Kernel)
    configuration = streaming_configurations(kernel, int)[0]
    printed = print_triton(kernel, dataclasses.replace(configuration, branches=branches))
    assert "tt.dot" in compiled_for_gpu(printed).asm["ttir"]


class _Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        return _attend(query, key, value, sinks, bias)


@fails_before("2.13", "torch.export compares the lengths of keys", UserError)
def test_symbolic_lengths() -> None:
    rows, keys = Dim("rows", min=2), Dim("keys", min=2)
    shapes = {"query": {2: rows}, "key": {2: keys}, "value": {2: keys}, "sinks": {}, "bias": {2: rows, 3: keys}}
    program = export(_Attention(), tuple(_operands(5, 7)), dynamic_shapes=shapes)
    compiled = fxwrap.compile_graph(program, options=fxwrap.Options(devices=(ANY_SIZE,)))
    assert [item.operator for item in compiled.coverage].count("flex_attention") == 1
    for sizes in ((12, 12), (3, 40)):
        inputs = _operands(*sizes)
        torch.testing.assert_close(compiled(*inputs), _attend(*inputs))


def test_formula_of_tensors() -> None:
    """Where a call of FlexAttention is no kernel, its formula counts the sinks."""
    query, key, value, sinks, bias = _operands(5, 7)
    whole: tuple[Any, ...] = (*[None] * 10, 1 << 30, 1 << 30, lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool))
    score: Callable[..., Tensor] = lambda score, b, h, q, k: score + bias[0, 0, q, k]  # noqa: E731
    options = {SINK_MOD: lambda b, h, q, k: sinks[h], "BACKEND": "FLASH"}
    attention = FlexAttention.from_arguments(query, key, value, score, whole, WIDTH**-0.5, options)
    out, logsumexp, maxima = attention.attend(query, key, value, attention.everything())
    torch.testing.assert_close(out.transpose(1, 2), _attend(query, key, value, sinks, bias))
    scores = torch.cat([_scores(query, key, bias), sinks[:, None, None].expand(BATCH, -1, 5, 1)], -1)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    torch.testing.assert_close(maxima, scores.amax(-1))


def test_kernels_that_are_declined() -> None:
    """The call of a formula becomes operators on tensors where lowering declines it."""
    inputs = _operands(5, 7)
    prepared = prepare_graph(make_fx(_attend)(*inputs), inputs, OPTIONS)
    (call,) = [node for node in prepared.nodes if str(node.target) == "flex_attention"]
    expanded = expand_declined_attention(prepared, OPTIONS, {call.name: "it is declined"})
    assert not [node for node in expanded.nodes if str(node.target) == "flex_attention"]
    compiled = fxwrap.compile_graph(expanded.graph_module, inputs, options=OPTIONS)
    (result,) = compiled(*inputs)
    torch.testing.assert_close(result, _attend(*inputs))


# --- FlexAttention and its log-sum-exp --------------------------------------------------------------------------------


def _flex(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    """As transformers corrects the output of FlexAttention by the log-sum-exp and the sinks."""
    rows, keys = query.shape[2], key.shape[2]
    window = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 4), None, None, rows, keys, "cpu", 16)
    score_mod: Callable[..., Tensor] = lambda score, b, h, q, k: score  # noqa: E731
    # torch's function refuses gradients on CPUs; its log-sum-exp is in units of log(2) here
    attend = torch.ops.higher_order.flex_attention
    output, total, *_ = attend(query, key, value, score_mod, window.as_tuple(), WIDTH**-0.5, {})
    total = total.unsqueeze(-1) * math.log(2)
    logits = sinks.view(1, -1, 1, 1).expand(query.shape[0], -1, rows, 1)
    both = torch.logsumexp(torch.cat([total, logits], -1), -1, keepdim=True)
    return (output * torch.exp(total - both)).transpose(1, 2)


@pytest.mark.parametrize("emitter", ["python", "cpp"])
def test_flex_attention(emitter: str) -> None:
    """Output and gradients, also those through the log-sum-exp, are those of the formula."""
    inputs = _operands(33, 33)
    rows = torch.arange(33)
    distance = rows[:, None] - rows
    inputs[4] = torch.where((distance >= 0) & (distance < 4), 0.0, -math.inf)[None, None]
    run, programs = _compiled(_flex, emitter=emitter)
    results, exact = _step(run, inputs), _step(_attend, _double(inputs))
    for actual, expected in zip(results, exact, strict=True):
        assert (actual.double() - expected).norm() <= 3e-6 * expected.norm()
    assert _launches(programs) == [1, 1]


# --- near misses ------------------------------------------------------------------------------------------------------


def _kept_column(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    """The sink's column stays, and a key's is dropped."""
    logits = sinks.view(-1, 1, 1).expand(BATCH, HEADS, query.shape[2], 1)
    weights = torch.softmax(torch.cat([_scores(query, key, bias), logits], -1), -1)[..., 1:]
    return weights @ value.repeat_interleave(GROUP, 1)


def _read_again(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    logits = sinks.view(-1, 1, 1).expand(BATCH, HEADS, query.shape[2], 1)
    weights = torch.softmax(torch.cat([_scores(query, key, bias), logits], -1), -1)
    return weights[..., :-1] @ value.repeat_interleave(GROUP, 1), weights[..., -1:]


def _scaled_with_scores(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
    logits = sinks.view(-1, 1, 1).expand(BATCH, HEADS, query.shape[2], 1)
    weights = torch.softmax(torch.cat([_scores(query, key, bias), logits], -1) * 2, -1)[..., :-1]
    return weights @ value.repeat_interleave(GROUP, 1)


@pytest.mark.parametrize("function", [_kept_column, _read_again, _scaled_with_scores])
def test_near_misses(function: Callable[..., Any]) -> None:
    inputs = _operands(5, 7)
    planned = check_graph(make_fx(function)(*inputs), inputs, OPTIONS)
    assert not any(name.startswith("flex_attention") for name in planned.launches)
