"""Attention written as its formula: random formulas against eager mode and float64, near misses, and models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import fxwrap
from fxwrap.comparison import capture
from fxwrap.compile.backend import make_backend
from fxwrap.devices import CPU
from fxwrap.fx_passes.attention.nodes import folded_number
from fxwrap.loop_ir import HALF_PRECISION
from fxwrap.lowering.program import lower_with_coverage
from fxwrap.testing import assert_emitters_agree
from tests.lowering.planned_programs import STRICT, Planned, check_graph, compared_with_evaluator, plan, printed_launch
from tests.support.agreement import assert_as_exact
from tests.support.long_form import sample_size

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ANY_SIZE = dataclasses.replace(
    CPU,
    attention=dataclasses.replace(
        CPU.attention, streaming_sizes=tuple([(dtype, 1) for dtype in DTYPES]), library_sizes=()
    ),
)
OPTIONS = STRICT.replace(devices=(ANY_SIZE,))
"""Attention of any size becomes one kernel."""

BATCH = 2


@dataclass(frozen=True)
class Formula:
    """One way to write attention; `inputs` has tensors for it, `__call__` computes it.

    Fields:
        heads, groups: the heads of keys, and the query heads of each.
        rows, keys, width, value_width: sizes.
        dtype: that of all operands; `upcasts` computes the softmax in float32.
        scale: what is multiplied: "query", "key", "scores", "baddbmm" or "none"; `divides` divides instead.
        bias: the sizes of a bias that is added, with 1 where it is broadcast, or None.
        mask: "none", "filled", "where", "added", "causal", "lowest" (finfo.min), "earlier" (the same, by positions: the
            first two rows have no key) or "product" (1 - mask, scaled).
        written_out: the softmax is its formula too.
        transposes: the result is (batch, rows, heads * width).
        merged: scores are (batch * heads, rows, keys).
        widens: queries and keys of half precision are cast to float32 before they are multiplied.
        sink: "none", or where a logit of each head is concatenated to its scores: "last" or "first".
        shift: what is subtracted from scores before a softmax: "none", "max", "amax" or "detached".
        transposed: the matrices with keys as rows: any of "scores", "softmax" and "weights".
        factor: what weights are multiplied by after the softmax: "none", a number of each "head", a "matrix" like the
            bias, which "divides" them instead, or the "mask".
    """

    heads: int
    groups: int
    rows: int
    keys: int
    width: int
    value_width: int
    dtype: torch.dtype
    upcasts: bool
    scale: str
    divides: bool
    bias: tuple[bool, bool] | None
    mask: str
    written_out: bool
    transposes: bool
    merged: bool
    widens: bool = False
    sink: str = "none"
    shift: str = "none"
    transposed: frozenset[str] = frozenset()
    factor: str = "none"

    @property
    def has_finite_scores(self) -> bool:
        """Whether all scores are computed from matmuls and finite numbers."""
        return self.bias is None and self.sink == "none" and self.mask not in ("filled", "where", "added")

    def inputs(self) -> list[Tensor]:
        """Returns random operands; no row is without a key."""
        random = torch.Generator().manual_seed(self.rows * 100 + self.keys)
        heads = self.heads * self.groups
        shapes = [
            (BATCH, self.rows, heads, self.width), (BATCH, self.keys, self.heads, self.width),
            (BATCH, self.heads, self.keys, self.value_width),
        ]  # fmt: skip
        tensors = [torch.randn(shape, generator=random).to(self.dtype) for shape in shapes]
        of_batch, of_head = self.bias or (False, False)
        bias = (BATCH if of_batch else 1, heads if of_head else 1, self.rows, self.keys)
        mask = torch.rand(BATCH, 1, 1, self.keys, generator=random) < 0.7
        mask[..., 0] = True
        sinks = [] if self.sink == "none" else [torch.randn(heads, generator=random).to(self.dtype)]
        return [*tensors, torch.randn(bias, generator=random).to(self.dtype), mask, *sinks]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor, *sinks: Tensor
    ) -> Tensor:  # fmt: skip
        query, key, value = query.transpose(1, 2), self._repeated(key.transpose(1, 2)), self._repeated(value)
        if self.widens and self.dtype in HALF_PRECISION:
            query, key = query.float(), key.float()
        scale = self.width**0.5 if self.divides else self.width**-0.5
        if self.scale in ("query", "key"):
            scaled = query if self.scale == "query" else key
            scaled = scaled / scale if self.divides else scaled * scale
            query, key = (scaled, key) if self.scale == "query" else (query, scaled)
        if self.merged:
            query, key, value = [item.reshape(-1, *item.shape[2:]) for item in (query, key, value)]
        if self.scale == "baddbmm" and self.merged:
            scores = torch.baddbmm(query.new_ones(1, 1, self.keys), query, key.transpose(1, 2), beta=0.5, alpha=scale)
        elif "scores" in self.transposed:
            scores = (key @ query.transpose(-1, -2)).transpose(-1, -2)
        else:
            scores = query @ key.transpose(-1, -2)
        if self.scale == "scores":
            scores = scores / scale if self.divides else scores * scale
        weights = self._softmax(self._masked(scores, bias, mask), *sinks).to(value.dtype)
        weights = self._multiplied(weights, bias.detach().abs() + 0.5, mask)
        if self.merged:
            weights = weights.reshape(-1, self.rows, self.keys)
        if "weights" in self.transposed:
            result = (value.mT @ weights.mT).mT
        else:
            result = weights @ value
        if self.merged:
            result = result.reshape(BATCH, -1, self.rows, self.value_width)
        return result.transpose(1, 2).reshape(BATCH, self.rows, -1) if self.transposes else result

    def _repeated(self, tensor: Tensor) -> Tensor:
        batch, heads, keys, width = tensor.shape
        if self.groups == 1:
            return tensor
        repeated = tensor[:, :, None].expand(batch, heads, self.groups, keys, width)
        return repeated.reshape(batch, heads * self.groups, keys, width)

    def _masked(self, scores: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        if self.merged:
            scores = scores.view(BATCH, -1, self.rows, self.keys)
        if self.bias is not None:
            scores = scores + bias
        lowest = torch.finfo(scores.dtype).min
        match self.mask:
            case "filled":
                return scores.masked_fill(~mask, -math.inf)
            case "where":
                return torch.where(mask, scores, -math.inf)
            case "added":
                return scores + torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, -math.inf)
            case "causal":
                row, key = torch.arange(self.rows)[:, None], torch.arange(self.keys)
                return scores + torch.where(row + 1 > key, 0.0, -1e4).to(scores.dtype)
            case "lowest":
                return torch.where(mask, scores, lowest)
            case "earlier":
                row, key = torch.arange(self.rows)[:, None], torch.arange(self.keys)
                lowest = max(lowest, torch.finfo(torch.float32).min)  # scores may be cast to float32
                return torch.where((key <= row) & (row > 1), scores, lowest)
            case "product":
                return scores + (1.0 - mask.to(scores.dtype)) * -1e4
            case _:
                return scores

    def _softmax(self, scores: Tensor, *sinks: Tensor) -> Tensor:
        dtype, scores = scores.dtype, scores.float() if self.upcasts else scores
        for sink in sinks:
            logits = sink.to(scores.dtype).view(-1, 1, 1)
            logits = logits.expand(BATCH, -1, self.rows, 1) if scores.ndim == 4 else logits.repeat(BATCH, self.rows, 1)
            scores = torch.cat([scores, logits] if self.sink == "last" else [logits, scores], -1)
        if self.written_out:
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            weights = weights / weights.sum(-1, keepdim=True)
        elif "softmax" in self.transposed and not sinks:
            weights = torch.softmax(scores.mT, -2).mT
        else:
            weights = torch.softmax(self._shifted(scores), -1)
        if sinks:
            weights = weights[..., :-1] if self.sink == "last" else weights[..., 1:]
        return weights.to(dtype)

    def _multiplied(self, weights: Tensor, factor: Tensor, mask: Tensor) -> Tensor:
        match self.factor:
            case "head":
                return weights * factor[:1, :, :1, :1]
            case "matrix":
                return factor * weights
            case "divides":
                return weights / factor
            case "mask":
                return weights.masked_fill(~mask, 0.0)
            case _:
                return weights

    def _shifted(self, scores: Tensor) -> Tensor:
        match self.shift:
            case "max":
                return scores - scores.max(-1, keepdim=True).values
            case "amax":
                return scores - scores.amax(-1, keepdim=True)
            case "detached":
                return scores - scores.detach().max(-1, keepdim=True)[0]
            case _:
                return scores


FORMULAS = st.builds(
    Formula, heads=st.integers(1, 2), groups=st.sampled_from((1, 1, 3)), rows=st.integers(2, 9), keys=st.integers(2, 9),
    width=st.sampled_from((1, 4, 5)), value_width=st.sampled_from((1, 4, 6)),
    dtype=st.sampled_from(DTYPES), upcasts=st.booleans(),
    scale=st.sampled_from(("query", "key", "scores", "baddbmm", "none")), divides=st.booleans(),
    bias=st.none() | st.tuples(st.booleans(), st.booleans()),
    mask=st.sampled_from(("none", "filled", "where", "added", "causal", "lowest", "earlier", "product")),
    written_out=st.booleans(), transposes=st.booleans(), merged=st.booleans(),
    widens=st.booleans(), sink=st.sampled_from(("none", "none", "last", "first")),
    shift=st.sampled_from(("none", "max", "amax")),
    transposed=st.frozensets(st.sampled_from(("scores", "softmax", "weights"))) | st.just(frozenset()),
    factor=st.sampled_from(("none", "none", "head", "matrix", "divides", "mask")),
).filter(lambda formula: formula.factor != "mask" or formula.has_finite_scores)  # fmt: skip


def recognised(coverage: Any) -> int:
    """Returns the number of attention kernels."""
    return sum(item.operator == "flex_attention" for item in coverage)


def _plan(formula: Formula) -> Planned:
    planned = plan(make_fx(formula)(*formula.inputs()), formula.inputs(), OPTIONS)
    assert [name for name in planned.launches if name.startswith("flex_attention")], planned.program
    assert not planned.calls
    return planned


@given(FORMULAS)
@settings(max_examples=sample_size(60), suppress_health_check=QUIET, deadline=None)
def test_random_formulas(formula: Formula) -> None:
    """Each is one kernel, with eager's result, and with less error than eager's times 1.2, or than float32 must have.

    That is relative to the terms of the result, not to the result: where terms cancel, eager's error is luck.
    """
    inputs = formula.inputs()
    planned = check_graph(make_fx(formula)(*inputs), inputs, OPTIONS)
    assert [name for name in planned.launches if name.startswith("flex_attention")], planned.program
    (result,) = planned.run([item.clone() for item in inputs])
    query, key, value, *others = [item.double() if item.is_floating_point() else item for item in inputs]
    exact, terms = (formula(query, key, values, *others) for values in (value, value.abs()))
    errors = [float((item.double() - exact).norm()) for item in (result, formula(*inputs))]
    assert errors[0] <= 1.2 * errors[1] + 1e-6 * float(terms.norm())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("language", "count"), [("cpp", sample_size(10)), ("triton", sample_size(10))])
def test_printed_kernels(language: str, count: int) -> None:
    """Kernels of each language have the evaluator's results."""
    drawn: list[tuple[Formula, Planned]] = []

    @given(FORMULAS)
    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=QUIET, deadline=None)
    def draw(formula: Formula) -> None:
        drawn.append((formula, _plan(formula)))

    draw()
    compared = compared_with_evaluator(printed_launch([planned for _, planned in drawn], language))

    for formula, planned in drawn:
        planned.run([item.clone() for item in formula.inputs()], compared)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Each length is `query`'s."""
    length = query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (query @ key.mT / 2 + bias).masked_fill(~seen, torch.finfo(query.dtype).min)
    return (torch.softmax(scores.float(), -1).to(query.dtype) @ value).transpose(1, 2).flatten(2)


