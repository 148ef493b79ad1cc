"""Whether results agree with eager's: floats by their errors against float64, all else exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

NOISE = 3.0
"""How much larger than eager's largest error against float64 an error may be: where terms cancel, both are noise."""

SLACK = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Error of an element that every order of computation may have, relative to 1 + its magnitude: that of two roundings
in half precision. That of float32 also holds for float64 results that eager computes from rounded float32 values, as
its own error shows."""

HALF = (torch.float16, torch.bfloat16)
ROUNDED = (torch.float32, *HALF)
"""Dtypes whose place float64 takes in references."""


def assert_as_exact(result: Tensor, eager: Tensor, exact: Tensor, slack: float = 0.0) -> None:
    """Checks that an error beside float64 is at most 1.2 times eager's, and a slack; prints both.

    Errors are norms of differences; the slack is relative to the norm of the exact result.
    """
    assert result.dtype is eager.dtype and result.shape == eager.shape
    error, eager_error = [float((item.double() - exact).norm()) for item in (result, eager)]
    print(f"error {error:.2e}, eager's {eager_error:.2e}, of {float(exact.norm()):.2e}")
    assert error <= 1.2 * eager_error + slack * float(exact.norm())


def in_float64(module: GraphModule) -> GraphModule:
    """Returns a copy of a graph whose casts and new tensors are float64 where they are of another float dtype."""
    promoted = copy.deepcopy(module)
    for part in _graphs(promoted):
        for node in part.graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _promoted_dtype)
        part.recompile()
    return promoted


def promote(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor, in float64 where it is of another float dtype."""
    return tensor.double() if tensor.dtype in ROUNDED else tensor.clone()


def _promoted_dtype(item: object) -> object:
    return torch.float64 if item in ROUNDED else item


def _graphs(module: GraphModule) -> list[GraphModule]:
    return [part for part in module.modules() if isinstance(part, GraphModule)]


class Agreement:
    """Compares results with eager's. `exact` computes the results in float64, and is called when they are needed.

    Results in any dtype have the slack of `computed_in` if that is less precise: of the inputs from which they follow.
    """

    def __init__(
        self, wanted: Sequence[Tensor], exact: Callable[[], Sequence[Tensor]], computed_in: Sequence[torch.dtype] = ()
    ) -> None:
        self.wanted = wanted
        self._compute_exact = exact
        self._least_slack = max([SLACK[dtype] for dtype in computed_in if dtype in HALF], default=0.0)

    @cached_property
    def _exact(self) -> Sequence[Tensor]:
        return self._compute_exact()

    def holds(self, position: int, result: Tensor, noise: float = NOISE) -> bool:
        """Whether a result of eager's dtype and shape has each integer and truth value, and errors like eager's.

        Errors may be `noise` times as large as eager's largest. Elements that are not finite in eager mode, although
        its dtype has the number that float64 shows, may have any value.
        """
        want = self.wanted[position]
        if not want.dtype.is_floating_point:
            return torch.equal(result, want)
        finite = want.isfinite()
        if not bool(result[finite].isfinite().all()):
            return False
        if not self._has_infinities(position, result, ~finite):
            return False
        slack = max(SLACK[want.dtype], self._least_slack)
        return _is_within(result[finite], want[finite], slack) or self._is_as_accurate(position, result, finite, noise)

    def _has_infinities(self, position: int, result: Tensor, infinite: Tensor) -> bool:
        """Whether a result has eager's infinities and NaNs, but where eager's dtype has the number of float64."""
        want = self.wanted[position]
        if _is_same(result[infinite], want[infinite]):
            return True
        exact = self._exact[position]
        if exact.shape != want.shape:
            return False
        expected = infinite & ~exact.to(want.dtype).isfinite()
        return _is_same(result[expected], want[expected])

    def _is_as_accurate(self, position: int, result: Tensor, finite: Tensor, noise: float) -> bool:
        want, exact = self.wanted[position], self._exact[position]
        if exact.shape != want.shape:  # a comparison that rounding decides selects elements
            return False
        error = float((want[finite].double() - exact[finite]).abs().max())
        is_rounded = not _is_within(want[finite], exact[finite], SLACK[torch.float64] / 100)
        slack = max(
            SLACK[torch.float32 if is_rounded and want.dtype is torch.float64 else want.dtype], self._least_slack
        )
        return _is_within(result[finite], exact[finite], slack, noise * error)


def _is_same(result: Tensor, want: Tensor) -> bool:
    """Whether floats are equal; NaN is only equal to NaN."""
    return torch.equal(result.isnan(), want.isnan()) and torch.equal(result.nan_to_num(), want.nan_to_num())


def _is_within(result: Tensor, want: Tensor, slack: float, noise: float = 0.0) -> bool:
    result, want = result.double(), want.double()
    return bool(((result - want).abs() <= noise + slack * (1 + want.abs())).all())
