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


def test_long_chains_are_one_kernel() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(300):
            x = (x + 1.5).t().clone(memory_format=torch.contiguous_format)
        return x

    assert len(check(function, torch.randn(3, 3)).launches) == 1


def test_what_a_call_writes_and_gives_back_is_the_operand() -> None:
    def function(x: Tensor) -> Tensor:
        return x.copy_(x.flip(0) + 1) * 2

    planned = check(function, torch.randn(4, 5))
    assert planned.calls == ["aten.copy_.default"]


def test_a_scatter_waits_for_what_its_start_is_computed_from() -> None:
    def function(x: Tensor, index: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        product = x @ x
        start = product + 1
        return start.index_put((index,), values) * 2, product.relu(), values * product.sum(0)

    check(function, torch.randn(4, 4), torch.tensor([1, 2]), torch.randn(2, 4))


def test_a_reduction_over_one_element_has_an_axis_to_run_over() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        one = x[:1].tanh()
        return one, one.sum(0)

    check(function, torch.randn(3))


def test_a_result_of_a_rule_inside_is_written_over_and_viewed() -> None:
    def function(x: Tensor) -> Tensor:
        return x.tanh().mean(0).tanh().view(3, 1)

    check(function, torch.randn(4, 3))


def test_memory_that_is_overwritten_later_is_not_taken() -> None:
    def function(x: Tensor, other: Tensor) -> Tensor:
        product = x @ x
        result = product + 1
        product.copy_(other + 1)
        return result

    check(function, torch.randn(4, 4), torch.randn(4, 4))


def test_two_writes_to_one_tensor_keep_their_order() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y - y.sum(1, keepdim=True))
        return x.copy_(y + 1)

    check(function, torch.randn(4, 4), torch.randn(4, 4))


EMPTY: dict[str, Callable[[Tensor], Any]] = {
    "a sum of a reshaped view": lambda x: x.unsqueeze(0).tanh().sum(),
    "a sum over two axes": lambda x: (x.tanh().expand(2, 0) * 2).sum(),
    "rows and their sums": lambda x: (x.new_ones(3, 0) + x, (x.new_ones(3, 0) + x).sum(1)),
    "a scan": lambda x: x.cumsum(0) + x,
}


@pytest.mark.parametrize("case", EMPTY)
def test_nothing_is_read_of_tensors_without_elements(case: str) -> None:
    planned = check(EMPTY[case], torch.randn(0))
    assert not any(buffer.extent == 0 for kernel in planned.kernels.values() for buffer in kernel.inputs)
