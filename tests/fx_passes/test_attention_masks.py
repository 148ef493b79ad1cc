"""Masks of attention: those that say what no mask or a triangle does, those that no kernel reads, and all others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.fx_passes import simplify_attention_masks
from fxwrap.fx_passes.attention.masks import find_mask_rewrites
from fxwrap.lines import ExternCall
from tests.fx_passes.test_matmuls_gpu import extern_targets, relative_error
from tests.support.long_form import sample_size

HEADS, LENGTH, WIDTH = 2, 8, 16
Mask = Callable[[Tensor], Tensor]


def _row_and_column_indices(x: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.arange(x.shape[1], device=x.device)
    return places[:, None], places[None, :]


def _all_true_mask(x: Tensor) -> Tensor:
    rows, _columns = _row_and_column_indices(x)
    return (rows >= 0).expand(x.shape[1], x.shape[1])


def _causal_mask(x: Tensor) -> Tensor:
    rows, columns = _row_and_column_indices(x)
    return columns <= rows


def _packed(x: Tensor) -> Tensor:
    """As models ask for sequences one after another in a row, of which there is one."""
    places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    which = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return ((which[:, :, None] == which[:, None, :]) & _causal_mask(x))[:, None]


def _batch(x: Tensor) -> Tensor:
    rows, columns = _row_and_column_indices(x)
    return (columns <= rows)[None, None].expand(x.shape[0], 1, -1, -1).to(x.device)


def _window(x: Tensor) -> Tensor:
    rows, columns = _row_and_column_indices(x)
    return (columns <= rows) & (columns > rows - 3)


def _strictly_upper_mask(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(-1).logical_not()


def _input_dependent_mask(x: Tensor) -> Tensor:
    return (x.sum(-1) > -1e9)[:, None, None, :]


def _mask_written_in_place(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
    mask[:, 3] = False
    return mask


def _mask_written_through_a_view(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
    mask.chunk(2, 1)[1].fill_(False)
    return mask


def _random(x: Tensor) -> Tensor:
    rows, columns = _row_and_column_indices(x)
    return (torch.rand(x.shape[1], x.shape[1], device=x.device) < 2) & (columns <= rows)


def _zero_bias(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1], device=x.device)


def _block_diagonal_mask(x: Tensor) -> Tensor:
    rows, columns = _row_and_column_indices(x)
    return rows // 4 == columns // 4


def _broadcast_mask(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], 1, dtype=torch.bool, device=x.device)


def _transposed_bias(x: Tensor) -> Tensor:
    """A bias as of distances that are looked up: heads last in memory."""
    return (x @ x.transpose(1, 2))[:, :, :, None].cos().expand(-1, -1, -1, HEADS).contiguous().permute(0, 3, 1, 2)


def _bias_with_fully_masked_rows(x: Tensor) -> Tensor:
    """Such a bias with rows that see nothing."""
    return _transposed_bias(x) + torch.where(x[:, None, :, :1] > 0, -torch.inf, 0.0).to(x.dtype)


def _repeated(x: Tensor) -> Tensor:
    return (x.sum(-1) > 0)[:1, None, :, None].expand(x.shape[0], 1, -1, x.shape[1])


class Attention(nn.Module):
    """Attention with a mask, whose result is laid out and used as in models."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.parts = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in self.parts(x).chunk(3, -1)]
        actual = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return functional.dropout(actual.transpose(1, 2).contiguous(), 0.5, self.training).flatten(2)


def _model(mask: Mask) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    return Attention(mask).eval(), torch.randn(3, LENGTH, HEADS * WIDTH)


def _graph_of(model: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> GraphModule:
    """What Dynamo captures."""
    actual: list[GraphModule] = []

    def keep(graph_module: GraphModule, _inputs: Any) -> Any:
        actual.append(graph_module)
        return graph_module

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True, dynamic=dynamic)(*inputs)
    return actual[0]


def _mask_rewrites(graph_module: GraphModule, options: Options | None = None) -> list[str]:
    return list(find_mask_rewrites(graph_module.graph, options or Options()).values())


CASES: dict[Mask, str | None] = {
    _all_true_mask: "all_true", _broadcast_mask: "all_true",
    _causal_mask: "causal", _packed: "causal", _batch: "causal",
    _transposed_bias: "contiguous", _bias_with_fully_masked_rows: "contiguous", _repeated: "contiguous",
    _window: None, _strictly_upper_mask: None, _input_dependent_mask: None, _mask_written_in_place: None,
    _mask_written_through_a_view: None, _random: None, _zero_bias: "all_true", _block_diagonal_mask: None,
}  # fmt: skip


