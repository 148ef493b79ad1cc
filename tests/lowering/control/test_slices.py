"""`scan`, `map` and `associative_scan` through every emitter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from fxwrap.testing import assert_emitters_agree
from tests.lowering.control.cases import DEVICES, Case, Cases, TorchRejection, random
from tests.support.versions import is_before

CASES = Cases()
ROWS, WEIGHTS = random(5, 8), random(8, 8, seed=1, gradient=True)

SOME_WITHOUT_GRADIENT = TorchRejection("2.13", "scan might be aliasing the input or the output")
"""In 2.11, the backward's body returns its own operands as the zero gradients of such operands."""


def _tanh(carried: Tensor, row: Tensor) -> Any:
    new = (carried + row).tanh()
    return new, new * 2


@CASES.add((ROWS,), (ROWS[:1],), long=True)
def over_rows(x: Tensor) -> Any:
    return scan(_tanh, x.new_zeros(8), x)


@CASES.add((ROWS,))
def reversed_along_the_second_dimension_over_trees(x: Tensor) -> Any:
    """One compile for three scans, which share nothing."""

    def combine(carried: Any, row: Any) -> Any:
        new = {"a": carried["a"] + row[0], "b": carried["b"] * row[1].sum()}
        return new, (new["a"].sum(), {"row": row[0] * 2})

    trees = scan(combine, {"a": x.new_zeros(8), "b": x.new_ones(3)}, (x, x.t()[:5].contiguous()))
    return trees, scan(_tanh, x.new_zeros(8), x, reverse=True), scan(_tanh, x.new_zeros(5), x, dim=1)


@CASES.add((ROWS, WEIGHTS.detach()), dynamic=True)
def with_symbols_and_closures(x: Tensor, w: Tensor) -> Any:
    scale = torch.tensor([0.5] * 8, device=x.device)

    def combine(carried: Tensor, row: Tensor) -> Any:
        new = (carried @ w + row * scale).tanh() * x.shape[0]
        return new, new.sum()

    return scan(combine, x.new_zeros(8), x)


@CASES.add((ROWS, WEIGHTS), training=True, rejection=SOME_WITHOUT_GRADIENT, long=True)
def scan_in_training(x: Tensor, w: Tensor) -> Any:
    def combine(carried: Tensor, row: Tensor) -> Any:
        new = (carried @ w + row).tanh()
        return new, new * 2

    return scan(combine, x.new_zeros(8), x)


@CASES.add((ROWS.clone().requires_grad_(), WEIGHTS), training=True, dynamic=True)
def scan_in_training_with_symbols(x: Tensor, w: Tensor) -> Any:
    """Everything has a gradient."""
    return scan(lambda carried, row: ((carried @ w).sin() + row, carried.exp()), x.sum(0), x)[1]


@CASES.add((ROWS, torch.tensor(3)), (ROWS, torch.tensor(-3)))
def a_cond_in_a_while_in_a_scan(x: Tensor, end: Tensor) -> Any:
    def combine(carried: Tensor, row: Tensor) -> Any:
        def body(i: Tensor, a: Tensor) -> Any:
            return i + 1, torch.cond(a.sum() > 0, lambda b: b - row, lambda b: b * 0.5 + carried, (a,))

        new = while_loop(lambda i, a: i < end, body, (torch.zeros((), dtype=torch.int64, device=x.device), row * 2))[1]
        return new, new.sum()

    return scan(combine, x.new_zeros(8), x)


@CASES.add((ROWS, WEIGHTS.detach()), (ROWS[:1], WEIGHTS.detach()), long=True)
def map_rows(x: Tensor, w: Tensor) -> Any:
    return map_over(lambda row, w: (row * w[0] + row.shape[0]).sin(), x, w)


@CASES.add((ROWS, WEIGHTS), training=True)
def map_in_training(x: Tensor, w: Tensor) -> Any:
    return map_over(lambda row, w: (row @ w).sin(), x, w)


