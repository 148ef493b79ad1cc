"""Calls that write copies of inputs, which are copied back at last, write the inputs, where nothing can tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS, capture
from fxwrap.lines import ExternCall, IndexPut, Launch, Mutate, Scatter
from fxwrap.testing import assert_emitters_agree
from fxwrap.wrapper_ir import Ownership, live_bytes
from tests.lowering.planned_programs import check
from tests.user_kernels import operators

aten = torch.ops.aten


def lines_of(program: fxwrap.Program, *classes: type) -> list[Any]:
    """The lines of a program that are of one of these classes, in order."""
    return [line for line in program.body.lines if isinstance(line, classes)]


def constant_of(program: fxwrap.Program, name: str) -> Any:
    """The value of a constant of a program's."""
    return next(item.value for item in program.constants if item.value.name == name)


def written_by(program: fxwrap.Program) -> list[Any]:
    """The tensors that kernels, scatter and index_put lines write, in order."""
    lines = lines_of(program, IndexPut, Launch, Scatter)
    return [value for line in lines for value in (line.outs if isinstance(line, Launch) else [line.target])]


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dynamic"), [(name, name != "several") for name in AGAIN_IN_PLACE])
def test_an_input_is_written_in_place_without_copies(name: str, dynamic: bool) -> None:
    function = AGAIN_IN_PLACE[name]
    assert_emitters_agree(function, inputs(), dynamic=dynamic)
    (graph,) = capture(function, inputs(), dynamic=dynamic)
    program = graph.compiled.program
    cache = next(item.value for item in program.inputs if item.ownership is Ownership.MUTABLE)
    assert cache in written_by(program)
    assert "aten.copy_.default" not in [line.target for line in lines_of(program, Mutate)]
    assert not lines_of(program, ExternCall)


