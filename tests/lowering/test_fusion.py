"""Fusion, rule by rule: what one kernel computes, what it must not, and that the numbers are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lowering.planned import check

ORDERED: dict[str, Callable[[Tensor], Any]] = {
    "scan of the flipped": lambda x: (x.cumsum(1), x.flip(1).cumsum(1)),
    "scan after its flip": lambda x: (x.flip(1).cumsum(1), x.cumsum(1)),
    "position in the flipped": lambda x: (x.argmax(1), x.flip(1).argmax(1)),
    "position after a flipped sum": lambda x: (x.flip(1).sum(1), x.argmax(1)),
    "position before a flipped sum": lambda x: (x.flip(1).argmin(1), x.sum(1)),
    "position after a permuted sum": lambda x: (x.t().sum(), x.argmax()),
    "position before a permuted sum": lambda x: (x.argmax(), x.t().sum()),
    "positions in two orders": lambda x: (x.argmax(), x.t().argmax()),
}


@pytest.mark.parametrize("case", ORDERED)
def test_what_depends_on_the_order_of_reduced_axes_keeps_it(case: str) -> None:
    x = torch.randperm(35, generator=torch.Generator().manual_seed(3)).reshape(5, 7).float()
    check(ORDERED[case], x)