@CASES.add((ROWS,), dynamic=True)
def map_trees_with_symbols(x: Tensor) -> Any:
    count, other = x.shape[0], x.cos()
    return map_over(lambda rows: (rows[0] + rows[1].sum(), (rows[0] * rows[1] * count, rows[1].sum())), (x * 2, other))


@CASES.add((ROWS,), long=True)
def generic_associative_scans_of_reversed_trees(x: Tensor) -> Any:
    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    plain = associative_scan(lambda a, b: a * b + a, x, 0, combine_mode="generic")
    return plain, associative_scan(combine, (x, x * 2), 1, reverse=True, combine_mode="generic")


@CASES.add((random(5, 8, gradient=True),), training=True)
def generic_associative_scan_in_training(x: Tensor) -> Any:
    return associative_scan(torch.add, x, 0, combine_mode="generic")


def _pointwise_scan(combine: Any, *xs: Tensor) -> Any:
    """What `associative_scan` calls with `combine_mode="pointwise"`; the operator, unlike it, also takes the CPU."""
    return torch.ops.higher_order.associative_scan(combine, list(xs), ())


@CASES.add((ROWS[:, :4],), (random(2, 1),))
def pointwise_associative_scans_of_any_length(x: Tensor) -> Any:
    sums = _pointwise_scan(lambda a, b: [a + b], x)
    products = _pointwise_scan(lambda a, b, c, d: [a * c, b * c + d], x.sin(), x)
    return sums, products[1] * 2, _pointwise_scan(lambda a, b: [torch.where(a > b, a, b * 0.5 + 1)], x.t())


@CASES.add((ROWS,), dynamic=True, long=True)
def pointwise_associative_scans_with_symbols(x: Tensor) -> Any:
    products = _pointwise_scan(lambda a, b, c, d: [a * c, b * c + d], x.sin(), x * 2)
    (largest,) = _pointwise_scan(lambda a, b: [torch.maximum(a, b)], x.t())
    return products[0], products[1] + 1, largest.t()


@CASES.add((random(5, 8, gradient=True),), training=True)
def pointwise_associative_scan_in_training(x: Tensor) -> Any:
    return _pointwise_scan(lambda a, b: [a * b], x.cos())[0] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.parameters)
def test_scan_and_map(case: Case, device: str) -> None:
    case.check(device)


@pytest.mark.parametrize("emitter", ["interpreter", "python", "fx"])
def test_slices_with_a_symbolic_stride_are_copied(emitter: str) -> None:
    """The body of a scan over columns expects contiguous ones."""

    def function(x: Tensor) -> Any:
        return scan(lambda carried, column: (carried + column, carried * column), x[:, 0].clone(), x, dim=1)

    compiled = torch.compile(function, backend="fxwrap", dynamic=True, options={"emitter": emitter})
    for x in (ROWS, random(3, 4)):
        torch.testing.assert_close(compiled(x), function(x))


def test_a_pointwise_associative_scan_on_cpu_does_what_torch_does() -> None:
    def function(x: Tensor) -> Tensor:
        return associative_scan(torch.add, x, 0, combine_mode="pointwise")

    if not is_before("2.14"):
        assert_emitters_agree(function, (ROWS,))
        return
    errors = []
    for backend in ("eager", "fxwrap"):
        with pytest.raises(Exception, match="all input tensors need to be on CUDA or XPU") as raised:
            torch.compile(function, backend=backend, fullgraph=True)(ROWS)
        errors.append(raised.type)
    assert errors[0] is errors[1]


def _sums_along_the_rows(x: Tensor) -> Any:
    return associative_scan(torch.add, x, 1, combine_mode="pointwise")


def _reversed_trees(x: Tensor) -> Any:
    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    return associative_scan(combine, (x, x * 2), 0, reverse=True, combine_mode="pointwise")


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [_sums_along_the_rows, _reversed_trees])
def test_a_pointwise_associative_scan_on_a_gpu(function: Any, dynamic: bool) -> None:
    assert_emitters_agree(function, (ROWS.cuda(),), dynamic=dynamic)
