"""Accuracy of reductions over long rows, each fused with kernels of every other kind, against float64.

    python -m tests.lowering.accuracy --seed 1 --count 300
    python -m tests.lowering.accuracy --device cuda --count 100

A case reduces a tensor in several ways and computes something else of it in the same graph. An error may be twice
eager's, or a few units in the last place of the result's dtype; that of a product of n factors also the square root of
n units of float32, because each multiplication rounds, in any order, and so may that of n terms that a GPU adds to one
element with atomic operations: their order, and with it the error of eager mode too, changes from run to run. Triton's
interpreter scans n elements one after the other, so that all n roundings may add up. An element within the same bound
of the largest number of the dtype may be infinite or not.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxwrap
from fxwrap import Options

UNITS_IN_LAST_PLACE = 4
"""The error that is accepted where eager's is smaller, because results are rounded several times. The reference of
float64 is as inexact, so each element may contribute one unit."""


def _factors(x: Tensor) -> Tensor:
    """Returns numbers close to 1 that float32 represents exactly: a product multiplies the errors of its factors.

    Each error is as large as the rounding of a number close to 1, whatever computes it. Those of equal factors are
    equal, and their product is then wrong by their number times that, in eager mode too.
    """
    return x.round() * 2**-23 + 1


REDUCTIONS: Mapping[str, Callable[[Tensor, int], Tensor | tuple[Tensor, ...]]] = {
    "sum": lambda x, dim: x.sum(dim),
    "nansum": lambda x, dim: x.nansum(dim),
    "mean": lambda x, dim: x.mean(dim),
    "var": lambda x, dim: x.var(dim),
    "std": lambda x, dim: x.std(dim),
    "var_mean": lambda x, dim: torch.var_mean(x, dim, correction=0),
    "norm": lambda x, dim: x.norm(dim=dim),
    "norm1": lambda x, dim: x.norm(1, dim=dim),
    "norm3": lambda x, dim: x.norm(3, dim=dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "prod": lambda x, dim: _factors(x).prod(dim),
    "amax": lambda x, dim: x.amax(dim),
    "argmin": lambda x, dim: x.argmin(dim),
    "whole_sum": lambda x, dim: x.sum(),
    "other_sum": lambda x, dim: x.sum(-1 if dim == 0 else 0),
    "squares": lambda x, dim: (x * x).sum(dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "normalized": lambda x, dim: (x - x.mean(dim, keepdim=True)) / (x.std(dim, keepdim=True) + 1),
    "layer_norm": lambda x, dim: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "sum_of_scan": lambda x, dim: x.cumsum(dim).mean(dim),
    "sum_of_maxima": lambda x, dim: x.cummax(dim).values.sum(dim),
}

NEIGHBOURS: Mapping[str, Callable[[Tensor, int], Tensor | tuple[Tensor, ...]]] = {
    "nothing": lambda x, dim: (),
    "pointwise": lambda x, dim: (x * 2).exp(),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "cumprod": lambda x, dim: _factors(x).cumprod(dim),
    "cummax": lambda x, dim: tuple(x.cummax(dim)),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "transposed": lambda x, dim: x.t().contiguous() + 1,
    "concatenated": lambda x, dim: torch.cat([x, x + 1], dim),
    "padded": lambda x, dim: torch.constant_pad_nd(x, [1, 2], 0.5),
    "gathered": lambda x, dim: x.index_select(dim, torch.arange(x.shape[dim] - 1, -1, -1, device=x.device)),
    "scattered": lambda x, dim: x.scatter_add(dim, (x > 0.5).long(), x),
    "masked": lambda x, dim: x.triu() if x.ndim == 2 else torch.where(x > 0.5, x, 0.0),
    "slices": lambda x, dim: (x[1:] + x[:-1], x[::2] * 2),
    "sorted": lambda x, dim: x.sort(dim).values,
}

PRODUCTS, SCANS = ("prod", "cumprod"), ("cumsum", "cumprod", "logcumsumexp", "sum_of_scan")
ATOMIC_SUMS = ("scattered",)

SHAPES = ((1 << 18,), (3, 70001), (70001, 3), (40, 4190), (4190, 40), (1 << 22,), (257, 129))

VALUES: Mapping[str, Callable[..., Tensor]] = {
    "uniform": lambda shape: torch.rand(shape) + 0.1,
    "normal": lambda shape: torch.randn(shape) + 0.5,
    "shifted": lambda shape: torch.randn(shape) + 30,
    "equal": lambda shape: (torch.randn((*shape[:-1], 1)) + 2).expand(shape).contiguous(),
}
"""The operand's elements. Their sums are much larger than the rounding errors of terms that cancel."""


