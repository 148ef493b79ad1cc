"""Attention written as its formula in training: forward and backward become FlexAttention's kernels."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxwrap
from fxwrap.devices import CPU
from fxwrap.fx_passes.attention import score_gradients
from fxwrap.lowering.program import lower_with_coverage
from tests.fx_passes.test_recognize_attention import BATCH, DTYPES, QUIET, Formula
from tests.lowering.planned_programs import (
    STRICT,
    Planned,
    check_graph,
    close,
    compared_with_evaluator,
    plan,
    printed_launch,
)
from tests.support.agreement import assert_as_exact
from tests.support.long_form import long_only, sample_size

_SIZES = tuple([(dtype, 1) for dtype in DTYPES])
_ATTENTION = dataclasses.replace(
    CPU.attention,
    streaming_sizes=_SIZES,
    streaming_backward_sizes=_SIZES,
    library_sizes=(),
    streaming_dropout_sizes=_SIZES,
)
ANY_SIZE = dataclasses.replace(CPU, attention=_ATTENTION)
OPTIONS = STRICT.replace(devices=(ANY_SIZE,))
"""Attention of any size becomes kernels."""

KERNELS = ("flex_attention_0", "flex_attention_row_terms_0", "flex_attention_grad_query_0",
           "flex_attention_grad_key_value_0")  # fmt: skip

FORMULAS = st.builds(
    Formula, heads=st.integers(1, 2), groups=st.sampled_from((1, 1, 3)), rows=st.integers(2, 7), keys=st.integers(2, 7),
    width=st.sampled_from((2, 4)), value_width=st.sampled_from((2, 6)),
    dtype=st.sampled_from(DTYPES), upcasts=st.booleans(), scale=st.sampled_from(("query", "key", "scores", "none")),
    divides=st.booleans(), bias=st.none() | st.tuples(st.booleans(), st.booleans()),
    mask=st.sampled_from(("none", "filled", "where", "added", "causal", "lowest", "earlier", "product")),
    written_out=st.just(False), transposes=st.booleans(), merged=st.booleans(),
    sink=st.sampled_from(("none", "last", "first")), shift=st.sampled_from(("none", "max", "amax", "detached")),
    factor=st.sampled_from(("none", "head", "matrix", "divides", "mask")),
    transposed=st.just(frozenset()) | st.frozensets(st.sampled_from(("scores", "softmax", "weights"))),
).filter(
    lambda formula: (formula.factor != "mask" or formula.has_finite_scores)
    and (formula.sink == "none" or not formula.transposed)
    and (formula.factor == "none" or formula.keys > 4)  # the only weight of a row has no gradient, but rounding errors
)  # fmt: skip


TRANSPOSED = Formula(
    heads=2, groups=1, rows=3, keys=5, width=4, value_width=6, dtype=torch.float32, upcasts=False, scale="query",
    divides=False, bias=(False, False), mask="none", written_out=False, transposes=False, merged=False,
    transposed=frozenset({"scores", "softmax"}),
)  # fmt: skip
"""The bias reads the gradient of scores whose rows are keys: one transposition has cancelled another."""

KEYS_AS_ROWS = dataclasses.replace(
    TRANSPOSED, bias=(True, True), transposed=frozenset({"scores", "softmax", "weights"}), factor="divides"
)
"""Eager's gradient of the bias has keys as rows in memory, and so has the program's."""


def _step(function: Callable[..., Tensor], trained: Sequence[int] = (0, 1, 2)) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a function of the output's gradient and operands: the output, and gradients of trained operands."""

    def run(gradient: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        leaves = {position: operands[position].detach().requires_grad_() for position in trained}
        output = function(*[leaves.get(position, item) for position, item in enumerate(operands)])
        return (output.detach(), *torch.autograd.grad(output, [*leaves.values()], gradient))

    return run


def _gradient_and(operands: list[Tensor], function: Callable[..., Tensor]) -> list[Tensor]:
    output = function(*operands)
    return [torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(output.dtype), *operands]


def _double(inputs: list[Tensor]) -> list[Tensor]:
    return [item.double() if item.is_floating_point() else item for item in inputs]


def _launched(planned: Planned) -> list[str]:
    return [name for name in planned.launches if name.startswith("flex_attention")]


@given(FORMULAS, st.booleans())
@example(TRANSPOSED, True)
@example(KEYS_AS_ROWS, True)
@settings(max_examples=sample_size(25), suppress_health_check=[*QUIET, HealthCheck.large_base_example], deadline=None)
def test_random_formulas(formula: Formula, trains_bias: bool) -> None:
    """Output and gradients of a traced step are as near to float64 as eager's, and no matmul is left.

    In bfloat16, a gradient of few elements has twice eager's error once in thirty draws: more draws decide then.
    """
    inputs = _gradient_and(formula.inputs(), formula)
    trained = [*range(4 if trains_bias and formula.bias is not None else 3), *range(5, len(inputs) - 1)]
    step = _step(formula, trained)
    with mock.patch.object(score_gradients, "_LONG", 1):
        planned = check_graph(make_fx(step)(*inputs), inputs, OPTIONS)
    assert sorted(set(_launched(planned))) == sorted(KERNELS)
    assert not planned.calls
    squares = torch.zeros(())
    for seed in range(8):
        squares = squares + _squared_errors(planned, step, _other_numbers(inputs, seed) if seed else inputs)
        errors, eager_errors, norms = squares.sqrt().unbind(1)
        rounding = torch.finfo(formula.dtype).eps * norms + 1e-6 * norms.max()
        if (errors <= 1.2 * eager_errors + rounding).all():
            return
    raise AssertionError(f"errors {errors} of gradients of norms {norms}, and eager's {eager_errors}")


def test_fully_masked_rows() -> None:
    """The library's formula has zeros, in output and gradients, where a mask hides all keys of a row."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    tensors = [torch.randn(BATCH, 2, 6, 4) for _ in range(4)]
    mask = torch.rand(BATCH, 1, 6, 6) < 0.5
    mask[0, 0, 2], mask[1] = False, False
    inputs, step = [*tensors, mask], _step(attend)
    planned = check_graph(make_fx(step)(*inputs), inputs, OPTIONS)
    assert sorted(set(_launched(planned))) == sorted(KERNELS)


def _squared_errors(planned: Planned, step: Callable[..., Any], inputs: list[Tensor]) -> Tensor:
    """Returns a row for each result: the squared norms of its error, of eager's error, and of the exact result."""
    results, eager, exact = planned.run([item.clone() for item in inputs]), step(*inputs), step(*_double(inputs))
    rows = zip(results, eager, exact, strict=True)
    differences = [(one.double() - reference, other.double() - reference, reference) for one, other, reference in rows]
    return torch.stack([torch.stack([item.double().square().sum() for item in row]) for row in differences])


def _other_numbers(inputs: list[Tensor], seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=random).to(x.dtype) if x.is_floating_point() else x for x in inputs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_printed_kernels(dtype: torch.dtype) -> None:
    """The kernels of each language have the evaluator's results, with rows whose scores all are the lowest number.

    They store the gradient of each score, of which that of the bias is a sum.
    """
    formula = Formula(1, 2, 5, 7, 4, 6, dtype, False, "scores", True, (False, True), "lowest", False, True, False)
    operands = formula.inputs()
    operands[4][1] = False
    inputs = _gradient_and(operands, formula)
    step = _step(formula, range(4))
    planned = plan(make_fx(step)(*inputs), inputs, OPTIONS)
    assert sorted(set(_launched(planned))) == sorted(KERNELS)
    for language in ("cpp", "triton"):
        compared = compared_with_evaluator(printed_launch([planned], language))

        results = planned.run([item.clone() for item in inputs], compared)
        for actual, exact in zip(results, step(*_double(inputs)), strict=True):
            assert close(actual, exact.to(dtype))


# --- torch.compile ----------------------------------------------------------------------------------------------------


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    query, key, value = [item.transpose(1, 2) for item in (query, key, value)]
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(mask, -1e30)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(2)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Scores between -2 and 2, whose backward reads the hyperbolic tangent."""
    query, key, value = [item.transpose(1, 2) for item in (query, key, value)]
    scores = torch.tanh(query @ key.mT / 2) * 2
    return torch.softmax(torch.where(mask, -math.inf, scores), -1) @ value


def _clipped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The gradient of scores is no derivative."""
    return _Clipped.apply(query.transpose(1, 2) @ key.permute(0, 2, 3, 1)).softmax(-1) @ value.transpose(1, 2)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        return scores * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.02)


