"""Conditions that a graph asserts, and inputs and positions that do not fit: the same error in every emitter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxwrap
from fxwrap import Options
from fxwrap.comparison import COMPARED_EMITTERS, CompiledFunction
from fxwrap.comparison.driver import capture
from fxwrap.errors import FxwrapError, InputError
from fxwrap.lines import Assert, ExternCall
from fxwrap.torch_compat import FakeTensorMode
from tests.lowering.control.cases import Case, Cases, random
from tests.support.long_form import sampled

CASES = Cases()
X = random(4, 6)


@CASES.add((torch.tensor(5), X))
def conditions_that_hold(n: Tensor, x: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 2, lambda: "too small")
    torch._check(k < 10)
    torch._assert_async((x < 100).all())
    torch._assert_async((x < 100).all(), "too large")
    return x * k


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES.parameters)
def test_every_emitter_matches_eager(case: Case) -> None:
    case.check("cpu")


def errors_of(function: Callable[..., Any], good: tuple[Any, ...], bad: tuple[Any, ...]) -> dict[str, tuple[type, str]]:
    """Returns what each emitter raises for bad inputs, once compiled on good ones."""
    subject = CompiledFunction(function, Options(), dynamic=False)
    torch.compiler.reset()
    errors = {}
    captured = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with captured, torch.no_grad():
        for emitter in COMPARED_EMITTERS:
            subject.call(emitter)(*good)
            with pytest.raises(Exception) as raised:
                subject.call(emitter)(*bad)
            errors[emitter] = (raised.type, str(raised.value))
    assert len(subject.graphs) == 1
    return errors


def eager_error(function: Callable[..., Any], bad: tuple[Any, ...]) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:
        function(*bad)
    return raised.type, str(raised.value)


# --- asserts --------------------------------------------------------------------------------------------------------


def test_a_failing_check_raises_the_same_error_in_every_emitter() -> None:
    def function(n: Tensor, x: Tensor) -> Tensor:
        k = (n + 0).item()  # of an input, Dynamo would guard on the number
        torch._check(k >= 2)
        return x * k

    errors = errors_of(function, (torch.tensor(3), X), (torch.tensor(1), X))
    assert set(errors.values()) == {(RuntimeError, errors["python"][1])}
    assert ">= 2" in errors["python"][1]


def assert_with_message(x: Tensor) -> Tensor:
    torch._assert_async((x < 1).all(), "an element is too large")
    return x * 2


def test_a_failing_tensor_assert_raises_eagers_error() -> None:
    errors = errors_of(assert_with_message, (torch.zeros(3),), (torch.ones(3),))
    assert set(errors.values()) == {eager_error(assert_with_message, (torch.ones(3),))}


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
def test_an_assert_without_a_message_raises_eagers_error(emitter: str) -> None:
    """AOTAutograd leaves such asserts out; a graph of one's own has them."""

    def function(x: Tensor) -> Tensor:
        torch.ops.aten._assert_async.default((x < 1).all())
        return x * 2

    compiled = fxwrap.compile_graph(make_fx(function)(torch.zeros(3)), options=Options(emitter=emitter))
    torch.testing.assert_close(compiled(torch.zeros(3))[0], torch.zeros(3))
    error, text = eager_error(function, (torch.ones(3),))
    with pytest.raises(error, match=text):
        compiled(torch.ones(3))


def test_a_check_precedes_the_checked_computation() -> None:
    """The kernel that reads up to a number runs after the number is checked, wherever its other operands are ready."""

    def function(n: Tensor, x: Tensor) -> Tensor:
        k = (n + 0).item()  # of an input, Dynamo would guard on the number
        torch._check(k >= 0)
        torch._check(k <= 4)
        return (x[:k] + 1).sin()

    errors = errors_of(function, (torch.tensor(3), X), (torch.tensor(10**9), X))
    assert {error for error, _ in errors.values()} == {RuntimeError}


def test_unused_asserts_are_preserved_unless_disabled() -> None:
    def function(n: Tensor, x: Tensor) -> Tensor:
        torch._check((n + 0).item() > 2)  # of an input, torch 2.11 drops a check that the traced number passes
        torch._assert_async((x < 100).all(), "too large")
        return x + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        checked, dropped = (
            capture(function, (torch.tensor(5), X), options=options)[0].compiled.program
            for options in (Options(), Options(runtime_asserts=False))
        )
    kinds = [type(line) for line in checked.body.lines]
    assert Assert in kinds and ExternCall in kinds
    assert not any(isinstance(line, Assert | ExternCall) for line in dropped.body.lines)
    assert dict(dropped.header)["options"].endswith("runtime_asserts=False")


# --- sizes ----------------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * x.shape[0]


@pytest.mark.parametrize("emitter", sampled(COMPARED_EMITTERS, 0, 2))
def test_a_size_outside_the_guards_range(emitter: str) -> None:
    shapes = ({0: Dim("b", min=2, max=50), 1: 2 * Dim("h", min=2, max=8)},)
    exported = torch.export.export(Doubled(), (X,), dynamic_shapes=shapes)
    compiled = fxwrap.compile_graph(exported, options=Options(emitter=emitter))
    torch.testing.assert_close(compiled(random(50, 4)), Doubled()(random(50, 4)))
    with pytest.raises(InputError, match="input 'x': size 0 must be at most 50, got 51"):
        compiled(random(51, 4))
    with pytest.raises(InputError, match="input 'x': size 1 must be at most 16, got 18"):
        compiled(random(5, 18))
    with pytest.raises(InputError, match=r"input 'x': expected f32\[5, 6\].*, got f32\[5, 7\]"):
        compiled(random(5, 7))


