"""A few random integer expressions; `python -m tests.lowering.integer_expressions --count 100000` checks many."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

import fxwrap
from fxwrap.lines import ExternCall
from tests.lowering.integer_expressions import differences, draw_expressions
from tests.lowering.planned_programs import check

aten = torch.ops.aten


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_expressions_match_eager() -> None:
    seed = 0 if "CI" in os.environ else random.randrange(1 << 30)
    assert not list(differences([draw_expressions(seed, 50)]))


@pytest.mark.parametrize("name", ["and", "or", "xor"])
@pytest.mark.parametrize(("dtype", "zero"), [(torch.int16, 256), (torch.float64, 1e-60)])
def test_logic_promotes_before_it_tests(name: str, dtype: torch.dtype, zero: float) -> None:
    """A tensor of rank 0 takes the dtype of the other, in which it may be zero."""
    other = torch.int8 if dtype is torch.int16 else torch.float32
    logical = getattr(torch, f"logical_{name}")
    planned = check(logical, torch.tensor([0, 1], dtype=other), torch.tensor(zero, dtype=dtype))
    assert planned.launches


@pytest.mark.parametrize("size", [5, 1])
def test_decomposing_keeps_sizes_static(size: int) -> None:
    planned = check(lambda x: torch.rsub(x, 2).neg(), torch.arange(size))
    assert not any(kernel.symbols for kernel in planned.kernels.values())


@pytest.mark.parametrize("less", [0, 2], ids=["size", "may be zero"])
@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
def test_division_by_a_symbolic_size_is_fused(name: str, less: int) -> None:
    """Eager raises for a divisor of zero, which only sizes that the program's guards exclude are known not to be."""
    divide = getattr(torch, name)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return divide(x, y.shape[0] - less) * 2

    run = torch.compile(function, backend="fxwrap", fullgraph=True)
    for size in (3, 5):
        x, y = torch.arange(-9, 9), torch.empty(size)
        torch._dynamo.mark_dynamic(y, 0)
        torch.testing.assert_close(run(x, y), function(x, y))
    (report,) = fxwrap.inspect(run)
    assert sum(isinstance(line, ExternCall) for line in report.program.body.lines) == (1 if less else 0)