def _operands(rows: int = 9, keys: int = 7, heads: int = 3) -> list[Tensor]:
    random = torch.Generator().manual_seed(rows)
    tensors = [torch.randn(BATCH, length, heads, 8, generator=random) for length in (rows, keys, keys)]
    mask = torch.rand(BATCH, 1, rows, keys, generator=random) < 0.4
    mask[..., 0] = False
    return [*tensors, mask]


def _compiled(
    function: Callable[..., Any], spec: Any = ANY_SIZE, emitter: str = "python", **options: Any
) -> tuple[Callable[..., Any], list[str]]:
    """Returns a compiled function, and a list that gets its programs as texts."""
    torch._dynamo.reset()
    programs: list[str] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(str(program))
        return program

    passes = {"emitter": emitter, "devices": [spec], "passes": (keep,)}
    return torch.compile(function, backend="fxwrap", options=passes, **options), programs


def _launches(programs: list[str]) -> list[int]:
    """Returns the attention kernels of each program, one for a backward's gradient of queries."""
    return [len(re.findall(r"launch @flex_attention_(?:\d|grad_query)", text)) for text in programs]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("function", "emitter"),
    [(_attend, "python"), (_attend, "cpp"), (_attend, "fx"), (_capped, "interpreter"), (_clipped, "interpreter")],
)
def test_compiled(function: Callable[..., Tensor], emitter: str) -> None:
    """Forward and backward have no matmul, and no matrix of scores is saved; rows may be masked altogether."""
    *operands, mask = _operands()
    if function is _attend:
        mask[0, 0, 3] = True
    inputs = _gradient_and([*operands, mask], function)
    run, programs = _compiled(function, emitter=emitter)
    exact, eager = _step(function)(*_double(inputs)), _step(function)(*inputs)
    leaves = [item.requires_grad_() for item in inputs[1:4]]
    output = run(*leaves, mask)
    results = (output.detach(), *torch.autograd.grad(output, leaves, inputs[0]))
    assert _launches(programs) == [1, 1]
    assert not any("bmm" in text.split("kernel @")[0] for text in programs)
    for actual, plain, reference in zip(results, eager, exact, strict=True):
        assert actual.stride() == plain.stride()
        assert_as_exact(actual, plain, reference, slack=1e-7)


