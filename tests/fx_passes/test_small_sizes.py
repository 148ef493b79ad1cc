"""Sizes 0 and 1 of exported programs: accepted where the program computes the same as torch's, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.nn.attention.flex_attention import flex_attention

import fxwrap
from fxwrap import Options
from fxwrap.errors import InputError
from tests.devices.registration import on_abacus

Function = Callable[[Tensor], Tensor]


def _exported(
    function: Callable[..., Tensor], *sizes: tuple[int, ...], dims: tuple[str, ...] = ("n",)
) -> ExportedProgram:
    """A function of tensors, each with one of the symbols as its first size."""

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return function(*inputs)

    shapes = (tuple([{0: Dim(name)} for name in dims]),)
    return torch.export.export(
        Module(), tuple([torch.randn(size) for size in sizes]), dynamic_shapes=shapes, strict=False
    )


def _compiled(exported: ExportedProgram, emitter: str = "interpreter") -> fxwrap.Compiled:
    options = Options(emitter=emitter, compile_cache=False, fallback="error")
    return fxwrap.compile_graph(exported, options=options)


LEAST: dict[str, tuple[Function, int]] = {
    "elements": (lambda x: (x * 2).relu(), 0),
    "matmul and softmax": (lambda x: (x @ x.t()).softmax(-1), 0),
    "sum": (lambda x: x.sum(0), 0),
    "variance": (lambda x: x.var(0), 0),
    "concatenation": (lambda x: torch.cat([x, x]).cumsum(0), 0),
    "a maximum of nothing": (lambda x: x.amax(0), 1),
    "the first row": (lambda x: x[0], 1),
    "the last row": (lambda x: x[-1:], 1),  # of no rows, torch returns none
    "the second row": (lambda x: x[1], 2),
    "squeeze": (lambda x: x.squeeze(0), 2),  # is another operator for one row
    "interpolation": (lambda x: F.interpolate(x.t()[None], scale_factor=2, mode="linear", align_corners=True), 2),
    "sizes of data": (lambda x: x.nonzero(), 2),
    "a graph": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), 2),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LEAST)
def test_sizes_are_accepted_as_far_as_the_graph_is_that_of_larger_ones(name: str) -> None:
    function, least = LEAST[name]
    exported = _exported(function, (4, 3))
    module = exported.module(check_guards=False)
    with on_abacus():
        compiled = _compiled(exported)
        for size in range(least, 4):
            x = torch.randn(size, 3)
            torch.testing.assert_close(compiled(x), module(x), equal_nan=True)
        for size in range(least):
            with pytest.raises(InputError, match=f"size 0 must be at least {least}, got {size}"):
                compiled(torch.randn(size, 3))


def test_torch_raises_for_an_empty_maximum_that_has_no_dimension() -> None:
    exported = _exported(lambda x: x.max(), (4, 3))
    with on_abacus():
        compiled = _compiled(exported)
        for function in (exported.module(check_guards=False), compiled):
            with pytest.raises(RuntimeError, match="Expected reduction dim"):
                function(torch.empty(0, 3))


@pytest.mark.parametrize("emitter", ["interpreter", "python", "fx"])
def test_sizes_are_accepted_separately_and_together(emitter: str) -> None:
    exported = _exported(lambda x, y: (x @ y.t()).amax(0), (4, 3), (5, 3), dims=("n", "m"))
    module = exported.module(check_guards=False)
    with on_abacus():
        compiled = _compiled(exported, emitter)
        for rows, columns in ((1, 1), (1, 0), (3, 0), (3, 1), (1, 7)):
            x, y = torch.randn(rows, 3), torch.randn(columns, 3)
            torch.testing.assert_close(compiled(x, y), module(x, y))
        with pytest.raises(InputError, match=r"input .*: size 0 must be at least 1, got 0"):
            compiled(torch.randn(0, 3), torch.randn(2, 3))


@pytest.mark.parametrize("emitter", ["interpreter", "python", "fx"])
def test_sizes_that_are_accepted_separately_but_not_together_are_at_least_one(emitter: str) -> None:
    exported = _exported(lambda x, y: torch.cat([x, y]).amax(0), (4, 3), (5, 3), dims=("n", "m"))
    module = exported.module(check_guards=False)
    with on_abacus():
        compiled = _compiled(exported, emitter)
        for rows, others in ((1, 1), (1, 4), (3, 1), (2, 2)):
            x, y = torch.randn(rows, 3), torch.randn(others, 3)
            torch.testing.assert_close(compiled(x, y), module(x, y))
        with pytest.raises(InputError, match=r"input .*: size 0 must be at least 1, got 0"):
            compiled(torch.randn(0, 3), torch.randn(0, 3))


@pytest.mark.parametrize("emitter", ["interpreter", "python", "fx"])
def test_numbers_that_equal_the_defaults_of_small_sizes_are_those_of_the_graph(emitter: str) -> None:
    """The dispatcher leaves the diagonal out where it is 0, as for one query and one key."""

    def attention(query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.t()
        past = torch.ones_like(scores, dtype=torch.bool).tril(key.shape[0] - query.shape[0])
        return scores.masked_fill(~past, float("-inf")).softmax(-1)

    exported = _exported(attention, (4, 3), (5, 3), dims=("n", "m"))
    module = exported.module(check_guards=False)
    with on_abacus():
        compiled = _compiled(exported, emitter)
        for queries, keys in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 9), (3, 2), (0, 1), (0, 0)):
            query, key = torch.randn(queries, 3), torch.randn(keys, 3)
            torch.testing.assert_close(compiled(query, key), module(query, key), equal_nan=True)


class _FlexAttention(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        def score(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return torch.where(row >= column, score + bias[head, row], float("-inf"))

        return flex_attention(query, key, value, score)  # type: ignore[return-value]


def _attention_inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    pairs = torch.randn(2, batch, 3, keys, 8)
    return torch.randn(batch, 3, queries, 8), *pairs, torch.randn(3, queries)


@cache
def _exported_attention() -> ExportedProgram:
    batch, queries, keys = Dim("batch", max=64), Dim("queries", max=256), Dim("keys", max=256)
    shapes = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys}, {1: queries})
    return torch.export.export(_FlexAttention(), _attention_inputs(2, 5, 7), dynamic_shapes=shapes)


@pytest.mark.parametrize("emitter", ["interpreter", "python", "cpp", "fx"])
def test_flex_attention_of_one_row(emitter: str) -> None:
    compiled = _compiled(_exported_attention(), emitter)
    for sizes in ((1, 1, 1), (1, 1, 9), (1, 5, 1), (3, 1, 130), (2, 129, 1), (0, 3, 3)):
        operands = _attention_inputs(*sizes)
        torch.testing.assert_close(compiled(*operands), _FlexAttention()(*operands), rtol=1e-5, atol=1e-5)


def test_lower_bounds_of_the_model_and_of_other_graphs_stay() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    shapes = ({0: Dim("n", min=3, max=8)},)
    exported = torch.export.export(Module(), (torch.randn(4, 3),), dynamic_shapes=shapes)
    graph = _exported(lambda x: x + 1, (4, 3)).module(check_guards=False)
    with on_abacus():
        with pytest.raises(InputError, match="from 3 to 8, got 2"):
            _compiled(exported)(torch.randn(2, 3))
        with pytest.raises(InputError, match="at least 2, got 1"):
            _compiled(graph)(torch.randn(1, 3))  # type: ignore[arg-type]


def test_the_exported_program_and_the_log_stay_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    exported = _exported(lambda x: x.amax(0), (4, 3))
    shape_env = exported.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    before = str(exported), list(shape_env.guards), dict(shape_env.var_to_range)
    with on_abacus():
        _compiled(exported)
    assert (str(exported), list(shape_env.guards), dict(shape_env.var_to_range)) == before
    assert not caplog.records
