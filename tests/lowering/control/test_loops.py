"""`while_loop` through every emitter: counters, carried numbers, symbols, asserts, gradients, no round at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from fxwrap.comparison import COMPARED_EMITTERS
from fxwrap.comparison.driver import capture
from fxwrap.compile import emit
from tests.lowering.control.cases import DEVICES, Case, Cases, random

CASES = Cases()
START = random(4, 8)


def counter(x: Tensor, start: int = 0) -> Tensor:
    return torch.full((), start, dtype=torch.int64, device=x.device)


@CASES.add((START,), long=True)
def a_tensor_counts(x: Tensor) -> Any:
    return while_loop(lambda i, a: i < 5, lambda i, a: (i + 1, a.sin() * 2), (counter(x), x * 2))


@CASES.add((START, torch.tensor(5)), (START, torch.tensor(0)))
def zero_iterations_for_some_inputs(x: Tensor, end: Tensor) -> Any:
    return while_loop(lambda i, a: i < end, lambda i, a: (i + 1, a.cos()), (counter(x), x))


@CASES.add((START,), long=True)
def a_number_counts(x: Tensor) -> Any:
    return while_loop(lambda i, a: i < 5, lambda i, a: (i + 1, a.sin() * i), (0, x))


@CASES.add((START,))
def numbers_are_computed_with(x: Tensor) -> Any:
    i, j, a = while_loop(lambda i, j, a: i + j < 40, lambda i, j, a: (i + 1, i + j * 2, a + j), (1, 2, x))
    return i, i + j, a * j


@CASES.add((START,), dynamic=True)
def as_many_rounds_as_rows(x: Tensor) -> Any:
    return while_loop(
        lambda i, a: i < a.shape[0], lambda i, a: (i + 1, a.sin() * a.shape[0] + a.shape[1]), (counter(x), x)
    )


@CASES.add((START,), dynamic=True)
def a_size_is_carried(x: Tensor) -> Any:
    return while_loop(lambda i, a: i > 0, lambda i, a: (i - 1, a * i), (x.shape[0], x))


@CASES.add((START, random(8, 8)))
def closures_and_constants(x: Tensor, w: Tensor) -> Any:
    y = w.sum(0)
    scale = torch.tensor([0.5] * 8, device=x.device)
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, (a @ w + y) * scale), (counter(x), x))[1]


@CASES.add((START,))
def until_a_number_read_in_the_body(x: Tensor) -> Any:
    return while_loop(lambda a: a.abs().max() > 0.1, lambda a: (a / 2,), (x,))


@CASES.add((START,))
def carried_values_are_swapped(x: Tensor) -> Any:
    """The next values are the old ones and a view: each is copied before it is overwritten."""
    return while_loop(lambda i, a, b: i < 3, lambda i, a, b: (i + 1, b.clone(), a.clone()), (counter(x), x, x.flip(0)))


@CASES.add((START,))
def a_loop_in_a_loop(x: Tensor) -> Any:
    def body(i: Tensor, a: Tensor) -> Any:
        return i + 1, while_loop(lambda j, b: j < i, lambda j, b: (j + 1, b.sin() + j), (counter(x), a))[1]

    return while_loop(lambda i, a: i < 3, body, (counter(x), x))


@CASES.add((START,))
def a_number_read_in_each_round(x: Tensor) -> Any:
    def body(i: Tensor, a: Tensor) -> Any:
        return i + 1, a * (a > 0).sum().item()

    return while_loop(lambda i, a: i < 2, body, (counter(x), x))


@CASES.add((START,))
def sizes_bound_in_each_iteration(x: Tensor) -> Any:
    return while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a + a[a > 0].sin().sum() + a.nonzero().shape[0]), (counter(x), x)
    )


@CASES.add((START,))
def random_numbers_in_each_round(x: Tensor) -> Any:
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a + torch.rand_like(a)), (counter(x), x))[1]


@CASES.add((random(8, 8, gradient=True),), training=True, long=True)
def training(w: Tensor) -> Tensor:
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.sin() * 2), (counter(w), w))[1]


@CASES.add((START, random(8, 8, gradient=True)), training=True, dynamic=True)
def training_with_symbols(x: Tensor, w: Tensor) -> Tensor:
    """The backward reads `sym_size` of the stacked tensors, in its condition and its body."""
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, (a @ w * 0.1).sin() * a.size(0)), (counter(x), x))[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.parameters)
def test_while_loop(case: Case, device: str) -> None:
    case.check(device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_failing_assert_in_a_body_has_the_same_message_everywhere(device: str) -> None:
    def function(x: Tensor) -> Any:
        def body(i: Tensor, a: Tensor) -> Any:
            most = (a > 0).sum().item()
            torch._check(most < 30, lambda: "too many are positive")
            return i + 1, a + 1

        return while_loop(lambda i, a: i < 5, body, (counter(x), x))[1]

    x = random(4, 8).to(device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        (graph,) = capture(function, (x - 100,))
    messages = set()
    for emitter in COMPARED_EMITTERS:
        call = emit(graph.compiled.program, emitter)
        call(x - 100)
        with pytest.raises(RuntimeError) as raised:
            call(x)
        messages.add(str(raised.value))
    # What torch makes of the check comes before the check itself.
    assert len(messages) == 1 and messages.pop().startswith("Runtime assertion failed for expression u")