@pytest.mark.parametrize("mask", CASES, ids=lambda mask: mask.__name__)
def test_mask_rewrites(mask: Mask) -> None:
    model, x = _model(mask)
    graph = _graph_of(model, x)
    expected = CASES[mask]
    text = str(graph.graph)
    assert _mask_rewrites(graph) == ([] if expected is None else [expected])
    changed = simplify_attention_masks(graph, Options())
    assert (changed is graph) == (expected is None)
    assert str(graph.graph) == text
    (call,) = [node for node in changed.graph.nodes if node.target is functional.scaled_dot_product_attention]
    assert call.kwargs.get("is_causal", False) is (expected == "causal")
    assert (call.kwargs["attn_mask"] is None) == (expected in ("causal", "all_true"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mask", CASES, ids=lambda mask: mask.__name__)
def test_results_match_eager(mask: Mask, training: bool) -> None:
    """The mask of distances is of the input, and has gradients."""
    model, x = _model(mask)
    x.requires_grad_(training)
    compiled = torch.compile(model, backend="fxwrap", options={"fallback": "error"}, fullgraph=True)
    actual, expected = compiled(x), model(x)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    if training:
        (gradient,) = torch.autograd.grad(actual.square().sum(), x)
        (eager,) = torch.autograd.grad(expected.square().sum(), x)
        torch.testing.assert_close(gradient, eager, rtol=1e-4, atol=1e-5)


def _compiled(model: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[fxwrap.Program]]:
    """A compiled model, and the programs that it will have."""
    programs: list[fxwrap.Program] = []

    def keep(program: fxwrap.Program) -> fxwrap.Program:
        programs.append(program)
        return program

    compiled = torch.compile(model, backend="fxwrap", options={"passes": (keep,), **options}, fullgraph=True)
    return compiled, programs


def _calls_of(program: fxwrap.Program) -> list[ExternCall]:
    return [line for line in program.body.lines if isinstance(line, ExternCall)]


def _program(model: Callable[..., Any], x: Tensor) -> fxwrap.Program:
    compiled, programs = _compiled(model)
    with torch.no_grad():
        compiled(x)
    return programs[0]


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize("mask", [_transposed_bias, _repeated], ids=lambda mask: mask.__name__)
def test_a_mask_unreadable_by_kernels_is_copied(mask: Mask) -> None:
    model, x = _model(mask)
    operators = extern_targets(_program(model, x))
    assert ATTENTION in operators
    assert "aten.bmm.default" not in operators[operators.index(ATTENTION) :]


def test_a_causal_mask_is_not_materialised() -> None:
    model, x = _model(_packed)
    (call,) = [call for call in _calls_of(_program(model, x)) if call.target == ATTENTION]
    assert True in call.arguments
    assert "attn_mask" not in dict(call.keywords)


def _attend(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=_causal_mask(x[0]))


def _reached(x: Tensor) -> Tensor:
    return _attend(x).transpose(1, 2).flatten(2)


def _viewed(x: Tensor) -> Tensor:
    return _attend(x).view(-1, WIDTH) @ x[0, 0].t()


def _doubled(x: Tensor) -> Tensor:
    return _attend(x) * 2


def _dropped(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, _causal_mask(x[0]), dropout_p=0.5).contiguous()


@pytest.mark.parametrize("function", [_attend, _reached, _viewed, _doubled, _dropped], ids=lambda item: item.__name__)
def test_attention_with_other_observable_results_is_unchanged(function: Callable[[Tensor], Tensor]) -> None:
    """Kernels return other strides than the formula, and draw other random numbers."""
    assert _mask_rewrites(_graph_of(function, torch.randn(2, HEADS, LENGTH, WIDTH))) == []


def test_mask_rewrites_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    graph = _graph_of(*_model(_packed))
    with caplog.at_level("DEBUG", logger="fxwrap.compile"):
        simplify_attention_masks(graph, Options())
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fxwrap.compile"]
    assert message.endswith("is a lower triangle and becomes is_causal")


def test_a_mask_of_another_dtype_uses_the_math_formula() -> None:
    model, x = _model(lambda x: _transposed_bias(x).float())
    assert _mask_rewrites(_graph_of(model.bfloat16(), x.bfloat16())) == []


def test_masks_that_cannot_be_evaluated_are_unchanged() -> None:
    def divided(x: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        mask = (places // (places * 0)).expand(LENGTH, -1) >= 0
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).contiguous()

    graph = make_fx(divided, tracing_mode="fake", pre_dispatch=True)(torch.randn(2, HEADS, LENGTH, WIDTH))
    assert any(node.target is torch.ops.aten.scaled_dot_product_attention.default for node in graph.graph.nodes)
    assert _mask_rewrites(graph) == []


def test_options_disable_mask_rewrites() -> None:
    graph = _graph_of(*_model(_causal_mask))
    assert _mask_rewrites(graph, Options(fuse=False)) == []
    assert _mask_rewrites(graph, Options(preserve_ops=("aten.scaled_dot_product_attention.default",))) == []


def test_symbolic_sizes_are_not_analysed() -> None:
    model, x = _model(_causal_mask)
    assert _mask_rewrites(_graph_of(model, x, dynamic=True)) == []
    transposed, x = _model(_transposed_bias)
    assert _mask_rewrites(_graph_of(transposed, x, dynamic=True)) == ["contiguous"]


def test_masks_of_one_row_or_unequal_lengths_are_not_causal() -> None:
    def other(x: Tensor) -> Tensor:
        mask = torch.ones(4, LENGTH, dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(x[:, :, :4], x, x, attn_mask=mask).contiguous()

    def one(x: Tensor) -> Tensor:
        mask = torch.ones(1, LENGTH, dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(x[:, :, :1], x, x, attn_mask=mask).contiguous()

    x = torch.randn(2, HEADS, LENGTH, WIDTH)
    assert [_mask_rewrites(_graph_of(function, x)) for function in (other, one)] == [[], []]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mask",
    [_all_true_mask, _packed, _transposed_bias, _bias_with_fully_masked_rows, _repeated],
    ids=lambda mask: mask.__name__,
)
def test_exported_programs(mask: Mask) -> None:
    model, x = _model(mask)
    exported = torch.export.export(model, (x,), strict=True)
    text = str(exported.graph)
    compiled = fxwrap.compile_graph(exported, options=Options(fallback="error"))
    torch.testing.assert_close(compiled(x), model(x))
    assert str(exported.graph) == text
    operators = extern_targets(compiled.program)
    assert ATTENTION in operators
    assert "aten.bmm.default" not in operators[operators.index(ATTENTION) :]


@pytest.mark.gpu
@pytest.mark.parametrize("emitter", ["python", "cpp", "fx"])
@pytest.mark.parametrize(
    "mask",
    [_all_true_mask, _packed, _transposed_bias, _bias_with_fully_masked_rows, _repeated],
    ids=lambda mask: mask.__name__,
)
def test_attention_on_a_gpu(mask: Mask, emitter: str) -> None:
    """One call of a library's kernel; where eager has the formula in float32, that rounds less."""
    model, x = _model(mask)
    model, x = model.cuda().bfloat16(), x.repeat(1, 16, 1).cuda().bfloat16()
    compiled, programs = _compiled(model, emitter=emitter, fallback="error")
    with torch.no_grad():
        actual, eager = compiled(x), model(x)
        truth = model.double()(x.double())
    (call,) = [call for call in _calls_of(programs[0]) if "attention" in call.target]
    assert call.target.startswith("aten._scaled_dot_product_")
    assert (True in call.arguments) == (mask is _packed)
    assert actual.stride() == eager.stride()
    more = 2 if CASES[mask] == "contiguous" else 1.3
    assert relative_error(actual, truth) <= more * relative_error(eager, truth) + 1e-5


COMPARISONS = [operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne]


@settings(max_examples=sample_size(30))
@given(st.sampled_from(COMPARISONS), st.integers(-3, 3), st.integers(1, 5), st.booleans(), st.booleans())
def test_random_index_masks(compare: Any, offset: int, length: int, transposed: bool, inverted: bool) -> None:
    """Attention with a rewritten mask has the results of attention with the mask."""

    def mask(x: Tensor) -> Tensor:
        rows, columns = _row_and_column_indices(x)
        actual = compare(rows + offset, columns)
        actual = actual.t() if transposed else actual
        return ~actual if inverted else actual

    model, x = _model(mask)
    x = x[:, :length]
    _check_graph(simplify_attention_masks(_graph_of(model, x), Options()), model, x)


def _check_graph(graph_module: GraphModule, model: nn.Module, x: Tensor) -> None:
    """Runs a graph of Dynamo's as it is."""
    by_size = {tuple(item.shape): item for item in (x, *model.parameters())}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    with torch.no_grad():
        (actual,) = graph_module(*[by_size[tuple(node.meta["example_value"].shape)] for node in placeholders])
        torch.testing.assert_close(actual, model(x))


@pytest.mark.parametrize(
    "mask", [_transposed_bias, _bias_with_fully_masked_rows, _repeated], ids=lambda mask: mask.__name__
)
def test_masks_on_other_devices_are_finite(mask: Mask) -> None:
    model, x = _model(mask)
    graph = _graph_of(model, x)
    with FakeTensorMode():
        for node in graph.graph.nodes:
            fake = node.meta.get("example_value")
            if isinstance(fake, Tensor) and node.op != "placeholder":
                moved = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cuda")
                node.meta["example_value"] = moved
    changed = simplify_attention_masks(graph, Options())
    calls = [str(node.target) for node in changed.graph.nodes]
    assert "aten.where.ScalarOther" in calls
    assert ("aten.clamp_min.default" in calls) == (mask is not _repeated)
    _check_graph(changed, model, x)
