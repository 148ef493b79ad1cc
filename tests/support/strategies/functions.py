"""Functions as models write them, which Dynamo traces: with branches, loops, views, modules and several lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tests.support.agreement import promote

Compile: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What compiles a function, or returns it as it is."""


@dataclass(frozen=True, repr=False)
class RandomFunction:
    """A function that returns tensors, and the inputs of several runs through one compile.

    Fields:
        function: takes the inputs and returns a tuple of tensors; its casts follow the dtypes of its inputs.
        runs: the inputs of each run, whose sizes may differ.
        text: how it was drawn.
        reference: the same in eager mode's operators, where eager mode cannot differentiate the function.
        is_training: whether the results are differentiated.
    """

    function: Callable[..., Any]
    runs: Sequence[tuple[Any, ...]]
    text: str = ""
    reference: Callable[..., Any] | None = None
    is_training: bool = True

    def __repr__(self) -> str:
        shapes = [", ".join([_describe(item) for item in run]) for run in self.runs]
        return "\n".join([self.text, *shapes])

    def results(self, inputs: Sequence[Any], compile_function: Compile | None = None) -> list[Tensor]:
        """Returns results and gradients of a run; those of the reference without `compile_function`."""
        function = (self.reference or self.function) if compile_function is None else compile_function(self.function)
        if self.is_training:
            return gradients(function, inputs)
        with torch.no_grad():
            return [item for item in function(*map(_clone, inputs)) if isinstance(item, Tensor)]

    def exact_results(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Returns the results in float64."""
        return self.results([promote(item) if isinstance(item, Tensor) else item for item in inputs])


def gradients(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Returns the results of a function and the gradients of its inputs, for fixed random ones of the results."""
    leaves = [_leaf(item) if isinstance(item, Tensor) else item for item in inputs]
    results = [item for item in function(*leaves) if isinstance(item, Tensor)]
    generator = torch.Generator().manual_seed(1)
    total: Any = sum(
        [
            (item * torch.randn(item.shape, generator=generator).to(item.dtype)).sum()
            for item in results if item.requires_grad
        ]
    )  # fmt: skip
    if isinstance(total, Tensor):
        total.backward()
    differentiated = [item.grad for item in leaves if isinstance(item, Tensor)]
    return [*[item.detach() for item in results], *[item for item in differentiated if item is not None]]


def _leaf(item: Tensor) -> Tensor:
    return item.clone().requires_grad_(item.dtype.is_floating_point)


def _clone(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) else item


def _describe(item: Any) -> str:
    return f"{item.dtype}{list(item.shape)} by {list(item.stride())}" if isinstance(item, Tensor) else repr(item)