@dataclass(frozen=True)
class Case:
    """Reductions of one tensor along a dimension, and a neighbour."""

    reductions: tuple[str, ...]
    neighbour: str
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    values: str

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Computes the results of all."""
        return tuple([result for _, result in self.named_results(x)])

    def named_results(self, x: Tensor) -> list[tuple[str, Tensor]]:
        """Returns each result with the name of the reduction or neighbour."""
        functions = [
            *[(name, REDUCTIONS[name]) for name in self.reductions],
            (self.neighbour, NEIGHBOURS[self.neighbour]),
        ]
        results = [(name, function(x, self.dim)) for name, function in functions]
        return [(name, item) for name, part in results for item in (part if isinstance(part, tuple) else (part,))]

    def tolerance(self, name: str, kernels: str) -> float:
        """Returns the error of a result that is accepted where eager's is smaller, by the language of CPU kernels."""
        if self.dtype is torch.float64:
            return torch.Size(self.shape).numel() * torch.finfo(self.dtype).eps
        count, roundings = self.shape[self.dim], 0.0
        if kernels == "triton" and name in SCANS:
            roundings = count
        elif name in PRODUCTS or (kernels == "" and name in ATOMIC_SUMS):
            roundings = count**0.5
        return UNITS_IN_LAST_PLACE * (torch.finfo(self.dtype).eps + roundings * torch.finfo(torch.float32).eps)


def draw_cases(seed: int, count: int, largest: int = 1 << 22) -> Iterator[Case]:
    """Yields random cases of tensors with at most `largest` elements."""
    choice = random.Random(seed)
    shapes = [shape for shape in SHAPES if torch.Size(shape).numel() <= largest]
    for _ in range(count):
        shape = choice.choice(shapes)
        neighbours = [name for name in NEIGHBOURS if len(shape) == 2 or name != "transposed"]
        dim = choice.randrange(len(shape))
        yield Case(
            tuple(choice.sample([*REDUCTIONS], choice.randint(1, 3))), choice.choice(neighbours), shape, dim,
            choice.choice([torch.float32] * 4 + [torch.float16, torch.bfloat16, torch.float64]),
            choice.choice([*VALUES]),
        )  # fmt: skip


def excess_errors(case: Case, options: Options, device: str = "cpu") -> list[str]:
    """Returns a line for each result whose error exceeds the bound."""
    torch.manual_seed(0)
    x = VALUES[case.values](case.shape).to(case.dtype).to(device)
    eager, reference = case.named_results(x), case(x.double())
    compiled = fxwrap.compile_graph(make_fx(case)(x), (x,), options=options)(x)
    lines = []
    for number, (actual, (name, expected), exact) in enumerate(zip(compiled, eager, reference, strict=True)):
        tolerance = case.tolerance(name, options.cpu_kernels if device == "cpu" else "")
        is_finite = actual.isfinite()
        certain = ~_is_close_to_overflow(exact, actual.dtype, tolerance)
        rounded = [item.to(actual.dtype).isfinite() for item in (expected, exact)]
        if not any(torch.equal(is_finite & certain, item & certain) for item in rounded):
            lines.append(f"{case}: result {number}: other elements are finite")
            continue
        compared = is_finite & certain
        actual, expected, exact = [torch.where(compared, item, 0) for item in (actual, expected, exact)]
        error, other = _relative_error(actual, exact, x), _relative_error(expected, exact, x)
        bound = max(2 * other, tolerance)
        if actual.dtype != expected.dtype or not error <= bound:
            lines.append(f"{case}: result {number}: error {error:.1e}, eager's {other:.1e}")
    return lines


def _is_close_to_overflow(exact: Tensor, dtype: torch.dtype, tolerance: float) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros_like(exact, dtype=torch.bool)
    return (exact.abs() / torch.finfo(dtype).max - 1).abs() <= tolerance


def _relative_error(actual: Tensor, expected: Tensor, x: Tensor) -> float:
    """Returns the relative norm of the error; of results that should be 0, relative to the operand's elements."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else 1.0
    zeros = expected.norm() < torch.finfo(x.dtype).eps * expected.numel() ** 0.5
    scale = x.double().abs().mean() * expected.numel() ** 0.5 if zeros else expected.norm()
    return ((actual.double() - expected).norm() / scale).item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs random cases; returns 1 if an error exceeds the bound, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", default="cpp", help="of programs on a CPU: cpp or triton")
    chosen = parser.parse_args(arguments)
    options = Options(fallback="error", cpu_kernels=chosen.kernels)
    largest = 1 << 22 if chosen.kernels == "cpp" else 1 << 13
    failed = 0
    for number, case in enumerate(draw_cases(chosen.seed, chosen.count)):
        if chosen.kernels == "triton":
            case = replace(case, shape=tuple([min(size, largest) for size in case.shape]))
        lines = excess_errors(case, options, chosen.device)
        failed += bool(lines)
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)
        if number % 20 == 19:
            print(f"{number + 1} of {chosen.count}, {failed} failed", file=sys.stderr, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