WRONG: dict[str, tuple[Any, str]] = {
    "too few dimensions": (random(4), r"a tensor of 2 dimensions, got f32\[4\] on cpu with strides \(1,\)"),
    "too many dimensions": (random(4, 6, 1), r"a tensor of 2 dimensions, got f32\[4, 6, 1\] on cpu"),
    "nothing": (None, "a tensor of 2 dimensions, got None"),
    "a list": ([[1.0]], "a torch.Tensor, got list"),
    "a number": (3, "a torch.Tensor, got int"),
}


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
def test_an_input_with_mismatched_sizes(emitter: str) -> None:
    graph = make_fx(lambda x, y: x.sin() + y.shape[0], tracing_mode="symbolic")(X, random(8, 5))
    compiled = fxwrap.compile_graph(graph, options=Options(emitter=emitter))
    for wrong, text in WRONG.values():
        for inputs, name in (((wrong, X), "x"), ((X, wrong), "y")):
            with pytest.raises(InputError, match=f"^input '{name}_1': expected {text}"):
                compiled(*inputs)


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
def test_a_number_outside_the_traced_guard(emitter: str) -> None:
    graph = make_fx(lambda x, n: x.reshape(n, -1) * n, tracing_mode="symbolic")(X, 4)
    compiled = fxwrap.compile_graph(graph, options=Options(emitter=emitter))
    torch.testing.assert_close(compiled(X, 4)[0], X * 4)
    with pytest.raises(InputError, match=r"input 's\d+' must be .*, got 1"):
        compiled(X, 1)


def test_a_negative_size_that_is_read() -> None:
    def function(n: Tensor) -> Tensor:
        return torch.ones((n + 0).item()) * 2

    errors = errors_of(function, (torch.tensor(3),), (torch.tensor(-1),))
    assert {error for error, _ in errors.values()} == {RuntimeError}
    assert len(set(errors.values())) == 1


# --- positions ------------------------------------------------------------------------------------------------------

AT = torch.tensor([1, 2])
OUTSIDE = torch.tensor([1, 7])
POSITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, i: x[i] * 2,
    "index_select": lambda x, i: x.index_select(0, i) * 2,
    "gather": lambda x, i: x.gather(0, i[:, None]) * 2,
    "embedding": lambda x, i: nn.functional.embedding(i, x) * 2,
    "take": lambda x, i: x.take(i * 4) * 2,
    "scatter": lambda x, i: x.scatter(0, i[:, None], 1.0) * 2,
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None], torch.ones(2, 1)) * 2,
    "index_add": lambda x, i: x.index_add(0, i, torch.ones(2, 6)) * 2,
    "index_put": lambda x, i: x.index_put((i,), torch.ones(6)) * 2,
    "select": lambda x, i: x.select(0, i[1].item()) * 2,
}


@pytest.mark.parametrize("name", POSITIONS)
def test_an_index_out_of_range_raises_eagers_error_class(name: str) -> None:
    function = POSITIONS[name]
    errors = errors_of(function, (X, AT), (X, OUTSIDE))
    assert {error for error, _ in errors.values()} == {eager_error(function, (X, OUTSIDE))[0]}


def test_an_element_of_an_empty_tensor_is_not_read() -> None:
    """The size is known only at run time, the position when the kernel is built."""

    def function(x: Tensor) -> Tensor:
        return x[x > 0][torch.zeros(3, dtype=torch.int64)] + 1

    errors = errors_of(function, (torch.ones(4),), (-torch.ones(4),))
    assert {error for error, _ in errors.values()} == {IndexError}


def test_positions_that_begin_at_a_number_are_checked() -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        k = (n + 0).item()  # of an input, Dynamo would guard on the number
        return x[torch.arange(k, k + 3)] + 1

    errors = errors_of(function, (X, torch.tensor(1)), (X, torch.tensor(-100)))
    assert {error for error, _ in errors.values()} == {IndexError}


@pytest.mark.parametrize("emitter", COMPARED_EMITTERS)
@pytest.mark.parametrize("number", ["size", "item"])
def test_a_number_that_is_asserted_to_be_a_constant_is_checked(emitter: str, number: str) -> None:
    def function(x: Tensor) -> Any:
        indices = x.nonzero()
        count = indices.size(0) if number == "size" else x.sum().item()
        torch._check(count == 4)
        return indices * 2, x.new_ones(count)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(function, backend="fxwrap", fullgraph=True, options={"emitter": emitter})
        ones = torch.ones(4, dtype=torch.int64)
        torch.testing.assert_close(compiled(ones), function(ones))
        with pytest.raises((RuntimeError, FxwrapError)):  # the interpreter checks types of results first
            compiled(torch.tensor([1, 0, 1, 1]))


def test_a_graph_without_all_metadata_is_asserted_too() -> None:
    """Propagation makes a new symbol for the size; the graph binds and asserts the old one."""

    def function(x: Tensor) -> Tensor:
        indices = x.nonzero()
        torch._check(indices.size(0) == 4)
        return indices * 2

    with FakeTensorMode(shape_env=ShapeEnv()):
        graph = make_fx(function)(torch.empty(4, dtype=torch.int64))
        other = torch.empty(4, dtype=torch.int64)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        del node.meta["val"]
    compiled = fxwrap.compile_graph(graph, [other])
    ones = torch.ones(4, dtype=torch.int64)
    torch.testing.assert_close(compiled(ones)[0], function(ones))
    with pytest.raises((RuntimeError, FxwrapError)):
        compiled(torch.tensor([1, 0, 1, 1]))