def test_rows_of_minus_infinity_have_no_gradient() -> None:
    """Where all scores of a row are minus infinity, output and gradients are NaN, as eager's."""
    *operands, mask = _operands()
    mask[0, 0, 3] = True
    inputs = _gradient_and([*operands, mask], _capped)
    planned = plan(make_fx(_step(_capped))(*inputs), inputs, OPTIONS)
    for actual, eager in zip(planned.run([item.clone() for item in inputs]), _step(_capped)(*inputs), strict=True):
        torch.testing.assert_close(actual, eager, equal_nan=True)


@pytest.mark.filterwarnings("error:Raw SymInt")
def test_symbolic_lengths() -> None:
    run, programs = _compiled(_attend)
    for rows, keys in ((9, 7), (5, 11)):
        inputs = _gradient_and(_operands(rows, keys), _attend)
        leaves = [item.requires_grad_() for item in inputs[1:4]]
        for item in leaves:
            torch._dynamo.mark_dynamic(item, 1)
        for dim in (2, 3):
            torch._dynamo.mark_dynamic(inputs[4], dim)
        output = run(*leaves, inputs[4])
        results = (output.detach(), *torch.autograd.grad(output, leaves, inputs[0]))
        torch.testing.assert_close(results, _step(_attend)(*inputs), atol=1e-5, rtol=1e-5)
    assert _launches(programs) == [1, 1]