def _operands(length: int = 12, heads: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(BATCH, heads, length, 8)] * 3 + [(1, heads, length, length)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def test_emitters() -> None:
    """Through torch.compile, in each emitter."""
    options = fxwrap.Options(devices=(ANY_SIZE,))
    assert_emitters_agree(_attend, _operands(), options=options)
    (graph,) = capture(_attend, _operands(), options=options)
    assert recognised(graph.compiled.coverage) == 1
    reasons = {item.node: item.reason for item in graph.compiled.coverage}
    assert reasons["bmm"] == reasons["_softmax"] == reasons["bmm_1"] == "attention recognised"


class _Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return _attend(query, key, value, bias)


def test_symbolic_lengths() -> None:
    """An exported program with symbolic batch and length is one kernel for other sizes too."""
    batch, length = Dim("batch", min=2), Dim("length", min=2)
    shapes = (*[{0: batch, 2: length}] * 3, {2: length, 3: length})
    program = export(_Attention(), tuple(_operands()), dynamic_shapes={"query": shapes[0], "key": shapes[1],
                     "value": shapes[2], "bias": shapes[3]})  # fmt: skip
    compiled = fxwrap.compile_graph(program, options=fxwrap.Options(devices=(ANY_SIZE,)))
    assert recognised(compiled.coverage) == 1
    for size in (12, 5):
        inputs = _operands(size)
        assert_close(compiled(*inputs), _attend(*inputs))


def test_masks_of_positions_are_computed() -> None:
    """A causal mask is a comparison of indices: the kernel reads queries, keys and values only."""

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        position = torch.arange(query.shape[2])
        mask = torch.where(position[:, None] >= position, 0.0, -math.inf)
        return torch.softmax(query @ key.mT + mask, -1) @ value

    inputs = _operands()[:3]
    planned = check_graph(make_fx(causal)(*inputs), inputs, OPTIONS)
    (kernel,) = planned.kernels.values()
    assert len(kernel.inputs) == 3
    assert len(planned.launches) == 1


def test_constant_scales_are_numbers() -> None:
    """A scale that is computed from a tensor on the CPU needs no buffer, wherever queries are."""

    def scaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scale = torch.sqrt(torch.tensor(64.0) * 3)
        return torch.softmax((query / scale) @ key.mT + (query[..., :1] / scale), -1) @ value

    inputs = _operands()[:3]
    graph = make_fx(scaled)(*inputs)
    planned = check_graph(graph, inputs, OPTIONS)
    (kernel,) = planned.kernels.values()
    assert len(kernel.inputs) == 4
    fakes = {node: node.meta["val"] for node in graph.graph.nodes if "val" in node.meta}
    (root,) = [node for node in graph.graph.nodes if node.target is torch.ops.aten.sqrt.default]
    assert folded_number(root, fakes) == pytest.approx(math.sqrt(192), rel=1e-6)
    assert folded_number(root, fakes, lambda node: node is root.args[0]) is None
    assert folded_number(next(iter(graph.graph.nodes)), fakes) is None


def test_biases_are_copied_where_keys_are_no_neighbours() -> None:
    def biased(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return torch.softmax(query @ key.mT + table.permute(2, 0, 1), -1) @ value

    inputs = [*_operands()[:3], torch.randn(12, 12, 3)]
    planned = check_graph(make_fx(biased)(*inputs), inputs, OPTIONS)
    assert len(planned.launches) == 2
    assert planned.launches[1] == "flex_attention_0"


def test_keys_of_groups_are_not_repeated() -> None:
    formula = Formula(2, 3, 5, 7, 4, 6, torch.float32, False, "none", False, None, "none", False, True, False)
    planned = _plan(formula)
    assert planned.launches == ["flex_attention_0"]
    (kernel,) = planned.kernels.values()
    assert kernel.inputs[1].dtype is torch.float32
    assert len(kernel.inputs) == 3


def test_queries_and_keys_in_float32_are_read_before_their_casts() -> None:
    """The kernel is one of the dtype of the values, which is slower in float32 on some devices."""
    spec = dataclasses.replace(
        ANY_SIZE, attention=dataclasses.replace(ANY_SIZE.attention, streaming_sizes=((torch.bfloat16, 1),))
    )
    formula = Formula(2, 3, 5, 7, 4, 6, torch.bfloat16, False, "query", False, None, "lowest", False, True, False, True)
    inputs = formula.inputs()
    planned = check_graph(make_fx(formula)(*inputs), inputs, STRICT.replace(devices=(spec,)))
    (kernel,) = planned.kernels.values()
    assert [item.dtype for item in kernel.inputs if item.dtype.is_floating_point] == [torch.bfloat16] * 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_fully_masked_rows(lowest: float) -> None:
    """NaN where all scores are minus infinity, a mean of all values where they are equal."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax((query @ key.mT).masked_fill(~mask, lowest), -1) @ value

    query, key, value, _ = _operands()
    mask = torch.rand(BATCH, 1, 12, 12) < 0.5
    mask[:, :, 3], mask[..., 5, :9], mask[..., 5, 9:] = False, False, True
    inputs = [query, key, value, mask]
    planned = check_graph(make_fx(attend)(*inputs), inputs, OPTIONS)
    assert planned.launches == ["flex_attention_0"]
    assert_emitters_agree(attend, inputs, options=fxwrap.Options(devices=(ANY_SIZE,)), emitters=["cpp"])


def test_shifted_windows() -> None:
    """A mask that differs between the windows of an image: scores are viewed with another number of dimensions."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = query @ key.mT
        windows, heads, length = mask.shape[0], scores.shape[1], scores.shape[-1]
        scores = scores.view(-1, windows, heads, length, length) + mask[:, None][None]
        return torch.softmax(scores.view(-1, heads, length, length), -1) @ value

    query, key, value, _ = _operands()
    inputs = [*[torch.cat([item, item.flip(0)]) for item in (query, key, value)], torch.randn(2, 12, 12)]
    planned = check_graph(make_fx(attend)(*inputs), inputs, OPTIONS)
    assert planned.launches == ["flex_attention_0"]


@pytest.mark.parametrize("transposes", [False, True])
def test_library_kernel(transposes: bool) -> None:
    """Long attention without bias and mask is a call of the library's kernel where the device says so."""
    formula = Formula(2, 1, 5, 7, 4, 4, torch.float32, False, "query", False, None, "none", False, transposes, False)
    spec = dataclasses.replace(
        ANY_SIZE, attention=dataclasses.replace(ANY_SIZE.attention, library_sizes=((torch.float32, 4),))
    )
    planned = check_graph(make_fx(formula)(*formula.inputs()), formula.inputs(), STRICT.replace(devices=(spec,)))
    (call,) = planned.calls
    assert call.startswith("aten._scaled_dot_product_flash_attention")
    biased = dataclasses.replace(formula, bias=(True, True))
    planned = check_graph(make_fx(biased)(*biased.inputs()), biased.inputs(), STRICT.replace(devices=(spec,)))
    assert not planned.calls


# --- models -----------------------------------------------------------------------------------------------------------


def _t5() -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    mask = torch.ones(BATCH, 12, dtype=torch.long)
    mask[1, 9:] = 0
    inputs = {"input_ids": torch.randint(64, (BATCH, 12)), "attention_mask": mask}
    return transformers.T5EncoderModel(config), inputs, 2


def _swin() -> tuple[nn.Module, dict[str, Tensor], int]:
    """Windows in the first layer, shifted ones in the second, which have a mask."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4
    )  # fmt: skip
    return transformers.SwinModel(config), {"pixel_values": torch.randn(BATCH, 3, 16, 16)}, 2


def _deberta() -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.DebertaV2Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(64, (BATCH, 12)), "attention_mask": torch.ones(BATCH, 12, dtype=torch.long)}
    return transformers.DebertaV2Model(config), inputs, 1


def _words() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(64, (BATCH, 12))}


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32, "num_hidden_layers": 2,
}  # fmt: skip


def _gpt_neo() -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        window_size=4, max_position_embeddings=32, intermediate_size=16, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPTNeoModel(config), _words(), 2


def _beit() -> tuple[nn.Module, dict[str, Tensor], int]:
    config = transformers.BeitConfig(
        image_size=16, patch_size=4, num_attention_heads=2, use_relative_position_bias=True, **SIZES
    )
    return transformers.BeitModel(config), {"pixel_values": torch.randn(BATCH, 3, 16, 16)}, 2


def _levit() -> tuple[nn.Module, dict[str, Tensor], int]:
    """With attention between the stages, whose queries are fewer than their keys."""
    config = transformers.LevitConfig(
        image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8]
    )
    return transformers.LevitModel(config), {"pixel_values": torch.randn(BATCH, 3, 64, 64)}, 5


def _mpnet() -> tuple[nn.Module, dict[str, Tensor], int]:
    return transformers.MPNetModel(transformers.MPNetConfig(num_attention_heads=2, **SIZES)), _words(), 2


def _convbert() -> tuple[nn.Module, dict[str, Tensor], int]:
    """Each layer has a softmax of convolution weights beside that of attention."""
    config = transformers.ConvBertConfig(embedding_size=16, num_attention_heads=4, conv_kernel_size=3, **SIZES)
    return transformers.ConvBertModel(config), _words(), 2


MODELS = (_t5, _swin, _deberta, _gpt_neo, _beit, _levit, _mpnet, _convbert)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("route", ["make_fx", "export", "compile"])
@pytest.mark.parametrize("make_model", MODELS, ids=lambda function: function.__name__.strip("_"))
def test_models(make_model: Callable[[], tuple[nn.Module, dict[str, Tensor], int]], route: str) -> None:
    """Each layer's attention is one kernel, in graphs from each source; results are compared for exported ones."""
    model, inputs, count = make_model()
    model.eval().set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        planned = _planned_model(model, inputs, route)
    assert sum(name.startswith("flex_attention") for name in planned.launches) == count
    if route != "export":
        return
    result = planned.run([item.clone() for item in inputs.values()])[0]
    with torch.no_grad():
        eager, exact = model(**inputs)[0], model.double()(**_double(inputs))[0]
    assert_as_exact(result, eager, exact, slack=1e-7)


def _planned_model(model: nn.Module, inputs: dict[str, Tensor], route: str) -> Planned:
    options = OPTIONS.replace(fallback="warn")
    if route == "export":
        return plan(export(model, (), inputs), None, options)  # type: ignore[arg-type]
    if route == "make_fx":
        trace = make_fx(
            lambda *items: model(**dict(zip(inputs, items, strict=True)))[0], _error_on_data_dependent_ops=False
        )  # models ask whether a mask is all true
        return plan(trace(*inputs.values()), list(inputs.values()), options)
    plans: list[Planned] = []

    def compile_with(graph: Any, items: Any, **_: Any) -> Any:
        plans.append(plan(graph, items, options))
        raise NotImplementedError

    torch.compiler.reset()
    with pytest.raises(Exception, match="NotImplementedError"):
        torch.compile(model, backend=make_backend(fxwrap.Options(), compile_with), fullgraph=True)(**inputs)
    return plans[0]


def _double(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: item.double() if item.is_floating_point() else item for name, item in inputs.items()}


# --- near misses ------------------------------------------------------------------------------------------------------


def _other_axis(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT, -2) @ value


def _returned_weights(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(query @ key.mT, -1)
    return weights @ value, weights


def _returned_scores(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT
    return torch.softmax(scores + bias, -1) @ value, scores


def _right_operand(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return value.mT @ torch.softmax(query @ key.mT, -1)


def _overwritten_value(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.mT, -1)
    result = weights @ value
    value.zero_()
    return result


def _gated(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    scores = query @ key.mT
    return torch.softmax(scores * torch.sigmoid(scores), -1) @ value


def _mixed_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    scores = query @ key.mT
    mixed = scores.reshape(BATCH, 3, 6, 24) + bias.reshape(1, 3, 6, 24)
    return torch.softmax(mixed.view(scores.shape), -1) @ value


def _dropout(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.mT, -1)
    return torch.ops.aten.native_dropout(weights, 0.5, True)[0] @ value


NEAR_MISSES: Mapping[Callable[..., Any], str] = {
    _returned_weights: "its weights are read again",
    _returned_scores: "its scores are read again",
    _right_operand: "its weights are no left operand of a matmul",
    _overwritten_value: "the graph overwrites one of its operands",
    _gated: "its scores are read again",
    _mixed_rows: "its scores are reshaped across rows and keys",
    _dropout: "its weights have dropout",
}


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda function: function.__name__)
def test_near_misses(function: Callable[..., Any]) -> None:
    """They stay as they are written, with right results, and coverage says why."""
    inputs = _operands()
    graph = make_fx(function)(*[item.clone() for item in inputs])
    if function is not _dropout:
        check_graph(graph, inputs, OPTIONS)
    coverage = lower_with_coverage(graph, inputs, options=OPTIONS).coverage
    (reason,) = [item.reason for item in coverage if item.operator == "aten._softmax.default"]
    assert reason == f"no attention kernel: {NEAR_MISSES[function]}"
    assert not recognised(coverage)


def test_other_softmaxes_have_no_reason() -> None:
    inputs = _operands()
    planned = check_graph(make_fx(_other_axis)(*inputs), inputs, OPTIONS)
    assert not [name for name in planned.launches if name.startswith("flex_attention")]


def test_small_attention_stays() -> None:
    """Two matmuls of few rows are faster; so does a device stay that says nothing about it."""
    inputs = _operands()
    for options in (
        STRICT,
        STRICT.replace(
            devices=(dataclasses.replace(CPU, attention=dataclasses.replace(CPU.attention, streaming_sizes=())),)
        ),
    ):
        planned = check_graph(make_fx(_attend)(*inputs), inputs, options)
        assert planned.calls == ["aten.bmm.default", "aten.bmm.default"]