def test_a_cache_update_allocates_no_second_cache() -> None:
    def function(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
        cache[i] = v * 2
        return v + 1

    (graph,) = capture(function, (torch.randn(1024, 64), torch.tensor([5, 0]), torch.randn(2, 64)))
    assert live_bytes(graph.compiled.program, include_inputs=False).peak == 2 * 64 * 4


def test_attention_reads_a_cache_that_is_written_in_place() -> None:
    """Attention may draw random numbers, which orders it with other such calls, but it writes none of its operands."""

    def decode(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
        cache.index_copy_(2, i, v.view(2, 1, 1, 8))
        keys, values = cache[:, :, :, :4], cache[:, :, :, 4:]
        return torch.nn.functional.scaled_dot_product_attention(v.view(2, 1, 1, 8)[..., :4], keys, values)

    arguments = (torch.randn(2, 1, 64, 8), torch.tensor([5]), torch.randn(2, 8))
    assert_emitters_agree(decode, arguments)
    (graph,) = capture(decode, arguments)
    assert live_bytes(graph.compiled.program, include_inputs=False).peak < arguments[0].nbytes


def _returned(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    updated = aten.index_put(cache, [i], v)
    aten.copy_(cache, updated)
    return updated


def _old_content_is_read_after(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    updated = aten.index_put(cache, [i], v)
    old = cache.sin()
    aten.copy_(cache, updated)
    return old


def _result_is_written_after(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    updated = aten.index_put(cache, [i], v)
    aten.copy_(cache, updated)
    updated.mul_(2)
    return updated.sum(0)


def _base_is_written_after(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    updated = aten.index_put(cache, [i], v)
    aten.copy_(cache, updated)
    cache.mul_(3)
    return updated.sum(0)


def _base_is_a_source(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    aten.copy_(cache, aten.index_put(cache, [i], cache[:2]))
    return v * 2


def _an_intermediate_is_read(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    first = aten.index_put(cache, [i], v)
    aten.copy_(cache, aten.index_put(first, [i + 1], v, True))
    return first.sum(0)


def _the_base_is_written_before(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache.mul_(3)
    updated = aten.index_put(cache, [i], v)
    aten.copy_(cache, updated)
    return updated.sum(0)


def _has_gaps(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    rows = cache[:, ::2]
    updated = aten.index_put(rows, [i], v[:, ::2])
    aten.copy_(rows, updated)
    return updated.sum(0)


def _it_is_written_back_twice(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    first = aten.index_put(cache, [i], v)
    aten.copy_(cache, first)
    second = aten.index_put(cache, [i + 1], v)
    aten.copy_(cache, second)
    return first.sum(0)


def _the_base_is_another(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    updated = aten.index_put(cache * 2, [i], v)
    aten.copy_(cache, updated)
    return updated.sum(0)


NOT_IN_PLACE: dict[str, Any] = {
    function.__name__.strip("_"): function
    for function in (
        _returned, _old_content_is_read_after, _result_is_written_after, _base_is_written_after, _base_is_a_source,
        _an_intermediate_is_read, _the_base_is_written_before, _has_gaps, _it_is_written_back_twice,
        _the_base_is_another,
    )
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NOT_IN_PLACE)
def test_the_copy_stays_where_it_is_observable(name: str) -> None:
    graph = make_fx(NOT_IN_PLACE[name], tracing_mode="fake")(*inputs())
    options = Options(preserve_ops=frozenset({"aten.index_put.default"}))
    before = str(graph.graph)
    assert_emitters_agree(graph, inputs(), options=options)
    program = fxwrap.lower(graph, inputs(), options=options)
    cache = program.inputs[0].value
    assert cache not in [line.target for line in lines_of(program, IndexPut)]
    assert str(graph.graph) == before


def _written_back(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache[i] = v
    return v + 1


def _shifted(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    operators.shift_(cache, 2.0)
    return v + 1


@pytest.mark.parametrize("function", [_written_back, _shifted])
def test_an_input_with_gaps_is_copied(function: Any) -> None:
    arguments = (torch.randn(4, 16)[:, ::2], torch.tensor([2, 0]), torch.randn(2, 8))
    options = Options(fuse=False)
    assert_emitters_agree(function, arguments, options=options)
    (graph,) = capture(function, arguments, options=options)
    program = graph.compiled.program
    copied = [line.target for line in lines_of(program, Mutate) if program.inputs[0].value in line.writes]
    assert copied == ["aten.copy_.default"]
    assert program.inputs[0].value not in [line.target for line in lines_of(program, IndexPut)]


def test_an_input_with_a_storage_offset_is_written_in_place() -> None:
    """The graph has views of the result, which begins at the start of its memory, and of the tensor copied back."""

    def function(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
        updated = aten.index_put(cache, [i], v)
        shown = updated[1:]
        aten.copy_(cache, updated)
        return shown.sum(0)

    def reading(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return aten.copy_(cache, aten.index_put(cache, [i], v))[1:].sum(0)

    _, i, v = inputs()
    cache = torch.randn(3, 4, 8)[1]
    graph = make_fx(function, tracing_mode="fake")(cache, i, v)
    assert_emitters_agree(graph, (cache, i, v))
    program = fxwrap.lower(graph, (cache, i, v))
    assert written_by(program)[0] == program.inputs[0].value
    graph = make_fx(reading, tracing_mode="fake")(cache, i, v)
    assert_emitters_agree(graph, (cache, i, v))


def test_indirect_writes_and_custom_operators_are_ordered() -> None:
    def function(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
        cache[i] = v
        operators.shift_(cache, 2.0)
        cache.index_reduce_(1, i, v[:, :4].t(), "prod")
        return cache.sum(0)

    assert_emitters_agree(function, inputs())
    (graph,) = capture(function, inputs())
    program = graph.compiled.program
    cache = program.inputs[0].value
    assert written_by(program)[0] == cache
    written = [(line.target, line.writes) for line in lines_of(program, Mutate)]
    assert written == [("user_code.shift_.default", (cache,)), ("aten.index_reduce_.default", (cache,))]


class Cache(torch.nn.Module):
    """Writes rows into buffers at indices, and into an input."""

    def __init__(self, returned: str = "") -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(8, 4))
        self.register_buffer("count", torch.zeros(()))
        self.returned = returned

    def forward(self, x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        before = self.rows.sin().sum(0)
        self.rows.index_copy_(0, i, v * 2)
        self.rows[i] = v + 1
        x[i] = v
        self.count.add_(1)
        total = (self.rows * 3).sum(0) + before
        shown = {"itself": self.rows, "a view": self.rows[1:]}
        return (shown[self.returned], total) if self.returned else (total,)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fuse", "dynamic"), [(True, False), (True, True), (False, False)])
def test_an_exported_program_writes_its_buffers_in_place(fuse: bool, dynamic: bool) -> None:
    arguments = (torch.randn(8, 4), torch.tensor([5, 0]), torch.randn(2, 4))
    lengths, counts = {0: Dim("rows", min=6, max=64)}, {0: Dim("written", min=2, max=9)}
    shapes = {"x": lengths, "i": counts, "v": counts} if dynamic else None
    exported = torch.export.export(Cache(), arguments, dynamic_shapes=shapes)
    options = Options(fuse=fuse)
    assert_emitters_agree(exported, arguments, options=options)
    program = fxwrap.lower(exported, options=options)
    rows, x = constant_of(program, "b_rows"), program.inputs[0].value
    count = constant_of(program, "b_count")
    called = [line.target for line in lines_of(program, Mutate)]
    assert called == ([] if fuse else ["aten.index_copy_.default", "aten.copy_.default"])
    written = [value for value in written_by(program) if value in (rows, x, count)]
    names = sorted([value.name for value in written])
    assert names == (["b_count", "b_rows", "b_rows", "x"] if fuse else ["b_rows", "x"])


@pytest.mark.parametrize("returned", ["itself", "a view"])
def test_a_buffer_returned_by_an_exported_program_is_the_buffer(returned: str) -> None:
    """As in the module that torch makes of the program."""
    arguments = (torch.randn(8, 4), torch.tensor([5, 0]), torch.randn(2, 4))
    exported = torch.export.export(Cache(returned), arguments)
    assert_emitters_agree(exported, arguments)
    program = fxwrap.lower(exported)
    assert constant_of(program, "b_rows") in written_by(program)


class Statistics(torch.nn.Module):
    """Buffers that all elements of are computed anew, and one that is written twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.mean.copy_(self.mean * 0.9 + x.mean(0))
        self.seen.add_(x)
        self.seen.mul_(self.mean)
        return self.norm(x), self.mean


def test_an_exported_programs_kernels_write_its_buffers() -> None:
    exported = torch.export.export(Statistics().train(), (torch.randn(3, 4),))
    assert_emitters_agree(exported, (torch.randn(3, 4),))
    program = fxwrap.lower(exported)
    written = {value for line in lines_of(program, Launch) for value in line.outs}
    buffers = {item.value for item in program.constants if item.mutable}
    assert len(buffers) == 5 and buffers <= written
    assert "aten.copy_.default" not in [line.target for line in lines_of(program, Mutate)]


class Swapped(torch.nn.Module):
    """Each of several buffers, and an input, becomes what another was, later ones before earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate("abcd"):
            self.register_buffer(name, torch.randn(4, 4) + number)

    def forward(self, x: Tensor) -> Tensor:
        old, d = x.clone(), self.d.clone()
        x.copy_(self.d[:, :1])
        self.d.copy_(self.c)
        self.c.copy_(self.b.t())
        self.b.copy_(self.a)
        self.a.copy_(old)
        return x + d


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fuse", [True, False])
def test_writes_of_an_exported_program_are_visible_at_once(fuse: bool) -> None:
    """An exported program names what overwrites its buffers in the order of the buffers, and not of the writes."""
    module, x = Swapped(), torch.randn(4, 4)
    wanted, argument = copy.deepcopy(module), x.clone()
    result = wanted(argument)
    for emitter in COMPARED_EMITTERS:
        exported = torch.export.export(copy.deepcopy(module), (x,))
        compiled = fxwrap.compile_graph(exported, options=Options(emitter=emitter, fuse=fuse))
        held = x.clone()
        torch.testing.assert_close((compiled(held), held), (result, argument))
        held_buffers = compiled.program.store.tensors
        for name, buffer in wanted.named_buffers():
            torch.testing.assert_close(held_buffers[f"b_{name}"], buffer)


# --- slices -----------------------------------------------------------------------------------------------------------


def _rows(cache: Tensor, v: Tensor) -> Any:
    cache[2:4] = v.sin() * 2
    return cache.sum(0)


def _a_row(cache: Tensor, v: Tensor) -> Any:
    cache[-1] = v[0] + 1
    return v * 2


def _a_block_of_a_row(cache: Tensor, v: Tensor) -> Any:
    cache[1, 2:7:2] = v[1, :3].exp()
    cache[:, 3:5][1:3] = 7.0
    return cache * 2


def _reads_the_same_slice(cache: Tensor, v: Tensor) -> Any:
    before = cache.cos()
    cache[:2] = cache[:2] * 0.5 + v
    cache[:2] *= cache[2:]
    cache[3, 1:] += cache[0, 1:]
    return before, cache.t()[1:] + 1


def _something_stored(cache: Tensor, v: Tensor) -> Any:
    cache[:, 1:3] = v[:, :2].repeat(2, 1)
    cache[1:3] = v
    return cache[1] * 2


SLICES: dict[str, Any] = {
    function.__name__.strip("_"): function
    for function in (_rows, _a_row, _a_block_of_a_row, _reads_the_same_slice, _something_stored)
}  # fmt: skip


WRITES = {"rows": 1, "a_row": 1, "a_block_of_a_row": 2, "reads_the_same_slice": 3, "something_stored": 2}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "fuse"), [(name, number % 3 != 1) for number, name in enumerate(SLICES)])
def test_a_slice_of_an_input_is_overwritten_in_place(name: str, fuse: bool) -> None:
    arguments, options = (torch.randn(4, 8), torch.randn(2, 8)), Options(fuse=fuse)
    assert_emitters_agree(SLICES[name], arguments, options=options)
    (graph,) = capture(SLICES[name], arguments, options=options)
    program = graph.compiled.program
    assert "_scatter.default" not in str(program)  # the operators that make another cache are in no line and no kernel
    cache = next(item.value for item in program.inputs if item.ownership is Ownership.MUTABLE)
    outs = [value for line in lines_of(program, Launch) for value in line.outs]
    written = [value for value in outs if value == cache or value.name.endswith("_window")]
    assert len(written) + len(lines_of(program, Mutate)) == WRITES[name]


class Attention(torch.nn.Module):
    """New keys are written at a position that is a number of each call, of a cache that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 3, 16, 4))

    def forward(self, x: Tensor, position: int) -> Tensor:
        self.keys[:1, :, position : position + x.shape[2]] = x.tanh()
        seen = self.keys[:1, :, : position + x.shape[2]]
        return (x @ seen.transpose(-1, -2)).softmax(-1) @ seen


def test_an_exported_cache_is_written_at_a_symbolic_index() -> None:
    shapes = {"x": None, "position": Dim.DYNAMIC}
    arguments = (torch.randn(1, 3, 2, 4), 5)
    exported = torch.export.export(Attention(), arguments, dynamic_shapes=shapes)
    program = fxwrap.lower(exported)
    assert live_bytes(program, {"s0": 5}, include_inputs=False, include_constants=False).peak < 2 * 3 * 16 * 4 * 4
    for position in (5, 0, 13):
        assert_emitters_agree(exported, (torch.randn(1, 3, 2, 4), position))


def _the_source_is_of_the_cache(cache: Tensor, v: Tensor) -> Any:
    aten.copy_(cache, aten.slice_scatter(cache, aten.slice(cache, 0, 0, 2), 0, 2, 4))
    return v * 2


def _the_old_content_is_read(cache: Tensor, v: Tensor) -> Any:
    updated = aten.slice_scatter(cache, v, 0, 2, 4)
    old = cache.sum(0)
    aten.copy_(cache, updated)
    return old


def _part_is_also_read(cache: Tensor, v: Tensor) -> Any:
    row = aten.slice_scatter(aten.select(cache, 0, 1), v[0, :2], 0, 3, 5)
    aten.copy_(cache, aten.select_scatter(cache, row, 0, 1))
    return row * 2


def _part_of_another_row(cache: Tensor, v: Tensor) -> Any:
    row = aten.slice_scatter(aten.select(cache, 0, 2), v[0, :2], 0, 3, 5)
    aten.copy_(cache, aten.select_scatter(cache, row, 0, 1))
    return v * 2


OTHER_SLICES: dict[str, Any] = {
    function.__name__.strip("_"): function
    for function in (
        _the_source_is_of_the_cache, _the_old_content_is_read, _part_is_also_read, _part_of_another_row,
    )
}  # fmt: skip


@pytest.mark.parametrize(("name", "fuse"), [(name, number % 3 != 1) for number, name in enumerate(OTHER_SLICES)])
def test_slices_with_other_uses(name: str, fuse: bool) -> None:
    arguments = (torch.randn(4, 8), torch.randn(2, 8))
    graph = make_fx(OTHER_SLICES[name], tracing_mode="fake")(*arguments)
    assert_emitters_agree(graph, arguments, options=Options(fuse=fuse))


def _tied_parameters(x: Tensor, rate: Tensor, other: Tensor) -> Tensor:
    """An update of two parameters of one memory and of several shapes, as AOTAutograd writes it."""
    one = aten.as_strided_scatter(x, aten.as_strided(x, [], [], 0) * 2, [], [], 0)
    two = aten.as_strided_scatter(one, aten.as_strided(one, [1], [1], 0) * 3, [1], [1], 0)
    number = rate.exp().sin().float()
    three = aten.as_strided_scatter(two, aten.as_strided(two, [1], [1], 0) + number, [1], [1], 0)
    aten.copy_(x, three)
    return other * number


def _read_after_a_scatter(x: Tensor, rate: Tensor, other: Tensor) -> Tensor:
    updated = aten.index_put(x, [torch.zeros(1, dtype=torch.int64)], rate.float()[None])
    number = (aten.as_strided(updated, [1], [1], 0) + rate.exp()).sin().float()
    aten.copy_(x, updated)
    return other * number


@pytest.mark.parametrize("function", [_tied_parameters, _read_after_a_scatter])
def test_views_of_a_result_that_is_written_in_place(function: Any) -> None:
    """No view of it is memory that another result may reuse."""
    check(function, torch.randn(1), torch.tensor(0.7, dtype=torch.float64), torch.randn(7))


def test_inputs_that_share_memory_are_distinguished_from_one_input() -> None:
    """The second shows the first, and is read between the write and the copy."""

    def function(cache: Tensor, shown: Tensor, i: Tensor, v: Tensor) -> Tensor:
        updated = aten.index_put(cache, [i], v)
        old = shown.sin()
        aten.copy_(cache, updated)
        return old

    cache, i, v = inputs()
    graph = make_fx(function, tracing_mode="fake")(cache, cache.t(), i, v)
    program = fxwrap.lower(
        graph, (cache, cache.t(), i, v), options=Options(preserve_ops=frozenset({"aten.index_put.default"}))
    )
    assert program.inputs[0].value not in [line.target for line in lines_of(program, IndexPut)]


def test_a_user_lowering_keeps_its_operator() -> None:
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


def _filled(x: Tensor, y: Tensor) -> Tensor:
    filled = aten.slice_scatter(torch.empty(4, 16), x @ y, 1, 0, 8)
    return aten.slice_scatter(filled, y.cos(), 1, 8, 16)


def _read_between(x: Tensor, y: Tensor) -> Tensor:
    filled = aten.slice_scatter(torch.empty(4, 16), x @ y, 1, 0, 8)
    return aten.slice_scatter(filled, y.cos(), 1, 8, 16) + filled[:, :8].exp().sum()


FILLED: dict[str, tuple[Any, int, list[tuple[int, int]], int]] = {
    "large": (_filled, 1, [(4, 8)], 1),
    "small": (_filled, 1000, [(4, 16)], 0),
    "read between": (_read_between, 1, [(), (4, 16)], 1),
}
"""A function, the bytes from which on a tensor is large, what kernels write, how many slices calls' results take."""


@pytest.mark.parametrize("name", FILLED)
def test_a_large_new_tensor_is_filled_slice_by_slice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, least, written, copied = FILLED[name]
    monkeypatch.setattr("fxwrap.lowering.calls.reinplace.MIN_FILLED_BYTES", least)
    x, y = torch.randn(4, 4), torch.randn(4, 8)
    program = fxwrap.lower(make_fx(functionalize(function), tracing_mode="fake")(x, y), [x, y])
    assert [line.outs[0].tensor_type.sizes for line in lines_of(program, Launch)] == written
    assert len(lines_of(program, Mutate)) == copied
    assert_emitters_agree(program, [x, y])
    torch.testing.assert_close(fxwrap.run(program, [x, y])[0], function(x, y))
