"""A few random integer expressions; `python -m tests.lowering.integer_expressions --count 100000` checks many."""

from __future__ import annotations

import os
import random

import pytest
import torch

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
