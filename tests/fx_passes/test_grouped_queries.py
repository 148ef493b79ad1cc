"""Attention of one query row to key heads that several query heads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import fxwrap
from fxwrap import Options
from fxwrap.comparison import capture
from fxwrap.fx_passes import pack_query_groups
from fxwrap.fx_passes.attention.grouped_queries import find_query_groups
from fxwrap.lines import ExternCall
from fxwrap.testing import assert_emitters_agree
from tests.fx_passes.test_attention_masks import _graph_of

GROUP, HEADS, LENGTH, WIDTH = 4, 2, 16, 8
attend = functional.scaled_dot_product_attention


def expanded(x: Tensor) -> Tensor:
    """As transformers repeats heads."""
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, GROUP, length, width).reshape(batch, heads * GROUP, length, width)


def interleaved(x: Tensor) -> Tensor:
    """As PyTorch repeats heads."""
    return x.repeat_interleave(GROUP, dim=1)


def repeated(x: Tensor) -> Tensor:
    """Another order of heads."""
    return x.repeat(1, GROUP, 1, 1)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2).contiguous()


def _no_mask(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(query, expanded(keys), expanded(values)))


def _masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(query, expanded(keys), expanded(values), attn_mask=mask, scale=0.3))


def _masked_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(query, interleaved(keys), interleaved(values), mask[0, 0]))


def _mask_of_each_head(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    shifted = mask & (torch.arange(HEADS * GROUP)[:, None, None] < torch.arange(1, LENGTH + 1))
    return _merged(attend(query, expanded(keys), interleaved(values), shifted))


def _shared_heads(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(query, keys, values, mask, enable_gqa=True))


PACKED: dict[str, Callable[..., Tensor]] = {
    function.__name__.strip("_"): function
    for function in (_no_mask, _masked, _masked_rows, _mask_of_each_head, _shared_heads)
}


def _inputs(batch: int = 3, rows: int = 1) -> tuple[Tensor, ...]:
    mask = torch.rand(batch, 1, rows, LENGTH) < 0.6
    mask[..., 0] = True
    query = torch.randn(batch, rows, HEADS * GROUP, WIDTH).transpose(1, 2)
    return query, torch.randn(batch, HEADS, LENGTH, WIDTH), torch.randn(batch, HEADS, LENGTH, WIDTH), mask


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PACKED)
def test_heads_become_rows_and_nothing_is_repeated(name: str) -> None:
    inputs = _inputs()
    assert_emitters_agree(PACKED[name], inputs)
    (graph,) = capture(PACKED[name], inputs)
    calls = [line for line in graph.compiled.program.lines() if isinstance(line, ExternCall)]
    (attention,) = [line for line in calls if "attention" in line.target]
    query, keys = attention.arguments[0], attention.arguments[1]
    assert query.tensor_type.sizes[1:] == (HEADS, GROUP, WIDTH)  # type: ignore[union-attr]
    assert keys in [item.value for item in graph.compiled.program.inputs]


def test_gradients() -> None:
    inputs = [item.requires_grad_(item.is_floating_point()) for item in _inputs()]
    assert_emitters_agree(_masked, inputs, training=True, emitters=["cpp"])


def _several_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(torch.cat([query, query], 2), expanded(keys), expanded(values), mask))


def _other_order(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(query, repeated(keys), repeated(values), mask))


def _two_orders(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(query, expanded(keys), repeated(values), mask))


def _causal(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(query, expanded(keys), expanded(values), is_causal=True))


def _dropped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return _merged(attend(query, expanded(keys), expanded(values), dropout_p=0.5))


def _layout_is_observed(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return attend(query, expanded(keys), expanded(values), mask)


def _written_in_between(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    old = expanded(keys)
    keys.mul_(0.5)
    return _merged(attend(query, old, expanded(values), mask))


UNCHANGED: dict[str, Callable[..., Tensor]] = {
    function.__name__.strip("_"): function
    for function in (
        _several_rows, _other_order, _two_orders, _causal, _dropped, _layout_is_observed, _written_in_between,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_attention_is_not_changed(name: str) -> None:
    graph = _graph_of(UNCHANGED[name], *_inputs())
    assert pack_query_groups(graph, Options()) is graph


def test_a_mask_of_several_rows_is_not_changed() -> None:
    graph = _graph_of(_masked, *_inputs(rows=2))
    assert not find_query_groups(graph.graph, Options())


def test_preserved_attention_is_not_changed() -> None:
    graph = _graph_of(_masked, *_inputs())
    assert find_query_groups(graph.graph, Options())
    for options in (
        Options(fuse=False),
        Options(preserve_ops=frozenset({"aten.scaled_dot_product_attention.default"})),
    ):
        assert not find_query_groups(graph.graph, options)


class Masked(nn.Module):
    """As an exported model attends."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(HEADS * GROUP * WIDTH, 4)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        projected: Tensor = self.projection(_masked(query, keys, values, mask))
        return projected


def test_an_exported_program_repeats_no_heads() -> None:
    """The batch is symbolic."""
    inputs: Any = _inputs()
    exported = torch.export.export(Masked(), inputs, dynamic_shapes=({0: Dim("batch", min=2, max=64)},) * 4)
    before = str(exported.graph)
    assert_emitters_agree(exported, inputs, emitters=["interpreter", "cpp"])
    program = fxwrap.lower(exported)
    (attention,) = [line for line in program.lines() if isinstance(line, ExternCall) and "attention" in line.target]
    assert attention.arguments[0].tensor_type.sizes[1:] == (HEADS, GROUP, WIDTH)  # type: ignore[union-attr]
    assert str(exported.graph) == before