def test_compiled_step() -> None:
    """A step of training that is one graph."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8))
    *operands, mask = _operands()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    programs: list[str] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(str(program))
        return program

    def step() -> Tensor:
        loss = _attend(*[item @ weight for item in operands], mask).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    start = weight.detach().clone()
    compiled = fxwrap.compile_step(step, (), options=fxwrap.Options(devices=(ANY_SIZE,), passes=(keep,)))
    with torch.no_grad():
        weight.copy_(start)
    losses = [compiled()]
    updated = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(start)
    losses.append(step())
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(updated, weight.detach(), atol=1e-4, rtol=1e-4)
    assert _launches(programs) == [2]


# --- what stays -------------------------------------------------------------------------------------------------------


def _returned(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.mT, -1)
    return weights @ value + weights.sum(-1, keepdim=True)


STAYING = {_returned: "the gradient of its weights is no matmul"}


@pytest.mark.parametrize("function", STAYING, ids=lambda function: function.__name__)
def test_formulas_that_stay(function: Callable[..., Tensor]) -> None:
    """Gradients that no kernel computes."""
    operands = [torch.randn(BATCH, 3, 6, 4) for _ in range(3)]
    run, programs = _compiled(function)
    results = []
    for call in (run, function):
        leaves = [item.clone().requires_grad_() for item in operands]
        torch.manual_seed(3)
        output = call(*leaves)
        output.sin().sum().backward()
        results.append([output.detach(), *[item.grad for item in leaves if item.grad is not None]])
    torch.testing.assert_close(*results)
    assert _launches(programs) == [0, 0]
    inputs = _gradient_and(operands, function)
    coverage = lower_with_coverage(make_fx(_step(function))(*inputs), inputs, options=OPTIONS).coverage
    (reason,) = [item.reason for item in coverage if item.operator == "aten._softmax.default"]
    assert reason == f"no attention kernel: {STAYING[function]}"


@pytest.mark.parametrize(("probability", "trains"), [(0.0, True), (0.5, False)])
def test_dropout_of_nothing(probability: float, trains: bool) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.dropout(torch.softmax(query @ key.mT, -1), probability, trains) @ value

    operands = [torch.randn(BATCH, 3, 6, 4) for _ in range(3)]
    inputs = _gradient_and(operands, attend)
    planned = check_graph(make_fx(_step(attend))(*inputs), inputs, OPTIONS)
    assert sorted(set(_launched(planned))) == sorted(KERNELS)


def test_small_attention_stays() -> None:
    """The device says from which size kernels are faster; an option preserves the operators."""
    inputs = _gradient_and(_operands(), _attend)
    small = dataclasses.replace(
        ANY_SIZE, attention=dataclasses.replace(ANY_SIZE.attention, streaming_backward_sizes=((torch.float32, 8),))
    )
    narrow = dataclasses.replace(
        ANY_SIZE, attention=dataclasses.replace(ANY_SIZE.attention, streaming_backward_width=7)
    )
    preserved = OPTIONS.replace(preserve_ops=("aten._softmax.default",))
    for options in (STRICT.replace(devices=(small,)), STRICT.replace(devices=(narrow,)), preserved):
        planned = plan(make_fx(_step(_attend))(*inputs), inputs, options)
        assert planned.calls.count("aten.bmm.default") == 6


# --- models -----------------------------------------------------------------------------------------------------------

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def _tokens(padding: slice) -> dict[str, Tensor]:
    mask = torch.ones(BATCH, 12, dtype=torch.long)
    mask[1, padding] = 0
    return {"input_ids": torch.randint(64, (BATCH, 12)), "attention_mask": mask}


def _bert() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **_SMALL, **_NO_DROPOUT)
    return transformers.BertModel(config), _tokens(slice(9, None))


def _vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(image_size=16, patch_size=4, **_SMALL, **_NO_DROPOUT)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(BATCH, 3, 16, 16)}


def _gpt_neox() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPTNeoXConfig(
        vocab_size=64, max_position_embeddings=32, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False, **_SMALL
    )  # fmt: skip
    return transformers.GPTNeoXModel(config), _tokens(slice(9, None))


@pytest.mark.parametrize(
    "make_model", [_bert, *map(long_only, (_vit, _gpt_neox))], ids=lambda function: function.__name__.strip("_")
)
def test_models(make_model: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    """Each layer's attention is kernels in forward and backward, and gradients are as near to float64 as eager's."""
    torch.manual_seed(0)
    check_model(*make_model(), 2)


def check_model(model: nn.Module, inputs: dict[str, Tensor], layers: int) -> None:
    """Compares a compiled step of training with eager and float64; each layer's attention is kernels."""
    model.train().set_attn_implementation("eager")  # type: ignore[operator]

    def forward(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        output: Tensor = model(**inputs)[0]
        return output

    def step(call: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        dtype = next(iter(model.parameters())).dtype
        cast = {key: item.to(dtype) if item.is_floating_point() else item for key, item in inputs.items()}
        output = call(model, cast)
        scale = torch.linspace(-1, 1, output.numel(), dtype=dtype).view(output.shape)
        (output * scale).sum().backward()
        return [output.detach(), *[item.grad.clone() for item in model.parameters() if item.grad is not None]]

    run, programs = _compiled(forward)
    results, eager = step(run), step(forward)
    assert _launches(programs) == [layers, layers]
    model.double()
    exact = step(forward)
    unit = max(float(item.norm()) for item in exact)
    errors = [
        math.sqrt(sum(float((item.double() - other).norm()) ** 2 for item, other in zip(tensors, exact, strict=True)))
        for tensors in (results, eager)
    ]
    assert errors[0] <= 1.2 * errors[1] + 1e-6 * unit
