"""Operator calls between kernels: mutating ones, several results in any nesting, none at all, results in operands'
memory. Each agrees with eager in every emitter, and its line says what it writes, gives and shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.lines import ExternCall, Launch, Mutate, View
from fxwrap.options import EMITTERS
from fxwrap.testing import assert_emitters_agree
from fxwrap.torch_compat import operator_overload
from fxwrap.wrapper_ir import UNKNOWN, Ownership, Value, leaves
from tests.lowering.emitter_agreement import agreed_program
from tests.support.long_form import sampled

aten = torch.ops.aten

ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

OPTIONS = Options(fallback="error")

NOTED: list[float] = []
"""The arguments of calls of operators without results."""


def _nested(x: Tensor, last: bool) -> Any:
    return x + 1, [x * 2, x[:1] * 3], x * 4 if last else None


def _maybe(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _add_to_all(xs: list[Tensor], y: Tensor) -> None:
    for x in xs:
        x.add_(y)


def _fill(x: Tensor, out: Tensor) -> Tensor:
    return out.copy_(x * 3)


def _fill_both(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return low.copy_(x - 1), high.copy_(x + 1)


OPERATORS: dict[str, Callable[..., Any]] = {
    "nested(Tensor x, bool last) -> (Tensor, Tensor[], Tensor?)": _nested,
    "lists(Tensor x) -> Tensor[]": lambda x: [x + 1, x[:2] * 2, x[0] * 3],
    "lists_of_lists(Tensor x) -> Tensor[][]": lambda x: [[x + 1, x * 2], [x * 3]],
    "optional_items(Tensor x) -> Tensor?[]": lambda x: [x + 1, None, x * 2],
    "numbers(Tensor x) -> (Tensor, int, float, bool)": lambda x: (x + 1, 3, 2.5, True),
    "note(Tensor x) -> ()": lambda x: NOTED.append(float(x.sum())),
    "same(Tensor(a) x) -> Tensor(a)": lambda x: x,
    "undeclared_same(Tensor x) -> Tensor": lambda x: x,
    "rest(Tensor(a) x) -> Tensor(a)": lambda x: x[1:],
    "halves(Tensor(a) x) -> Tensor(a)[]": lambda x: list(x.chunk(2)),
    "view_and_more(Tensor(a) x) -> (Tensor(a), Tensor)": lambda x: (x.t(), x + 1),
    "maybe(Tensor(a) x) -> Tensor(a)": _maybe,
    "second(Tensor x, Tensor(a) y) -> Tensor(a)": lambda x, y: y.view(-1),
    "add_to(Tensor(a!) x, Tensor y) -> ()": lambda x, y: _add_to_all([x], y),
    "add_and_give(Tensor(a!) x, Tensor y) -> Tensor": lambda x, y: x.add_(y) * 2,
    "add_and_return(Tensor(a!) x, Tensor y) -> Tensor(a!)": lambda x, y: x.add_(y),
    "add_to_all(Tensor(a!)[] xs, Tensor y) -> ()": _add_to_all,
    "add_to_some(Tensor x, Tensor(a!)? y, Tensor(b!)? z) -> Tensor": lambda x, y, z: (
        _add_to_all([item for item in (y, z) if item is not None], x), x * 2
    )[1],
    "swap(Tensor(a!) x, Tensor(b!) y) -> (Tensor(a!), Tensor(b!), Tensor)": lambda x, y: (
        x.add_(1), y.mul_(2), x + y
    ),
    "fill(Tensor x, *, Tensor(a!) out) -> Tensor(a!)": lambda x, out: _fill(x, out),
    "fill_both(Tensor x, *, Tensor(a!) low, Tensor(b!) high) -> (Tensor(a!), Tensor(b!))": lambda x, low, high: (
        _fill_both(x, low, high)
    ),
}  # fmt: skip
"""Operators of a library of ours by their schema. What they do is what their fake rule does too."""


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    library = Library("fxwrap_results", "DEF")
    for schema, function in OPERATORS.items():
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"fxwrap_results::{name}", function if name != "note" else lambda x: None, lib=library
        )  # fmt: skip
    yield torch.ops.fxwrap_results
    library._destroy()


def lines_of(program: fxwrap.Program, *classes: type) -> list[Any]:
    """The lines of a program that are of one of these classes, in order."""
    return [line for line in program.body.lines if isinstance(line, classes)]


def inputs(device: str) -> tuple[Tensor, ...]:
    """Two matrices of 4 x 4 without equal elements."""
    return tuple([torch.randn(4, 4).to(device) for _ in range(2)])


def position(program: fxwrap.Program, line: Any) -> int:
    return program.body.lines.index(line)


# --- several results ----------------------------------------------------------------------------------------------

SEVERAL: dict[str, Any] = {
    "topk": lambda x: aten.topk(x, 3),
    "sort": lambda x: aten.sort.stable(x, stable=True, dim=0, descending=True),
    "kthvalue": lambda x: aten.kthvalue(x, 2),
    "qr": lambda x: aten.linalg_qr(x),
    "svd": lambda x: aten._linalg_svd(x),
    "lu": lambda x: aten.linalg_lu(x),
    "lu_factor": lambda x: aten.linalg_lu_factor_ex(x),
    "eigh": lambda x: aten._linalg_eigh(x + x.t()),
    "slogdet": lambda x: aten._linalg_slogdet(x),
    "histogramdd_edges": lambda x: aten._histogramdd_bin_edges(x[:, :2], [3, 2]),
    "frexp": lambda x: aten.frexp.Tensor(x),
}
ONLY_ON_CPU = frozenset({"histogramdd_edges"})


@pytest.mark.sampled(2)
@ON_EACH_DEVICE
@pytest.mark.parametrize("name", sampled([*SEVERAL], 0, 2))
def test_each_operator_result_is_a_root(name: str, device: str) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        results = SEVERAL[name](x * 2)
        return [item * 2 if item.is_floating_point() else item + 1 for item in results]

    arguments = inputs("cpu" if name in ONLY_ON_CPU else device)
    program = agreed_program(function, arguments, OPTIONS)
    (call,) = [line for line in lines_of(program, ExternCall) if not line.aliases and line.results]
    assert len([leaf for leaf in leaves(call.results) if isinstance(leaf, Value)]) > 1
    launches = [position(program, line) for line in lines_of(program, Launch)]
    assert min(launches) < position(program, call) < max(launches)


@ON_EACH_DEVICE
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_unused_results_are_none(wanted: tuple[int, ...], device: str) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        results = aten.topk(x * 2, 3)
        return [results[item] * 2 for item in wanted]

    program = agreed_program(function, inputs(device), OPTIONS)
    (call,) = lines_of(program, ExternCall)
    assert tuple([place for place, item in enumerate(call.results) if item is not None]) == wanted


@ON_EACH_DEVICE
@pytest.mark.parametrize("last", [True, False])
def test_results_may_nest_in_any_way(ops: Any, last: bool, device: str) -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        first, pair, maybe = ops.nested(x * 2, last)
        more = ops.lists(y * 2)
        return first + 1, pair[0] + pair[1], maybe, [item.exp() for item in more[1:]], ops.optional_items(x)[2] * 2

    program = agreed_program(function, inputs(device), OPTIONS)
    calls = {line.target.split(".")[1]: line for line in lines_of(program, ExternCall)}
    nested, lists, items = [calls[name] for name in ("nested", "lists", "optional_items")]
    assert [item is None for item in nested.results] == [False, False, not last]
    assert isinstance(nested.results[1], tuple) and len(nested.results[1]) == 2
    assert [item is None for item in lists.results[0]] == [True, False, False]
    assert [item is None for item in items.results[0]] == [True, True, False]


def test_lists_of_lists_and_numbers_are_results(ops: Any) -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        rows = ops.lists_of_lists(x * 2)
        number, count, factor, flag = ops.numbers(y * 2)
        return rows[0][1] + rows[1][0], number * factor + count, flag

    agreed_program(function, inputs("cpu"), OPTIONS)


@ON_EACH_DEVICE
def test_lists_of_views_are_lines_of_views(device: str) -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        first, second = torch.meshgrid(x[0] * 2, y[0] * 3, indexing="ij")
        left, right = (x * 2).split([1, 3], 1)
        return first + second, left * right, torch.unbind(y * 2)[1], aten.unsafe_split(x * 3, 2)[1] + 1

    program = agreed_program(function, inputs(device), OPTIONS)
    assert lines_of(program, Launch) and not lines_of(program, ExternCall)


DATA_DEPENDENT: dict[str, Any] = {
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique_dim": lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    "without_counts": lambda x: (*aten._unique(x, True, True), x.new_ones((), dtype=torch.int64)),
}


@pytest.mark.sampled(2)
@ON_EACH_DEVICE
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_results_whose_sizes_depend_on_data_are_read_by_kernels(name: str, device: str) -> None:
    def function(x: Tensor) -> Any:
        values, inverse, counts = DATA_DEPENDENT[name](x.abs())
        return values * 2, inverse + 1, counts.float().exp()

    x = torch.tensor([[1.0, -2.0], [2.0, 1.0], [1.0, 2.0], [3.0, 4.0]], device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = assert_emitters_agree(function, (x,), options=OPTIONS)
    assert report.graphs == 1


# --- no results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emitter", EMITTERS)
def test_operators_without_results_run_in_order(ops: Any, emitter: str) -> None:
    """Also twice with the same operand, around a mutation of it, and where nothing else is computed from it."""

    def function(x: Tensor) -> Tensor:
        doubled = x * 2
        ops.note(doubled)
        ops.note(doubled)
        doubled.add_(1)
        ops.note(doubled)
        ops.note(x.new_zeros(1))
        return doubled.sin()

    x = torch.full((4,), 2.0)
    graph = make_fx(function, tracing_mode="fake")(x)
    compiled = fxwrap.compile_graph(graph, [x], options=OPTIONS.replace(emitter=emitter))
    assert [line.effect_set for line in lines_of(compiled.program, ExternCall) if "note" in line.target] == [
        (UNKNOWN,)
    ] * 4
    NOTED.clear()
    (result,) = compiled(x)
    assert NOTED == [16.0, 16.0, 20.0, 0.0]
    torch.testing.assert_close(result, torch.full((4,), 5.0).sin())


# --- results in operands' memory --------------------------------------------------------------------------------------

SHARING: dict[str, Any] = {
    "same": lambda ops, x: ops.same(x),
    "undeclared_same": lambda ops, x: ops.undeclared_same(x),
    "rest": lambda ops, x: ops.rest(x),
    "maybe": lambda ops, x: ops.maybe(x),
    "second": lambda ops, x: ops.second(x, x),
    "halves": lambda ops, x: ops.halves(x)[1],
    "view_and_more": lambda ops, x: ops.view_and_more(x)[0],
    "real": lambda ops, x: torch.view_as_real(torch.view_as_complex(x.view(2, 4, 2))),
    "reshape": lambda ops, x: aten.reshape(x, [8, 2]),
    "contiguous": lambda ops, x: aten.contiguous(x),
    "to": lambda ops, x: aten.to.dtype(x, torch.float32),
}


@pytest.mark.sampled(2)
@ON_EACH_DEVICE
@pytest.mark.parametrize("name", SHARING)
def test_an_aliasing_result_is_a_view_of_its_operand(name: str, ops: Any, device: str) -> None:
    """What is written through one shows in the other, in the order of the graph; both may be returned."""

    def function(x: Tensor, y: Tensor) -> Any:
        shown, fresh = SHARING[name](ops, x), SHARING[name](ops, y * 2)
        before = shown.exp()
        x.add_(1)
        after = shown * 3
        shown.mul_(2)
        return before, after, x.sin(), shown, fresh, fresh + 1

    program = agreed_program(function, inputs(device), OPTIONS)
    assert program.inputs[0].ownership is Ownership.MUTABLE
    defined = [
        leaf for line in lines_of(program, ExternCall) for leaf in leaves(line.results) if isinstance(leaf, Value)
    ]
    windows = [leaf for line in lines_of(program, ExternCall) for leaf in leaves(line.results)
               if isinstance(leaf, Value) and line.alias_of(leaf) is not None]  # fmt: skip
    assert defined == windows


def test_a_fresh_result_next_to_a_view_is_a_root(ops: Any) -> None:
    """Both are tensors of one size; where each of them is, its storage tells."""

    def function(x: Tensor, y: Tensor) -> Any:
        shown, extra = ops.view_and_more(x)
        x.add_(1)
        return shown.exp(), extra * 2, extra

    (call,) = lines_of(agreed_program(function, inputs("cpu"), OPTIONS), ExternCall)
    assert [alias is None for alias in call.aliases] == [False, True]


def test_a_maybe_alias_with_another_layout_is_a_root(ops: Any) -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        copied = ops.maybe(x.t())
        again = aten.reshape(y.t(), [16])
        x.add_(1)
        y.add_(1)
        return copied * 2, again, copied

    program = agreed_program(function, inputs("cpu"), OPTIONS)
    (call,) = lines_of(program, ExternCall)
    assert not call.aliases


# --- mutating calls -------------------------------------------------------------------------------------------------


def _some(ops: Any, x: Tensor, y: Tensor) -> Any:
    return ops.add_to_some(x, y, None)


MUTATING: dict[str, tuple[Any, tuple[int, ...]]] = {
    "add_": (lambda ops, x, y: x.add_(y), (0,)),
    "add_with_alpha": (lambda ops, x, y: aten.add_.Tensor(x, y, alpha=2), (0,)),
    "an_element": (lambda ops, x, y: x[1:, 2].mul_(y[0, 0]), (0,)),
    "masked_fill_": (lambda ops, x, y: x.masked_fill_(y > 0, 2.0), (0,)),
    "foreach": (lambda ops, x, y: aten._foreach_mul_.Scalar([x, y], 2.0), (0, 1)),
    "add_to": (lambda ops, x, y: ops.add_to(x, y), (0,)),
    "add_to_a_view": (lambda ops, x, y: ops.add_to(x.t()[1:], y[0]), (0,)),
    "add_and_give": (lambda ops, x, y: ops.add_and_give(x, y), (0,)),
    "add_and_return": (lambda ops, x, y: ops.add_and_return(x, y), (0,)),
    "add_to_all": (lambda ops, x, y: ops.add_to_all([x, y], x * 2), (0, 1)),
    "add_to_some": (_some, (1,)),
    "swap": (lambda ops, x, y: ops.swap(x, y)[2], (0, 1)),
    "out": (lambda ops, x, y: aten.mul.out(y, y, out=x), (0,)),
    "out_of_a_library": (lambda ops, x, y: ops.fill(y, out=x), (0,)),
    "two_outs": (lambda ops, x, y: ops.fill_both(x.cos(), low=x, high=y)[1], (0, 1)),
    "sorted_into": (lambda ops, x, y: aten.max.dim_max(x + 1, 0, max=y[0], max_values=(x * 0).long()[0])[0], (1,)),
}


@ON_EACH_DEVICE
@pytest.mark.parametrize("name", MUTATING)
@pytest.mark.parametrize("of", ["inputs", "results"])
def test_a_mutating_call_separates_kernels_that_read_its_operand(name: str, of: str, ops: Any, device: str) -> None:
    call, written = MUTATING[name]

    def function(x: Tensor, y: Tensor) -> Any:
        if of == "results":
            x, y = x * 2, y * 3
        before, row = (x.exp(), y.exp()), x[1]
        value = call(ops, x, y)
        result = value * 2 if isinstance(value, Tensor) else None
        return before, result, x.sin(), y.sin() * 2, row

    program = agreed_program(function, inputs(device), OPTIONS)
    (line,) = [
        line for line in lines_of(program, ExternCall, Mutate)
        if isinstance(line, Mutate) or line.outs
    ]  # fmt: skip
    assert len(line.writes if isinstance(line, Mutate) else line.outs) >= len(written)
    launches = [position(program, other) for other in lines_of(program, Launch)]
    assert min(launches) < position(program, line) < max(launches)
    if of == "inputs":
        mutable = tuple([place for place, item in enumerate(program.inputs) if item.ownership is Ownership.MUTABLE])
        assert mutable == written
    else:
        assert all(item.ownership is Ownership.BORROWED for item in program.inputs)


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
def test_an_operator_may_be_registered_anew(emitter: str) -> None:
    """As by a cell of a notebook that runs again. The program is the same, the old operator's handles are freed."""
    for factor in (2.0, 3.0):
        library = Library("fxwrap_again", "DEF")
        library.define("scale_(Tensor(a!) x) -> ()")
        library.impl("scale_", lambda x, factor=factor: (x.mul_(factor), None)[1], "CompositeExplicitAutograd")
        torch.library.register_fake("fxwrap_again::scale_", lambda x: None, lib=library)
        x = torch.ones(3)
        graph = make_fx(lambda x: (torch.ops.fxwrap_again.scale_(x), x + 1)[1], tracing_mode="fake")(x.clone())
        compiled = fxwrap.compile_graph(graph, [x.clone()], options=OPTIONS.replace(emitter=emitter))
        torch.testing.assert_close(compiled.flat(x)[0], torch.full((3,), factor + 1))
        assert operator_overload("fxwrap_again.scale_.default") is torch.ops.fxwrap_again.scale_.default
        library._destroy()


def test_a_hand_written_graph_may_ignore_what_a_mutation_returns() -> None:
    """Nothing uses the node, but its operand is used, through views created before and after it."""
    graph = Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2.0))
    row = graph.call_function(aten.select.int, (doubled, 0, 1))
    graph.call_function(aten.add_.Tensor, (row, 1.0))
    graph.call_function(aten.mul_.Tensor, (doubled, 3.0))
    graph.output((graph.call_function(aten.exp.default, (doubled,)), row))
    arguments = inputs("cpu")[:1]
    module = GraphModule(nn.Module(), graph)
    assert_emitters_agree(module, arguments, options=OPTIONS)
    program = fxwrap.lower(module, arguments, options=OPTIONS)
    assert len(lines_of(program, Mutate)) == 2 and lines_of(program, View)
