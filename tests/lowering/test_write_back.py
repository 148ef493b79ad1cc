"""Writes at computed places that end in an input are in place again, where nothing can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.compare import capture
from fxwrap.lines import Call, IndexPut, Mutate, Scatter
from fxwrap.testing import assert_emitters_agree
from fxwrap.wrapper_ir import live_bytes

aten = torch.ops.aten


def lines_of(program: fxwrap.Program, *classes: type) -> list[Any]:
    """The lines of a program that are of one of these classes, in order."""
    return [line for line in program.body.lines if isinstance(line, classes)]


def inputs() -> tuple[Tensor, ...]:
    """A cache, two different positions, new rows."""
    return torch.randn(4, 8), torch.tensor([2, 0]), torch.randn(2, 8)


def _row_update(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    before = cache.exp()
    cache[i] = v * 2
    return before + cache.sum(0)


def _several(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache.index_add_(0, i, v)
    cache[i] = v.cos()
    cache.scatter_reduce_(0, i[:, None].expand(2, 8), v, "mean")
    return cache * 2


def _read_through_views(cache: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    rows = cache[1:]
    before = rows.sin()
    cache.index_put_((i,), v, accumulate=True)
    return before, rows.cos()


AGAIN_IN_PLACE: dict[str, Any] = {
    "row_update": _row_update, "several": _several, "read_through_views": _read_through_views,
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", AGAIN_IN_PLACE)
def test_an_input_is_written_in_place_without_copies(name: str, dynamic: bool, fresh_dynamo: None) -> None:
    function = AGAIN_IN_PLACE[name]
    assert_emitters_agree(function, inputs(), dynamic=dynamic)
    (graph,) = capture(function, inputs(), dynamic=dynamic)
    program = graph.compiled.program
    written = lines_of(program, IndexPut, Scatter)
    assert written and {line.target for line in written} <= {item.value for item in program.inputs}
    assert "aten.copy_.default" not in [line.target for line in lines_of(program, Mutate)]
    assert not lines_of(program, Call)


def test_the_update_of_a_cache_needs_no_second_cache(fresh_dynamo: None) -> None:
    def function(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
        cache[i] = v * 2
        return v + 1

    (graph,) = capture(function, (torch.randn(1024, 64), torch.tensor([5, 0]), torch.randn(2, 64)))
    assert live_bytes(graph.compiled.program, include_inputs=False).peak == 2 * (2 * 64 * 4)


def _returned(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    made = aten.index_put(cache, [i], v)
    aten.copy_(cache, made)
    return made


def _old_content_is_read_after(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    made = aten.index_put(cache, [i], v)
    old = cache.sin()
    aten.copy_(cache, made)
    return old


def _result_is_written_after(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    made = aten.index_put(cache, [i], v)
    aten.copy_(cache, made)
    made.mul_(2)
    return made.sum(0)


def _base_is_written_after(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    made = aten.index_put(cache, [i], v)
    aten.copy_(cache, made)
    cache.mul_(3)
    return made.sum(0)


def _base_is_a_source(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    aten.copy_(cache, aten.index_put(cache, [i], cache[:2]))
    return v * 2


def _an_intermediate_is_read(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    first = aten.index_put(cache, [i], v)
    aten.copy_(cache, aten.index_put(first, [i + 1], v, True))
    return first.sum(0)


def _the_base_is_another(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    made = aten.index_put(cache * 2, [i], v)
    aten.copy_(cache, made)
    return made.sum(0)


NOT_IN_PLACE: dict[str, Any] = {
    function.__name__.strip("_"): function
    for function in (
        _returned, _old_content_is_read_after, _result_is_written_after, _base_is_written_after, _base_is_a_source,
        _an_intermediate_is_read, _the_base_is_another,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_IN_PLACE)
def test_where_it_could_be_told_the_copy_stays(name: str) -> None:
    graph = make_fx(NOT_IN_PLACE[name], tracing_mode="fake")(*inputs())
    options = Options(keep=frozenset({"aten.index_put.default"}))
    before = str(graph.graph)
    assert_emitters_agree(graph, inputs(), options=options)
    program = fxwrap.lower(graph, inputs(), options=options)
    cache = program.inputs[0].value
    assert cache not in [line.target for line in lines_of(program, IndexPut)]
    assert str(graph.graph) == before


def test_two_inputs_in_one_memory_are_told_apart_from_one() -> None:
    """The second shows the first, and is read between the write and the copy."""

    def function(cache: Tensor, shown: Tensor, i: Tensor, v: Tensor) -> Tensor:
        made = aten.index_put(cache, [i], v)
        old = shown.sin()
        aten.copy_(cache, made)
        return old

    cache, i, v = inputs()
    graph = make_fx(function, tracing_mode="fake")(cache, cache.t(), i, v)
    program = fxwrap.lower(graph, (cache, cache.t(), i, v), options=Options(keep=frozenset({"aten.index_put.default"})))
    assert program.inputs[0].value not in [line.target for line in lines_of(program, IndexPut)]


def test_a_lowering_of_the_users_keeps_its_operator() -> None:
    def function(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
        aten.copy_(cache, aten.index_put(cache, [i], v))
        return v + 1

    def own(builder: Any, node: Any) -> None:
        seen.append(node.name)
        builder.env[node] = builder.env[node.args[0]]

    seen: list[str] = []
    graph = make_fx(function, tracing_mode="fake")(*inputs())
    fxwrap.lower(graph, inputs(), options=Options(lowerings={"aten.index_put.default": own}))
    assert seen == ["index_put"]
